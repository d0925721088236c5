"""`view`: what is drawn, that it does not overlap, which channels, what a query and a previous frame bring, small words."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path

import pytest
import torch

np = pytest.importorskip("numpy")
PIL = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
pytest.importorskip("matplotlib", reason="Matplotlib is not installed")

import texvlm  # noqa: E402
from texvlm import cli  # noqa: E402
from texvlm.cli import tiles  # noqa: E402
from texvlm.cli.drawing import share  # noqa: E402
from texvlm.cli.image import Picture  # noqa: E402
from texvlm.cli.page import LABEL, LINE, TITLE, Layout, shrunk  # noqa: E402
from texvlm.cli.view import Sources, channel_names, look, token_of_cells  # noqa: E402
from texvlm.digits.canvas import digit_canvas, load_digits  # noqa: E402


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)


def saved(path: Path, pixels: np.ndarray) -> str:
    PIL.fromarray(pixels).save(path)
    return str(path)


def picture(image: torch.Tensor) -> Picture:
    return Picture(image, Path("a.png"), [], (image.shape[1], image.shape[2]))


def complaint(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that a command refuses with."""
    assert cli.main(list(argv)) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err


@pytest.mark.parametrize("size", [(40, 60), (17, 200), (150, 9), (1, 1)])
def test_view_writes_a_picture(size: tuple[int, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "in.png", noise(*size))
    assert cli.main(["view", str(tmp_path / "in.png"), "-o", str(tmp_path / "out.png"), "--dpi", "40", "-k", "5"]) == 0
    out = capsys.readouterr().out
    assert f"the picture is at {tmp_path / 'out.png'}" in out
    for stage in ("read", "channels", "cascade", "tokens"):
        assert stage in out
    with PIL.open(tmp_path / "out.png") as drawn:
        assert min(drawn.size) > 200
        assert len(drawn.convert("RGB").getcolors(1 << 24)) > 100


SHAPES = [
    (500, 741),
    (512, 512),
    (200, 600),
    (90, 512),
    (5000, 3),
    (3, 5000),
    (1, 1),
    (1, 2048),
    (2048, 1),
    (16, 7),
    (7, 16),
    (9, 4),
]


@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize(
    ("count", "searched", "lines", "paths"),
    [(17, False, 9, 1), (34, True, 7, 1), (1, True, 0, 1), (40, False, 0, 1), (17, True, 9, 2)],
)
def test_nothing_overlaps(size: tuple[int, int], count: int, searched: bool, lines: int, paths: int) -> None:
    height, width = size
    texture = texvlm.Texture(torch.zeros(1, height, width))
    sizes = [(texture.level(level).shape[2], texture.level(level).shape[3]) for level in range(texture.levels)]
    at = Layout(width, height, texture.levels, count, searched, lines, paths)
    assert len(at.panels) == 3 * paths
    levels = at.levels(sizes)
    assert len(levels) == texture.levels == texvlm.level_count(height, width)
    assert min(min(w, h) for _, _, w, h in levels) > 0.02  # inches: all are seen
    x0, y0 = (min(box[i] for box in levels) for i in (0, 1))
    right, bottom = (max(box[i] + box[i + 2] for box in levels) for i in (0, 1))

    def titled(x: float, y: float, w: float, h: float) -> tuple[float, float, float, float]:
        return x, y - TITLE + 0.06, w, h + TITLE - 0.06

    boxes = [titled(*spot, at.panel_w, at.image_h) for spot in at.panels]
    boxes.append(titled(x0, y0, max(right - x0, 3.0), bottom - y0))
    if at.relevance:
        boxes.append(titled(*at.relevance, at.panel_w, at.image_h))
    if lines:
        boxes.append(titled(*at.absent, 3.0, lines * LINE - 0.1))
    for index in range(count):
        x, y = at.tile(index)
        boxes.append((x, y, at.slot_w, at.tile_h + LABEL - 0.2))
        assert at.tile_w <= at.slot_w + 1e-9
    for a, b in itertools.combinations([*boxes, *levels], 2):
        if a in levels and b == boxes[3 * paths]:
            continue
        if b in levels and a == boxes[3 * paths]:
            continue
        apart = (
            a[0] + a[2] <= b[0] + 1e-9 or b[0] + b[2] <= a[0] + 1e-9 or a[1] + a[3] <= b[1] + 1e-9 or b[1] + b[3] <= a[1] + 1e-9
        )
        assert apart, (a, b)
    for x, y, w, h in boxes:
        assert x >= 0 and y >= 0 and x + w <= at.width and y + h <= at.height


@pytest.mark.parametrize("size", [(200, 600), (90, 512)])
def test_titles_are_nearer_to_their_own_panel(size: tuple[int, int]) -> None:
    at = Layout(size[1], size[0], 10, 17)
    if at.stacked:
        above = at.panels[1][1] - 0.55 - (at.panels[0][1] + at.image_h)  # from the panel above to the letters
        assert above > 0.12 + 0.2


@pytest.mark.parametrize(
    ("size", "remark"),
    [
        ((500, 741), None),
        ((400, 100), None),
        ((100, 1500), None),
        ((5000, 3), "wider"),
        ((3, 5000), "taller"),
        ((90, 1), "wider"),
    ],
)
def test_what_is_out_of_shape_says_so(size: tuple[int, int], remark: str | None) -> None:
    said = Layout(size[1], size[0], 1, 17).out_of_shape()
    assert said is None if remark is None else (said is not None and f"times {remark} than it is" in said)


@pytest.mark.parametrize("paths", [["salience", "multiscale"], ["learned", "anisotropic_text"], ["five_stage"]])
@pytest.mark.parametrize("size", [(70, 90), (30, 200)])
def test_paths_side_by_side(size: tuple[int, int], paths: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path / "in.png", noise(*size))
    assert cli.main(["view", path, "-o", str(tmp_path / "out.png"), "--dpi", "30", "-k", "6", "--path", *paths]) == 0
    out = capsys.readouterr().out
    assert out.count("cascade") == len(paths)
    if len(paths) == 2:
        assert all(f"{name}: 6 of" in out for name in paths)
    with PIL.open(tmp_path / "out.png") as drawn:
        assert len(drawn.convert("RGB").getcolors(1 << 24)) > 100


def test_two_paths_are_those_of_select() -> None:
    image = torch.from_numpy(noise(64, 96)).permute(2, 0, 1).contiguous()
    scene, _ = look(picture(image), 7, 16, "edge", paths=["learned", "multiscale"])
    assert [kept.path for kept in scene.kept] == ["learned", "multiscale"]
    for kept in scene.kept:
        wanted = texvlm.select(image, 7, 16, kept.path)
        assert torch.equal(kept.selection.boxes(), wanted.boxes())
    (y0, x0, y1, x1), level = wanted.boxes()[0, 0].tolist(), int(wanted.lod[0, 0])
    shown, sharp = scene.kept[1].seen[:, y0:y1, x0:x1], texvlm.Texture(image).level(level)[0]
    if level == 0:
        torch.testing.assert_close(shown, sharp[:, y0:y1, x0:x1])
    token = token_of_cells(wanted)
    assert set(token[token >= 0].tolist()) == set(range(7)) and torch.equal(token >= 0, wanted.mask()[0])


def test_three_paths_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path / "in.png", noise(20, 20))
    line = complaint(capsys, "view", path, "--path", "salience", "learned", "multiscale")
    assert "one path, or two to compare, got 3" in line
    with pytest.raises(SystemExit, match="2"):
        cli.main(["view", path, "--path", "magic"])


