"""Reading a document that is sharp in some places only: what is shown, what RapidOCR makes of it, and how much of the truth that is."""

from __future__ import annotations

import functools
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks._documents import Document

COARSE = 3
"""The level of the picture that lies under all blocks: 8x downscaled."""

Block = tuple[int, int, int, int]
"""(y, x, side, level): the pixels [y, y + side) x [x, x + side), reduced by 2^level."""


def blocks_of(selection: Any) -> list[Block]:
    """The first picture's tokens of a `texvlm.Selection`."""
    places, levels = selection.boxes()[0].tolist(), selection.lod[0].long().tolist()
    return [(y, x, selection.cell << level, level) for (y, x, _, _), level in zip(places, levels) if y >= 0]


def coarse_tokens(side: int, cell: int) -> int:
    """What the coarse picture costs, in tokens of cell x cell samples."""
    across = -(-(side >> COARSE) // cell)
    return across * across


def halved(plane: torch.Tensor) -> torch.Tensor:
    return F.avg_pool2d(plane[None], 2)[0]


def shown(image: torch.Tensor, blocks: list[Block]) -> torch.Tensor:
    """The picture uint8 [3, H, W] as these blocks show it over the coarse one.

    From coarse to fine, what is known so far is enlarged (cubic) by 2, and the blocks of that level are put on top: nothing
    that was not paid for is shown. H and W are multiples of 8.
    """
    levels = [image.float()]
    for _ in range(COARSE):
        levels.append(halved(levels[-1]))
    canvas = levels[COARSE]
    for level in reversed(range(COARSE)):
        height, width = levels[level].shape[1:]
        canvas = F.interpolate(canvas[None], (height, width), mode="bicubic", align_corners=False)[0].clamp(0, 255)
        for y, x, side, at in blocks:
            if at == level:
                part = np.s_[:, y >> level : (y + side) >> level, x >> level : (x + side) >> level]
                canvas[part] = levels[level][part]
    return canvas.round().byte()


def downscaled(image: torch.Tensor, tokens: int, cell: int) -> torch.Tensor:
    """The whole picture with as many pixels as these tokens have samples, enlarged (cubic) to its own size again."""
    height, width = image.shape[1:]
    by = min(1.0, (tokens * cell * cell / (height * width)) ** 0.5)
    size = (max(1, int(height * by)), max(1, int(width * by)))
    small = F.interpolate(image[None].float(), size, mode="bicubic", align_corners=False, antialias=True).clamp(0, 255)
    return F.interpolate(small, (height, width), mode="bicubic", align_corners=False)[0].clamp(0, 255).round().byte()


class Reader:
    """RapidOCR, whose weights come with its package. What it has read once is kept in a folder of temporary files."""

    def __init__(self, threads: int | None = None) -> None:
        import rapidocr

        self.threads = threads
        self.folder = Path(tempfile.gettempdir()) / "texvlm-documents"
        self.folder.mkdir(exist_ok=True)
        self.version = getattr(rapidocr, "__version__", "")

    @functools.cached_property
    def engine(self) -> Any:
        import rapidocr

        params: dict[str, Any] = {"Global.log_level": "error", "Global.max_side_len": 4096, "Global.use_cls": False}
        if self.threads:
            params["EngineConfig.onnxruntime.intra_op_num_threads"] = self.threads
        return rapidocr.RapidOCR(params=params)

    def detect(self, image: torch.Tensor) -> np.ndarray:
        """The outlines of lines [n, 4, 2] (x, y) that it finds."""
        return self._kept(image, "lines", read=False)[0]

    def read(self, image: torch.Tensor) -> tuple[np.ndarray, list[str]]:
        """The outlines of lines, and what they say to it."""
        return self._kept(image, "texts", read=True)

    def run(self, image: torch.Tensor, read: bool) -> tuple[np.ndarray, list[str]]:
        """The same, without looking at what is kept."""
        bgr = image.flip(0).permute(1, 2, 0).contiguous().numpy()
        found = self.engine(bgr, use_det=True, use_cls=False, use_rec=read)
        boxes = getattr(found, "boxes", None)
        if boxes is None or len(boxes) == 0:
            return np.zeros((0, 4, 2)), []
        return np.asarray(boxes, float), list(found.txts) if read else []

    def _kept(self, image: torch.Tensor, kind: str, read: bool) -> tuple[np.ndarray, list[str]]:
        digest = hashlib.sha256(image.contiguous().numpy().tobytes() + str((tuple(image.shape), self.version)).encode())
        file = self.folder / f"{digest.hexdigest()[:32]}.{kind}.json"
        if not file.exists():
            boxes, texts = self.run(image, read)
            file.write_text(json.dumps([boxes.tolist(), texts]))
        boxes, texts = json.loads(file.read_text())
        return np.array(boxes).reshape(-1, 4, 2), texts


def plain(text: str) -> str:
    """What counts: characters without blanks and case."""
    return "".join(text.split()).casefold()


def common(a: str, b: str) -> int:
    """The length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for x in a:
        before = 0
        for j, y in enumerate(b):
            before, row[j + 1] = row[j + 1], before + 1 if x == y else max(row[j + 1], row[j])
    return row[-1]


def recall(document: Document, outlines: np.ndarray, texts: list[str]) -> float:
    """The share of the characters of the true lines that were read.

    What was read belongs to the true line whose middle is nearest to its own, across the line; pieces of a line are put together in
    their order along it; of each line the longest common subsequence counts.
    """
    pieces: list[list[tuple[float, str]]] = [[] for _ in document.texts]
    corners = np.array(document.polygons)
    along, across = corners[:, 1] - corners[:, 0], corners[:, 3] - corners[:, 0]
    length, height = np.linalg.norm(along, axis=1), np.linalg.norm(across, axis=1)
    for outline, text in zip(outlines, texts):
        to = outline.mean(0) - corners[:, 0]
        at = (to * along).sum(1) / length
        off = np.abs((to * across).sum(1) / height - height / 2) / height
        off[(at < -height) | (at > length + height)] = np.inf
        if off.min() < 1:
            pieces[int(off.argmin())].append((float(at[off.argmin()]), text))
    got = sum(common(plain(true), plain("".join(t for _, t in sorted(found)))) for true, found in zip(document.texts, pieces))
    return got / max(1, sum(len(plain(true)) for true in document.texts))


UNREADABLE, READABLE = 4.0, 7.5
"""Pixels of a line, as it is shown, that the reader makes nothing of, and from which on it reads all: chosen to follow RapidOCR."""


def expected(document: Document, blocks: list[Block]) -> float:
    """What a reader would recall, without asking it: characters, by how high their line is as these blocks show it.

    At 60 places along each line, the least readable of three across its middle counts.
    """
    side, unit = document.image.shape[1], 8
    level = np.full((side // unit, side // unit), COARSE)
    for y, x, size, at in blocks:
        part = np.s_[y // unit : (y + size) // unit, x // unit : (x + size) // unit]
        level[part] = np.minimum(level[part], at)
    got = total = 0.0
    for corners, text in zip(document.polygons, document.texts):
        along = np.linspace(0.01, 0.99, 60)[:, None]
        across = np.array([0.25, 0.5, 0.75])[:, None, None]
        places = corners[0] + along * (corners[1] - corners[0]) + across * (corners[3] - corners[0])
        x, y = np.clip(places // unit, 0, side // unit - 1).astype(int).transpose(2, 0, 1)
        height = float(np.linalg.norm(corners[3] - corners[0])) / 2.0 ** level[y, x]
        share = np.clip((height - UNREADABLE) / (READABLE - UNREADABLE), 0, 1).min(0).mean()
        got, total = got + share * len(plain(text)), total + len(plain(text))
    return got / max(1, total)
