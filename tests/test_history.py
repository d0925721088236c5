"""What histories mean: peaks where the eye was, decay, warping by flow, and attention at its place."""

from __future__ import annotations

import math

import pytest
import torch

import texvlm


def test_one_gaussian_is_the_formula_and_round() -> None:
    plane = texvlm.gaussian_splat(torch.tensor([[[0.5, 0.25]]]), torch.tensor([[0.8]]), 0.1, 40, 80)[0]
    assert plane.shape == (40, 80) and plane.argmax() in (9 * 80 + 39, 9 * 80 + 40, 10 * 80 + 39, 10 * 80 + 40)
    sigma = 8.0  # of the longer side, 80
    for y, x in ((9, 39), (9, 47), (17, 39), (30, 60)):
        d = (x + 0.5 - 40) ** 2 + (y + 0.5 - 10) ** 2
        assert plane[y, x].item() == pytest.approx(0.8 * math.exp(-d / (2 * sigma**2)), abs=1e-6)


def test_scipy_agrees() -> None:
    """A point on a pixel's centre is a Gaussian filter of an impulse, up to the filter's norm."""
    ndimage = pytest.importorskip("scipy.ndimage", reason="SciPy is not installed")
    impulse = torch.zeros(61, 81, dtype=torch.float64)
    impulse[30, 40] = 1
    blurred = torch.from_numpy(ndimage.gaussian_filter(impulse.numpy(), 0.05 * 81, truncate=9))
    plane = texvlm.gaussian_splat(torch.tensor([[[0.5, 0.5]]], dtype=torch.float64), torch.ones(1, 1).double(), 0.05, 61, 81)[0]
    torch.testing.assert_close(plane, blurred / blurred.max(), rtol=0, atol=1e-6)


def test_range_is_kept_and_gradient_stops_where_it_is_cut_off() -> None:
    points = torch.full((1, 5, 2), 0.5, requires_grad=True)
    weights = torch.ones(1, 5, requires_grad=True)
    plane = texvlm.gaussian_splat(points, weights, 0.1, 20, 20)
    assert plane.max() == 1 and plane.min() >= 0
    plane[0, 10, 10].backward()
    assert weights.grad.abs().max() == 0 and points.grad.abs().max() == 0


def test_a_point_moves_towards_what_is_wanted() -> None:
    point = torch.tensor([[[0.3, 0.4]]], requires_grad=True)
    texvlm.gaussian_splat(point, torch.ones(1, 1), 0.1, 32, 32)[0, 24, 24].backward()
    assert (point.grad > 0).all()  # to the right and down


def test_calls_one_by_one_and_all_at_once() -> None:
    fixations = torch.tensor([[[0.2, 0.3], [0.7, 0.6], [0.4, 0.8]]])
    at_once = texvlm.fixation_history(fixations, 30, 40, decay=0.7)
    plane = None
    for i in range(3):
        plane = texvlm.fixation_history(fixations[:, i : i + 1], 30, 40, decay=0.7, previous=plane)
    torch.testing.assert_close(plane, at_once, rtol=1e-5, atol=1e-6)
    nothing = texvlm.fixation_history(fixations[:, :0], 30, 40, previous=at_once)
    assert torch.equal(nothing, at_once)
    values = [at_once[0, int(v * 30), int(u * 40)].item() for u, v in fixations[0].tolist()]
    assert values == sorted(values)  # the latest counts most


def test_history_moves_with_the_flow() -> None:
    before = texvlm.fixation_history(torch.tensor([[0.25, 0.5]]), 32, 64)
    flow = torch.zeros(1, 2, 32, 64)
    flow[:, 0] = -16  # the world moved right by a quarter
    after = texvlm.fixation_history(torch.zeros(1, 0, 2), 32, 64, previous=before, flow=flow)
    assert divmod(after.argmax().item(), 64)[1] in (31, 32)
    hidden = torch.ones(1, 32, 64, dtype=torch.bool)
    assert texvlm.fixation_history(torch.zeros(1, 0, 2), 32, 64, previous=before, flow=flow, occlusion=hidden).max() == 0


def test_gaze_decays_by_frame_and_foveas_count_alike() -> None:
    two = texvlm.gaze_history(torch.tensor([[[0.25, 0.5], [0.75, 0.5]]]), 32, 64, sigma=0.05)
    assert two[0, 16, 15].item() == pytest.approx(two[0, 16, 48].item(), abs=1e-6)
    later = texvlm.gaze_history(torch.zeros(1, 0, 2), 32, 64, previous=two, decay=0.5)
    torch.testing.assert_close(later, two * 0.5)


def test_bad_points_leave_the_rest() -> None:
    good = torch.tensor([[[0.5, 0.5]]])
    bad = torch.tensor([[[0.5, 0.5], [float("nan"), 0.1], [0.2, float("inf")]]])
    plain = texvlm.gaussian_splat(good, torch.ones(1, 1), 0.1, 16, 16)
    assert torch.equal(texvlm.gaussian_splat(bad, torch.ones(1, 3), 0.1, 16, 16), plain)
    assert torch.equal(texvlm.gaussian_splat(bad[:, :1], torch.tensor([[-1.0]]), 0.1, 16, 16), torch.zeros(1, 16, 16))
    with pytest.raises(ValueError, match="decay"):
        texvlm.fixation_history(good[0], 4, 4, decay=1.5)
    with pytest.raises(ValueError, match="decay"):
        texvlm.gaze_history(good[0], 4, 4, decay=-0.5)


@pytest.mark.parametrize("factor", [1, 4, 7])
def test_attention_keeps_its_mean_and_range(factor) -> None:
    attention = torch.softmax(torch.randn(2, 6 * 9), dim=1).reshape(2, 6, 9)
    plane = texvlm.attention_map(attention, 6 * factor, 9 * factor)
    torch.testing.assert_close(plane.mean((1, 2)), attention.mean((1, 2)), rtol=1e-5, atol=1e-8)
    assert plane.min() >= attention.min() and plane.max() <= attention.max() + 1e-7
    if factor == 7:
        torch.testing.assert_close(plane[:, 3::7, 3::7], attention)  # at a token's centre, its own value


def test_attention_has_gradients_of_all_orders() -> None:
    attention = torch.rand(1, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda a: texvlm.attention_map(a, 7, 9), (attention,))
