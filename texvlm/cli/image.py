"""Reads a picture from a file, whatever its kind, as RGB."""

from __future__ import annotations

import dataclasses
import io
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from texvlm.cli import Complaint

GAP = 2.0  # what shrinks a picture fast, while it is decoded or by whole pixels, leaves it at least so many times too large for Lanczos


@dataclasses.dataclass
class Picture:
    """A picture as it was read, upright and in RGB."""

    image: Tensor  # uint8 [3, H, W], or float32 in [0, 1] where 8 bits would lose something
    path: Path  # "-" is standard input
    remarks: list[str]  # what was done to it, in plain words
    full: tuple[int, int]  # (height, width) before it was shrunk, upright

    @property
    def name(self) -> str:  # noqa: D102
        return "standard input" if str(self.path) == "-" else self.path.name

    @property
    def height(self) -> int:  # noqa: D102
        return int(self.image.shape[1])

    @property
    def width(self) -> int:  # noqa: D102
        return int(self.image.shape[2])


def read_picture(name: str, max_size: int | None = None, *, content: bytes | None = None) -> Picture:
    """Reads any picture that Pillow reads.

    EXIF orientation is honoured; grey, palette, CMYK and 16-bit pictures become RGB; transparency is laid
    over white.

    Args:
        name: the file; "-" is standard input.
        max_size: a longer side is shrunk to this many pixels, a JPEG's in part while it is decoded. Pillow's limit of pixels, which
            is there for memory's sake, then does not hold.
        content: of the file, where it has been read: the name is then what errors call it.

    Raises:
        Complaint: with one line that says what is wrong with the file.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise Complaint("reading pictures needs Pillow: pip install pillow") from None

    path, source = Path(name), _source(name) if content is None else io.BytesIO(content)
    try:
        with warnings.catch_warnings(), _any_size(max_size is not None):
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(source) as file:
                size = file.size
                if max_size is not None:
                    wanted = (max(1, round(GAP * side * max_size / max(size))) for side in size)
                    file.draft(file.mode, tuple(wanted))
                file.load()
                return _to_rgb(file, size, path, max_size)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        limit = f"{Image.MAX_IMAGE_PIXELS:,} pixels"
        raise Complaint(
            f"{path} has more than {limit}, Pillow's limit: --max-size 2048 reads it all the same, and shrinks it"
        ) from None
    except MemoryError:
        raise Complaint(f"{path} has more pixels than there is memory for") from None
    except UnidentifiedImageError:
        raise Complaint(f"{path} is not a picture that Pillow can read") from None
    except PermissionError:
        raise Complaint(f"{path} may not be read (permission denied)") from None
    except (
        OSError,
        SyntaxError,
        ValueError,
        EOFError,
    ) as error:  # what Pillow's decoders raise on broken files
        raise Complaint(f"{path} is broken: {error}") from None


@contextmanager
def _any_size(allowed: bool) -> Iterator[None]:
    """Lifts Pillow's limit of pixels."""
    from PIL import Image

    limit = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = None if allowed else limit
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = limit


def _source(name: str) -> Path | io.BytesIO:
    """What Pillow opens for a name."""
    if not name.strip():
        raise Complaint("the picture's name is empty")
    if name == "-":
        if sys.stdin is None or sys.stdin.isatty():
            raise Complaint("- is a picture on standard input, and there is none: texvlm select - < photo.jpg")
        if not (content := sys.stdin.buffer.read()):
            raise Complaint("standard input is empty")
        return io.BytesIO(content)
    path = Path(name)
    if not path.exists():
        raise Complaint(f"no such file: {path}")
    if path.is_dir():
        raise Complaint(f"{path} is a folder, not a picture")
    return path


def _to_rgb(file: Any, size: tuple[int, int], path: Path, max_size: int | None) -> Picture:
    """Of a file of this `size` (width, height), which may have been shrunk as it was loaded."""
    import numpy as np
    from PIL import Image

    from texvlm import pictures

    remarks = []
    upright = pictures.upright(file)
    if upright is not file:
        remarks.append("turned upright as its EXIF orientation says")
    on_its_side = file.getexif().get(0x0112, 1) in (5, 6, 7, 8)
    full = size if on_its_side else size[::-1]  # (height, width)

    if pictures.is_deep(upright):
        try:
            grey, scale = pictures.deep_grey(upright)
        except ValueError as error:
            raise Complaint(f"{path} has {error}") from None
        upright = Image.fromarray(grey)
        remarks.append(f"grey values divided by {scale:g}")
    elif upright.getbands()[-1] in "Aa" or "transparency" in upright.info:
        layer = upright.convert("RGBA")
        if np.asarray(layer)[..., 3].min() < 255:
            remarks.append("transparent parts laid over white")
        upright = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    elif upright.mode == "LAB":  # which Pillow does not convert by itself
        upright = _from_lab(upright, path)
    elif upright.mode != "RGB":
        upright = upright.convert("RGB")

    if max_size is not None and max(full) > max_size:
        height, width = (max(1, round(side * max_size / max(full))) for side in full)
        upright = upright.resize((width, height), Image.Resampling.LANCZOS, reducing_gap=GAP)
        remarks.append(f"shrunk from {full[1]} x {full[0]} (--max-size)")

    pixels = torch.from_numpy(np.array(upright))  # a writable copy
    if pixels.ndim == 2:
        pixels = pixels.clamp(0, 1).unsqueeze(-1).expand(-1, -1, 3)
    return Picture(pixels.permute(2, 0, 1).contiguous(), path, remarks, full)


def _from_lab(image: Any, path: Path) -> Any:
    """CIE L*a*b*, as TIFF has it, in sRGB."""
    from PIL import ImageCms

    try:
        return ImageCms.profileToProfile(image, ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB"), outputMode="RGB")
    except (ImageCms.PyCMSError, ImportError) as error:
        raise Complaint(f"{path} is in Lab colours, which this Pillow does not convert: {error}") from None
