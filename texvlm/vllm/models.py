"""vLLM's own Qwen3-VL and Qwen3.5, whose processors keep what is chosen, and whose towers and positions know where that was."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
from vllm.model_executor.models import qwen3_5, qwen3_vl, qwen3_vl_moe
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.processing import PromptUpdateDetails
from vllm.utils.torch_utils import OMP_NUM_THREADS_SET_BY_VLLM, set_default_torch_num_threads

from texvlm.qwen.pictures import IMAGE, MODALITIES, VIDEO, Modality
from texvlm.vllm.choosing import COUNT, KEPT, Chooser, frames, shortened
from texvlm.vllm.options import Options, others


def rival(config: Any) -> str | None:
    """What a server does that cannot go together with a budget, and why."""
    if config.get_video_pruning_spec() is not None:
        return "video_pruning_rate cannot be used with texvlm_keep: both prune, and one has to know what is left"
    if config.mm_encoder_tp_mode == "data":
        return "mm_encoder_tp_mode='data' cannot be used with texvlm_keep: it shares pictures out by their full grids"
    return None


def check(config: Any, options: Options) -> None:
    """Refuses, by name, what cannot go together with a budget."""
    why = rival(config)
    if options.active and why is not None:
        raise ValueError(why)


class Info:
    """A mixin for a family's processing info: how many tokens there can be."""

    def __init__(self, ctx: Any) -> None:
        super().__init__(ctx)  # type: ignore[call-arg]
        self.chooser = Chooser(self.get_hf_config(), ctx.get_mm_config().mm_processor_kwargs or {})  # type: ignore[attr-defined]
        self.options({})

    def options(self, request: Mapping[str, Any]) -> Options:
        """What counts for a request."""
        options = self.chooser.options(request)
        check(self.ctx.get_mm_config(), options)  # type: ignore[attr-defined]
        return options

    def get_hf_processor(self, **kwargs: Any) -> Any:
        """One for all budgets and queries."""
        return super().get_hf_processor(**others(kwargs))  # type: ignore[misc]

    def get_num_image_tokens(self, *, mm_kwargs: Mapping[str, Any], **sizes: Any) -> int:
        """Of a picture, at most."""
        groups = super().get_num_image_tokens(mm_kwargs=others(mm_kwargs), **sizes)  # type: ignore[misc]
        return self._most(mm_kwargs).budget(groups)

    def get_num_video_tokens(self, *, num_frames: int, mm_kwargs: Mapping[str, Any], **sizes: Any) -> int:
        """Of a video, at most."""
        groups = super().get_num_video_tokens(num_frames=num_frames, mm_kwargs=others(mm_kwargs), **sizes)  # type: ignore[misc]
        temporal = self.chooser.sizes.temporal
        count = max(1, -(-num_frames // temporal))
        return self._most(mm_kwargs).budget(groups // count) * count

    def _most(self, mm_kwargs: Mapping[str, Any]) -> Options:
        """The most that a request may keep, unless it says less: vLLM makes room for that when it starts."""
        options = self.chooser.options(mm_kwargs)
        return options if "texvlm_keep" in mm_kwargs else replace(options, keep=options.limit)


class Processor(qwen3_vl.Qwen3VLMultiModalProcessor):
    """Chooses from what the family's own processor has made, and replaces each picture by as many tokens as it keeps."""

    def get_dummy_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """Those that vLLM makes room by: the most that a request may keep, wherever it is."""
        inputs = super().get_dummy_inputs(*args, **kwargs)
        options = self.info.options({})
        if not options.active:
            return inputs
        asked = {"texvlm_keep": options.limit, "texvlm_path": "uniform", "texvlm_query": None}
        return replace(inputs, hf_processor_mm_kwargs={**inputs.hf_processor_mm_kwargs, **asked})

    def apply(self, inputs: Any, timing_ctx: Any) -> Any:
        """A request's pictures and prompt, as vLLM's own does it."""
        if VIDEO.name in inputs.mm_data_items and self.info.options(inputs.hf_processor_mm_kwargs).lists:
            raise ValueError("texvlm_keep and texvlm_query must be one for all where there are videos, got a list")
        return super().apply(inputs, timing_ctx)

    def _apply_hf_processor_main(self, mm_items: Any, hf_kwargs: Mapping[str, Any]) -> Any:
        options = self.info.options(hf_kwargs)
        data = super()._apply_hf_processor_main(mm_items, others(hf_kwargs))
        if rival(self.info.ctx.get_mm_config()) is None:  # without a budget too: items of a batch must have the same fields
            # On one core, unless somebody has said more: what others have begun on the rest would be waited for, again and again.
            said = os.environ.get("OMP_NUM_THREADS") if os.environ.get(OMP_NUM_THREADS_SET_BY_VLLM) != "1" else None
            with nullcontext() if said else set_default_torch_num_threads(1):
                self.info.chooser.cut(data, options)
        return data

    # ---- one cache entry for each picture and what is asked of it ----

    def _get_mm_hashes(self, inputs: Any) -> Any:
        """As vLLM makes them, of all that is said to all pictures, and of what is said to each."""
        options = self.info.options(inputs.hf_processor_mm_kwargs)
        if not options.lists:
            return super()._get_mm_hashes(inputs)
        hashes = dict(super()._get_mm_hashes(replace(inputs, hf_processor_mm_kwargs=self._for(inputs, None))))
        algorithm = self.info.ctx.get_mm_config().mm_hasher_algorithm
        known = hashes.get(IMAGE.name, [])
        hashes[IMAGE.name] = [
            MultiModalHasher.hash_kwargs(algorithm, mm_hash=known[i], texvlm_keep=mine.keep, texvlm_query=mine.query)
            for i, mine in enumerate(options.each(len(known)))
        ]
        return hashes

    def _get_cache_missing_processor_kwargs(self, inputs: Any, mm_is_cached: Mapping[str, list[bool]]) -> Mapping[str, Any]:
        kwargs = dict(super()._get_cache_missing_processor_kwargs(inputs, mm_is_cached))
        if self.info.options(inputs.hf_processor_mm_kwargs).lists:
            kwargs |= self._for(inputs, [not hit for hit in mm_is_cached.get(IMAGE.name, [])])
        return kwargs

    def _for(self, inputs: Any, missing: list[bool] | None) -> dict[str, Any]:
        """What a request says, its lists only for the pictures that are missing; None: without lists."""
        options = self.info.options(inputs.hf_processor_mm_kwargs)
        kwargs = dict(inputs.hf_processor_mm_kwargs)
        for name, is_list in (("texvlm_keep", isinstance(options.keep, list)), ("texvlm_query", options.queries)):
            if is_list and missing is None:
                kwargs.pop(name)
            elif is_list:
                kwargs[name] = [value for value, wanted in zip(kwargs[name], missing or []) if wanted]
        return kwargs

    # ---- fields and prompts ----

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Mapping[str, Any]) -> Any:
        fields = dict(super()._get_mm_fields_config(hf_inputs, others(hf_processor_mm_kwargs)))
        for modality in MODALITIES:
            kept, count = KEPT.format(modality.name), COUNT.format(modality.name)
            if kept in hf_inputs:
                counts, flat = hf_inputs[count], MultiModalFieldConfig.flat_from_sizes
                fields[modality.pixels] = flat(modality.name, counts * self.info.chooser.sizes.unit)
                fields[kept] = flat(modality.name, counts, keep_on_cpu=True)
                fields[count] = MultiModalFieldConfig.batched(modality.name, keep_on_cpu=True)
        return fields

    def _get_prompt_updates(self, mm_items: Any, hf_processor_mm_kwargs: Mapping[str, Any], out_mm_kwargs: Any) -> Sequence[Any]:
        updates = super()._get_prompt_updates(mm_items, others(hf_processor_mm_kwargs), out_mm_kwargs)
        return [replace(update, replacement=self._shorter(update, out_mm_kwargs)) for update in updates]

    def _shorter(self, update: Any, out_mm_kwargs: Any) -> Any:
        """The replacement that vLLM has for a picture, with as many tokens as it keeps."""
        modality = next(m for m in MODALITIES if m.name == update.modality)
        token = modality.token(self.info.get_hf_config())

        def replacement(item: int) -> Any:
            content = update.replacement(item)
            data = out_mm_kwargs[modality.name][item]
            if KEPT.format(modality.name) not in data:
                return content
            counts = frames(data[KEPT.format(modality.name)].data, int(data[modality.grid].data[0]))
            if isinstance(content, PromptUpdateDetails):
                return replace(content, full=shortened(content.full, token, counts))
            return shortened(content, token, counts)

        return replacement


class Model:
    """A mixin for a family's model: towers and positions that know where kept groups were."""

    def __init__(self, *, vllm_config: Any, prefix: str = "model") -> None:
        multimodal = vllm_config.model_config.get_multimodal_config()
        chooser = Chooser(vllm_config.model_config.hf_config, multimodal.mm_processor_kwargs or {})
        check(multimodal, chooser.options({}))
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        self.chooser = chooser

    def get_encoder_cudagraph_config(self) -> Any:
        """Without pictures and videos: a graph would lay kept groups side by side, as if they were a whole picture."""
        return replace(super().get_encoder_cudagraph_config(), modalities=[])  # type: ignore[misc]

    # ---- the tower ----

    def _parse_and_validate_image_input(self, **kwargs: Any) -> Any:
        return _with_kept(super()._parse_and_validate_image_input(**kwargs), IMAGE, kwargs)  # type: ignore[misc]

    def _parse_and_validate_video_input(self, **kwargs: Any) -> Any:
        return _with_kept(super()._parse_and_validate_video_input(**kwargs), VIDEO, kwargs)  # type: ignore[misc]

    def _process_image_input(self, image_input: Any) -> tuple[Tensor, ...]:
        found = self._of_kept(IMAGE, image_input)
        return super()._process_image_input(image_input) if found is None else found  # type: ignore[misc]

    def _process_video_input(self, video_input: Any) -> tuple[Tensor, ...]:
        found = self._of_kept(VIDEO, video_input)
        return super()._process_video_input(video_input) if found is None else found  # type: ignore[misc]

    def _of_kept(self, modality: Modality, given: Any) -> tuple[Tensor, ...] | None:
        """Embeddings of each picture's kept groups; None where all of all are kept, and vLLM's own way is right."""
        kept = given.get("texvlm_kept")
        if kept is None:
            return None
        grids = given[modality.grid].tolist()
        if all(len(mine) * self.chooser.sizes.unit == t * h * w for mine, (t, h, w) in zip(kept, grids)):
            return None
        rows, tower = given[modality.pixels], self.visual  # type: ignore[attr-defined]
        counts = [len(mine) for mine in kept]
        virtual = [[1, self.chooser.sizes.merge, self.chooser.sizes.merge * count] for count in counts]
        embedded: Tensor = tower(rows, grid_thw=virtual, encoder_metadata=self._metadata(modality, grids, kept))
        return embedded.split(counts)

    def _metadata(self, modality: Modality, grids: list[list[int]], kept: list[Tensor]) -> dict[str, Any]:
        """What vLLM's tower works out of grids (`prepare_encoder_metadata`), of kept groups alone."""
        tower: Any = self.visual  # type: ignore[attr-defined]
        geometry = self.chooser.geometry(modality, grids, kept)
        assert geometry.interp_indices is not None
        assert geometry.interp_weights is not None
        device, dtype = tower.device, tower.dtype
        taps = tower.pos_embed(geometry.interp_indices.to(device))
        weights = geometry.interp_weights.to(device=device, dtype=dtype)
        where = geometry.position_ids.to(device)
        cos, sin = tower.rotary_pos_emb.get_cos_sin(max(max(h, w) for _, h, w in grids))
        bounds = np.concatenate([np.zeros(1, np.int32), geometry.segments.numpy().cumsum(dtype=np.int32)])
        backend = tower.attn_backend
        return {
            "pos_embeds": (taps * weights[..., None]).sum(1).to(dtype),
            "rotary_pos_emb_cos": cos[where].flatten(1),
            "rotary_pos_emb_sin": sin[where].flatten(1),
            "sequence_lengths": MMEncoderAttention.maybe_compute_seq_lens(backend, bounds, device),
            "max_seqlen": torch.tensor(MMEncoderAttention.compute_max_seqlen(backend, bounds), dtype=torch.int32),
            "cu_seqlens": MMEncoderAttention.maybe_recompute_cu_seqlens(
                backend,
                bounds,
                tower.hidden_size,
                tower.tp_size,
                device,
                fp8_padded_hidden_size=tower.fp8_padded_hidden_size,
            ),
        }

    # ---- positions ----

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: list[Any]) -> tuple[Tensor, int]:
        """Those that vLLM gives the whole prompt, of which those of kept tokens and of the text stay."""
        names = {m.name: KEPT.format(m.name) for m in MODALITIES}
        if not any(names[f.modality] in f.data for f in mm_features):
            return super().get_mrope_input_positions(input_tokens, mm_features)  # type: ignore[misc]
        whole, features, keep = self._whole(input_tokens, mm_features)
        positions, _ = super().get_mrope_input_positions(whole, features)  # type: ignore[misc]
        positions = positions[:, torch.tensor(keep)]
        return positions, int(positions.max()) + 1 - len(input_tokens)

    def _whole(self, tokens: list[int], mm_features: list[Any]) -> tuple[list[int], list[Any], list[int]]:
        """The prompt as it would be with all groups, its features, and where the tokens that are there are in it."""
        whole: list[int] = []
        features: list[Any] = []
        keep: list[int] = []
        place = 0

        def copied(end: int) -> None:
            nonlocal place
            keep.extend(range(len(whole), len(whole) + end - place))
            whole.extend(tokens[place:end])
            place = end

        for feature in sorted(mm_features, key=lambda f: f.mm_position.offset):
            modality = next(m for m in MODALITIES if m.name == feature.modality)
            token, position = modality.token(self.config), feature.mm_position  # type: ignore[attr-defined]
            copied(position.offset)
            start = len(whole)
            if KEPT.format(modality.name) in feature.data:
                kept = feature.data[KEPT.format(modality.name)].data
                count, h, w = feature.data[modality.grid].data.tolist()
                for frame in range(count):
                    cells = kept[kept[:, 0] == frame, 1].tolist()
                    copied(tokens.index(token, place))
                    keep.extend(len(whole) + cell for cell in cells)
                    whole.extend([token] * (h * w // self.chooser.sizes.unit))
                    place += len(cells)
            copied(position.offset + position.length)
            there = replace(position, offset=start, length=len(whole) - start, is_embed=None)
            features.append(replace(feature, mm_position=there))
        copied(len(tokens))
        return whole, features, keep


def _with_kept(given: Any, modality: Modality, kwargs: Mapping[str, Any]) -> Any:
    """What a model is given for a modality, with what is kept of each picture."""
    kept = kwargs.get(KEPT.format(modality.name))
    if given is not None and kept is not None:
        given.texvlm_kept = list(kept.split(kwargs[COUNT.format(modality.name)].flatten().tolist()))
    return given


def _of(stock: Any, info: Any) -> Any:
    """A stock model and its info, with ours before them, under the stock name."""
    own = type(f"{info.__name__}", (Info, info), {"__module__": __name__})
    model = type(stock.__name__, (Model, stock), {"__module__": __name__, "__doc__": f"vLLM's {stock.__name__}, with a budget."})
    dummy = qwen3_vl.Qwen3VLDummyInputsBuilder
    return MULTIMODAL_REGISTRY.register_processor(Processor, info=own, dummy_inputs=dummy)(model)


Qwen3VLForConditionalGeneration = _of(qwen3_vl.Qwen3VLForConditionalGeneration, qwen3_vl.Qwen3VLProcessingInfo)
Qwen3VLMoeForConditionalGeneration = _of(qwen3_vl_moe.Qwen3VLMoeForConditionalGeneration, qwen3_vl_moe.Qwen3VLMoeProcessingInfo)
Qwen3_5ForConditionalGeneration = _of(qwen3_5.Qwen3_5ForConditionalGeneration, qwen3_5.Qwen3_5ProcessingInfo)
Qwen3_5MoeForConditionalGeneration = _of(qwen3_5.Qwen3_5MoeForConditionalGeneration, qwen3_5.Qwen3_5MoeProcessingInfo)
