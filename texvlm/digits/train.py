"""Trains the dual encoder on scikit-learn's digits: python -m texvlm.digits.train, some minutes on two cores.

Dense contrastive learning: a cell of a canvas shall be closest to the texts that name what it shows, among texts for all digits, for
"nothing", and about other things; and a text shall be closest to the cells that show it, among all cells of the batch. The principal
axes are fitted at the end on cells of training canvases, and everything is stored in half precision in `weights.npz`.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from texvlm.digits.canvas import cell_labels, digit_canvas, load_digits
from texvlm.digits.model import LETTERS, OCTAVE, STRIDE, WEIGHTS, ImageTower, TextTower, grey_of, spell
from texvlm.pca import PCA, Moments
from texvlm.retrieval import retrieval_kept

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEMPLATES = (
    "{}", "{}", "{}", "{}s", "a {}", "the {}", "all {}s", "digit {}", "the digit {}", "a digit {}", "digits {}",
    "number {}", "the number {}", "a number {}", "numeral {}", "the numeral {}", "handwritten {}", "a handwritten {}",
    "a handwritten digit {}", "written {}", "find {}", "find the {}", "find all {}s", "where is the {}",
    "where is a {}?", "show me the {}", "show every {}", "a photo of a {}.", "a photo of the number {}",
    "a picture of a {}", "image of {}", "the figure {}", "this is a {}", "there is a {} here", "a big {}", "a small {}",
    "a white {}", "a black {}", "some {}s", "look for {}", "I want the {}", "which one is {}?", "{} please",
    "an image of the digit {}.",
)  # fmt: skip
NOTHING = ("nothing", "background", "empty", "clutter", "no digit", "noise", "the background", "a blank place", "ground", "none")
OTHERS = (
    "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
    "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety", "hundred", "cat", "dog", "house",
    "tree", "car", "person", "letter a", "word", "street", "sky", "sign", "text", "face", "red ball", "apple", "table",
    "on", "once", "tone", "often", "height", "weight", "sever", "forest", "fiver", "sixth sense", "niner", "heroes",
    "twofold", "threat", "eighth note", "a photo of a horse", "the cup", "find the key", "show me the way",
)  # fmt: skip


def phrases(digit: int, rng: random.Random, count: int) -> list[str]:
    """Texts for a digit, or for "nothing" (10)."""
    if digit == 10:
        return rng.sample(NOTHING, count)
    names = [rng.choice((WORDS[digit], str(digit))) for _ in range(count)]
    return [rng.choice(TEMPLATES).format(name) for name in names]


def strangers(rng: random.Random, count: int) -> list[str]:
    """Texts about other things: other words, numbers of several digits, letters at random."""
    texts = []
    for _ in range(count):
        kind = rng.random()
        word = rng.choice(OTHERS) if kind < 0.4 else str(rng.randint(10, 99999))
        if kind > 0.7:
            word = "".join(rng.choice(LETTERS[:26]) for _ in range(rng.randint(2, 9)))
        texts.append(rng.choice(TEMPLATES).format(word))
    return texts


class Lesson(NamedTuple):
    """One part of the training, with an optimiser and random numbers of its own."""

    steps: int
    rate: float
    digits: int  # of the octave, on each canvas
    stamps: float | None  # of clutter, likewise; None: few
    ground: float  # cells that show nothing for each that shows a digit; half of them the most misleading


# First what the digits look like, many at a time; then what only looks like them.
LESSONS = (Lesson(700, 4e-3, 20, None, 1.0), Lesson(600, 3e-3, 9, 14, 2.0), Lesson(400, 3e-3, 9, 14, 2.0))


def batch(
    digits: Tensor, labels: Tensor, lesson: Lesson, clutter: float, g: torch.Generator, size: int = 8, side: int = 128
) -> tuple[Tensor, Tensor, Tensor]:
    """Canvases [B, 3, side, side], what their cells show [B, side / 8, side / 8], and whether it is of the octave of this level.

    One level alone is trained, since all levels share one net: most digits are of its octave, some are larger or smaller.
    """

    def between(low: float, high: float) -> float:
        return low * (high / low) ** float(torch.rand((), generator=g))

    pictures, shown, near = [], [], []
    for _ in range(size):
        strange = [between(34, 110)] if float(torch.rand((), generator=g)) < 0.5 else []
        strange += [between(5, 11) for _ in range(3)]
        heights = strange + [between(*OCTAVE) for _ in range(lesson.digits)]
        c = digit_canvas(digits, labels, side, sizes=(8.0, 60.0), clutter=clutter, seed=g, heights=heights, stamps=lesson.stamps)
        height = c.boxes[:, 3] - c.boxes[:, 1]
        within = (height >= OCTAVE[0]) & (height <= OCTAVE[1])
        cells = side // STRIDE
        pictures.append(c.image)
        shown.append(cell_labels(c.boxes, c.labels, cells, cells, STRIDE))
        near.append(cell_labels(c.boxes, within.long(), cells, cells, STRIDE))
    return torch.stack(pictures), torch.stack(shown), torch.stack(near)


def losses(features: Tensor, target: Tensor, texts: Tensor, classes: Tensor, scale: Tensor) -> Tensor:
    """Cells [n, D] of classes [n] against texts [m, D] of classes [m] (-1: something else), both ways."""
    logits = scale * features @ texts.T
    right = (target[:, None] == classes[None]).to(logits.dtype)
    mean = lambda dim: (logits * right).sum(dim) / right.sum(dim).clamp(min=1)  # noqa: E731  - of all that is right, not of the best
    to_text = logits.logsumexp(1) - mean(1)
    to_cell = (logits.logsumexp(0) - mean(0))[right.any(0)]
    # Texts about other things shall find nothing: their best cosine stays below 0.2.
    stray = F.relu(logits[:, classes == -1] / scale - 0.2).square().amax(0).mean()
    return to_text.mean() + 0.3 * to_cell.mean() + stray + text_loss(texts, classes)


def text_loss(texts: Tensor, classes: Tensor) -> Tensor:
    """Texts that name the same belong together, apart from all others. Without it all texts collapse before the cells can tell."""
    logits = 10 * texts @ texts.T
    itself = torch.eye(len(texts), dtype=torch.bool)
    right = (classes[:, None] == classes[None]) & (classes >= 0)[:, None] & ~itself
    away = logits.masked_fill(itself, -torch.inf).logsumexp(1)
    named = right.any(1)
    return (away - (logits * right).sum(1) / right.sum(1).clamp(min=1))[named].mean()


def choose(target: Tensor, near: Tensor, features: Tensor, empty: Tensor, share: float, g: torch.Generator) -> Tensor:
    """Cells to learn from: all that show a digit of the octave, and `share` times as many that show none, half of them misleading."""
    shown = (near == 1).nonzero()[:, 0]
    ground = (target == 10).nonzero()[:, 0]
    half = int(share * len(shown)) // 2
    hard = ground[(features[ground] @ empty).argsort()[:half]]
    easy = ground[torch.randint(len(ground), (half,), generator=g)]
    return torch.cat([shown, hard, easy])


def teach(image: ImageTower, text: TextTower, lesson: Lesson, seed: int, report: int = 50) -> None:
    """One lesson."""
    torch.manual_seed(seed)
    g, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    digits, labels = load_digits(held_out=False)
    temperature = nn.Parameter(torch.tensor(2.5))
    parameters = [*image.parameters(), *text.parameters(), temperature]
    optimiser = torch.optim.AdamW(parameters, weight_decay=0.01)
    start, seen = time.perf_counter(), []
    for step in range(lesson.steps):
        slow = 0.5 + 0.5 * math.cos(math.pi * max(0.0, 2 * step / lesson.steps - 1))
        for group in optimiser.param_groups:
            group["lr"] = lesson.rate * min(1.0, (step + 1) / 30) * slow
        clutter = min(1.5, 0.2 + 0.01 * step) if lesson.stamps is None else 1.5
        pictures, target, near = batch(digits, labels, lesson, clutter, g)
        features, sure = image.look(grey_of(pictures))
        features = features.permute(0, 2, 3, 1).flatten(0, 2)
        names = [p for digit in range(11) for p in phrases(digit, rng, 3)]
        classes = torch.tensor([digit for digit in range(11) for _ in range(3)] + [-1] * 16)
        texts = F.normalize(text(spell([*names, *strangers(rng, 16)])), dim=1)
        target, near = target.flatten(), near.flatten()
        empty = texts[classes == 10].mean(0).detach()
        picked = choose(target, near, features.detach(), empty, lesson.ground, g)
        loss = losses(features[picked], target[picked], texts, classes, temperature.exp().clamp(max=25))
        # Sure of digits of the octave; not of larger or smaller ones, nor of ground.
        asked = torch.cat([picked, (near == 0).nonzero()[:, 0]])
        loss = loss + F.binary_cross_entropy_with_logits(sure.flatten()[asked], (near[asked] == 1).to(sure.dtype))
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        right = (classes[(features[picked] @ texts.T).argmax(1)] == target[picked]).float()
        on = target[picked] < 10
        seen.append([float(loss.detach()), float(right[on].mean()), float(right[~on].mean())])
        if (step + 1) % report == 0:
            mean, named, empty_ = torch.tensor(seen[-report:]).mean(0).tolist()
            passed = time.perf_counter() - start
            print(
                f"step {step + 1}: loss {mean:.2f}, right: {named:.0%} on digits, {empty_:.0%} on ground; {passed:.0f} s",
                flush=True,
            )


def train(lessons: Sequence[Lesson] = LESSONS, seed: int = 0) -> tuple[ImageTower, TextTower]:
    """Both towers, trained on all digits but the held-out ones."""
    torch.manual_seed(seed)
    image, text = ImageTower(), TextTower()
    for number, lesson in enumerate(lessons):
        teach(image, text, lesson, seed + number)
    return image.eval(), text.eval()


def folded_weights(image: ImageTower, text: TextTower) -> dict[str, Tensor]:
    """The weights of both towers as `DigitsEmbedding` names them, batch norms folded into the convolutions."""
    plain = ImageTower(folded=True)
    for trained, stored in zip(image.net, plain.net):
        convolution, norm, _ = trained.children()
        assert isinstance(convolution, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d)
        next(stored.children()).load_state_dict(fuse_conv_bn_eval(convolution, norm).state_dict())
    plain.head.load_state_dict(image.head.state_dict())
    towers = {"image": plain, "text": text}
    return {f"{tower}.{name}": weight for tower, net in towers.items() for name, weight in net.state_dict().items()}


def axes(image: ImageTower, text: TextTower, seed: int = 1, count: int = 12) -> tuple[PCA, float]:
    """The principal axes of cells of training canvases, and what they keep of retrieval on others. Not centred: see `PCA.fit`."""
    digits, labels = load_digits(held_out=False)
    seen, held = Moments(), []
    for number in range(count):
        canvas = digit_canvas(digits, labels, 512, 30, seed=1000 * seed + number)
        cells = 512 // STRIDE
        with torch.no_grad():
            features = F.normalize(image(grey_of(canvas.image[None])), dim=1)
        target = cell_labels(canvas.boxes, canvas.labels, cells, cells, STRIDE).flatten()
        rows = features[0].flatten(1).T
        if number % 3 == 2:
            held.append((rows[target >= 0], target[target >= 0]))
            continue
        shown, ground = rows[target.lt(10) & target.ge(0)], rows[target == 10]
        g = torch.Generator().manual_seed(number)
        seen.update(torch.cat([shown, ground[torch.randperm(len(ground), generator=g)[: len(shown)]]]))
    pca = PCA.from_moments(seen, centre=False)
    with torch.no_grad():
        queries = F.normalize(text(spell(WORDS)), dim=1)
    rows, target = (torch.cat(parts) for parts in zip(*held))
    return pca, retrieval_kept(rows, queries, pca, target[None] == torch.arange(10)[:, None]).kept


def main() -> None:
    """Trains, fits the axes, and writes the weights in half precision."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path, default=WEIGHTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    store(*train(seed=args.seed), args.output)


def store(image: ImageTower, text: TextTower, path: Path) -> None:
    """Writes both towers, the axes, and what they keep."""
    pca, kept = axes(image, text)
    arrays: dict[str, Any] = {name: weight.detach().half().numpy() for name, weight in folded_weights(image, text).items()}
    arrays |= {f"pca.{name}": array.astype(np.float32) if array.ndim else array for name, array in pca.arrays().items()}
    arrays["kept"] = np.float32(kept)
    with open(path, "wb") as file:
        np.savez_compressed(file, **arrays)
    print(
        f"{path}: {path.stat().st_size / 1e6:.2f} MB; 16 axes explain {pca.explained:.1%} and keep {kept:.1%} of mean average precision"
    )


if __name__ == "__main__":
    main()
