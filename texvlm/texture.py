"""`Texture`: all levels of a pyramid in one buffer, and what is needed to read it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data._utils.collate import default_collate_fn_map

from texvlm import pyramid
from texvlm._ext import integer, real_tensor
from texvlm.footprint import sample_grad
from texvlm.hardware import sample_grad_hardware, sample_lod_hardware
from texvlm.patches import extract_patches
from texvlm.pictures import as_image
from texvlm.sample import sample_lod

if TYPE_CHECKING:
    from texvlm.pictures import ImageLike

Lod: TypeAlias = "Tensor | float"


class Texture:
    """A picture or feature map with all its mip levels in ONE buffer.

    Level l has max(1, H >> l) x max(1, W >> l) texels; levels follow one another in `data` [B, T, C], channels last. A texture
    is a pytree (it goes through `torch.compile`, `tree_map` and autograd as its one tensor) and can be pickled and deep-copied; a
    `DataLoader` puts textures of one size together by itself (`stack`), and `TextureBuffer` holds one in a module.

    Args:
        image: [C, H, W] or [B, C, H, W] float (left as it is) or uint8 (divided by 255), any strides; an ndarray, [H, W, C] or
            [C, H, W]; a PIL image, turned as its EXIF orientation says; a list of these of one size: see `pictures.as_image`. With
            `layout="spatial"`: keys or values [B, N, D] on a grid of rows x cols = N places.
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
        >>> texture.shape, texture[0].sample(torch.rand(5, 2)).shape
        (torch.Size([1, 3, 480, 640]), torch.Size([5, 3]))
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
        if real_tensor("data", data).dim() != 3 or data.shape[1] != expected:
            raise ValueError(
                f"data must be [B, T, C] with T = {expected} texels for {levels} levels of {height} x {width}, got {list(data.shape)}"
            )
        texture = cls.__new__(cls)
        texture._set(data, height, width, levels, tuple(pyramid.reducer_names(reducer)), tuple(names or ()), meta or {}, backend)
        return texture

    @classmethod
    def open(cls, path: str | os.PathLike[str], **options: Any) -> Texture:
        """The texture of a picture in a file, of any kind that Pillow reads; `options` as for `Texture`."""
        try:
            from PIL import Image
        except ImportError:
            raise ImportError("Texture.open needs Pillow: pip install pillow") from None
        try:
            with Image.open(path) as image:
                return cls(image, **options)
        except Image.DecompressionBombError as error:  # no ValueError, by Pillow's choice
            raise ValueError(f"path must be of a picture within Pillow's limit of pixels, got {path}: {error}") from None

    @classmethod
    def stack(cls, textures: Sequence[Texture]) -> Texture:
        """One batch of several textures, batch after batch; alike in size, levels, reducer, names, dtype, device and backend.

        Its `meta` is what all of them say alike. Differentiable.
        """
        if not textures:
            raise ValueError("textures must hold at least one texture, got none")
        first = textures[0]
        for i, other in enumerate(textures):
            for what in ("height", "width", "levels", "reducer", "names", "channels", "dtype", "device", "backend"):
                if getattr(other, what) != getattr(first, what):
                    raise ValueError(
                        f"textures[{i}] must have the {what} of textures[0], {getattr(first, what)}, got {getattr(other, what)}"
                    )
        out = first.replace(torch.cat([t.data for t in textures]))
        out.meta = {name: said for name, said in first.meta.items() if all(t.meta.get(name) == said for t in textures)}
        return out

    @property
    def channels(self) -> int:
        """C, the channels of each texel."""
        return self.data.shape[-1]

    @property
    def shape(self) -> torch.Size:
        """[B, C, H, W], that of level 0."""
        return torch.Size((self.data.shape[0], self.data.shape[2], self.height, self.width))

    @property
    def dtype(self) -> torch.dtype:
        """Of the texels."""
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        """Of the texels."""
        return self.data.device

    @property
    def requires_grad(self) -> bool:
        """Whether gradients flow to the texels."""
        return self.data.requires_grad

    def __len__(self) -> int:
        """B, the pictures of the batch."""
        return self.data.shape[0]

    def __bool__(self) -> bool:
        """True, also of an empty batch."""
        return True

    def __getitem__(self, at: int | slice | str | Sequence[int] | Sequence[str]) -> Texture:
        """A texture of some pictures of the batch, by number, slice or list, or of some channels, by name or list of names.

        The result has a batch and channels as this one has: `texture[0]` has a batch of 1, `texture["edge"]` one channel. Pictures by
        number or slice are views; the rest is copied. Differentiable.
        """
        if isinstance(at, str):
            return self._only([at])
        if isinstance(at, slice):
            return self.replace(self.data[at].contiguous())
        if isinstance(at, (list, tuple)):
            if at and all(isinstance(name, str) for name in at):
                return self._only(at)
            return self.replace(self.data[[integer("index", i) for i in at]])
        i = integer("index", at)
        if not -len(self) <= i < len(self):
            raise IndexError(f"index must be in [{-len(self)}, {len(self) - 1}], got {i}")
        return self.replace(self.data.narrow(0, i % len(self), 1))

    def _only(self, names: Sequence[str]) -> Texture:
        """The channels of these names."""
        at = [self.index(name) for name in names]
        reducer = self.reducer if len(self.reducer) == 1 else [self.reducer[i] for i in at]
        meta = {name: said for name, said in self.meta.items() if name in names or name not in self.names}
        data = self.data[..., at].contiguous()
        return Texture.from_data(data, self.height, self.width, self.levels, reducer, names, meta, self.backend)

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

    def cpu(self) -> Texture:
        """On the CPU."""
        return self.replace(self.data.cpu())

    def cuda(self, *args: Any, **kwargs: Any) -> Texture:
        """On a GPU, as `Tensor.cuda`."""
        return self.replace(self.data.cuda(*args, **kwargs))

    def half(self) -> Texture:
        """In float16."""
        return self.replace(self.data.half())

    def float(self) -> Texture:
        """In float32."""
        return self.replace(self.data.float())

    def detach(self) -> Texture:
        """The same texels, cut off from the graph."""
        return self.replace(self.data.detach())

    def pin_memory(self) -> Texture:
        """In page-locked memory, as `DataLoader(pin_memory=True)` asks for."""
        return self.replace(self.data.pin_memory())

    def replace(self, data: Tensor) -> Texture:
        """The same texture around another buffer of the same level table."""
        return Texture.from_data(data, self.height, self.width, self.levels, self.reducer, self.names, self.meta, self.backend)

    def sample(
        self,
        uv: Tensor,
        lod: Lod = 0.0,
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
        self, center_uv: Tensor, lod: Lod = 0.0, size: int = 16, axes: Tensor | None = None, address: str = "clamp"
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
# As `default_collate` says that types are made known to it; workers of a DataLoader import this module with the first texture.
default_collate_fn_map[Texture] = lambda textures, *, collate_fn_map=None: Texture.stack(textures)


class TextureBuffer(torch.nn.Module):
    """A texture as a buffer of a module: `to`, `half`, `state_dict` and `copy.deepcopy` take it along.

    Its state is `data` [B, T, C] and, beside it, the size and number of levels, which must be its own when a state is loaded. What the
    channels are (names, reducers, meta) is not part of it. The texels get no gradients.

    Args:
        texture: what it holds.

    Example:
        >>> import torch, texvlm
        >>> model = torch.nn.ModuleDict({"atlas": texvlm.TextureBuffer(texvlm.Texture(torch.rand(3, 8, 8)))}).half()
        >>> model["atlas"].texture, list(model.state_dict())
        (Texture(1 x 3 channels, 8 x 8, 4 levels, float16, cpu), ['atlas.data', 'atlas._extra_state'])
        >>> model["atlas"](torch.rand(5, 2)).shape
        torch.Size([5, 3])
    """

    data: Tensor

    def __init__(self, texture: Texture) -> None:
        super().__init__()
        self.register_buffer("data", texture.data.detach())
        self.form = _flatten(texture)[1]

    @property
    def texture(self) -> Texture:
        """The texture around the buffer as it is now."""
        return _unflatten([self.data], self.form)

    def forward(self, uv: Tensor, lod: Tensor | float = 0.0, filter: str = "trilinear", address: str = "clamp") -> Tensor:
        """`Texture.sample`."""
        return self.texture.sample(uv, lod, filter, address)

    def get_extra_state(self) -> Tensor:
        """Height, width and levels, which `data` does not tell by its shape; a tensor, which files of all kinds hold."""
        return torch.tensor(self.form[:3])

    def set_extra_state(self, state: Tensor) -> None:
        """Refuses a texture of another size."""
        if not isinstance(state, Tensor) or state.shape != (3,):
            raise ValueError(f"state must be (height, width, levels), got {state!r}")
        (height, width, levels), (h, w, n) = state.tolist(), self.form[:3]
        if (height, width, levels) != (h, w, n):
            raise ValueError(f"the state is of a texture of {height} x {width} with {levels} levels, not {h} x {w} with {n}")
