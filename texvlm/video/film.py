"""Films as tensors: files of any container and codec that a decoder knows, animations, and folders of pictures."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from texvlm.video.decoders import DECODERS, Decoder, Reading, Size

AUTO = ("pyav", "torchcodec", "opencv")
"""PyAV first: its wheel carries FFmpeg and wants nothing else, and it decodes ahead of who reads."""

BY_PILLOW = {".apng", ".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}
NEEDED = "reading films needs PyAV, torchcodec or OpenCV: pip install 'texvlm[video]'"
NEEDED_FOR_PICTURES = "reading pictures and animations needs Pillow: pip install pillow"


class Film:
    """The frames of a film, decoded while one goes through them; each pass begins anew. What `frames` returns.

    Attributes:
        path: the file or folder.
        height: rows of pixels of each frame, upright.
        width: their columns.
        rate: frames a second as they are handed out, in the mean: a film may have a rate that varies.
        frame_count: how many there are, as the container says; None where it does not. So `len()` may raise TypeError.
        missing: how many frames the last pass that reached the end found to be missing there.
        backend: what reads it: "pyav", "torchcodec", "opencv" or "pillow".
    """

    missing: int = 0

    def __init__(self, decoder: Decoder, backend: str, size: Size | None, every: int) -> None:
        self._decoder, self._size, self._every = decoder, size, every
        self._passes: weakref.WeakSet[Iterator[tuple[float, Tensor]]] = weakref.WeakSet()
        self._closed = False
        self.path, self.backend = decoder.path, backend
        self.rate = decoder.rate / every
        self.frame_count = None if decoder.count is None else -(-decoder.count // every)
        first = next(reading := decoder.read(size, every), None)
        reading.close()
        if first is None:
            raise ValueError(f"{self.path} holds no frame that {decoder.name} can read")
        self.height, self.width = first[1].shape[:2]

    def __iter__(self) -> Iterator[Tensor]:
        return (frame for _, frame in self.timed())

    def timed(self) -> Iterator[tuple[float, Tensor]]:
        """The frames with the seconds at which they are shown, the first at 0."""
        if self._closed:
            raise ValueError(f"{self.path} has been closed")
        frames = self._read()
        self._passes.add(frames)
        return frames

    def _read(self) -> Iterator[tuple[float, Tensor]]:
        reading: Reading = self._decoder.read(self._size, self._every)
        try:
            while True:
                seconds, pixels = next(reading)
                yield seconds, torch.from_numpy(pixels).permute(2, 0, 1)
        except StopIteration as end:
            self.missing = int(end.value)
            if self.missing:
                what = "1 frame is" if self.missing == 1 else f"{self.missing} frames are"
                warnings.warn(f"texvlm: {self.path} is cut off or broken: {what} missing", stacklevel=3)
        finally:
            reading.close()

    def __len__(self) -> int:
        if self.frame_count is None:
            raise TypeError(f"how many frames {self.path} has is not known before it is read")
        return self.frame_count

    def close(self) -> None:
        """Ends all passes and closes the file. A film that is no longer used closes by itself."""
        self._closed = True
        for frames in list(self._passes):
            frames.close()  # type: ignore[attr-defined]

    def __enter__(self) -> Film:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        count = "?" if self.frame_count is None else str(self.frame_count)
        return f"Film({str(self.path)!r}, {count} x {self.height} x {self.width}, {self.rate:.4g} frames/s, {self.backend})"


def frames(
    path: str | PathLike[str], size: tuple[int, int] | None = None, every: int | None = None, *, backend: str = "auto"
) -> Film:
    """The frames of a film, one after the other in the order in which they are shown.

    Reads what FFmpeg reads (by PyAV, torchcodec or OpenCV, whichever is there), and by Pillow animated GIF, PNG and WebP, still
    pictures (films of one frame) and folders of pictures: in the order of their names, frame2 before frame10, all of one size unless
    `size` is given. Films and pictures are turned upright as their metadata says; pixels that are not square stay as they are
    stored. Only the frame that is read is in memory.

    Args:
        path: of the file or folder.
        size: (height, width) of the frames, resized while decoding; as stored by default.
        every: 2 hands out every second frame, beginning with the first, and so on. By default all.
        backend: "auto" (in this order), "pyav", "torchcodec", "opencv", or "pillow" for animations and folders.

    Returns:
        Film: an iterable of uint8 tensors [3, H, W], RGB, whose memory is colour-last, as films are decoded: `VideoStream` reads it as
        it is. `.timed()` brings the seconds too. It has `.height`, `.width`, `.rate` and `.frame_count`, and closes in a `with` block.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: nothing that reads it is installed: `pip install 'texvlm[video]'`.
        ValueError: the file is not a film, or holds no frame; a size or `every` that makes no sense.

    A film that is cut off or broken yields what can be read of it, and warns how many frames are missing.

    Example:
        >>> import pathlib, tempfile
        >>> from PIL import Image
        >>> from texvlm.video import frames
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name, grey in (("frame2.png", 20), ("frame10.png", 100)):
        ...         Image.new("L", (32, 24), grey).save(pathlib.Path(folder, name))
        ...     film = frames(folder)
        ...     [(tuple(frame.shape), int(frame.max())) for frame in film]
        [((3, 24, 32), 20), ((3, 24, 32), 100)]
    """
    if size is not None and not (isinstance(size, (tuple, list)) and len(size) == 2 and all(_counts(side) for side in size)):
        raise ValueError(f"size must be (height, width) in whole pixels, at least 1, got {size!r}")
    if every is not None and not _counts(every):
        raise ValueError(f"every must be a whole number of at least 1 and below 2^63, got {every!r}")
    if backend != "auto" and backend not in DECODERS:
        raise ValueError(f"backend must be one of 'auto', {', '.join(map(repr, DECODERS))}, got {backend!r}")
    if not (where := Path(path)).exists():
        raise FileNotFoundError(f"no such file: {where}")
    name, decoder = _decoder(where, backend)
    return Film(decoder, name, None if size is None else (int(size[0]), int(size[1])), every or 1)


def _counts(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 1 << 63


def _decoder(path: Path, backend: str) -> tuple[str, Decoder]:
    """What reads this file: the first decoder that can be imported."""
    pictures = path.is_dir() or path.suffix.lower() in BY_PILLOW
    names = (backend,) if backend != "auto" else ("pillow",) if pictures else AUTO
    why: Exception | None = None
    for name in names:
        try:
            return name, DECODERS[name](path)
        except (ValueError, FileNotFoundError, PermissionError):
            raise
        except Exception as error:  # an import fails in many ways: torchcodec's raises RuntimeError for want of a library
            why = error
    if backend != "auto":
        raise ImportError(f"backend {backend!r} does not load: {str(why).splitlines()[0]}") from why
    raise ImportError(NEEDED_FOR_PICTURES if pictures else NEEDED) from why
