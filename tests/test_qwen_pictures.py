"""What of a picture the tower is given: thumbnails, tokens of several levels, pictures straight from the file, budgets, duplicates."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from qwen_recipe import FAMILIES, GREEDY, ONE_EACH, answer, cut, cut_logits, model_of, places, tower_told, unchanged
from torch import Tensor

import texvlm
from texvlm.qwen import QwenVLAdapter, auto_budget, tiny_batch, tiny_model
from texvlm.qwen.pictures import target_size

every_family = pytest.mark.parametrize("family", FAMILIES)
each_kind = pytest.mark.parametrize("family", ONE_EACH)
pytestmark = pytest.mark.filterwarnings("ignore:bias acts")


def chooser(*kept: list[int]) -> Any:
    waiting = iter(kept)
    return lambda image, grid, k: torch.tensor(next(waiting))


def constants(family: str) -> tuple[list[float], list[float]]:
    if family.startswith("qwen2"):
        return [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
    return [0.5] * 3, [0.5] * 3


def rows_of(image: Tensor, family: str) -> Tensor:
    """All rows of a picture [3, H, W] in [0, 1] for patches of 4 and groups of 2 x 2, as a processor lays them out; in plain loops."""
    mean, std = (torch.tensor(v, dtype=image.dtype)[:, None, None] for v in constants(family))
    image, rows = (image - mean) / std, []
    for y in range(0, image.shape[1], 8):
        for x in range(0, image.shape[2], 8):
            for inner_y in (0, 4):
                for inner_x in (0, 4):
                    patch = image[:, y + inner_y : y + inner_y + 4, x + inner_x : x + inner_x + 4]
                    rows.append(patch[:, None].expand(-1, 2, -1, -1).flatten())
    return torch.stack(rows)


def real_batch(model: Any, family: str, *images: Tensor) -> dict[str, Tensor]:
    """One prompt with these pictures [3, H, W], rows and all."""
    inputs = tiny_batch(model, [tuple(image.shape[1:]) for image in images])  # type: ignore[arg-type]
    inputs["pixel_values"] = torch.cat([rows_of(image, family) for image in images])
    return inputs


def some_picture(height: int, width: int, seed: int = 0) -> Tensor:
    """Smooth, with something in it."""
    coarse = torch.rand(1, 3, 5, 6, generator=torch.Generator().manual_seed(seed))
    return F.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 1)[0]


# ---- thumbnails ----


def with_thumbnails(family: str, inputs: Any, images: list[Tensor], grids: list[tuple[int, int]]) -> dict[str, Tensor]:
    """The prompt in which a coarse picture of each comes before it, as one would write it by hand."""
    ids: list[int] = []
    number, before = 0, 0
    for token in inputs["input_ids"][0].tolist():
        if token == 58:
            rows, columns = grids[number]
            ids += [58, *[60] * (rows * columns), 57]
            number += 1
        ids.append(token)
    rows, sizes = [], []
    for image, (down, across) in zip(images, grids):
        small = F.interpolate(image[None], (8 * down, 8 * across), mode="bicubic", antialias=True)[0]
        count = image.shape[1] * image.shape[2] // 16
        rows += [rows_of(small, family), inputs["pixel_values"][before : before + count]]
        before += count
        sizes += [[1, 2 * down, 2 * across], [1, image.shape[1] // 4, image.shape[2] // 4]]
    tokens = torch.tensor([ids])
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "mm_token_type_ids": (tokens == 60).int(),
        "pixel_values": torch.cat(rows),
        "image_grid_thw": torch.tensor(sizes),
    }


@every_family
def test_a_thumbnail_is_a_picture_before_the_picture(family: str) -> None:
    """With a block of positions of its own: the same as if one had put it into the prompt oneself."""
    model = model_of(family)
    images = [some_picture(40, 48), some_picture(32, 24, 1)]
    inputs = real_batch(model, family, *images)
    kept = [places(16, 30), places(10, 12)]
    adapter = QwenVLAdapter(model, chooser(*kept), k=20, thumbnail="segment")
    batch = adapter.prepare(inputs)
    grids = [(2, 2), (2, 1)]  # a quarter of the budget at most, which is 20 and 12
    whole = with_thumbnails(family, inputs, images, grids)
    cells = [[0, 1, 2, 3], kept[0], [0, 1], kept[1]]
    given, geometry = cut(model, whole, cells)
    for name in ("input_ids", "position_ids", "image_grid_thw"):
        assert torch.equal(batch[name], given[name]), name
    torch.testing.assert_close(batch["pixel_values"], given["pixel_values"], atol=1e-5, rtol=0)
    given["pixel_values"] = batch["pixel_values"]  # to the last bit: deep models make more of it
    with tower_told(model, geometry), torch.no_grad():
        expected, tokens = model(**given).logits, answer(model, given)
    torch.testing.assert_close(adapter(batch).logits, expected, atol=1e-5, rtol=0)
    assert torch.equal(adapter.generate(batch, **GREEDY)[:, -5:], tokens)
    found = adapter.generate(batch, **{**GREEDY, "do_sample": True, "top_k": 1, "num_return_sequences": 3})
    assert torch.equal(found[:, -5:], tokens.expand(3, -1))


def features(adapter: QwenVLAdapter, batch: Any) -> Tensor:
    """What leaves the tower."""
    seen: list[Tensor] = []
    hook = adapter.model.model.visual.register_forward_hook(lambda m, args, out: seen.append(out.pooler_output))
    try:
        with torch.no_grad():
            adapter(batch)
    finally:
        hook.remove()
    return seen[0] if isinstance(seen[0], Tensor) else torch.cat(seen[0])


@every_family
@pytest.mark.parametrize("thumbnail", ["segment", "joint"])
def test_who_sees_a_thumbnail(family: str, thumbnail: str) -> None:
    """In a segment of its own, the tower's other features change by exactly nothing; in the same segment, all of them change."""
    model = model_of(family)
    inputs = real_batch(model, family, some_picture(40, 48))
    kept = places(16, 30)
    alone = QwenVLAdapter(model, chooser(kept), k=16)
    adapter = QwenVLAdapter(model, chooser(kept), k=20, thumbnail=thumbnail)
    batch = adapter.prepare(inputs)
    before, after = features(alone, alone.prepare(inputs)), features(adapter, batch)
    assert after.shape[0] == 20 and int((batch["input_ids"] == 60).sum()) == 20
    change = (after[4:] - before).abs().amax(1)
    assert bool((change == 0).all()) if thumbnail == "segment" else bool((change > 1e-5).all())


