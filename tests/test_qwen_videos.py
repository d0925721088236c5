"""Videos: frame by frame, each of them a picture to the selector; one run of tokens, or one for each frame."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from qwen_recipe import FAMILIES, GREEDY, answer, cut, cut_logits, model_of, places, tower_told, unchanged
from torch import Tensor, nn

from texvlm.qwen import QwenVLAdapter, tiny_batch

every_family = pytest.mark.parametrize("family", FAMILIES)
pytestmark = pytest.mark.filterwarnings("ignore:bias acts")


def chooser(*kept: list[int]) -> Any:
    waiting = iter(kept)
    return lambda image, grid, k: torch.tensor(next(waiting))


def runs_apart(model: Any) -> bool:
    """Qwen3-VL and later: a run for each frame, with a text that says its time."""
    return not model.config.model_type.startswith("qwen2")


def video_batch(
    model: Any, *videos: tuple[int, int, int], seed: int = 0, image: tuple[int, int] | None = None
) -> dict[str, Tensor]:
    """One prompt, with videos of (frames, height, width), and perhaps with a picture before them."""
    generator = torch.Generator().manual_seed(seed)
    inputs = tiny_batch(model, [[image] if image else []], seed=seed)
    ids, rows = inputs["input_ids"][0].tolist(), []
    for frames, height, width in videos:
        h, w = height // 4, width // 4
        rows.append(torch.randn(frames * h * w, 96, generator=generator))
        if runs_apart(model):
            for frame in range(frames):
                ids += [10 + frame, 58, *[59] * (h * w // 4), 57]
        else:
            ids += [58, *[59] * (frames * h * w // 4), 57]
        ids += [7, 8]
    tokens = torch.tensor([ids])
    inputs |= {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "mm_token_type_ids": ((tokens == 60) + 2 * (tokens == 59)).int(),
        "pixel_values_videos": torch.cat(rows),
        "video_grid_thw": torch.tensor([[t, h // 4, w // 4] for t, h, w in videos]),
    }
    if model.config.model_type == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = torch.arange(1.0, len(videos) + 1)
    return inputs


@every_family
@pytest.mark.parametrize("mode", ["prune_pre", "prune_post", "blend", "bias"])
def test_all_kept_is_dense(family: str, mode: str) -> None:
    """A picture and two videos in one prompt."""
    model = model_of(family)
    inputs = video_batch(model, (3, 24, 32), (2, 16, 24), image=(40, 48))
    adapter = QwenVLAdapter(model, "uniform", k=None, mode=mode)
    batch = adapter.prepare(inputs)
    with torch.no_grad(), unchanged(model):
        torch.testing.assert_close(adapter(batch).logits, model(**inputs).logits, atol=1e-6, rtol=0)
    assert torch.equal(adapter.generate(batch, **GREEDY)[:, -5:], answer(model, inputs))


@every_family
def test_some_kept_is_the_recipe_by_hand(family: str) -> None:
    model = model_of(family)
    inputs = video_batch(model, (3, 24, 32), (2, 16, 24))
    kept = [places(5, 12, i) for i in range(3)] + [places(2, 6, i) for i in range(2)]
    adapter = QwenVLAdapter(model, chooser(*kept), k=5)
    batch = adapter.prepare(inputs, k=[5, 2])
    given, geometry = cut(model, inputs, kept, "video")
    for name, value in given.items():
        assert torch.equal(batch[name], value), name
    for name, value in geometry.items():
        torch.testing.assert_close(batch[f"video_{name}"], value, atol=1e-6, rtol=0, check_dtype=False)
    assert batch["texvlm_cells"].tolist() == [
        [video, frame, cell, 0] for (video, frame), cells in zip([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)], kept) for cell in cells
    ]
    expected = cut_logits(model, inputs, kept, "video")
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits[0], expected, atol=1e-6, rtol=0)
    with tower_told(model, geometry):
        tokens = answer(model, given)
    assert torch.equal(adapter.generate(batch, **GREEDY)[:, -5:], tokens)
    several = adapter.generate(batch, **{**GREEDY, "do_sample": True, "top_k": 1, "num_return_sequences": 2})
    assert torch.equal(several[:, -5:], tokens.expand(2, -1))


@pytest.mark.parametrize("family", [f for f in FAMILIES if not f.startswith("qwen2") and f != "qwen4_exp"])
def test_frames_with_runs_of_their_own_are_pictures(family: str) -> None:
    """The same rows as pictures, and the same groups of them, are the same to the model. (Qwen4 reads the ids too.)"""
    model = model_of(family)
    inputs = video_batch(model, (3, 24, 32))
    kept = [places(5, 12, i) for i in range(3)]
    ids = torch.where(inputs["input_ids"] == 59, 60, inputs["input_ids"])
    pictures = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == 60).int(),
        "pixel_values": inputs["pixel_values_videos"],
        "image_grid_thw": torch.tensor([[1, 6, 8]] * 3),
    }
    adapter = QwenVLAdapter(model, chooser(*kept), k=5)
    with torch.no_grad():
        found = adapter(adapter.prepare(inputs)).logits[0]
    torch.testing.assert_close(found, cut_logits(model, pictures, kept), atol=1e-6, rtol=0)


@every_family
def test_a_batch_of_videos_is_separate_runs(family: str) -> None:
    """Of other lengths and other times."""
    model = model_of(family)
    samples = [video_batch(model, (3, 24, 32)), video_batch(model, (2, 16, 24), (1, 24, 32), seed=1)]
    if family == "qwen2_5_vl":
        samples[1]["second_per_grid_ts"] = torch.tensor([3.0, 2.0])
    kept = [places(4, n, i) for i, n in enumerate([12, 12, 12, 6, 6, 12])]
    longest = max(s["input_ids"].shape[1] for s in samples)
    together: dict[str, Any] = {}
    for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
        together[name] = torch.cat([nn.functional.pad(s[name], (longest - s[name].shape[1], 0)) for s in samples])
    for name in ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts"):
        if name in samples[0]:
            together[name] = torch.cat([s[name] for s in samples])
    adapter = QwenVLAdapter(model, chooser(*kept), k=4)
    batch = adapter.prepare(together)
    with torch.no_grad():
        logits = adapter(batch).logits
    for b, (sample, cells) in enumerate(zip(samples, (kept[:3], kept[3:]))):
        there = batch["attention_mask"][b].bool()
        assert torch.equal(batch["position_ids"][:, b, there], cut(model, sample, cells, "video")[0]["position_ids"][:, 0])
        torch.testing.assert_close(logits[b, there], cut_logits(model, sample, cells, "video"), atol=1e-4, rtol=0)


@pytest.mark.parametrize("mode", ["prune_pre", "blend"])
def test_videos_train_a_selector(mode: str) -> None:
    """Which sees frame after frame."""

    class Brightness(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(0.5))

        def forward(self, image: Tensor, grid: tuple[int, int], k: int) -> Any:
            mean = image.mean(0).unflatten(0, (grid[0], -1)).unflatten(2, (grid[1], -1)).mean((1, 3)).flatten()
            return mean.argsort(descending=True)[:k], (self.gain * mean).sigmoid()

    model, selector = model_of("qwen3_vl"), Brightness()
    inputs = video_batch(model, (3, 24, 32), image=(40, 48))
    adapter = QwenVLAdapter(model, selector, k=4, mode=mode)
    batch = adapter.prepare(inputs)
    assert batch["texvlm_video_weights"].shape == ((12,) if mode == "prune_pre" else (36,))

    def loss() -> Tensor:
        return adapter(batch).logits[0, -3:].logsumexp(-1).sum()

    loss().backward()
    gradient = float(selector.gain.grad)  # type: ignore[arg-type]
    values = []
    for step in (0.01, -0.02):
        with torch.no_grad():
            selector.gain += step
        values.append(float(loss().detach()))
    assert abs(gradient) > 1e-3 and (values[0] - values[1]) / 0.02 == pytest.approx(gradient, rel=0.05)


def test_what_does_not_fit_is_said() -> None:
    model = model_of("qwen3_vl")
    inputs = video_batch(model, (3, 24, 32))
    adapter = QwenVLAdapter(model, "uniform", k=4)
    with pytest.raises(ValueError, match=r"video_grid_thw must be given with pixel_values_videos"):
        adapter.prepare({k: v for k, v in inputs.items() if k != "video_grid_thw"})
    with pytest.raises(
        ValueError, match=r"pixel_values_videos must be \[96, 96\] for video_grid_thw \[\[2, 6, 8\]\], got \[144, 96\]"
    ):
        adapter.prepare(inputs | {"video_grid_thw": torch.tensor([[2, 6, 8]])})
    with pytest.raises(ValueError, match=r"sample 0 hold 24 video tokens where its next video has 36"):
        adapter.prepare(
            inputs
            | {
                "input_ids": torch.cat([inputs["input_ids"][:, :18], inputs["input_ids"][:, 32:]], dim=1)[:, :34],
                "attention_mask": torch.ones(1, 34),
            }
        )
