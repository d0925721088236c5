"""What reads films for `frames`: PyAV, torchcodec and OpenCV, and Pillow for animations and folders of pictures.

A decoder is opened anew for each pass over a film. `read` yields (seconds, pixels) in the order in which they are shown, pixels being uint8
[H, W, 3] in dense rows, and returns how many frames at its end are missing.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Pixels: TypeAlias = npt.NDArray[np.uint8]
Size: TypeAlias = tuple[int, int]
Reading: TypeAlias = Generator[tuple[float, Pixels], None, int]

RATE = 25.0
"""Frames a second where nothing says so, as in a folder of pictures."""

LATE = 0.5
"""Seconds that must be missing at the end of a film before it counts as cut off, where its container does not count frames."""

TEXT = {"adf", "bin", "idf", "tty", "xbin"}
"""Formats by which FFmpeg shows a text file as a film."""


class Decoder:
    """A way to read one film.

    Attributes:
        rate: frames a second, in the mean.
        count: how many frames its container says that it has, or None.
    """

    name: str
    rate: float = RATE
    count: int | None = None

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, size: Size | None, every: int) -> Reading:
        """Each `every`-th frame, resized to `size` (height, width)."""
        raise NotImplementedError

    def refused(self, why: object) -> ValueError:
        """What is raised about a file that is no film."""
        reason = " ".join(str(why).split())
        return ValueError(f"{self.path} is not a film that {self.name} can read: {reason}")


def turned(pixels: Pixels, degrees: float) -> Pixels:
    """The picture turned counter-clockwise by the nearest multiple of 90 degrees, in dense rows."""
    return np.ascontiguousarray(np.rot90(pixels, round(degrees / 90) % 4))


class PyAV(Decoder):
    """FFmpeg's own libraries, which come in PyAV's wheel. Decodes in threads of its own, ahead of who reads."""

    name = "PyAV"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.av: Any = importlib.import_module("av")
        self.one: dict[str, int] = {"threads": 1} if int(self.av.__version__.split(".")[0]) >= 17 else {}
        with self.opened() as (_, stream):
            self.count = stream.frames or None
            self.rate = float(stream.average_rate or stream.guessed_rate or RATE)

    @contextmanager
    def opened(self) -> Iterator[tuple[Any, Any]]:
        """The container and its film; pictures that are attached to music are none."""
        try:  # an absolute path is never taken for the name of a protocol
            container = self.av.open(str(self.path.resolve()), metadata_errors="replace")
        except (self.av.error.FFmpegError, ValueError) as error:
            raise self.refused(getattr(error, "strerror", None) or error) from None
        with container:
            if container.format.name in TEXT:
                raise self.refused("it holds text")
            attached = self.av.stream.Disposition.attached_pic
            films = [stream for stream in container.streams.video if not stream.disposition & attached]
            if not films:
                raise self.refused("it holds no moving picture")
            films[0].thread_type = "AUTO"
            yield container, films[0]

    def read(self, size: Size | None, every: int) -> Reading:
        """Rotation is honoured. Where the size changes within a film, all frames get that of the first."""
        reformatter = self.av.video.reformatter.VideoReformatter()
        decoded, begin, seconds, duration = 0, None, 0.0, 0.0
        broken: list[object] = []
        with self.opened() as (container, stream):
            for frame in self._frames(container, stream, broken):
                at = decoded / self.rate if frame.time is None else frame.time
                begin = at if begin is None else begin
                if decoded and at - begin < seconds:  # films one after the other in one file, each with a clock of its own
                    begin = at - seconds - duration
                seconds, duration = at - begin, float((frame.duration or 0) * (frame.time_base or 0)) or 1 / self.rate
                if decoded % every == 0:
                    sideways = round(frame.rotation / 90) % 2 == 1
                    size = size or ((frame.width, frame.height) if sideways else (frame.height, frame.width))
                    height, width = size[::-1] if sideways else size
                    # One thread: a pool for each frame would cost more than the conversion.
                    rgb = reformatter.reformat(frame, width, height, "rgb24", interpolation="AREA", **self.one)
                    yield seconds, turned(rgb.to_ndarray(), frame.rotation)
                decoded += 1
            late = self._seconds(container, stream) - (seconds + duration)
        if self.count is not None:
            cut_off = bool(broken) or late > 1.5 / self.rate
            return max(self.count - decoded, 0) if cut_off else 0  # frames that an edit list hides are not missing
        return max(len(broken), round(late * self.rate) if late > LATE else 0)

    def _frames(self, container: Any, stream: Any, broken: list[object]) -> Iterator[Any]:
        """All that can be decoded; what cannot be is noted in `broken`."""
        packets = container.demux(stream)
        while True:
            try:
                packet = next(packets)
            except StopIteration:
                return
            except self.av.error.FFmpegError as error:  # the rest cannot be found
                broken.append(error)
                return
            try:
                yield from packet.decode()
            except self.av.error.FFmpegError as error:
                broken.append(error)

    def _seconds(self, container: Any, stream: Any) -> float:
        """How long the film is said to be; 0 where that is not known of the film itself."""
        if stream.duration:
            return float(stream.duration * stream.time_base)
        if found := re.fullmatch(r"(\d+):(\d+):([\d.]+)", stream.metadata.get("DURATION", "")):
            hours, minutes, seconds = (float(part) for part in found.groups())
            return 3600 * hours + 60 * minutes + seconds
        alone = len(container.streams) == 1
        return float(Fraction(container.duration, self.av.time_base)) if alone and container.duration else 0.0


class OpenCV(Decoder):
    """OpenCV's VideoCapture, which honours rotation by itself."""

    name = "OpenCV"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.cv2: Any = importlib.import_module("cv2")
        film = self._open()
        self.rate = film.get(self.cv2.CAP_PROP_FPS) or RATE
        self.count = max(int(film.get(self.cv2.CAP_PROP_FRAME_COUNT)), 0) or None
        film.release()

    def _open(self) -> Any:
        film = self.cv2.VideoCapture(str(self.path.resolve()))
        if not film.isOpened():
            raise self.refused("it does not open")
        return film

    def read(self, size: Size | None, every: int) -> Reading:
        """Its count may be an estimate: less than 2 % too few do not count as missing."""
        film, decoded = self._open(), 0
        try:
            while film.grab():
                if decoded % every == 0:
                    seconds = max(film.get(self.cv2.CAP_PROP_POS_MSEC) / 1000, 0.0)
                    there, pixels = film.retrieve()
                    if not there:
                        break
                    size = size or pixels.shape[:2]
                    if pixels.shape[:2] != size:
                        pixels = self.cv2.resize(pixels, size[::-1], interpolation=self.cv2.INTER_AREA)
                    yield seconds, self.cv2.cvtColor(pixels, self.cv2.COLOR_BGR2RGB)
                decoded += 1
        finally:
            film.release()
        missing = (self.count or 0) - decoded
        return missing if missing > 1 + 0.02 * decoded else 0


