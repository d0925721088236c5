"""What feeds a training loop: the same samples from all sources, decoders and processes, each picture once, and on from the middle."""

from __future__ import annotations

import doctest
import io
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from films import scenery
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

import texvlm
from texvlm.cli.image import read_picture
from texvlm.data import Select, collate, decode, decoding, initialise_worker, selecting


def encoded(pixels: np.ndarray, kind: str = "JPEG", **options: Any) -> bytes:
    """A picture file's content."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


def shifted(number: int, size: tuple[int, int] = (96, 128)) -> np.ndarray:
    """One of many pictures."""
    return np.roll(scenery(size), 5 * number, axis=1)


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Pictures:
    """A Dataset of picture files."""

    def __init__(self, count: int, select: Select) -> None:
        self.files = [encoded(shifted(number)) for number in range(count)]
        self.select = select

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.select(self.files[number]) | {"number": number}


@pytest.mark.parametrize("path", ["salience", "multiscale", "adaptive"])
def test_a_sample_is_what_select_keeps_and_pack_cells_packs(path: str) -> None:
    image = torch.from_numpy(scenery((96, 128))).permute(2, 0, 1).contiguous()
    chosen = texvlm.select(image, 20, 16, path)
    sample = Select(20, 16, path, merge=2, temporal=2)(image)
    count = int(chosen.count)
    assert torch.equal(sample["indices"], chosen.indices[0]) and int(sample["count"]) == count <= 20
    assert torch.equal(sample["score"], chosen.score[0])
    assert torch.equal(sample["positions"], chosen.centres()[0])
    assert torch.equal(sample["levels"], chosen.lod[0].long())
    assert sample["grid"].tolist() == [6, 8] and sample["size"].tolist() == [96, 128]
    if path == "multiscale":
        assert sample["levels"].max() > 0
        corners = chosen.indices[0] // 8, chosen.indices[0] % 8
        cells = torch.stack([sample["levels"], *(c >> sample["levels"] for c in corners)], dim=-1)
    else:
        cells = chosen.indices[0]
    assert torch.equal(sample["patches"][: 4 * count], texvlm.pack_cells(image, cells[:count], patch=8, merge=2, temporal=2))
    assert not sample["patches"][4 * count :].any()


def test_fewer_cells_than_k_and_a_last_cell_cut_off() -> None:
    image = torch.from_numpy(scenery((40, 50))).permute(2, 0, 1)
    sample = Select(20, 16, dtype=torch.uint8)(image)
    assert int(sample["count"]) == 12 and sample["indices"][12:].eq(-1).all() and sample["patches"].shape == (20, 768)
    corner = sample["patches"][sample["indices"].tolist().index(11)].view(3, 16, 16)  # rows 32.., columns 48..
    assert torch.equal(corner[:, :8, :2], image[:, 32:, 48:])
    assert torch.equal(corner[:, 8:, 2:], image[:, -1:, -1:].expand(3, 8, 14))
    exact = Select(20, 16)(image)["patches"]
    torch.testing.assert_close(exact[:12], (sample["patches"][:12].float() / 255 - 0.5) / 0.5)


def test_all_kinds_of_sources_are_one_picture(tmp_path: Path) -> None:
    pixels = scenery((96, 128))
    content = encoded(pixels, "PNG")
    (tmp_path / "picture.png").write_bytes(content)
    select = Select(20)
    want = select(torch.from_numpy(pixels).permute(2, 0, 1))
    same = (content, bytearray(content), tmp_path / "picture.png", str(tmp_path / "picture.png"), pixels, Image.fromarray(pixels))
    for source in same:
        assert equal(select(source), want), type(source)
    grey = select(pixels[..., 0])
    assert equal(grey, select(np.repeat(pixels[..., :1], 3, axis=2)))
    assert select(torch.rand(1, 3, 32, 32))["size"].tolist() == [32, 32]
    with pytest.raises(ValueError, match="one picture at a time, got a batch of 2"):
        select(torch.rand(2, 3, 32, 32))


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_large_picture_is_shrunk(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = encoded(scenery((96, 128)), kind)
    (tmp_path / "picture").write_bytes(content)
    for decoder in ("auto", "pillow"):
        image = Select(5, max_size=64, decoder=decoder).picture(content)
        assert image.shape == (3, 48, 64) and torch.equal(image, read_picture(str(tmp_path / "picture"), 64).image)
    assert Select(5, max_size=64)(scenery((96, 128)))["size"].tolist() == [48, 64]
    assert Select(5, max_size=64)(encoded(scenery((40, 64)), kind))["size"].tolist() == [40, 64]
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 96 * 128 - 1)
    with pytest.raises(ValueError, match="more than 12,287 pixels"):
        Select(5)(content)
    assert Select(5, max_size=64)(content)["size"].tolist() == [48, 64]


def test_arguments_that_make_no_sense() -> None:
    for arguments, message in (
        ({"cell": 16, "merge": 3}, "cell must be a multiple of merge"),
        ({"dtype": torch.int64}, "dtype must be floating point or torch.uint8"),
        ({"decoder": "libpng"}, "decoder must be one of 'auto', 'torchcodec', 'simplejpeg', 'pillow', got 'libpng'"),
        ({"k": -1}, "k must"),
    ):
        with pytest.raises(ValueError, match=message):
            Select(**arguments)


def broken_import() -> Callable[[bytes], Tensor]:
    raise OSError("libnvrtc.so.13: cannot open shared object file\nand more")


@pytest.fixture
def _fresh() -> Any:
    decoding.jpeg_decoder.cache_clear()
    yield
    decoding.jpeg_decoder.cache_clear()


@pytest.mark.usefixtures("_fresh")
def test_the_fast_decoder_gets_plain_jpegs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def fast(content: bytes) -> Tensor:
        seen.append(content)
        return torch.zeros(3, 1, 1, dtype=torch.uint8)

    monkeypatch.setattr(decoding, "JPEG_DECODERS", {"torchcodec": broken_import, "simplejpeg": lambda: fast})
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = scenery((24, 40))
    plain, turned = encoded(pixels), encoded(pixels, exif=exif)
    others = (turned, encoded(pixels, "PNG"), encoded(np.dstack([pixels, pixels[..., :1]]), "TIFF"), encoded(pixels, "WEBP"))
    assert decode(plain).shape == (3, 1, 1) and decode(encoded(pixels[..., 0])).shape == (3, 1, 1)
    assert decode(turned).shape == (3, 40, 24)
    for content in others[1:]:
        assert decode(content).shape == (3, 24, 40)
    assert len(seen) == 2
    assert decode(plain, "pillow").shape == (3, 24, 40)
    reason = r"libnvrtc\.so\.13: cannot open shared object file"
    with pytest.raises(
        ImportError, match=f"^decoder 'torchcodec' does not load: {reason}; beside any torch: pip install simplejpeg$"
    ):
        Select(decoder="torchcodec")


@pytest.mark.usefixtures("_fresh")
def test_decoders_agree_on_pixels_and_on_what_is_broken() -> None:
    pixels = scenery((97, 131))
    whole = encoded(pixels, quality=90)
    want = decode(whole, "pillow")
    bad = (whole[: len(whole) // 2], whole[:-2], b"", b"\xff\xd8", b"no picture")
    for name in ("auto", *decoding.JPEG_DECODERS):
        try:
            decoding.jpeg_decoder(name)
        except ImportError:
            continue  # is not installed
        for content in (whole, encoded(pixels, progressive=True, subsampling=0), encoded(pixels[..., 0])):
            assert torch.equal(decode(content, name), decode(content, "pillow")), name
        assert decode(whole, name).dtype == torch.uint8 and torch.equal(decode(whole, name), want)
        for content in bad:
            with pytest.raises(ValueError, match=r"the picture is (broken|not a picture)"):
                decode(content, name)


@pytest.mark.usefixtures("_fresh")
def test_without_pillow_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    content = encoded(scenery((24, 40)))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match="decoding pictures needs Pillow: pip install pillow"):
        decode(content)


def test_collate_packs_without_padding() -> None:
    select = Select(20, 16, merge=2)
    samples = [select(torch.rand(3, 16 * rows, 48)) | {"label": rows} for rows in (2, 10, 1)]
    batch = collate(samples)
    assert batch["cu_seqlens"].tolist() == [0, 6, 26, 29] and batch["cu_seqlens"].dtype == torch.int32
    assert batch["patches"].shape == (4 * 29, 192) and torch.equal(batch["patches"][24 : 4 * 26], samples[1]["patches"])
    assert torch.equal(batch["positions"][26:], samples[2]["positions"][:3]) and batch["indices"].ge(0).all()
    assert batch["label"].tolist() == [2, 10, 1] and batch["grid"].tolist() == [[2, 3], [10, 3], [1, 3]]
    empty = collate([Select(0)(torch.rand(3, 16, 16))])
    assert empty["patches"].shape == (0, 768) and empty["cu_seqlens"].tolist() == [0, 0]


def test_it_pickles_with_a_scorer() -> None:
    select = Select(
        7, 16, "learned", scorer=torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Flatten(1)), dtype=torch.float16, max_size=99
    )
    image = torch.rand(3, 64, 64)
    again = pickle.loads(pickle.dumps(select))
    assert equal(again(image), select(image)) and again(image)["patches"].dtype == torch.float16
    assert not any(value.requires_grad for value in select(image).values())


@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_workers_give_the_parents_results(start: str) -> None:
    pictures = Pictures(6, Select(20))
    torch.set_num_threads(2)  # the parent's threads do not survive a fork
    want = [pictures[number] for number in range(len(pictures))]
    loader = DataLoader(
        pictures, batch_size=2, num_workers=2, multiprocessing_context=start, worker_init_fn=initialise_worker, timeout=120
    )
    for batch, pair in zip(loader, (want[:2], want[2:4], want[4:])):
        assert equal(batch, default_collate(pair))


TRAIN = """
import json, sys
sys.path.insert(0, {tests!r})
import torch.distributed as dist
from test_data import Pictures
from texvlm.data import Select, collate
from torch.utils.data import DataLoader, DistributedSampler
dist.init_process_group("gloo")
pictures = Pictures(10, Select(20))
sampler = DistributedSampler(pictures, shuffle=True, seed=1)
batches = list(DataLoader(pictures, batch_size=2, sampler=sampler, collate_fn=collate))
seen = {{number: rows.tolist() for batch in batches for number, rows in zip(batch["number"].tolist(), batch["indices"].view(-1, 20))}}
with open(f"seen{{dist.get_rank()}}.json", "w") as file:
    json.dump(seen, file)
