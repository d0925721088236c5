"""A processor's rows of pixels cut to what is chosen, and what is kept as fields that go with them to the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from texvlm.digits import DigitsEmbedding
from texvlm.embedding import Embedding
from texvlm.qwen.families import family_of, sizes_of_config
from texvlm.qwen.geometry import Geometry
from texvlm.qwen.pictures import MODALITIES, Modality, Picture
from texvlm.qwen.preparation import Preparation
from texvlm.qwen.selectors import Choice, Selecting
from texvlm.vllm.options import PATHS, Options, named

# Rows of kept groups, (frame, cell), of all pictures of a modality, and how many of each picture.
KEPT, COUNT = "{}_kept", "{}_kept_count"


class Chooser:
    """Chooses from pictures as `QwenVLAdapter` does in mode "prune_pre", by what it is made of, and says where they lie.

    Args:
        config: the model's, of transformers.
        server: what the server says in `mm_processor_kwargs`.
    """

    def __init__(self, config: Any, server: Mapping[str, Any]) -> None:
        self.config, self.server = config, server
        self.family, self.sizes = family_of(config), sizes_of_config(config)
        self._embedding: Embedding | None = None
        self._preparations: dict[str, Preparation] = {}
        options = self.options({})
        if options.active:
            self.preparation(options.path)  # what is wrong with it is said at the start

    def options(self, request: Mapping[str, Any]) -> Options:
        """What counts for a request."""
        return Options.of(self.server, request)

    def preparation(self, path: str) -> Preparation:
        """What prepares by a path; made once."""
        if path not in self._preparations:
            selecting = Selecting(
                path if path in PATHS else named("texvlm_path", path), self.sizes.cell, embedding=self.embedding()
            )
            if selecting.mixed:
                raise ValueError(f"texvlm_path must keep tokens of one level, got {path!r} with several")
            self._preparations[path] = Preparation(object, self.config, self.family, self.sizes, selecting, None)
        return self._preparations[path]

    def embedding(self) -> Embedding | None:
        """What reads queries."""
        given = self.server.get("texvlm_embedding")
        if self._embedding is None and given is not None:
            found = DigitsEmbedding() if given == "digits" else named("texvlm_embedding", given)
            self._embedding = found if isinstance(found, Embedding) else Embedding(found)
        return self._embedding

    @torch.no_grad()
    def cut(self, data: Any, options: Options) -> None:
        """Cuts what a processor returned, in place: rows to those of kept groups, beside `*_kept` and `*_kept_count`.

        Args:
            data: with `pixel_values` [rows, numbers] and `image_grid_thw` [pictures, 3], or those of videos, or both, or none.
            options: of the request.
        """
        present = [m for m in MODALITIES if data.get(m.pixels) is not None]
        for modality in present:
            grids = [(int(t), int(h), int(w)) for t, h, w in torch.as_tensor(data[modality.grid]).tolist()]
            parts = data[modality.pixels].split([t * h * w for t, h, w in grids])
            rows, kept, counts = [], [], []
            for grid, part, mine in zip(grids, parts, options.each(len(grids))):
                picture = Picture(modality, grid, part, None)
                preparation = self.preparation(mine.path)
                groups = picture.groups(self.sizes)
                if mine.budget(groups) == groups and preparation.selecting.keeps_all:
                    every = torch.arange(groups)
                    picture.choices = [Choice(every, torch.zeros_like(every))] * grid[0]
                    rows.append(part)
                else:
                    preparation.choose(picture, mine.budget(groups), self._query(mine.query))
                    rows += [preparation.rows(picture, choice, f) for f, choice in enumerate(picture.choices)]
                cells = [torch.stack([torch.full_like(c.cells, f), c.cells], 1) for f, c in enumerate(picture.choices)]
                kept += cells
                counts.append(sum(map(len, cells)))
            data[modality.pixels] = rows[0] if len(rows) == 1 else torch.cat(rows)
            data[KEPT.format(modality.name)] = torch.cat(kept)
            data[COUNT.format(modality.name)] = torch.tensor(counts)

    @staticmethod
    def _query(query: Any) -> Any:
        """A vector as a tensor."""
        return torch.tensor(query, dtype=torch.float32) if isinstance(query, (list, tuple)) else query

    def geometry(self, modality: Modality, grids: list[list[int]], kept: list[Tensor]) -> Geometry:
        """Where the kept groups of pictures lie, as the tower wants to be told.

        Args:
            modality: of the pictures.
            grids: frames, rows and columns of each, in patches.
            kept: [K, 2] of each, (frame, cell).
        """
        preparation = self.preparation("uniform")
        pictures = []
        for (t, h, w), mine in zip(grids, kept):
            cells = [mine[mine[:, 0] == f, 1] for f in range(t)]
            choices = [Choice(c, torch.zeros_like(c)) for c in cells]
            pictures.append(Picture(modality, (t, h, w), None, None, choices=choices))
        return Geometry.join([preparation.geometry(picture) for picture in pictures])


def frames(kept: Tensor, count: int) -> list[int]:
    """How many groups each of so many frames keeps."""
    found: list[int] = torch.bincount(kept[:, 0], minlength=count).tolist()
    return found


def shortened(ids: list[int], token: int, counts: list[int]) -> list[int]:
    """Ids in which the first run of a token is so long, the second so long, and so on."""
    out: list[int] = []
    run, place = 0, 0
    while place < len(ids):
        end = place
        while end < len(ids) and ids[end] == token:
            end += 1
        if end == place:
            out.append(ids[place])
            place += 1
            continue
        out += [token] * counts[run]
        run, place = run + 1, end
    if run != len(counts):
        raise ValueError(f"a prompt's pictures must be {len(counts)} runs of tokens, got {run}")
    return out
