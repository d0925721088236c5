"""What optical flow means: known motion comes back, nothing moves in a still picture, what is new is found, and peers are beaten."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import interpolate

import texvlm


def texture(height: int, width: int, seed: int = 0, channels: int = 3) -> torch.Tensor:
    """A random picture with detail at several scales, [1, C, H, W]."""
    g = torch.Generator().manual_seed(seed)
    total = torch.zeros(1, channels, height, width)
    for size in (4, 8, 16, 32):
        coarse = torch.rand(1, channels, max(2, height // size), max(2, width // size), generator=g)
        total += interpolate(coarse, (height, width), mode="bicubic") * size
    return (total / 60).clamp(0, 1)


def field(kind: str, height: int, width: int, magnitude: float, seed: int) -> torch.Tensor:
    """A smooth flow [1, 2, H, W]; `magnitude` is about its mean length in pixels."""
    g = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.arange(height) + 0.5 - height / 2, torch.arange(width) + 0.5 - width / 2, indexing="ij")
    strain = 2 * magnitude / math.hypot(height, width) * 2
    if kind == "shift":
        angle = 2 * math.pi * torch.rand(1, generator=g).item()
        flow = (
            torch.stack([torch.full((height, width), math.cos(angle)), torch.full((height, width), math.sin(angle))]) * magnitude
        )
    elif kind == "rotation":
        flow = torch.stack([-y, x]) * strain
    elif kind == "zoom":
        flow = torch.stack([x, y]) * strain
    else:
        flow = interpolate(torch.randn(1, 2, 4, 4, generator=g), (height, width), mode="bicubic", align_corners=True)[0]
        flow = flow * magnitude / flow.norm(dim=0).mean()
    return flow[None]


def moved(picture: torch.Tensor, flow: torch.Tensor) -> torch.Tensor:
    return texvlm.warp(picture, flow)


def inside(flow: torch.Tensor) -> torch.Tensor:
    """Pixels whose flow stays inside the picture."""
    height, width = flow.shape[2:]
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    x, y = x + flow[0, 0], y + flow[0, 1]
    return (x >= 0) & (y >= 0) & (x <= width - 1) & (y <= height - 1)


def end_point_error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return (found - truth).norm(dim=1)[0][inside(truth)].mean().item()


@pytest.mark.parametrize("size", [(64, 64), (97, 130), (240, 320), (1100, 60)])
def test_still_picture_has_no_flow(size) -> None:
    picture = texture(*size)
    flow, occlusion = texvlm.optical_flow(picture, picture)
    assert flow.abs().max() == 0 and not occlusion.any()


@pytest.mark.parametrize("shift", [(1.0, 0.0), (0.25, -0.5), (-7.3, 4.6), (20.0, 11.5)])
def test_translation_is_recovered_below_a_pixel(shift) -> None:
    picture = texture(256, 320)
    truth = torch.tensor(shift)[None, :, None, None].expand(1, 2, 256, 320).contiguous()
    flow, occlusion = texvlm.optical_flow(picture, moved(picture, truth))
    error = (flow - truth).norm(dim=1)[0][inside(truth)]
    assert error.median() < 0.05 and error.mean() < 0.15
    hidden = occlusion[0][inside(truth)].float().mean()
    assert hidden < 0.03


@pytest.mark.parametrize("kind", ["rotation", "zoom", "random"])
def test_smooth_fields_are_recovered(kind) -> None:
    picture, truth = texture(240, 320, seed=3), field(kind, 240, 320, 4.0, seed=1)
    flow, _ = texvlm.optical_flow(picture, moved(picture, truth))
    assert end_point_error(flow, truth) < 0.25


def test_the_direction_is_from_current_to_previous() -> None:
    picture = texture(128, 160)
    current = picture.roll(5, dims=3)  # the world moved right
    flow, _ = texvlm.optical_flow(picture, current)
    assert (flow[0, 0, 20:-20, 20:-20] + 5).abs().median() < 0.1
    residual = (texvlm.warp(picture, flow) - current).abs()[..., 20:-20, 20:-20].mean()
    assert residual < 0.1 * (picture - current).abs()[..., 20:-20, 20:-20].mean()


def test_brightness_is_not_motion() -> None:
    picture = texture(128, 128) * 0.7
    flow, _ = texvlm.optical_flow(picture, picture + 0.2)
    assert flow.norm(dim=1).max() < 0.05


@pytest.mark.parametrize("expose", [lambda v: 0.7 * v, lambda v: 0.4 * v, lambda v: v**0.7], ids=["0.7", "0.4", "gamma"])
@pytest.mark.parametrize("magnitude", [0, 6])
def test_exposure_is_not_motion(expose, magnitude: int) -> None:
    """The current picture is another exposure of the previous one, still or moved."""
    previous = texture(200, 240, seed=3)
    truth = field("shift", 200, 240, magnitude, seed=1)
    found = texvlm.optical_flow(previous, expose(moved(previous, truth)))[0]
    assert end_point_error(found, truth) < 0.15


def square(side: int, shift: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A square that moves over a still background: previous, current, and what the current picture shows that was hidden."""
    background, front = texture(240, 320, seed=5), texture(side, side, seed=6)
    at = (80, 100)
    previous, current = background.clone(), background.clone()
    previous[..., at[0] : at[0] + side, at[1] : at[1] + side] = front
    y, x = at[0] + shift[0], at[1] + shift[1]
    current[..., y : y + side, x : x + side] = front
    hidden = torch.zeros(240, 320, dtype=torch.bool)
    hidden[at[0] : at[0] + side, at[1] : at[1] + side] = True
    hidden[y : y + side, x : x + side] = False
    return previous, current, hidden


