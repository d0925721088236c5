"""What dirty tiles mean: what differs is found and stored, nothing else is touched, and nothing becomes stale."""

from __future__ import annotations

import pytest
import torch
from effort import EMULATED, examples
from films import film
from hypothesis import given
from hypothesis import strategies as st

import texvlm
from texvlm import reference

LAYOUTS = {
    "planar": lambda t: t.contiguous(),
    "packed": lambda t: t.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "cropped": lambda t: torch.cat([t, t], 3)[..., : t.shape[3]],
    "transposed": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
}
DTYPES = (torch.uint8, torch.float32, torch.float64, torch.float16, torch.bfloat16)


def like(t: torch.Tensor, layout: str) -> torch.Tensor:
    """A copy of these values, strided as that layout has it."""
    return LAYOUTS[layout](t).clone(memory_format=torch.preserve_format) if layout != "cropped" else LAYOUTS[layout](t.clone())


def tiles_of(mask: torch.Tensor, tile: int) -> torch.Tensor:
    """Pixels [H, W] to the tiles [rows, columns] that have one of them."""
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[1] % tile, 0, -mask.shape[0] % tile))
    return padded.unflatten(1, (-1, tile)).unflatten(0, (-1, tile)).any(3).any(1)


@examples(150)
@given(
    st.integers(0, 2**31 - 1),
    st.sampled_from(DTYPES),
    st.tuples(st.sampled_from(sorted(LAYOUTS)), st.sampled_from(sorted(LAYOUTS))),
    st.tuples(st.integers(1, 2), st.integers(1, 4), st.integers(1, 90), st.integers(1, 90)),
    st.integers(8, 64),
    st.sampled_from([0, 1, 2, 9]),
    st.sampled_from(["largest", "mean"]),
)
def test_every_layout_dtype_and_size_gives_what_the_reference_gives(seed, dtype, layouts, shape, tile, steps, measure) -> None:
    g = torch.Generator().manual_seed(seed)
    old = torch.randint(20, 200, shape, generator=g)
    new = old + torch.randint(-steps - 1, steps + 2, shape, generator=g) * (torch.rand(shape, generator=g) < 0.002)
    if steps:
        new += torch.randint(-steps, steps + 1, shape, generator=g)
    new[..., : shape[2] // 3, : shape[3] // 2] = old[..., : shape[2] // 3, : shape[3] // 2]
    scale = 1 if dtype == torch.uint8 else 256  # multiples of 1/256: sums and halves are exact
    frame, stored = (like((t / scale).to(dtype), layout) for t, layout in zip((new, old), layouts, strict=True))
    threshold = steps / (255 if dtype == torch.uint8 else 256)
    *wanted, after = reference.dirty_tiles(frame, stored, tile, threshold, measure)
    before = frame.clone()
    found = texvlm.dirty_tiles(frame, stored, tile, threshold, measure)
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(stored, after) and torch.equal(frame, before)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_value_in_a_tile_is_enough_and_its_neighbours_are_left_alone(layout: str) -> None:
    for y, x, c in ((0, 0, 0), (31, 31, 2), (32, 31, 1), (69, 99, 2), (64, 96, 0)):
        stored = like(torch.full((1, 3, 70, 100), 9, dtype=torch.uint8), layout)
        frame = like(torch.full((1, 3, 70, 100), 10, dtype=torch.uint8), layout)
        frame[0, c, y, x] = 11  # all others differ by 1, which is within the threshold
        found = texvlm.dirty_tiles(frame, stored, 32, 1 / 255)
        assert found.tiles[0, 0] == y // 32 * 4 + x // 32 and found.count.tolist() == [1]
        inside = (torch.arange(70)[:, None] // 32 == y // 32) & (torch.arange(100) // 32 == x // 32)
        assert torch.equal(stored[0], torch.where(inside, frame[0], torch.tensor(9, dtype=torch.uint8)))


@pytest.mark.parametrize("steps", range(0, 256, 17 if EMULATED else 1))
def test_bytes_are_compared_as_integers(steps: int) -> None:
    """Differences of n steps are within a threshold of n / 255, whatever float that is; also as means of blocks of any size."""
    stored, frame = torch.zeros(2, 1, 1, 15, 23, dtype=torch.uint8)
    for measure in ("largest", "mean"):
        frame[:] = steps
        assert texvlm.dirty_tiles(frame, stored, 23, steps / 255, measure).count.item() == 0
        if steps < 255:
            frame[:] = steps + 1
            assert texvlm.dirty_tiles(frame, stored.clone(), 23, steps / 255, measure).count.item() == 1
        for w in range(1, 9):  # one step of one pixel more than the mean may be
            frame[:] = steps
            frame[..., 0, 8] = min(255, steps + 1)
            part = frame[..., :w, 8 - w + 1 : 9]
            found = texvlm.dirty_tiles(part, torch.zeros_like(part), 8, steps / 255, measure).count.item()
            assert found == (steps < 255)


def test_means_of_blocks_find_what_moves_in_noise() -> None:
    """A disc before a still picture, noise of 2 of 255 steps: the largest difference finds every tile, means those of the disc."""
    size, tile, threshold = (256, 320), 16, 2 / 255
    clean, noisy = list(film("moving", 12, size)), list(film("noisy", 12, size))
    stored, missed, wrong, moved, still = noisy[0][None].clone(), 0, 0, 0, 0
    shown = clean[0].clone()  # without noise, what each tile was stored from
    for frame, picture in zip(noisy[1:], clean[1:], strict=True):
        assert texvlm.dirty_tiles(frame[None], stored.clone(), tile, threshold).dirty.float().mean() > 0.99
        found = texvlm.dirty_tiles(frame[None], stored, tile, threshold, "mean").dirty[0]
        change = (picture.float() - shown.float()).abs().amax(0)
        much = tiles_of(
            torch.nn.functional.avg_pool2d(change[None], 8).repeat_interleave(8, 1).repeat_interleave(8, 2)[0] > 10, tile
        )
        any_change = tiles_of(change > 0, tile)
        missed, moved = missed + int((much & ~found).sum()), moved + int(much.sum())
        wrong, still = wrong + int((found & ~any_change).sum()), still + int((~any_change).sum())
        area = found.repeat_interleave(tile, 0).repeat_interleave(tile, 1)[: size[0], : size[1]]
        shown = torch.where(area, picture, shown)
    assert moved > 50 and missed <= 0.02 * moved
    assert still > 1000 and wrong <= 0.002 * still


def test_a_slow_fade_is_seen() -> None:
    """1 of 255 steps a frame at a threshold of 4: what is stored is never more than 4 behind. Against the frame before, it would be 120."""
    stored = torch.full((1, 3, 40, 40), 130, dtype=torch.uint8)
    stale = []
    for value in range(130, 9, -1):
        frame = torch.full_like(stored, value)
        texvlm.dirty_tiles(frame, stored, 16, 4 / 255)
        stale.append((stored.int() - frame.int()).abs().max().item())
    assert max(stale) == 4 and stale.count(0) == 1 + 120 // 5


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_what_is_not_finite_is_no_change(dtype: torch.dtype) -> None:
    frame = torch.rand(1, 3, 24, 40).to(dtype)
    frame[0, 0, 3, 4], frame[0, 1, 12, 30] = float("nan"), float("inf")
    stored = torch.zeros_like(frame)
    for measure in ("largest", "mean"):
        assert texvlm.dirty_tiles(frame, stored, 8, 0.0, measure).count.item() in (15, 0)
        assert torch.equal(stored.nan_to_num(), frame.nan_to_num()) and stored[0, 0, 3, 4].isnan()
        assert texvlm.dirty_tiles(frame, stored, 8, 0.0, measure).count.item() == 0
    frame[0, 2, 3, 4] = 2.0
    assert texvlm.dirty_tiles(frame, stored, 8).tiles[0, :2].tolist() == [0, -1]


def test_extremes_of_floats_differ() -> None:
    """Their difference is no finite number, and larger than any threshold."""
    most = torch.finfo(torch.float32).max
    for measure in ("largest", "mean"):
        frame, stored = torch.full((1, 1, 8, 8), most), torch.full((1, 1, 8, 8), -most)
        frame[..., ::2], stored[..., ::2] = stored[..., ::2].clone(), frame[..., ::2].clone()
        assert texvlm.dirty_tiles(frame, stored, 8, 1e300, measure).count.item() == 1


def test_a_picture_without_a_batch_and_an_empty_batch() -> None:
    stored = torch.zeros(3, 20, 30)
    assert texvlm.dirty_tiles(torch.ones(3, 20, 30), stored, 16).dirty.shape == (1, 2, 2) and stored.min() == 1
    empty = torch.zeros(0, 3, 20, 30)
    assert [t.shape for t in texvlm.dirty_tiles(empty, empty.clone(), 16)] == [(0, 2, 2), (0, 4), (0,)]


def test_the_same_tensor_is_never_dirty() -> None:
    frame = torch.rand(1, 3, 20, 30)
    assert texvlm.dirty_tiles(frame, frame, 8).count.item() == 0


def test_writes_are_seen_by_autograd() -> None:
    stored = torch.zeros(1, 3, 16, 16)
    weight = torch.ones((), requires_grad=True)
    out = (weight * stored).sum()
    texvlm.dirty_tiles(torch.ones(1, 3, 16, 16), stored, 8)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"tile": 7}, ValueError, "tile must be at least 8, got 7"),
        ({"tile": 8.0}, TypeError, "tile must be an integer"),
        ({"threshold": -1.0}, ValueError, "threshold must be finite and at least 0, got -1.0"),
        ({"threshold": float("inf")}, ValueError, "threshold must be finite"),
        ({"measure": "median"}, ValueError, "measure must be one of largest, mean, got 'median'"),
        ({"frame": [1]}, TypeError, "frame must be a tensor, got list"),
        ({"reference": torch.zeros(3, 16, 17)}, ValueError, "reference must be as large as the frame"),
        ({"frame": torch.zeros(3, 16, 16, requires_grad=True)}, NotImplementedError, r"call it under torch.no_grad\(\)"),
        ({"reference": torch.zeros(3, 16, 16, requires_grad=True)}, NotImplementedError, r"on reference.detach\(\)"),
    ],
)
def test_bad_arguments(arguments: dict, error: type[Exception], message: str) -> None:
    good = {"frame": torch.ones(3, 16, 16), "reference": torch.zeros(3, 16, 16)}
    with pytest.raises(error, match=message):
        texvlm.dirty_tiles(**{**good, **arguments})
    assert good["reference"].max() == 0
