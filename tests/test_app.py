"""`app`: what the page shows, the one-line refusals, and the page itself in a headless browser that may reach no other host."""

from __future__ import annotations

import importlib.util
import io
import math
import shutil
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch

PIL = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
pytest.importorskip("matplotlib", reason="Matplotlib is not installed")

import texvlm  # noqa: E402
from texvlm import cli  # noqa: E402
from texvlm.cli import app, gaze  # noqa: E402
from texvlm.cli import explore as page  # noqa: E402
from texvlm.cli.explore import Ask, Shown  # noqa: E402
from texvlm.cli.view import surroundings  # noqa: E402

HEIGHT, WIDTH = 192, 256


def pixels(height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    """Smooth ground with a busy patch: nothing is kept by chance."""
    y, x = np.mgrid[:height, :width] / max(height, width)
    image = np.stack([120 + 80 * x, 100 + 60 * y, 90 + 0 * x], -1)
    image[40:120, 150:220] += np.random.default_rng(0).normal(0, 60, (80, 70, 3))
    return image.clip(0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("app") / "photo.png"
    PIL.fromarray(pixels()).save(path)
    return path


@pytest.fixture(scope="module")
def shown(photo: Path) -> Shown:
    return page.opened(str(photo), 1024)[0]


def complaint(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that a command refuses with."""
    assert cli.main(list(argv)) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err


def test_keeps_what_select_keeps(shown: Shown) -> None:
    (found,) = page.chosen(shown, Ask(k=20))
    expected = texvlm.select(shown.picture.image, k=20, cell=16, path=cli.DEFAULT_PATH)
    assert found.path == cli.DEFAULT_PATH
    assert torch.equal(found.selection.indices, expected.indices)
    assert found.words.startswith(f"**{cli.DEFAULT_PATH}** 20 of 192 cells, ")


def test_two_paths_side_by_side(shown: Shown) -> None:
    found = page.chosen(shown, Ask(k=20, path="salience", other="predictive"))
    assert [choice.path for choice in found] == ["salience", "predictive"]
    images, what = page.kept(shown, found)
    assert len(images) == 3
    first, second = (choice.selection.mask()[0] for choice in found)
    assert f"{int((first & ~second).sum()):,} left alone" in what
    assert f"{int((first & second).sum()):,} both" in what


def test_a_text_brings_the_query_path(shown: Shown) -> None:
    (found,) = page.chosen(shown, Ask(k=5, query=" seven "))
    assert found.path == "query"
    assert page.chosen(shown, Ask(k=5, query="   "))[0].path == cli.DEFAULT_PATH
    with pytest.raises(cli.Complaint, match="query"):
        page.chosen(shown, Ask(k=5, path="query"))


def test_cells_are_sharp_where_they_are_kept(shown: Shown) -> None:
    found = page.chosen(shown, Ask(k=30))
    seen, words = page.sight(shown, found, Ask(k=30), "cells")
    kept = found[0].selection.mask()[0].repeat_interleave(16, 0).repeat_interleave(16, 1).numpy()
    assert np.array_equal(seen[kept], pixels()[kept])
    assert not np.array_equal(seen, pixels())
    assert "16% of the cells sharp" in words


def test_multiscale_shows_its_levels(shown: Shown) -> None:
    ask = Ask(k=100)
    mixed = texvlm.select(shown.picture.image, k=100, cell=16, path="multiscale")
    levels = mixed.lod[0, : int(mixed.count[0])]
    assert levels.any()
    seen, words = page.sight(shown, page.chosen(shown, ask), ask, "multiscale")
    assert f"{int((levels == 1).sum())} at level 1" in words
    y0, x0, y1, x1 = mixed.boxes()[0, int(levels.eq(0).nonzero()[0])].tolist()
    assert np.array_equal(seen[y0:y1, x0:x1], pixels()[y0:y1, x0:x1])


@pytest.mark.parametrize("fixation", [(0.25, 0.5), (0.9, 0.1)])
def test_a_fovea_is_sharp_where_it_looks(shown: Shown, fixation: tuple[float, float]) -> None:
    ask = Ask(k=60, fixation=fixation, cell=8)
    seen, _ = page.sight(shown, [], ask, "fovea")
    error = np.abs(seen.astype(float) - pixels()).mean(-1)
    x, y = int(fixation[0] * WIDTH), int(fixation[1] * HEIGHT)
    near = error[max(y - 8, 0) : y + 8, max(x - 8, 0) : x + 8].mean()
    coarse = surroundings(shown.colours, 8).permute(1, 2, 0).numpy() * 255
    assert near < 2 or near < 0.5 * np.abs(coarse - pixels()).mean(-1)[max(y - 8, 0) : y + 8, max(x - 8, 0) : x + 8].mean()


def test_the_layout_of_a_budget() -> None:
    default = texvlm.FoveaLayout()
    layout = gaze.layout_for(273, 16, (1024, 700))
    assert layout.count == 273
    assert layout.e0 == pytest.approx(default.e0, rel=0.01)  # "its outer ring ends at the border"
    for budget in (1, 2, 17, 18, 100, 1024):
        assert 1 <= gaze.layout_for(budget, 16, (500, 741)).count <= budget
    e0 = gaze.half_resolution(100, 700)
    assert e0 * math.expm1(100 / e0) == pytest.approx(700)
    assert gaze.half_resolution(100, 60) == gaze.FLAT


def test_a_homunculus_magnifies_what_is_looked_at() -> None:
    """A bright square takes more of the drawing where the gaze is on it."""
    image = torch.zeros(3, 512, 512)
    image[:, 96:160, 96:160] = 1
    colours = texvlm.Texture(image)
    shares = [float(gaze.homunculus(colours, at)[0].mean()) for at in ((0.25, 0.25), (0.8, 0.8))]
    assert shares[0] > 2 * shares[1] > 0
    warped, count = gaze.homunculus(texvlm.Texture(torch.ones(3, 40, 300)), (0.5, 0.5))
    assert count > 0 and warped.shape[2] > 2 * warped.shape[1]  # what lies beyond the picture is cut off


def test_a_cross_marks_the_gaze(shown: Shown) -> None:
    for fixation in ((0.0, 0.0), (0.5, 0.25), (1.0, 1.0)):
        marked = page.fixated(shown, fixation)
        x, y = (min(round(place * n), n - 1) for place, n in zip(fixation, (WIDTH, HEIGHT)))
        assert tuple(marked[y, x]) == (249, 162, 66)
    assert np.array_equal(page.bytes_of(shown.pixels), pixels())  # and the picture stays as it is


def test_channels_and_pyramid_are_drawn(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "DPI", 40)  # fast
    sheet, words = page.channel_sheet(shown, Ask())
    assert "without a source here" in words and "embedding 0 to 15" in words
    assert min(sheet.shape[:2]) > 100
    more, words = page.channel_sheet(shown, Ask(query="seven"))
    assert "embedding" not in words and more.shape[0] > sheet.shape[0]
    levels, words = page.pyramid(shown)
    assert words.startswith("9 levels") and levels.shape[2] == 3


def test_what_is_no_picture_is_one_line(tmp_path: Path) -> None:
    bad = tmp_path / "letter.png"
    bad.write_text("Dear reader")
    with pytest.raises(cli.Complaint, match=r"^letter\.png is not a picture that Pillow can read$"):
        page.opened(str(bad), 1024)


def test_a_picture_of_100_megapixels_is_shrunk(tmp_path: Path) -> None:
    large = tmp_path / "large.png"
    PIL.new("L", (12_500, 8_000), 90).save(large, compress_level=1)
    shown, words = page.opened(str(large), 512)
    assert (shown.picture.width, shown.picture.height) == (512, 328)
    assert "shrunk from 12500 x 8000" in words and "--" not in words


def test_a_film_is_followed(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="PyAV is not installed")
    frames = [PIL.fromarray(np.roll(pixels(), 8 * shift, axis=1)) for shift in range(4)]
    film = tmp_path / "film.gif"
    frames[0].save(film, save_all=True, append_images=frames[1:], duration=100)
    rows = page.film(str(film), tmp_path / "kept.mp4", Ask(k=9))
    assert {"decode", "encode"} <= {row[0] for row in rows}
    assert [f.shape[0] for f in texvlm.video.frames(str(tmp_path / "kept.mp4"))] == [3] * 4
    (tmp_path / "no.mp4").write_text("no film")
    with pytest.raises(cli.Complaint):
        page.film(str(tmp_path / "no.mp4"), tmp_path / "kept.mp4", Ask())


def test_without_gradio_it_says_what_to_install(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "gradio" else found(name, *rest))
    assert "pip install 'texvlm[app]'" in complaint(capsys, "app", "--no-browser")


def test_a_port_in_use_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(cli.Complaint, match=f"port {taken.getsockname()[1]}: address already in use"):
            app.free("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(cli.Complaint, match=r"cannot listen on nowhere\.invalid"):
        app.free("nowhere.invalid", 7860)


# --- in a browser --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A page that is served here."""
    pytest.importorskip("gradio", reason="Gradio is not installed: pip install 'texvlm[app]'")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_ANALYTICS_ENABLED", "False")
        blocks = app.page(512)
        yield app.launched(blocks, "127.0.0.1", port, browser=False)
        blocks.close(verbose=False)


class Visit:
    """A browser on the page, which notes where its requests go and lets none leave the machine."""

    def __init__(self, tab: Any) -> None:
        self.tab, self.hosts = tab, set()
        tab.route("**/*", self._through)

    def _through(self, route: Any) -> None:
        url = urlsplit(route.request.url)
        if url.scheme in ("http", "https", "ws", "wss"):
            self.hosts.add(url.hostname)
        if url.hostname in (None, "127.0.0.1"):
            route.continue_()
        else:
            route.abort()

    def said(self, *words: str) -> None:
        """Waits until the line above the views says this."""
        for word in words:
            self.tab.locator("#said").get_by_text(word).first.wait_for()

    def image(self, name: str, other_than: str | None = None) -> tuple[np.ndarray, str]:
        """What an image shows, and where it is from; waits for another than the one from there."""
        image = self.tab.locator(f"#{name} img").first
        image.wait_for()
        if other_than is not None:
            self.tab.wait_for_function(
                "([name, old]) => document.querySelector(`#${name} img`).src != old", arg=[name, other_than]
            )
        source = image.get_attribute("src")
        assert source is not None
        with urllib.request.urlopen(source) as file:
            return np.asarray(PIL.open(io.BytesIO(file.read())).convert("RGB")), source


@pytest.fixture
def visit(address: str) -> Iterator[Visit]:
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium (Debian: apt-get install chromium)")
    with sync.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1500, "height": 1000})
        tab.set_default_timeout(60_000)
        visit = Visit(tab)
        tab.goto(address, wait_until="domcontentloaded")
        visit.said("Drop a picture")
        yield visit
        browser.close()
        assert visit.hosts == {"127.0.0.1"}


def test_upload_slide_click(visit: Visit, photo: Path) -> None:
    shown, tab = page.opened(str(photo), 512)[0], visit.tab
    tab.locator("#source input[type=file]").set_input_files(photo)
    visit.said("192 of 192 cells")
    _, before = visit.image("kept")

    tab.locator("#budget input[type=range]").fill("20")
    visit.said("20 of 192 cells")
    drawn, _ = visit.image("kept", before)
    assert np.array_equal(drawn, page.kept(shown, page.chosen(shown, Ask(k=20)))[0][0])

    tab.get_by_role("tab", name="Homunculus").click()
    visit.said("samples around x 128, y 96")
    _, before = visit.image("fixated")
    box = tab.locator("#fixated img").bounding_box()
    assert box is not None
    scale = min(box["width"] / WIDTH, box["height"] / HEIGHT)  # the picture keeps its shape in the box
    left, top = (box[side] - scale * n for side, n in (("width", WIDTH), ("height", HEIGHT)))
    tab.mouse.click(box["x"] + left / 2 + scale * 192.5, box["y"] + top / 2 + scale * 48.5)
    drawn, _ = visit.image("fixated", before)
    y, x = np.argwhere((drawn == (249, 162, 66)).all(-1)).mean(0)
    assert (abs(x - 192) < 2) and (abs(y - 48) < 2)
    visit.said("samples around")

    tab.get_by_role("tab", name="What a model sees").click()
    visit.said("of the cells sharp")
    tab.get_by_label("fovea").check()
    visit.said("tokens around the gaze")


def test_a_wrong_file_is_a_line_on_the_page(visit: Visit, photo: Path, tmp_path: Path) -> None:
    (tmp_path / "letter.png").write_text("Dear reader")
    visit.tab.locator("#source input[type=file]").set_input_files(tmp_path / "letter.png")
    visit.said("⚠ letter.png is not a picture that Pillow can read")
