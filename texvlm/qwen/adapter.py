"""A Qwen model that sees a picture's kept groups: weighted, biased, or the only ones that its tower ever gets."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from texvlm.embedding import Embedding, EmbeddingProvider
from texvlm.paths import CascadeConfig
from texvlm.qwen import attention, explain
from texvlm.qwen.batch import PRIVATE, PreparedBatch, kept_so_far, text_row
from texvlm.qwen.families import family_of, sizes_of, transformers_version
from texvlm.qwen.hooks import Hooks, geometry_names
from texvlm.qwen.pictures import MODALITIES
from texvlm.qwen.preparation import MODES, THUMBNAILS, Preparation
from texvlm.qwen.selectors import Selecting, Selector, trainable

if TYPE_CHECKING:
    from texvlm.pictures import ImageLike

GATES = ("bias", "scale", "blend")


class QwenVLAdapter:
    """Gives a Qwen model with eyes (Qwen2-VL to Qwen3.5, dense or MoE) the groups of a picture that a selector keeps.

        adapter = QwenVLAdapter(model, selector="learned", k=273)
        batch = adapter.prepare(processor(text=..., images=..., return_tensors="pt"))
        model(**batch); adapter.generate(batch, max_new_tokens=64)

    The unit is the merged group of 2 x 2 patches, 28 or 32 pixels square, which is one token of the decoder. The adapter keeps nothing of
    a batch: all travels in the batch. Kept tokens, and all text, have the positions that they have in the dense prompt.

        prune_pre   rows and geometry are cut before the tower: it pays for the kept groups, and knows where they were
        prune_post  the tower sees all, the decoder the kept
        scale       all stay; embeddings are multiplied by their weights. A decoder normalises first: its first layer hardly notices
        blend       w e + (1 - w) mean(e) over the picture
        bias        all stay; log w is added to the logits of a key, in the tower and in the decoder: weight 0 is removal, exactly in the
                    tower of full attention, and in the full-attention layers of the decoder. Needs sdpa

    `scale`, `blend`, `bias` and `prune_post` work through hooks, also in a plain forward: `with adapter: model(**batch)`. In `prune_pre`
    a plain forward needs nothing, and hooks only carry the gates that train a selector.

    Args:
        model: of transformers (>= 5.9), `...ForConditionalGeneration`.
        selector: a path of `select`, a `CascadeConfig`, an `Allocator`, "random", "uniform", or a module or function
            (image [3, H, W] in [0, 1], grid (rows, columns), k) -> indices [k], or with weights (indices, weights).
        k: groups that each picture, and each frame of a video, keeps: a number, "auto" (`auto_budget`: from its size alone), or None: all.
        mode: see above.
        thumbnail: None; "segment": a coarse picture of its own before the sharp one, with a block of positions of its own, that only the
            decoder sees together with it; "joint": coarse groups in the same segment of attention, at the fractional positions of what
            they show (no pretrained tower has seen that: for fine-tuning). Its groups count inside the budget, at most a quarter of it.
        bound: groups that their neighbours predict to within it go first, whatever chooses among the rest but a function of one's own
            and mixed levels: 0 drops exact duplicates and nothing else.
        whole_windows: whether windows are kept whole, for towers that have them (Qwen2.5-VL).
        gate: how the weights of the kept act on what is pruned, while a selector learns: "bias", "scale", "blend".
        temperature: of a selector's soft weights.
        strength: of those gates. "full": 1, so that a selector learns what a little more of each group would be worth. "random": each drawn
            from [0, 1], for scorers that bring their terms, while they are in training; so they learn what all of it is worth, for the mean
            of a slope from absent to present is the difference of the two. A reader that is sure of what it sees has hardly a slope at 1,
            but loses all where a group goes. (Integrated gradients: M. Sundararajan et al., "Axiomatic attribution for deep networks",
            2017.)
        embedding: what reads texts given as `query` (see `Embedding`).
        pixels: the least and the most pixels that the processor resizes a picture to; needed only where it has not done so.
        generator: of chance.
        budget: "auto" is k="auto", whatever k says.

    Raises:
        ImportError: no transformers, or too old a one.
        ValueError, TypeError: a model, mode or selector that does not exist; the message names what does.

    Example:
        >>> import torch
        >>> from texvlm.qwen import QwenVLAdapter, tiny_batch, tiny_model
        >>> model = tiny_model("qwen3_vl")
        >>> adapter = QwenVLAdapter(model, "uniform", k=6)
        >>> batch = adapter.prepare(tiny_batch(model, [(40, 48)]))
        >>> batch["input_ids"].shape, model(**batch).logits.shape
        (torch.Size([1, 14]), torch.Size([1, 14, 64]))
    """

    def __init__(
        self,
        model: Any,
        selector: Selector = "learned",
        k: int | str | None = 273,
        mode: str = "prune_pre",
        *,
        thumbnail: str | None = None,
        bound: float | None = None,
        whole_windows: bool = False,
        gate: str = "bias",
        temperature: float = 1.0,
        strength: str = "full",
        embedding: Embedding | EmbeddingProvider | None = None,
        pixels: tuple[int, int] | None = None,
        generator: torch.Generator | None = None,
        budget: str | None = None,
    ) -> None:
        transformers_version()
        if not hasattr(model, "config"):
            raise TypeError(f"model must be a model of transformers, got {type(model).__name__}")
        self.family = family_of(model.config)
        if not hasattr(getattr(model, "model", None), "visual"):
            raise ValueError(
                f"model must be the whole of it, with its head (...ForConditionalGeneration), got {type(model).__name__}"
            )
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        if thumbnail not in THUMBNAILS:
            raise ValueError(f"thumbnail must be None, 'segment' or 'joint', got {thumbnail!r}")
        if thumbnail is not None and mode != "prune_pre":
            raise ValueError(f"thumbnail={thumbnail!r} needs mode='prune_pre', got {mode!r}")
        if gate not in GATES:
            raise ValueError(f"gate must be one of {', '.join(GATES)}, got {gate!r}")
        if whole_windows and not self.family.windows:
            raise ValueError(f"whole_windows needs a tower with windows (qwen2_5_vl), got {model.config.model_type}")
        self.model, self.mode = model, mode
        self.sizes = sizes_of(model)
        selecting = Selecting(selector, self.sizes.cell, bound, temperature, generator, embedding, strength)
        if selecting.mixed and mode != "prune_pre":
            raise ValueError(f"tokens of several levels need mode='prune_pre', got {mode!r}")
        if whole_windows and selector == "uniform":
            raise ValueError("whole_windows needs a selector that can rank all groups, got 'uniform'")
        if whole_windows and trainable(selector) and not mode.startswith("prune"):
            raise ValueError(f"whole_windows with a selector that learns needs mode 'prune_pre' or 'prune_post', got {mode!r}")
        if selecting.mixed and whole_windows:
            raise ValueError("whole_windows and tokens of several levels exclude each other")
        if budget not in (None, "auto"):
            raise ValueError(f"budget must be None or 'auto', got {budget!r}")
        k = "auto" if budget == "auto" else k
        if k is not None and k != "auto" and (not isinstance(k, int) or isinstance(k, bool) or k < 1):
            raise ValueError(f"k must be a whole number of at least 1, 'auto' or None, got {k!r}")
        least, most = (n * self.sizes.cell**2 for n in self.family.groups)
        self.preparation = Preparation(
            type(model.model),
            model.config,
            self.family,
            self.sizes,
            selecting,
            k,
            mode,
            thumbnail,
            whole_windows,
            pixels or (least, most),
        )
        gate = gate if mode.startswith("prune") else mode
        # A function may bring weights, and then says so with its first batch; a path does not.
        weighs = trainable(selector) or not isinstance(selector, (str, CascadeConfig))
        self.hooks = Hooks(model, self.preparation, gate, gate == "bias" and (mode == "bias" or weighs))
        if gate == "bias" and (mode == "bias" or trainable(selector)):
            attention.check(model)
            if self.family.linear_layers:
                kind = model.config.model_type
                warnings.warn(f"bias acts in the full-attention layers of {kind} only: linear ones have no keys", stacklevel=2)

    @property
    def selector(self) -> Any:
        """What was handed in."""
        return self.preparation.selecting.selector

    # ---- preparing ----

    def prepare(
        self,
        processor_output: Mapping[str, Any],
        images: Sequence[ImageLike] | ImageLike | None = None,
        query: Any = None,
        k: int | Sequence[int] | str | None = None,
        past: Mapping[str, Any] | None = None,
    ) -> PreparedBatch:
        """Chooses, and cuts a processor's output to the choice.

        Args:
            processor_output: `input_ids` [B, S], and where there are pictures `pixel_values` and `image_grid_thw` (videos:
                `pixel_values_videos`, `video_grid_thw`), as the processor returns them; `attention_mask`, `labels`.
                Without `pixel_values`, pictures are packed straight from `images`: only what is kept is resized, normalised and
                patchified, and each picture may be a single placeholder in the ids.
            images: the pictures, in the order of the prompt: what the selector looks at. By default it looks at what the processor made.
            query: for selectors that ask: one, or one for each picture.
            k: in place of the adapter's: one, or one for each picture.
            past: see `state`: the turns before this one, of which `processor_output` holds nothing.

        Returns:
            A BatchFeature: `input_ids`, `attention_mask`, `position_ids` [4, B, S'] (the count of tokens, then time, row, column),
            `labels` if given, `pixel_values`, `image_grid_thw` (as if the kept groups were pictures of one row of them), the tower's
            geometry as `image_*`, and what hooks need as `texvlm_*`: `texvlm_cells` int64 [kept, 4] holds picture, frame, cell and level
            of each kept token (a thumbnail's have level -1); `texvlm_grids` [pictures, 5] sample, kind (1 image, 2 video) and grid of
            each picture.

        Raises:
            ValueError: ids, grids, rows or pictures that do not belong together, named with their shapes.
        """
        return self.preparation(processor_output, images, query, k, past)

    def state(self, batch: Mapping[str, Any], sequences: Tensor | None = None) -> dict[str, Tensor]:
        """What a next turn needs to know of a prompt and its answer: plain tensors, to keep, to save, or to send.

        Args:
            batch: prepared.
            sequences: what `generate` returned for it, [B, S' + answer]; None: there is no answer yet.

        Returns:
            input_ids, attention_mask [B, S], position_ids [4, B, S], rope_deltas [B, 1], cells and grids (see `prepare`) of the pictures
            of all turns, and where keys are biased key_bias [B, S].
        """
        ids, mask, positions = batch["input_ids"], batch["attention_mask"], batch["position_ids"]
        if sequences is not None:
            if sequences.shape[0] != ids.shape[0] or not torch.equal(sequences[:, : ids.shape[1]].cpu(), ids.cpu()):
                raise ValueError(
                    f"sequences must begin with the batch's input_ids {list(ids.shape)}, got {list(sequences.shape)}"
                )
            answer = sequences[:, ids.shape[1] :].to(ids.device)
            # What follows the end of an answer fills up the batch, and no one shall see it.
            ended = torch.isin(answer, self._ends().to(ids.device)).long()
            there = ((ended.cumsum(1) - ended) == 0).to(mask.dtype)
            last = positions[1:].amax((0, 2))[:, None] + there.cumsum(1)
            ids, mask = torch.cat([ids, answer], dim=1), torch.cat([mask, there], dim=1)
            positions = torch.cat([positions, last.expand(4, -1, -1)], dim=2)
            positions = torch.cat([text_row(mask)[None], positions[1:]])
        deltas = batch[f"{PRIVATE}rope_deltas"]
        state = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "rope_deltas": deltas}
        with torch.no_grad():
            biased = self.hooks.call(batch).decoder
        if biased is not None:
            state["key_bias"] = F.pad(biased.bias, (0, ids.shape[1] - biased.bias.shape[1]))
        return state | kept_so_far(batch)

    def _ends(self) -> Tensor:
        """The tokens that end an answer."""
        ends = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        return torch.tensor([] if ends is None else ends).flatten()

    # ---- running ----

    def generate(self, batch: Mapping[str, Any], **options: Any) -> Any:
        """`model.generate` for a prepared batch; hooks are there for the length of the call.

        Args:
            batch: prepared, on the model's device. After earlier turns (`prepare(..., past=)`) with their cache as `past_key_values`.
            options: as `generate` takes them. `prefill_chunk_size`, which slices positions along the wrong axis,
                and `inputs_embeds` are refused.

        Returns:
            What `generate` returns: the prompt's kept tokens and the answer.
        """
        config = options.get("generation_config") or getattr(self.model, "generation_config", None)
        if (options.get("prefill_chunk_size") or getattr(config, "prefill_chunk_size", None)) is not None:
            raise ValueError("prefill_chunk_size cannot be used with 3-D positions: transformers slices them along the batch")
        if options.get("inputs_embeds") is not None:
            raise ValueError("inputs_embeds cannot be used: pictures are found by their ids")
        if "input_ids" not in batch or f"{PRIVATE}rope_deltas" not in batch:
            raise ValueError("batch must come from prepare")
        call = self.hooks.call(batch)
        inputs = {
            k: v for k, v in batch.items() if not k.startswith(PRIVATE) and k not in geometry_names(batch) and k != "labels"
        }
        if self.mode == "prune_post":
            # transformers repeats rows by the grid it is given, that of the kept: hand in so many, the hook puts in all.
            for modality, pixels in zip([m for m in MODALITIES if m.pixels in batch], call.pixels):
                inputs[modality.pixels] = pixels.rows[: sum(pixels.groups) * self.sizes.unit]
        with self, self.hooks.entered(call):
            self.model.model.rope_deltas = call.rope_deltas
            return self.model.generate(**inputs, **options)

    def __call__(self, batch: Mapping[str, Any], **options: Any) -> Any:
        """`model(**batch)` with the hooks that the mode needs."""
        with self:
            return self.model(**batch, **options)

    def entropy(self, batch: Mapping[str, Any]) -> Tensor:
        """How undecided a selector that learns is: the entropy of where its first token would go, in nats, mean over pictures.

        While a selector learns from what it keeps alone, it settles for the first places that pay: what it has stopped to keep teaches it
        nothing more. A bonus for entropy that falls to 0 along training keeps it looking elsewhere until it knows (R. Williams, J. Peng,
        "Function optimization using connectionist reinforcement learning algorithms", 1991):

            loss = model(**batch).loss - 0.5 * (1 - step / steps) * adapter.entropy(batch)

        Args:
            batch: prepared, with a scorer that brings its terms (`texvlm.Allocator`) as selector.

        Returns:
            [], from 0 (it knows where) to the log of the number of groups (or nodes, where it scores nodes), with gradients to the
            selector's weights.

        Raises:
            ValueError: the selector does not score, or the batch has no pictures that it chose from.

        Example:
            >>> import torch, texvlm
            >>> from texvlm.qwen import QwenVLAdapter, tiny_batch, tiny_model
            >>> model, scorer = tiny_model("qwen3_vl"), texvlm.Allocator(participation=[])
            >>> adapter = QwenVLAdapter(model, scorer, k=6, gate="blend")
            >>> batch = adapter.prepare(tiny_batch(model, [(64, 64)]))
            >>> bool(0 < adapter.entropy(batch) <= torch.tensor(64.0).log())
            True
        """
        if not self.preparation.selecting.scores:
            raise ValueError(f"selector must score (texvlm.Allocator) for an entropy, got {type(self.selector).__name__}")
        present = [modality for modality in MODALITIES if modality.pixels in batch]
        frames = [frame for modality in present for picture in self.hooks.kept(batch, modality) for frame in picture]
        if not frames:
            raise ValueError("batch must hold pictures that a selector which learns has chosen from, got none")
        return self.preparation.selecting.entropy(frames)

    # ---- seeing ----

    def show(self, batch: Mapping[str, Any]) -> list[Tensor]:
        """The kept picture of each picture of a batch, and of each frame of a video: uint8 [3, H, W], as the tower is given it.

        Where nothing was kept, there is a dim mean of what was; coarse tokens show their coarse samples. Thumbnails are left out.

        Args:
            batch: prepared.
        """
        return explain.kept_pictures(self, batch)

    def explain(self, output: Tensor, batch: Mapping[str, Any], check: int = 4, seed: int = 0) -> explain.Explanation:
        """Which kept groups an answer rests on, and whether it is so: some are dropped for a check.

        The attribution of a token is the derivative of the answer's log probability by the log of its weight in the decoder's
        attention (see mode "bias"), one backward pass; what that misses, the check shows.

        Args:
            output: what `generate` returned for the batch: the prompt and its answer.
            batch: prepared; it is what an adapter does not keep.
            check: how many tokens of the highest attribution are dropped, one by one, and as many others by chance, a forward each.
            seed: of that chance.

        Returns:
            `explain.Explanation`.
        """
        return explain.explain(self, output, batch, check, seed)

    # ---- attaching ----

    def attach(self) -> QwenVLAdapter:
        """Hooks the model until `detach`, for plain forwards (a Trainer's); a selector with weights becomes its submodule."""
        if self.mode == "bias" or (self.hooks.biased and trainable(self.selector)):
            attention.check(self.model)
        self.hooks.attach()
        return self

    def detach(self) -> None:
        """Takes all hooks off again, and leaves the model as it was; nothing happens where none are there."""
        self.hooks.detach()

    def __enter__(self) -> QwenVLAdapter:
        return self.attach()

    def __exit__(self, *exception: object) -> None:
        self.detach()
