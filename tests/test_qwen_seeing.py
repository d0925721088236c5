"""What a model was shown of a picture, and which kept groups its answer rests on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from qwen_recipe import ATTENTIVE, ONE_EACH, model_of, places
from torch import Tensor

from texvlm.qwen import QwenVLAdapter, tiny_batch
from texvlm.qwen.explain import DIM
from texvlm.qwen.pictures import unpack_rows

pytestmark = pytest.mark.filterwarnings("ignore:bias acts")
MODES = ("prune_pre", "prune_post", "bias", "scale", "blend")


def chooser(*kept: list[int]) -> Any:
    waiting = iter(kept)
    return lambda image, grid, k: torch.tensor(next(waiting))


def processed(model: Any, sizes: list[tuple[int, int]]) -> list[Tensor]:
    """The pictures of a tiny batch [3, H, W], as the tower would be given them all."""
    inputs, out, start = tiny_batch(model, sizes), [], 0
    adapter = QwenVLAdapter(model, "uniform")
    for _, h, w in inputs["image_grid_thw"].tolist():
        out.append(unpack_rows(inputs["pixel_values"][start : start + h * w], (h, w), adapter.sizes, adapter.family))
        start += h * w
    return out


@pytest.mark.parametrize("family", ONE_EACH)
@pytest.mark.parametrize("mode", MODES)
def test_kept_groups_are_shown(family: str, mode: str) -> None:
    """They are in their places as they were, and their dim mean is elsewhere; thumbnails do not matter."""
    model, sizes = model_of(family), [(40, 48), (24, 16)]
    kept = [places(7, 30), places(2, 6)]
    for thumbnail in (None, "segment", "joint") if mode == "prune_pre" else (None,):
        adapter = QwenVLAdapter(model, chooser(*kept), 10, mode, thumbnail=thumbnail)
        shown = adapter.show(adapter.prepare(tiny_batch(model, sizes), k=[10, 3]))
        assert len(shown) == 2
        for picture, original, cells in zip(shown, processed(model, sizes), kept):
            tiles = original.unflatten(1, (-1, 8)).unflatten(3, (-1, 8)).permute(1, 3, 0, 2, 4).flatten(0, 1)
            expected = (DIM * tiles[cells].mean((0, 2, 3)))[:, None, None].expand_as(tiles).clone()
            expected[cells] = tiles[cells]
            found = picture.float().unflatten(1, (-1, 8)).unflatten(3, (-1, 8)).permute(1, 3, 0, 2, 4).flatten(0, 1)
            torch.testing.assert_close(found, 255 * expected, atol=0.51, rtol=0)


def test_coarse_tokens_are_shown_large() -> None:
    """Each covers what it stands for, with means over it."""
    picture = torch.zeros(3, 64, 64)
    picture[:, :16, :16] = torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(0))
    picture[:, 32:, 32:] = torch.linspace(0, 1, 32)
    adapter = QwenVLAdapter(model_of("qwen3_vl"), "multiscale", k=9)
    batch = adapter.prepare({"input_ids": torch.tensor([[5, 58, 60, 57, 6]])}, images=[picture])
    (shown,) = adapter.show(batch)
    coarse = [cell for cell in batch["texvlm_cells"].tolist() if cell[3]]
    assert coarse
    for _, _, cell, level in coarse:
        y, x, side = cell // 8 * 8, cell % 8 * 8, 8 << level
        part = shown[:, y : y + side, x : x + side].float() / 255
        torch.testing.assert_close(part.mean((1, 2)), picture[:, y : y + side, x : x + side].mean((1, 2)), atol=0.01, rtol=0)


def log_probability(model: Any, adapter: QwenVLAdapter, inputs: Any, answer: Tensor) -> float:
    """Of an answer, by a forward over prompt and answer in one."""
    prompt = {**inputs, "input_ids": torch.cat([inputs["input_ids"], answer], dim=1)}
    prompt["attention_mask"] = torch.ones_like(prompt["input_ids"])
    batch = adapter.prepare(prompt)
    with torch.no_grad():
        logits = adapter(batch).logits[0, -1 - answer.shape[1] : -1]
    return float(logits.log_softmax(-1).gather(1, answer.T).sum())


@pytest.mark.parametrize("family", ATTENTIVE)
def test_what_is_dropped_is_dropped(family: str) -> None:
    """The check says how much less likely the answer is when a group is cut after the tower."""
    model, inputs, kept = model_of(family), tiny_batch(model_of(family), [(40, 48)]), places(6, 30)
    answer = torch.tensor([[5, 9, 7]])
    adapter = QwenVLAdapter(model, chooser(kept), 6, "prune_post")
    batch = adapter.prepare(inputs)
    found = adapter.explain(torch.cat([batch["input_ids"], answer], dim=1), batch, check=6)
    whole = log_probability(model, QwenVLAdapter(model, chooser(kept), 6, "prune_post"), inputs, answer)
    assert float(found.logprob) == pytest.approx(whole, abs=1e-4)
    assert sorted(found.checked[:6].tolist()) == sorted(found.checked[6:].tolist()) == list(range(6))
    for token, dropped in zip(found.checked.tolist(), found.dropped.tolist()):
        rest = [cell for i, cell in enumerate(kept) if i != token]
        without = log_probability(model, QwenVLAdapter(model, chooser(rest), 6, "prune_post"), inputs, answer)
        assert dropped == pytest.approx(whole - without, abs=2e-4)
    assert found.cells[:, 2].tolist() == kept


@pytest.mark.parametrize("family", ONE_EACH)
def test_attributions_are_derivatives(family: str) -> None:
    """Of the log probability by the log of a key's weight in the decoder's attention: as when a selector gives that weight."""
    model, inputs, kept, step = model_of(family), tiny_batch(model_of(family), [(40, 48)]), places(4, 30), 0.05
    answer = torch.tensor([[5, 9, 7]])
    adapter = QwenVLAdapter(model, chooser(kept), 4, "prune_post")
    batch = adapter.prepare(inputs)
    found = adapter.explain(torch.cat([batch["input_ids"], answer], dim=1), batch, check=0)
    assert len(found.checked) == len(found.dropped) == 0
    for i, attribution in enumerate(found.attribution.tolist()):
        sides = []
        for sign in (1, -1):
            weights = torch.ones(4)
            weights[i] = torch.tensor(sign * step).exp()
            weighted = QwenVLAdapter(model, lambda image, grid, k, w=weights: (torch.tensor(kept), w), 4, "prune_post")  # type: ignore[misc]
            sides.append(log_probability(model, weighted, inputs, answer))
        assert attribution == pytest.approx((sides[0] - sides[1]) / (2 * step), abs=2e-3)
