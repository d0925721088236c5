"""What carried values are worth: they follow what moves, are computed anew where the picture is another, and never blur."""

from __future__ import annotations

import films
import pytest
import torch
import torch.nn.functional as F

import texvlm
from texvlm.video.cache import CarryRule, TemporalCache

ROWS, COLUMNS = 8, 12


def look(seed: int = 0, batch: int = 1) -> torch.Tensor:
    return torch.rand(batch, 3, ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))


def moving(batch: int = 1) -> torch.Tensor:
    return torch.zeros(batch, ROWS, COLUMNS, dtype=torch.bool)


def begun(rule: CarryRule | None = None, batch: int = 1) -> tuple[TemporalCache, torch.Tensor, torch.Tensor]:
    cache, now = TemporalCache(rule), look(batch=batch)
    refresh, why = cache.step(now, None, None, moving(batch))
    assert why == "first" and refresh.all()
    values = torch.rand(batch, 5, ROWS, COLUMNS)
    cache.fill(values, refresh)
    return cache, now, values


def test_nothing_is_computed_of_a_picture_that_stays() -> None:
    cache, now, values = begun()
    for _ in range(28):
        refresh, why = cache.step(now, None, None, moving())
        assert why is None and not refresh.any() and torch.equal(cache.values, values)
    refresh, why = cache.step(now, None, None, moving())
    assert not refresh.any()
    refresh, why = cache.step(now, None, None, moving())
    assert why == "age" and refresh.all()


def test_values_follow_the_flow() -> None:
    cache, now, values = begun(CarryRule(mean=1.0, dirty=1.0))
    flow = torch.zeros(1, 2, ROWS, COLUMNS)
    flow[:, 0] = -0.5
    for n in range(1, 7):
        seen = (now.roll(n // 2, 3) + now.roll((n + 1) // 2, 3)) / 2
        refresh, why = cache.step(seen, flow, None, moving())
        assert why != "first"
    assert torch.equal(cache.values[..., 3:], values[..., :-3])  # whole, not blended
    assert cache.source.shape == (1, ROWS, COLUMNS) and not refresh[..., 3:].any()


def test_what_looks_otherwise_is_computed_anew_until_it_is() -> None:
    cache, now, values = begun()
    other = now.clone()
    other[:, :, 2, 3] = 1 - other[:, :, 2, 3].round()
    for _ in range(2):  # nothing was filled: named again
        refresh, why = cache.step(other, None, None, moving())
        assert why is None and refresh[0, 2, 3] and refresh.sum() < 10
    cache.fill(torch.full_like(values, 9.0), refresh)
    assert (cache.values[0, :, 2, 3] == 9).all() and torch.equal(cache.values[:, :, ~refresh[0]], values[:, :, ~refresh[0]])
    assert (cache.source[refresh] == -1).all() and (cache.source[~refresh] >= 0).all()
    refresh, _ = cache.step(other, None, None, moving())
    assert not refresh.any()


def test_reasons() -> None:
    cache, now, _ = begun()
    assert cache.step(1 - now.round(), None, None, moving())[1] == "cut"
    rule = CarryRule(mean=10.0)
    cache, now, _ = begun(rule)
    assert cache.step(now * 0.7, None, None, moving())[1] == "fade"
    cache, now, _ = begun(rule)
    assert cache.step(1 - now.round(), torch.full((1, 2, ROWS, COLUMNS), 3.0), None, moving())[1] == "dirty"
    cache, now, _ = begun(CarryRule(age=1))
    assert cache.step(now, None, None, moving())[1] == "age"


def test_a_batch_begins_anew_picture_by_picture() -> None:
    cache, now, _ = begun(batch=2)
    other = now.clone()
    other[1] = 1 - other[1].round()
    refresh, why = cache.step(other, None, None, moving(2))
    assert why is None and refresh[1].all() and not refresh[0].any()


def test_another_grid_begins_anew() -> None:
    cache, _, _ = begun()
    refresh, why = cache.step(torch.rand(1, 3, 4, 5), None, None, torch.zeros(1, 4, 5, dtype=torch.bool))
    assert why == "first" and cache.values is None and refresh.shape == (1, 4, 5)


def test_pixels_that_are_not_finite() -> None:
    cache, now, values = begun()
    bad = now.clone()
    bad[0, :, 0, 0] = float("nan")
    refresh, _ = cache.step(bad, None, None, moving())
    assert refresh.sum() < 10
    cache.fill(values, refresh)
    assert not cache.step(bad, None, None, moving())[0].any()  # NaN equals itself


def test_it_goes_on_from_what_was_saved() -> None:
    cache, _, _ = begun()
    flow = torch.randn(1, 2, 16, 24)
    cache.step(look(1), flow, None, moving())
    again = TemporalCache()
    again.load_state_dict(cache.state_dict())
    results = [c.step(look(2), flow, None, moving()) for c in (cache, again)]
    assert torch.equal(results[0][0], results[1][0]) and results[0][1] == results[1][1]
    assert torch.equal(cache.values, again.values) and torch.equal(cache.source, again.source)
    with pytest.raises(ValueError, match="state must hold"):
        again.load_state_dict({"values": None})


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(ValueError, match="age must be at least 1"):
        CarryRule(age=0)
    with pytest.raises(ValueError, match="residual must be a number"):
        CarryRule(residual=float("nan"))
    cache = TemporalCache()
    with pytest.raises(ValueError, match="call step first"):
        cache.fill(torch.zeros(1, 1, 2, 2), torch.zeros(1, 2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="still must be bool"):
        cache.step(look(), None, None, torch.zeros(1, 2, 2, dtype=torch.bool))
    cache, _, values = begun()
    with pytest.raises(ValueError, match="values must be"):
        cache.fill(values[..., 1:], moving())
    with pytest.raises(ValueError, match="flow must be"):
        cache.step(look(), torch.zeros(1, 3, 4, 4), None, moving())


def small(frame: torch.Tensor, times: int) -> torch.Tensor:
    return F.avg_pool2d(frame[None].float() / 255, times)


def descriptors(frame: torch.Tensor) -> torch.Tensor:
    """Colours of quarters of cells of 16 pixels, [1, 12, rows, columns]."""
    return F.pixel_unshuffle(small(frame, 8), 2)


@pytest.mark.parametrize(("name", "cost"), [("moving", 0.12), ("pan", 0.75), ("still", 0.05), ("typing", 0.1)])
def test_the_best_cells_are_those_of_values_computed_anew(name, cost) -> None:
    pytest.importorskip("skimage")
    cache, costs, found, before, flow = TemporalCache(), [], [], None, None
    for frame in films.film(name, 24, (288, 512)):
        fresh, now = descriptors(frame), small(frame, 4)
        still = moving_cells = torch.zeros(1, 18, 32, dtype=torch.bool)
        occlusion = None
        if before is not None:
            flow, occlusion = texvlm.optical_flow(small(before, 4), now, finest=0, initial=flow)
            moving_cells = F.max_pool2d((frame != before).any(0)[None].float(), 16) > 0
            still = ~moving_cells
        before = frame
        refresh, _ = cache.step(small(frame, 16), flow, occlusion, still)
        cache.fill(fresh, refresh)
        costs.append(refresh.float().mean().item())
        best = [(v - fresh[..., 5:6, 7:8]).norm(dim=1).flatten().topk(60, largest=False).indices for v in (cache.values, fresh)]
        found.append(torch.isin(*best).float().mean().item())
    assert sum(found) / len(found) >= 0.9 and sum(costs) / len(costs) <= cost, (sum(found) / len(found), sum(costs) / len(costs))
