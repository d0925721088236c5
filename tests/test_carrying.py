"""What carrying means: values move whole with what they belong to, small movements add up, and what looks otherwise is seen."""

from __future__ import annotations

import pytest
import torch

import texvlm

ROWS, COLUMNS = 6, 16


def nothing_still(batch: int = 1) -> torch.Tensor:
    return torch.zeros(batch, ROWS, COLUMNS, dtype=torch.bool)


def flow_of(x: float, y: float = 0.0, batch: int = 1) -> torch.Tensor:
    """In pixels of a grid of 4 a cell."""
    return torch.tensor([4 * x, 4 * y]).reshape(1, 2, 1, 1).expand(batch, 2, 4 * ROWS, 4 * COLUMNS).contiguous()


def look(seed: int = 0) -> torch.Tensor:
    return torch.rand(1, 3, ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("speed", [0.2, 0.45, 1.0, 1.3, 2.6])
def test_small_movements_add_up(speed) -> None:
    """After n frames a value lies at most half a cell from where it belongs, and its offset says where."""
    numbers = torch.arange(ROWS * COLUMNS).reshape(1, ROWS, COLUMNS)
    offset = torch.zeros(1, 2, ROWS, COLUMNS)
    for n in range(1, 6):
        now = look(n)
        source, offset, _, _ = texvlm.carry(now, look(n - 1), look(n - 1), offset, nothing_still(), flow_of(-speed))
        numbers = numbers.flatten(1).gather(1, source.flatten(1)).reshape(numbers.shape)
        origin = torch.arange(COLUMNS) - n * speed
        inside = origin >= 0
        column = numbers[0, :, inside] % COLUMNS
        assert ((column - origin[inside]).abs() <= 0.5 + 1e-4).all()
        torch.testing.assert_close(offset[0, 1][:, inside], column - origin[inside], atol=1e-4, rtol=0)
        assert (numbers[0, :, inside] // COLUMNS == torch.arange(ROWS)[:, None]).all()


def test_what_is_still_or_quiet_keeps_its_value() -> None:
    now, still = look(), nothing_still()
    still[:, :2] = True
    before = look(1)
    before[:, :, 4:] = now[:, :, 4:] + 1e-4
    offset = torch.full((1, 2, ROWS, COLUMNS), 0.3)
    source, after, _, _ = texvlm.carry(now, before, before, offset, still, flow_of(-1))
    here = torch.arange(ROWS * COLUMNS).reshape(1, ROWS, COLUMNS)
    stays = torch.tensor([True, True, False, False, True, True])
    assert torch.equal(source[:, stays], here[:, stays]) and torch.equal(after[:, :, stays], offset[:, :, stays])
    assert torch.equal(source[:, 2:4, 1:], here[:, 2:4, :-1])


def test_differences_count_by_the_contrast_around_them() -> None:
    now = 0.5 + torch.cat([0.01 * look()[:, :, :3], look()[:, :, 3:]], 2)
    held = now.clone()
    held[:, :, 1, 8] += 0.02
    held[:, :, 4, 8] += 0.02
    difference, seen = texvlm.carry(now, now, held, torch.zeros(1, 2, ROWS, COLUMNS), nothing_still()).residual[:, 0]
    assert (difference[[1, 4], 8] - 0.02).abs().max() < 1e-6
    assert seen[1, 8] > 5 * seen[4, 8] and (seen > 0).sum() == 2


def test_what_is_occluded_is_lost() -> None:
    hidden = torch.zeros(1, 4 * ROWS, 4 * COLUMNS, dtype=torch.bool)
    hidden[:, :4, :8] = True  # two cells
    hidden[:, 8:9, :8] = True  # a quarter of two
    flow = flow_of(-0.2)
    flow[:, 0, 20, 40] = float("nan")
    residual = texvlm.carry(look(), look(1), look(1), torch.zeros(1, 2, ROWS, COLUMNS), nothing_still(), flow, hidden).residual
    lost = residual[1, 0].isinf()
    assert lost.nonzero().tolist() == [[0, 0], [0, 1], [5, 10]] and residual[0].isfinite().all()


def test_pictures_of_a_batch_do_not_matter_to_each_other() -> None:
    g = torch.Generator().manual_seed(0)
    now, before, held = (torch.rand(3, 3, ROWS, COLUMNS, generator=g) for _ in range(3))
    flow, offset = torch.randn(3, 2, 10, 33, generator=g), torch.rand(3, 2, ROWS, COLUMNS, generator=g) - 0.5
    together = texvlm.carry(now, before, held, offset, nothing_still(3), flow)
    for b in range(3):
        part = slice(b, b + 1)
        alone = texvlm.carry(now[part], before[part], held[part], offset[part], nothing_still(), flow[part])
        assert all(torch.equal(x[part], y) for x, y in zip(together[:3], alone[:3]))
        assert torch.equal(together.residual[:, part], alone.residual)