@every_family
def test_the_budget_holds_the_thumbnail(family: str) -> None:
    """At most a quarter of it; labels, weights and records know of it; a budget without room has none."""
    model = model_of(family)
    inputs = tiny_batch(model, [[(64, 64)], [(24, 40), (16, 16)]], labels=True)
    for thumbnail in ("segment", "joint"):
        adapter = QwenVLAdapter(model, "uniform", k=20, thumbnail=thumbnail)
        for k in (20, 8, 4, 3, 1, None):
            batch = adapter.prepare(inputs, k=[k] * 3)
            cells = batch["texvlm_cells"]
            for number, groups in enumerate((64, 15, 4)):
                mine = cells[cells[:, 0] == number]
                coarse = int((mine[:, 3] == -1).sum())
                budget = min(k or groups, groups)
                assert len(mine) == budget and coarse <= budget // 4
                assert coarse > 0 or budget < 4
            assert batch["labels"].shape == batch["input_ids"].shape
            assert torch.equal(batch["labels"][batch["labels"] != -100], inputs["labels"][inputs["labels"] != -100])
            assert int((batch["input_ids"] == 60).sum()) == len(cells) == len(batch["pixel_values"]) // 4
            with torch.no_grad(), unchanged(model):
                assert adapter(batch).loss.isfinite()


