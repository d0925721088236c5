"""Texture hardware: three tiers of exactness, gradients of the exact interpolant, the backend of a Texture.

The same tests run on a GPU (the real fetch), on the CPU (its emulation), and in builds that run CUDA kernels on the host.
tests/test_texture_cache.py looks at the arrays behind it.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from cases.hardware import places, settled
from cases.sample import MIXED
from effort import EMULATED
from torch.library import opcheck
from torch.utils import _pytree as pytree

import texvlm
from texvlm import reference

ops = torch.ops.texvlm
ADDRESS = ["clamp", "wrap", "mirror", "border"]
# How far a weight can be from the exact one: half a step, or a whole one on a card that is seen to round down.
ROUNDED = (0.5 if reference.hardware.ROUNDING == "nearest" else 1.0) / 2**reference.hardware.FRACTION_BITS
REAL = torch.cuda.is_available()

pytestmark = pytest.mark.filterwarnings("ignore:.*texvlm::.*_backward does not have a deterministic implementation.*")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not REAL:
        pytest.skip("no CUDA device")
    return torch.device(request.param)


def arguments(texture: texvlm.Texture) -> tuple:
    return texture.height, texture.width, list(texture.reducer), texture.levels


def noise(channels: int, height: int, width: int, batch: int = 1, **kwargs) -> texvlm.Texture:
    return texvlm.Texture(torch.rand(batch, channels, height, width), **kwargs)


def contrast(texture: texvlm.Texture, uv: torch.Tensor, lod: torch.Tensor, address: str) -> torch.Tensor:
    """The largest minus the smallest of the eight texels that each sample blends, [B, N, C]."""
    sampler = reference.sample.Sampler(texture.data.double(), texture.height, texture.width, texture.levels, address)
    first = lod.clamp(0, texture.levels - 1).floor().long()
    texels = []
    for level in (first, (first + 1).clamp(max=texture.levels - 1)):
        x, y = (uv.double() * sampler.size(level) - 0.5).floor().long().unbind(-1)
        texels += [sampler.fetch(level, x + dx, y + dy) for dx in (0, 1) for dy in (0, 1)]
    stacked = torch.stack(texels)
    return stacked.amax(0) - stacked.amin(0)


# ---- three tiers ----


@pytest.mark.parametrize("address", ADDRESS)
@pytest.mark.parametrize("level", [0, 1, 3, 5])
def test_aligned_points_are_exact(device: torch.device, level: int, address: str) -> None:
    """Tier 1: multiples of 1/256 of a texel, whole LODs. In these sizes such coordinates have no rounding at all."""
    texture = noise(5, 32, 64)
    h, w = max(1, 32 >> level), 64 >> level
    x, y = (torch.randint(-256 * 2, 256 * (n + 2), (500,)) for n in (w, h))
    uv = torch.stack([(x / 256 + 0.5) / w, (y / 256 + 0.5) / h], -1)[None]
    lod = torch.full((1, 500), float(level))
    wanted = reference.sample_lod(texture.data, uv, lod, *arguments(texture), "trilinear", address)
    for name in ("trilinear", "bilinear"):
        actual = texvlm.sample_lod_hardware(texture.to(device), uv.to(device), lod.to(device), name, address).cpu()
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("address", ADDRESS)
@pytest.mark.parametrize(("height", "width"), [(64, 64), (37, 51), (1, 40)])
def test_random_points_against_the_emulation(device: torch.device, height: int, width: int, address: str) -> None:
    """Tier 2: weights of 8 bits, computed independently."""
    texture = noise(6, height, width, batch=2, reducer=["mean", "mean", "max", "mean", "mode", "min"])
    generator = torch.Generator().manual_seed(1)
    uv = places(generator, 2, 300, height, width, texture.levels, 2.0)
    lod = (torch.randint(-256, 256 * texture.levels, (2, 300)) + torch.rand(2, 300) * 0.8 - 0.4) / 256
    for name in ("trilinear", "bilinear", "nearest"):
        wanted = reference.sample_lod_hardware(texture.data, uv, lod, *arguments(texture), name, address)
        actual = texvlm.sample_lod_hardware(texture.to(device), uv.to(device), lod.to(device), name, address).cpu()
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("address", ADDRESS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_random_points_against_exact_weights(device: torch.device, dtype: torch.dtype, address: str) -> None:
    """Tier 3: 3/512 of the local contrast, sample by sample; and the weights really are rounded."""
    texture = noise(3, 61, 90, dtype=dtype)
    uv, lod = torch.rand(1, 4000, 2) * 1.4 - 0.2, torch.rand(1, 4000) * texture.levels
    exact = reference.sample_lod(texture.data.double(), uv.double(), lod.double(), *arguments(texture), "trilinear", address)
    actual = texvlm.sample_lod_hardware(texture.to(device), uv.to(device), lod.to(device), address=address).cpu().double()
    error, bound = (actual - exact).abs(), 3 * ROUNDED * contrast(texture, uv, lod, address)
    storage = torch.finfo(dtype).eps if dtype != torch.float32 else 2e-6
    assert (error <= bound + storage).all()
    assert error.max() > 1e-3


def test_weights_are_a_staircase_of_256_steps(device: torch.device) -> None:
    ramp = texvlm.Texture(torch.tensor([[[0.0, 256.0]]]), levels=1).to(device)
    steps = (torch.arange(4096, device=device) + 0.5) / 4096
    uv = torch.stack([0.25 + steps / 2, torch.full_like(steps, 0.5)], -1)[None]
    sampled = texvlm.sample_lod_hardware(ramp, uv)[0, :, 0].cpu()
    assert torch.equal(sampled, sampled.round())
    count = 257 if reference.hardware.ROUNDING == "nearest" else 256  # nothing is rounded down to 1
    assert torch.equal(sampled.unique(), torch.arange(float(count)))
    levels = texvlm.Texture(torch.zeros(1, 2, 2)).to(device)
    levels.data[:, -1] = 256.0
    blended = texvlm.sample_lod_hardware(levels, torch.full((1, 4096, 2), 0.5, device=device), steps[None])[0, :, 0].cpu()
    assert torch.equal(blended, blended.round())
    assert (blended.diff() >= 0).all() and len(blended.unique()) == count


def test_mode_channels_and_nearest_are_bit_exact(device: torch.device) -> None:
    labels = torch.randint(0, 2000, (2, 40, 13, 22)).float()
    texture = texvlm.Texture(labels, reducer=MIXED * 10)
    uv, lod = torch.rand(2, 500, 2) * 1.6 - 0.3, torch.rand(2, 500) * 6 - 1
    mode = slice(3, None, 4)
    on_device = texture.to(device)
    for address in ADDRESS:
        wanted = texvlm.sample_lod(texture, uv, lod, address=address)
        actual = texvlm.sample_lod_hardware(on_device, uv.to(device), lod.to(device), address=address).cpu()
        assert torch.equal(actual[..., mode], wanted[..., mode])
        nearest = texvlm.sample_lod_hardware(on_device, uv.to(device), lod.to(device), "nearest", address).cpu()
        assert torch.equal(nearest, texvlm.sample_lod(texture, uv, lod, "nearest", address))
        ddx, ddy = torch.rand(2, 2, 500, 2) * 0.3
        wanted = texvlm.sample_grad(texture, uv, ddx, ddy, address=address)
        actual = texvlm.sample_grad_hardware(on_device, *(t.to(device) for t in (uv, ddx, ddy)), address=address).cpu()
        assert torch.equal(actual[..., mode], wanted[..., mode])


def test_queries_that_are_not_finite(device: torch.device) -> None:
    texture = noise(6, 9, 12, reducer=["mean", "max", "min", "mode", "mean", "mean"]).to(device)
    uv, lod = torch.rand(1, 8, 2, device=device), torch.rand(1, 8, device=device)
    ddx, ddy = torch.full((2, 1, 8, 2), 0.1, device=device)
    uv[0, 0, 0], uv[0, 1, 1], lod[0, 2], ddx[0, 2, 1] = torch.nan, torch.inf, -torch.inf, torch.inf
    lod[0, 3], lod[0, 4] = 1e30, -1e30
    for out in (texvlm.sample_lod_hardware(texture, uv, lod), texvlm.sample_grad_hardware(texture, uv, ddx, ddy)):
        assert out[0, :3].isnan().all() and out[0, 3:].isfinite().all()
    sampled = texvlm.sample_lod_hardware(texture, uv, lod)[0, 3:5].cpu()
    wanted = texvlm.sample_lod_hardware(texture, uv[:, 3:5], torch.tensor([[3.0, 0.0]], device=device))[0].cpu()
    assert torch.equal(sampled, wanted)


@pytest.mark.parametrize("address", ADDRESS)
def test_square_footprints(device: torch.device, address: str) -> None:
    texture = noise(4, 64, 128)
    side = torch.exp2(torch.randint(0, 5, (1, 800)).float())
    zero = torch.zeros_like(side)
    uv, ddx, ddy = torch.rand(1, 800, 2), torch.stack([side / 128, zero], -1), torch.stack([zero, side / 64], -1)
    exact = reference.sample_grad(texture.data, uv, ddx, ddy, *arguments(texture), 16, address)
    actual = texvlm.sample_grad_hardware(texture.to(device), *(t.to(device) for t in (uv, ddx, ddy)), address=address).cpu()
    assert ((actual - exact).abs() <= 3 * ROUNDED * contrast(texture, uv, side.log2(), address) + 2e-6).all()


@pytest.mark.parametrize("reducer", ["mean", "max"])
def test_long_footprints(device: torch.device, reducer: str) -> None:
    """4 : 1, along the axes, over a smooth picture. How hardware spaces its taps is undocumented: within a few percent."""
    y, x = torch.meshgrid(torch.linspace(0, 3, 64), torch.linspace(0, 5, 64), indexing="ij")
    texture = texvlm.Texture(torch.stack([(x + y).sin() * 0.5 + 0.5, (x * y).cos() * 0.5 + 0.5]), reducer)
    uv = torch.rand(1, 300, 2) * 0.6 + 0.2
    ddx, ddy = torch.tensor([8 / 64, 0.0]).expand(1, 300, 2), torch.tensor([0.0, 2 / 64]).expand(1, 300, 2)
    exact = reference.sample_grad(texture.data, uv, ddx, ddy, *arguments(texture))
    actual = texvlm.sample_grad_hardware(texture.to(device), *(t.to(device) for t in (uv, ddx, ddy))).cpu()
    torch.testing.assert_close(actual, exact, rtol=0.1, atol=0.05)


@pytest.mark.parametrize("anisotropy", [1, 3, 16])
@pytest.mark.parametrize("address", ADDRESS)
def test_emulated_footprints_have_our_taps(address: str, anisotropy: int) -> None:
    if emulates_cuda():
        return  # the fetch is then that of the host's texture units, whose taps are their own
    texture = noise(70, 30, 41, batch=2, reducer=(MIXED * 18)[:70])
    uv, (ddx, ddy) = torch.rand(2, 200, 2) * 1.4 - 0.2, (torch.rand(2, 2, 200, 2) - 0.5) * 0.4
    ddx[0, 0], ddx[1, 1, 0] = 0, torch.nan
    actual = ops.sample_grad_hardware(texture.data, uv, ddx, ddy, *arguments(texture), anisotropy, address)
    # In float64 no rounding falls on the other side of a step but by accident: a few samples may.
    wanted = reference.sample_grad_hardware(
        texture.data.double(), *(t.double() for t in (uv, ddx, ddy)), *arguments(texture), anisotropy, address
    )
    error = (actual.double() - wanted).abs()
    assert torch.equal(error.isnan(), wanted.isnan()) and wanted[1, 1].isnan().all()
    assert (error.nan_to_num() <= 1e-5).double().mean() > 0.97
    assert error.nan_to_num().max() < 3 * ROUNDED


def emulates_cuda() -> bool:
    """Whether CPU tensors go through CUDA kernels that run on the host."""
    return texvlm.build_info()["cuda_archs"] == "emulated" and EMULATED


# ---- gradients ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("filter", ["nearest", "bilinear", "trilinear"])
def test_gradients_are_those_of_the_exact_interpolant(device: torch.device, filter: str, dtype: torch.dtype) -> None:
    texture = noise(5, 17, 20, batch=2, dtype=dtype, reducer=["mean", "max", "mode", "min", "mean"]).to(device)
    uv, lod = torch.rand(2, 40, 2, device=device), torch.rand(2, 40, device=device) * 4
    grads = []
    for op in (ops.sample_lod_hardware, ops.sample_lod):
        leaves = [t.clone().requires_grad_() for t in (texture.data, uv, lod)]
        out = op(*leaves, *arguments(texture), filter, "mirror")
        weights = torch.arange(out.numel(), device=device).reshape(out.shape).to(dtype).sin()
        grads.append(torch.autograd.grad(out, leaves, weights))
    for mine, exact in zip(*grads, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-5, atol=1e-5)
    assert grads[0][0].abs().sum() > 0


def test_gradients_of_footprints(device: torch.device) -> None:
    texture = noise(5, 17, 20, batch=2).to(device)
    uv, ddx, ddy = (torch.rand(2, 40, 2, device=device) * scale for scale in (1, 0.3, 0.1))
    grads = []
    for op in (ops.sample_grad_hardware, ops.sample_grad):
        leaves = [t.clone().requires_grad_() for t in (texture.data, uv, ddx, ddy)]
        out = op(*leaves, *arguments(texture), 8, "wrap")
        weights = torch.arange(out.numel(), device=device).reshape(out.shape).float().sin()
        grads.append(torch.autograd.grad(out, leaves, weights))
    for mine, exact in zip(*grads, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-5, atol=1e-5)
        assert mine.abs().sum() > 0


def calls() -> dict:
    texture = noise(3, 12, 10)
    uv, lod, ddx = torch.rand(1, 6, 2), torch.rand(1, 6) * 3, torch.rand(1, 6, 2) * 0.1
    return {
        "sample_lod_hardware": (texture.data, uv, lod, *arguments(texture)),
        "sample_grad_hardware": (texture.data, uv, ddx, ddx.flip(-1).neg(), *arguments(texture)),
    }


@pytest.mark.parametrize("op", ["sample_lod_hardware", "sample_grad_hardware"])
def test_at_home_in_autograd(op: str) -> None:
    """opcheck and compile with gradients; what is not there raises instead of being zero."""
    function = getattr(ops, op)
    args = calls()[op]
    leaves = tuple(a.clone().requires_grad_() if isinstance(a, torch.Tensor) else a for a in args)
    opcheck(function.default, leaves)
    compiled = torch.compile(lambda *a: function(*a).square().sum(), fullgraph=True, dynamic=True, backend="aot_eager")
    eager_leaves = tuple(a.detach().clone().requires_grad_() if isinstance(a, torch.Tensor) else a for a in args)
    compiled(*leaves).backward()
    function(*eager_leaves).square().sum().backward()
    for mine, eager in zip(leaves, eager_leaves, strict=True):
        if isinstance(mine, torch.Tensor):
            torch.testing.assert_close(mine.grad, eager.grad)
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda x: function(x, *args[1:]).sum())(args[0])
    with pytest.raises(RuntimeError):
        torch.func.jvp(lambda x: function(x, *args[1:]), (args[0],), (torch.ones_like(args[0]),))
    out = function(*eager_leaves)
    (first,) = torch.autograd.grad(out, eager_leaves[1], torch.ones_like(out).requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        first.sum().backward()


def test_autocast_promotes_coordinates() -> None:
    for op, (data, *queries, height, width, reducer, levels) in calls().items():
        queries = [q.bfloat16() for q in queries]
        wanted = getattr(ops, op)(data.half(), *(q.float() for q in queries), height, width, reducer, levels)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            actual = getattr(ops, op)(data.half(), *queries, height, width, reducer, levels)
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0)


# ---- the backend of a texture ----


def test_backend_of_a_texture(device: torch.device) -> None:
    image = torch.rand(1, 3, 33, 21, device=device)
    texture = texvlm.generate_mipmaps(image, backend="texture")
    assert torch.equal(texture.data, texvlm.generate_mipmaps(image).data)  # the pyramid is ours
    uv, lod = torch.rand(1, 50, 2, device=device), torch.rand(1, 50, device=device) * 4
    rounded, exact = texvlm.sample_lod_hardware(texture, uv, lod), texvlm.sample_lod(texture, uv, lod)
    assert not torch.equal(rounded, exact)
    assert torch.equal(texture.sample(uv, lod), rounded)
    assert torch.equal(texture.sample(uv, lod, backend="native"), exact)
    assert torch.equal(texvlm.Texture(image).sample(uv, lod, backend="texture"), rounded)
    assert torch.equal(texture.patches(uv, 0.3, 4), texvlm.Texture(image).patches(uv, 0.3, 4))
    ddx, ddy = torch.full((2, 1, 50, 2), 0.1, device=device)
    assert torch.equal(texture.sample_footprint(uv, ddx, ddy, 4), texvlm.sample_grad_hardware(texture, uv, ddx, ddy, 4))
    assert not torch.equal(texture.sample_footprint(uv, ddx, ddy), texture.sample_footprint(uv, ddx, ddy, backend="native"))
    assert "backend='texture'" in repr(texture) and "backend" not in repr(texvlm.Texture(image))


def test_native_is_the_default() -> None:
    image = torch.rand(3, 16, 16)
    for backend in ("auto", "native"):
        assert texvlm.generate_mipmaps(image, backend=backend).backend == "native"
    assert texvlm.Texture(image).backend == texvlm.Texture.from_data(texvlm.Texture(image).data, 16, 16, 5).backend == "native"


def test_backend_survives(device: torch.device) -> None:
    texture = texvlm.generate_mipmaps(torch.rand(3, 16, 16), backend="texture")
    leaves, spec = pytree.tree_flatten(texture)
    for other in (
        texture.to(device),
        texture.to(torch.float16),
        texture.replace(texture.data * 2),
        pickle.loads(pickle.dumps(texture)),
        copy.deepcopy(texture),
        pytree.tree_unflatten(leaves, spec),
        pytree.tree_map(lambda t: t + 1, texture),
    ):
        assert other.backend == "texture"
    old = copy.copy(texvlm.Texture(torch.rand(3, 4, 4)))
    del old.__dict__["backend"]  # pickled before there were backends
    assert old.backend == "native"


def test_backend_goes_through_compile_with_gradients() -> None:
    def run(image: torch.Tensor, uv: torch.Tensor) -> torch.Tensor:
        return texvlm.generate_mipmaps(image, backend="texture").sample(uv, 0.4)

    image, uv = torch.rand(1, 3, 16, 16, requires_grad=True), torch.rand(1, 9, 2)
    wanted = run(image, uv)
    actual = torch.compile(run, fullgraph=True, backend="aot_eager")(image, uv)
    torch.testing.assert_close(actual, wanted)
    (mine,) = torch.autograd.grad(actual.sum(), image)
    (exact,) = torch.autograd.grad(texvlm.Texture(image).sample(uv, 0.4).sum(), image)
    torch.testing.assert_close(mine, exact)


def test_what_hardware_cannot_do_is_refused() -> None:
    image = torch.rand(3, 16, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match="no float64"):
        texvlm.generate_mipmaps(image, backend="texture")
    with pytest.raises(ValueError, match="no float64"):
        texvlm.Texture(image).sample(torch.rand(1, 2, 2), backend="texture")
    with pytest.raises(ValueError, match="no float64"):
        texvlm.generate_mipmaps(image.float(), backend="texture").to(torch.float64)
    with pytest.raises(ValueError, match="'native' or 'texture', got 'vulkan'"):
        texvlm.Texture(image.float()).sample(torch.rand(1, 2, 2), backend="vulkan")


def test_a_handle_needs_a_gpu() -> None:
    texture = noise(3, 8, 8)
    if emulates_cuda():
        return  # there it works: tests/test_texture_cache.py
    with pytest.raises(ValueError, match=r"data must be on a CUDA device .* got cpu"):
        torch.classes.texvlm.HardwareTexture(texture.data, *arguments(texture))


def test_settled_points_are_settled() -> None:
    """The points of tier 2 are chosen so that the last digit of a coordinate does not matter."""
    generator = torch.Generator().manual_seed(0)
    uv = places(generator, 1, 200, 37, 51, 6, 1.0)
    texture = noise(3, 37, 51)
    nudged = uv * (1 + 2e-7)
    assert settled(uv, 37, 51, 6).all()
    a, b = (reference.sample_lod_hardware(texture.data, p, 1.0, *arguments(texture)) for p in (uv, nudged))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
