"""Random models of all families, small enough for tests and for trying things: right in every shape, and knowing nothing."""

from __future__ import annotations

from typing import Any

import torch

from texvlm.qwen.families import FAMILIES, transformers_version

IMAGE, VIDEO, START, END, PAD = 60, 59, 58, 57, 0
"""Token ids of the tiny models, of a vocabulary of 64."""

_IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
_TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 96,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_TOWER = {"depth": 4, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "in_channels": 3, "patch_size": 4}
_TOWER |= {"temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 64, "out_hidden_size": 32}
_DELTA: dict[str, Any] = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
}
_DELTA |= {
    "linear_num_value_heads": 4,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_DELTA |= {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    }
}
_LINEAR = ["linear_attention", "full_attention"] * 2
_SECTIONS = {"rope_type": "default", "type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}


def _configs() -> dict[str, tuple[str, dict[str, Any], dict[str, Any]]]:
    """Prefix of the classes, tower, decoder."""
    chunked = {**_TEXT, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": _SECTIONS}
    interleaved: dict[str, Any] = {
        **_TEXT,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    interleaved |= {"rope_parameters": {**_SECTIONS, "mrope_interleaved": True, "rope_theta": 5e6}}
    old: dict[str, Any] = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 4, "num_heads": 4, "patch_size": 4}
    old |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}
    windowed: dict[str, Any] = {
        "depth": 4,
        "hidden_size": 32,
        "num_heads": 4,
        "intermediate_size": 32,
        "out_hidden_size": 32,
        "patch_size": 4,
    }
    windowed |= {
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 16,
        "fullatt_block_indexes": [1, 3],
        "tokens_per_second": 1,
    }
    stacked = {**_TOWER, "deepstack_visual_indexes": [1, 2, 3]}
    delta: dict[str, Any] = {**_TEXT, **_DELTA, "layer_types": _LINEAR}
    shared = {**_MOE, "shared_expert_intermediate_size": 16}
    indexer = {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 4096,
        "indexer_compress_ratio": 4,
    }
    return {
        "qwen2_vl": ("Qwen2VL", old, chunked),
        "qwen2_5_vl": ("Qwen2_5_VL", windowed, chunked),
        "qwen3_vl": ("Qwen3VL", stacked, interleaved),
        "qwen3_vl_moe": ("Qwen3VLMoe", stacked, {**interleaved, **_MOE, "decoder_sparse_step": 1}),
        "qwen3_5": ("Qwen3_5", _TOWER, delta),
        "qwen3_5_moe": ("Qwen3_5Moe", _TOWER, {**delta, **shared}),
        "qwen4_exp": ("Qwen4Exp", _TOWER, {**delta, **shared, **indexer, "hc_count": 2, "hc_lowrank": 8}),
    }


def tiny_families() -> list[str]:
    """Those that the installed transformers has."""
    import transformers

    transformers_version()
    return [name for name, (prefix, _, _) in _configs().items() if hasattr(transformers, f"{prefix}ForConditionalGeneration")]


def tiny_model(
    family: str = "qwen3_vl", seed: int = 0, vision: dict[str, Any] | None = None, text: dict[str, Any] | None = None
) -> Any:
    """A random model of a family: some tens of thousands of weights, patches of 4 pixels, groups of 8, a vocabulary of 64.

    Args:
        family: one of `FAMILIES`.
        seed: of its weights; the global generator is left as it was.
        vision: what to change in the tower's configuration, for models of real width.
        text: what to change in the decoder's.

    Returns:
        A transformers model in evaluation mode, on the CPU.

    Example:
        >>> from texvlm.qwen import tiny_model
        >>> tiny_model("qwen3_vl").config.image_token_id
        60
    """
    import transformers

    transformers_version()
    if family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}")
    prefix, tower, decoder = _configs()[family]
    if not hasattr(transformers, f"{prefix}ForConditionalGeneration"):
        raise ValueError(f"transformers {transformers.__version__} has no {family}; it has {', '.join(tiny_families())}")
    config = getattr(transformers, f"{prefix}Config")(
        vision_config={**tower, **(vision or {})}, text_config={**decoder, **(text or {})}, tie_word_embeddings=False, **_IDS
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).eval()
        with torch.no_grad():
            for (
                weight
            ) in model.parameters():  # the usual start is so small that a tiny model would hardly tell one picture from another
                if weight.dim() > 1:
                    weight.normal_(0, weight[0].numel() ** -0.5 if weight.dim() > 2 or weight.shape[1] > 1 else 1)
        return model


def tiny_batch(
    model: Any, pictures: list[tuple[int, int]] | list[list[tuple[int, int]]], seed: int = 0, labels: bool = False, text: int = 3
) -> dict[str, torch.Tensor]:
    """What a processor would return for random pictures: ids, mask, types, rows of pixels and grids, padded on the left.

    Args:
        model: from `tiny_model`, or any of the families.
        pictures: the height and width of each picture of one prompt; or such a list for each prompt of a batch.
        seed: of the pixels and the text.
        labels: whether the text after the pictures is to be learned.
        text: tokens before, between and after pictures.

    Returns:
        input_ids, attention_mask, mm_token_type_ids [B, S], pixel_values [rows, numbers], image_grid_thw [pictures, 3].
    """
    from texvlm.qwen.families import sizes_of

    config, sizes = model.config, sizes_of(model)
    prompts = pictures if not pictures or isinstance(pictures[0], list) else [pictures]
    generator = torch.Generator().manual_seed(seed)

    def words(count: int) -> list[int]:
        return torch.randint(3, 50, (count,), generator=generator).tolist()

    grids, ids, goals = [], [], []
    for prompt in prompts:
        tokens = words(text)
        for height, width in prompt:  # type: ignore[misc]
            h, w = height // sizes.patch, width // sizes.patch
            grids.append((1, h, w))
            wrapped = [config.image_token_id] * (h * w // sizes.unit)
            tokens += [config.vision_start_token_id, *wrapped, config.vision_end_token_id, *words(text)]
        ids.append(tokens)
        goals.append([-100] * (len(tokens) - text) + tokens[len(tokens) - text :])
    longest = max(len(tokens) for tokens in ids)
    padded = torch.tensor([[PAD] * (longest - len(tokens)) + tokens for tokens in ids])
    mask = torch.tensor([[0] * (longest - len(tokens)) + [1] * len(tokens) for tokens in ids])
    batch = {"input_ids": padded, "attention_mask": mask, "mm_token_type_ids": (padded == config.image_token_id).int()}
    if grids:
        rows = torch.rand(sum(h * w for _, h, w in grids), sizes.channels, 1, sizes.patch**2, generator=generator)
        batch["pixel_values"] = ((rows - 0.5) / 0.5).expand(-1, -1, sizes.temporal, -1).flatten(1)
        batch["image_grid_thw"] = torch.tensor(grids)
    if labels:
        batch["labels"] = torch.tensor([[-100] * (longest - len(goal)) + goal for goal in goals])
    return batch