@each_kind
def test_a_joint_thumbnail_is_where_what_it_shows_is(family: str) -> None:
    """Its patches stand at the centres of what they cover, in the one segment of attention, and its tokens in the picture's block."""
    model = model_of(family)
    inputs = real_batch(model, family, some_picture(48, 48))
    kept = places(12, 36)
    adapter = QwenVLAdapter(model, chooser(kept), k=16, thumbnail="joint")
    batch = adapter.prepare(inputs)
    assert batch["image_cu_seqlens"].tolist() == [0, 64]
    positions = batch["image_position_ids"]
    centres = [(i + 0.5) * 3 - 0.5 for i in range(4)]  # 2 x 2 groups, 4 x 4 patches, of 12 x 12
    expected = [(centres[2 * a + c], centres[2 * b + d]) for a in range(2) for b in range(2) for c in range(2) for d in range(2)]
    torch.testing.assert_close(positions[:16], torch.tensor(expected))
    rows, columns = torch.tensor(kept) // 6, torch.tensor(kept) % 6
    inner = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
    assert torch.equal(positions[16:], (2 * torch.stack([rows, columns], 1)[:, None] + inner).flatten(0, 1).float())
    where = batch["position_ids"][1:, 0, 4:20] - batch["position_ids"][1:, 0, 3:4] - 1
    assert where[0].eq(0).all() and where.min() == 0 and where.max() <= 5
    assert where[1:, :4].tolist() == [[1, 1, 4, 4], [1, 4, 1, 4]]
    assert torch.equal(where[1:, 4:], torch.stack([rows, columns]))
    assert int(batch["position_ids"][1:, 0, 20].max()) == 4 + 6  # the text after it is where it was


# ---- positions of any size ----


def table_at(model: Any, positions: Tensor, grid: tuple[int, int]) -> Tensor:
    """The learned table at fractional places, by torch's own bilinear sampling: corners on corners."""
    weight = model.model.visual.pos_embed.weight.detach()
    side = int(len(weight) ** 0.5)
    table = weight.T.reshape(1, -1, side, side)
    at = positions.float() / torch.tensor([grid[0] - 1, grid[1] - 1]) * 2 - 1
    return F.grid_sample(table, at.flip(1)[None, None], mode="bilinear", align_corners=True)[0, :, 0].T


@pytest.mark.parametrize("family", [f for f in ONE_EACH if not f.startswith("qwen2")])
@pytest.mark.parametrize("options", [{"selector": "multiscale"}, {"selector": "uniform", "thumbnail": "joint"}])
def test_taps_of_fractional_places(family: str, options: dict[str, Any]) -> None:
    """Where whole positions agree with transformers, fractional ones agree with an interpolation of the table."""
    model = model_of(family)
    adapter = QwenVLAdapter(model, **{"k": 20, **options})
    batch = adapter.prepare(real_batch(model, family, texture_picture()))
    positions = batch["image_position_ids"]
    assert positions.is_floating_point() and (positions % 1 != 0).any()
    names = ("interp", "bilinear")
    indices, weights = (
        next(batch[f"image_{n}_{what}"] for n in names if f"image_{n}_{what}" in batch) for what in ("indices", "weights")
    )
    if indices.shape[0] == 4:
        indices, weights = indices.T, weights.T
    table = model.model.visual.pos_embed.weight.detach()
    found = (table[indices] * weights[..., None]).sum(1)
    torch.testing.assert_close(found, table_at(model, positions, (32, 32)), atol=1e-5, rtol=0)


# ---- tokens of several levels ----


def texture_picture() -> Tensor:
    """128 x 128: one busy corner, the rest calm."""
    picture = some_picture(128, 128)
    picture[:, :40, :40] = torch.rand(3, 40, 40, generator=torch.Generator().manual_seed(2))
    return picture