dist.destroy_process_group()
"""


def test_two_processes_see_each_picture_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN.format(tests=str(Path(__file__).parent)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    path = os.pathsep.join([str(Path(texvlm.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"seen{rank}.json").read_text()) for rank in (0, 1))
    assert len(first) == len(second) == 5 and sorted(map(int, [*first, *second])) == list(range(10))
    pictures = Pictures(10, Select(20))
    for number, indices in {**first, **second}.items():
        assert indices == pictures[int(number)]["indices"].tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_on_in_the_middle_of_an_epoch(workers: int) -> None:
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        pytest.skip("torchdata is not installed")

    def loader() -> Any:
        generator = torch.Generator().manual_seed(3)
        return StatefulDataLoader(
            Pictures(12, Select(20)),
            batch_size=2,
            shuffle=True,
            num_workers=workers,
            worker_init_fn=initialise_worker,
            generator=generator,
        )

    whole = list(loader())
    interrupted = loader()
    begun = iter(interrupted)
    before = [next(begun) for _ in range(2)]
    state = pickle.loads(pickle.dumps(interrupted.state_dict()))
    resumed = loader()
    resumed.load_state_dict(state)
    joined = [*before, *resumed]
    assert len(joined) == len(whole) == 6 and all(equal(a, b) for a, b in zip(joined, whole))


def test_imports_stay_light() -> None:
    script = """
import sys, texvlm
assert "texvlm.data" not in sys.modules
assert texvlm.data.Select
print([name for name in ("PIL", "pyarrow", "ray", "simplejpeg", "torchcodec", "texvlm.cli.image", "transformers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("name", ["Select", "collate"])
def test_examples_of_docstrings(name: str) -> None:
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in doctest.DocTestFinder().find(getattr(selecting, name), name, globs={}):
        runner.run(test)
    assert runner.summarize(verbose=False) == (0, runner.tries) and runner.tries


def test_worker_initialisation_leaves_one_thread() -> None:
    before = torch.get_num_threads()
    try:
        initialise_worker(3)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
