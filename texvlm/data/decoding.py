"""Pictures as they lie in files, as tensors: a fast decoder for plain JPEGs where one is installed, Pillow for everything else."""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

Decode: TypeAlias = Callable[[bytes], Tensor]


def _torchcodec() -> Decode:
    from torchcodec.decoders import decode_jpeg

    return decode_jpeg  # type: ignore[no-any-return]


def _simplejpeg() -> Decode:
    from simplejpeg import decode_jpeg

    return lambda content: torch.from_numpy(decode_jpeg(content)).permute(2, 0, 1)


JPEG_DECODERS: dict[str, Callable[[], Decode]] = {"torchcodec": _torchcodec, "simplejpeg": _simplejpeg}
"""In the order in which they are tried. All are libjpeg-turbo underneath, as Pillow is: the pixels are the same."""

DECODERS = ("auto", *JPEG_DECODERS, "pillow")


@functools.cache
def jpeg_decoder(name: str = "auto") -> Decode | None:
    """What decodes plain JPEGs under this name of `DECODERS`; None: Pillow, as everything else.

    Raises:
        ImportError: a decoder that was named does not load, with the reason.
    """
    for known, load in JPEG_DECODERS.items():
        if name not in ("auto", known):
            continue
        try:
            return load()
        except Exception as error:  # an import fails in many ways: a library that is missing is an OSError or a RuntimeError
            if name != "auto":
                why = str(error).strip().partition("\n")[0]
                raise ImportError(f"decoder {name!r} does not load: {why}; beside any torch: pip install simplejpeg") from error
    return None


def decode(content: bytes, decoder: str = "auto", max_size: int | None = None) -> Tensor:
    """A picture file's pixels, upright, in RGB; transparency is laid over white.

    Args:
        content: of a file of any format that Pillow reads.
        decoder: see `DECODERS`. "auto" is the first that is installed.
        max_size: a longer side is shrunk to this many pixels, always by Pillow, a JPEG's in part while it is decoded. Pillow's limit of
            pixels, which is there for memory's sake, then does not hold.

    Returns:
        uint8 [3, H, W], or float32 in [0, 1] where 8 bits would lose something. The same whatever the decoder.

    Raises:
        ValueError: the picture is broken, or of no format that is known.
        ImportError: the decoder, or Pillow, is not installed.
    """
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise ImportError("decoding pictures needs Pillow: pip install pillow") from None
    fast = jpeg_decoder(decoder)
    if fast is not None and content[:2] == b"\xff\xd8" and _is_plain(content, max_size):
        with contextlib.suppress(Exception):  # Pillow says what is wrong with it, so that all decoders agree
            return fast(content)

    from texvlm.cli import Complaint
    from texvlm.cli.image import read_picture

    try:
        return read_picture("the picture", max_size, content=content).image
    except Complaint as complaint:
        raise ValueError(str(complaint)) from None


def _is_plain(content: bytes, max_size: int | None) -> bool:
    """Whether a JPEG is grey or RGB, upright, and no larger than asked for or than Pillow's limit of pixels: only its header is read."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(content)) as header:
                fits = max_size is None or max(header.size) <= max_size
                return fits and header.format == "JPEG" and header.mode in ("RGB", "L") and header.getexif().get(0x0112, 1) == 1
    except Exception:  # whatever is wrong with it, Pillow will say
        return False
