"""The film that `video` writes: four panels a frame, what is kept, the film, scores and what a model sees, and how it is encoded."""

from __future__ import annotations

import importlib
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from texvlm.cli import Complaint
from texvlm.cli.drawing import dimmed
from texvlm.cli.page import Array
from texvlm.cli.view import token_of_cells

Image8 = npt.NDArray[np.uint8]

LARGEST, NARROWEST = 2_400_000, 480  # pixels of a frame that is written; its least width, for its line of text
WIDE = 16 / 9  # the shape of a frame that is aimed at
BAR, TEXT = 30, 15  # pixels: the line below the panels, and its letters
REST = 3  # the level of what is seen of the rest: 8 x smaller
TITLES = ("what is kept", "the film", "scores of what is kept", "what a model sees")
HEAT = np.array(
    # The bright part of the map inferno, which `view` has, from 3/8 on, by S. van der Walt and N. Smith (CC0).
    [(120, 28, 109), (165, 44, 96), (207, 68, 70), (237, 105, 37), (251, 155, 6), (252, 255, 164)],
    dtype=np.float32,
)
DARK: Image8 = (255 * dimmed(np.linspace(0, 1, 256, dtype=np.float32))).astype(np.uint8)
"""What stands back, by its light."""


class Panels:
    """Draws the panels of each frame of a film of one size."""

    def __init__(self, height: int, width: int, cell: int) -> None:
        shapes = [(rows, 4 // rows) for rows in (1, 2, 4)]
        self.rows, self.columns = min(shapes, key=lambda s: abs(np.log(width * s[1] / (height * s[0]) / WIDE)))
        self.level, self.times = 0, 1
        while 4 * (height >> self.level) * (width >> self.level) > LARGEST:
            self.level += 1
        while self.level == 0 and width * self.columns * self.times < NARROWEST:
            self.times += 1
        self.size = (max(height * self.times >> self.level, 1), max(width * self.times >> self.level, 1))
        self.cells = [((np.arange(n) + 0.5) * full / n).astype(int) // cell for n, full in zip(self.size, (height, width))]
        self.places = [((np.arange(n) + 0.5) * full / n).astype(int) for n, full in zip(self.size, (height, width))]
        self.range: tuple[float, float] | None = None
        self.letters = _letters()
        self.titles = [self._written(title) for title in TITLES]

    def draw(self, frame: Tensor, selection: Any, line: str) -> Image8:
        """A frame [3, H, W] and what is kept of it as one picture [h, w, 3] of even sides, with a line of text."""
        import texvlm

        colours = texvlm.Texture(frame, levels=min(texvlm.level_count(*frame.shape[1:]), max(self.level, REST) + 1))
        picture = self._sampled(colours, self.level)
        rows, columns = self.cells
        painted = _tokens(selection)[rows[:, None], columns]
        inside = painted >= 0
        red, green, blue = (picture[..., c].astype(np.uint16) for c in range(3))
        light = (77 * red + 150 * green + 29 * blue) >> 8
        dark = DARK.take(light, axis=0)
        heat = dark.copy()
        heat[inside] = self._heat(selection)[painted[inside]] * (158 + 97 / 255 * light[inside][:, None])
        panels = [np.where(inside[..., None], picture, dark), picture, heat, self._seen(colours, picture, selection, painted)]
        return self._together(panels, line)

    def _sampled(self, colours: Any, level: int) -> Image8:
        """A level of the picture in the size of a panel [h, w, 3]: smooth where it is coarser."""
        pixels = colours.level(min(level, colours.levels - 1))
        if level > self.level:
            pixels = F.interpolate(pixels, self.size, mode="bilinear", align_corners=False)
        found: Image8 = (255 * pixels[0].permute(1, 2, 0) + 0.5).to(torch.uint8).numpy()
        return found if found.shape[:2] == self.size else found[self.places[0][:, None], self.places[1]]

    def _seen(self, colours: Any, picture: Image8, selection: Any, painted: npt.NDArray[np.int64]) -> Image8:
        """Kept tokens at their level over the coarse rest."""
        lods = np.append(selection.lod[0, : int(selection.count[0])].cpu().numpy().astype(int), REST)
        levels, seen = lods[painted], self._sampled(colours, REST)
        for level in set(lods.tolist()) - {REST}:
            finer = picture if level <= self.level else self._sampled(colours, level)
            seen = np.where((levels == level)[..., None], finer, seen)
        return seen

    def _heat(self, selection: Any) -> Array:
        """The colour of each token. Its range is that of all scores so far, so that colours do not flicker."""
        count = int(selection.count[0])
        scores = selection.score[0, :count].detach().float().cpu().numpy()
        if count:
            low, high = float(scores.min()), float(scores.max())
            self.range = (low, high) if self.range is None else (min(low, self.range[0]), max(high, self.range[1]))
        low, high = self.range or (0.0, 1.0)
        at = (scores - low) / max(high - low, 1e-12)
        stops = np.linspace(0, 1, len(HEAT))
        return np.stack([np.interp(at, stops, HEAT[:, c] / 255) for c in range(3)], axis=-1).astype(np.float32)

    def _together(self, panels: list[Image8], line: str) -> Image8:
        (height, width), bar = self.size, BAR if self.letters else 0
        whole = np.zeros((self.rows * height + bar, self.columns * width, 3), dtype=np.uint8)
        for index, panel in enumerate(panels):
            y, x = index // self.columns * height, index % self.columns * width
            whole[y : y + height, x : x + width] = panel
            if height > 4 * BAR:
                _put(whole[y : y + height, x : x + width], self.titles[index])
        if self.letters:
            _put(whole[-BAR:], self._written(line))
        return np.pad(whole, ((0, whole.shape[0] % 2), (0, whole.shape[1] % 2), (0, 0)))

    def _written(self, text: str) -> Array:
        """A text as coverage [BAR, w] in [0, 1]; nothing without Pillow."""
        if self.letters is None:
            return np.zeros((0, 0), dtype=np.float32)
        draw, font = self.letters
        image = draw.new("L", (int(font.getlength(text)) + 20, BAR))
        importlib.import_module("PIL.ImageDraw").Draw(image).text((10, BAR // 2), text, fill=255, font=font, anchor="lm")
        covered: Array = np.asarray(image, dtype=np.float32) / np.float32(255)
        return covered


def _letters() -> tuple[Any, Any] | None:
    """Pillow's module of images and its font."""
    try:
        return importlib.import_module("PIL.Image"), importlib.import_module("PIL.ImageFont").load_default(TEXT)
    except (ImportError, OSError, TypeError):
        return None


def _put(onto: Image8, text: Array) -> None:
    """Light letters on a dark plate in the upper left corner, in place."""
    height, width = (min(a, b) for a, b in zip(onto.shape, text.shape))
    plate, text = onto[:height, :width], text[:height, :width, None]
    plate[:] = 0.35 * plate * (1 - text) + 238 * text


def _tokens(selection: Any) -> npt.NDArray[np.int64]:
    """`token_of_cells`, faster where no token covers several cells."""
    count = int(selection.count[0])
    if count == 0 or bool(selection.lod[0, :count].any()):
        return np.asarray(token_of_cells(selection))
    found = torch.full((selection.grid[0] * selection.grid[1],), -1, dtype=torch.int64)
    found[selection.indices[0, :count].cpu()] = torch.arange(count)
    return np.asarray(found.view(selection.grid))


class Writer:
    """Encodes pictures [h, w, 3] of even sides, each with its time, in H.264. What has been written is a whole film once it is closed."""

    TICKS = 90_000

    def __init__(self, path: Path, rate: float) -> None:
        try:
            self.av: Any = importlib.import_module("av")
        except ImportError:
            raise Complaint("writing films needs PyAV: pip install 'texvlm[video]'") from None
        self.path, self.rate = path, Fraction(rate).limit_denominator(1001)
        self.stream: Any = None
        self.last = -1
        try:
            self.container = self.av.open(str(path.resolve()), "w")
        except self._errors() as error:
            raise self._cannot(error) from None

    def _errors(self) -> tuple[type[Exception], ...]:
        return OSError, ValueError, self.av.error.FFmpegError

    def _cannot(self, error: Exception) -> Complaint:
        return Complaint(f"cannot write {self.path}: {getattr(error, 'strerror', None) or error}")

    def write(self, picture: Image8, seconds: float) -> None:
        """Appends a picture, shown from then on."""
        try:
            if self.stream is None:
                self.stream = self.container.add_stream("libx264", rate=self.rate, options={"crf": "20", "preset": "veryfast"})
                self.stream.height, self.stream.width = picture.shape[:2]
                self.stream.pix_fmt = "yuv420p"
                self.stream.codec_context.time_base = Fraction(1, self.TICKS)
            frame = self.av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            self.last = max(round(seconds * self.TICKS), self.last + 1)
            frame.pts, frame.time_base = self.last, Fraction(1, self.TICKS)
            self.container.mux(self.stream.encode(frame))
        except self._errors() as error:
            raise self._cannot(error) from None

    def close(self) -> None:
        """Writes what the encoder still holds, and the end of the file."""
        try:
            if self.stream is not None:
                self.container.mux(self.stream.encode())
            self.container.close()
        except self._errors() as error:
            raise self._cannot(error) from None
