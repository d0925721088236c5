"""Files that were good: pictures, films, weights, with a few bytes changed, cut, doubled or moved."""

from __future__ import annotations

import functools
import io
import random
import re
import struct
import tempfile
from pathlib import Path

import numpy as np
import torch

import texvlm

KINDS = ("jpeg", "progressive", "png", "palette", "gif", "webp", "tiff", "bmp", "film", "pca", "weights", "config")
PICTURES = KINDS[:8]


@functools.cache
def good(kind: str) -> bytes:
    """A file of this kind, small."""
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (24, 20, 3), dtype=np.uint8)
    out = io.BytesIO()
    if kind in PICTURES:
        picture = Image.fromarray(pixels)
        picture = picture.quantize(16) if kind == "palette" else picture
        names = {"progressive": "jpeg", "palette": "png"}
        exif = {"exif": b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"} if kind == "jpeg" else {}
        picture.save(out, names.get(kind, kind), **({"progressive": True} if kind == "progressive" else exif))
    elif kind == "film":
        import av

        with av.open(out, "w", "mp4") as film:
            stream = film.add_stream("mpeg4", 10)
            stream.width, stream.height = 32, 32
            for i in range(4):
                film.mux(stream.encode(av.VideoFrame.from_ndarray(np.full((32, 32, 3), 60 * i, np.uint8))))
            film.mux(stream.encode(None))
    elif kind == "pca":
        np.savez(out, **texvlm.PCA.fit(torch.rand(30, 20, generator=torch.Generator().manual_seed(0)), axes=4).arrays())
    else:
        with tempfile.TemporaryDirectory() as folder:
            texvlm.Allocator(participation=()).save_pretrained(folder)
            return (Path(folder) / ("weights.safetensors" if kind == "weights" else "config.json")).read_bytes()
    return out.getvalue()


def mutated(kind: str, seed: int) -> bytes:
    """That file with some damage; the same for the same seed."""
    rng, content = random.Random(f"{kind} {seed}"), bytearray(good(kind))
    for _ in range(rng.choice((0, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(content) + 1) if rng.random() < 0.5 else rng.randrange(min(64, len(content)) + 1)
        how, length = rng.randrange(6), rng.choice((1, 2, 4, 32, 200))
        if how == 0:
            content[at : at + 1] = bytes([rng.randrange(256)])
        elif how == 1:
            content[at : at + 4] = struct.pack(
                rng.choice("<>") + "I", rng.choice((0, 1, 255, 65535, 2**31 - 1, 2**31, 2**32 - 1))
            )
        elif how == 2:
            del content[at : at + length]
        elif how == 3:
            content[at:at] = content[at : at + length]
        elif how == 4:
            content[at:at] = rng.randbytes(length)
        else:
            del content[at:]
    return bytes(content)


@functools.cache
def room() -> Path:
    """Where files are written that are read by their names; of this process, and as long as it."""
    keep = tempfile.TemporaryDirectory(prefix="texvlm-fuzz-")
    _kept.append(keep)
    return Path(keep.name)


_kept: list[tempfile.TemporaryDirectory[str]] = []


def path(kind: str, seed: int) -> Path:
    """A damaged file, by its name."""
    out = room() / f"file.{ {'film': 'mp4', 'pca': 'npz'}.get(kind, kind) }"
    out.write_bytes(mutated(kind, seed))
    return out


def folder(seed: int) -> Path:
    """Of a module that was saved, damaged."""
    rng = random.Random(seed)
    for name, kind in (("config.json", "config"), ("weights.safetensors", "weights")):
        (room() / name).write_bytes(mutated(kind, seed) if rng.random() < 0.6 else good(kind))
    return room()


def another(rng: random.Random, usual: str) -> str:
    """The same call with other damage."""
    kind, seed = re.search(r"'(\w+)'", usual), rng.randrange(2**20)
    if kind and kind[1] in PICTURES:
        usual = usual.replace(kind[0], repr(rng.choice(PICTURES)))
    return re.sub(r"\d+\)$", f"{seed})", usual)
