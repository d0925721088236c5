"""Trains the weights of texvlm.text_regions on generated pictures and writes texvlm/text_weights.f16.

Run from the root of the repository: python -m benchmarks._train_text. It takes half an hour on two cores and reads only the "train"
split of _documents.py; _text_scenes.py draws the pictures. The target of a cell is the share of it that is text; statistics are
computed once, contrast, polarity, mirroring and quarter turns are varied on them. What is written is the mean of the last steps.

The weights that ship have gone on (--start) from ones that had seen 300 documents at any angle and no pictures without text.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks._documents import Document, coverage, document
from benchmarks._text_scenes import NOT_DOCUMENTS, scene, small
from texvlm.reference import text

OUT = Path(__file__).resolve().parent.parent / "texvlm" / "text_weights.f16"
CROP, REACH = 20, 3  # parts of pictures, cells a side; cells that the network looks to each side
DOCUMENTS = 3.0  # a document is drawn so many times as often as captions or a picture without text
MEAN = 0.005  # share of a step in the mean of the weights that is written
FALSE = 6  # cells of a part without text whose scores --false holds down: the highest


def statistics(picture: Document) -> tuple[torch.Tensor, torch.Tensor]:
    """Statistics [FEATURES, h, w] and share of text [h, w] of one training picture, in half precision."""
    return text.text_features(picture.image[None])[0].half(), picture.overlap(text.CELL).half()


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


def crops(
    features: torch.Tensor, target: torch.Tensor, weights: torch.Tensor, count: int, g: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` random parts of CROP x CROP cells, of pictures drawn by these weights."""
    pictures = torch.multinomial(weights, count, replacement=True, generator=g).tolist()
    rows, columns = (torch.randint(s - CROP + 1, (count,), generator=g).tolist() for s in target.shape[1:])
    at = list(zip(pictures, rows, columns))
    return (
        torch.stack([features[i, :, y : y + CROP, x : x + CROP] for i, y, x in at]).float(),
        torch.stack([target[i, y : y + CROP, x : x + CROP] for i, y, x in at]).float(),
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


def false_scores(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """What the highest scores of parts without any text cost; 0 where all have some."""
    none = target.flatten(1).amax(1) == 0
    return F.softplus(logits.flatten(1)[none].topk(FALSE)[0]).mean() if none.any() else logits.new_zeros(())


def pictures(scenes: int, smalls: int) -> tuple[torch.Tensor, torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Statistics and targets of the training pictures, then those of held-out documents."""
    pairs = [statistics(draw(seed)) for draw, count in ((scene, scenes), (small, smalls)) for seed in range(count)]
    held = []
    for seed in range(4):
        d = document(1000 + seed, 2048, split="test")
        held.append((text.text_features(d.image[None])[0], d.overlap(32)))
    return torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs]), held


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scenes", type=int, default=1200)
    parser.add_argument("--small", type=int, default=400, help="further documents with small letters")
    parser.add_argument("--steps", type=int, default=16000)
    parser.add_argument("--batch", type=int, default=32, help="parts of pictures a step")
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--false", type=float, default=0.02, help="weight of the highest scores where there is no text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=Path, help="keep the statistics there")
    parser.add_argument("--start", type=Path, help="weights to go on from")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    if args.cache and args.cache.exists():
        features, target, held = torch.load(args.cache)
    else:
        features, target, held = pictures(args.scenes, args.small)
        if args.cache:
            torch.save((features, target, held), args.cache)
    has_documents = torch.tensor([np.random.default_rng([seed, 7]).random() >= NOT_DOCUMENTS for seed in range(args.scenes)])
    often = torch.cat([torch.where(has_documents, DOCUMENTS, 1.0), torch.full((len(target) - args.scenes,), DOCUMENTS)])
    start = torch.from_numpy(np.fromfile(args.start, np.float16)).float() if args.start else initial()
    weights = start.requires_grad_()
    mean = weights.detach().clone()
    optimiser = torch.optim.AdamW([weights], args.rate, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, args.rate, total_steps=args.steps)
    g = torch.Generator().manual_seed(args.seed)
    average = 0.0
    for step in range(args.steps):
        x, y = varied(*crops(features, target, often, args.batch, g), g)
        logits, y = inner(text.text_logits(text.compressed(x), weights)), inner(y)
        loss = F.binary_cross_entropy_with_logits(logits, y)
        optimiser.zero_grad()
        (loss + args.false * false_scores(logits, y)).backward()
        optimiser.step()
        schedule.step()
        mean.lerp_(weights.detach(), max(MEAN, 1 / (step + 1)))
        average += (loss.item() - average) / min(step + 1, 200)
        if (step + 1) % 1000 == 0:
            with torch.no_grad():
                print(f"step {step + 1}: loss {average:.4f}, held-out documents {report(mean.half().float(), held)}", flush=True)
    args.out.write_bytes(mean.half().numpy().tobytes())


if __name__ == "__main__":
    main()