def test_dpi_is_bounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path / "in.png", noise(8, 8))
    for dpi in ("1", "19", "100000"):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["view", path, "--dpi", dpi])
        assert "--dpi: must be from 20 to 1200" in capsys.readouterr().err
    line = complaint(capsys, "view", path, "--dpi", "1200", "-o", str(tmp_path / "out.png"))
    assert "million pixels" in line and "is the most for it" in line


def test_names_may_hold_anything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path / "a $x_{$ 图.png", noise(20, 20))
    arguments = ["view", path, "-o", str(tmp_path / "o.png"), "--dpi", "20", "--channels", "edge", "--query", "$^$ 七"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert cli.main(arguments) == 0
    assert capsys.readouterr().err == ""


def test_channels_by_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert len(channel_names("all")) == 40
    assert len(channel_names("minimal")) == 13
    assert channel_names("text, edge,edge") == ["text", "edge"]
    assert channel_names("embedding,x")[15:] == ["embedding_15", "x"]
    path = saved(tmp_path / "in.png", noise(20, 20))
    assert "no channel 'nonsense'" in complaint(capsys, "view", path, "--channels", "edge,nonsense")
    assert "names none" in complaint(capsys, "view", path, "--channels", ",")
    assert "no previous picture" in complaint(capsys, "view", path, "--channels", "motion")


def test_one_picture_gives_seventeen_channels() -> None:
    scene, _ = look(picture(torch.from_numpy(noise(40, 60)).permute(2, 0, 1).contiguous()), 5, 16)
    assert scene.wanted == list(scene.texture.names) and len(scene.wanted) == 17
    assert len(scene.unasked) == 23 and scene.absent == {}
    assert scene.unasked["motion"] == "no previous picture"
    assert not any(note.startswith("absent") for note in map(str, scene.texture.meta.values()))
    text = " / ".join(line for line, _ in tiles.absent_lines(scene.unasked, 4.0))
    assert "--previous would bring / motion, previous saliency" in text
    assert "--query would bring / embedding 0 to 15" in text


def test_a_channel_that_was_asked_for_says_what_it_needs() -> None:
    image = torch.from_numpy(noise(40, 60)).permute(2, 0, 1).contiguous()
    scene, _ = look(picture(image), 5, 16, "minimal")
    assert scene.wanted[7] == "motion" and scene.absent == {"motion": "no previous picture"} and scene.unasked == {}
    assert len(scene.texture.names) == 12


def test_previous_brings_motion_and_flow() -> None:
    smooth = torch.nn.functional.interpolate(
        torch.rand(1, 3, 24, 24, generator=torch.Generator().manual_seed(0)), (96, 96), mode="bicubic"
    )
    image = smooth[0].clamp(0, 1)
    scene, stages = look(picture(image), 5, 16, sources=Sources(picture(image.roll(2, 2).mul(255).byte())))
    assert {"motion", "previous_saliency"} <= set(scene.wanted)
    assert scene.flow is not None and scene.flow[0, 0, 20:-20, 20:-20].median() == pytest.approx(2, abs=0.4)
    assert [stage.name for stage in stages[:2]] == ["previous", "flow"]


def test_previous_must_be_as_large(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = saved(tmp_path / "a.png", noise(20, 30)), saved(tmp_path / "b.png", noise(30, 20))
    line = complaint(capsys, "view", a, "--previous", b)
    assert "as large as the picture, 30 x 20, got 20 x 30" in line
    assert "--query is empty" in complaint(capsys, "view", a, "--query", " ")


def test_a_query_lights_up_what_it_asks_for() -> None:
    pytest.importorskip("sklearn", reason="scikit-learn ships the digits")
    canvas = digit_canvas(*load_digits(held_out=True), side=384, count=24, sizes=(36, 60), clutter=0.3, seed=0)
    sevens = canvas.boxes[canvas.labels == 7]
    assert len(sevens) > 0
    sources = Sources(query="seven", embedding=texvlm.Embedding(texvlm.DigitsEmbedding()))
    scene, _ = look(picture(canvas.image), 12, 16, sources=sources)
    assert scene.relevance is not None and scene.relevance.shape == (1, 384, 384)
    assert "embedding_15" in scene.wanted and "previous_relevance" in scene.unasked
    columns = scene.selection.grid[1]
    x = (scene.selection.indices[0] % columns + 0.5) * 16
    y = (scene.selection.indices[0] // columns + 0.5) * 16
    inside = (x[:, None] > sevens[:, 0] - 8) & (x[:, None] < sevens[:, 2] + 8)
    inside &= (y[:, None] > sevens[:, 1] - 8) & (y[:, None] < sevens[:, 3] + 8)
    assert inside.any(1).float().mean() > 0.7


def test_clusters_are_categories() -> None:
    colours = tiles.categories(np.array([[0, 1, 2], [2, 49, 0]], dtype=np.float32))
    assert colours.shape == (2, 3, 3)
    assert (colours[0, 0] == colours[1, 2]).all()
    assert len(np.unique(tiles.categories(np.arange(50, dtype=np.float32)[None])[0].round(3), axis=0)) == 50


def test_shrinking_keeps_the_mean() -> None:
    values = np.random.default_rng(0).random((60, 40), dtype=np.float32)
    small = shrunk(values, 20, 30)
    assert small.shape == (30, 20)
    assert small.mean() == pytest.approx(values.mean(), abs=1e-5)
    assert shrunk(values, 40, 60) is values


def test_small_words() -> None:
    assert share(273, 1504, 16) == "18% of the cells sharp, the rest from level 4"
    assert share(1503, 1504, 16) == "more than 99% of the cells sharp, the rest from level 4"
    assert share(1, 1504, 16) == "less than 1% of the cells sharp, the rest from level 4"
    assert share(12, 12, 16) == "every cell sharp, so nothing is lost"
    assert share(1, 1, 16) == "the one cell that there is, sharp"
    assert (cli.plural(1, "cell"), cli.plural(1504, "cell"), cli.plural(0, "cell")) == ("1 cell", "1,504 cells", "0 cells")
