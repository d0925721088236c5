"""What a fovea means: exact budgets, resolution by eccentricity, and gradients that can move and shape it."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

import texvlm
from texvlm import FoveaLayout, sample_foveated


def picture(height: int, width: int, dtype: torch.dtype = torch.float32, batch: int = 1) -> torch.Tensor:
    """Texture in every direction and at every scale, the same each time."""
    y, x = torch.meshgrid(torch.arange(height, dtype=dtype), torch.arange(width, dtype=dtype), indexing="ij")
    waves = [torch.sin(x / a + y / b + c) for a, b, c in ((2.1, 7.3, 0), (5.9, -3.7, 1), (17.0, 23.0, 2), (-61.0, 45.0, 3))]
    base = torch.stack([0.5 + 0.3 * waves[0] * waves[2], 0.5 + 0.4 * waves[1], 0.5 + 0.2 * (waves[2] + waves[3])])
    return torch.stack([base.roll(13 * b, -1) for b in range(batch)])


def test_default_layout() -> None:
    layout = FoveaLayout()
    assert layout.count == 273
    assert layout.offsets.shape == (273, 2)
    assert layout.offsets.dtype == torch.float32
    grid = layout.offsets[:256].unflatten(0, (16, 16))
    torch.testing.assert_close(grid, -grid.flip(0, 1), rtol=0, atol=1e-4)  # symmetric around the fixation
    assert (grid[:, 1:, 0] > grid[:, :-1, 0]).all()  # row-major, x to the right, y down
    assert (grid[1:, :, 1] > grid[:-1, :, 1]).all()
    radius = layout.offsets.abs().amax(-1)
    assert radius[:256].max() < radius[256:264].min() <= radius[256:264].max() < radius[264:].min()
    assert len({tuple(o) for o in layout.offsets.tolist()}) == 273


def test_neighbours_abut_along_the_axes() -> None:
    """Half the sizes of neighbouring tokens add up to their distance, to within a tenth."""
    layout = FoveaLayout(fovea=15)  # odd: a row of tokens lies on the axis
    x = layout.offsets[:225].unflatten(0, (15, 15))[7, :, 0].double()
    size = 16 * (x.abs() + layout.e0) / layout.e0
    torch.testing.assert_close((size[1:] + size[:-1]) / 2, x.diff(), rtol=0.1, atol=0)


def test_default_layout_ends_at_the_border_of_1024() -> None:
    texture = texvlm.Texture(torch.rand(3, 1024, 1024))
    tokens = sample_foveated(texture, torch.full((1, 1, 2), 0.5))
    side = 16 * torch.exp2(tokens.lod[0, 0])
    ends = (tokens.uv[0, 0] * 1024 - 512).abs().amax(-1) + side / 2
    assert 490 < ends.max() < 550
    assert tokens.lod[0, 0, :256].min() < 0.3


@examples(80)
@given(
    fovea=st.integers(0, 20),
    rings=st.lists(st.integers(1, 30), max_size=5),
    patch=st.integers(1, 32),
    e0=st.floats(60, 1000),
    ratio=st.one_of(st.none(), st.floats(0.7, 4)),
)
def test_counts_are_exact(fovea, rings, patch, e0, ratio) -> None:
    if fovea == 0 and not rings:
        with pytest.raises(ValueError, match="needs tokens"):
            FoveaLayout(fovea, rings, patch, e0)
        return
    layout = FoveaLayout(fovea, rings, patch, e0, None if ratio is None else ratio * e0)
    assert layout.count == fovea**2 + sum(rings) == len(layout.offsets)
    assert layout.offsets.isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fovea": -1}, "fovea must be at least 0, got -1"),
        ({"fovea": 2.0}, "fovea must be an integer"),
        ({"rings": (8, 0)}, "rings must be at least 1, got 0"),
        ({"patch": 0}, "patch must be at least 1, got 0"),
        ({"fovea": 0, "rings": ()}, "a layout needs tokens"),
        ({"e0": 0.0}, "e0 must be positive, got 0"),
        ({"e0": math.nan}, "e0 must be positive, got nan"),
        ({"m0": -3}, "m0 must be positive, got -3"),
        (
            {"e0": torch.ones(2)},
            r"e0 must be a number or a 0-d floating point tensor, got torch.float32 \[2\]",
        ),
        ({"e0": 1.0}, "too small for so many tokens"),
    ],
)
def test_bad_layouts(arguments: dict, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        FoveaLayout(**arguments)


def test_bad_fixation() -> None:
    with pytest.raises(ValueError, match=r"fixation must be \[B, F, 2\], \[B, 2\] or \[2\], got \[1, 3\]"):
        sample_foveated(texvlm.Texture(torch.rand(3, 8, 8)), torch.rand(1, 3))


@pytest.mark.parametrize("m0", [None, 40.0, 90.0])
@pytest.mark.parametrize(("height", "width"), [(240, 300), (61, 517)])
def test_lod_follows_eccentricity(m0: float | None, height: int, width: int) -> None:
    texture = texvlm.Texture(picture(height, width, torch.float64, batch=2))
    layout = FoveaLayout(6, (5, 7), e0=60.0, m0=m0)
    fixation = torch.tensor([[[0.5, 0.5], [0.02, 0.9], [1.1, -0.2]]] * 2, dtype=torch.float64)
    tokens = sample_foveated(texture, fixation, layout)
    size = torch.tensor([width, height], dtype=torch.float64)
    eccentricity = ((tokens.uv - fixation[:, :, None]) * size).norm(dim=-1)
    lod = torch.log2((eccentricity + 60) / (m0 or 60.0)).clamp(0, texture.levels - 1)
    torch.testing.assert_close(tokens.lod, lod, rtol=1e-9, atol=1e-9)
    assert (tokens.uv >= 0).all()
    assert (tokens.uv <= 1).all()


def test_patches_are_extract_patches_at_the_tokens() -> None:
    texture = texvlm.Texture(picture(90, 120, batch=2))
    layout = FoveaLayout(4, (3,), patch=8, e0=30.0)
    tokens = sample_foveated(texture, torch.rand(2, 3, 2), layout, address="mirror")
    assert tokens.patches.shape == (2, 3, 19, 3, 8, 8)
    assert tokens.uv.shape == (2, 3, 19, 2)
    assert tokens.lod.shape == (2, 3, 19)
    each = texture.patches(tokens.uv.flatten(1, 2), tokens.lod.flatten(1, 2), 8, address="mirror")
    assert torch.equal(tokens.patches.flatten(1, 2), each)


def test_batches_and_shared_textures_agree() -> None:
    image = picture(100, 140)
    fixation, layout = torch.rand(3, 2, 2), FoveaLayout(4, (4,), e0=30.0)
    shared = sample_foveated(texvlm.Texture(image), fixation, layout)
    repeated = sample_foveated(texvlm.Texture(image.repeat(3, 1, 1, 1)), fixation, layout)
    for a, b in zip(shared, repeated, strict=True):
        assert torch.equal(a, b)
    for b in range(3):
        for f in range(2):
            one = sample_foveated(texvlm.Texture(image), fixation[b : b + 1, f : f + 1], layout)
            assert torch.equal(one.patches[0, 0], shared.patches[b, f])


def test_empty_fixations() -> None:
    tokens = sample_foveated(texvlm.Texture(torch.rand(2, 3, 64, 64)), torch.zeros(2, 0, 2))
    assert tokens.patches.shape == (2, 0, 273, 3, 16, 16)


def test_m0_above_e0_keeps_a_disc_sharp() -> None:
    layout = FoveaLayout(8, (), patch=4, e0=50.0, m0=50.0 + 100)
    grid = layout.offsets.unflatten(0, (8, 8))
    torch.testing.assert_close(grid[0, :, 0], (torch.arange(8) - 3.5) * 4)  # no stretching: LOD 0 everywhere
    tokens = sample_foveated(texvlm.Texture(picture(256, 256)), torch.full((1, 1, 2), 0.5), layout)
    assert (tokens.lod == 0).all()


@pytest.mark.parametrize("m0", [None, 25.0, 40.0])
def test_gradcheck_through_everything(m0: float | None) -> None:
    """Fixation, e0, M0 and texels; positions and LODs move together, as the law says."""
    texture = texvlm.Texture(picture(40, 52, torch.float64))
    fixation = torch.tensor([[[0.52, 0.47], [0.31, 0.66]]], dtype=torch.float64, requires_grad=True)
    constants = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (29.3, m0) if v is not None]

    def f(data, fix, *law):
        tokens = sample_foveated(texture.replace(data), fix, FoveaLayout(2, (3,), 2, *law))
        return tokens.patches, tokens.uv, tokens.lod

    data = texture.data.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda *a: f(data, *a), (fixation, *constants), eps=1e-7, atol=1e-5, rtol=1e-4)
    assert torch.autograd.gradcheck(lambda d: f(d, fixation, *constants)[0], data, eps=1e-6, atol=1e-6, fast_mode=True)


def test_gradients_are_there() -> None:
    """On a picture of 512 x 512 with texture at all scales none of the gradients is zero, in either gaze."""
    image = picture(512, 512, batch=2).requires_grad_()
    fixation = torch.tensor([[[0.5, 0.5], [0.3, 0.6]], [[0.45, 0.7], [0.8, 0.2]]], requires_grad=True)
    e0, m0 = torch.nn.Parameter(torch.tensor(60.0)), torch.nn.Parameter(torch.tensor(50.0))
    tokens = sample_foveated(texvlm.Texture(image), fixation, FoveaLayout(e0=e0, m0=m0))
    weight = torch.randn(tokens.patches.shape, generator=torch.Generator().manual_seed(1))
    (tokens.patches * weight).sum().backward()
    for name, grad in {"fixation": fixation.grad, "e0": e0.grad, "m0": m0.grad}.items():
        assert grad.isfinite().all(), name
        assert (grad.abs() > 1e-3).all(), (name, grad)
    assert (image.grad != 0).float().mean() > 0.3


def test_learning_moves_the_gaze_to_the_target() -> None:
    """Gradient descent on the fixation alone finds a bright spot."""
    side = 128
    y, x = torch.meshgrid(torch.arange(side) + 0.5, torch.arange(side) + 0.5, indexing="ij")
    spot = torch.exp(-((x - 80) ** 2 + (y - 52) ** 2) / (2 * 12.0**2))
    texture, layout = texvlm.Texture(spot[None]), FoveaLayout(4, (), patch=8, e0=40.0)
    fixation = torch.tensor([[[0.5, 0.5]]], requires_grad=True)
    optimiser = torch.optim.Adam([fixation], lr=0.01)
    for _ in range(80):
        optimiser.zero_grad()
        (-sample_foveated(texture, fixation, layout).patches.mean()).backward()
        optimiser.step()
    torch.testing.assert_close(fixation.detach()[0, 0] * side, torch.tensor([80.0, 52.0]), rtol=0, atol=1.5)


def test_layout_with_parameters_follows_them() -> None:
    e0 = torch.nn.Parameter(torch.tensor(60.0))
    layout = FoveaLayout(e0=e0)
    before = layout.offsets.detach().clone()
    torch.testing.assert_close(before, FoveaLayout(e0=60.0).offsets)
    with torch.no_grad():
        e0.fill_(90.0)
    torch.testing.assert_close(layout.offsets, FoveaLayout(e0=90.0).offsets)
    assert layout.offsets.requires_grad


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_not_finite_fixation_gives_nan_and_no_gradient(bad: float) -> None:
    texture = texvlm.Texture(picture(64, 64).requires_grad_())
    fixation = torch.tensor([[[0.5, 0.5], [bad, 0.5]]], requires_grad=True)
    tokens = sample_foveated(texture, fixation, FoveaLayout(3, (), 4))
    for t in tokens:
        assert t[0, 1].isnan().all()
        assert t[0, 0].isfinite().all()
    tokens.patches[0, 0].square().sum().backward(retain_graph=True)
    alone = fixation.grad.clone()
    fixation.grad = None
    sum(t.sum() for t in tokens).backward()
    assert fixation.grad[0, 1].tolist() == [0, 0]
    assert fixation.grad.isfinite().all()
    assert alone[0, 0].abs().max() > 0


def test_layouts_copy_and_pickle() -> None:
    for layout in (FoveaLayout(), FoveaLayout(e0=torch.nn.Parameter(torch.tensor(70.0)))):
        for other in (copy.deepcopy(layout), pickle.loads(pickle.dumps(layout))):
            torch.testing.assert_close(other.offsets, layout.offsets)


def test_compiles_with_learned_constants() -> None:
    torch._dynamo.reset()
    image = picture(96, 96)

    def run(image, fixation, e0):
        return sample_foveated(texvlm.Texture(image), fixation, FoveaLayout(4, (5,), e0=e0)).patches

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    results = []
    for f in (run, compiled):
        fixation, e0 = torch.full((1, 2, 2), 0.47, requires_grad=True), torch.tensor(40.0, requires_grad=True)
        out = f(image, fixation, e0)
        out.square().sum().backward()
        results.append((out, fixation.grad, e0.grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_compiles_with_the_default_layout() -> None:
    torch._dynamo.reset()
    texture, fixation = texvlm.Texture(picture(128, 128)), torch.full((1, 1, 2), 0.5)
    compiled = torch.compile(sample_foveated, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(texture, fixation).patches, sample_foveated(texture, fixation).patches)


def test_gradients_are_sums_in_a_fixed_order(device: torch.device, deterministic) -> None:
    """Of fixation over its tokens, of offsets over the fixations, of m0 and e0 over everything; the same bits in every run."""
    g = torch.Generator().manual_seed(0)
    inputs = [torch.rand(2, 5, 2, generator=g), torch.randn(300, 2, generator=g) * 40, torch.tensor(20.0), torch.tensor(10.0)]
    weights = [torch.randn(2, 5, 300, 2, generator=g), torch.randn(2, 5, 300, generator=g)]
    results = []
    for dtype in (torch.float64, torch.float32, torch.float32):
        leaves = [t.to(dtype).to(device).requires_grad_() for t in inputs]
        out = torch.ops.texvlm.fovea_tokens(*leaves, 200, 300, 8)
        results.append(torch.autograd.grad(out, leaves, [w.to(dtype).to(device) for w in weights]))
    for exact, first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first.double(), exact, rtol=1e-3, atol=1e-3)


# ---- where to look ----


def test_fixations_inhibit_return() -> None:
    plane = torch.zeros(2, 20, 40)
    plane[0, 5, 10], plane[0, 5, 11], plane[0, 15, 30] = 3.0, 2.9, 1.0
    plane[1, 10, 20] = torch.nan
    plane[1, 2, 3] = 1.0
    uv, value = texvlm.fixate(plane, 2, radius=0.1)
    torch.testing.assert_close(uv[0], torch.tensor([[10.5 / 40, 5.5 / 20], [30.5 / 40, 15.5 / 20]]))
    assert value[0].tolist() == [3.0, 1.0]
    torch.testing.assert_close(uv[1], torch.tensor([[3.5 / 40, 2.5 / 20], [0.5, 0.5]]))  # nothing is left: the centre
    narrow = texvlm.fixate(plane, 2, radius=1e-3)[0]
    torch.testing.assert_close(narrow[0, 1], torch.tensor([11.5 / 40, 5.5 / 20]))
    assert texvlm.fixate(plane, 0)[0].shape == (2, 0, 2)
    with pytest.raises(ValueError, match=r"plane must be \[B, h, w\]"):
        texvlm.fixate(plane[0])


def test_directional_foveation_reads_along_a_line() -> None:
    texture = texvlm.Texture(torch.rand(1, 3, 256, 256))
    fixation, layout = torch.tensor([[[0.5, 0.5]]]), texvlm.FoveaLayout(fovea=4, rings=(6,))
    plain = texvlm.sample_foveated(texture, fixation, layout)
    same = texvlm.sample_foveated(texture, fixation, layout, axes=torch.eye(2)[None, None])
    torch.testing.assert_close(same.uv, plain.uv)
    torch.testing.assert_close(same.lod, plain.lod)
    torch.testing.assert_close(same.patches, plain.patches)
    along = texvlm.sample_foveated(texture, fixation, layout, axes=texvlm.line_axes(torch.tensor([[[1.0, 0.0]]])))
    inner = slice(0, 16)
    spread = [(t.uv[0, 0, inner] - 0.5).abs().amax(0) for t in (plain, along)]
    torch.testing.assert_close(spread[1], spread[0] * torch.tensor([2.0, 0.5]))
    with pytest.raises(ValueError, match="axes must be"):
        texvlm.sample_foveated(texture, fixation, layout, axes=torch.eye(2))
