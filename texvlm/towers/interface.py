"""Attention of vision towers of transformers, replaced for a while: an attention function of its interface, and what it knows of the tower.

Only the attention modules that are replaced get a configuration that names it, a copy of their own; the model's stays as it is. What the
tower is called with says how its tokens lie (`texvlm/towers/grids.py`); it is kept by thread, and goes with checkpointed layers.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from texvlm import attention
from texvlm.attention import KEEP
from texvlm.towers.finding import check_version, chosen_layers, known_grid, tower_of
from texvlm.towers.grids import Call, of_call, place_of_rows, row_of_places

if TYPE_CHECKING:
    from texvlm.towers.calibration import Calibration

NAME = "texvlm_hierarchical"
"""Of the attention function."""

CHECKPOINT = "_gradient_checkpointing_func"
"""Where transformers' layers have what they are checkpointed by."""

_LAYERS: weakref.WeakKeyDictionary[Any, _Layer] = weakref.WeakKeyDictionary()
"""What is replaced, by attention module. A copy of a model is not in it: it attends as sdpa does."""

_TOWERS: weakref.WeakKeyDictionary[Any, Replacement] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


@dataclass
class _Layer:
    replacement: Replacement
    index: int
    keep: float


def _hierarchical(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The attention function: of layers that are replaced, where their grid is known; sdpa elsewhere."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    layer = _LAYERS.get(module)
    if kwargs.get("texvlm_key_bias") is not None or kwargs.get("texvlm_watch") is not None:
        from texvlm.qwen.attention import biased_attention

        return biased_attention(module, query, key, value, attention_mask, **kwargs)
    call = None if layer is None else layer.replacement._call()
    if layer is None or call is None or call.grids is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if kwargs.get("dropout"):
        raise ValueError(f"layer {layer.index} has attention dropout {kwargs['dropout']}, which cannot be replaced: set it to 0")
    if kwargs.get("is_causal") or kwargs.get("position_bias") is not None:
        raise ValueError(f"layer {layer.index} is causal or biased by positions: its attention cannot be replaced")
    scale = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out = _ROUTES[call.kind](layer, call, (query, key, value), attention_mask, scale)
    return out.transpose(1, 2).contiguous(), None


Triple = tuple[Tensor, Tensor, Tensor]


def _rows(layer: _Layer, call: Call, qkv: Triple, mask: Tensor | None, scale: float) -> Tensor:
    """One segment of a tower whose rows are in groups."""
    assert call.grids is not None
    at, count, device = call.segment(layer.index), qkv[0].shape[2], qkv[0].device
    rows, columns = call.grids[at]
    if count != rows * columns:
        raise ValueError(
            f"layer {layer.index} attends to a segment of {count} rows, where a picture has {rows} x {columns}: it cannot be replaced"
        )
    order = rows, columns, call.merge, call.window, device
    in_order: Any = tuple(t.index_select(2, row_of_places(*order)) for t in qkv)
    out = layer.replacement._attend(layer, call, at, in_order, (rows, columns), call.of_keys(mask, layer.index), scale)
    return out.index_select(2, place_of_rows(*order))


def _batch(layer: _Layer, call: Call, qkv: Triple, mask: Tensor | None, scale: float) -> Tensor:
    """Pictures of one grid, after tokens of another kind."""
    assert call.grids is not None
    rows, columns = call.grids[0]
    if qkv[0].shape[2] < rows * columns:
        raise ValueError(
            f"layer {layer.index} has {qkv[0].shape[2]} tokens, fewer than the {rows} x {columns} places of the grid"
        )
    return layer.replacement._attend(layer, call, 0, qkv, (rows, columns), call.of_keys(mask, layer.index), scale)


def _padded(layer: _Layer, call: Call, qkv: Triple, mask: Tensor | None, scale: float) -> Tensor:
    """Pictures each of its own grid, padded. What comes of padding is 0."""
    assert call.grids is not None
    of_keys, out = call.of_keys(mask, layer.index), qkv[0].new_zeros(qkv[0].shape)
    parts = []
    for at, (rows, columns) in enumerate(call.grids):
        mine: Any = tuple(t[at : at + 1, :, : rows * columns] for t in qkv)
        own: Any = tuple(None if t is None else t[at : at + 1, : rows * columns] for t in of_keys)
        part = layer.replacement._attend(layer, call, at, mine, (rows, columns), own, scale)
        parts.append(torch.cat([part, out[at : at + 1, :, rows * columns :]], 2))
    return torch.cat(parts)


_ROUTES = {"rows": _rows, "batch": _batch, "padded": _padded}


class Replacement:
    """Layers of a vision tower whose attention is replaced, until `remove()`; a context manager. Made by `texvlm.attention.replace`.

    Attributes:
        layers: the indices of what is replaced.
        keep: for each of them.
        begun: whether they are, by now.
    """

    def __init__(
        self,
        tower: Any,
        chosen: dict[int, tuple[Any, float]],
        *,
        stages: str | Sequence[int],
        importance: str,
        grid: tuple[int, int] | None,
        collect: bool,
    ) -> None:
        self.layers, self.keep = list(chosen), [keep for _, keep in chosen.values()]
        # Weakly: what is in the model must not keep it alive.
        self._ref, self._grid, self._collect = weakref.ref(tower), grid, collect
        self._chosen = {index: (weakref.ref(module), keep) for index, (module, keep) in chosen.items()}
        self._stages, self._importance = stages, importance
        self._threads = threading.local()
        self._last: Call | None = None
        self._before: list[tuple[weakref.ref[Any], Any, _Layer | None]] = []
        self._forward: _Forward | None = None
        self.begun = False

    def __enter__(self) -> Replacement:
        return self

    def __exit__(self, *what: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Gives the model its own attention back, as it was; once is enough."""
        with _LOCK:
            tower = self._ref()
            if tower is None or _TOWERS.get(tower) is not self:
                return
            self._uninstall()
            watched = tower.__dict__.get("forward")
            if isinstance(watched, _Forward) and watched is self._forward:
                del tower.forward
                if watched.own is not None:
                    tower.forward = watched.own
            for module in tower.modules():
                if isinstance(carried := module.__dict__.get(CHECKPOINT), _Carried):
                    setattr(module, CHECKPOINT, carried.function)
            del _TOWERS[tower]
            self.begun = False

    def mass(self) -> Tensor | list[Tensor]:
        """The attention that each place got in the tower's last call: the mean over the queries, the heads and the replaced layers.

        It sums to 1 over a picture, less what class and register tokens got. Channels of attention (35 and 36 of `build_channels`) are in
        [0, 1], and 0.5 says nothing there: `given={"attention": mass / (mass + mass.mean((1, 2), keepdim=True))}`, which is 0.5 where a
        place gets its share.

        Returns:
            [B, rows, columns] in float32, no gradient; of pictures of several sizes a list of [rows, columns].

        Raises:
            RuntimeError: it is not collected (`replace(..., mass=True)`), or nothing went through the tower yet.
        """
        if not self._collect or self._last is None:
            why = "no picture went through the tower yet" if self._collect else "it is not collected: replace(..., mass=True)"
            raise RuntimeError(f"there is no mass: {why}")
        call = self._last
        if not call.mass:
            raise RuntimeError("there is no mass: the rows of the last call were no grid")
        found = [(call.mass[at] / call.layers[at]).unflatten(1, call.grids[at]) for at in sorted(call.mass)]  # type: ignore[index]
        if len({planes.shape[1:] for planes in found}) == 1:
            return torch.cat(found)
        return [planes[0] for planes in found]

    # ---- in the model ----

    def begin(self) -> Replacement:
        """Puts it into the model; all of it, or nothing."""
        _register()
        with _LOCK:
            tower: Any = self._ref()
            if tower in _TOWERS:
                raise RuntimeError(f"the attention of this {type(tower).__name__} is replaced already: remove() that first")
            self._install()
            tower.forward = self._forward = _Forward(tower, self)
            self.begun = True
            _TOWERS[tower] = self
        return self

    def _install(self) -> None:
        copies: dict[int, Any] = {}
        for index, (ref, keep) in self._chosen.items():
            module = ref()
            if module is None:
                continue
            self._before.append((ref, module.config, _LAYERS.get(module)))
            if id(module.config) not in copies:
                copies[id(module.config)] = config = copy.deepcopy(module.config)
                config._attn_implementation = NAME
            module.config = copies[id(module.config)]
            _LAYERS[module] = _Layer(self, index, keep)

    def _uninstall(self) -> None:
        for ref, config, layer in self._before:
            module = ref()
            if module is None:
                continue
            module.config = config
            if layer is None:
                _LAYERS.pop(module, None)
            else:
                _LAYERS[module] = layer
        self._before = []

    @contextmanager
    def _running_again(self, call: Call) -> Iterator[None]:
        """For a checkpointed layer: as it was when it ran first, though it may have been removed since."""
        gone = not self._before
        if gone:
            self._install()
        self._calls().append(call.repeated())
        try:
            yield
        finally:
            self._calls().pop()
            if gone:
                self._uninstall()

    # ---- calls ----

    def _calls(self) -> list[Call]:
        if not hasattr(self._threads, "calls"):
            self._threads.calls = []
        return self._threads.calls

    def _call(self) -> Call | None:
        """The call under way in this thread; where layers are called past the tower, of the grid that is known."""
        if calls := self._calls():
            return calls[-1]
        return None if self._grid is None else Call([self._grid], "batch")

    @contextmanager
    def watching(self, tower: Any, args: Any, kwargs: Any) -> Iterator[None]:
        """Around one call of the tower."""
        try:
            given = inspect.signature(type(tower).forward).bind(tower, *args, **kwargs).arguments
            call = of_call(tower, given | given.get("kwargs", {}), self._grid)
        except TypeError:
            call = Call(None, "rows")  # the tower says better what is wrong
        for module in tower.modules():  # each time: checkpointing may be enabled at any time
            function = module.__dict__.get(CHECKPOINT)
            if function is not None and not isinstance(function, _Carried):
                setattr(module, CHECKPOINT, _Carried(self, function))
        self._calls().append(call)
        try:
            yield
            self._last = call
        finally:
            self._calls().pop()

    # ---- attention ----

    def _attend(
        self,
        layer: _Layer,
        call: Call,
        at: int,
        qkv: Triple,
        grid: tuple[int, int],
        of_keys: tuple[Tensor | None, Tensor | None],
        scale: float,
    ) -> Tensor:
        """Attention of tokens [B, H, P + N, D] of which the last N = rows * columns are the places of a grid."""
        out, mass = self._attended(layer.keep, qkv, grid, of_keys, scale, self._collect)
        if mass is not None:
            call.collect(at, mass)
        return out

    def _attended(
        self,
        keep: float,
        qkv: Triple,
        grid: tuple[int, int],
        of_keys: tuple[Tensor | None, Tensor | None],
        scale: float,
        collect: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """What comes out, and the mass [B, H, N] where it is asked for."""
        q, k, v = qkv
        first = q.shape[2] - grid[0] * grid[1]
        mask, bias = of_keys
        if first and (
            (mask is not None and not bool(mask[:, :first].all())) or (bias is not None and bool(bias[:, :first].any()))
        ):
            raise ValueError(f"the first {first} tokens, which are no places, must not be masked")
        mask, bias = (None if t is None else t[:, first:] for t in (mask, bias))
        packed = attention.pack_keys(k[:, :, first:], v[:, :, first:], grid, keep=keep, stages=self._stages, mask=mask, bias=bias)
        prefix = (k[:, :, :first], v[:, :, :first]) if first else None
        ask = functools.partial(
            attention.hierarchical_attention,
            k=packed,
            scale=scale,
            prefix=prefix,
            importance=self._importance,
            return_lse=True,
            return_mass=collect,
        )
        places = ask(q[:, :, first:], queries="grid")
        if not first:
            return places[0], places[2] if collect else None
        others = ask(q[:, :, :first], queries="alone")
        mass = (first * others[2] + (q.shape[2] - first) * places[2]) / q.shape[2] if collect else None
        return torch.cat([others[0], places[0]], 2), mass


def _register() -> None:
    """The attention function, with transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _hierarchical)


class _Carried:
    """What checkpoints layers, and gives them the call that they ran in when they run again."""

    def __init__(self, replacement: Replacement, function: Callable[..., Any]) -> None:
        self.replacement, self.function = replacement, function

    def __call__(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call, ran = self.replacement._call(), False

        def again(*inputs: Any, **named: Any) -> Any:
            nonlocal ran
            if not ran or call is None:
                ran = True
                return run(*inputs, **named)
            with self.replacement._running_again(call):
                return run(*inputs, **named)

        return self.function(again, *args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Callable[..., Any]:
        return self.function


class _Forward:
    """A tower's `forward`, watched. No hook: those that others add later may change what the tower is called with."""

    def __init__(self, tower: Any, replacement: Replacement) -> None:
        self.tower, self.replacement = weakref.ref(tower), weakref.ref(replacement)
        self.own = tower.__dict__.get("forward")
        functools.update_wrapper(self, type(tower).forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tower: Any = self.tower()
        replacement = self.replacement()
        forward = functools.partial(type(tower).forward, tower) if self.own is None else self.own
        if replacement is None or not replacement.begun:
            return forward(*args, **kwargs)
        with replacement.watching(tower, args, kwargs):
            return forward(*args, **kwargs)

    def __get__(self, *_: Any) -> _Forward:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Of a copy of the tower: its own, as it would be."""
        if self.own is not None:
            return copy.deepcopy(self.own, memo)
        other = memo[id(self.tower())]
        return types.MethodType(type(other).forward, other)


def replace(
    model: Any,
    keep: float | Sequence[float] | Mapping[int, float] | Calibration = KEEP,
    layers: Sequence[int] | None = None,
    *,
    stages: str | Sequence[int] = "auto",
    importance: str = "spread",
    grid: tuple[int, int] | None = None,
    mass: bool = False,
) -> Replacement:
    """Lets layers of a vision tower of transformers attend by `hierarchical_attention`, until it is taken away again.

    For towers with full attention: Qwen-VL (of Qwen2.5-VL the layers without windows), SigLIP and SigLIP 2, CLIP, ViT, DINOv2, DINOv3
    and others whose attention goes through transformers' `AttentionInterface`, and whose tokens are the places of a grid after a few of
    another kind. Class and register tokens are read by all, as a prefix, and themselves choose alone. Read whole, as ever, are pictures
    too small for cells, and rows that are no grid, as those of which `texvlm.qwen` made a selection.

    Args:
        model: the tower, or a model that holds one. Only layers inside the tower are touched.
        keep: see `plan`: one number, one for each layer that is replaced, or by the layer's index; or what `calibrate` returned.
        layers: indices of the layers to replace; all (of a mapping: those it names) by default. Negative ones count from the last.
        stages: see `plan`.
        importance: see `hierarchical_attention`.
        grid: (rows, columns) of the places, where the tower's inputs do not say it.
        mass: whether the attention that places get is collected, see `Replacement.mass`.

    Returns:
        Replacement: call `remove()` on it, or use it as a context manager, and the model is as it was. Gradients flow, in training and
        under checkpointing too.

    Raises:
        ValueError: no tower or layer of this kind, or keep that does not fit the layers.
        RuntimeError: layers of this tower are replaced already.
        ImportError: no transformers.

    Example:
        >>> import torch
        >>> from transformers import ViTConfig, ViTModel
        >>> from texvlm import attention
        >>> sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
        >>> model = ViTModel(ViTConfig(image_size=64, patch_size=4, **sizes)).eval()
        >>> with attention.replace(model, keep=0.2, layers=[1]), torch.no_grad():
        ...     model(torch.rand(1, 3, 64, 64)).last_hidden_state.shape
        torch.Size([1, 257, 32])
    """
    from texvlm.towers.calibration import Calibration  # which is made of this

    check_version()
    tower = tower_of(model)
    if isinstance(keep, Calibration):
        keep = dict(zip(keep.layers, keep.keep))
    if isinstance(keep, Mapping):
        chosen = chosen_layers(tower, list(keep) if layers is None else layers)
        by_index = {index: share for layer, share in keep.items() for index in chosen_layers(tower, [layer])}
        if missing := [str(index) for index in chosen if index not in by_index]:
            raise ValueError(f"keep must say how much of layers {', '.join(missing)} is read")
        shares = [by_index[index] for index in chosen]
    else:
        chosen = chosen_layers(tower, layers)
        shares = list(keep) if isinstance(keep, Sequence) else [keep] * len(chosen)
        if len(shares) != len(chosen):
            raise ValueError(f"keep must be one number, or one for each of the {len(chosen)} layers, got {len(shares)}")
    for share in shares:
        attention.plan((64, 64), share, stages)  # says what is wrong with them before anything is replaced
    if importance not in attention.IMPORTANCE:
        raise ValueError(f"importance must be one of {', '.join(attention.IMPORTANCE)}, got {importance!r}")
    by = {index: (module, float(share)) for (index, module), share in zip(chosen.items(), shares)}
    return Replacement(tower, by, stages=stages, importance=importance, grid=known_grid(tower, grid), collect=mass).begin()