LAST_CPU = (0, 13)
"""From the next minor on, torchcodec's wheels on PyPI want the libraries of a torch with CUDA."""


def load_torchcodec() -> Any:
    """The module `torchcodec.decoders`.

    Raises:
        ImportError: it does not load; where that is for want of CUDA, with what to install instead.
    """
    try:
        return importlib.import_module("torchcodec.decoders")
    except (OSError, RuntimeError) as error:  # what a library that does not load raises
        reason = str(error).strip().partition("\n")[0]
        if torch.version.cuda is None and _minor("torchcodec") > LAST_CPU:
            last = ".".join(map(str, LAST_CPU))
            reason += f": it is a build for CUDA, and torch is CPU-only: pip install 'torchcodec=={last}.*', or pip install av"
        raise ImportError(reason) from error


def _minor(package: str) -> Size:
    """The first two numbers of its version; (0, 0) where it is not installed."""
    try:
        found = re.match(r"(\d+)\.(\d+)", importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        found = None
    return (int(found[1]), int(found[2])) if found else (0, 0)


class TorchCodec(Decoder):
    """torchcodec, over the FFmpeg of the system."""

    name = "torchcodec"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.decoders: Any = load_torchcodec()
        film = self._open()
        self.rate = float(film.metadata.average_fps or RATE)
        self.count = len(film)

    def _open(self) -> Any:
        try:
            return self.decoders.VideoDecoder(str(self.path), dimension_order="NHWC", num_ffmpeg_threads=0)
        except (RuntimeError, ValueError) as error:
            raise self.refused(str(error).splitlines()[0]) from None

    def read(self, size: Size | None, every: int) -> Reading:
        """It counts packets when it opens a file: what is missing of a file that is cut off is not known."""
        film, begin = self._open(), None
        for index in range(0, len(film), every):
            try:
                frame = film.get_frame_at(index)
            except (RuntimeError, IndexError):
                return len(film) - index
            begin = frame.pts_seconds if begin is None else begin
            pixels = frame.data.numpy()
            size = size or pixels.shape[:2]
            yield frame.pts_seconds - begin, pixels if pixels.shape[:2] == size else _resized(pixels, size)
        return 0


def _resized(pixels: Pixels, size: Size) -> Pixels:
    """By PyTorch, for a decoder that does not resize."""
    planes = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    planes = torch.nn.functional.interpolate(planes, size, mode="bicubic", antialias=True, align_corners=False)
    return np.ascontiguousarray(planes[0].permute(1, 2, 0).numpy())


class Pictures(Decoder):
    """Pillow: an animation, a still picture, or a folder of pictures in the order of their names, numbers counted as such."""

    name = "Pillow"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.image: Any = importlib.import_module("PIL.Image")
        if path.is_dir():
            known = self.image.registered_extensions()
            found = [file for file in path.iterdir() if file.suffix.lower() in known and not file.name.startswith(".")]
            self.files = sorted(found, key=_natural)
            self.count = len(self.files)
            return
        self.files = [path]
        try:
            with self.image.open(path) as film:
                self.count = getattr(film, "n_frames", 1)
                self.rate = 1000 / (film.info.get("duration") or 1000 / RATE)
        except (OSError, SyntaxError, ValueError, EOFError) as error:
            raise self.refused(error) from None

    def read(self, size: Size | None, every: int) -> Reading:
        """Pictures of a folder have one size, or get one."""
        if not self.path.is_dir():
            return (yield from self._animation(size, every))
        missing, first = 0, None
        for index, path in enumerate(self.files[::every]):
            try:
                with self.image.open(path) as file:
                    pixels = self._pixels(file, size)
            except (OSError, SyntaxError, ValueError, EOFError):
                missing += 1
                continue
            first = first or (path, pixels.shape)
            if pixels.shape != first[1]:
                (h, w, _), (height, width, _) = pixels.shape, first[1]
                raise ValueError(
                    f"pictures differ in size: {path} is {w} x {h}, {first[0].name} {width} x {height}; size= makes them one"
                )
            yield index * every / self.rate, pixels
        return missing

    def _animation(self, size: Size | None, every: int) -> Reading:
        seconds = 0.0
        with self.image.open(self.path) as film:
            for index in range(self.count or 1):
                try:
                    film.seek(index)
                    pixels = self._pixels(film, size) if index % every == 0 else None
                except (OSError, SyntaxError, ValueError, EOFError):
                    return (self.count or 1) - index
                if pixels is not None:
                    yield seconds, pixels
                seconds += (film.info.get("duration") or 1000 / RATE) / 1000
        return 0

    def _pixels(self, file: Any, size: Size | None) -> Pixels:
        """Upright, in RGB; transparency is laid over white."""
        from PIL import ImageOps

        picture = ImageOps.exif_transpose(file)
        if picture.mode.startswith("I;16"):
            picture = self.image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
        elif picture.getbands()[-1] in "Aa" or "transparency" in picture.info:
            layer = picture.convert("RGBA")
            picture = self.image.alpha_composite(self.image.new("RGBA", layer.size, "white"), layer)
        picture = picture.convert("RGB")
        if size is not None and picture.size != size[::-1]:
            picture = picture.resize(size[::-1], self.image.Resampling.BICUBIC)
        return np.array(picture)


def _natural(path: Path) -> list[tuple[int, str]]:
    """frame2.png before frame10.png."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name)]


DECODERS: dict[str, type[Decoder]] = {"pyav": PyAV, "torchcodec": TorchCodec, "opencv": OpenCV, "pillow": Pictures}
