"""Films: frames come in, and only what changed is computed."""

from texvlm.video.cache import CarryRule, TemporalCache
from texvlm.video.film import Film, frames
from texvlm.video.results import VideoStats, VideoTokens
from texvlm.video.stream import VideoStream

__all__ = ["CarryRule", "Film", "TemporalCache", "VideoStats", "VideoStream", "VideoTokens", "frames"]