@pytest.mark.parametrize("shift", [(0, 12), (-16, 0), (10, 14)])
def test_what_a_moving_square_uncovers_is_occluded(shift) -> None:
    previous, current, hidden = square(80, shift)
    flow, occlusion = texvlm.optical_flow(previous, current)
    found = occlusion[0]
    near = torch.nn.functional.max_pool2d(hidden[None].float(), 9, 1, 4)[0] > 0  # four pixels of tolerance
    recall, precision = found[hidden].float().mean().item(), near[found].float().mean().item()
    assert recall > 0.7 and precision > 0.5, (recall, precision)
    assert found[near.logical_not()].float().mean() < 0.03
    core = flow[0, :, 80 + shift[0] + 20 : 140 + shift[0], 100 + shift[1] + 20 : 160 + shift[1]]
    assert (core.mean((1, 2)) + torch.tensor([shift[1], shift[0]])).norm() < 0.2


def test_what_comes_in_at_the_border_is_occluded() -> None:
    wide = texture(128, 260, seed=7)
    previous, current = wide[..., 20:180], wide[..., :160]  # 20 columns come in on the left
    _, occlusion = texvlm.optical_flow(previous, current)
    assert occlusion[0, :, :17].float().mean() > 0.9 and occlusion[0, :, 24:].float().mean() < 0.05


@pytest.mark.parametrize("size", [(1, 1), (1, 40), (3, 5000), (7, 7), (8, 8), (9, 200)])
def test_any_size_is_finite(size) -> None:
    generator = torch.Generator().manual_seed(0)
    previous, current = (torch.rand(1, 3, *size, generator=generator) for _ in range(2))
    flow, occlusion = texvlm.optical_flow(previous, current)
    assert flow.shape == (1, 2, *size) and occlusion.shape == (1, *size) and flow.isfinite().all()
    still, hidden = texvlm.optical_flow(previous, previous)
    assert still.abs().max() == 0 and not hidden.any()


def test_constant_and_not_finite_pictures() -> None:
    flat = torch.full((1, 3, 60, 80), 0.5)
    flow, occlusion = texvlm.optical_flow(flat, flat + 0.1)
    assert flow.abs().max() < 1e-3 and not occlusion.any()
    flow, _ = texvlm.optical_flow(torch.full((1, 3, 40, 40), float("nan")), torch.full((1, 3, 40, 40), float("inf")))
    assert flow.isfinite().all()


