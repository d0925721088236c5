"""The hooks of an adapter: what a call of the model brings goes into the tower, and what leaves the tower is cut, weighted, repeated."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from texvlm.qwen import attention
from texvlm.qwen.batch import PRIVATE
from texvlm.qwen.families import Sizes
from texvlm.qwen.pictures import MODALITIES, THUMBNAIL_LEVEL, Modality
from texvlm.qwen.preparation import Preparation
from texvlm.qwen.selectors import Kept

SELECTOR = "texvlm_selector"
"""What a selector with weights is called among the model's submodules, while an adapter is attached."""

ATTACHED = "_texvlm_hooks"
"""Where a model says whose hooks it has."""


@dataclass
class Pixels:
    """One modality's way through the tower, within one call.

    Attributes:
        rows: what the tower shall see; what arrives may be these, repeated for beams.
        grid: what it shall be told they are.
        groups: of each picture, of what leaves the tower.
        samples: whose each picture is.
        keywords: geometry to inject.
        keep: which of the groups that leave the tower stay (`prune_post`).
        weights: of those that leave, or None.
    """

    rows: Tensor
    grid: Tensor
    groups: list[int]
    samples: list[int]
    keywords: dict[str, Tensor] = field(default_factory=dict)
    keep: Tensor | None = None
    weights: Tensor | None = None


@dataclass
class Call:
    """What travels with one call of the model; none of it stays on the adapter."""

    pixels: list[Pixels]
    gate: str | None
    decoder: attention.DecoderBias | None = None
    rope_deltas: Tensor | None = None
    next: int = 0
    repeats: int = 1


def geometry_names(batch: Mapping[str, Any]) -> set[str]:
    """The keys of a batch that are geometry, for the tower's own keyword arguments."""
    grids = {m.grid for m in MODALITIES}
    return {k for k in batch if k.startswith(("image_", "video_")) and k not in grids}


