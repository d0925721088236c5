"""How fast are the cells of 1024 x 1024 found that their neighbours predict, against torch along diagonals and a copy of the picture?

The reference is the same rule in torch, a diagonal of cells at a time. The limit is memory: where cells are predicted every pixel must be
read once, which a copy of half the picture moves as many bytes for. Kept cells cost less: a row of pixels often tells them apart.
"""

from __future__ import annotations

import sys

import torch

import texvlm
from benchmarks._harness import US, Bench
from texvlm import reference

SIDE, CELL = 1024, 16
GROUP = 32  # pixels along a side of what Qwen3-VL makes one token of


def screenshot(side: int) -> torch.Tensor:
    """Flat windows with lines of small glyphs, uint8 [1, 3, side, side]."""
    image = torch.full((1, 3, side, side), 240, dtype=torch.uint8)
    for _ in range(6):
        y, x = (int(torch.randint(side // 2, ())) for _ in range(2))
        colour = torch.randint(256, (3, 1, 1), dtype=torch.uint8)
        window = image[0, :, y : y + side // 2, x : x + side // 2]
        window[:] = colour
        for line in range(8, window.shape[1] - 16, 24):
            glyphs = torch.rand(12, window.shape[2] // 2) < 0.4
            window[:, line : line + 12, : glyphs.shape[1]][:, glyphs] = 255 - colour[..., 0]
    return image


def per_cell_loop(image: torch.Tensor, cell: int, bound: float) -> torch.Tensor:
    """The rule as a Python loop over cells, with an answer from the tensors at each: how a bounded mode is written elsewhere."""
    rows, columns = image.shape[-2] // cell, image.shape[-1] // cell
    cells = image[0].float().unflatten(1, (rows, cell)).unflatten(3, (columns, cell)).permute(1, 3, 0, 2, 4).flatten(2)
    source = torch.arange(rows * columns).view(rows, columns)
    for y in range(rows):
        for x in range(columns):
            for dy, dx in ((0, 1), (1, 0), (1, 1)):
                if y >= dy and x >= dx:
                    earlier = int(source[y - dy, x - dx])
                    if bool(((cells[y, x] - cells[earlier // columns, earlier % columns]).abs() <= bound).all()):
                        source[y, x] = earlier
                        break
    return source.flatten()[None]


def lossless(bench: Bench) -> None:
    """Cells of 32 pixels of a page of 2048 x 2048, as a token reducer asks for them: without loss, and within a bound."""
    page = screenshot(2 * SIDE)
    exact = bench.compare(
        "a screenshot of 2048 x 2048, cells of 32, without loss",
        {US: lambda: texvlm.predict_cells(page, GROUP)},
        moves=page.nbytes,
    )
    bench.gate("without loss: times as long as a copy that moves its bytes", exact.against_copy, at_most=1.5)
    bound = 4 / 255
    assert torch.equal(per_cell_loop(page, GROUP, 4), texvlm.predict_cells(page, GROUP, bound))
    within = bench.compare(
        "the same within 4 of 255 steps",
        {
            US: lambda: texvlm.predict_cells(page, GROUP, bound),
            "a Python loop over cells": lambda: per_cell_loop(page, GROUP, 4),
        },
    )
    bench.gate("within a bound: times as fast as a Python loop over cells", within.ratio("a Python loop over cells"), at_least=50)


def main() -> int:
    bench = Bench(__doc__)
    windows = screenshot(SIDE)
    ramp = torch.linspace(0, 1, SIDE).expand(1, 3, SIDE, SIDE) + 0.01 * torch.rand(1, 3, SIDE, SIDE)
    pictures = {
        "screenshot, uint8": (windows, 0.0),
        "screenshot, uint8, within 4 steps": (windows, 4 / 255),
        "screenshot, float32": (windows.float() / 255, 0.0),
        "screenshot, uint8, channels last": (windows.contiguous(memory_format=torch.channels_last), 0.0),
        "ramp with noise, within 0.05": (ramp, 0.05),
        "noise": (torch.rand(1, 3, SIDE, SIDE), 0.0),
        "one colour": (torch.full((1, 3, SIDE, SIDE), 0.5), 0.0),
    }
    against_torch, against_copy = [], []
    for name, (image, bound) in pictures.items():
        source = texvlm.predict_cells(image, CELL, bound)
        wrong = int((source != reference.predict_cells(image, CELL, bound)).sum())
        kept = int((source == torch.arange(source.shape[1])).sum())
        calls = {
            US: lambda i=image, b=bound: texvlm.predict_cells(i, CELL, b),
            "torch, diagonals": lambda i=image, b=bound: reference.predict_cells(i, CELL, b),
        }
        times = bench.compare(f"{name}: {kept} of {source.shape[1]} cells are kept", calls, moves=image.nbytes)
        bench.gate("cells that differ from the reference's", wrong, at_most=0)
        bench.gate("times as fast as torch, diagonals", times.ratio("torch, diagonals"), at_least=20)
        against_torch.append(times.ratio("torch, diagonals"))
        against_copy.append(times.against_copy)
    lossless(bench)
    bench.figure("times as long as a copy", dict(zip(pictures, against_copy)))
    return bench.finish(
        f"{min(against_torch):.0f} to {max(against_torch):.0f} times as fast as torch along diagonals, "
        f"{min(against_copy):.1f} to {max(against_copy):.1f} times as long as a copy that moves the picture's bytes"
    )


if __name__ == "__main__":
    sys.exit(main())