def test_forms_of_a_picture() -> None:
    picture = texture(96, 128)
    current = picture.roll(2, dims=3)
    flow, occlusion = texvlm.optical_flow(picture, current)
    assert flow.dtype == torch.float32 and occlusion.dtype == torch.bool
    alpha = [torch.cat([p, torch.rand(1, 1, 96, 128)], 1) for p in (picture, current)]
    assert torch.equal(texvlm.optical_flow(*alpha)[0], flow)
    grey = [p.mean(1, keepdim=True) for p in (picture, current)]
    assert (texvlm.optical_flow(*grey)[0] - flow).norm(dim=1).median() < 0.1
    bytes_ = [(p[0].permute(1, 2, 0) * 255).round().byte().numpy() for p in (picture, current)]
    assert (texvlm.optical_flow(*bytes_)[0] - flow).norm(dim=1).median() < 0.05
    pair = texvlm.optical_flow(torch.cat([picture, current]), torch.cat([current, picture]))[0]
    assert torch.equal(pair[:1], flow)
    assert torch.equal(texvlm.optical_flow(picture[0], current[0])[0], flow)


def test_threads_do_not_matter() -> None:
    previous, current = texture(300, 400), texture(300, 400).roll((3, 5), dims=(2, 3))
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(texvlm.optical_flow(previous, current))
    finally:
        torch.set_num_threads(before)
    for flow, occlusion in results[1:]:
        assert torch.equal(flow, results[0][0]) and torch.equal(occlusion, results[0][1])


@pytest.mark.parametrize("grid", [(180, 320), (45, 80), (1, 1)])
def test_a_search_that_begins_at_the_flow_finds_it(grid) -> None:
    picture = texture(180, 320)
    truth = torch.tensor([-21.0, 9.5])[None, :, None, None].expand(1, 2, 180, 320).contiguous()
    current = moved(picture, truth)
    initial = interpolate(truth, grid, mode="area") * torch.tensor([grid[1] / 320, grid[0] / 180])[:, None, None]
    flow, occlusion = texvlm.optical_flow(picture, current, initial=initial)
    assert end_point_error(flow, truth) < 0.2
    assert occlusion[0][inside(truth)].float().mean() < 0.03


def test_a_search_may_begin_at_what_is_wrong() -> None:
    picture = texture(180, 320)
    for initial in ((6.0, -4.0), (float("nan"), 1.0), (1e30, -1e30), (40.0, 30.0)):
        begun = torch.tensor(initial)[None, :, None, None].expand(1, 2, 180, 320)
        flow, _ = texvlm.optical_flow(picture, picture, initial=begun)
        assert flow.isfinite().all() and flow.norm(dim=1).median() < 0.05
    small = torch.rand(1, 3, 3, 5)
    assert texvlm.optical_flow(small, small, initial=torch.full((1, 2, 1, 1), 3.0))[0].isfinite().all()


def test_it_says_that_it_has_no_gradient() -> None:
    picture = texture(32, 32).requires_grad_()
    flow, _ = texvlm.optical_flow(picture, texture(32, 32))
    with pytest.raises(RuntimeError, match="not implemented"):
        flow.sum().backward()


@pytest.mark.parametrize("kind", ["shift", "rotation", "zoom", "random"])
@pytest.mark.parametrize("magnitude", [1.0, 4.0, 12.0])
def test_end_point_error_against_opencv(kind, magnitude) -> None:
    """On warps of a real picture, the error is at most that of OpenCV's DIS with its FAST preset."""
    cv2 = pytest.importorskip("cv2", reason="OpenCV is not installed")
    data = pytest.importorskip("skimage.data", reason="scikit-image is not installed")
    for name, seed in (("astronaut", 1), ("chelsea", 2), ("coffee", 3)):
        previous = torch.from_numpy(getattr(data, name)()).permute(2, 0, 1)[None].float() / 255
        truth = field(kind, *previous.shape[2:], magnitude, seed)
        current = moved(previous, truth)
        grey = [
            (p[0] * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(0).mul(255).round().byte().numpy()
            for p in (current, previous)
        ]
        peer = cv2.DISOpticalFlow_create(cv2.DISOPTICAL_FLOW_PRESET_FAST).calc(*grey, None)
        theirs = end_point_error(torch.from_numpy(peer).permute(2, 0, 1)[None], truth)
        ours = end_point_error(texvlm.optical_flow(previous, current)[0], truth)
        assert ours <= theirs, (name, ours, theirs)
