"""`Texture`: all levels of a pyramid in one buffer, and what is needed to read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from texvlm import pyramid
from texvlm._ext import integer
from texvlm.footprint import sample_grad
from texvlm.hardware import sample_grad_hardware, sample_lod_hardware
from texvlm.patches import extract_patches
from texvlm.sample import sample_lod

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

    ImageLike: TypeAlias = Tensor | np.ndarray | Image.Image


def as_image(image: ImageLike, argument: str = "image") -> Tensor:
    """A picture as [B, C, H, W], without copying tensors: [C, H, W] gets a batch of one; uint8 stays uint8.

    Args:
        image: Tensor [C, H, W] or [B, C, H, W], floating point or uint8; uint8 ndarray [H, W], [H, W, C] (colour last, as OpenCV
            and PIL lay it out); or a PIL image (palette, 1-bit and CMYK pictures are converted to RGB).
        argument: what errors call it.
    """
    if isinstance(image, Tensor):
        if image.dim() not in (3, 4):
            raise ValueError(f"{argument} must be [C, H, W] or [B, C, H, W], got {list(image.shape)}")
        if not (image.is_floating_point() or image.dtype == torch.uint8):
            raise ValueError(f"{argument} must be floating point or uint8, got {image.dtype}")
        return image if image.dim() == 4 else image[None]
    import numpy as np

    array: object = _from_pil(image) if hasattr(image, "getbands") else image
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{argument} must be a tensor, a uint8 ndarray [H, W, C] or a PIL image, got {type(image).__name__}")
    if array.dtype != np.uint8 or array.ndim not in (2, 3):
        raise ValueError(
            f"{argument} as an ndarray must be uint8 [H, W] or [H, W, C], got {array.dtype} {list(array.shape)}; "
            "hand others in as a float tensor [C, H, W] scaled to [0, 1]"
        )
    if not array.flags.writeable or any(s < 0 for s in array.strides):
        array = array.copy()
    tensor = torch.from_numpy(array)
    return (tensor[None] if tensor.dim() == 2 else tensor.permute(2, 0, 1))[None]


def as_rgb(image: ImageLike, argument: str = "image") -> Tensor:
    """A picture as [B, 3, H, W] without copying: grey (one channel) is repeated, alpha (a fourth) is dropped."""
    picture = as_image(image, argument)
    if picture.shape[1] not in (1, 3, 4):
        raise ValueError(f"{argument} must be grey, RGB or RGBA (1, 3 or 4 channels), got {picture.shape[1]} channels")
    return picture.expand(-1, 3, -1, -1) if picture.shape[1] == 1 else picture[:, :3]


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


def _from_pil(image: Any) -> np.ndarray:
    import numpy as np

    if image.mode.startswith(("I", "F")):
        raise ValueError(
            f"image of mode {image.mode!r} has more than 8 bits a channel: hand it in as a float tensor scaled to [0, 1]"
        )
    if image.mode not in ("L", "RGB", "RGBA"):
        image = image.convert(
            "RGBA" if ("A" in image.getbands() and image.mode != "LAB") or "transparency" in image.info else "RGB"
        )
    return np.asarray(image)


class Texture:
    """A picture or feature map with all its mip levels in ONE buffer.

    Level l has max(1, H >> l) x max(1, W >> l) texels; levels follow one another in `data` [B, T, C], channels last. A texture
    is a pytree (it goes through `torch.compile`, `tree_map` and autograd as its one tensor) and can be pickled and deep-copied.

    Args:
        image: [C, H, W] or [B, C, H, W] float (left as it is) or uint8 (divided by 255), any strides; uint8 ndarray [H, W, C];
            a PIL image. With `layout="spatial"`: keys or values [B, N, D] on a grid of rows x cols = N places.
        reducer: "mean", "max", "min" or "mode" for all channels, or one name per channel. How texels become one on the next level.
        levels: how many levels to build; all of them, 1 + floor(log2(max(H, W))), by default.
        dtype: of the texels: float32, float64, float16 or bfloat16; by default the picture's, float32 for uint8.
        names: one name per channel, for `index`.
        backend: what `sample` and `sample_footprint` go through: "native" kernels, or "texture" hardware (see `texvlm.hardware`; not for
            float64). It survives `to`, `replace`, pickling and pytrees.

    Gradients flow from `data`, and from everything sampled, to a floating-point `image`.

    Example:
        >>> import torch, texvlm
        >>> texture = texvlm.Texture(torch.rand(3, 480, 640))
        >>> texture.levels, texture.level(1).shape
        (10, torch.Size([1, 3, 240, 320]))
    """

    data: Tensor
    height: int
    width: int
    levels: int
    reducer: tuple[str, ...]
    names: tuple[str, ...]
    meta: dict[str, Any]
    backend: str = "native"

    def __init__(
        self,
        image: ImageLike,
        reducer: str | Sequence[str] = "mean",
        levels: int | None = None,
        dtype: torch.dtype | None = None,
        *,
        layout: str = "image",
        grid: tuple[int, int] | None = None,
        names: Sequence[str] | None = None,
        backend: str = "native",
    ) -> None:
        if layout not in ("image", "spatial"):
            raise ValueError(f"layout must be 'image' or 'spatial', got {layout!r}")
        if layout == "spatial":
            picture = _spatial(image, grid)
        elif grid is not None:
            raise ValueError("grid goes with layout='spatial' only")
        else:
            picture = as_image(image)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, got {dtype!r}")
        height, width = picture.shape[2:]
        levels = pyramid.levels_or_all(levels, height, width)
        reducer = pyramid.reducer_names(reducer)
        data = torch.ops.texvlm.generate_mipmaps(picture, reducer, levels, dtype)
        self._set(data, height, width, levels, tuple(reducer), tuple(names or ()), {}, backend)

    def _set(
        self,
        data: Tensor,
        height: int,
        width: int,
        levels: int,
        reducer: tuple[str, ...],
        names: tuple[str, ...],
        meta: Mapping[str, Any],
        backend: str,
    ) -> None:
        _check_backend(backend, data)
        channels = data.shape[-1]
        if not data.is_floating_point():
            raise ValueError(f"data must be floating point, got {data.dtype}")
        if len(reducer) not in (1, channels):
            raise ValueError(f"reducer must be one name, or one for each of the {channels} channels, got {len(reducer)} names")
        if names and len(names) != channels:
            raise ValueError(f"names must name each of the {channels} channels, got {len(names)} names")
        if len(set(names)) != len(names):
            raise ValueError(f"names must differ, got {', '.join(names)}")
        self.data, self.height, self.width, self.levels = data, height, width, levels
        self.reducer, self.names, self.meta, self.backend = reducer, names, dict(meta), backend

    @classmethod
    def from_data(
        cls,
        data: Tensor,
        height: int,
        width: int,
        levels: int,
        reducer: str | Sequence[str] = "mean",
        names: Sequence[str] | None = None,
        meta: Mapping[str, Any] | None = None,
        backend: str = "native",
    ) -> Texture:
        """A texture around an existing packed buffer [B, T, C]; T must match the level table of (height, width, levels)."""
        height, width, levels = (
            integer(name, number, 1) for name, number in (("height", height), ("width", width), ("levels", levels))
        )
        if levels > (most := pyramid.level_count(height, width)):
            raise ValueError(f"levels must be from 1 to {most} for {height} x {width}, got {levels}")
        expected = pyramid.texel_count(height, width, levels)
        if data.dim() != 3 or data.shape[1] != expected:
            raise ValueError(
                f"data must be [B, T, C] with T = {expected} texels for {levels} levels of {height} x {width}, got {list(data.shape)}"
            )
        texture = cls.__new__(cls)
        texture._set(data, height, width, levels, tuple(pyramid.reducer_names(reducer)), tuple(names or ()), meta or {}, backend)
        return texture

    @property
    def channels(self) -> int:
        """C, the channels of each texel."""
        return self.data.shape[-1]

    def index(self, name: str) -> int:
        """The channel of this name."""
        if name not in self.names:
            raise KeyError(f"no channel {name!r}; this texture has {', '.join(self.names) or 'no names'}")
        return self.names.index(name)

    def level(self, level: int) -> Tensor:
        """Level `level` as a view [B, C, h, w]; negative levels count from the last."""
        if not -self.levels <= level < self.levels:
            raise IndexError(f"level must be in [{-self.levels}, {self.levels - 1}], got {level}")
        offset, height, width = pyramid.level_table(self.height, self.width, self.levels)[level]
        packed = self.data.narrow(1, offset, height * width)
        return packed.unflatten(1, (height, width)).permute(0, 3, 1, 2)

    def to(self, *args: Any, **kwargs: Any) -> Texture:
        """`Tensor.to` on the buffer: another device or dtype. Differentiable."""
        return self.replace(self.data.to(*args, **kwargs))

    def replace(self, data: Tensor) -> Texture:
        """The same texture around another buffer of the same level table."""
        return Texture.from_data(data, self.height, self.width, self.levels, self.reducer, self.names, self.meta, self.backend)

    def sample(
        self,
        uv: Tensor,
        lod: Tensor | float = 0.0,
        filter: str = "trilinear",
        address: str = "clamp",
        backend: str | None = None,
    ) -> Tensor:
        """Samples at uv [B, N, 2] and level of detail lod ([B, N] or a number) -> [B, N, C]. See `texvlm.sample_lod`.

        backend: "native" or "texture" for this call; the texture's own by default. See `texvlm.sample_lod_hardware`.
        """
        if self._through_hardware(backend):
            return sample_lod_hardware(self, uv, lod, filter, address)
        return sample_lod(self, uv, lod, filter, address)

    def sample_footprint(
        self,
        uv: Tensor,
        ddx: Tensor,
        ddy: Tensor,
        max_anisotropy: int = 16,
        address: str = "clamp",
        backend: str | None = None,
    ) -> Tensor:
        """Anisotropic samples at uv [B, N, 2] under pixel footprints ddx, ddy [B, N, 2] -> [B, N, C]. See `texvlm.sample_grad`.

        backend: "native" or "texture" for this call; the texture's own by default. See `texvlm.sample_grad_hardware`.
        """
        if self._through_hardware(backend):
            return sample_grad_hardware(self, uv, ddx, ddy, max_anisotropy, address)
        return sample_grad(self, uv, ddx, ddy, max_anisotropy, address)

    def _through_hardware(self, backend: str | None) -> bool:
        if backend is not None:
            _check_backend(backend, self.data)
        return (backend or self.backend) == "texture"

    def patches(
        self, center_uv: Tensor, lod: Tensor | float = 0.0, size: int = 16, axes: Tensor | None = None, address: str = "clamp"
    ) -> Tensor:
        """Square patches around center_uv [B, N, 2] -> [B, N, C, size, size]. See `texvlm.extract_patches`."""
        return extract_patches(self, center_uv, lod, size, axes, address)

    def __repr__(self) -> str:
        batch, _, channels = self.data.shape
        return (
            f"Texture({batch} x {channels} channels, {self.height} x {self.width}, {self.levels} levels, "
            f"{str(self.data.dtype).removeprefix('torch.')}, {self.data.device}"
            f"{'' if self.backend == 'native' else f', backend={self.backend!r}'})"
        )


def _check_backend(backend: str, data: Tensor) -> None:
    if backend not in ("native", "texture"):
        raise ValueError(f"backend of a texture must be 'native' or 'texture', got {backend!r}")
    if backend == "texture" and data.dtype == torch.float64:
        raise ValueError("backend='texture' has no float64 (texture hardware filters 16 and 32-bit floats): use 'native'")


def _spatial(keys: ImageLike, grid: tuple[int, int] | None) -> Tensor:
    sides = [integer("grid", side, 1) for side in grid] if isinstance(grid, Sequence) else []
    if not isinstance(keys, Tensor) or keys.dim() != 3 or len(sides) != 2 or sides[0] * sides[1] != keys.shape[1]:
        shape = list(keys.shape) if hasattr(keys, "shape") else type(keys).__name__
        raise ValueError(
            f"layout='spatial' takes a tensor [B, N, D] and grid=(rows, cols) with rows * cols = N, got {shape} and grid={grid}"
        )
    return keys.unflatten(1, sides).permute(0, 3, 1, 2)


def _flatten(t: Texture) -> tuple[list[Any], Any]:
    return [t.data], (t.height, t.width, t.levels, t.reducer, t.names, tuple(t.meta.items()), t.backend)


def _unflatten(children: Any, context: Any) -> Texture:
    (data,) = children
    height, width, levels, reducer, names, meta, backend = context
    texture = Texture.__new__(Texture)
    # tree_map puts arbitrary leaves here, so nothing is checked
    texture.data, texture.height, texture.width, texture.levels = data, height, width, levels
    texture.reducer, texture.names, texture.meta, texture.backend = reducer, names, dict(meta), backend
    return texture


pytree.register_pytree_node(Texture, _flatten, _unflatten, serialized_type_name="texvlm.Texture")
torch.serialization.add_safe_globals([Texture])  # torch.load as it is by default
