"""Seeded photographs of documents with known text: what benchmarks, tests and the training of the text scorer look at.

Labels, receipts, signs and captions, rotated, some of low contrast, over photographs of scikit-image, beside clutter that looks
like text. Two splits share no font and not all kinds of clutter; of the third, "unseen", fonts, words (Greek and Cyrillic), photographs
and clutter are in no training at all.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter, ImageFont

PROSE = (
    "total amount due street open fresh coffee water sugar apple river notice please return ticket platform station exit price "
    "market garden winter summer number before after between service Monday Friday April museum gallery library pressure model "
    "serial battery warning keep away from children made with natural ingredients best before store in a cool dry place net weight"
)
GREEK = "σύνολο οδός ανοιχτά φρέσκο καφές νερό ζάχαρη μήλο ποτάμι εισιτήριο σταθμός έξοδος τιμή αγορά κήπος χειμώνας πριν μετά υπηρεσία"
CYRILLIC = (
    "сумма улица открыто свежий кофе вода сахар яблоко река билет вокзал выход цена рынок сад зима лето номер перед после музей"
)
WORDS = {"train": PROSE.split(), "test": PROSE.split(), "unseen": (GREEK + " " + CYRILLIC).split()}

FONTS = {
    "train": [
        "DejaVuSans.ttf",
        "DejaVuSans-Bold.ttf",
        "DejaVuSans-Oblique.ttf",
        "DejaVuSerif-Italic.ttf",
        "STIXGeneral.ttf",
        "STIXGeneralBol.ttf",
        "cmss10.ttf",
        "cmtt10.ttf",
    ],
    "test": [
        "DejaVuSansMono.ttf",
        "DejaVuSansMono-Bold.ttf",
        "DejaVuSerif.ttf",
        "DejaVuSerif-Bold.ttf",
        "STIXGeneralItalic.ttf",
        "",
    ],
    "unseen": ["DejaVuSerif-BoldItalic.ttf", "DejaVuSansMono-Oblique.ttf", "STIXGeneralBolIta.ttf"],
}
PHOTOS = {
    "train": ["astronaut", "chelsea", "rocket", "motorcycle_left", "retina", "hubble_deep_field", "moon", "ihc"],
    "test": ["coffee", "camera", "motorcycle_right", "coins", "chelsea", "astronaut"],
    "unseen": ["china", "flower", "coffee", "camera", "cell", "clock_motion"],
}
CLUTTER = {
    "train": [
        "stripes",
        "gravel",
        "grass",
        "picture",
        "dots",
        "checks",
        "leaves",
        "scribble",
        "windows",
        "noise",
        "rays",
        "chart",
    ],
    "test": ["stripes", "gravel", "grass", "picture", "brick", "fence", "weave", "branches"],
    "unseen": ["brick", "fence", "weave", "branches", "grass", "picture"],
}


@dataclass
class Document:
    """A picture and where its text is."""

    image: torch.Tensor  # uint8 [3, H, W]
    mask: torch.Tensor  # bool [H, W]: inside the outline of a line of text
    polygons: list[np.ndarray]  # [4, 2] corners (x, y) of each line: top left, top right, bottom right, bottom left
    texts: list[str]  # what each line says

    def overlap(self, cell: int) -> torch.Tensor:
        """Share of each cell that is text, [rows, columns]; edge cells count what lies inside the picture."""
        height, width = self.mask.shape
        padded = torch.nn.functional.pad(self.mask[None, None].float(), (0, -width % cell, 0, -height % cell))
        return torch.nn.functional.avg_pool2d(padded, cell)[0, 0]


@functools.cache
def load_font(name: str, size: int) -> ImageFont.FreeTypeFont:
    if not name:
        return ImageFont.load_default(size)  # type: ignore[return-value]
    import matplotlib

    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts/ttf" / name), size)


@functools.cache
def _photo(name: str) -> Image.Image:
    import skimage
    import sklearn

    folders = Path(skimage.__file__).parent / "data", Path(sklearn.__file__).parent / "datasets" / "images"
    return Image.open(next(path for folder in folders for path in folder.glob(f"{name}.*"))).convert("RGB")


def _colour(rng: np.random.Generator, light: float) -> tuple[int, int, int]:
    """A colour of about this lightness in [0, 1]."""
    tint = rng.normal(0, 0.12 * rng.random(), 3)
    return tuple(int(v) for v in np.clip(255 * (light + tint), 0, 255))  # type: ignore[return-value]


def _crop(rng: np.random.Generator, photo: Image.Image, width: int, height: int) -> Image.Image:
    """A random part of a photograph, mirrored by chance, at this size."""
    scale = min(photo.width / width, photo.height / height) * rng.uniform(0.4, 1)
    w, h = max(8, int(width * scale)), max(8, int(height * scale))
    x, y = rng.integers(0, photo.width - w + 1), rng.integers(0, photo.height - h + 1)
    part = photo.crop((x, y, x + w, y + h)).resize((width, height), Image.Resampling.BICUBIC)
    return part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else part


def _tiles(rng: np.random.Generator, name: str, width: int, height: int, split: str) -> Image.Image:
    """A texture of scikit-image; what is trained on has a half of its own."""
    photo = _photo(name)
    half = photo.width // 2
    photo = photo.crop((0, 0, half, photo.height) if split == "train" else (half, 0, photo.width, photo.height))
    size = max(32, int(min(photo.size) * rng.uniform(0.5, 1)))
    zoom = rng.uniform(0.5, 2)
    part = _crop(rng, photo, size, size).resize((max(16, int(size * zoom)),) * 2, Image.Resampling.BICUBIC)
    out = Image.new("RGB", (width, height))
    for y in range(0, height, part.height):
        for x in range(0, width, part.width):
            out.paste(part, (x, y))
    return out


def _clutter(rng: np.random.Generator, kind: str, width: int, height: int, split: str) -> Image.Image:
    if kind in ("gravel", "grass", "brick"):
        return _tiles(rng, kind, width, height, split)
    if kind == "picture":
        names = PHOTOS[split]
        return _crop(rng, _photo(names[rng.integers(len(names))]), width, height)
    a, b = _colour(rng, rng.uniform(0, 0.5)), _colour(rng, rng.uniform(0.5, 1))
    if rng.random() < 0.5:
        a, b = b, a
    out = Image.new("RGB", (width, height), a)
    draw = ImageDraw.Draw(out)
    step = int(rng.integers(5, 48))
    thick = max(1, int(step * rng.uniform(0.15, 0.6)))
    if kind == "noise":
        coarse = rng.random((max(2, height // step), max(2, width // step))) * 255
        return Image.fromarray(coarse.astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC).convert("RGB")
    if kind == "stripes":
        slant = rng.uniform(-1, 1) if rng.random() < 0.5 else 0
        for x in range(-height, width + height, step):
            if rng.random() < 0.95:
                draw.line([(x, 0), (x + slant * height, height)], fill=b, width=thick)
        return (
            out.resize((width, height)).transpose(Image.Transpose.TRANSPOSE).resize((width, height))
            if rng.random() < 0.5
            else out
        )
    if kind == "fence":  # two families of slanted wires
        slope = rng.uniform(0.5, 2)
        for x in range(-2 * height, width + 2 * height, 2 * step):
            draw.line([(x, 0), (x + slope * height, height)], fill=b, width=max(1, thick // 3))
            draw.line([(x, 0), (x - slope * height, height)], fill=b, width=max(1, thick // 3))
        return out
    if kind == "beads":  # rows of polygons, as regular as letters
        size, sides = step * rng.uniform(0.4, 0.95) / 2, int(rng.integers(3, 7))
        for y in range(0, height, int(step * rng.uniform(1, 2))):
            for x in range(0, width, step):
                shape = (x, y, size)
                filled = {"fill": b} if thick % 2 else {"outline": b, "width": max(1, thick // 4)}
                draw.regular_polygon(shape, sides, rotation=float(rng.uniform(0, 360)) if thick % 3 == 0 else 0, **filled)
        return out
    if kind == "dashes":  # parallel short strokes
        turn, length = rng.uniform(0, math.pi), step * rng.uniform(0.4, 1)
        dx, dy = math.cos(turn) * length, math.sin(turn) * length
        for _ in range(int(width * height / (step * step * rng.uniform(0.6, 3)))):
            x, y = rng.uniform(0, width), rng.uniform(0, height)
            draw.line([(x, y), (x + dx, y + dy)], fill=b, width=max(1, thick // 4))
        return out
    if kind == "tiles":  # a roof: rows of arcs, each with its shadow
        for i, y in enumerate(range(-step, height, max(3, step // 2))):
            for x in range(-step + i % 2 * step // 2, width, step):
                draw.arc((x, y, x + step, y + step), 0, 180, fill=b, width=max(1, thick // 4))
        return out
    if kind == "weave":
        for y in range(0, height, step):
            for x in range(0, width, step):
                along = (x // step + y // step) % 2
                box = (
                    (x, y + step // 4, x + step, y + step // 4 + thick)
                    if along
                    else (x + step // 4, y, x + step // 4 + thick, y + step)
                )
                draw.rectangle(box, fill=b)
        return out
    if kind == "checks":
        for y in range(0, height, step):
            for x in range(step * (y // step % 2), width, 2 * step):
                draw.rectangle((x, y, x + step - 1, y + step - 1), fill=b)
        return out
    if kind == "dots":
        jitter = rng.uniform(0, 0.4) * step
        for y in range(0, height, step):
            for x in range(0, width, step):
                cx, cy = x + rng.normal(0, 1) * jitter, y + rng.normal(0, 1) * jitter
                draw.ellipse((cx, cy, cx + thick, cy + thick), fill=b)
        return out
    if kind in ("leaves", "windows"):
        for _ in range(int(width * height / (step * step))):
            x, y = rng.integers(0, width), rng.integers(0, height)
            if kind == "windows":
                x, y = x // (2 * step) * 2 * step, y // (3 * step) * 3 * step
                draw.rectangle((x, y, x + step, y + 2 * step), fill=_colour(rng, rng.uniform(0, 1)), outline=b)
            else:
                box = (x, y, x + step * rng.uniform(0.5, 2), y + step * rng.uniform(0.5, 2))
                draw.ellipse(box, fill=_colour(rng, rng.uniform(0, 1)))
        return out
    if kind == "chart":
        for x in range(0, width, 2 * step):
            top = rng.integers(0, height)
            draw.rectangle((x, top, x + step, height), fill=_colour(rng, rng.uniform(0, 1)))
        for y in range(0, height, 3 * step):
            draw.line([(0, y), (width, y)], fill=b, width=1)
        return out
    for _ in range(max(4, int(width * height / (step * 160)))):  # scribble, rays, branches
        x, y = rng.uniform(0, width), rng.uniform(0, height)
        turn, length = rng.uniform(0, 2 * math.pi), rng.uniform(20, 160)
        points = [(x, y)]
        for _ in range(1 if kind == "rays" else 8):
            turn += rng.normal(0, 0.9 if kind == "scribble" else 0.25)
            x, y = x + math.cos(turn) * length / 8, y + math.sin(turn) * length / 8
            points.append((x, y))
        draw.line(points, fill=b, width=max(1, int(rng.integers(1, 6))))
    return out


def _line_of_text(rng: np.random.Generator, words: int, vocabulary: list[str]) -> str:
    parts = []
    for _ in range(words):
        kind = rng.random()
        if kind < 0.2:
            parts.append(f"{rng.integers(0, 1000)}.{rng.integers(0, 100):02d}")
        elif kind < 0.3:
            parts.append(str(rng.integers(0, 100000)))
        else:
            parts.append(vocabulary[rng.integers(len(vocabulary))])
    line = " ".join(parts)
    return line.upper() if rng.random() < 0.25 else line.capitalize() if rng.random() < 0.3 else line


def _block(rng: np.random.Generator, size: int, split: str, limit: int) -> tuple[Image.Image, list[np.ndarray], list[str]]:
    """A label, receipt, sign or caption as an RGBA patch, the outlines of its lines and what they say."""
    fonts = FONTS[split]
    font = load_font(fonts[rng.integers(len(fonts))], size)
    kind = ("label", "receipt", "sign", "caption")[rng.integers(4)]
    rows = {
        "label": rng.integers(1, 6),
        "receipt": rng.integers(5, 14),
        "sign": rng.integers(1, 3),
        "caption": rng.integers(1, 3),
    }[kind]
    words = {"label": (1, 6), "receipt": (2, 4), "sign": (1, 4), "caption": (3, 9)}[kind]
    lines = [_line_of_text(rng, int(rng.integers(*words)), WORDS[split]) for _ in range(rows)]
    while len(lines) > 1 and len(lines) * size * 1.5 > limit:
        lines.pop()
    lines = [line[: max(1, int(limit / (0.62 * size)))] for line in lines]
    low = rng.random() < 0.3
    gap = rng.uniform(0.1, 0.25) if low else rng.uniform(0.35, 1)
    ground = rng.uniform(0, 1 - gap) if rng.random() < 0.5 else rng.uniform(gap, 1)
    ink = ground + gap if ground + gap <= 1 and (ground - gap < 0 or rng.random() < 0.5) else ground - gap
    spacing, margin = rng.uniform(1.15, 1.7), int(size * rng.uniform(0.3, 1.2))
    boxes = [font.getbbox(line) for line in lines]
    width = int(max(box[2] for box in boxes)) + 2 * margin
    height = int(size * spacing * len(lines)) + 2 * margin
    alpha = 0 if kind == "caption" else 255
    patch = Image.new("RGBA", (width, height), (*_colour(rng, ground), alpha))
    draw = ImageDraw.Draw(patch)
    colour = _colour(rng, ink)
    if kind in ("sign", "label") and rng.random() < 0.5:
        draw.rectangle((2, 2, width - 3, height - 3), outline=colour, width=max(1, size // 12))
    polygons = []
    outline = (
        {"stroke_width": max(1, size // 14), "stroke_fill": _colour(rng, ground)}
        if kind == "caption" and rng.random() < 0.6
        else {}
    )
    align = rng.random() < 0.3
    for i, (line, box) in enumerate(zip(lines, boxes)):
        x = (width - box[2]) / 2 if align else margin
        y = margin + i * size * spacing
        draw.text((x, y), line, font=font, fill=(*colour, 255), **outline)
        x0, y0, x1, y1 = x + box[0], y + box[1], x + box[2], y + box[3]
        polygons.append(np.array([(x0, y0), (x1, y0), (x1, y1), (x0, y1)], float))
    return patch, polygons, lines


def document(
    seed: int,
    side: int = 2048,
    sizes: tuple[int, int] = (16, 60),
    split: str = "test",
    share: float = 0.045,
    angle: float | tuple[float, float] = 8,
    clutter: Sequence[str] | None = None,
) -> Document:
    """A document photograph.

    Args:
        seed: of everything in it.
        side: pixels a side.
        sizes: of the fonts, in pixels; small ones are as likely as large ones on a logarithmic scale.
        split: "train", "test" or "unseen".
        share: of the picture, at least, that the outlines of text cover when the last block is placed.
        angle: largest rotation, in degrees, or the least and the largest.
        clutter: kinds of it; by default those of the split.
    """
    rng = np.random.default_rng([seed, split == "train"])
    names = PHOTOS[split]
    image = _crop(rng, _photo(names[rng.integers(len(names))]), side, side)
    kinds = CLUTTER[split] if clutter is None else clutter
    least, most = angle if isinstance(angle, tuple) else (-angle, angle)
    if rng.random() < 0.3:
        image = image.filter(ImageFilter.GaussianBlur(side / 400))
    for _ in range(rng.integers(6, 15)):
        width, height = (int(v) for v in rng.uniform(0.12, 0.4, 2) * side)
        patch = _clutter(rng, kinds[rng.integers(len(kinds))], width, height, split).convert("RGBA")
        patch = patch.rotate(rng.uniform(-45, 45), Image.Resampling.BILINEAR, expand=True)
        image.paste(patch, tuple(int(v) for v in rng.uniform(-0.1, 0.9, 2) * side), patch)
    mask = Image.new("1", (side, side))
    taken = np.zeros((64, 64), bool)
    polygons: list[np.ndarray] = []
    texts: list[str] = []
    covered = 0.0
    for _ in range(80):
        if covered >= share * side * side:
            break
        size = int(math.exp(rng.uniform(math.log(sizes[0]), math.log(sizes[1] + 1))))
        patch, outlines, lines = _block(rng, size, split, int(0.7 * side))
        turn = rng.uniform(least, most)
        centre = np.array([patch.width / 2, patch.height / 2])
        patch = patch.rotate(turn, Image.Resampling.BICUBIC, expand=True)
        if patch.width > side or patch.height > side:
            continue
        x, y = (int(rng.integers(0, side - n + 1)) for n in patch.size)
        cells = np.s_[y * 64 // side : -(-(y + patch.height) * 64 // side), x * 64 // side : -(-(x + patch.width) * 64 // side)]
        if taken[cells].any():
            continue
        taken[cells] = True
        texts += lines
        image.paste(patch, (x, y), patch)
        c, s = math.cos(math.radians(turn)), math.sin(math.radians(turn))
        for outline in outlines:
            corners = (outline - centre) @ np.array([[c, -s], [s, c]]) + np.array([patch.width / 2 + x, patch.height / 2 + y])
            polygons.append(corners)
            ImageDraw.Draw(mask).polygon([tuple(p) for p in corners], fill=1)
            covered += float(np.prod(outline[2] - outline[0]))
    return Document(_photograph(rng, image), torch.from_numpy(np.array(mask)), polygons, texts)


def _photograph(rng: np.random.Generator, image: Image.Image) -> torch.Tensor:
    """What a camera does: blur, uneven light, noise, and a JPEG file."""
    if rng.random() < 0.5:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 0.9)))
    side = image.width
    values = np.asarray(image, np.float32)
    ramp = np.linspace(-1, 1, side, dtype=np.float32)
    light = 1 + rng.uniform(-0.25, 0.25) * ramp[:, None] + rng.uniform(-0.25, 0.25) * ramp[None, :]
    noise = rng.standard_normal((side, side), np.float32) * rng.uniform(0, 6)
    image = Image.fromarray(np.clip(values * light[..., None] + noise[..., None], 0, 255).astype(np.uint8))
    if rng.random() < 0.7:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=int(rng.integers(45, 95)))
        image = Image.open(buffer)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def coverage(score: torch.Tensor, overlap: torch.Tensor, cells: int) -> float:
    """Share of the text's area inside the `cells` cells of highest score; ties go to the lowest index."""
    order = score.flatten().sort(descending=True, stable=True).indices[:cells]
    return float(overlap.flatten()[order].sum() / overlap.sum())
