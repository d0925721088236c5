"""`Select`: what a training loop is fed, from a picture's bytes to the patches that a budget keeps, in any process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import torch
from torch import Tensor

from texvlm._ext import integer
from texvlm.cascade import select
from texvlm.data.decoding import DECODERS, decode, jpeg_decoder
from texvlm.packing import pack_cells
from texvlm.pictures import as_rgb

if TYPE_CHECKING:
    from texvlm.paths import CascadeConfig
    from texvlm.pictures import ImageLike
    from texvlm.selection import Selection

Source: TypeAlias = Union[bytes, bytearray, memoryview, str, "PathLike[str]", "ImageLike"]

PER_TOKEN = ("indices", "score", "levels", "positions", "patches")
"""What a sample has a row of for each token, or merge^2 rows (patches)."""


class Select:
    """A picture in, the cells that deserve a budget out, as plain tensors of one size: for datasets, in any number of processes.

    It pickles, holds no state, and gives the same in every process. It runs on the CPU, without gradients.

    Args:
        k: tokens that a picture keeps, see `texvlm.select`.
        cell: their side in pixels.
        path: how they are chosen.
        query: what is looked for, where the path asks for it.
        merge: patches along the side of a cell, which it is a multiple of: Qwen3-VL's tower reads cell=32, merge=2.
        temporal: times that a picture is repeated within a patch, as `pack_cells` does.
        mean: is subtracted from values in [0, 1], and they are divided by `std`: see `pack_cells`.
        std: see mean.
        dtype: of the patches. torch.uint8: pixels 0 to 255, neither `mean` nor `std`; a quarter of the bytes between processes, to be
            normalised where the model is.
        max_size: a longer side is shrunk to this many pixels, those of files as the command line does it. None: never.
        decoder: of bytes: "auto" (the first of the following that is installed), "torchcodec", "simplejpeg", "pillow". The first two
            read plain JPEGs, several times as fast; the rest is always Pillow's. The pixels are the same.
        **options: further arguments of `texvlm.select`, such as scorer= or weights=.

    Call it with the bytes of a picture file, its path, a PIL image, a uint8 array [H, W, C] or a tensor [C, H, W], uint8 or floating
    point in [0, 1]. Grey becomes RGB. It returns

        indices    int64 [k], best first, in the grid of ceil(H / cell) x ceil(W / cell), row by row; -1 beyond `count`. With path=
                   "multiscale" a token is named by its upper left cell
        count      int64 [], how many there are
        score      float32 [k], -inf beyond count
        levels     int64 [k]: a token of level l covers 2^l x 2^l cells; 0 on all paths but "multiscale"
        positions  float32 [k, 2], uv of the centres (x, y), in [0, 1]; -1 beyond count
        patches    [k * merge^2, 3 * temporal * (cell / merge)^2], rows of `pack_cells`; 0 beyond count. The picture's last row and
                   column are repeated where it ends within a cell
        grid       int64 [2], rows and columns of cells
        size       int64 [2], height and width of the picture that was looked at, upright

    Raises:
        ValueError: (when called) a broken picture, or an argument that `texvlm.select` refuses.
        ImportError: the decoder is not installed.

    In a Dataset, where torch's own collate makes [B, k, ...] of samples, and `texvlm.data.collate` a batch without padding:

        loader = DataLoader(Files(paths, Select()), batch_size=32, num_workers=8, worker_init_fn=texvlm.data.initialise_worker)

    with `datasets` of Hugging Face, WebDataset and Ray, which bring the bytes themselves:

        dataset.cast_column("image", datasets.Image(decode=False)).map(lambda row: select(row["image"]["bytes"]))
        webdataset.WebDataset(urls).to_tuple("jpg", "cls").map_tuple(select, int)
        ray.data.read_binary_files(folder).map(lambda row: {name: value.numpy() for name, value in select(row["bytes"]).items()})

    Example:
        >>> import torch
        >>> from texvlm.data import Select
        >>> sample = Select(k=4, cell=16)(torch.rand(3, 40, 64))
        >>> sample["patches"].shape, sample["grid"].tolist()
        (torch.Size([4, 768]), [3, 4])
    """

    def __init__(
        self,
        k: int = 273,
        cell: int = 16,
        path: str | CascadeConfig = "salience",
        query: str | Tensor | None = None,
        *,
        merge: int = 1,
        temporal: int = 1,
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        std: Sequence[float] = (0.5, 0.5, 0.5),
        dtype: torch.dtype = torch.float32,
        max_size: int | None = None,
        decoder: str = "auto",
        **options: Any,
    ) -> None:
        self.k, self.cell, self.merge = integer("k", k, 0), integer("cell", cell, 1), integer("merge", merge, 1)
        if self.cell % self.merge:
            raise ValueError(f"cell must be a multiple of merge, got {cell} and {merge}")
        if dtype != torch.uint8 and not dtype.is_floating_point:
            raise ValueError(f"dtype must be floating point or torch.uint8, got {dtype}")
        if decoder not in DECODERS:
            raise ValueError(f"decoder must be one of {', '.join(map(repr, DECODERS))}, got {decoder!r}")
        if decoder != "auto":
            jpeg_decoder(decoder)
        self.path, self.query, self.options = path, query, options
        self.temporal, self.mean, self.std, self.dtype = integer("temporal", temporal, 1), tuple(mean), tuple(std), dtype
        self.max_size = None if max_size is None else integer("max_size", max_size, 1)
        self.decoder = decoder

    @torch.no_grad()
    def __call__(self, source: Source) -> dict[str, Tensor]:
        """One picture."""
        image = self.picture(source)
        chosen = select(image, self.k, self.cell, self.path, self.query, **self.options)
        return {
            "indices": _padded(chosen.indices[0], self.k, -1),
            "count": chosen.count[0],
            "score": _padded(chosen.score[0], self.k, -torch.inf),
            "levels": _padded(chosen.lod[0].long(), self.k, 0),
            "positions": _padded(chosen.centres()[0], self.k, -1),
            "patches": self._patches(image, chosen),
            "grid": torch.tensor(chosen.grid),
            "size": torch.tensor(chosen.size),
        }

    def picture(self, source: Source) -> Tensor:
        """The picture [3, H, W] that is looked at: decoded, RGB, shrunk."""
        if isinstance(source, (str, PathLike)):
            source = Path(source).read_bytes()
        decoded = (
            decode(bytes(source), self.decoder, self.max_size) if isinstance(source, (bytes, bytearray, memoryview)) else source
        )
        image = as_rgb(decoded)
        if len(image) != 1:
            raise ValueError(f"one picture at a time, got a batch of {len(image)}")
        height, width = image.shape[2:]
        if self.max_size is not None and max(height, width) > self.max_size:
            size = [max(1, round(side * self.max_size / max(height, width))) for side in (height, width)]
            image = torch.nn.functional.interpolate(image, size, mode="bicubic", antialias=True)
        return image[0].contiguous()  # planes are read twice as fast as interleaved colours

    def _patches(self, image: Tensor, chosen: Selection) -> Tensor:
        """Rows of the kept cells."""
        row, column = chosen.indices[0].div(chosen.grid[1], rounding_mode="floor"), chosen.indices[0] % chosen.grid[1]
        level = chosen.lod[0].long()
        cells = torch.where(chosen.indices[0, :, None] < 0, -1, torch.stack([level, row >> level, column >> level], dim=-1))
        raw = self.dtype == torch.uint8
        rows = pack_cells(
            _continued(image, self.cell),
            _padded(cells, self.k, -1),
            patch=self.cell // self.merge,
            merge=self.merge,
            temporal=self.temporal,
            mean=(0.0,) * 3 if raw else self.mean,
            std=(1.0,) * 3 if raw else self.std,
            rescale=(1.0 if image.dtype == torch.uint8 else 255.0) if raw else None,
        )
        return (rows.round_() if raw else rows).to(self.dtype)

    def __repr__(self) -> str:
        given = {name: value for name, value in vars(self).items() if name != "options"} | self.options
        return f"Select({', '.join(f'{name}={value!r}' for name, value in given.items())})"


def _padded(values: Tensor, k: int, filler: float) -> Tensor:
    """[k, ...]: a picture of fewer than k cells has fewer entries."""
    missing = k - len(values)
    return values if missing <= 0 else torch.cat([values, values.new_full((missing, *values.shape[1:]), filler)])


def _continued(image: Tensor, cell: int) -> Tensor:
    """The picture up to whole cells: its last row and column are repeated."""
    for dim in (1, 2):
        side = image.shape[dim]
        if side % cell:
            image = image.index_select(dim, torch.arange(-(-side // cell) * cell).clamp(max=side - 1))
    return image


def collate(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A batch without padding: the tokens of all pictures one after another, as attention over sequences of several lengths takes them.

    Where all pictures have k tokens, torch's `default_collate`, which makes [B, k, ...], serves as well.

    Args:
        samples: of `Select`. Further keys, such as labels, go through `default_collate`.

    Returns:
        indices, score, levels, positions: [N, ...], N the sum of all counts. patches: [N * merge^2, ...]. count, grid, size: [B, ...].
        cu_seqlens: int32 [B + 1], where the tokens of each picture begin, and N.

    Example:
        >>> import torch
        >>> from texvlm.data import Select, collate
        >>> batch = collate([Select(k=4)(torch.rand(3, 16, 16 * n)) for n in (2, 8)])
        >>> batch["patches"].shape, batch["cu_seqlens"].tolist()
        (torch.Size([6, 768]), [0, 2, 6])
    """
    from torch.utils.data import default_collate

    rest = default_collate([{name: value for name, value in s.items() if name not in PER_TOKEN} for s in samples])
    ends = torch.nn.functional.pad(rest["count"].cumsum(0), (1, 0)).to(torch.int32)
    batch: dict[str, Any] = {**rest, "cu_seqlens": ends}
    for name in PER_TOKEN:
        batch[name] = torch.cat([s[name][: int(s["count"]) * (len(s[name]) // max(1, len(s["indices"])))] for s in samples])
    return batch


def initialise_worker(worker: int = 0) -> None:
    """One thread for a process that works beside others on the same cores: `worker_init_fn` of a DataLoader, or called in an actor.

    Processes that each take all cores starve each other. A process that was forked after its parent computed in several threads would
    also wait for threads that it does not have.

    Args:
        worker: its number, which a DataLoader hands in.
    """
    torch.set_num_threads(1)
