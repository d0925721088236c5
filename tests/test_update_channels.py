"""Texture and saliency brought up to the next picture, tile by tile: bit for bit what a full rebuild gives."""

from __future__ import annotations

import pytest
import torch
from effort import EMULATED, examples
from hypothesis import given
from hypothesis import strategies as st

import texvlm

LOCAL = list(texvlm.LOCAL)
SIZES = [(1, 9), (9, 1), (37, 53), (64, 64), (91, 163), (180, 319), (45, 641)]


def inside(tiles: torch.Tensor, tile: int, height: int, width: int) -> torch.Tensor:
    """The pixels of tiles, [B, 1, H, W]."""
    return tiles.repeat_interleave(tile, 1).repeat_interleave(tile, 2)[:, None, :height, :width]


def tiles_that_differ(a: torch.Tensor, b: torch.Tensor, tile: int) -> torch.Tensor:
    """bool [B, rows, columns], NaN equal to itself."""
    height, width = a.shape[2:]
    differ = ((a != b) & ~(a.isnan() & b.isnan())).any(1)
    rows = -(-height // tile)
    columns = -(-width // tile)
    out = torch.zeros(a.shape[0], rows, columns, dtype=torch.bool)
    for b, y, x in differ.nonzero().tolist():
        out[b, y // tile, x // tile] = True
    return out


class Updated:
    """What is kept of a film, and a check of it against a rebuild after each picture."""

    def __init__(self, image: torch.Tensor, channels: list[int], tile: int, levels: int, dtype: torch.dtype | None) -> None:
        self.image, self.tile, self.channels, self.levels = image, tile, channels, levels
        self.texture = texvlm.build_channels(image, channels=channels, levels=levels, dtype=dtype)
        self.texture.data.fill_(float("nan"))
        self.planes = texvlm.channel_planes(image).fill_(float("nan"))
        self.state = texvlm.saliency_state(image)
        rows, columns = (-(-n // tile) for n in image.shape[2:])
        self.before = torch.zeros(image.shape[0], rows, columns, dtype=torch.bool)
        self._update(image, self.before, first=True)

    def _update(self, image: torch.Tensor, dirty: torch.Tensor, first: bool = False) -> None:
        texvlm.update_channels(self.texture, self.planes, image, dirty, self.before, self.tile, first=first)
        found = texvlm.update_saliency(image, *self.state, dirty, self.before, self.tile, first=first)
        previous = None if first else self.image
        wanted = texvlm.build_channels(
            image, previous, channels=self.channels, levels=self.levels, dtype=self.texture.data.dtype, flow=None
        )
        assert torch.equal(self.texture.data, wanted.data)
        saliency = texvlm.saliency(image, previous)
        enlarged = torch.ops.texvlm.enlarge(found, *image.shape[2:])
        assert torch.equal(enlarged.to(saliency.dtype), saliency)
        self.image, self.before = image, dirty

    def step(self, image: torch.Tensor, dirty: torch.Tensor | None = None) -> None:
        self._update(image, tiles_that_differ(image, self.image, self.tile) if dirty is None else dirty)


@examples(60)
@given(st.data())
def test_any_tiles_of_any_pictures(data: st.DataObject) -> None:
    height, width = data.draw(st.one_of(st.sampled_from(SIZES), st.tuples(st.integers(1, 70), st.integers(1, 70))))
    batch, tile = data.draw(st.sampled_from([1, 3])), data.draw(st.sampled_from([8, 16, 32, 64]))
    source = data.draw(st.sampled_from([torch.uint8, torch.float32, torch.float64, torch.float16]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.float16]))
    channels = data.draw(st.one_of(st.just(LOCAL), st.lists(st.sampled_from(LOCAL), min_size=1, unique=True)))
    levels = data.draw(st.integers(1, texvlm.level_count(height, width)))
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))

    def noise() -> torch.Tensor:
        values = torch.rand(batch, 3, height, width, generator=g)
        return (values * 255).to(source) if source == torch.uint8 else values.to(source)

    image = noise()
    film = Updated(image, channels, tile, levels, dtype)
    for _ in range(2 if EMULATED else 4):
        dirty = torch.rand(film.before.shape, generator=g) < data.draw(st.sampled_from([0.0, 0.03, 0.2, 0.5, 1.0]))
        changed = inside(dirty, tile, height, width) & (torch.rand(batch, 1, height, width, generator=g) < 0.3)
        image = torch.where(changed, noise(), image)
        if source != torch.uint8 and data.draw(st.booleans()):
            image = torch.where(changed & (noise() < 0.1), float("nan"), image)
        film.step(image, dirty)


@pytest.mark.parametrize("tile", [16, 32])
@pytest.mark.parametrize("kind", ["object", "scroll", "cut", "fade", "still"])
def test_films(kind: str, tile: int, generator: torch.Generator) -> None:
    picture = (torch.rand(1, 3, 121, 187, generator=generator) * 255).to(torch.uint8)
    film = Updated(picture, LOCAL, tile, 8, None)
    for i in range(1, 5):
        frame = picture.clone()
        if kind == "object":
            frame[..., 20 + 7 * i : 50 + 7 * i, 30 + 11 * i : 70 + 11 * i] = 200
        elif kind == "scroll":
            frame[..., 40:] = frame[..., 40:].roll(3 * i, 2)
        elif kind == "cut" and i > 2:
            frame = 255 - frame
        elif kind == "fade":
            frame = (frame.float() * (1 - i / 8)).to(torch.uint8)
        film.step(frame)


def test_a_halo_is_as_wide_as_the_table_says() -> None:
    """CHANNELS says how far a texel sees; the compiled code has a table of its own. What is not written stays NaN."""
    dirty = torch.zeros(1, 8, 8, dtype=torch.bool)
    dirty[0, 3, 4] = True
    image = torch.rand(1, 3, 64, 64)
    for channel in texvlm.CHANNELS:
        if channel.halo is None:
            continue
        texture, planes = texvlm.build_channels(image, channels=[channel.index], levels=1), texvlm.channel_planes(image)
        texvlm.update_channels(texture, planes, image, dirty, torch.zeros_like(dirty), 8, first=True)
        texture.data.fill_(float("nan"))
        texvlm.update_channels(texture, planes, image, dirty, torch.zeros_like(dirty), 8)
        rows, columns = (~texture.level(0)[0, 0].isnan()).nonzero(as_tuple=True)
        box = [rows.min().item(), rows.max().item() + 1, columns.min().item(), columns.max().item() + 1]
        halo = channel.halo
        assert box == [24 - halo, 32 + halo, 32 - halo, 40 + halo], channel.name
        assert len(rows) == (8 + 2 * halo) ** 2

    other = image.clone()
    other[..., 24:32, 32:40] = torch.rand(1, 3, 8, 8)
    planes = [texvlm.build_channels(picture, channels=LOCAL, levels=1).level(0)[0] for picture in (image, other)]
    for i, plane in zip(LOCAL, planes[0] != planes[1], strict=True):
        rows, columns = plane.nonzero(as_tuple=True)
        reach = [24 - rows.min(), rows.max() - 31, 32 - columns.min(), columns.max() - 39] if len(rows) else [0]
        assert max(int(r) for r in reach) <= texvlm.CHANNELS[i].halo, texvlm.CHANNELS[i].name
        if texvlm.CHANNELS[i].halo:
            assert max(int(r) for r in reach) == texvlm.CHANNELS[i].halo, "a halo that is wider than it must be"


@examples(60)
@given(st.data())
def test_mips_of_tiles_equal_a_rebuild(data: st.DataObject) -> None:
    height, width = data.draw(st.integers(1, 150)), data.draw(st.integers(1, 150))
    channels, tile = data.draw(st.sampled_from([1, 2, 3, 4, 5, 8, 13, 17])), data.draw(st.sampled_from([8, 16, 32]))
    reducer = data.draw(st.sampled_from([["mean"], ["max"], ["mean", "max", "min", "mode", "mean", "min"] * 3]))
    texture = texvlm.Texture(torch.rand(2, channels, height, width), reducer if len(reducer) == 1 else reducer[:channels])
    tiles = torch.rand(2, -(-height // tile), -(-width // tile)) < data.draw(st.sampled_from([0.0, 0.1, 0.6, 1.0]))
    texture.level(0).copy_(torch.where(inside(tiles, tile, height, width), torch.rand(()), texture.level(0)))
    texvlm.update_mipmaps(texture, tiles=tiles, tile=tile)
    assert torch.equal(texture.data, texvlm.Texture(texture.level(0), texture.reducer).data)


def test_overlapping_rectangles_are_their_union() -> None:
    texture = texvlm.Texture(torch.rand(2, 5, 61, 83))
    rects = [(3, 5, 30, 40), (3, 5, 30, 40), (20, 30, 50, 83), (25, 0, 26, 83), (0, 41, 61, 42)]
    for y0, x0, y1, x1 in rects:
        texture.level(0)[:, :, y0:y1, x0:x1] = torch.rand(2, 5, y1 - y0, x1 - x0)
    texvlm.update_mipmaps(texture, rects)
    assert torch.equal(texture.data, texvlm.Texture(texture.level(0)).data)


def test_threads_agree() -> None:
    image = (torch.rand(2, 3, 230, 311) * 255).to(torch.uint8)
    dirty = torch.rand(2, 15, 20) < 0.2
    other = torch.where(inside(dirty, 16, 230, 311), 255 - image, image)
    results, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            film = Updated(image, LOCAL, 16, 9, None)
            film.step(other, dirty)
            film.step(other, torch.zeros_like(dirty))
            results.append(film.texture.data)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(r, results[0]) for r in results)


def test_tiles_that_are_not_dirty_are_left_alone() -> None:
    """Nothing dirty: nothing is written, at any level."""
    image, none = torch.rand(1, 3, 70, 90), torch.zeros(1, 3, 3, dtype=torch.bool)
    texture, planes = texvlm.build_channels(image, channels=LOCAL), texvlm.channel_planes(image)
    texture.data.fill_(7)
    texvlm.update_channels(texture, planes, image, none, none)
    assert (texture.data == 7).all() and (planes == 0).all()


def test_bad_arguments_are_named() -> None:
    image, none = torch.rand(1, 3, 64, 64), torch.zeros(1, 2, 2, dtype=torch.bool)
    texture, planes = texvlm.build_channels(image, channels=["edge"]), texvlm.channel_planes(image)
    with pytest.raises(ValueError, match="tile must be at least 8"):
        texvlm.update_channels(texture, planes, image, none, none, 4)
    with pytest.raises(ValueError, match="0 to 7 and 9 to 11"):
        texvlm.update_channels(texvlm.build_channels(image, channels=["saliency"]), planes, image, none, none)
    with pytest.raises(NotImplementedError, match="image"):
        texvlm.update_channels(texture, planes, image.clone().requires_grad_(), none, none)
    with pytest.raises(ValueError, match="rects or tiles, not both"):
        texvlm.update_mipmaps(texture, [(0, 0, 1, 1)], tiles=none)
