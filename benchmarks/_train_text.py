"""Trains the weights of texvlm.text_regions on generated documents and writes texvlm/text_weights.f16.

Run from the root of the repository: python -m benchmarks._train_text. It takes some minutes on two cores and reads only the "train"
split of _documents.py. The target of a cell is the share of it that is text; statistics are computed once, contrast, polarity,
mirroring and quarter turns are varied on them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks._documents import CLUTTER, coverage, document
from texvlm.reference import text

OUT = Path(__file__).resolve().parent.parent / "texvlm" / "text_weights.f16"
SIDE = 768
LOOKALIKES = ("beads", "dashes", "tiles")  # what has strokes of one width in rows, or many of them, and says nothing
BATCH, CROP, REACH = 24, 20, 3  # parts of pictures a step, cells a side, cells that the network looks to each side


def scene(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Statistics [FEATURES, h, w] and share of text [h, w] of one training picture."""
    rng = np.random.default_rng([seed, 7])
    low = float(np.exp(rng.uniform(np.log(8), np.log(40))))
    sizes = (int(low), int(min(90, low * rng.uniform(1.2, 3))))
    share = float(rng.choice([0.0, 0.02, 0.06, 0.1], p=[0.1, 0.25, 0.35, 0.3]))
    angle = float(rng.choice([3, 20, 180], p=[0.2, 0.2, 0.6]))
    d = document(seed, SIDE, sizes, "train", share, angle, [*CLUTTER["train"], *LOOKALIKES, *LOOKALIKES])
    return text.text_features(d.image[None])[0], d.overlap(text.CELL)


def varied(features: torch.Tensor, target: torch.Tensor, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Another contrast for each picture, light and dark swapped and mirrored by chance: exact on the statistics."""
    batch = features.shape[0]
    gain = torch.exp(torch.empty(batch, 1, 1, 1).uniform_(-1.2, 0.2, generator=g))
    features = features * gain
    n = text.LEVEL_FEATURES
    order = torch.arange(text.FEATURES)
    if torch.rand((), generator=g) < 0.5:
        for level in range(text.TEXT_LEVELS):
            order[level * n + 7 : level * n + 11] = torch.tensor([9, 10, 7, 8]) + level * n
        order[-2:] = torch.tensor([text.FEATURES - 1, text.FEATURES - 2])
        features = features[:, order]
    for dim in (2, 3):
        if torch.rand((), generator=g) < 0.5:
            features, target = features.flip(dim), target.flip(dim - 1)
            order = torch.arange(text.FEATURES)
            for level in range(text.TEXT_LEVELS):  # the two diagonals change places
                order[level * n + 2 : level * n + 4] = torch.tensor([3, 2]) + level * n
            features = features[:, order]
    if torch.rand((), generator=g) < 0.5:
        features, target = features.transpose(2, 3), target.transpose(1, 2)
        order = torch.arange(text.FEATURES)
        for level in range(text.TEXT_LEVELS):  # x and y change places
            order[level * n : level * n + n] = torch.tensor([1, 0, 2, 3, 4, 6, 5, 8, 7, 10, 9]) + level * n
        features = features[:, order]
    return features, target


def crops(features: torch.Tensor, target: torch.Tensor, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """BATCH random parts of CROP x CROP cells."""
    pictures, rows, columns = (
        torch.randint(n, (BATCH,), generator=g).tolist() for n in (len(target), *(s - CROP + 1 for s in target.shape[1:]))
    )
    at = list(zip(pictures, rows, columns))
    return (
        torch.stack([features[i, :, y : y + CROP, x : x + CROP] for i, y, x in at]),
        torch.stack([target[i, y : y + CROP, x : x + CROP] for i, y, x in at]),
    )


def inner(cells: torch.Tensor) -> torch.Tensor:
    """The cells of crops whose context is whole."""
    return cells[:, REACH:-REACH, REACH:-REACH]


def initial() -> torch.Tensor:
    parts = []
    for shape in text.SHAPES:
        fan = shape[1] * shape[2] * shape[3]
        parts += [torch.randn(shape).flatten() * (2 / fan) ** 0.5, torch.zeros(shape[0])]
    return torch.cat(parts)


def report(weights: torch.Tensor, pictures: list[tuple[torch.Tensor, torch.Tensor]]) -> str:
    """Coverage of the text by the best 273 of 4096 cells of 32 pixels, over that of the oracle."""
    kept = []
    for features, overlap in pictures:
        logits = text.text_logits(text.compressed(features[None]), weights)
        score = F.avg_pool2d(torch.sigmoid(logits)[None], 2, ceil_mode=True)[0, 0]
        cells = round(273 / 4096 * overlap.numel())
        kept.append(coverage(score, overlap, cells) / coverage(overlap, overlap, cells))
    return f"{np.mean(kept):.3f} of the oracle's (worst {min(kept):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scenes", type=int, default=300)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--cache", type=Path, help="keep the statistics there")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.cache and args.cache.exists():
        features, target, held = torch.load(args.cache)
    else:
        pairs = [scene(seed) for seed in range(args.scenes)]
        features, target = torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs])
        held = []
        for seed in range(4):
            d = document(1000 + seed, 2048, split="test")
            held.append((text.text_features(d.image[None])[0], d.overlap(32)))
        if args.cache:
            torch.save((features, target, held), args.cache)
    weights = initial().requires_grad_()
    optimiser = torch.optim.AdamW([weights], 4e-3, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 6e-3, total_steps=args.steps)
    g = torch.Generator().manual_seed(0)
    average = 0.0
    for step in range(args.steps):
        x, y = varied(*crops(features, target, g), g)
        logits = text.text_logits(text.compressed(x), weights)
        loss = F.binary_cross_entropy_with_logits(inner(logits), inner(y))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        average += (loss.item() - average) / min(step + 1, 200)
        if (step + 1) % 250 == 0:
            with torch.no_grad():
                print(
                    f"step {step + 1}: loss {average:.4f}, held-out documents {report(weights.detach().half().float(), held)}",
                    flush=True,
                )
    args.out.write_bytes(weights.detach().half().numpy().tobytes())


if __name__ == "__main__":
    main()
