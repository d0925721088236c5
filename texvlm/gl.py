"""Stem `gl`: mipmaps by the graphics driver, through OpenGL without a display.

`texvlm.generate_mipmaps(image, backend="gl")` is the way in. It is there to compare with, and for machines whose driver does it
well; nothing else needs it. One thread per device owns an OpenGL context, libEGL is opened on the first call, and tensors on a
CUDA device are shared with OpenGL without leaving it (not inside a CUDA graph).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from texvlm._ext import _C, fake, ops, texel_dtype
from texvlm.pictures import as_image
from texvlm.pyramid import levels_or_all, reducer_names, texel_count
from texvlm.texture import Texture

if TYPE_CHECKING:
    from texvlm.pictures import ImageLike

OURS = 1e-5  # as far as a weight of the driver's filter may be from ours (as in csrc/gl.cpp)
FIXED_POINT = 2.0**-8  # filter units of graphics cards have 8 fractional bits


@dataclass(frozen=True)
class Status:
    """What OpenGL offers for one device.

    Attributes:
        reason: None, or the one line that says why there is no OpenGL; then the rest is empty.
        vendor, renderer, version: as the driver names itself.
        platform: the EGL platform: "surfaceless" (Mesa) or "device" (a graphics card).
        max_size, max_layers: GL_MAX_TEXTURE_SIZE and GL_MAX_ARRAY_TEXTURE_LAYERS; a batch of B pictures of C channels has
            B * ceil(C / 4) layers.
        even_filter: "box" where even sides are halved as texvlm does, else "other". Found by impulses.
        odd_filter: "box" (texvlm's polyphase box), "bilinear" (at the centre of the destination texel; loses texels), "other".
    """

    reason: str | None = None
    vendor: str = ""
    renderer: str = ""
    version: str = ""
    platform: str = ""
    max_size: int = 0
    max_layers: int = 0
    even_filter: str = ""
    odd_filter: str = ""

    @property
    def available(self) -> bool:
        """Whether there is an OpenGL context."""
        return self.reason is None

    def differentiable(self, height: int, width: int, levels: int | None = None) -> bool:
        """Whether the driver halves a picture of this size as texvlm does, so that its gradient is known."""
        levels = levels_or_all(levels, height, width)
        sides = [side >> level for level in range(levels - 1) for side in (height, width)]
        odd = any(side > 1 and side % 2 for side in sides)
        return self.even_filter == "box" and (not odd or self.odd_filter == "box")


def status(device: torch.device | str = "cpu") -> Status:
    """What OpenGL offers for tensors on this device; starts its thread. Never raises: `reason` says what is missing.

    Args:
        device: "cpu" (software, or any EGL device) or a CUDA device, for which the EGL device of the same card is looked for.

    Example:
        >>> import texvlm
        >>> status = texvlm.gl.status()
        >>> status.available or status.reason.startswith("no OpenGL here")
        True
    """
    try:
        device = torch.device(device)
    except RuntimeError:
        return Status(reason=f"no OpenGL here: {device!r} is no device")
    if device.type != "cpu" and not torch.cuda.is_available():
        return Status(reason=f"no OpenGL here: no device {device}")
    try:
        found = _C.gl_status(
            -1 if device.type == "cpu" else torch.cuda.current_device() if device.index is None else device.index
        )
    except RuntimeError as error:
        return Status(reason=str(error).splitlines()[0].removeprefix("texvlm: "))
    even = "box" if found.pop("even_from_ours") <= OURS else "other"
    ours, bilinear = found.pop("odd_from_ours") <= OURS, found.pop("odd_from_bilinear") <= FIXED_POINT
    return Status(even_filter=even, odd_filter="box" if ours else "bilinear" if bilinear else "other", **found)


def stats() -> dict[str, int | float]:
    """What OpenGL has done in this process, and what it holds now.

    Returns:
        Done: contexts, textures_made, generated (calls of glGenerateMipmap). Held: textures, texture_bytes (per device at most
        $TEXVLM_GL_CACHE_MB, 1024 by default, or one texture), registered (textures shared with CUDA), layered (of these, those
        whose levels CUDA sees as one array each; the layers of the others are copied one by one).
    """
    return {name: value for name, value in _C.gl_statistics().items() if not name.endswith("_seconds")}


@contextmanager
def profile() -> Iterator[dict[str, float]]:
    """Times the steps of the GL path: within it, each step is waited for.

    Yields:
        A dict that afterwards holds the seconds of all calls together: upload, generate, read. For CUDA tensors upload and read
        are mapping the texture, copying inside the card, and unmapping it.
    """
    steps: dict[str, float] = {}
    before = _C.gl_statistics()
    _C.gl_profile(True)
    try:
        yield steps
    finally:
        _C.gl_profile(False)
        after = _C.gl_statistics()
        steps.update({name: after[f"{name}_seconds"] - before[f"{name}_seconds"] for name in ("upload", "generate", "read")})


def close() -> None:
    """Ends the OpenGL threads and gives back their contexts and textures; the next call starts anew."""
    _C.gl_close()


def generate(
    image: ImageLike, reducer: str | Sequence[str] = "mean", levels: int | None = None, dtype: torch.dtype | None = None
) -> Texture:
    """`texvlm.generate_mipmaps` by the graphics driver: one texture array and one glGenerateMipmap for the whole batch.

    Even sides are the 2 x 2 box (within 1e-6 of ours for values in [0, 1]; float16 within one unit in the last place per level,
    because drivers may round down). Odd sides are what the driver makes of them: see `status().odd_filter`.

    Args:
        image: as for `Texture`; float32, float16 or uint8. Others are refused: OpenGL has no such textures.
        reducer: "mean" only.
        levels: all by default.
        dtype: of the texels: float32 or float16.

    Returns:
        Texture. Gradients are ours (`generate_mipmaps_backward`), where the driver's filter is ours: all sides even until they are
        1, or `odd_filter == "box"`. Otherwise an image that requires a gradient is refused.

    Raises:
        RuntimeError: in one line, when there is no OpenGL, the picture or the batch is too large for it, its memory is
            exhausted, the context is lost twice in a row, a gradient is asked for that is not known, or a CUDA graph is captured.
    """
    if any(name != "mean" for name in reducer_names(reducer)):
        raise ValueError(f"backend='gl' halves by the reducer mean only, got {reducer!r}; use backend='native'")
    picture = as_image(image)
    height, width = picture.shape[2:]
    levels = levels_or_all(levels, height, width)
    data = ops.generate_mipmaps_gl(picture, levels, dtype)
    return Texture.from_data(data, height, width, levels, reducer)


@fake("generate_mipmaps_gl")
def _(image: Tensor, levels: int, dtype: torch.dtype | None = None) -> Tensor:
    batch, channels, height, width = image.shape
    return image.new_empty((batch, texel_count(height, width, levels), channels), dtype=texel_dtype(image, dtype))
