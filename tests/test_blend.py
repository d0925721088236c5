"""One blend, one rule: a texel of weight 0 does not count, whatever it holds; every sampler agrees with every other on the rest."""

from __future__ import annotations

import pytest
import torch
from effort import ADDRESS_MODES, EMULATED

import texvlm
from texvlm import reference

FILTERS = ("nearest", "bilinear", "trilinear")
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
ODD = torch.tensor([torch.inf, -torch.inf, torch.nan])


def coordinates(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def sprinkled(channels: int, height: int, width: int, dtype: torch.dtype, seed: int = 0, share: float = 0.1) -> texvlm.Texture:
    """A texture of all levels, on each of which some texels are infinite or NaN in some channels."""
    g = torch.Generator().manual_seed(seed)
    texture = texvlm.Texture(torch.rand(1, channels, height, width, generator=g), dtype=dtype)
    odd = ODD[torch.randint(3, texture.data.shape, generator=g)].to(dtype)
    return texture.replace(torch.where(torch.rand(texture.data.shape, generator=g) < share, odd, texture.data))


def places(height: int, width: int, count: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    """uv [1, count, 2] on texel centres and edges of two levels, anywhere, outside and far outside."""
    g = torch.Generator().manual_seed(seed)
    size = torch.tensor([width, height], dtype=dtype)
    steps = torch.randint(-4, 4 * max(height, width) + 4, (count, 2), generator=g).to(dtype) / 4  # centres, edges, quarters
    on = (steps / size).clamp(-1, 2)
    off = torch.rand(count, 2, generator=g).to(dtype) * 1.5 - 0.25
    far = torch.randint(-3, 4, (count, 2), generator=g).to(dtype) * 7.5
    kind = torch.randint(5, (count, 2), generator=g)
    return torch.where(kind < 2, on, torch.where(kind < 4, off, far))[None]


def lods(texture: texvlm.Texture, count: int, dtype: torch.dtype, seed: int = 2) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.randint(-2, 4 * texture.levels, (1, count), generator=g) / 4).to(dtype)


def table(texture: texvlm.Texture) -> tuple[int, int, list[str], int]:
    return texture.height, texture.width, ["mean"], texture.levels


def assert_same(mine: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    """The same infinities and NaN in the same places, and the same numbers elsewhere up to rounding."""
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(mine.double(), wanted.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


# ---- examples ----


def test_an_infinite_border_column_does_not_count_far_outside() -> None:
    image = torch.rand(3, 4, 4)
    image[..., 0] = torch.inf
    texture, uv = texvlm.Texture(image, levels=1), torch.tensor([[[-1.0, 0.5], [-0.6, 0.3]]])
    still = torch.zeros_like(uv)
    assert not texture.sample(uv, address="border").any()
    assert not texture.patches(uv, 0.0, 1, address="border").any()
    assert not texture.sample_footprint(uv, still, still, address="border").any()


@pytest.mark.parametrize("odd", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dx", [-1, 0, 1])
@pytest.mark.parametrize("dy", [-1, 0, 1])
def test_neighbours_of_a_texel_centre_do_not_count(odd: float, dx: int, dy: int) -> None:
    image = torch.arange(64.0).reshape(1, 8, 8) + 1
    image[0, 4 + dy, 4 + dx] = odd
    wanted = image[:, 4, 4]
    texture, uv = texvlm.Texture(image, levels=1), torch.full((1, 40, 2), 4.5 / 8)
    still = torch.zeros_like(uv)
    for out in (
        texture.sample(uv),
        texture.sample_footprint(uv, still, still),
        texture.patches(uv, 0.0, 1),
        texvlm.warp(image, torch.zeros(1, 2, 8, 8))[:, None, 4, 4],
    ):
        torch.testing.assert_close(out.flatten(), wanted.expand(out.numel()), rtol=0, atol=0, equal_nan=True)


def test_a_weight_may_round_to_one() -> None:
    """Just left of a centre x - floor(x) rounds to 1: the texel on the left has weight 0."""
    texture = texvlm.Texture(torch.tensor([torch.nan, 2.0, 3.0, 4.0]).reshape(1, 1, 4), levels=1)
    flow = torch.zeros(1, 2, 1, 4)
    flow[0, 0, 0, 1] = -1e-9
    assert texvlm.warp(texture.level(0), flow)[0, 0, 0, 1] == 2
    wide = texvlm.Texture(torch.tensor([1.0, torch.nan]).reshape(1, 1, 2), levels=1)
    assert wide.sample(torch.tensor([[[0.25 - 1e-9, 0.5]]]), address="wrap").item() == 1


# ---- every sampler, forward ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [1, 3, 4, 5, 40, 70])
@pytest.mark.parametrize(
    ("height", "width", "address"), [*((16, 32, address) for address in ADDRESS_MODES), (13, 10, "clamp"), (13, 10, "border")]
)
def test_all_agree(dtype: torch.dtype, address: str, channels: int, height: int, width: int, device: torch.device) -> None:
    """Sizes that are powers of two have centres that all arithmetic finds; of others, clamping alone."""
    even = (height, width) == (16, 32)
    texture, coords = sprinkled(channels, height, width, dtype).to(device), coordinates(dtype)
    for count in (1, 200):
        uv, lod = places(height, width, count, coords).to(device), lods(texture, count, coords).to(device)
        for filter in FILTERS:
            wanted = reference.sample_lod(texture.data.cpu(), uv.cpu(), lod.cpu(), *table(texture), filter, address).to(device)
            assert_same(texture.sample(uv, lod, filter, address), wanted, dtype)
        assert_same(texture.patches(uv, lod, 1, address=address).flatten(2), wanted, dtype)
        turned = torch.eye(2, dtype=coords, device=device).expand(1, count, 2, 2)
        assert_same(texture.patches(uv, lod, 1, turned, address).flatten(2), wanted, dtype)
        for level in (0.0, 1.0, 2.0) if even else ():  # footprints of one tap: a square of 2^level pixels
            side = 2**level / torch.tensor([width, height], dtype=coords, device=device)
            ddx, ddy = (torch.diag(side)[i].expand(1, count, 2) for i in (0, 1))
            wanted = texture.sample(uv, level, address=address)
            assert_same(texture.sample_footprint(uv, ddx, ddy, address=address), wanted, dtype)


@pytest.mark.parametrize("side", [7, 10, 13, 22, 100])
@pytest.mark.parametrize("channels", [1, 5])
def test_samples_one_texel_apart_have_one_weight(side: int, channels: int, device: torch.device) -> None:
    """Sides whose texel centres are rounded: whether the samples of a patch read one column or two is the same for all of them, and
    a texel that is read is one that has a gradient."""
    size, j = 3, torch.arange(2, side - 3)
    column = j[:, None] + torch.arange(-2, 4)  # of these one at a time is NaN
    image = torch.zeros(*column.shape, channels, 5, side)
    image.scatter_(4, column[:, :, None, None, None].expand(-1, -1, channels, 5, 1), torch.nan)
    uv = torch.stack([(j + 0.5) / side, torch.full(j.shape, 0.5)], -1)[:, None, None].expand(-1, 6, 1, 2)
    texture = texvlm.Texture(image.flatten(0, 1), levels=1).to(device)
    out = texture.patches(uv.flatten(0, 1).to(device), 0.0, size)
    reached = out.isnan().any(-2).sum(-1)[:, 0]  # samples in a row, [patches * columns, channels]
    assert torch.equal(reached, reached[:, :1].expand_as(reached))
    patterns = reached[:, 0].reshape(-1, 6).tolist()
    assert all(pattern in ([0, 1, 1, 1, 0, 0], [0, 1, 2, 2, 1, 0], [1, 2, 2, 1, 0, 0]) for pattern in patterns), patterns
    data = torch.zeros(len(j), 5 * side, channels, device=device, requires_grad=True)
    place = uv[:, 0].to(device)
    torch.ops.texvlm.extract_patches(data, place, place.new_zeros(len(j), 1), 5, side, ["mean"], 1, size).sum().backward()
    given = (data.grad != 0).reshape(-1, 5, side, channels).any(1)
    assert torch.equal(
        given.gather(1, column[:, :, None].to(device).expand(-1, -1, channels)), (reached > 0).reshape(-1, 6, channels)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("address", ADDRESS_MODES)
@pytest.mark.parametrize("channels", [1, 3, 4, 5, 40])
@pytest.mark.parametrize("size", [4, 16, 21])
def test_patches_equal_samples(dtype: torch.dtype, address: str, channels: int, size: int, device: torch.device) -> None:
    """Sizes and places are powers of two, so the samples of a patch lie where samples lie."""
    texture, coords = sprinkled(channels, 32, 64, dtype, share=0.03).to(device), coordinates(dtype)
    at = torch.tensor([[32.0, 16], [31.5, 15.5], [32.25, 16], [3, 2.5], [-40, 8], [60, 31.5], [90, 70]], dtype=coords)
    center = (at / torch.tensor([64, 32], dtype=coords))[None].to(device)
    line = torch.arange(size, dtype=coords, device=device) - (size - 1) / 2
    offset = torch.stack([line.repeat(size), line.repeat_interleave(size)], -1) / torch.tensor(
        [64, 32], dtype=coords, device=device
    )
    for level in (0.0, 1.0, 1.5):
        lod = torch.full((1, len(at)), level, dtype=coords, device=device)
        if level == 1.5:  # the spacing is 2^1.5
            args = (center.cpu(), lod.cpu(), *table(texture), size, address)
            wanted = reference.extract_patches(texture.data.cpu(), *args).to(device)
        else:
            uv = (center[:, :, None] + offset * 2**level).flatten(1, 2)
            wanted = texture.sample(uv, level, address=address).unflatten(1, (len(at), size, size)).permute(0, 1, 4, 2, 3)
        assert_same(texture.patches(center, lod, size, address=address), wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_warp_equals_samples(dtype: torch.dtype, device: torch.device) -> None:
    height, width, coords = 16, 64, coordinates(dtype)
    texture = sprinkled(3, height, width, dtype).to(device)
    planes = texture.level(0)
    g = torch.Generator().manual_seed(3)
    flow = (torch.randint(-40, 40, (1, 2, height, width), generator=g) / 4).to(coords).to(device)
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    at = torch.stack([x, y], -1).to(coords).to(device) + flow[0].permute(1, 2, 0) + 0.5
    uv = at / torch.tensor([width, height], dtype=coords, device=device)
    wanted = texture.sample(uv.reshape(1, -1, 2), 0.0).transpose(1, 2).reshape(1, 3, height, width)
    assert_same(texvlm.warp(planes, flow), wanted, dtype)


def test_flow_of_weight_0_does_not_count(device: torch.device) -> None:
    """Every third pixel lies on the centre of a coarse one, whose neighbours may be unknown."""
    planes, flow = torch.rand(1, 2, 12, 48), torch.rand(1, 2, 4, 16)
    flow[0, 0, 1, 2] = torch.nan
    mine, wanted = texvlm.warp(planes.to(device), flow.to(device), fill=9.0), reference.warp(planes, flow, 9.0)
    assert (wanted[0, 0] == 9).nonzero().amin(0).tolist() == [2, 5]
    assert (wanted[0, 0] == 9).sum() == 5 * 5
    assert_same(mine, wanted.to(device))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("height", "width"), [(32, 32), (24, 20)])
@pytest.mark.parametrize("samples", [1, 4, 8])
def test_cell_features_equal_samples(dtype: torch.dtype, height: int, width: int, samples: int, device: torch.device) -> None:
    """The mean of a channel over a cell's samples."""
    texture, coords = sprinkled(5, height, width, dtype, share=0.02), coordinates(dtype)
    cells = torch.arange(-(-height // 8) * -(-width // 8))[None]
    args = (texture.data, cells, *table(texture), 8, samples, ["mean"], [4])
    columns = -(-width // 8)
    step = (torch.arange(samples, dtype=coords) + 0.5) / samples
    corner = torch.stack([cells % columns, cells // columns], -1)[:, :, None]
    inside = torch.stack([step.repeat(samples), step.repeat_interleave(samples)], -1)
    uv = (corner + inside) * 8 / torch.tensor([width, height], dtype=coords)
    lod = torch.full((1, cells.numel() * samples**2), 3.0, dtype=coords) - torch.log2(torch.tensor(float(samples)))
    value = reference.sample_lod(texture.data.to(coords), uv.flatten(1, 2), lod, *table(texture))[..., 4]
    means = torch.ops.texvlm.cell_features(*(a.to(device) if isinstance(a, torch.Tensor) else a for a in args))[..., 0]
    wanted = value.unflatten(1, (-1, samples**2)).mean(-1).to(device)
    assert_same(means, wanted, torch.float32 if dtype != torch.float64 else dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("height", "width"), [(16, 64), (17, 31)])
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_laplacian_equals_the_reference(dtype: torch.dtype, height: int, width: int, channels: int, device: torch.device) -> None:
    texture = sprinkled(channels, height, width, dtype, share=0.01)
    args = (height, width, texture.levels)
    for name in ("laplacian_decompose", "laplacian_reconstruct"):
        mine, theirs = texture.data.to(device).requires_grad_(), texture.data.clone().requires_grad_()
        out, wanted = getattr(torch.ops.texvlm, name)(mine, *args), getattr(reference, name)(theirs, *args)
        assert_same(out, wanted.to(device), dtype)
        weights = sprinkled(channels, height, width, dtype, seed=5, share=0.01).data
        a, b = torch.autograd.grad(out, mine, weights.to(device)), torch.autograd.grad(wanted, theirs, weights)
        assert_same(a[0], b[0].to(device), dtype)


# ---- gradients ----


def gradients(call, leaves: list[torch.Tensor], weights: torch.Tensor) -> list[torch.Tensor]:
    leaves = [t.clone().requires_grad_() for t in leaves]
    found = torch.autograd.grad(call(*leaves), leaves, weights, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, leaves, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("address", ADDRESS_MODES)
@pytest.mark.parametrize("filter", FILTERS)
@pytest.mark.parametrize("channels", [1, 3, 4, 5, 40])
@pytest.mark.parametrize("count", [1, 3000])
@pytest.mark.parametrize("odd", ["texels", "incoming"])  # of both, infinity times infinity, the order would matter
def test_gradients_of_samples(
    dtype: torch.dtype, address: str, filter: str, channels: int, count: int, odd: str, device: torch.device
) -> None:
    texture = sprinkled(channels, 16, 32, dtype, share=0.02 if odd == "texels" else 0)
    uv, lod = places(16, 32, count, dtype), lods(texture, count, dtype)
    weights = torch.randn(1, count, channels, generator=torch.Generator().manual_seed(4)).to(dtype)
    if odd == "incoming":
        weights[0, :: max(2, count // 10), 0] = torch.inf
    args = (*table(texture), filter, address)
    call = lambda op: lambda *leaves: op(*leaves, *args)  # noqa: E731
    wanted = gradients(call(reference.sample_lod), [texture.data, uv, lod], weights)
    mine = gradients(call(torch.ops.texvlm.sample_lod), [t.to(device) for t in (texture.data, uv, lod)], weights.to(device))
    for a, b in zip(mine, wanted, strict=True):
        assert_same(a / 100, b.to(device) / 100, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("address", ADDRESS_MODES)
@pytest.mark.parametrize("channels", [1, 3, 5, 40])
@pytest.mark.parametrize("count", [3, 40 if EMULATED else 300])
@pytest.mark.parametrize("odd", ["texels", "incoming"])
def test_gradients_of_patches_and_footprints(
    dtype: torch.dtype, address: str, channels: int, count: int, odd: str, device: torch.device
) -> None:
    texture = sprinkled(channels, 16, 32, dtype, share=0.01 if odd == "texels" else 0)
    uv, lod = places(16, 32, count, dtype), lods(texture, count, dtype)
    lod = lod.where(lod.frac() == 0, lod.floor())  # a spacing of 2^0.25 puts samples beside the centres
    g = torch.Generator().manual_seed(4)
    weights = torch.randn(1, count, channels, 4, 4, generator=g).to(dtype)
    weights[0, 0, 0, 1, 2] = torch.inf if odd == "incoming" else 1.0
    args = (*table(texture), 4, address)
    mine = gradients(
        lambda *leaves: torch.ops.texvlm.extract_patches(*leaves, *args),
        [t.to(device) for t in (texture.data, uv, lod)],
        weights.to(device),
    )
    wanted = gradients(lambda *leaves: reference.extract_patches(*leaves, *args), [texture.data, uv, lod], weights)
    for a, b in zip(mine, wanted, strict=True):
        assert_same(a / 1000, b.to(device) / 1000, dtype)
    side = torch.tensor([1 / 32, 1 / 16], dtype=dtype)
    ddx, ddy = (torch.diag(side)[i].expand(1, count, 2) * 4 ** (i == 0) for i in (0, 1))  # four taps in a row
    arguments = (*table(texture), 16, address)
    flat = weights[..., 0, 0].contiguous()
    flat[0, 1, 0] = -torch.inf if odd == "incoming" else 1.0
    mine = gradients(
        lambda *leaves: torch.ops.texvlm.sample_grad(*leaves, ddx.to(device), ddy.to(device), *arguments),
        [t.to(device) for t in (texture.data, uv)],
        flat.to(device),
    )
    wanted = gradients(lambda *leaves: reference.sample_grad(*leaves, ddx, ddy, *arguments), [texture.data, uv], flat)
    for a, b in zip(mine, wanted, strict=True):
        assert_same(a / 100, b.to(device) / 100, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("odd", ["texels", "incoming"])
def test_gradients_of_warp(dtype: torch.dtype, odd: str, device: torch.device) -> None:
    planes = sprinkled(3, 16, 64, dtype, share=0.02 if odd == "texels" else 0).level(0).contiguous()
    g = torch.Generator().manual_seed(3)
    flow = (torch.randint(-40, 40, (1, 2, 16, 64), generator=g) / 4).to(dtype)
    weights = torch.randn(planes.shape, generator=g).to(dtype)
    if odd == "incoming":
        weights[0, 1, ::5, ::7] = torch.inf
    mine = gradients(torch.ops.texvlm.warp, [planes.to(device), flow.to(device)], weights.to(device))
    for a, b in zip(mine, gradients(reference.warp, [planes, flow], weights), strict=True):
        assert_same(a, b.to(device), dtype)