@every_family
def test_tokens_of_several_levels(family: str) -> None:
    """k tokens, disjoint, at the centres of what they cover; rows are means of their pixels; the model runs, and answers."""
    model = model_of(family)
    image = texture_picture()
    inputs = real_batch(model, family, image)
    adapter = QwenVLAdapter(model, "multiscale", k=60)
    batch = adapter.prepare(inputs)
    cells, levels = batch["texvlm_cells"][:, 2], batch["texvlm_cells"][:, 3]
    assert len(cells) == 60 and set(levels.tolist()) == {0, 1, 2}
    covered = torch.zeros(16, 16, dtype=torch.int64)
    for cell, level in zip(cells.tolist(), levels.tolist()):
        row, column, side = cell // 16, cell % 16, 2**level
        assert row % side == 0 and column % side == 0
        covered[row : row + side, column : column + side] += 1
    assert int(covered.max()) == 1
    positions, where = [], []
    text = int(batch["position_ids"][1, 0, 3])
    for i, (cell, level) in enumerate(zip(cells.tolist(), levels.tolist())):
        side = 2**level
        row, column = cell // 16 // side, cell % 16 // side  # counted in its own level
        for a in range(2):
            for b in range(2):
                positions.append([(2 * row + a) * side + (side - 1) / 2, (2 * column + b) * side + (side - 1) / 2])
        block = image[:, 8 * side * row : 8 * side * (row + 1), 8 * side * column : 8 * side * (column + 1)]
        small = F.avg_pool2d(block[None], side)[0] if side > 1 else block
        torch.testing.assert_close(batch["pixel_values"][4 * i : 4 * i + 4], rows_of(small, family), atol=2e-5, rtol=0)
        where.append([text + 1, text + 1 + cell // 16 + (side - 1) // 2, text + 1 + cell % 16 + (side - 1) // 2])
    torch.testing.assert_close(batch["image_position_ids"].float(), torch.tensor(positions))
    assert batch["position_ids"][1:, 0, 4:64].T.tolist() == where
    assert batch["image_cu_seqlens"].tolist() == [0, 240]
    if family == "qwen2_5_vl":  # windows of 2 x 2 groups of the full picture
        order = batch["image_window_index"]
        window = (cells // 16 // 2) * 8 + cells % 16 // 2
        assert sorted(order.tolist()) == list(range(60)) and bool((window[order].diff() >= 0).all())
    assert adapter.generate(batch, **GREEDY).shape[1] == batch["input_ids"].shape[1] + 5
    packed = (
        QwenVLAdapter(model, "multiscale", k=60).prepare(
            {k: v for k, v in inputs.items() if not k.startswith(("pixel", "image"))}, images=[image]
        )
        if family.startswith("qwen3")
        else None
    )  # bounds of sizes differ
    if packed is not None:
        assert torch.equal(packed["texvlm_cells"], batch["texvlm_cells"])
        torch.testing.assert_close(packed["pixel_values"], batch["pixel_values"], atol=2e-5, rtol=0)


# ---- straight from the file ----

SIZES = [(37, 53), (40, 48), (100, 20), (64, 200), (9, 9), (5, 3)]


def processor(family: str, pixels: tuple[int, int]) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    mean, std = constants(family)
    size = {"shortest_edge": pixels[0], "longest_edge": pixels[1]}
    return Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, image_mean=mean, image_std=std, size=size)


@each_kind
@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("mode", ["prune_pre", "prune_post", "blend"])
def test_pictures_without_a_processor(family: str, expanded: bool, mode: str) -> None:
    """Only ids and pictures: rows and grids are those that the processor makes, with one placeholder each or with all."""
    model, pixels = model_of(family), (16 * 64, 40 * 64)
    generator = np.random.default_rng(0)
    images = [generator.integers(0, 256, (h, w, 3), dtype=np.uint8) for h, w in SIZES]
    made = processor(family, pixels)(images, return_tensors="pt")
    groups = (made["image_grid_thw"].prod(1) // 4).tolist()
    ids = [3, 4]
    for count in groups:
        ids += [58, *[60] * (count if expanded else 1), 57, 9]
    kept = [places(3, n, i) for i, n in enumerate(groups)]
    if mode == "blend":
        adapter = QwenVLAdapter(model, lambda image, grid, k: (torch.arange(k), torch.ones(k)), k=None, mode=mode, pixels=pixels)
    else:
        adapter = QwenVLAdapter(model, chooser(*kept), k=3, mode=mode, pixels=pixels)
    batch = adapter.prepare({"input_ids": [ids]}, images=[torch.from_numpy(i).permute(2, 0, 1) for i in images])
    assert batch["texvlm_grids"][:, 2:].tolist() == made["image_grid_thw"].tolist()
    rows = torch.arange(len(made["pixel_values"])).split([4 * n for n in groups])
    if mode == "prune_pre":
        rows = tuple(r.unflatten(0, (-1, 4))[cells].flatten() for r, cells in zip(rows, kept))
    torch.testing.assert_close(batch["pixel_values"], made["pixel_values"][torch.cat(rows)], atol=1e-5, rtol=0)
    whole: list[int] = [3, 4]
    for count in groups:
        whole += [58, *[60] * count, 57, 9]
    processed = QwenVLAdapter(model, chooser(*kept), k=3, mode=mode, pixels=pixels) if mode != "blend" else adapter
    other = processed.prepare({"input_ids": [whole], **made})
    for name in ("input_ids", "attention_mask", "position_ids", "image_grid_thw", "texvlm_cells"):
        assert torch.equal(batch[name], other[name]), name
    with torch.no_grad():
        torch.testing.assert_close(adapter(batch).logits, processed(other).logits, atol=5e-4, rtol=0)


def test_sizes_are_the_processors() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    generator = torch.Generator().manual_seed(0)
    for cell, pixels in ((28, (4 * 28**2, 1280 * 28**2)), (32, (65536, 16777216)), (8, (1024, 2560))):
        for _ in range(400):
            height, width = (2 ** (1 + 11 * torch.rand(2, generator=generator))).int().tolist()
            if max(height, width) <= 200 * min(height, width):
                assert target_size(height, width, cell, pixels) == smart_resize(height, width, cell, *pixels), (height, width)
    with pytest.raises(ValueError, match=r"a picture's sides must be within 200 : 1, got 1000 x 2"):
        target_size(1000, 2, 28, (3136, 1003520))


@each_kind
def test_labels_are_expanded_with_the_placeholders(family: str) -> None:
    adapter = QwenVLAdapter(model_of(family), "uniform", k=3, pixels=(64, 4096))
    ids = torch.tensor([[3, 58, 60, 57, 9, 8], [3, 4, 58, 60, 57, 7]])
    labels = torch.tensor([[-100] * 4 + [9, 8], [-100] * 5 + [7]])
    batch = adapter.prepare({"input_ids": ids, "labels": labels}, images=[some_picture(24, 40), some_picture(16, 16)])
    assert batch["labels"].tolist() == [[-100] * 6 + [9, 8], [-100] * 7 + [7]]
    assert batch["input_ids"].tolist() == [[3, 58, 60, 60, 60, 57, 9, 8], [3, 4, 58, 60, 60, 60, 57, 7]]


# ---- budgets ----


def test_a_budget_of_the_size_alone() -> None:
    """273 for 4096 groups, in half octaves; never more than there are."""
    for groups in (1, 7, 64, 100, 1000, 4096, 9999, 65536):
        octave = math.floor(math.log2(groups / 4096) + 0.5)
        assert auto_budget(groups) == min(groups, round(273 * 2 ** (octave / 2)))
    model = model_of("qwen3_vl")
    inputs = tiny_batch(model, [(64, 64), (24, 24), (128, 80)])
    for adapter, k in ((QwenVLAdapter(model, "uniform", k="auto"), None), (QwenVLAdapter(model, "uniform", k=3), "auto")):
        cells = adapter.prepare(inputs, k=k)["texvlm_cells"]
        assert torch.bincount(cells[:, 0]).tolist() == [auto_budget(64), 9, auto_budget(160)]
    with pytest.raises(ValueError, match=r"groups must be at least 1, got 0"):
        auto_budget(0)


@pytest.mark.parametrize("selector", ["learned", "uniform", "random", "an allocator"])
@each_kind
def test_duplicates_cost_nothing(family: str, selector: Any) -> None:
    """bound=0 under a budget of all: what goes is, pixel by pixel, what another kept cell is; in a batch with pictures of any number."""
    model = model_of(family)
    if selector == "an allocator":
        selector = texvlm.Allocator("mlp", participation=())
    generator = torch.Generator().manual_seed(0)
    tiles = (torch.rand(30, 3, 8, 8, generator=generator) * 255).round() / 255
    page = torch.ones(3, 40, 48)
    for cell in (0, 7, 8, 22):
        page[:, cell // 6 * 8 :, cell % 6 * 8 :][:, :8, :8] = tiles[cell]
    busy = torch.cat([torch.cat(list(tiles[6 * r : 6 * r + 6]), 2) for r in range(5)], 1)
    blank = torch.ones(3, 16, 24)
    inputs = real_batch(model, family, page, busy, blank)
    adapter = QwenVLAdapter(model, selector, k=None, bound=0.0)
    batch = adapter.prepare(inputs, images=[page, busy, blank])
    cells = batch["texvlm_cells"]
    kept = [cells[cells[:, 0] == i, 2].tolist() for i in range(3)]
    assert kept[1] == list(range(30)) and len(kept[2]) == 1
    assert {0, 7, 8, 22} <= set(kept[0]) and len(kept[0]) < 30

    def cell_of(image: Tensor, cell: int) -> bytes:
        across = image.shape[2] // 8
        return image[:, cell // across * 8 :, cell % across * 8 :][:, :8, :8].contiguous().numpy().tobytes()

    for image, mine in ((page, kept[0]), (blank, kept[2])):
        there = {cell_of(image, c) for c in mine}
        assert all(cell_of(image, c) in there for c in range(image.shape[1] * image.shape[2] // 64))
    with torch.no_grad():
        torch.testing.assert_close(adapter(batch).logits[0], cut_logits(model, inputs, kept), atol=1e-5, rtol=0)
    small = adapter.prepare(inputs, images=[page, busy, blank], k=3)
    counts = torch.bincount(small["texvlm_cells"][:, 0], minlength=3).tolist()
    assert counts == [3, 3, 1]
    if isinstance(selector, torch.nn.Module):  # what is left out gives no gradient, and no NaN
        with adapter.attach():
            model(**small).logits.square().sum().backward()
        adapter.detach()
        gradients = [p.grad for p in selector.parameters()]
        assert all(g is not None and g.isfinite().all() for g in gradients) and any(g.any() for g in gradients if g is not None)
        model.zero_grad()


@pytest.mark.parametrize("selector", ["learned", "predictive", "random", "uniform", "salience"])
def test_selectors_by_name(selector: str) -> None:
    """Each keeps at most k of every picture; chance is that of the generator."""
    model = model_of("qwen3_vl")
    images = [some_picture(64, 64), texture_picture()]
    inputs = real_batch(model, "qwen3_vl", *images)

    def run(seed: int) -> Tensor:
        adapter = QwenVLAdapter(model, selector, k=7, generator=torch.Generator().manual_seed(seed))
        return adapter.prepare(inputs)["texvlm_cells"]

    cells = run(0)
    assert torch.equal(cells, run(0))
    assert torch.equal(cells, run(1)) is (selector != "random")
    counts = torch.bincount(cells[:, 0], minlength=2)
    assert bool((counts >= 1).all()) and bool((counts <= 7).all())
    assert selector == "predictive" or counts.tolist() == [7, 7]


def test_an_allocator_and_a_configuration_as_selectors() -> None:
    model = model_of("qwen3_vl")
    image = texture_picture()
    inputs = real_batch(model, "qwen3_vl", image)
    scorer = texvlm.Allocator(
        information=["entropy", "rms:edge"], perspective=["mean:eccentricity"], participation=[], cell=8
    ).eval()
    torch.nn.init.ones_(scorer.information.head.weight)
    for selector in (scorer, texvlm.CascadeConfig.preset("salience")):
        cells = QwenVLAdapter(model, selector, k=9).prepare(inputs, images=[image])["texvlm_cells"][:, 2]
        if isinstance(selector, texvlm.Allocator):
            found = texvlm.select(image, 9, 8, "learned", scorer=scorer)
        else:
            found = texvlm.select(image, 9, 8, "salience")
        assert cells.tolist() == sorted(found.indices[0, :9].tolist())


def test_an_automatic_budget_has_a_name_of_its_own() -> None:
    model = tiny_model("qwen3_vl")
    batch = tiny_batch(model, [(128, 128)])
    named, counted = QwenVLAdapter(model, "uniform", budget="auto"), QwenVLAdapter(model, "uniform", k="auto")
    assert torch.equal(named.prepare(batch)["input_ids"], counted.prepare(batch)["input_ids"])
    with pytest.raises(ValueError, match=r"budget must be None or 'auto', got 'some'"):
        QwenVLAdapter(model, "uniform", budget="some")
