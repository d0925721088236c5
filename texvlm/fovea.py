"""Stem `fovea`: a fixed budget of tokens around fixations, sharp at the centre, coarser with eccentricity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from texvlm._constants import constant
from texvlm._ext import acc_dtype, coordinates, fake, fake_gradients, integer, ops, real, real_tensor, sequence
from texvlm.patches import extract_patches
from texvlm.texture import Texture

DEFAULT_E0 = 80.0
"""Pixels. With it the outer ring of the default layout ends at the border of a picture of 1024 x 1024."""

MAX_REACH = 2.0**24
"""Pixels from the fixation that a layout may reach: beyond, float32 no longer tells pixels apart."""


class FoveatedTokens(NamedTuple):
    """Tokens of `sample_foveated`: patches [B, F, N, C, S, S], their uv [B, F, N, 2] and lod [B, F, N]."""

    patches: Tensor
    uv: Tensor
    lod: Tensor


_MOST = 1 << 20  # tokens of a layout: what lies where is a list


@dataclass(frozen=True, eq=False)
class FoveaLayout:
    """Where the tokens of a fovea lie around its fixation, and how their resolution falls off.

    At eccentricity e (pixels of level 0 from the fixation) the visual cortex magnifies by M(e) = M0 / (e +
    e0): Rovamo and Virsu, Experimental Brain Research 37, 1979; for displays Geisler and Perry, SPIE 3299,
    1998. A token there samples with LOD = max(0, -log2 M(e)) = max(0, log2((e + e0) / M0)) and covers s(e) =
    patch * max(1, (e + e0) / M0) pixels.

    Tokens come in this order: `fovea` x `fovea` of them row-major on a grid, then the rings from the inside
    to the outside, each clockwise from the top. Grid and rings are squares around the fixation. The grid's
    step grows with the radius by the same law, dr = s(r) per token, so that neighbours abut along the axes
    (and overlap beside them: a square has more tokens in its outer rings than the law needs). Ring m
    continues the grid, (m + 1/2) steps from its border; its tokens are spread evenly, those of every second
    ring half a token further, and leave gaps where they are few.

    Args:
        fovea: tokens along a side of the grid, 0 for none.
        rings: tokens of each ring.
        patch: samples along a side of a token.
        e0: pixels, where the resolution has fallen to half (with M0 = e0); a number, or a 0-d tensor to be
            learned. For pictures of another size than 1024 x 1024 scale it alike.
        m0: as e0; None: e0, so that the centre of the fovea has LOD 0. A greater one makes a disc of radius
            M0 - e0 sharp.

    Raises:
        ValueError: negative numbers of tokens or none at all; e0 or m0 not positive, or so small that the
            outer tokens lie beyond 2^24 pixels.

    Example:
        >>> import texvlm
        >>> layout = texvlm.FoveaLayout()
        >>> layout.count, layout.offsets.shape
        (273, torch.Size([273, 2]))
    """

    fovea: int = 16
    rings: Sequence[int] = (8, 9)
    patch: int = 16
    e0: float | Tensor = DEFAULT_E0
    m0: float | Tensor | None = None
    # Which token lies where: its direction on the unit square, and its radius in steps. The same for all e0.
    _directions: Tensor = field(init=False, repr=False)  # [N, 2]
    _steps: Tensor = field(init=False, repr=False)  # [N]
    _offsets: Tensor | None = field(init=False, repr=False)  # [N, 2], where neither e0 nor m0 is learned

    def __post_init__(self) -> None:
        object.__setattr__(self, "rings", sequence("rings", self.rings))
        for name, number, least in (("fovea", self.fovea, 0), ("patch", self.patch, 1)):
            integer(name, number, least)
        for number in self.rings:
            integer("rings", number, 1)
        if self.count > _MOST:
            raise ValueError(f"fovea and rings must make at most 2^20 tokens, got {self.count}")
        if self.count == 0:
            raise ValueError("a layout needs tokens: fovea is 0 and there are no rings")
        for name, value in (("e0", self.e0), ("m0", self.m0)):
            if isinstance(value, Tensor):
                if value.dim() != 0 or not value.is_floating_point():
                    raise ValueError(
                        f"{name} must be a number or a 0-d floating point tensor, got {value.dtype} {list(value.shape)}"
                    )
            elif (value is not None or name == "e0") and not 0 < real(name, value) < math.inf:
                raise ValueError(f"{name} must be positive, got {value}")
        directions, steps = _grid(self.fovea)
        for ring, n in enumerate(self.rings):
            directions += [_on_square((i + 0.5 * (ring % 2)) / n) for i in range(n)]
            steps += [self.fovea / 2 + 0.5 + ring] * n
        cpu = torch.device("cpu")
        object.__setattr__(self, "_directions", torch.tensor(directions, dtype=torch.float64, device=cpu))
        object.__setattr__(self, "_steps", torch.tensor(steps, dtype=torch.float64, device=cpu))
        object.__setattr__(self, "_offsets", None if self._learned else self._positions(torch.float64, cpu))
        if self._offsets is not None and not self._offsets.abs().max() <= MAX_REACH:
            raise ValueError(
                f"e0 = {self.e0} and m0 = {self.m0} are too small for so many tokens: the outer ones lie beyond 2^24 pixels"
            )

    @property
    def count(self) -> int:
        """N, the number of tokens: fovea^2 + sum(rings)."""
        return self.fovea * self.fovea + sum(self.rings)

    @property
    def offsets(self) -> Tensor:
        """[N, 2], (x, y) of the tokens' centres from the fixation in level-0 pixels.

        Float32 for numbers e0 and m0; in the dtype and on the device of learned ones, which it then carries
        gradients to.
        """
        reference = next((t for t in (self.e0, self.m0) if isinstance(t, Tensor)), None)
        if reference is None:
            return self.place(torch.float32, torch.device("cpu"))[0].clone()
        return self.place(reference.dtype, reference.device)[0]

    def place(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Offsets [N, 2], m0 [] and e0 [] as the op `fovea_tokens` takes them; the same tensors in each call where nothing is learned."""
        m0, e0 = self._constants(dtype, device)
        offsets = self._positions(dtype, device) if self._offsets is None else constant(self._offsets, dtype, device)
        return offsets, m0, e0

    @property
    def _learned(self) -> bool:
        return isinstance(self.e0, Tensor) or isinstance(self.m0, Tensor)

    def _constants(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        def tensor(value: float | Tensor) -> Tensor:
            return value.to(device, dtype) if isinstance(value, Tensor) else constant(float(value), dtype, device)

        e0 = tensor(self.e0)
        return (e0 if self.m0 is None else tensor(self.m0)), e0

    def _positions(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The solution of dr = s(r) per step: linear where the LOD is 0, exponential beyond."""
        m0, e0 = self._constants(dtype, device)
        along = constant(self._steps, dtype, device) * self.patch
        flat = (m0 - e0).clamp(min=0)
        radius = torch.minimum(along, flat) + (flat + e0) * torch.expm1((along - flat).clamp(min=0) / m0)
        return constant(self._directions, dtype, device) * radius[:, None]


def _grid(side: int) -> tuple[list[tuple[float, float]], list[float]]:
    """Tokens of a square grid, row-major: their directions on the unit square, their radii in steps."""
    line = [i - (side - 1) / 2 for i in range(side)]
    points = [(x, y) for y in line for x in line]
    steps = [max(abs(x), abs(y)) for x, y in points]
    return [(x / (r or 1), y / (r or 1)) for (x, y), r in zip(points, steps, strict=True)], steps


def _on_square(turn: float) -> tuple[float, float]:
    """The point of the border of [-1, 1]^2 at `turn` of its length, clockwise from the top, y down."""
    p = 8 * (turn % 1)
    if p < 1:
        return p, -1.0
    if p < 3:
        return 1.0, p - 2
    if p < 5:
        return 4 - p, 1.0
    return (-1.0, 6 - p) if p < 7 else (p - 8, -1.0)


torch.serialization.add_safe_globals([FoveaLayout])  # torch.load as it is by default
_DEFAULT = FoveaLayout()


def fixate(plane: Tensor, count: int = 1, radius: float = 0.1) -> tuple[Tensor, Tensor]:
    """Where to look: the peaks of a plane, one after another, each inhibiting the return to its surroundings.

    The highest place is looked at; then the plane is multiplied by 1 - exp(-d^2 / (2 radius^2)), d the distance from there, and so on:
    the winner takes all, and return is inhibited (L. Itti, C. Koch, E. Niebur, 1998). The plane may be relevance to a query
    (`relevance(texture, level=4)`), a map of cross-attention, or saliency.

    Args:
        plane: [B, h, w], at least 0; values that are not finite are never looked at. Less its least value, where that is negative.
        count: how many fixations.
        radius: standard deviation of the inhibition, in units of the longer side.

    Returns:
        uv [B, count, 2], the centres of the places, for `sample_foveated`, and the plane's values [B, count] there. Ties go to the first
        place; where nothing is left, the centre of the picture. Gradients go to the values.

    Example:
        >>> import torch, texvlm
        >>> plane = torch.zeros(1, 4, 8)
        >>> plane[0, 1, 2], plane[0, 3, 7] = 2.0, 1.0
        >>> texvlm.fixate(plane, 2)[0]
        tensor([[[0.3125, 0.3750],
                 [0.9375, 0.8750]]])
    """
    plane = real_tensor("plane", plane)
    if plane.dim() != 3 or 0 in plane.shape[1:]:
        raise ValueError(f"plane must be [B, h, w] and not empty, got {list(plane.shape)}")
    count = integer("count", count, 0)
    radius = real("radius", radius)
    if not (math.isfinite(radius) and radius > 0):
        raise ValueError(f"radius must be positive, got {radius}")
    dtype, (height, width) = acc_dtype(plane.dtype), plane.shape[1:]
    known = plane.detach().isfinite()
    left = torch.where(known, plane.detach().to(dtype), 0)
    left = torch.where(known, left - left.amin((1, 2), keepdim=True).clamp(max=0), 0).flatten(1)
    y, x = ((torch.arange(n, dtype=dtype, device=plane.device) + 0.5) for n in (height, width))
    at = torch.stack([x.repeat(height), y.repeat_interleave(width)], dim=-1)  # [h w, 2] in cells
    size = torch.stack([x[-1] + 0.5, y[-1] + 0.5])
    sigma = radius * max(height, width)
    places, values = [], []
    for _ in range(count):
        best = left.argmax(1, keepdim=True)
        place = torch.where(left.gather(1, best) > 0, at[best[:, 0]], size / 2)
        places.append(place / size)
        values.append(plane.flatten(1).gather(1, best))
        distance = (at - place[:, None]).square().sum(-1)
        left = left * -torch.expm1(-distance / (2 * sigma * sigma))
    if not places:
        return plane.new_empty((len(plane), 0, 2), dtype=dtype), plane.new_empty((len(plane), 0))
    return torch.stack(places, dim=1), torch.cat(values, dim=1)


def line_axes(direction: Tensor, aspect: float = 4.0) -> Tensor:
    """Axes that stretch a square to `aspect` along a direction and shrink it across, the area kept.

    Args:
        direction: [..., 2], (x, y), of any length but 0.
        aspect: how much longer than high.

    Returns:
        [..., 2, 2] for `extract_patches(axes=)` and `sample_foveated(axes=)`: its columns are the images of the x and y unit vectors.

    Example:
        >>> import torch, texvlm
        >>> texvlm.line_axes(torch.tensor([1.0, 0.0]))
        tensor([[2.0000, -0.0000],
                [0.0000, 0.5000]])
    """
    if real_tensor("direction", direction).shape[-1:] != (2,):
        raise ValueError(f"direction must be [..., 2], got {list(direction.shape)}")
    aspect = real("aspect", aspect)
    if not 0 < aspect < math.inf:  # what torch.compile can trace
        raise ValueError(f"aspect must be positive, got {aspect}")
    along = torch.nn.functional.normalize(direction, dim=-1)
    across = torch.stack([-along[..., 1], along[..., 0]], dim=-1)
    return torch.stack([along * math.sqrt(aspect), across / math.sqrt(aspect)], dim=-1)


def sample_foveated(
    texture: Texture,
    fixation: Tensor,
    layout: FoveaLayout | None = None,
    address: str = "clamp",
    axes: Tensor | None = None,
) -> FoveatedTokens:
    """Samples the tokens of a layout around fixations: sharp where one looks, coarse elsewhere.

    Token n lies at position = clamp(fixation * (W, H) + offset[n], 0, (W, H)) in level-0 pixels, and with e,
    the distance of that position from the fixation, it is a patch of `layout.patch` x `layout.patch` samples at LOD =
    log2((e + e0) / M0) clamped to [0, levels - 1].

    Args:
        texture: of batch B, or of batch 1, shared by all fixations.
        fixation: [B, F, 2] in uv, F gazes for each picture; [B, 2] or [2], one gaze; a batch of 1, for all pictures; or an ndarray.
            Outside of [0, 1] is allowed; the tokens stay in the picture.
        layout: see `FoveaLayout`; by default 273 tokens of 16 x 16 samples.
        address: what samples beyond the border read: "clamp", "wrap", "mirror" or "border" (zero).
        axes: [B, F, 2, 2], a direction joined with the radial law: offsets and patches are mapped by it (`line_axes` stretches them along
            a line of text), and e is the distance before.

    Returns:
        FoveatedTokens: patches [B, F, N, C, S, S] in the texels' dtype; uv [B, F, N, 2] and lod [B, F, N], float32 (float64 for
        float64 texels). Without F for a fixation [B, 2] or [2], and for [2] and a single picture without B.

    Gradients go to the texels, the fixation, and tensors e0 and m0 of the layout, through both the LOD and the positions. A clamp
    passes gradients on its own bounds, so a token in the very centre at M0 = e0 has those of log2. A fixation that is NaN or
    infinite gives NaN and gets no gradient.

    Example:
        >>> import torch, texvlm
        >>> texture = texvlm.Texture(torch.rand(3, 512, 512))
        >>> layout = texvlm.FoveaLayout(e0=40.0)
        >>> tokens = texvlm.sample_foveated(texture, torch.tensor([[[0.5, 0.5]]]), layout)
        >>> tokens.patches.shape, tokens.lod.shape
        (torch.Size([1, 1, 273, 3, 16, 16]), torch.Size([1, 1, 273]))
    """
    if not isinstance(texture, Texture):
        raise TypeError(f"texture must be a texvlm.Texture, got {type(texture).__name__}")
    given = coordinates("fixation", fixation, texture.data)
    fixation = gazes(given, len(texture.data))
    layout = layout or _DEFAULT
    offsets, m0, e0 = layout.place(fixation.dtype, fixation.device)
    turned = None
    if axes is None:
        uv, lod = ops.fovea_tokens(fixation, offsets, m0, e0, texture.height, texture.width, texture.levels)
    else:
        axes = coordinates("axes", axes, texture.data)
        if given.dim() < 3 and axes.shape == (*given.shape[:-1], 2, 2):
            axes = axes.reshape(-1, 1, 2, 2).expand(len(fixation), -1, -1, -1)
        if axes.shape != (*fixation.shape[:2], 2, 2):
            raise ValueError(f"axes must be {[*fixation.shape[:2], 2, 2]}, got {list(axes.shape)}")
        x, y = torch.einsum("bfij,nj->bfni", axes, offsets).unbind(-1)
        position = fixation[:, :, None] + torch.stack([x / texture.width, y / texture.height], dim=-1)
        uv = position.clamp(0, 1)
        lod = ((offsets.norm(dim=-1) + e0) / m0).log2().clamp(0, texture.levels - 1).expand(uv.shape[:3])
        turned = axes[:, :, None].expand(-1, -1, layout.count, -1, -1).flatten(1, 2)
    patches = extract_patches(texture, uv.flatten(1, 2), lod.flatten(1, 2), layout.patch, turned, address)
    tokens = FoveatedTokens(patches.unflatten(1, (fixation.shape[1], layout.count)), uv, lod)
    if given.dim() == 3:
        return tokens
    at = (0, 0) if given.dim() == 1 and len(texture.data) == 1 else (slice(None), 0)
    return FoveatedTokens(*(t[at] for t in tokens))


def gazes(fixation: Tensor, batch: int) -> Tensor:
    """Fixations as [B, F, 2], from these, [B, 2] or [2]; a batch of 1 is of all pictures."""
    if fixation.dim() not in (1, 2, 3) or fixation.shape[-1] != 2:
        raise ValueError(f"fixation must be [B, F, 2], [B, 2] or [2], got {list(fixation.shape)}")
    if fixation.dim() < 3:
        fixation = fixation.reshape(-1, 1, 2)
    return fixation.expand(batch, -1, -1) if len(fixation) == 1 and batch != 1 else fixation


@fake("fovea_tokens")
def _(fixation: Tensor, offsets: Tensor, m0: Tensor, e0: Tensor, height: int, width: int, levels: int) -> tuple[Tensor, Tensor]:
    shape = (fixation.shape[0], fixation.shape[1], offsets.shape[0])
    return fixation.new_empty((*shape, 2)), fixation.new_empty(shape)


fake_gradients("fovea_tokens")
