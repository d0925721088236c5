"""A processor's output, cut to what is kept: ids, mask, positions, labels, rows of pixels, and geometry, all in one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from texvlm.pictures import as_float, as_rgb
from texvlm.qwen.batch import IGNORED, PRIVATE, PreparedBatch, check_gaps, continued, text_row
from texvlm.qwen.families import Family, Sizes, rope_index
from texvlm.qwen.geometry import Geometry, patch_positions
from texvlm.qwen.pictures import (
    IMAGE,
    MODALITIES,
    THUMBNAIL_LEVEL,
    VIDEO,
    Modality,
    Picture,
    pack_groups,
    target_size,
    thumbnail_grid,
    unpack_rows,
)
from texvlm.qwen.selectors import Choice, Selecting, auto_budget, trainable, whole_windows

if TYPE_CHECKING:
    from texvlm.pictures import ImageLike

MODES = ("scale", "blend", "bias", "prune_post", "prune_pre")
THUMBNAILS = (None, "segment", "joint")
THUMBNAIL_SHARE = 4
"""A thumbnail has at most this part of the budget, 1 / 4."""


@dataclass
class Preparation:
    """What `QwenVLAdapter.prepare` does, without the model: small, picklable, and without memory of a batch, so that workers can have it.

    Attributes:
        model_class: of the model under the head, for its own positions.
        config: the model's.
        family, sizes: see `families`.
        selecting: what chooses.
        k: the budget of each frame, "auto", or None for all.
        mode: one of `MODES`.
        thumbnail: one of `THUMBNAILS`.
        whole_windows: whether windows of the tower are kept whole (Qwen2.5-VL).
        pixels: the least and the most pixels that the processor resizes to.
    """

    model_class: type
    config: Any
    family: Family
    sizes: Sizes
    selecting: Selecting
    k: int | str | None = 273
    mode: str = "prune_pre"
    thumbnail: str | None = None
    whole_windows: bool = False
    pixels: tuple[int, int] = (65536, 16777216)

    @property
    def cuts(self) -> bool:
        """Whether tokens go."""
        return self.mode.startswith("prune")

    def __call__(
        self,
        inputs: Mapping[str, Any],
        images: Sequence[ImageLike] | ImageLike | None = None,
        query: Any = None,
        k: int | Sequence[int] | str | None = None,
        past: Mapping[str, Any] | None = None,
    ) -> PreparedBatch:
        """See `QwenVLAdapter.prepare`."""
        given = {name: torch.as_tensor(value) if isinstance(value, (list, tuple)) else value for name, value in inputs.items()}
        ids = given.get("input_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
            raise ValueError(f"input_ids must be whole numbers [batch, tokens], got {_shape(ids)}")
        mask = given.get("attention_mask")
        mask = torch.ones_like(ids) if mask is None else mask
        if mask.shape != ids.shape:
            raise ValueError(f"attention_mask must be {list(ids.shape)} as input_ids, got {_shape(mask)}")
        labels = given.get("labels")
        if labels is not None and labels.shape != ids.shape:
            raise ValueError(f"labels must be {list(ids.shape)} as input_ids, got {_shape(labels)}")

        # Prompts are put together on the CPU, for this asks for one number after another; pictures stay where they are.
        device = ids.device
        ids, mask, labels = ids.cpu(), mask.cpu(), None if labels is None else labels.cpu()
        pictures = self._pictures(given, images)
        prompts = [ids[b][mask[b].bool()] for b in range(len(ids))]
        targets = [None if labels is None else labels[b][mask[b].bool()] for b in range(len(ids))]
        prompts, targets = self._expanded(prompts, targets, pictures)
        self._assign(prompts, pictures)
        self._choose(pictures, prompts, query, self.k if k is None else k)

        samples = [
            self._sample(prompt, target, [p for p in pictures if p.sample == b])
            for b, (prompt, target) in enumerate(zip(prompts, targets))
        ]
        batch = self._padded(samples, mask)
        for modality in MODALITIES:
            mine = [p for p in pictures if p.modality is modality]
            if mine:
                batch |= self._pixels(modality, mine, device)
        if pictures:
            batch[f"{PRIVATE}cells"] = self._record(pictures)
            batch[f"{PRIVATE}grids"] = torch.tensor([[p.sample, p.modality.type_id, *p.grid] for p in pictures])
        out = PreparedBatch(batch)
        if past is not None:
            out = continued(out, past)
            if self.family.linear_layers:
                check_gaps(out["attention_mask"], self.config.model_type)
        return out.to(device)

    # ---- what was given ----

    def _pictures(self, given: Mapping[str, Any], images: Sequence[ImageLike] | ImageLike | None) -> list[Picture]:
        if images is None:
            listed: list[Tensor] = []
        elif isinstance(images, (list, tuple)):
            listed = [p for i, image in enumerate(images) for p in as_rgb(image, f"images[{i}]")]
        else:
            listed = list(as_rgb(images, "images"))  # type: ignore[arg-type]
        out = []
        for modality in MODALITIES:
            grid, rows = given.get(modality.grid), given.get(modality.pixels)
            if grid is None and rows is not None:
                raise ValueError(f"{modality.grid} must be given with {modality.pixels}")
            if grid is None and modality is IMAGE and listed:
                sizes = [target_size(p.shape[-2], p.shape[-1], self.sizes.cell, self.pixels) for p in listed]
                grid = torch.tensor([[1, h // self.sizes.patch, w // self.sizes.patch] for h, w in sizes])
            if grid is None or len(grid) == 0:
                continue
            if grid.dim() != 2 or grid.shape[1] != 3:
                raise ValueError(f"{modality.grid} must be [pictures, 3], got {_shape(grid)}")
            shapes = [(int(t), int(h), int(w)) for t, h, w in grid.tolist()]
            if any(min(s) < 1 or s[1] % self.sizes.merge or s[2] % self.sizes.merge for s in shapes):
                raise ValueError(
                    f"{modality.grid} must hold positive multiples of {self.sizes.merge} patches, got {grid.tolist()}"
                )
            counts = [t * h * w for t, h, w in shapes]
            if rows is not None and (rows.dim() != 2 or rows.shape[0] != sum(counts) or rows.shape[1] != self.sizes.row):
                raise ValueError(
                    f"{modality.pixels} must be [{sum(counts)}, {self.sizes.row}] for {modality.grid} {grid.tolist()}, got {_shape(rows)}"
                )
            if modality is IMAGE and images is not None and len(listed) != len(shapes):
                raise ValueError(f"images must be the {len(shapes)} of image_grid_thw, got {len(listed)}")
            if rows is None and not (modality is IMAGE and listed):
                raise ValueError(f"{modality.pixels} must be given with {modality.grid}, or images=")
            split = [None] * len(shapes) if rows is None else rows.split(counts)
            seconds = given.get("second_per_grid_ts") if modality is VIDEO else None
            if seconds is not None and len(seconds) != len(shapes):
                raise ValueError(f"second_per_grid_ts must be one for each of {len(shapes)} videos, got {len(seconds)}")
            for i, (shape, part) in enumerate(zip(shapes, split)):
                if modality is IMAGE and listed:
                    self._check_shape(i, listed[i], shape)
                image = listed[i] if modality is IMAGE and listed else None
                out.append(Picture(modality, shape, part, image, None if seconds is None else float(seconds[i])))
        if images is not None and listed and not any(p.modality is IMAGE for p in out):
            raise ValueError(f"images must be the 0 of image_grid_thw, got {len(listed)}")
        return out

    def _check_shape(self, number: int, image: Tensor, grid: tuple[int, int, int]) -> None:
        """A processor keeps the aspect, but for less than a cell along each side: another one is that of another picture."""
        (height, width), cell = image.shape[-2:], self.sizes.cell
        tall, wide = (n * self.sizes.patch for n in grid[1:])
        if abs(tall / height - wide / width) > cell / height + cell / width:
            raise ValueError(
                f"images[{number}] is {height} x {width}, which image_grid_thw {list(grid)} ({tall} x {wide}) is not made of"
            )

    def _expanded(
        self, prompts: list[Tensor], targets: list[Tensor | None], pictures: list[Picture]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """One placeholder per picture becomes one per group, where the processor has not done so."""
        mine = [p for p in pictures if p.modality is IMAGE]
        token = IMAGE.token(self.config)
        found = sum(int((prompt == token).sum()) for prompt in prompts)
        if (
            not mine
            or found != len(mine)
            or all(p.groups(self.sizes) == 1 for p in mine)
            or any(p.rows is not None for p in mine)
        ):
            return prompts, targets
        counts = iter([p.groups(self.sizes) for p in mine])
        out, goals = [], []
        for prompt, target in zip(prompts, targets):
            repeats = torch.tensor([next(counts) if i == token else 1 for i in prompt.tolist()])
            out.append(prompt.repeat_interleave(repeats))
            goals.append(None if target is None else target.repeat_interleave(repeats))
        return out, goals

    def _assign(self, prompts: list[Tensor], pictures: list[Picture]) -> None:
        """Which picture belongs to which sample, and where its tokens are."""
        for modality in MODALITIES:
            waiting = [p for p in pictures if p.modality is modality]
            for b, prompt in enumerate(prompts):
                places = (prompt == modality.token(self.config)).nonzero()[:, 0]
                while len(places):
                    count = waiting[0].groups(self.sizes) * waiting[0].grid[0] if waiting else 0
                    if not waiting or count > len(places):
                        raise ValueError(
                            f"input_ids of sample {b} hold {len(places)} {modality.name} tokens "
                            + (
                                f"where its next {modality.name} has {count}"
                                if waiting
                                else f"for which there is no {modality.name}"
                            )
                        )
                    picture = waiting.pop(0)
                    picture.sample, picture.places, places = b, places[:count], places[count:]
            if waiting:
                raise ValueError(
                    f"{modality.grid} has {len(waiting)} more pictures than input_ids have {modality.name} tokens for"
                )

    # ---- the choice ----

    def _choose(self, pictures: list[Picture], prompts: list[Tensor], query: Any, k: int | Sequence[int] | str | None) -> None:
        budgets: list[Any] = list(k) if isinstance(k, (list, tuple)) else [k] * len(pictures)
        if len(budgets) != len(pictures):
            raise ValueError(f"k must be one number, or one for each of {len(pictures)} pictures, got {len(budgets)}")
        queries = list(query) if isinstance(query, (list, tuple)) else [query] * len(pictures)
        if len(queries) != len(pictures):
            raise ValueError(f"query must be one, or one for each of {len(pictures)} pictures, got {len(queries)}")
        for picture, budget, asked in zip(pictures, budgets, queries):
            self.choose(picture, budget, asked, prompts[picture.sample])

    def choose(self, picture: Picture, k: int | str | None, query: Any = None, prompt: Tensor | None = None) -> None:
        """Chooses what each frame of a picture keeps, in its order; `prompt`: the ids that it is among, where they are known."""
        groups, picture.query = picture.groups(self.sizes), self.selecting.vector(query)
        if k is None:
            k = groups
        elif k == "auto":
            k = auto_budget(groups)
        if not isinstance(k, int) or isinstance(k, bool) or k < 1:
            raise ValueError(f"k must be a whole number of at least 1, 'auto' or None, got {k!r}")
        budget = min(k, groups)
        if self.thumbnail is not None and picture.modality is IMAGE:
            picture.thumbnail = thumbnail_grid(picture, budget // THUMBNAIL_SHARE, self.sizes)
            budget -= 0 if picture.thumbnail is None else picture.thumbnail[0] * picture.thumbnail[1]
        for frame in range(picture.grid[0]):
            picture.choices.append(self._chosen(picture, frame, budget, query, prompt).cpu().raster())

    def _chosen(self, picture: Picture, frame: int, budget: int, query: Any, prompt: Tensor | None) -> Choice:
        """Of one frame."""
        if budget == picture.groups(self.sizes) and self.cuts and self.selecting.keeps_all:
            every = torch.arange(budget)
            return Choice(every, torch.zeros_like(every))
        size = picture.size(self.sizes)
        image = self._seen(picture, frame) if self.selecting.looks else torch.empty(()).expand(3, *size)
        text = None
        if prompt is not None:
            text = (self._text(prompt[: int(picture.places[0])]), self._text(prompt[int(picture.places[-1]) + 1 :]))
        if self.whole_windows and self.sizes.window:
            return self._windows(image, budget, query, text)
        choice = self.selecting(image, budget, query, text)
        if self.mode != "prune_pre" and bool(choice.levels.any()):
            raise ValueError(f"tokens of several levels need mode='prune_pre', got {self.mode!r}")
        return choice

    def _text(self, ids: Tensor) -> Tensor:
        """The text among ids."""
        tokens = [modality.token(self.config) for modality in MODALITIES]
        return ids[~torch.isin(ids, ids.new_tensor(tokens))]

    def _seen(self, picture: Picture, frame: int = 0) -> Tensor:
        """A frame at the size that the tower sees, [3, H, W]."""
        height, width = picture.size(self.sizes)
        if picture.image is not None:
            if picture.image.shape[-2:] == (height, width):
                return picture.image
            # Bytes stay bytes where torch can resize them, on the CPU: several times as fast, and so is what reads them.
            image = picture.image if picture.image.device.type == "cpu" else as_float(picture.image)
            return F.interpolate(image[None], (height, width), mode="bilinear", antialias=True)[0]
        assert picture.rows is not None
        h, w = picture.grid[1:]
        return unpack_rows(picture.rows[frame * h * w : (frame + 1) * h * w], (h, w), self.sizes, self.family)

    def _windows(self, image: Tensor, k: int, query: Any, text: tuple[Tensor, Tensor] | None) -> Choice:
        """Windows of the tower that are kept whole: those of the best groups, until the next does not fit the budget."""
        grid = (image.shape[-2] // self.sizes.cell, image.shape[-1] // self.sizes.cell)
        ranked = self.selecting(image, grid[0] * grid[1], query, text).cells.cpu()
        cells = whole_windows(ranked, grid, self.sizes.window, k)
        return Choice(cells, torch.zeros_like(cells))

    # ---- the prompt ----

    def _kept_places(self, picture: Picture) -> Tensor:
        """Which of a picture's tokens stay, as indices into `places`."""
        groups = picture.groups(self.sizes)
        return torch.cat([choice.cells + f * groups for f, choice in enumerate(picture.choices)])

    def _sample(self, prompt: Tensor, target: Tensor | None, pictures: list[Picture]) -> tuple[Tensor, Tensor, Tensor | None]:
        """One sample: kept ids [S'], 3-D positions [3, S'], labels."""
        grids: dict[str, list[tuple[int, int, int]]] = {m.grid: [] for m in MODALITIES}
        pictures = sorted(pictures, key=lambda p: int(p.places[0]))
        for picture in pictures:
            if picture.thumbnail is not None and self.thumbnail == "segment":
                prompt, target = self._with_thumbnail(prompt, target, picture, pictures)
                m = self.sizes.merge
                grids[picture.modality.grid].append((1, picture.thumbnail[0] * m, picture.thumbnail[1] * m))
            grids[picture.modality.grid].append(picture.grid)
        types = torch.zeros_like(prompt)
        for modality in MODALITIES:
            types[prompt == modality.token(self.config)] = modality.type_id
        seconds = [p.seconds for p in pictures if p.seconds is not None]
        extra = {"second_per_grid_ts": torch.tensor(seconds)} if seconds else {}
        positions = rope_index(
            self.model_class,
            self.config,
            input_ids=prompt[None],
            mm_token_type_ids=types[None].int(),
            attention_mask=torch.ones_like(prompt)[None],
            **{name: torch.tensor(rows) if rows else None for name, rows in grids.items()},
            **extra,
        )[0][:, 0].clone()
        keep = torch.ones(len(prompt), dtype=torch.bool)
        order, added_ids, added_positions = [], [], []
        for picture in pictures:
            places = picture.places
            if self.cuts:
                keep[places] = False
                keep[places[self._kept_places(picture)]] = True
            for f, choice in enumerate(picture.choices):  # a coarse token is in the middle of what it covers
                at = places[choice.cells + f * picture.groups(self.sizes)]
                positions[1:, at] += ((1 << choice.levels) - 1).div(2, rounding_mode="floor")
            if picture.thumbnail is not None and self.thumbnail == "joint":
                row, column = self._thumbnail_centres(picture)
                start = positions[:, places[0]]
                seen = torch.stack([torch.zeros_like(row), (row / self.sizes.merge).floor(), (column / self.sizes.merge).floor()])
                added_positions.append(start[:, None] + seen.long())
                added_ids.append(prompt[places[0]].expand(len(row)))
                order.append(places[0].expand(len(row)).double() - 0.5)
        kept = keep.nonzero()[:, 0]
        ids, where = prompt[kept], positions[:, kept]
        goal = None if target is None else target[kept]
        if added_ids:
            sort = torch.cat([kept.double(), *order]).argsort(stable=True)
            ids = torch.cat([ids, *added_ids])[sort]
            where = torch.cat([where, *added_positions], dim=1)[:, sort]
            if goal is not None:
                goal = torch.cat([goal, *(torch.full_like(a, IGNORED) for a in added_ids)])[sort]
        return ids, where, goal

    def _with_thumbnail(
        self, prompt: Tensor, target: Tensor | None, picture: Picture, pictures: list[Picture]
    ) -> tuple[Tensor, Tensor | None]:
        """The prompt with a coarse picture, wrapped as pictures are, before this one."""
        assert picture.thumbnail is not None
        first = int(picture.places[0])
        start, end = int(self.config.vision_start_token_id), int(self.config.vision_end_token_id)
        if first > 0 and int(prompt[first - 1]) == start:
            first -= 1
        count = picture.thumbnail[0] * picture.thumbnail[1]
        added = prompt.new_tensor([start, *[picture.modality.token(self.config)] * count, end])
        prompt = torch.cat([prompt[:first], added, prompt[first:]])
        if target is not None:
            target = torch.cat([target[:first], torch.full_like(added, IGNORED), target[first:]])
        for other in pictures:
            other.places = torch.where(other.places >= first, other.places + len(added), other.places)
        return prompt, target

    def _thumbnail_centres(self, picture: Picture) -> tuple[Tensor, Tensor]:
        """Where the centres of a thumbnail's groups lie in the full picture, in patches."""
        assert picture.thumbnail is not None
        rows, columns = picture.thumbnail
        row = (torch.arange(rows).double() + 0.5) * picture.grid[1] / rows - 0.5
        column = (torch.arange(columns).double() + 0.5) * picture.grid[2] / columns - 0.5
        return tuple(torch.cartesian_prod(row, column).T)  # type: ignore[return-value]

    def _padded(self, samples: list[tuple[Tensor, Tensor, Tensor | None]], mask: Tensor) -> dict[str, Any]:
        longest = max(len(ids) for ids, _, _ in samples)
        left = not (bool((mask[:, -1:] == 0).any()) and not bool((mask[:, :1] == 0).any()))
        text = getattr(self.config, "text_config", self.config)
        pad_id = getattr(text, "pad_token_id", None)

        def padded(values: Tensor, fill: int) -> Tensor:
            missing = longest - values.shape[-1]
            return F.pad(values, (missing, 0) if left else (0, missing), value=fill)

        ids = torch.stack([padded(ids, 0 if pad_id is None else int(pad_id)) for ids, _, _ in samples])
        there = torch.stack([padded(torch.ones_like(ids), 0) for ids, _, _ in samples])
        batch: dict[str, Any] = {"input_ids": ids, "attention_mask": there}
        batch["position_ids"] = torch.cat([text_row(there)[None], torch.stack([padded(p, 0) for _, p, _ in samples], 1)])
        if samples[0][2] is not None:
            batch["labels"] = torch.stack([padded(goal, IGNORED) for _, _, goal in samples if goal is not None])
        deltas = [p.max() + 1 - len(i) if len(i) else p.new_zeros(()) for i, p, _ in samples]
        batch[f"{PRIVATE}rope_deltas"] = torch.stack(deltas)[:, None]
        return batch

    # ---- the pixels ----

    def rows(self, picture: Picture, choice: Choice, frame: int) -> Tensor:
        """The rows of pixels of a frame's kept groups."""
        unit, sizes = self.sizes.unit, self.sizes
        if picture.rows is not None and not bool(choice.levels.any()):
            start = frame * picture.grid[1] * picture.grid[2]
            rows = choice.cells.to(picture.rows.device)[:, None] * unit + torch.arange(unit, device=picture.rows.device)
            return picture.rows[start + rows.flatten()]
        cells = torch.stack([choice.levels, *choice.places(picture.grid[2] // sizes.merge)], dim=-1)
        image = self._seen(picture, frame) if picture.image is None else picture.image
        return pack_groups(image, cells, picture.size(sizes), sizes, self.family)

    def _pixels(self, modality: Modality, pictures: list[Picture], device: torch.device) -> dict[str, Any]:
        """Rows of pixels, on this device, and grids, geometry and weights of all pictures of a modality."""
        sizes, rows, grids, geometries, weights, keep, start = self.sizes, [], [], [], [], [], 0
        weighted = not self.cuts or any(c.weights is not None for p in pictures for c in p.choices)
        for picture in pictures:
            groups = picture.groups(sizes)
            if self.mode == "prune_pre":
                parts = [self.rows(picture, choice, f) for f, choice in enumerate(picture.choices)]
                if picture.thumbnail is not None:
                    parts.insert(0, self._thumbnail_rows(picture))
                rows.append(torch.cat(parts).to(device))
                geometries.append(self.geometry(picture))
            else:
                if picture.rows is None:
                    every = torch.arange(groups)
                    rows.append(self.rows(picture, Choice(every, torch.zeros_like(every)), 0).to(device))
                else:
                    rows.append(picture.rows.to(device))
                keep.append(start + self._kept_places(picture))
                start += groups * picture.grid[0]
            if self.cuts:
                counts = [len(c.cells) for c in picture.choices]
                if not (picture.modality is VIDEO and self.family.frames_apart):  # there, a frame is what a run of tokens is
                    counts = [sum(counts)]
                if picture.thumbnail is not None:
                    of_thumbnail = picture.thumbnail[0] * picture.thumbnail[1]
                    if self.thumbnail == "segment":
                        counts.insert(0, of_thumbnail)
                    else:
                        counts[0] += of_thumbnail
                    if weighted:
                        weights.append(torch.ones(of_thumbnail))
                grids += [(1, sizes.merge, sizes.merge * count) for count in counts]
            else:
                grids.append(picture.grid)
            if weighted:
                weights += [self._weights(choice, groups) for choice in picture.choices]
        batch: dict[str, Any] = {
            modality.pixels: torch.cat(rows),
            modality.grid: torch.tensor(grids),
        }
        prefix = f"{modality.name}_"
        if self.mode == "prune_pre":
            batch |= {prefix + name: value for name, value in Geometry.join(geometries).keywords().items()}
        if self.mode == "prune_post":
            batch[f"{PRIVATE}{prefix}keep"] = torch.cat(keep)
            batch[f"{PRIVATE}{prefix}grid"] = torch.tensor([p.grid for p in pictures])
        if weighted:
            batch[f"{PRIVATE}{prefix}weights"] = torch.cat(weights)
        if trainable(self.selecting.selector):
            # A forward works the weights out again, from these; so a batch holds no graph, and can come from a worker.
            batch[f"{PRIVATE}{prefix}seen"] = [
                torch.stack([self._evidence(p, choice, f) for f, choice in enumerate(p.choices)]) for p in pictures
            ]
            if any(p.query is not None for p in pictures):
                batch[f"{PRIVATE}{prefix}query"] = torch.stack([p.query for p in pictures if p.query is not None])
            if weighted:
                batch[f"{PRIVATE}{prefix}weights"] = batch[f"{PRIVATE}{prefix}weights"].detach()
        return batch

    def _evidence(self, picture: Picture, choice: Choice, frame: int) -> Tensor:
        """What the weights of a frame can be worked out from again."""
        if choice.features is not None:
            return choice.features
        return self.selecting.evidence(self._seen(picture, frame), picture.query)

    def _weights(self, choice: Choice, groups: int) -> Tensor:
        if self.cuts:
            return torch.ones(len(choice.cells)) if choice.weights is None else choice.weights
        if choice.weights_all is not None:
            return choice.weights_all
        kept = torch.ones(len(choice.cells)) if choice.weights is None else choice.weights
        return torch.zeros(groups, dtype=kept.dtype).index_put((choice.cells,), kept)

    def _thumbnail_rows(self, picture: Picture) -> Tensor:
        assert picture.thumbnail is not None
        height, width = (n * self.sizes.cell for n in picture.thumbnail)
        image = self._seen(picture) if picture.image is None else picture.image
        every = torch.arange(picture.thumbnail[0] * picture.thumbnail[1])
        return pack_groups(image, every, (height, width), self.sizes, self.family)

    def geometry(self, picture: Picture) -> Geometry:
        """What the tower needs to know of a picture's kept patches, frame by frame."""
        sizes, merge = self.sizes, self.sizes.merge
        columns = picture.grid[2] // merge
        joined = torch.cat([patch_positions(*choice.places(columns), choice.levels, merge) for choice in picture.choices])
        segments = [len(choice.cells) * sizes.unit for choice in picture.choices]
        if picture.thumbnail is None:
            return Geometry.of(joined, segments, picture.grid[1:], sizes)
        rows, wide = picture.thumbnail
        own = Geometry.whole(rows, wide, sizes)
        if self.thumbnail == "segment":
            return Geometry.join([own, Geometry.of(joined, segments, picture.grid[1:], sizes)])
        scale = torch.tensor([picture.grid[1] / (rows * merge), picture.grid[2] / (wide * merge)])
        both = torch.cat([(own.position_ids + 0.5) * scale - 0.5, joined.float()])
        return Geometry.of(both, [len(both)], picture.grid[1:], sizes)

    def _record(self, pictures: list[Picture]) -> Tensor:
        """What was kept, in the order of the tower, int64 [tokens, 4]: picture, frame, cell, level; thumbnails first, of level -1."""
        rows = []
        for i, picture in enumerate(pictures):
            parts = [(f, choice.cells, choice.levels) for f, choice in enumerate(picture.choices)]
            if picture.thumbnail is not None:
                every = torch.arange(picture.thumbnail[0] * picture.thumbnail[1])
                parts.insert(0, (0, every, torch.full_like(every, THUMBNAIL_LEVEL)))
            for f, cells, levels in parts:
                rows.append(torch.stack([torch.full_like(cells, i), torch.full_like(cells, f), cells, levels], dim=1))
        return torch.cat(rows)


def _shape(value: Any) -> str:
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
