"""Pictures that the text scorer is trained on: documents at any angle, captions on photographs, and what only looks like writing.

Everything is drawn, but for the photographs and textures of the "train" split of _documents.py.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter

from benchmarks._documents import (
    CLUTTER,
    FONTS,
    PHOTOS,
    WORDS,
    Document,
    _clutter,
    _colour,
    _crop,
    _line_of_text,
    _photo,
    _photograph,
    document,
    load_font,
)

SIDE = 768
LOOKALIKES = ("beads", "dashes", "tiles")  # of _documents.py: what has strokes of one width in rows, or many, and says nothing


def _two_colours(rng: np.random.Generator) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    a = rng.uniform(0, 1)
    gap = rng.uniform(0.15, 1)
    b = a + gap if a + gap <= 1 else max(0.0, a - gap)
    return _colour(rng, a), _colour(rng, b)


def _jittered(rng: np.random.Generator, colour: tuple[int, int, int], spread: float) -> tuple[int, int, int]:
    return tuple(int(v) for v in np.clip(np.array(colour) + 255 * rng.normal(0, spread) + rng.normal(0, 6, 3), 0, 255))  # type: ignore[return-value]


def _grained(rng: np.random.Generator, image: Image.Image) -> Image.Image:
    """With a surface: noise of two scales."""
    values = np.asarray(image, np.float32)
    h, w = values.shape[:2]
    for step in (1, int(rng.integers(2, 9))):
        noise = rng.standard_normal((h // step + 1, w // step + 1)).astype(np.float32) * rng.uniform(0, 16)
        large = Image.fromarray(noise).resize((w, h), Image.Resampling.BILINEAR) if step > 1 else Image.fromarray(noise[:h, :w])
        values = values + np.asarray(large)[..., None]
    return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))


def bricks(rng: np.random.Generator, side: int) -> Image.Image:
    """A wall: bricks of one size in bonds, each of its own shade, with mortar."""
    brick, mortar = _two_colours(rng)
    image = Image.new("RGB", (side, side), mortar)
    draw = ImageDraw.Draw(image)
    height = rng.uniform(6, 60)
    width = height * rng.choice([1, 2, 2.5, 3, 4])
    gap = max(1.0, height * rng.uniform(0.06, 0.3))
    bond, spread, wear = rng.choice([0, 0.5, 0.33]), rng.uniform(0, 0.12), rng.uniform(0, 0.12) * gap
    for row in range(int(side / height) + 2):
        shift = (row * bond % 1) * width
        for column in range(-1, int(side / width) + 2):
            x, y = column * width + shift, row * height
            dx, dy = rng.normal(0, 1, (2, 4)) * wear
            box = [
                (x + dx[0], y + dy[0]),
                (x + width - gap + dx[1], y + dy[1]),
                (x + width - gap + dx[2], y + height - gap + dy[2]),
                (x + dx[3], y + height - gap + dy[3]),
            ]
            draw.polygon(box, fill=_jittered(rng, brick, spread))
    return _grained(rng, image)


def blades(rng: np.random.Generator, side: int) -> Image.Image:
    """Grass, fur, needles: many thin strokes about one direction, or about none, of many shades."""
    dark, light = _two_colours(rng)
    image = Image.new("RGB", (side, side), dark)
    draw = ImageDraw.Draw(image)
    thick, long = rng.uniform(1, 6), rng.uniform(8, 90)
    about, wide = rng.uniform(0, math.pi), rng.choice([0.15, 0.4, 0.8, 3])
    n = int(min(9000, rng.uniform(0.3, 2) * side * side / (thick * long)))
    x, y = rng.uniform(-0.05, 1.05, (2, n)) * side
    turn, length, mix = about + rng.normal(0, wide, n), long * rng.uniform(0.3, 1, n), rng.beta(1.2, 1.2, n)[:, None]
    bend = rng.normal(0, 0.25, n)
    shades = (np.array(dark) * (1 - mix) + np.array(light) * mix).astype(int)
    for i in range(n):
        dx, dy = math.cos(turn[i]) * length[i] / 2, math.sin(turn[i]) * length[i] / 2
        ex, ey = math.cos(turn[i] + bend[i]) * length[i] / 2, math.sin(turn[i] + bend[i]) * length[i] / 2
        draw.line(
            [(x[i], y[i]), (x[i] + dx, y[i] + dy), (x[i] + dx + ex, y[i] + dy + ey)],
            fill=tuple(shades[i].tolist()),
            width=max(1, int(thick * (0.5 + mix[i, 0]))),
        )
    return _grained(rng, image) if rng.random() < 0.5 else image


def pebbles(rng: np.random.Generator, side: int) -> Image.Image:
    """Beans, grains, stones: packed ellipses with a lit side, a dark rim, and perhaps a slit."""
    dark, light = _two_colours(rng)
    image = Image.new("RGB", (side, side), dark)
    size, slim = rng.uniform(6, 50), rng.uniform(0.5, 1)
    slit, rim, spread = rng.random() < 0.5, rng.random() < 0.6, rng.uniform(0, 0.15)
    n = int(min(2500, rng.uniform(1, 3) * side * side / (size * size * slim)))
    draw = ImageDraw.Draw(image)
    for x, y, turn in zip(*rng.uniform(0, side, (2, n)), rng.uniform(0, math.pi, n)):
        r = size / 2 * rng.uniform(0.7, 1.2)
        t = np.linspace(0, 2 * math.pi, 14)
        along, across = r * np.cos(t), r * slim * np.sin(t)
        c, s = math.cos(turn), math.sin(turn)
        outline = np.stack([x + c * along - s * across, y + s * along + c * across], 1)
        shade = _jittered(rng, light, spread)
        under = tuple(v // 3 for v in shade)
        draw.polygon([tuple(p) for p in outline], fill=shade, outline=under if rim else None)
        inner = (outline - [x, y]) * 0.5 + [x - r * 0.15, y - r * 0.2]
        draw.polygon([tuple(p) for p in inner], fill=_jittered(rng, tuple(min(255, v + 25) for v in shade), 0.02))
        if slit:
            draw.line(
                [(x - c * r * 0.8, y - s * r * 0.8), (x + c * r * 0.8, y + s * r * 0.8)], fill=under, width=max(1, int(r / 8))
            )
    return _grained(rng, image) if rng.random() < 0.5 else image


def marks(rng: np.random.Generator, side: int) -> Image.Image:
    """Rows of one figure: polygons, crosses, arcs, outlined or filled, as regular as letters or less so."""
    ground, ink = _two_colours(rng)
    image = Image.new("RGB", (side, side), ground)
    draw = ImageDraw.Draw(image)
    step = rng.uniform(9, 56)
    r, thick, jitter = (
        step * rng.uniform(0.25, 0.5),
        int(rng.integers(1, max(2, int(step / 6)) + 1)),
        rng.choice([0, 0, 0.1, 0.4]) * step,
    )
    kind, rows = rng.integers(6), step * rng.uniform(1, 2)
    sides, turned, spun, squash = int(rng.integers(3, 9)), rng.uniform(0, 2 * math.pi), rng.random() < 0.3, rng.uniform(0.5, 1)
    y = step / 2
    while y < side:
        x = step / 2
        while x < side:
            cx, cy = x + rng.normal() * jitter, y + rng.normal() * jitter
            turn = rng.uniform(0, 2 * math.pi) if spun else turned
            if kind == 0:
                box = (cx - r, cy - r * squash, cx + r, cy + r * squash)
                draw.ellipse(box, outline=ink, width=thick)
            elif kind == 1:
                draw.ellipse((cx - r, cy - r * squash, cx + r, cy + r * squash), fill=ink)
            elif kind == 2:
                draw.regular_polygon((cx, cy, r), sides, math.degrees(turn), outline=ink, width=thick)
            elif kind == 3:
                for arm in (0, math.pi / 2):
                    dx, dy = r * math.cos(turn + arm), r * math.sin(turn + arm)
                    draw.line([(cx - dx, cy - dy), (cx + dx, cy + dy)], fill=ink, width=thick)
            elif kind == 4:
                start = math.degrees(turn)
                draw.arc((cx - r, cy - r, cx + r, cy + r), start, start + 180, fill=ink, width=thick)
            else:
                dx, dy = r * math.cos(turn), r * math.sin(turn)
                draw.line([(cx - dx, cy - dy), (cx + dx, cy + dy)], fill=ink, width=thick)
            x += step
        y += rows
    return image


def sticks(rng: np.random.Generator, side: int) -> Image.Image:
    """Short strokes of all directions, straight or bent, of one width."""
    ground, ink = _two_colours(rng)
    image = Image.new("RGB", (side, side), ground)
    draw = ImageDraw.Draw(image)
    length, thick, bend = rng.uniform(6, 40), int(rng.integers(1, 6)), rng.choice([0, 0, 0.6, 1.5])
    pieces = int(rng.choice([1, 1, 2, 4, 12]))
    n = int(min(4000, rng.uniform(0.1, 0.8) * side * side / (length * pieces * (thick + 3))))
    for x, y, turn in zip(*rng.uniform(0, side, (2, n)), rng.uniform(0, 2 * math.pi, n)):
        points = [(x, y)]
        for _ in range(pieces):
            turn += rng.normal(0, 1) * bend
            x, y = x + length * math.cos(turn), y + length * math.sin(turn)
            points.append((x, y))
        draw.line(points, fill=ink, width=thick)
    return image


def lattice(rng: np.random.Generator, side: int) -> Image.Image:
    """Two families of lines, evenly spaced or not, with a shade of their own in some of the meshes."""
    ground, ink = _two_colours(rng)
    image = Image.new("RGB", (side, side), ground)
    draw = ImageDraw.Draw(image)
    for _ in range(int(rng.integers(1, 3))):
        step, thick, slant = rng.uniform(5, 60), 1, rng.uniform(-1.5, 1.5)
        thick, uneven = max(1, int(step * rng.uniform(0.08, 0.5))), rng.choice([0, 0, 0.3])
        x = -2.0 * side
        flat = rng.random() < 0.5
        while x < 3 * side:
            line = [(x, 0), (x + slant * side, side)]
            draw.line([p[::-1] for p in line] if flat else line, fill=ink, width=thick)
            x += step * max(0.3, 1 + uneven * rng.normal())
    return image


def leaves(rng: np.random.Generator, side: int) -> Image.Image:
    """Foliage: pointed leaves over each other, light ones last, with veins and stalks."""
    dark, light = _two_colours(rng)
    image = Image.new("RGB", (side, side), dark)
    draw = ImageDraw.Draw(image)
    size, slim, veins = rng.uniform(8, 70), rng.uniform(0.15, 0.5), rng.random() < 0.6
    n = int(min(2500, 3 * side * side / (size * size * slim * 2)))
    for i, (x, y, turn) in enumerate(zip(*rng.uniform(0, side, (2, n)), rng.uniform(0, 2 * math.pi, n))):
        mix = np.clip(i / n + rng.normal(0, 0.2), 0, 1)
        shade = tuple(int(a + (b - a) * mix) for a, b in zip(dark, light))
        r = size * rng.uniform(0.5, 1.2)
        t = np.linspace(0, 1, 7)
        across = np.sin(math.pi * t) * slim * r
        along = t * r
        local = np.concatenate([np.stack([along, across], 1), np.stack([along, -across], 1)[::-1]])
        c, s = math.cos(turn), math.sin(turn)
        outline = local @ np.array([[c, s], [-s, c]]) + [x, y]
        draw.polygon([tuple(p) for p in outline], fill=shade)
        if veins:
            draw.line([(x, y), (x + c * r, y + s * r)], fill=_jittered(rng, shade, 0.15), width=max(1, int(r / 20)))
    return image


def scrambled(rng: np.random.Generator, side: int) -> Image.Image:
    """A page of text with the phases of its spectrum by chance, cut to two shades or not: its statistics without its letters."""
    page = Image.new("L", (side, side), 255)
    draw = ImageDraw.Draw(page)
    size = int(rng.integers(10, 48))
    font = load_font(FONTS["train"][rng.integers(len(FONTS["train"]))], size)
    for y in range(0, side, int(size * 1.4)):
        draw.text((-20, y), _line_of_text(rng, 12, WORDS["train"]), font=font, fill=0)
    values = np.asarray(page, np.float32) / 255
    spectrum = np.fft.fft2(values - values.mean())
    phases = np.angle(np.fft.fft2(rng.standard_normal(values.shape)))
    noise = np.real(np.fft.ifft2(np.abs(spectrum) * np.exp(1j * phases)))
    noise /= noise.std()
    a, b = (np.array(c, np.float32) for c in _two_colours(rng))
    sharp = rng.choice([0.5, 1, 5])
    mix = (1 / (1 + np.exp(-2 * sharp * (noise - rng.uniform(0, 1.5)))))[..., None]
    return Image.fromarray(np.clip(a + (b - a) * mix, 0, 255).astype(np.uint8))


def cloud(rng: np.random.Generator, side: int) -> Image.Image:
    """Noise of a power law, cut to a few shades or not: coasts, bark, stains."""
    f = np.hypot(np.fft.fftfreq(side)[:, None] * rng.uniform(0.3, 3), np.fft.fftfreq(side)[None])
    spectrum = np.fft.fft2(rng.standard_normal((side, side))) / np.maximum(f, 1 / side) ** rng.uniform(0.5, 1.8)
    noise = np.real(np.fft.ifft2(spectrum))
    noise = (noise - noise.mean()) / noise.std()
    if rng.random() < 0.4:
        noise = np.abs(noise) - 0.8  # ridges
    sharp = rng.choice([0.5, 1, 6])
    a, b = (np.array(c, np.float32) for c in _two_colours(rng))
    return Image.fromarray(np.clip(a + (b - a) / (1 + np.exp(-2 * sharp * noise))[..., None], 0, 255).astype(np.uint8))


def shrunk(rng: np.random.Generator, side: int) -> Image.Image:
    """A photograph of the training split, small and repeated: everyday detail at the scale of letters."""
    photo = _photo(PHOTOS["train"][rng.integers(len(PHOTOS["train"]))])
    part = int(side * rng.uniform(0.3, 1))
    tile = _crop(rng, photo, part, part)
    if rng.random() < 0.4:
        tile = tile.filter(ImageFilter.UnsharpMask(2, int(rng.integers(50, 250)), 0))
    image = Image.new("RGB", (side, side))
    for y in range(0, side, part):
        for x in range(0, side, part):
            image.paste(tile, (x, y))
    return image


NEGATIVES = (bricks, blades, pebbles, marks, sticks, lattice, leaves, scrambled, cloud, shrunk)


def texture(rng: np.random.Generator, side: int) -> Image.Image:
    """One of the NEGATIVES, or a kind of clutter, turned by any angle, at another scale by chance."""
    wide = int(side * 1.42) + 2
    if rng.random() < 0.25:
        kinds = (*CLUTTER["train"], *LOOKALIKES)
        image = _clutter(rng, kinds[rng.integers(len(kinds))], wide, wide, "train")
    else:
        image = NEGATIVES[rng.integers(len(NEGATIVES))](rng, wide)
    if rng.random() < 0.7:
        image = image.rotate(rng.uniform(0, 360), Image.Resampling.BILINEAR)
    if rng.random() < 0.2:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.5, 2.5)))
    left = (wide - side) // 2
    return image.crop((left, left, left + side, left + side))


def nothing(seed: int, side: int = SIDE) -> Document:
    """A picture without text: up to four textures beside each other, or a photograph with some."""
    rng = np.random.default_rng([seed, 11])
    half = side // 2
    image = Image.new("RGB", (side, side))
    for y, x in ((0, 0), (0, half), (half, 0), (half, half)):
        image.paste(texture(rng, half), (x, y))
    return Document(_photograph(rng, image), torch.zeros(side, side, dtype=torch.bool), [], [])


def captions(
    seed: int, side: int = SIDE, split: str = "train", sizes: tuple[int, int] = (10, 48), most: float = 180.0
) -> Document:
    """Lines of text straight on a photograph or a texture, at any angle, lighter or darker than what lies under them."""
    rng = np.random.default_rng([seed, 12])
    names = PHOTOS[split]
    if split == "train" and rng.random() < 0.3:
        image = texture(rng, side)
        image = Image.blend(image, Image.new("RGB", image.size, _colour(rng, rng.random())), rng.uniform(0.2, 0.8))
    else:
        image = _crop(rng, _photo(names[rng.integers(len(names))]), side, side)
    mask = Image.new("1", (side, side))
    taken = np.zeros((64, 64), bool)
    polygons, texts = [], []
    fonts = FONTS[split]
    for _ in range(80):
        size = int(math.exp(rng.uniform(math.log(sizes[0]), math.log(sizes[1] + 1))))
        font = load_font(fonts[rng.integers(len(fonts))], size)
        line = _line_of_text(rng, int(rng.integers(1, 6)), WORDS[split])
        box = font.getbbox(line)
        width, height = int(box[2]) + 8, int(box[3]) + 8
        turn = rng.uniform(-most, most)
        patch = Image.new("RGBA", (width, height))
        rotated = patch.rotate(turn, expand=True)
        if rotated.width > side or rotated.height > side:
            continue
        x, y = (int(rng.integers(0, side - n + 1)) for n in rotated.size)
        cells = np.s_[
            y * 64 // side : -(-(y + rotated.height) * 64 // side), x * 64 // side : -(-(x + rotated.width) * 64 // side)
        ]
        if taken[cells].any():
            continue
        taken[cells] = True
        under = np.asarray(image.crop((x, y, x + rotated.width, y + rotated.height)).convert("L")).mean() / 255
        gap = rng.uniform(0.3, 0.8)
        light = under + gap if under + gap <= 1 and (under - gap < 0 or rng.random() < 0.5) else under - gap
        outline = {"stroke_width": max(1, size // 14), "stroke_fill": _colour(rng, 1.0 - light)} if rng.random() < 0.3 else {}
        ImageDraw.Draw(patch).text((4, 4), line, font=font, fill=(*_colour(rng, float(np.clip(light, 0, 1))), 255), **outline)
        rotated = patch.rotate(turn, Image.Resampling.BICUBIC, expand=True)
        image.paste(rotated, (x, y), rotated)
        corners = np.array([(box[0], box[1]), (box[2], box[1]), (box[2], box[3]), (box[0], box[3])], float) + 4
        c, s = math.cos(math.radians(turn)), math.sin(math.radians(turn))
        corners = (corners - [width / 2, height / 2]) @ np.array([[c, -s], [s, c]]) + [
            x + rotated.width / 2,
            y + rotated.height / 2,
        ]
        ImageDraw.Draw(mask).polygon([tuple(p) for p in corners], fill=1)
        polygons.append(corners)
        texts.append(line)
    return Document(_photograph(rng, image), torch.from_numpy(np.array(mask)), polygons, texts)


NOTHING, NOT_DOCUMENTS = 0.35, 0.5  # shares of pictures without text, and of those with captions


def scene(seed: int) -> Document:
    """One training picture: a document (half of them), captions (15 %), or nothing (35 %)."""
    rng = np.random.default_rng([seed, 7])
    kind = rng.random()
    if kind < NOTHING:
        return nothing(seed)
    low = float(np.exp(rng.uniform(np.log(8), np.log(40))))
    sizes = (int(low), int(min(90, low * rng.uniform(1.2, 3))))
    if kind < NOT_DOCUMENTS:
        return captions(seed, sizes=sizes)
    share = float(rng.choice([0.03, 0.1, 0.2], p=[0.3, 0.4, 0.3]))
    angle = float(rng.choice([8, 180], p=[0.3, 0.7]))
    return document(seed, SIDE, sizes, "train", share, angle, [*CLUTTER["train"], *LOOKALIKES, *LOOKALIKES])


def small(seed: int) -> Document:
    """A training document with small letters, half of them nearly upright, more than `scene` has."""
    rng = np.random.default_rng([seed, 8])
    share, angle = float(rng.choice([0.05, 0.1, 0.2])), float(rng.choice([8, 8, 60, 180]))
    return document(100000 + seed, SIDE, (8, 30), "train", share, angle, [*CLUTTER["train"], *LOOKALIKES])
