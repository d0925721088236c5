"""How much faster is a texture brought up to the next frame, tile by tile, than built anew?

720p, uint8 in, float32 texels out; two frames that differ in the dirty tiles alone take turns. A blob moves on by a tile, so that motion
returns to 0 behind it; scattered tiles flicker in place. Full builds have the frame before as `previous`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import torch

import texvlm
from benchmarks._harness import US, Bench, Times
from benchmarks.distance import textured

HEIGHT, WIDTH = 720, 1280
LEVELS = texvlm.level_count(HEIGHT, WIDTH)
LOCAL = list(texvlm.LOCAL)
FULL, FRESH = "all anew", "all anew, into fresh memory"


def blob(tile: int, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiles in a rectangle like the picture, and the same one tile to the left."""
    rows, columns = -(-HEIGHT // tile), -(-WIDTH // tile)
    tall, wide = (max(1, round(n * math.sqrt(share))) for n in (rows, columns))
    dirty = torch.zeros(1, rows, columns, dtype=torch.bool)
    dirty[:, (rows - tall) // 2 : (rows + tall) // 2, (columns - wide) // 2 : (columns + wide) // 2] = True
    return dirty, dirty.roll(-1, 2)


def scattered(tile: int, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Exactly this share of the tiles, anywhere."""
    rows, columns = -(-HEIGHT // tile), -(-WIDTH // tile)
    dirty = torch.zeros(rows * columns, dtype=torch.bool)
    dirty[torch.randperm(rows * columns)[: round(share * rows * columns)]] = True
    dirty = dirty.view(1, rows, columns)
    return dirty, dirty


def film(dirty: torch.Tensor, tile: int) -> list[torch.Tensor]:
    """Two frames that differ in these tiles."""
    still = (textured(WIDTH)[..., :HEIGHT, :] * 255).to(torch.uint8)
    inside = dirty.repeat_interleave(tile, 1).repeat_interleave(tile, 2)[:, None, :HEIGHT, :WIDTH]
    return [still, torch.where(inside, 255 - still, still)]


def in_turn(call: Callable[[torch.Tensor, torch.Tensor], object], frames: list[torch.Tensor]) -> Callable[[], object]:
    """Calls with a frame and the one before it."""
    at = [0]

    def run() -> object:
        at[0] ^= 1
        return call(frames[at[0]], frames[1 - at[0]])

    return run


def local_row(bench: Bench, title: str, tiles: tuple[torch.Tensor, torch.Tensor], tile: int) -> Times:
    """Against a full build of the local channels, into the memory of the one before, and into new memory."""
    dirty, before = tiles
    frames = film(dirty, tile)
    texture, planes = texvlm.build_channels(frames[0], channels=LOCAL), texvlm.channel_planes(frames[0])
    texvlm.update_channels(texture, planes, frames[0], dirty, before, tile, first=True)
    ops = torch.ops.texvlm

    def fresh(now: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        texvlm.empty_cache()
        return ops.build_channels(now, LOCAL, LEVELS, [], [], None, last)

    calls = {
        US: lambda now, last: ops.update_channels(texture.data, planes, now, dirty, before, LOCAL, LEVELS, tile),
        FULL: lambda now, last: ops.build_channels(now, LOCAL, LEVELS, [], [], None, last),
        FRESH: fresh,
    }
    return bench.compare(title, {name: in_turn(call, frames) for name, call in calls.items()}, seconds=2)


def saliency_row(bench: Bench, title: str, tiles: tuple[torch.Tensor, torch.Tensor], tile: int) -> float:
    """Times as fast as `saliency` of the whole picture."""
    dirty, before = tiles
    frames = film(dirty, tile)
    state = texvlm.saliency_state(frames[0])
    texvlm.update_saliency(frames[0], *state, dirty, before, tile, first=True)
    calls = {
        US: lambda now, last: texvlm.update_saliency(now, *state, dirty, before, tile),
        FULL: lambda now, last: texvlm.saliency(now, last),
    }
    return bench.compare(title, {name: in_turn(call, frames) for name, call in calls.items()}, seconds=2).ratio(FULL)


def main() -> int:
    bench = Bench(__doc__)
    torch.set_num_threads(bench.args.threads or 2)
    local, fresh = {}, {}
    for title, tiles, tile in [
        ("one blob, 1 %", blob(16, 0.01), 16),
        ("one blob, 5 %", blob(16, 0.05), 16),
        ("one blob, 20 %", blob(16, 0.2), 16),
        ("scattered 16 px, 1 %", scattered(16, 0.01), 16),
        ("scattered 16 px, 5 %", scattered(16, 0.05), 16),
        ("scattered 32 px, 5 %", scattered(32, 0.05), 32),
        ("scattered 16 px, 20 %", scattered(16, 0.2), 16),
        ("all", blob(16, 1), 16),
    ]:
        times = local_row(bench, f"local channels, all mips: {title}", tiles, tile)
        local[title], fresh[title] = times.ratio(FULL), times.ratio(FRESH)
    bench.gate("local channels, one blob, 5 %: times as fast", local["one blob, 5 %"], at_least=8)
    bench.gate("the same, scattered 16 px, 5 %", local["scattered 16 px, 5 %"], at_least=2.5)
    bench.gate("the same, scattered 16 px, 5 %, as a full build into fresh memory", fresh["scattered 16 px, 5 %"], at_least=2.5)
    bench.gate("local channels, all dirty: of the time of a full build", 1 / local["all"], at_most=1.05)
    salience = {
        title: saliency_row(bench, f"saliency: {title}", tiles, tile)
        for title, tiles, tile in [("one blob, 3 %", blob(16, 0.03), 16), ("scattered 32 px, 3 %", scattered(32, 0.03), 32)]
    }
    bench.gate("saliency, one blob, 3 %: times as fast", salience["one blob, 3 %"], at_least=4)
    bench.figure("times as fast", local | {f"saliency, {title}": value for title, value in salience.items()})
    shares = ", ".join(f"{value:.1f} ({title})" for title, value in local.items())
    return bench.finish(f"times as fast: {shares}; saliency {salience['one blob, 3 %']:.1f} (one blob, 3 %)")


if __name__ == "__main__":
    sys.exit(main())
