"""What is taken as a picture: tensors, arrays, PIL images and lists of them, as [B, C, H, W]."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

    OneImage: TypeAlias = Tensor | np.ndarray | Image.Image
    ImageLike: TypeAlias = OneImage | Sequence[OneImage]

_COLOURS = 4  # the most channels of a picture: red, green, blue, alpha
_BRIGHT = 4.0  # beyond what an overshooting filter makes of [0, 1], or standardised pictures hold
_LEAST_SIDE = 16  # below, a tensor that ends in 3 or 4 is a small feature map


def as_image(image: ImageLike, argument: str = "image") -> Tensor:
    """A picture as [B, C, H, W], without copying tensors: [C, H, W] gets a batch of one; uint8 stays uint8.

    Args:
        image: Tensor [C, H, W] or [B, C, H, W], floating point or uint8; ndarray [H, W], [H, W, C] (colour last, as OpenCV and PIL lay it
            out) or [C, H, W], or a batch of the last two, uint8, uint16 (divided by 65535) or floating point; a PIL image, turned as its
            EXIF orientation says (palette, 1-bit and CMYK pictures are converted to RGB, grey ones of 16 or 32 bits scaled to [0, 1]);
            or a list of pictures of one size and dtype.
        argument: what errors call it.

    An array is colour last where its last dimension is at most 4, else colour first where that one is; of neither, uint8 is colour last
    and others are refused. A tensor whose last dimension is 3 or 4, though it would be its width, is taken as it is, with a warning.
    """
    picture = _as_planes(image, argument)
    if isinstance(image, Tensor) and not torch.compiler.is_compiling() and _colour_last(picture):
        order = "2, 0, 1" if image.dim() == 3 else "0, 3, 1, 2"
        warn_caller(
            f"{argument} {list(image.shape)} is taken as {_described(picture)}: if its colours are last, hand in permute({order})"
        )
    return picture


def as_rgb(image: ImageLike, argument: str = "image") -> Tensor:
    """A picture as [B, 3, H, W] without copying: grey (one channel) is repeated, alpha (a fourth) is dropped.

    A floating-point picture on the CPU that reaches beyond 1 by far gets a warning: some 32 of its values are looked at, which takes about
    three microseconds. On a GPU that would wait for the device, and nothing is looked at; nor in bfloat16, or while compiling.
    """
    picture = _as_planes(image, argument)
    channels = picture.shape[1]
    if channels not in (1, 3, 4):
        mend = "; are its colours last? permute(2, 0, 1) brings them first" if _colour_last(picture) else ""
        raise ValueError(f"{argument} must be grey, RGB or RGBA (1, 3 or 4 channels), got {channels} channels{mend}")
    if picture.is_cpu and picture.dtype != torch.uint8 and not torch.compiler.is_compiling() and _is_bright(picture):
        warn_caller(
            "a floating-point picture has values in [0, 1], and this one reaches far beyond: divide it by 255, or hand in uint8"
        )
    return picture if channels == 3 else picture.expand(-1, 3, -1, -1) if channels == 1 else picture[:, :3]


def as_previous(previous: ImageLike, image: Tensor) -> Tensor:
    """The previous picture like `image`: RGB, of its shape and dtype, so that their lumas can be compared."""
    other = as_rgb(previous, "previous")
    if other.shape[0] == 1 and image.shape[0] > 1:
        other = other.expand(image.shape[0], -1, -1, -1)
    if other.shape != image.shape:
        raise ValueError(f"previous must have the shape of image, {list(image.shape)}, got {list(other.shape)}")
    if other.dtype != image.dtype:
        raise ValueError(f"previous must have the dtype of image, {image.dtype}, got {other.dtype}")
    return other


def as_float(picture: Tensor) -> Tensor:
    """uint8 divided by 255, floating point left alone."""
    return picture.float() / 255 if picture.dtype == torch.uint8 else picture


def upright(image: Any) -> Any:
    """A PIL image turned and mirrored as its EXIF orientation says; the image itself where that says nothing."""
    if image.getexif().get(0x0112, 1) == 1:
        return image
    from PIL import ImageOps

    return ImageOps.exif_transpose(image)


def is_deep(image: Any) -> bool:
    """Whether a PIL image is grey in 16 or 32 bits, whole numbers or floating point."""
    return bool(image.mode.startswith("I") or image.mode == "F")


def deep_grey(image: Any) -> tuple[np.ndarray, float]:
    """A grey PIL image of 16 or 32 bits as float32 [H, W] in [0, 1], and what it was divided by.

    Whole numbers are divided by 65535; floating point by the first of 1, 255 and 65535 that holds its maximum.

    Raises:
        ValueError: values below 0, above 65535 or not finite.
    """
    import numpy as np

    grey = np.asarray(image, dtype=np.float32)
    top, bottom = float(grey.max(initial=0.0)), float(grey.min(initial=0.0))
    if not np.isfinite(grey).all() or bottom < 0 or top > 65535:
        raise ValueError(f"pixels outside what a picture can show (mode {image.mode})")
    scale = 65535.0 if image.mode.startswith("I") else next(s for s in (1.0, 255.0, 65535.0) if top <= s)
    return grey / np.float32(scale), scale


def _as_planes(image: ImageLike, argument: str) -> Tensor:
    """`as_image` without its doubts."""
    if isinstance(image, Tensor):
        if image.dim() not in (3, 4):
            raise ValueError(f"{argument} must be [C, H, W] or [B, C, H, W], got {list(image.shape)}")
        if not (image.is_floating_point() or image.dtype == torch.uint8):
            raise ValueError(f"{argument} must be floating point or uint8, got {image.dtype}")
        return image if image.dim() == 4 else image[None]
    if isinstance(image, (list, tuple)):
        return _from_list(image, argument)
    import numpy as np

    array: object = _from_pil(image, argument) if hasattr(image, "getbands") else image
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{argument} must be a tensor, an ndarray, a PIL image or a list of them, got {type(image).__name__}")
    return _from_array(array, argument)


def _from_list(images: Sequence[OneImage], argument: str) -> Tensor:
    pictures = [_as_planes(image, f"{argument}[{i}]") for i, image in enumerate(images)]
    if not pictures:
        raise ValueError(f"{argument} must hold at least one picture, got an empty list")
    for i, picture in enumerate(pictures):
        for what, wanted, got in (
            ("size", _described(pictures[0]), _described(picture)),
            ("dtype", pictures[0].dtype, picture.dtype),
            ("device", pictures[0].device, picture.device),
        ):
            if got != wanted:
                raise ValueError(f"{argument}[{i}] must have the {what} of {argument}[0], {wanted}, got {got}")
    return torch.cat(pictures)


def _from_array(array: np.ndarray, argument: str) -> Tensor:
    import numpy as np

    if array.ndim not in (2, 3, 4) or (array.dtype not in (np.uint8, np.uint16) and array.dtype.kind != "f"):
        raise ValueError(
            f"{argument} as an ndarray must be uint8, uint16 or floating point, [H, W], [H, W, C], [C, H, W] or a batch of these, "
            f"got {array.dtype} {list(array.shape)}"
        )
    if array.dtype == np.uint16:
        array = array.astype(np.float32) / np.float32(65535)
    first, last = (array.shape[-3], array.shape[-1]) if array.ndim > 2 else (0, 1)
    colour_last = last <= _COLOURS or (first > _COLOURS and array.dtype == np.uint8)
    if not colour_last and first > _COLOURS:
        raise ValueError(
            f"{argument} as an ndarray of {list(array.shape)} may be [H, W, C] or [C, H, W]: hand it in as a tensor, which is [C, H, W]"
        )
    if not array.flags.writeable or not array.dtype.isnative or any(s < 0 for s in array.strides):
        array = array.astype(array.dtype.newbyteorder("="))
    tensor = torch.from_numpy(array)
    if tensor.dim() == 2:
        return tensor[None, None]
    tensor = tensor if tensor.dim() == 4 else tensor[None]
    return tensor.permute(0, 3, 1, 2) if colour_last else tensor


def _from_pil(image: Any, argument: str) -> np.ndarray:
    import numpy as np

    image = upright(image)
    if is_deep(image):
        try:
            return deep_grey(image)[0]
        except ValueError as error:
            raise ValueError(f"{argument} has {error}: hand it in as a float tensor scaled to [0, 1]") from None
    if image.mode not in ("L", "RGB", "RGBA"):
        image = image.convert(
            "RGBA" if ("A" in image.getbands() and image.mode != "LAB") or "transparency" in image.info else "RGB"
        )
    return np.asarray(image)


def _described(picture: Tensor) -> str:
    _, channels, height, width = picture.shape
    return f"{channels} channels of {height} x {width}"


def _colour_last(picture: Tensor) -> bool:
    """Whether [B, C, H, W] looks like [B, H, W, C]: by its shape alone."""
    _, channels, height, width = picture.shape
    return width in (3, 4) and channels >= _LEAST_SIDE and height >= _LEAST_SIDE


def _is_bright(picture: Tensor) -> bool:
    """Whether one of some 32 values, spread over the picture, is far beyond 1."""
    try:
        values = (picture.detach() if picture.requires_grad else picture).numpy()
    except (RuntimeError, TypeError):  # bfloat16, or nothing to look at: a fake tensor, or one within a transform
        return False
    step = values.size // 32 | 1  # odd, so that it does not stay in one column
    return bool(values.size) and max(values.flat[::step].tolist()) > _BRIGHT


def warn_caller(message: str) -> None:
    """A warning at the line that called texvlm, once for each such line, as Python has it."""
    frame, level = sys._getframe(1), 3
    while (above := frame.f_back) is not None and str(above.f_globals.get("__name__")).partition(".")[0] in ("texvlm", "torch"):
        frame, level = above, level + 1
    warnings.warn(message, stacklevel=level)
