"""Films: frames come in, and only what changed is computed."""

from texvlm.video.film import Film, frames

__all__ = ["Film", "frames"]
