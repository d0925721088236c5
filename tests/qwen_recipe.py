"""What tests of `texvlm.qwen` compare with: cutting before the tower by hand, for one prompt, from the geometry of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import vision_utils

from texvlm.qwen import tiny_families, tiny_model

FAMILIES = tiny_families()
DENSE_TOWERS = [f for f in FAMILIES if f != "qwen2_5_vl"]
ATTENTIVE = [f for f in FAMILIES if f in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")]
"""Those whose decoder is attention throughout."""
LINEAR = [f for f in FAMILIES if f not in ATTENTIVE]
ONE_EACH = [f for f in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5") if f in FAMILIES]
"""One of each kind of tower and decoder, where a family is not the point."""

GREEDY = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}


@cache
def model_of(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """Shared: tests leave it as it was."""
    return tiny_model(family).to(dtype)


@contextmanager
def unchanged(model: Any, attached: bool = False) -> Iterator[None]:
    """No hook, submodule, attribute or attention implementation is there afterwards that was not there before."""

    def look() -> Any:
        modules = dict(model.named_modules())
        hooks = {
            n: (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._forward_hooks_always_called)) for n, m in modules.items()
        }
        configs = [model.config, model.model.visual.config, model.model.language_model.config]
        attributes = {n for n in model.__dict__ if not n.startswith("_forward")}
        return hooks, attributes, [c._attn_implementation for c in configs]

    before = look()
    assert attached or not any("texvlm" in (name or "") for name in before[2])  # nor did an earlier test leave any
    yield
    assert look() == before


def taps(model: Any, grid: Tensor) -> tuple[Tensor, Tensor] | None:
    """Taps [N, 4] of the learned table of positions and their weights, of full pictures."""
    tower = model.model.visual
    side, merge = getattr(tower, "num_grid_per_side", None), tower.config.spatial_merge_size
    if side is None:
        return None
    if hasattr(vision_utils, "get_vision_interpolation_indices_and_weights"):
        return vision_utils.get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=merge,
        )
    indices, weights = vision_utils.get_vision_bilinear_indices_and_weights(grid, side, merge)
    return indices.T, weights.T


def by_window(kept: list[list[int]], grids: list[list[int]], merge: int, side: int) -> tuple[list[int], list[int]]:
    """The order of kept groups by windows of the full pictures, and how many each window that has any has; in plain loops."""
    order: list[int] = []
    counts: list[int] = []
    start = 0
    for cells, (_, h, w) in zip(kept, grids):
        rows, columns = h // merge, w // merge
        for top in range(0, rows, side):
            for left in range(0, columns, side):
                inside = [
                    start + i
                    for i, cell in enumerate(cells)
                    if top <= cell // columns < top + side and left <= cell % columns < left + side
                ]
                if inside:
                    order += inside
                    counts.append(len(inside))
        start += len(cells)
    return order, counts


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def cut(
    model: Any, inputs: dict[str, Tensor], kept: list[list[int]], kind: str = "image"
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One prompt of stills, or of videos, cut to the kept groups of each picture, or frame: what the model is given, and the tower told."""
    assert len(inputs["input_ids"]) == 1
    pixels = "pixel_values" if kind == "image" else "pixel_values_videos"
    grid, merge, tower = inputs[f"{kind}_grid_thw"], model.config.vision_config.spatial_merge_size, model.model.visual
    unit = merge**2
    frames = grid.repeat_interleave(grid[:, 0], 0).clamp(max=torch.tensor([1, 1 << 20, 1 << 20]))
    groups = (frames.prod(-1) // unit).tolist()
    starts = [sum(groups[:i]) for i in range(len(groups))]
    chosen = torch.tensor([start + cell for start, cells in zip(starts, kept) for cell in cells])
    rows = (chosen[:, None] * unit + torch.arange(unit)).flatten()
    geometry = {
        "position_ids": vision_utils.get_vision_position_ids(grid, merge)[rows],
        "cu_seqlens": bounds([len(cells) * unit for cells in kept]),
    }
    full = taps(model, grid)
    if full is not None:
        spelled = hasattr(vision_utils, "get_vision_interpolation_indices_and_weights")
        names = ("interp_indices", "interp_weights") if spelled else ("bilinear_indices", "bilinear_weights")
        geometry |= {name: (value[rows] if spelled else value[rows].T) for name, value in zip(names, full)}
    if hasattr(tower, "window_size"):
        order, counts = by_window(kept, frames.tolist(), merge, tower.window_size // merge // tower.patch_size)
        geometry |= {"window_index": torch.tensor(order), "cu_window_seqlens": bounds([unit * n for n in counts])}
    ids = inputs["input_ids"][0]
    more = {name: inputs[name] for name in ("second_per_grid_ts",) if name in inputs}
    positions = model.model.get_rope_index(
        inputs["input_ids"],
        mm_token_type_ids=inputs["mm_token_type_ids"],
        attention_mask=inputs["attention_mask"],
        **{f"{kind}_grid_thw": grid.clone()},  # some versions write into it
        **more,
    )[0][:, 0]
    keep = ids != getattr(model.config, f"{kind}_token_id")
    keep[(~keep).nonzero()[:, 0][chosen]] = True
    ids, positions = ids[keep], positions[:, keep]
    counts = [len(cells) for cells in kept]
    if kind == "image" or model.config.model_type.startswith("qwen2"):  # later, each frame is a run, and so a picture
        counts = [int(part.sum()) for part in torch.tensor(counts).split(grid[:, 0].tolist())]
    given = {
        "input_ids": ids[None],
        "attention_mask": torch.ones_like(ids)[None],
        "position_ids": torch.cat([torch.arange(len(ids))[None], positions])[:, None],
        pixels: inputs[pixels][rows],
        f"{kind}_grid_thw": torch.tensor([[1, merge, merge * count] for count in counts]),
    }
    return given, geometry


@contextmanager
def tower_told(model: Any, geometry: dict[str, Tensor]) -> Iterator[None]:
    """The tower gets this geometry, whatever grid it is told."""
    hook = model.model.visual.register_forward_pre_hook(lambda m, args, kwargs: (args, kwargs | geometry), with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def cut_logits(model: Any, inputs: dict[str, Tensor], kept: list[list[int]], kind: str = "image") -> Tensor:
    """[tokens, vocabulary] of one cut prompt."""
    given, geometry = cut(model, inputs, kept, kind)
    with tower_told(model, geometry), torch.no_grad():
        return model(**given).logits[0]


def answer(model: Any, inputs: Any, **options: Any) -> Tensor:
    """New tokens of `generate`."""
    out = model.generate(**inputs, **{**GREEDY, **options})
    return out[:, inputs["input_ids"].shape[1] :]


def places(k: int, groups: int, seed: int = 0) -> list[int]:
    """Some cells, in the order of the picture."""
    return sorted(torch.randperm(groups, generator=torch.Generator().manual_seed(seed))[:k].tolist())