class Hooks:
    """The hooks on one model: on what is under its head, its tower and its decoder.

    Args:
        model: the whole of it.
        preparation: that made the batches.
        gate: how weights act: "bias", "scale", "blend".
        biased: whether weights may come that attention must take as biases.
    """

    def __init__(self, model: Any, preparation: Preparation, gate: str, biased: bool) -> None:
        self.model, self.preparation, self.gate, self.biased = model, preparation, gate, biased
        self.sizes: Sizes = preparation.sizes
        self._depth = 0
        self._handles: list[Any] = []
        self._attention = ExitStack()
        self._threads = threading.local()
        self._lock = threading.Lock()  # several may generate at once

    # ---- on and off ----

    def attach(self) -> None:
        """Hooks the model, once however often it is asked for."""
        with self._lock:
            if self._depth == 0:
                self._hook()
            self._depth += 1

    def _hook(self) -> None:
        if getattr(self.model, ATTACHED, None) is not None:
            raise RuntimeError("another adapter is attached to this model: detach it first")
        object.__setattr__(self.model, ATTACHED, self)
        selector = self.preparation.selecting.selector
        if isinstance(selector, nn.Module):
            self.model.add_module(SELECTOR, selector)
        tower, decoder = self.model.model.visual, self.model.model.language_model
        if self.biased and attention.unbiased_part(self.model) is None:
            self._attention.enter_context(attention.used_by(tower, decoder))  # until detached: checkpoints run it again
        # Not on the head: PEFT up to 0.20 calls its `forward` itself, past all hooks.
        self._handles = [
            self.model.model.register_forward_pre_hook(self._enter, with_kwargs=True),
            self.model.model.register_forward_hook(self._leave, with_kwargs=True, always_call=True),
            tower.register_forward_pre_hook(self._before_tower, with_kwargs=True),
            tower.register_forward_hook(self._after_tower, with_kwargs=True),
            decoder.register_forward_pre_hook(self._before_decoder, with_kwargs=True),
        ]

    @contextmanager
    def biasing(self) -> Iterator[None]:
        """Hooks, and attention that takes biases, whatever the mode."""
        self.attach()
        try:
            with attention.used_by(self.model.model.visual, self.model.model.language_model):
                yield
        finally:
            self.detach()

    def detach(self) -> None:
        """Takes them off with the last `detach`, and leaves the model as it was; nothing happens where none are there."""
        with self._lock:
            if self._depth:
                self._depth -= 1
                if self._depth == 0:
                    self._unhook()

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._attention.close()
        self.model._modules.pop(SELECTOR, None)
        object.__delattr__(self.model, ATTACHED)

    # ---- what travels with a call ----

    def call(self, batch: Mapping[str, Any]) -> Call:
        """The call that a prepared batch asks for."""
        present = [modality for modality in MODALITIES if modality.pixels in batch]
        pixels = [self._pixels(batch, modality) for modality in present]
        weighted = any(p.weights is not None for p in pixels)
        call = Call(pixels, self.gate if weighted else None, rope_deltas=batch.get(f"{PRIVATE}rope_deltas"))
        if self.gate == "bias" and (weighted or bool(batch.get(f"{PRIVATE}past_bias", torch.zeros(1)).any())):
            attention.check(self.model)
            bias = self._key_bias(batch, present, pixels)
            if bias.requires_grad:
                self._check_checkpointing()
            call.decoder = attention.DecoderBias(bias)
        return call

    def _pixels(self, batch: Mapping[str, Any], modality: Modality) -> Pixels:
        """A modality's way through the tower."""
        prefix, records = f"{modality.name}_", batch.get(f"{PRIVATE}grids")
        virtual = batch[modality.grid]
        groups = (virtual.prod(-1) // self.sizes.unit).tolist()
        owners = [] if records is None else [int(g[0]) for g in records.tolist() if g[1] == modality.type_id]
        if len(owners) < len(groups):  # thumbnails are pictures of their own
            owners = _owners(self._new_ids(batch), modality.token(self.model.config), groups)
        return Pixels(
            batch[modality.pixels],
            batch.get(f"{PRIVATE}{prefix}grid", virtual),
            groups,
            owners,
            {k.removeprefix(prefix): v for k, v in batch.items() if k.startswith(prefix) and k != modality.grid},
            batch.get(f"{PRIVATE}{prefix}keep"),
            self._weights(batch, modality),
        )

    def _new_ids(self, batch: Mapping[str, Any]) -> Tensor:
        """Those of this turn."""
        ids, past = batch["input_ids"], batch.get(f"{PRIVATE}past_bias")
        return ids if past is None else ids[:, past.shape[1] :]

    def _key_bias(self, batch: Mapping[str, Any], present: list[Modality], pixels: list[Pixels]) -> Tensor:
        """Of the decoder's keys, [B, S], those of earlier turns too."""
        new = self._new_ids(batch)
        bias = torch.zeros(new.shape, device=new.device)
        for modality, mine in zip(present, pixels):
            if mine.weights is not None:
                log = attention.log_weights(mine.weights).to(new.device)
                places = (new == modality.token(self.model.config)).nonzero()
                bias = bias.to(log.dtype).index_put((places[:, 0], places[:, 1]), log)
        past = batch.get(f"{PRIVATE}past_bias")
        return bias if past is None else torch.cat([past.to(bias.dtype), bias], dim=1)

    def _check_checkpointing(self) -> None:
        """A reentrant checkpoint gives gradients to positional arguments only, and biases are none."""
        for layer in self.model.model.modules():
            if getattr(layer, "gradient_checkpointing", False) and layer.training:
                options = getattr(getattr(layer, "_gradient_checkpointing_func", None), "keywords", {})
                if options.get("use_reentrant"):
                    raise ValueError(
                        "gradient checkpointing with use_reentrant=True gives biases no gradients: "
                        "use_reentrant=False, or gate or mode 'scale' or 'blend'"
                    )

    def _weights(self, batch: Mapping[str, Any], modality: Modality) -> Tensor | None:
        """Of the tokens of a modality; with a selector that learns, as they are now, with gradients to it."""
        given = batch.get(f"{PRIVATE}{modality.name}_weights")
        seen = batch.get(f"{PRIVATE}{modality.name}_seen")
        if seen is None or not torch.is_grad_enabled():
            return given
        pictures, selecting = self.kept(batch, modality), self.preparation.selecting
        gates = iter(selecting.gates([frame for picture in pictures for frame in picture]))
        parts = []
        for (number, _), picture in zip(_pictures(batch, modality), pictures):
            mine = batch[f"{PRIVATE}cells"][:, 0] == number
            thumbnail = mine & (batch[f"{PRIVATE}cells"][:, 3] == THUMBNAIL_LEVEL)
            parts.append(torch.ones(int(thumbnail.sum()), device=picture[0].cells.device))
            for frame, (weights, everything) in zip(picture, gates):
                if not self.preparation.cuts:
                    total = frame.grid[0] * frame.grid[1]
                    weights = weights.new_zeros(total).index_put((frame.cells,), weights) if everything is None else everything
                parts.append(weights)
        return torch.cat(parts)

    def kept(self, batch: Mapping[str, Any], modality: Modality) -> list[list[Kept]]:
        """Of each picture of a batch that a selector which learns has cut, of each frame: what it kept."""
        cells, seen = batch[f"{PRIVATE}cells"], batch.get(f"{PRIVATE}{modality.name}_seen", ())
        queries = batch.get(f"{PRIVATE}{modality.name}_query", [None] * len(seen))
        selecting, found = self.preparation.selecting, []
        device = next(selecting.selector.parameters()).device  # type: ignore[union-attr]
        for (number, grid), evidences, query in zip(_pictures(batch, modality), seen, queries):
            mine = cells[(cells[:, 0] == number) & (cells[:, 3] != THUMBNAIL_LEVEL)].to(device)
            groups = (grid[0] // self.sizes.merge, grid[1] // self.sizes.merge)
            of_frames = [mine[mine[:, 1] == time, 2:].unbind(1) for time in range(len(evidences))]
            found.append(
                [
                    Kept(evidence, selecting.numbers(kept, levels, groups), groups, query)
                    for evidence, (kept, levels) in zip(evidences, of_frames)
                ]
            )
        return found

    @contextmanager
    def entered(self, call: Call) -> Iterator[None]:
        """A call that goes on over several forwards: a generation."""
        calls = self._local("calls")
        calls.append(call)
        try:
            yield
        finally:
            calls.remove(call)

    def _local(self, name: str) -> list[Any]:
        """A list of this thread's: of the calls that are under way, and of the forwards that opened one (or none)."""
        return self._threads.__dict__.setdefault(name, [])

    def _current(self) -> Call | None:
        calls = self._local("calls")
        return calls[-1] if calls else None

    # ---- hooks ----

    def _enter(self, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """A forward begins: what is ours in its arguments becomes its call."""
        opened = self._local("opened")
        opened.append(None)
        if f"{PRIVATE}rope_deltas" not in kwargs:
            under_way = self._current()
            if under_way is not None:  # a generation without a cache: each step reads the pictures again
                under_way.next = 0
            return None
        call = self.call({k: v for k, v in kwargs.items() if v is not None})  # the head names what is not there, too
        opened[-1] = call
        self._local("calls").append(call)
        geometry = geometry_names(kwargs)
        return args, {k: v for k, v in kwargs.items() if not k.startswith(PRIVATE) and k not in geometry}

    def _leave(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """A forward ends, well or not."""
        opened = self._local("opened")  # empty where a forward was under way in another thread as the hooks came
        call = opened.pop() if opened else None
        if call is not None:
            self._local("calls").remove(call)

    def _before_tower(self, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        call = self._current()
        if call is None or call.next >= len(call.pixels):
            return None
        mine = call.pixels[call.next]
        name = next((n for n in ("hidden_states", "pixel_values") if n in kwargs), None)
        arrived = args[0] if name is None else kwargs[name]
        # Beams and several returns may repeat pictures; the tower sees each once, and what leaves it is repeated instead.
        call.repeats = len(kwargs["grid_thw"]) // len(mine.groups)
        rows = mine.rows.to(arrived.device, arrived.dtype)
        kwargs = kwargs | {key: value.to(arrived.device) for key, value in mine.keywords.items()}
        kwargs["grid_thw"] = mine.grid.to(arrived.device)
        if call.gate == "bias" and mine.weights is not None and mine.keep is None:
            kwargs[attention.KEYWORD] = attention.TowerBias(self._row_bias(mine, arrived.device))
        if name is None:
            return (rows, *args[1:]), kwargs
        return args, kwargs | {name: rows}

    def _row_bias(self, mine: Pixels, device: torch.device) -> Tensor:
        """Biases of a tower's rows, in the order of its blocks."""
        assert mine.weights is not None
        bias = attention.log_weights(mine.weights).to(device)
        if self.sizes.window:
            order = mine.keywords.get("window_index")
            if order is None:
                from transformers.vision_utils import get_vision_window_index

                config = self.model.model.visual.config
                order = get_vision_window_index(
                    mine.grid.cpu(), config.spatial_merge_size, config.window_size, config.patch_size
                )[0]
            bias = bias[order.to(device)]
        return bias.repeat_interleave(self.sizes.unit)

    def _after_tower(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        call = self._current()
        if call is None or call.next >= len(call.pixels):
            return None
        mine = call.pixels[call.next]
        call.next += 1
        output.pooler_output = self._after(output.pooler_output, mine, call, call.gate)
        if getattr(output, "deepstack_features", None) is not None:
            # What is added to the decoder's layers has no mean to blend into: it fades.
            gate = "scale" if call.gate == "blend" else call.gate
            output.deepstack_features = [self._after(f, mine, call, gate) for f in output.deepstack_features]
        return output

    def _after(self, tokens: Tensor, mine: Pixels, call: Call, gate: str | None) -> Tensor:
        if mine.keep is not None:
            tokens = tokens[mine.keep.to(tokens.device)]
        if mine.weights is not None and gate in ("scale", "blend"):
            weight = mine.weights.to(tokens.device, tokens.dtype)[:, None]
            mean = torch.zeros_like(tokens[:1])
            if gate == "blend":
                mean = torch.cat([part.mean(0, keepdim=True).expand_as(part) for part in tokens.split(mine.groups)])
            tokens = weight * tokens + (1 - weight) * mean
        if call.repeats > 1:
            parts = tokens.split(mine.groups)
            order = [
                i
                for sample in sorted(set(mine.samples))
                for _ in range(call.repeats)
                for i, s in enumerate(mine.samples)
                if s == sample
            ]
            tokens = torch.cat([parts[i] for i in order])
        return tokens

    def _before_decoder(self, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        call = self._current()
        if call is None or call.decoder is None:
            return None
        return args, kwargs | {attention.KEYWORD: call.decoder}


def _pictures(batch: Mapping[str, Any], modality: Modality) -> list[tuple[int, tuple[int, int]]]:
    """The number of each picture of a modality, and its rows and columns of patches."""
    return [
        (number, (rows, columns))
        for number, (_, kind, _, rows, columns) in enumerate(batch[f"{PRIVATE}grids"].tolist())
        if kind == modality.type_id
    ]


def _owners(ids: Tensor, token: int, groups: list[int]) -> list[int]:
    """Whose each picture is, by counting tokens."""
    counts, out, sample = (ids == token).sum(1).tolist(), [], 0
    for count in groups:
        while sample + 1 < len(counts) and counts[sample] < count:
            sample += 1
        counts[sample] -= count
        out.append(sample)
    return out
