"""What sampling means: known answers, invariants, the adjoint, and equality with torch's own bilinear sampling."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from effort import EMULATED, examples
from hypothesis import given
from hypothesis import strategies as st

import texvlm
from texvlm import reference

FILTERS = ("nearest", "bilinear", "trilinear")
ADDRESS_MODES = ("clamp", "wrap", "mirror", "border")


def centres(height: int, width: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """uv of all texel centres, [1, H * W, 2]."""
    v, u = torch.meshgrid(
        (torch.arange(height, dtype=dtype) + 0.5) / height, (torch.arange(width, dtype=dtype) + 0.5) / width, indexing="ij"
    )
    return torch.stack([u, v], -1).reshape(1, -1, 2)


@pytest.mark.parametrize("filter", FILTERS)
@pytest.mark.parametrize("address", ADDRESS_MODES)
def test_texel_centres_give_the_texels(filter: str, address: str) -> None:
    texture = texvlm.Texture(torch.rand(3, 13, 10, dtype=torch.float64))
    for level in range(texture.levels):
        texels = texture.level(level)
        out = texture.sample(centres(*texels.shape[2:]), float(level), filter, address)
        torch.testing.assert_close(out, texels.flatten(2).transpose(1, 2), rtol=1e-12, atol=1e-12)


def test_ramp_is_reproduced_and_its_slope_is_the_gradient() -> None:
    ramp = (torch.arange(32, dtype=torch.float64) + 0.5).expand(1, 32, 32)
    texture = texvlm.Texture(ramp, levels=3)
    uv = (torch.rand(1, 50, 2, dtype=torch.float64) * 0.6 + 0.2).requires_grad_()
    for lod in (0.0, 0.5, 1.3, 2.0):
        out = texture.sample(uv, lod)
        torch.testing.assert_close(out[..., 0], uv[..., 0] * 32)
        (slope,) = torch.autograd.grad(out.sum(), uv)
        torch.testing.assert_close(slope, torch.tensor([32.0, 0.0], dtype=torch.float64).expand_as(slope))


@pytest.mark.parametrize(
    ("address", "expected"),
    [("clamp", [0, 0, 0, 3, 3, 3]), ("wrap", [2, 3, 0, 3, 0, 1]), ("mirror", [1, 0, 0, 3, 3, 2]), ("border", [9, 9, 0, 3, 9, 9])],
)
@pytest.mark.parametrize("filter", FILTERS)
def test_addresses(address: str, expected: list[float], filter: str) -> None:
    texture = texvlm.Texture(torch.tensor([0.0, 1, 2, 3]).reshape(1, 1, 4), levels=1)
    u = (torch.tensor([-2.0, -1, 0, 3, 4, 5]) + 0.5) / 4
    out = texture.sample(torch.stack([u, torch.full_like(u, 0.5)], -1)[None], 0.0, filter, address)
    torch.testing.assert_close(out.flatten(), torch.tensor([0.0 if v == 9 else float(v) for v in expected]))


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 7, 8, 40, 65])
@pytest.mark.parametrize(("address", "padding"), [("clamp", "border"), ("border", "zeros")])
def test_equals_grid_sample(channels: int, address: str, padding: str) -> None:
    image = torch.rand(2, channels, 37, 50)
    uv = torch.rand(2, 3001, 2) * 1.4 - 0.2
    texture = texvlm.Texture(image)
    for one in (texture, texvlm.Texture(image, levels=1)):
        image_, uv_, data = image.clone().requires_grad_(), uv.clone().requires_grad_(), one.data.clone().requires_grad_()
        wanted = F.grid_sample(image_, uv_[:, None] * 2 - 1, padding_mode=padding, align_corners=False)[:, :, 0].transpose(1, 2)
        mine = uv.clone().requires_grad_()
        out = one.replace(data).sample(mine, 0.0, address=address)
        torch.testing.assert_close(out, wanted, rtol=0, atol=1e-5)
        weights = torch.randn_like(out)
        g_image, g_uv = torch.autograd.grad(wanted, [image_, uv_], weights)
        g_data, g_mine = torch.autograd.grad(out, [data, mine], weights)
        level0 = g_data[:, : 37 * 50].unflatten(1, (37, 50)).permute(0, 3, 1, 2)
        torch.testing.assert_close(level0, g_image, rtol=1e-4, atol=1e-4)
        assert not g_data[:, 37 * 50 :].any()
        inside = (
            (uv * torch.tensor([50.0, 37.0]) - 0.5).frac().abs() - 0.5
        ).abs() < 0.499  # rounding may cross the edge of a cell
        inside = inside.all(-1, keepdim=True).expand_as(uv)
        torch.testing.assert_close(g_mine[inside], g_uv[inside], rtol=1e-3, atol=1e-2)


@examples(60)
@given(
    h=st.integers(1, 40),
    w=st.integers(1, 40),
    c=st.sampled_from([1, 2, 3, 4, 5, 8, 13, 40]),
    n=st.integers(0, 90),
    filter=st.sampled_from(FILTERS),
    address=st.sampled_from(ADDRESS_MODES),
    seed=st.integers(0, 1 << 30),
    shared=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_random_sizes_equal_the_reference(h, w, c, n, filter, address, seed, shared, dtype) -> None:
    g = torch.Generator().manual_seed(seed)
    texture = texvlm.Texture(torch.rand(1 if shared else 2, c, h, w, generator=g, dtype=dtype))
    uv = torch.rand(2, n, 2, generator=g, dtype=dtype) * 3 - 1
    lod = torch.rand(2, n, generator=g, dtype=dtype) * (texture.levels + 1) - 1
    args = (h, w, ["mean"], texture.levels, filter, address)
    leaves = [[t.clone().requires_grad_() for t in (texture.data, uv, lod)] for _ in range(2)]
    out, wanted = torch.ops.texvlm.sample_lod(*leaves[0], *args), reference.sample_lod(*leaves[1], *args)
    if (
        dtype == torch.float32
    ):  # a place may fall on the other side of an edge of a cell, where the value, not the gradient, is the same
        if filter != "nearest":
            torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)
        return
    torch.testing.assert_close(out, wanted, rtol=1e-9, atol=1e-9)
    weights = torch.randn(out.shape, generator=g, dtype=dtype)
    mine = torch.autograd.grad(out, leaves[0], weights)
    theirs = torch.autograd.grad(wanted, leaves[1], weights, allow_unused=True)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("filter", FILTERS)
@pytest.mark.parametrize("address", ADDRESS_MODES)
@pytest.mark.parametrize("queries", [500, 6000])  # below and above the parallel scatter
@pytest.mark.parametrize("channels", [1, 3, 4, 21])
def test_adjoint_identity(filter: str, address: str, queries: int, channels: int) -> None:
    """<A x, y> = <x, A' y> in the texels."""
    data = torch.rand(1, channels, 90, 70, dtype=torch.float64)
    texture = texvlm.Texture(data)
    uv, lod = torch.rand(2, queries, 2, dtype=torch.float64) * 1.4 - 0.2, torch.rand(2, queries, dtype=torch.float64) * 8 - 1
    x = torch.randn_like(texture.data).requires_grad_()
    out = texture.replace(x).sample(uv, lod, filter, address)
    y = torch.randn_like(out)
    (adjoint,) = torch.autograd.grad(out, x, y)
    torch.testing.assert_close((out * y).sum(), (x * adjoint).sum(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("filter", FILTERS)
@pytest.mark.parametrize("channels", [1, 3, 4, 9])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_parallel_scatter_is_the_serial_one_to_the_bit(filter: str, channels: int, shared: bool, dtype: torch.dtype) -> None:
    """The order of additions is that of the queries, so portions below the threshold, added up in order, agree."""
    texture = texvlm.Texture(torch.rand(1 if shared else 3, channels, 120, 64), dtype=dtype)
    coords = torch.float64 if dtype == torch.float64 else torch.float32
    uv, lod = torch.rand(3, 4000, 2, dtype=coords) * 1.2 - 0.1, torch.rand(3, 4000, dtype=coords) * 8 - 1
    uv[0, 5], uv[2, 77, 1], lod[1, 3] = torch.nan, torch.inf, torch.nan
    grad = torch.randint(-8, 9, (3, 4000, channels)).to(dtype)
    args = (120, 64, ["mean"], texture.levels, filter, "mirror")
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(torch.ops.texvlm.sample_lod_backward(grad, texture.data, uv, lod, *args, mask=[True, True, True]))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    alone = torch.ops.texvlm.sample_lod_backward(grad, texture.data, uv, lod, *args, mask=[False, True, True])
    assert alone[0] is None or alone[0].numel() == 0
    for a, b in zip(results[0][1:], alone[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    parts = torch.zeros(texture.data.shape, dtype=torch.float64)
    for n in range(0, 4000, 500):
        rows = slice(n, n + 500)
        part = torch.ops.texvlm.sample_lod_backward(
            grad[:, rows], texture.data, uv[:, rows], lod[:, rows], *args, mask=[True, False, False]
        )[0]
        parts += part.double()
    tolerance = {torch.float64: 1e-11, torch.float32: 1e-3, torch.float16: 0.5}[dtype]
    torch.testing.assert_close(results[0][0].double(), parts, rtol=tolerance, atol=tolerance)


def test_kinks_are_one_sided_from_the_right() -> None:
    texture = texvlm.Texture(torch.rand(2, 8, 8, dtype=torch.float64))
    uv = torch.full((1, 1, 2), 0.3, dtype=torch.float64)
    for lod in (0.0, 1.0, 2.0, 3.0):
        at = torch.full((1, 1), lod, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(texture.sample(uv, at).sum(), at)
        step = texture.sample(uv, min(lod + 1, 3.0)) - texture.sample(uv, lod)
        torch.testing.assert_close(slope.squeeze(), step.sum())
    for lod in (-0.5, 3.5):
        at = torch.full((1, 1), lod, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.grad(texture.sample(uv, at).sum(), at)[0].item() == 0
    centre = torch.full((1, 1, 2), 2.5 / 8, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(texture.sample(centre)[..., 0].sum(), centre)
    texels = texture.level(0)[0, 0]
    torch.testing.assert_close(slope.flatten(), 8 * torch.stack([texels[2, 3] - texels[2, 2], texels[3, 2] - texels[2, 2]]))


def test_what_has_no_weight_is_not_read() -> None:
    """A second level of weight zero, and texels outside the picture, may hold anything."""
    texture = texvlm.Texture(torch.rand(3, 8, 8))
    with torch.no_grad():
        texture.level(1).fill_(torch.nan)
    assert texture.sample(torch.rand(1, 100, 2), 0.0).isfinite().all()
    assert texture.sample(torch.rand(1, 100, 2), 0.5).isnan().all()
    edge = texvlm.Texture(torch.full((3, 4, 4), torch.nan), levels=1)
    assert (edge.sample(torch.tensor([[[-1.0, 0.5], [2.0, 2.0]]]), address="border") == 0).all()


@pytest.mark.parametrize("address", ADDRESS_MODES)
@pytest.mark.parametrize("filter", FILTERS)
def test_not_finite_and_huge(address: str, filter: str) -> None:
    values = [0.5, 1e-30, -1e-30, 1e10, -1e10, 3.4e38, -3.4e38, torch.nan, torch.inf, -torch.inf]
    uv = torch.cartesian_prod(torch.tensor(values), torch.tensor(values))
    uv = uv.repeat(len(values), 1)[None]
    lod = torch.tensor(values).repeat_interleave(len(values) ** 2)[None]
    for c in (1, 3, 5):
        texture = texvlm.Texture(torch.rand(c, 7, 6))
        leaves = [t.clone().requires_grad_() for t in (texture.data, uv, lod)]
        out = torch.ops.texvlm.sample_lod(*leaves, 7, 6, ["mean"], texture.levels, filter, address)
        fine = uv.isfinite().all(-1) & lod.isfinite()
        assert out[~fine].isnan().all()
        assert ((out[fine] >= 0) & (out[fine] <= 1)).all()
        out.backward(torch.ones_like(out))
        assert all(t.grad.isfinite().all() for t in leaves)
        assert not leaves[1].grad[~fine].any()
        assert not leaves[2].grad[~fine].any()
        if address != "border":
            torch.testing.assert_close(leaves[0].grad.sum().item(), float(fine.sum() * c), rtol=1e-4, atol=1e-4)


def test_mode_channels_are_nearest_and_have_no_gradient() -> None:
    image = torch.randint(0, 5, (5, 12, 9)).double()
    reducer = ["mode", "mean", "mode", "max", "mode"]
    texture = texvlm.Texture(image, reducer)
    data = texture.data.clone().requires_grad_()
    uv, lod = torch.rand(1, 200, 2, dtype=torch.float64), torch.rand(1, 200, dtype=torch.float64) * 3
    out = texture.replace(data).sample(uv, lod)
    modes = torch.tensor([r == "mode" for r in reducer])
    torch.testing.assert_close(out[..., modes], texture.sample(uv, lod, "nearest")[..., modes], rtol=0, atol=0)
    out.sum().backward()
    assert not data.grad[..., modes].any()
    assert data.grad[..., ~modes].any()


def test_lod_is_not_copied_and_may_be_a_number() -> None:
    texture = texvlm.Texture(torch.rand(3, 16, 16))
    uv = torch.rand(1, 64, 2)
    wanted = texture.sample(uv, torch.full((1, 64), 1.25))
    torch.testing.assert_close(texture.sample(uv, 1.25), wanted, rtol=0, atol=0)
    torch.testing.assert_close(texture.sample(uv, torch.tensor(1.25)), wanted, rtol=0, atol=0)
    lod = torch.tensor(1.25, requires_grad=True)
    texture.sample(uv, lod).sum().backward()
    each = torch.full((1, 64), 1.25, requires_grad=True)
    texture.sample(uv, each).sum().backward()
    torch.testing.assert_close(lod.grad, each.grad.sum())


def test_half_texels_with_float_coordinates() -> None:
    image = torch.rand(3, 64, 64)
    uv, lod = torch.rand(1, 500, 2), torch.rand(1, 500) * 3
    wanted = texvlm.Texture(image).sample(uv, lod)
    for dtype, tolerance in ((torch.float16, 1e-3), (torch.bfloat16, 8e-3)):
        out = texvlm.Texture(image, dtype=dtype).sample(uv, lod)
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), wanted, rtol=tolerance, atol=tolerance)


def test_autocast_promotes_coordinates() -> None:
    texture = texvlm.Texture(torch.rand(3, 8, 8))
    uv, lod = torch.rand(1, 5, 2).bfloat16(), torch.rand(1, 5).bfloat16()
    args = (8, 8, ["mean"], texture.levels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = torch.ops.texvlm.sample_lod(texture.data, uv, lod, *args)
    torch.testing.assert_close(out, torch.ops.texvlm.sample_lod(texture.data, uv.float(), lod.float(), *args), rtol=0, atol=0)


def test_offsets_beyond_32_bits() -> None:
    """A texture of 3 * 2^30 elements, of which a few pages exist: the last texels are read and written at their own places."""
    height, width, channels = 1 << 15, 1 << 15, 3
    np = pytest.importorskip("numpy")
    data = torch.from_numpy(np.zeros(height * width * channels, dtype=np.float16))  # untouched pages cost nothing
    data = data.reshape(1, height * width, channels)
    data[0, -1], data[0, -2] = 1.0, 3.0
    u = 1 - 0.5 / width
    uv = torch.tensor([[[u, u], [u - 0.5 / width, u]]])
    out = torch.ops.texvlm.sample_lod(data, uv, torch.zeros(1, 2), height, width, ["mean"], 1)
    torch.testing.assert_close(out[0, :, 0].float(), torch.tensor([1.0, 2.0]))


# ---- on every device ----


def queries(batch: int, count: int, channels: int, device: torch.device, dtype: torch.dtype = torch.float32):
    texture = texvlm.Texture(torch.rand(batch, channels, 33, 20, dtype=torch.float64).to(dtype).to(device))
    coordinates = torch.float64 if dtype == torch.float64 else torch.float32
    uv = (torch.rand(2, count, 2, dtype=coordinates) * 1.4 - 0.2).to(device)
    lod = (torch.rand(2, count, dtype=coordinates) * 8 - 1).to(device)
    return texture, uv, lod


def gradients(texture: texvlm.Texture, uv, lod, weights, filter: str = "trilinear", address: str = "clamp"):
    leaves = [t.clone().requires_grad_() for t in (texture.data, uv, lod)]
    out = texture.replace(leaves[0]).sample(leaves[1], leaves[2], filter, address)
    return torch.autograd.grad(out, leaves, weights, allow_unused=True)


@pytest.mark.parametrize("filter", FILTERS)
@pytest.mark.parametrize("address", ADDRESS_MODES)
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5, 8, 40])
def test_any_number_of_channels(filter: str, address: str, channels: int, device: torch.device) -> None:
    """A channel's values and gradients do not depend on how many others there are: also those of single channels."""
    texture, uv, lod = queries(1 if channels % 2 else 2, 70, channels, device, torch.float64)
    weights = torch.randn(2, 70, channels, dtype=torch.float64).to(device)
    out = texture.sample(uv, lod, filter, address)
    data, d_uv, d_lod = gradients(texture, uv, lod, weights, filter, address)
    sums = [torch.zeros_like(uv), torch.zeros_like(lod)]
    for c in range(channels):
        single = texvlm.Texture.from_data(texture.data[..., c : c + 1].contiguous(), 33, 20, texture.levels, ["mean"])
        torch.testing.assert_close(single.sample(uv, lod, filter, address), out[..., c : c + 1], rtol=1e-12, atol=1e-12)
        one = gradients(single, uv, lod, weights[..., c : c + 1], filter, address)
        torch.testing.assert_close(one[0], data[..., c : c + 1], rtol=1e-10, atol=1e-10)
        for total, part in zip(sums, one[1:], strict=True):
            total += part
    torch.testing.assert_close(d_uv, sums[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(d_lod, sums[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("channels", [3, 4, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("address", ["clamp", "border"])
def test_deterministic_gradients(channels: int, dtype: torch.dtype, address: str, device: torch.device, deterministic) -> None:
    """Bit for bit the same in every run, though hundreds of queries share a texel; and the right ones."""
    texture, uv, lod = queries(1, 400, channels, device, dtype)
    uv[:, 100:300] = 0.3
    weights = torch.randn(2, 400, channels).to(dtype).to(device)
    first, *others = (gradients(texture, uv, lod, weights, address=address) for _ in range(3))
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert torch.equal(a, b)
    torch.use_deterministic_algorithms(False)
    tolerance = {torch.float32: 2e-5, torch.float64: 1e-9, torch.float16: 1e-1}[dtype]
    for a, b in zip(first, gradients(texture, uv, lod, weights, address=address), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_deterministic_sums_do_not_depend_on_the_order(device: torch.device, deterministic) -> None:
    """What makes them reproducible: queries in another order give the same bits. On the CPU it is the order that is fixed."""
    texture, uv, lod = queries(1, 400, 8, device)
    uv[:, 100:300] = 0.3
    weights = torch.randn(2, 400, 8).to(device)
    order = torch.randperm(400).to(device)
    first = gradients(texture, uv, lod, weights)[0]
    second = gradients(texture, uv[:, order], lod[:, order], weights[:, order])[0]
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-4)
    if device.type == "cuda" or EMULATED:
        assert torch.equal(first, second)


def test_deterministic_gradients_of_extreme_values(device: torch.device, deterministic) -> None:
    texture, uv, lod = queries(1, 9, 4, device)
    for scale in (0.0, 1e-30, 1e30):
        weights = scale * torch.rand(2, 9, 4).to(device)
        data = gradients(texture, uv, lod, weights)[0]
        torch.testing.assert_close(data.double().sum((0, 1)), weights.double().sum((0, 1)), rtol=1e-5, atol=0)
    weights = torch.ones(2, 9, 4).to(device)
    weights[0, 3, 1] = torch.inf
    weights[1, 4, 2] = torch.nan
    data = gradients(texture, uv, lod, weights)[0]
    assert data[..., 1].isinf().any() and data[..., 2].isnan().any()
    torch.testing.assert_close(data[..., [0, 3]].double().sum((0, 1)), torch.full((2,), 18.0).double().to(device))


def test_gradients_with_any_strides(device: torch.device) -> None:
    texture, uv, lod = queries(2, 50, 8, device)
    weights = torch.randn(8, 50, 2).to(device).permute(2, 1, 0)
    for a, b in zip(gradients(texture, uv, lod, weights), gradients(texture, uv, lod, weights.contiguous()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    one = torch.ones(1, 1, 1).to(device).expand(2, 50, 8)
    torch.testing.assert_close(gradients(texture, uv, lod, one)[0].sum(), one.sum(), rtol=1e-4, atol=1e-4)
