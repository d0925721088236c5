"""`VideoStream`: the texture of a film's newest frame, and what is chosen of it; only what changed is computed."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from texvlm._ext import coordinates, integer, ops
from texvlm.cascade import needed_channels
from texvlm.channel_sources import COLOURS, EMBEDDING, HISTORIES, PREVIOUS
from texvlm.channels import CHANNELS, LOCAL, build_channels, channel_indices
from texvlm.embedding import AXES, Embedding, relevance
from texvlm.fovea import FoveaLayout, FoveatedTokens, gazes, sample_foveated
from texvlm.paths import MAX_CELL, CascadeConfig
from texvlm.pyramid import update_mipmaps
from texvlm.selection import Selection
from texvlm.stages import Run
from texvlm.texture import Texture
from texvlm.tiles import dirty_tiles
from texvlm.video.cache import CarryRule
from texvlm.video.carried import Carried
from texvlm.video.composed import ROWS as _ROWS
from texvlm.video.composed import StreamTexture, channel_notes, interleave, planar
from texvlm.video.given import POINTS, checked_fixation, checked_frame, checked_points
from texvlm.video.lagged import LAGGED, Lagged
from texvlm.video.results import VideoStats, VideoTokens
from texvlm.video.scoring import StreamRun
from texvlm.video.state import State

if TYPE_CHECKING:
    from texvlm.embedding import EmbeddingProvider
    from texvlm.pictures import ImageLike


@contextmanager
def _ordinary() -> Iterator[None]:
    """Without gradients; and what a stream keeps must not be a tensor of inference mode, which cannot be written to outside of it."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class VideoStream:
    """The texture of a film's newest frame and what is chosen of it, brought up to date frame by frame.

    A frame is compared with what its tiles were built from (`dirty_tiles`); texels, mips, features of cells and scores are computed
    where something changed, and at threshold 0 all of them are bit for bit those of a full recompute,
    `build_channels(frame, previous=the frame before, flow=None)` and `select`. With a threshold they are those of a recompute of
    `reference`, in which each tile is at most that far from the frame: nothing drifts.

    What happens to each channel, which the texture's `meta` says too:

        exact       0-7, 9-11: texels near a dirty tile. 8 saliency: its statistics are of the whole picture, and cheap
        lagged      12-14, 34, 38, 39: made at key frames, and moved along the flow between (nearest value); made when they are read
        carried     18-33 embedding: moved along the flow, made anew where the picture no longer looks the same (`CarryRule`)
                    15, 16 relevance and saliency of the frame before, and 17, 37 histories: moved along the flow
        given       35, 36: absent

    Frames that change everything wholly, such as cuts and fades, are key frames (where something lags or is carried), and so is each
    `keyframe`-th: everything is made anew.

    Args:
        channels: as in `build_channels`; None: all 40. Costs nothing for those that are lagged until they are read.
        k: the budget of `select`.
        cell: side of a cell in pixels.
        path: of `select`, or a `CascadeConfig`; "video" keeps the selection from flickering and lets what moves win.
        threshold: the largest difference of a value in [0, 1] that is no change.
        tile: side of a tile in pixels, 8 to 256.
        keyframe: after so many frames everything is made anew, and the threshold does not hold.
        query: what is looked for: a text, or a vector (see `Embedding.query`); needs `embedding`.
        embedding: an `Embedding`, or a provider that brings its axes.
        dtype: of the texels, as in `build_channels`.
        levels: of the pyramid; all by default.
        exact: forbids the lagged channels to lag, and the embedding to be carried: they are made anew for each frame that changed.
        measure: "largest" difference in a tile, or "mean": over blocks of 8 x 8 pixels, which sensor noise does not reach.
        rule: when something carried is made anew; its age is `keyframe`.
        follow: whether flow is sought. By default where something is moved along it; True for `tokens` to recognise what moved, False
            for what is carried to stay in place.

    Example:
        >>> import torch, texvlm
        >>> stream = texvlm.VideoStream(["red", "edge", "motion"], k=4)
        >>> frame = torch.zeros(3, 64, 96, dtype=torch.uint8)
        >>> texture = stream.update(frame)
        >>> frame[:, 20:28, 36:44] = 255
        >>> texture = stream.update(frame)
        >>> stream.stats.dirty, stream.stats.tiles, texture.level(0)[0, 2, 24, 40].item(), stream.select().indices[0, 0].item()
        (1, 6, 1.0, 8)
    """

    def __init__(
        self,
        channels: str | Sequence[str | int] | None = None,
        *,
        k: int = 273,
        cell: int = 16,
        path: str | CascadeConfig = "salience",
        threshold: float = 0.0,
        tile: int = 32,
        keyframe: int = 30,
        query: str | Tensor | None = None,
        embedding: Embedding | EmbeddingProvider | None = None,
        dtype: torch.dtype | None = None,
        levels: int | None = None,
        exact: bool = False,
        measure: str = "largest",
        rule: CarryRule | None = None,
        follow: bool | None = None,
    ) -> None:
        self.names = tuple(CHANNELS[i].name for i in channel_indices(channels))
        self.config = path if isinstance(path, CascadeConfig) else CascadeConfig.preset(path)
        self.k, self.cell = integer("k", k, 0), integer("cell", cell)
        self.tile, self.keyframe = integer("tile", tile), integer("keyframe", keyframe, 1)
        if not 1 <= self.cell <= MAX_CELL:
            raise ValueError(f"cell must be from 1 to {MAX_CELL} pixels, got {cell}")
        if not 8 <= self.tile <= 256:
            raise ValueError(f"tile must be from 8 to 256 pixels, got {tile}")
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold must be in [0, 1], got {threshold}")
        if measure not in ("largest", "mean"):
            raise ValueError(f"measure must be 'largest' or 'mean', got {measure!r}")
        self.threshold, self.measure, self.exact, self.dtype, self.levels = float(threshold), measure, exact, dtype, levels
        if embedding is not None and not isinstance(embedding, Embedding):
            embedding = Embedding(embedding)
        if embedding is not None and len(embedding.pca.axes) != AXES:
            raise ValueError(f"embedding must have {AXES} axes, one for each of its channels, got {len(embedding.pca.axes)}")
        if query is not None and embedding is None:
            raise ValueError("query needs embedding=, an Embedding or a provider, which reads it")
        self.embedding = embedding
        self.query = None if query is None or embedding is None else embedding.query(query)
        if self.query is not None and not (self.query.dim() == 1 and self.query.isfinite().all() and self.query.any()):
            raise ValueError(f"query must be one text or one vector, which has a direction, got {list(self.query.shape)}")
        needs = needed_channels(self.config)
        if self.query is None and (self.config.asks or "attention" in needs):
            raise ValueError(f"path={path!r} needs query= and embedding=")
        self._recalls = not needs.isdisjoint((*PREVIOUS, *HISTORIES))
        self._wanted = {*self.names, *needs, *self._asked()}
        moves = {*PREVIOUS, *HISTORIES} | (set() if exact else {*LAGGED, *({*EMBEDDING, "attention"} if embedding else ())})
        self._carries = bool(follow) or not self._wanted.isdisjoint(moves)
        self._follow = self._carries if follow is None else follow
        if self._carries:
            self._wanted |= {*COLOURS, "motion"}  # for appearance, and for the plane of luma that motion keeps
        self._local = tuple(CHANNELS[i].name for i in LOCAL if CHANNELS[i].name in self._wanted) or ("red",)
        self._rule = rule or CarryRule(age=self.keyframe)
        self.reset()

    # ---- frames ----

    def reset(self) -> None:
        """Forgets all frames."""
        self.stats = VideoStats()
        self._state: State | None = None
        recalls = "previous_relevance" in self._wanted and self.query is not None
        embeds = recalls or not (self.exact or self._wanted.isdisjoint((*EMBEDDING, "attention")))
        self._carried = Carried(self._wanted, self.embedding if embeds else None, self.query, self._rule, self._follow)
        self._lagged = Lagged([name for name in LAGGED if name in self._wanted], self.exact)
        self._fixation: Tensor | None = None
        self._since_key = 0
        self._version = 0  # of what the texture shows
        self._content = 0  # of what selections are made of
        self._failed = False  # in the middle of an update
        self._memory: Selection | None = None
        self._selected: tuple[int, Selection] | None = None
        self._buffer: tuple[int, Tensor] | None = None
        self._others: dict[tuple[str, ...], tuple[int, Texture]] = {}
        self._texture: Texture | None = None

    def update(
        self,
        frame: ImageLike,
        delta_only: bool = True,
        *,
        fixation: Tensor | None = None,
        fixations: Tensor | None = None,
        gaze: Tensor | None = None,
    ) -> Texture:
        """Takes the next frame.

        Args:
            frame: a picture, or a batch of one picture of each stream, as in `build_channels`; uint8 [H, W, 3] arrays and planar tensors
                are read as they lie. A frame of another size starts anew, and `stats.key` says so.
            delta_only: False recomputes everything.
            fixation: uv [B, 2] (or [2]), of eccentricity; stays until another is given, or a frame of another size.
            fixations: uv [B, P, 2] since the last frame, for channel 17.
            gaze: uv [B, P, 2], for channel 37.

        Returns:
            The stream's own texture: one object, which always shows the newest frame, until frames of another size come.

        Raises:
            ValueError: another dtype, device or number of pictures than the frame before. The stream is as it was.

        What an embedding raises comes through. Such a frame counts, nothing can be read of it, and with the next one all is made anew.
        """
        with _ordinary():
            return self._update(frame, delta_only, fixation, {"fixation_history": fixations, "gaze_history": gaze})

    def _update(self, frame: ImageLike, delta_only: bool, fixation: Tensor | None, given: dict[str, Tensor | None]) -> Texture:
        start = time.perf_counter()
        known = None if self._state is None or self._state.fresh else self._state.reference
        picture, why = checked_frame(frame, known)
        points = {name: checked_points(POINTS[name], at, picture) for name, at in given.items() if at is not None}
        centre = None if fixation is None else checked_fixation(fixation, picture)
        if why is not None:
            number, begun = self.stats.frame, self._begin(picture)
            self.reset()
            self.stats.frame, self._state = number, begun
        state = self._state
        assert state is not None
        gazed = centre is not None and (self._fixation is None or not torch.equal(self._fixation, centre))
        self._fixation = centre if gazed else self._fixation
        for name, at in points.items():
            self._recall(name, at)
        why = why or ("failure" if self._failed else None if delta_only else "asked")
        everywhere = why is not None or (gazed and "eccentricity" in self._local)
        key = why or ("age" if self._since_key >= self.keyframe else None)
        stats = self.stats = VideoStats(self.stats.frame + 1, tiles=state.before.numel())
        self._failed = True
        dirty, any_dirty = self._detect(picture, key)
        stats.milliseconds["detect"] = 1e3 * (time.perf_counter() - start)
        if everywhere or any_dirty or state.any_before or (key is not None and self._carried.behind):
            key = self._bring_up(dirty, any_dirty, everywhere, key)
        elif self._carried.still(state.map):
            self._shows_another()
        if self._carries and not self._wanted.isdisjoint(HISTORIES):
            with self._timed("carry"):
                if self._carried.age(picture.shape[2:]):
                    self._shows_another()
        self._failed = False
        if why is not None:
            stats.dirty = stats.tiles
        stats.bytes = state.bytes_touched(stats.tiles if everywhere else stats.dirty)
        self._since_key = 1 if key is not None else self._since_key + 1
        stats.key = key
        return self.texture

    def _shows_another(self) -> None:
        """Something was remembered or forgotten, though the picture may be the same."""
        self._version += 1
        self._content += self._recalls

    def _recall(self, name: str, points: Tensor) -> None:
        """Keeps points for the history of this name until the next frame, if somebody wants it."""
        if name in self._wanted:
            self._carried.points[name].append(points)

    def _begin(self, picture: Tensor) -> State:
        names, saliency = self._local, "saliency" in self._wanted
        return State.begin(picture, names, saliency, self.tile, self.cell, self.dtype, self.levels, self._notes(names))

    def _detect(self, picture: Tensor, key: str | None) -> tuple[Tensor, bool]:
        """Which tiles changed, and whether one did (on a GPU: always); `reference` becomes the frame there."""
        state = self._state
        assert state is not None
        if state.fresh:
            state.reference.copy_(picture)
            self.stats.dirty = state.before.numel()
            return torch.ones_like(state.before), True
        if picture[0].stride() != state.reference[0].stride():  # mixed layouts are compared slowly
            picture = torch.empty_like(state.reference).copy_(picture)
        threshold = 0.0 if key is not None else self.threshold
        measure = self.measure if threshold else "largest"  # pixels may differ where means do not
        dirty, _, count = dirty_tiles(picture, state.reference, self.tile, threshold, measure)
        if picture.is_cuda:
            self.stats.dirty = -1
            return dirty, True
        self.stats.dirty = int(count.sum())
        return dirty, self.stats.dirty > 0

    def _bring_up(self, dirty: Tensor, any_dirty: bool, everywhere: bool, key: str | None) -> str | None:
        """Brings everything up to the reference. Returns why all that is carried was made anew, if it was.

        Args:
            dirty: the tiles that changed.
            any_dirty: whether one did.
            everywhere: whether texels are computed in all of them.
            key: why all that is carried is to be made anew, or None.
        """
        state = self._state
        assert state is not None
        last_map, tiles = state.map, torch.ones_like(dirty) if everywhere else dirty
        with state.whole() as first:
            with self._timed("channels"):
                state.update_channels(tiles, self._fixation, first)
            if state.colours is not None:
                with self._timed("saliency"):
                    state.update_saliency(tiles, first)
            with self._timed("cells"):
                state.touch_cells(tiles)
        state.before, state.any_before = dirty, any_dirty
        state.embedded = None if any_dirty else state.embedded
        self._version, self._content = self._version + 1, self._content + 1
        flow: tuple[Tensor | None, Tensor | None] = (None, None)
        try:
            if self._carries:
                with self._timed("carry"):
                    anew, luma = key is not None or (self.exact and any_dirty), state.planes[0]
                    found = self._carried.step(state.reference, luma, state.local, dirty, self.tile, last_map, anew)
                key, flow = key or found, (self._carried.flow, self._carried.occlusion)
            self._lagged.follow(*flow, key is not None or not self._carries)
        finally:
            state.seen.follow(dirty, self.tile, *flow)
        return key

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        spent = self.stats.milliseconds.get(stage, 0.0)
        self.stats.milliseconds[stage] = spent + 1e3 * (time.perf_counter() - start)

    # ---- results ----

    def _ready(self) -> State:
        if self._state is None:
            raise RuntimeError("this stream has seen no frame: call update(frame) first")
        if self._failed:
            raise RuntimeError("the last update failed: call update(frame) again")
        return self._state

    @property
    def reference(self) -> Tensor:
        """The picture that the texture is of, [B, 3, H, W]: the frame, but for what is below the threshold."""
        return self._ready().reference

    @property
    def texture(self) -> Texture:
        """The channels that were asked for, of the newest frame. Interleaved when `data` is read, where not all of them are exact."""
        local = (self._state or self._ready()).local
        if self._texture is None and self.names == self._local:
            self._texture = local
        elif self._texture is None:
            self._texture = StreamTexture.over(local, self.names, self._notes(self.names), partial(self._interleaved, local))
        return self._texture

    def _notes(self, names: Collection[str]) -> dict[str, Any]:
        return channel_notes(names, self.embedding, self.query, self.exact)

    def _interleaved(self, local: Texture) -> Tensor:
        """The channels asked for, [B, T, C], of the stream that `local` is of: into the same buffer as last time."""
        state = self._ready()
        if state.local is not local:
            size = f"{local.height} x {local.width}"
            raise RuntimeError(f"this texture is of frames of {size}, before the stream started anew: read stream.texture")
        if self._buffer is None or self._buffer[0] != self._version:
            there = [name for name in self.names if name not in self._local]
            with _ordinary():
                sources = [local, *([self._other(there)] if there else [])]
                out = interleave(sources, self.names, None if self._buffer is None else self._buffer[1])
            self._buffer = (self._version, out)
        return self._buffer[1]

    def _other(self, names: Collection[str]) -> Texture:
        """A texture of channels that live in planes of their own; made once a frame."""
        key = tuple(name for name in _ROWS if name in set(names))
        if (known := self._others.get(key)) is None or known[0] != self._version:
            state = self._ready()
            texture = planar(state.reference, state.local, key, self._planes(key), self._notes(key))
            self._others[key] = known = (self._version, texture)
        return known[1]

    def _planes(self, names: Collection[str]) -> dict[str, Tensor]:
        """The planes behind these channels."""
        state = self._ready()
        planes = self._carried.planes()
        if self.embedding is not None and not set(names).isdisjoint((*EMBEDDING, "attention")):
            planes["embedding"] = self._embedded(self.embedding)
        if "attention" in names and self.query is not None:
            planes["attention"] = relevance(planes["embedding"], self.query)
        if state.map is not None and "saliency" in names:
            planes["saliency"] = ops.enlarge(state.map, state.local.height, state.local.width)
        if not set(names).isdisjoint(LAGGED):
            planes |= self._lagged.planes(state.reference)
        return planes

    def _embedded(self, embedding: Embedding) -> Tensor:
        """The embedding of the newest frame, [B, 16, h, w]: carried, or made where nothing carries it."""
        if self._carried.embedding is not None and self._carried.cache.values is not None:
            return self._carried.cache.values
        state = self._ready()
        if state.embedded is None:
            state.embedded = embedding.planes(state.reference)
        return state.embedded

    def select(self) -> Selection:
        """The cells (or tokens) of the newest frame that deserve the budget, as `texvlm.select` chooses them of a full recompute.

        On the path "video" what the last selection kept is a little more likely to stay, and what moves wins.
        """
        state = self._ready()
        if self._selected is not None and self._selected[0] == self._content:
            return self._selected[1]
        config, memory = self.config, self._memory if self.config.memory else None
        with _ordinary(), self._timed("select"):
            far = config.bound is not None or config.schedule == "clusters" or config.footprint == "line"
            if far or config.allocates or config.scale == "mixed":
                needs = [name for name in _ROWS if name in needed_channels(config) | self._asked()]
                there = [name for name in needs if name not in self._local]
                data = interleave([state.local, *([self._other(there)] if there else [])], needs)
                whole = state.local
                texture = Texture.from_data(
                    data,
                    whole.height,
                    whole.width,
                    whole.levels,
                    [_ROWS[name].reducer for name in needs],
                    needs,
                    self._notes(needs),
                )
                run = Run(texture, config, self.k, self.cell, self._vector(), memory)
            else:
                run = StreamRun(
                    state.local, self._other, state.saliency(), state.cells, config, self.k, self.cell, self._vector(), memory
                )
            selection = run.mixed() if config.scale == "mixed" else run.cells()
        self._selected, self._memory = (self._content, selection), selection
        return selection

    def _asked(self) -> set[str]:
        """The embedding, where the query is put to it."""
        return set(EMBEDDING) if self.query is not None and (self.config.asks or self.config.allocates) else set()

    def _vector(self) -> Tensor | None:
        return None if not self._asked() or self.query is None else self.query.reshape(1, -1).to(self._ready().reference.device)

    def tokens(self, rest_level: int = 3) -> VideoTokens:
        """What a model is shown of the newest frame: `select().tokens` of red, green and blue, and which of them it has seen.

        A token is unchanged if nothing in its cell was dirty since the last call, moved if flow leads from its cell to one that was
        shown (flow is sought where something is carried, or with `follow=True`), and new otherwise.

        Args:
            rest_level: of the coarse picture under everything; 3 is 8 x smaller.
        """
        state, selection = self._ready(), self.select()
        with _ordinary():
            local = state.local
            if not set(COLOURS) <= set(local.names):
                local = build_channels(state.reference, channels=COLOURS, levels=local.levels, dtype=local.data.dtype)
            patches, uv, lod, rest = selection.tokens(local, rest_level)
            rgb = [local.index(name) for name in COLOURS]
            return VideoTokens(patches[:, :, rgb], uv, lod, rest[:, rgb], *state.seen.status(selection))

    def sample_foveated(self, fixation: Tensor, layout: FoveaLayout | None = None) -> FoveatedTokens:
        """`texvlm.sample_foveated` of the stream's texture; the fixation enters the histories (17, 37) with the next frame.

        Args:
            fixation: [B, F, 2] in uv, [B, 2] or [2].
            layout: see `FoveaLayout`; by default 273 tokens.
        """
        tokens = sample_foveated(self.texture, fixation, layout)
        picture = self._ready().reference
        points = gazes(coordinates("fixation", fixation, picture), len(picture))
        for name in HISTORIES:
            self._recall(name, checked_points("fixation", points, picture))
        return tokens

    def update_mipmaps(self) -> Texture:
        """Builds all levels of the stream's texture above its level 0, which somebody has written to."""
        return update_mipmaps(self.texture)

    def relevance(self) -> Tensor:
        """How well each place answers the query, [B, h, w] at the pitch of the embedding: see `texvlm.relevance`."""
        if self.query is None:
            raise ValueError("relevance needs a stream with query= and embedding=")
        self._ready()
        assert self.embedding is not None
        with _ordinary():
            return relevance(self._embedded(self.embedding), self.query)

    # ---- stopping and going on ----

    def state_dict(self) -> dict[str, Any]:
        """All that the next frame and selection depend on: tensors, numbers and names, for `torch.save`. Arguments are not in it.

        As in a module's, tensors are those of the stream: save or copy them before the next frame.
        """
        return {
            "arguments": self._arguments(),
            "state": None if self._state is None else self._state.state_dict(),
            "carried": self._carried.state_dict(),
            "lagged": self._lagged.state_dict(),
            "fixation": self._fixation,
            "memory": self._memory,
            "selected": self._selected is not None and self._selected[0] == self._content,
            "failed": self._failed,
            "frame": self.stats.frame,
            "since_key": self._since_key,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where another stream with the same arguments was. On a state that does not fit, this one stays as it is."""
        for what, wanted in self._arguments().items():
            if (got := state["arguments"][what]) != wanted:
                raise ValueError(f"state must be of a stream with {what} {wanted}, got {got}")
        kept = dict(self.__dict__)
        try:
            with _ordinary():
                self.reset()
                if state["state"] is not None:
                    self._state = self._begin(state["state"]["reference"])
                    self._state.load_state_dict(state["state"])
                self._carried.load_state_dict(state["carried"])
                self._lagged.load_state_dict(state["lagged"])
            self._fixation, self._memory, self._failed = state["fixation"], state["memory"], state["failed"]
            self.stats.frame, self._since_key = state["frame"], state["since_key"]
            if state["selected"] and self._memory is not None and self._memory.indices.shape[1] == self.k:
                self._selected = (self._content, self._memory)
        except BaseException:
            self.__dict__.update(kept)
            raise

    def _arguments(self) -> dict[str, Any]:
        """Those that shape what a state holds."""
        embedding = None if self._carried.embedding is None else self._carried.embedding.name
        numbers = {"cell": self.cell, "tile": self.tile, "embedding": embedding}
        return {"channels": ", ".join(self.names), "reads": ", ".join(sorted(self._wanted)), **numbers}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_texture": None, "_buffer": None}  # a copy shows its own frames
