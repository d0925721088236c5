"""The command line: every kind of picture, refusals in one line, JSON and nothing else, a PNG."""

from __future__ import annotations

import io
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

np = pytest.importorskip("numpy")
PIL = pytest.importorskip("PIL.Image", reason="Pillow is not installed")

import texvlm  # noqa: E402
from texvlm import cli  # noqa: E402
from texvlm.cli import doctor, toolkit  # noqa: E402
from texvlm.cli.image import read_picture  # noqa: E402
from texvlm.paths import PATHS  # noqa: E402


@pytest.fixture
def rgb() -> np.ndarray:
    """A picture [40, 60, 3] that is busy at the top left."""
    pixels = np.full((40, 60, 3), 90, dtype=np.uint8)
    pixels[:16, :16] = np.random.default_rng(0).integers(0, 255, (16, 16, 3))
    return pixels


@pytest.fixture
def photo(rgb: np.ndarray, tmp_path: Path) -> Path:
    path = tmp_path / "photo.png"
    PIL.fromarray(rgb).save(path)
    return path


def complaint(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """The one line that a command refuses with."""
    assert cli.main([str(a) for a in argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err


def test_reads_rgb_exactly(rgb: np.ndarray, photo: Path) -> None:
    picture = read_picture(str(photo))
    assert (picture.height, picture.width, picture.remarks) == (40, 60, [])
    assert torch.equal(picture.image, torch.from_numpy(rgb).permute(2, 0, 1))


def test_exif_orientation_is_honoured(rgb: np.ndarray, tmp_path: Path) -> None:
    exif = PIL.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 90 degrees clockwise
    PIL.fromarray(rgb).save(tmp_path / "turned.png", exif=exif)
    picture = read_picture(str(tmp_path / "turned.png"))
    assert (picture.height, picture.width) == (60, 40)
    assert torch.equal(picture.image, torch.from_numpy(np.rot90(rgb, -1).copy()).permute(2, 0, 1))


def test_lab_becomes_rgb_and_is_not_transparent(tmp_path: Path) -> None:
    cms = pytest.importorskip("PIL.ImageCms", reason="this Pillow has no colour management")
    flat = PIL.new("RGB", (8, 8), (200, 60, 40))
    lab = cms.profileToProfile(flat, cms.createProfile("sRGB"), cms.createProfile("LAB"), outputMode="LAB")
    lab.save(tmp_path / "lab.tif")
    picture = read_picture(str(tmp_path / "lab.tif"))
    assert picture.remarks == []
    torch.testing.assert_close(picture.image[:, 4, 4].float(), torch.tensor([200.0, 60, 40]), atol=4, rtol=0)


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "LA", "RGBA"])
def test_other_modes_become_rgb(rgb: np.ndarray, tmp_path: Path, mode: str) -> None:
    path = tmp_path / ("picture.tif" if mode in ("CMYK", "YCbCr") else "picture.png")
    converted = PIL.fromarray(rgb).convert(mode)
    converted.save(path)
    picture = read_picture(str(path))
    assert picture.image.shape == (3, 40, 60)
    assert torch.equal(picture.image, torch.from_numpy(np.array(converted.convert("RGB"))).permute(2, 0, 1))


def test_transparency_is_laid_over_white(tmp_path: Path) -> None:
    PIL.new("RGBA", (8, 8), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    picture = read_picture(str(tmp_path / "clear.png"))
    assert (picture.image == 255).all()
    assert picture.remarks == ["transparent parts laid over white"]


def test_sixteen_bits_are_kept(tmp_path: Path) -> None:
    grey = np.linspace(0, 65535, 8 * 8).astype(np.uint16).reshape(8, 8)
    PIL.fromarray(grey).save(tmp_path / "deep.png")
    picture = read_picture(str(tmp_path / "deep.png"))
    assert picture.image.dtype == torch.float32
    torch.testing.assert_close(picture.image[1], torch.from_numpy(grey.astype(np.float32) / 65535))


def test_max_size_shrinks_the_longer_side(photo: Path) -> None:
    assert read_picture(str(photo), max_size=30).image.shape == (3, 20, 30)
    assert read_picture(str(photo), max_size=60).image.shape == (3, 40, 60)


def test_refuses_what_is_no_picture(photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "name is empty" in complaint(capsys, "select", "")
    assert "no such file" in complaint(capsys, "select", tmp_path / "absent.png")
    assert "is a folder" in complaint(capsys, "select", tmp_path)
    (tmp_path / "text.png").write_text("hello")
    assert "not a picture" in complaint(capsys, "select", tmp_path / "text.png")
    (tmp_path / "half.png").write_bytes(photo.read_bytes()[: photo.stat().st_size // 2])
    assert "is broken" in complaint(capsys, "select", tmp_path / "half.png")
    assert "end in .png" in complaint(capsys, "view", photo, "-o", tmp_path / "out.jpg")
    assert "no such folder" in complaint(capsys, "view", photo, "-o", tmp_path / "absent" / "out.png")
    assert "cannot write" in complaint(capsys, "select", photo, "--json", tmp_path)


@pytest.mark.parametrize(
    ("option", "value"),
    [("-k", "9" * 5000), ("-k", "0"), ("-k", "-3"), ("-k", "many"), ("--cell", "0"), ("--max-size", "0"), ("--nonsense", "1")],
)
def test_refuses_wrong_options(photo: Path, capsys: pytest.CaptureFixture[str], option: str, value: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["select", str(photo), option, value])
    assert option in capsys.readouterr().err


def test_select_prints_json_and_nothing_else(photo: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["select", str(photo), "-k", "3", "--cell", "16"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    found = json.loads(out)
    assert (found["grid"], found["cell"], found["count"]) == ([3, 4], 16, 3)
    assert (found["width"], found["height"]) == (60, 40)
    best = found["cells"][0]
    assert (best["index"], best["row"], best["col"], best["x"], best["y"]) == (0, 0, 0, 0, 0)
    scores = [cell["score"] for cell in found["cells"]]
    assert scores == sorted(scores, reverse=True)


def test_select_is_in_pixels_of_the_file(photo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["select", str(photo), "--max-size", "25", "--cell", "8"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["width"], found["height"], found["seen_width"], found["seen_height"]) == (60, 40, 25, 17)
    covered = np.zeros((40, 60), dtype=int)
    for cell in found["cells"]:
        covered[cell["y"] : cell["y"] + cell["height"], cell["x"] : cell["x"] + cell["width"]] += 1
    assert (covered == 1).all()
    assert sorted({cell["x"] for cell in found["cells"]}) == [0, 19, 38, 58]  # 8, 16 and 24 of 25, in 60


@pytest.mark.parametrize("k", [12, 10**12, 10**20 - 1])
def test_select_keeps_at_most_all_cells(photo: Path, capsys: pytest.CaptureFixture[str], k: int) -> None:
    assert cli.main(["select", str(photo), "-k", str(k)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["count"] == len(found["cells"]) == 12


@pytest.mark.parametrize("path", cli.SELECT_PATHS)
def test_select_takes_the_paths_that_need_no_more_than_a_picture(
    path: str, photo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert path in PATHS
    query = ["--query", "seven"] if path == "query" else []
    assert cli.main(["select", str(photo), "-k", "3", "--cell", "8", "--path", path, *query]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 1 <= found["count"] <= 3
    assert all(cell["width"] <= 8 << cell["lod"] and cell["height"] <= 8 << cell["lod"] for cell in found["cells"])


def test_select_and_view_keep_the_same_for_a_query(photo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from texvlm.cli.view import Sources, look

    assert cli.main(["select", str(photo), "-k", "5", "--cell", "8", "--query", "seven"]) == 0
    found = [cell["index"] for cell in json.loads(capsys.readouterr().out)["cells"]]
    sources = Sources(query="seven", embedding=texvlm.Embedding(texvlm.DigitsEmbedding()))
    scene, _ = look(read_picture(str(photo), None), 5, 8, "edge", sources)
    assert scene.selection.indices[0].tolist() == found
    assert "takes no query" in complaint(capsys, "select", photo, "--path", "salience", "--query", "seven")


def test_reads_standard_input(photo: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def pipe(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    pipe(photo.read_bytes())
    assert cli.main(["select", "-", "-k", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["image"], found["width"], found["cells"][0]["index"]) == ("-", 60, 0)
    pipe(b"")
    assert "standard input is empty" in complaint(capsys, "select", "-")
    pipe(b"hello")
    assert "not a picture" in complaint(capsys, "select", "-")


def test_select_keeps_all_cells_of_a_small_picture(photo: Path, tmp_path: Path) -> None:
    assert cli.main(["select", str(photo), "--json", str(tmp_path / "cells.json")]) == 0
    cells = json.loads((tmp_path / "cells.json").read_text())["cells"]
    assert sorted(cell["index"] for cell in cells) == list(range(12))
    assert sum(cell["width"] * cell["height"] for cell in cells) == 40 * 60  # cells at the edge are cut


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"texvlm {texvlm.__version__}\n"


def test_doctor_speaks_plainly(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    for word in ("python", "torch", "extension", "compiler", "kernels", "gpu", "gl"):
        assert f" {word}" in out


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the package without its extension, in the folder `checkout`, and beside it one with it, as pip installs it, in `site`."""
    here = Path(texvlm.__file__).parent
    without = shutil.ignore_patterns("*.so", "lib", "__pycache__")
    for place in ("checkout", "site"):
        shutil.copytree(here, tmp_path / place / "texvlm", ignore=without)
    for path in (*here.glob("_C*.so"), here / "lib"):
        (tmp_path / "site" / "texvlm" / path.name).symlink_to(path)
    return tmp_path / "checkout"


def python(checkout: Path, *arguments: str, see: str = "") -> subprocess.CompletedProcess[str]:
    """A run in the checkout that sees torch, the folder beside it that is named, and no other texvlm."""
    paths = [str(checkout.parent / see)] if see else []
    paths += [entry for entry in sys.path if entry and not (Path(entry) / "texvlm").exists()]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}  # -S: else the .pth files name this checkout as well
    return subprocess.run([sys.executable, "-S", *arguments], cwd=checkout, env=env, capture_output=True, text=True, check=False)


def test_an_unbuilt_checkout_steps_aside_for_the_same_texvlm_installed(checkout: Path) -> None:
    """The README's commands run in the folder in which `pip install .` was run."""
    site = checkout.parent / "site" / "texvlm"
    shown = python(checkout, "-c", "import texvlm, texvlm.cli as c; print(c.__file__, texvlm.cmake_prefix_path)", see="site")
    assert shown.stdout.split() == [str(site / "cli" / "__init__.py"), str(site / "cmake")], shown.stderr
    report = python(checkout, "-m", "texvlm", "doctor", see="site")
    assert report.returncode == 0, report.stdout + report.stderr
    assert f" in {site}\n" in report.stdout


def test_an_edited_checkout_that_is_not_built_says_what_it_hides(checkout: Path) -> None:
    with (checkout / "texvlm" / "fovea.py").open("a") as file:
        file.write("# edited\n")
    done = python(checkout, "-c", "import texvlm", see="site")
    assert f"hides the texvlm installed in {checkout.parent / 'site' / 'texvlm'}, and fovea.py is another there" in done.stderr
    assert "or run in another folder" in done.stderr


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("unbuilt", "does not load: it has not been built in "),
        ("damaged", "file too short. It is built for one version of PyTorch: you run "),
        ("no torch", "does not load: it needs torch, which does not load itself"),
    ],
)
def test_doctor_speaks_when_the_extension_does_not_load(checkout: Path, what: str, says: str) -> None:
    if what == "damaged":
        for path in Path(texvlm.__file__).parent.glob("_C*.so"):
            (checkout / "texvlm" / path.name).touch()
    if what == "no torch":
        (checkout.parent / "broken").mkdir()
        (checkout.parent / "broken" / "torch.py").write_text("raise OSError('not today')")
    done = python(checkout, "-m", "texvlm", "doctor", see="broken")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert says in done.stdout
    assert "\nmissing:\n" in done.stdout
    assert says in python(checkout, "-c", "import texvlm", see="broken").stderr
    command = checkout.parent / "texvlm"  # as pip writes it
    command.write_text(f"import sys\nsys.path.insert(0, {str(checkout)!r})\nfrom texvlm.cli import main\nsys.exit(main())\n")
    launched = python(checkout, str(command), "doctor", see="broken")
    assert (launched.returncode, launched.stdout) == (1, done.stdout)


def test_doctor_names_the_cards_as_setup_wrote_them(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TEXVLM_CUDA_ARCHS", "7.5;80")
    setup = runpy.run_path(str(Path(__file__).parents[1] / "setup.py"))
    config = setup["host_config"]()
    setup["add_kernels"](config, setup["cuda_archs"](), "13.0")
    written = dict(config.define)
    info = {"cuda": True, "cuda_archs": written["TEXVLM_CUDA_ARCHS"], "cuda_version": written["TEXVLM_CUDA_VERSION"]}
    doctor._cuda(doctor.Report(), None, info)
    assert "compiled in for sm_75 sm_80 (CUDA 13.0)" in capsys.readouterr().out


def test_the_cuda_toolkit_is_found_where_nvcc_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By $CUDA_HOME, by nvcc, and by a wrapper script elsewhere that runs nvcc; a folder without headers is not it."""
    home, elsewhere, bare = tmp_path / "cuda", tmp_path / "local" / "bin", tmp_path / "bare"
    for nvcc, text in (
        (home / "bin" / "nvcc", f"echo '#$ _HERE_={home}/bin' >&2; echo 'Cuda compilation tools, release 13.0, V13.0.48'"),
        (elsewhere / "nvcc", f'exec {home}/bin/nvcc "$@"'),
        (bare / "bin" / "nvcc", "echo 'Cuda compilation tools, release 12.0, V12.0.1'"),
    ):
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text(f"#!/bin/sh\n{text}\n")
        nvcc.chmod(0o755)
    (home / "include").mkdir()
    (home / "include" / "cuda_runtime_api.h").touch()
    monkeypatch.delenv("CUDA_PATH", raising=False)
    for path, variable in ((elsewhere, None), (elsewhere, bare), (home / "bin", None), (tmp_path, home)):
        monkeypatch.setenv("PATH", f"{path}{os.pathsep}/bin{os.pathsep}/usr/bin")
        monkeypatch.setenv("CUDA_HOME", str(variable)) if variable else monkeypatch.delenv("CUDA_HOME", raising=False)
        found = toolkit.cuda_home()
        assert found == home, (path, variable)
        assert toolkit.cuda_release(found) == "13.0"


def test_runs_as_a_module_from_anywhere(photo: Path, tmp_path: Path) -> None:
    root = str(Path(cli.__file__).parents[2])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
    }
    run = subprocess.run(
        [sys.executable, "-m", "texvlm", "select", photo, "-k", "1"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert len(json.loads(run.stdout)["cells"]) == 1
