"""What cannot be right is refused by the argument's name, with what was expected and what came, whichever function it was handed to."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

import texvlm

IMAGE = torch.rand(1, 3, 32, 32)
TEXTURE = texvlm.Texture(torch.rand(2, 3, 9, 6))
UV = torch.rand(2, 5, 2)
BUFFER = torch.zeros(1, 1, 3)
AXES = texvlm.PCA.fit(torch.rand(20, 9))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: TEXTURE.sample([[0.5, 0.5]]), "uv must be a tensor, got list"),
        (lambda: TEXTURE.sample(UV.to(torch.complex64)), "uv must be real, got torch.complex64"),
        (lambda: TEXTURE.sample(UV, lod=None), "lod must be a number or a tensor, got None"),
        (lambda: TEXTURE.sample(UV, lod=torch.rand(2, 4)), r"lod must be a number, or broadcast to \[2, 5\].*got \[2, 4\]"),
        (lambda: TEXTURE.sample_footprint(UV, 0.1, UV), "ddx must be a tensor, got float"),
        (lambda: TEXTURE.patches(UV, "1"), "lod must be a number or a tensor, got '1'"),
        (lambda: TEXTURE.patches([[0.5, 0.5]], 0.0), "center_uv must be a tensor, got list"),
        (lambda: TEXTURE.patches(UV, 0.0, size=2.0), "size must be an integer, got 2.0"),
        (lambda: TEXTURE.patches(UV, 0.0, axes=[1]), "axes must be a tensor, got list"),
        (lambda: TEXTURE.to(torch.int32), "data must be floating point, got torch.int32"),
        (lambda: texvlm.Texture(IMAGE, levels=1.5), "levels must be an integer, got 1.5"),
        (lambda: texvlm.Texture(IMAGE, levels=True), "levels must be an integer, got True"),
        (lambda: texvlm.Texture(IMAGE, dtype="float16"), "dtype must be a torch.dtype, got 'float16'"),
        (lambda: texvlm.Texture(IMAGE, reducer=None), "reducer must be a name, or one per channel, got None"),
        (lambda: texvlm.Texture(torch.rand(1, 12, 4), layout="spatial", grid=(-3, -4)), "grid must be at least 1, got -3"),
        (lambda: texvlm.Texture(torch.rand(1, 12, 4), layout="spatial", grid=12), "takes a tensor.*and grid=12"),
        (lambda: texvlm.Texture.from_data(BUFFER, -7, 1, 1), "height must be at least 1, got -7"),
        (lambda: texvlm.Texture.from_data(BUFFER, 1, 1, 0), "levels must be at least 1, got 0"),
        (lambda: texvlm.Texture.from_data(BUFFER, 1, 1, 9), "levels must be from 1 to 1 for 1 x 1, got 9"),
        (
            lambda: texvlm.Texture.from_data(BUFFER, 1, 1, 1, ["mean", "max"]),
            "reducer must be one name, or one for each of the 3",
        ),
        (lambda: texvlm.Texture.from_data(BUFFER, 1, 1, 1, names=["a", "a", "b"]), "names must differ, got a, a, b"),
        (lambda: texvlm.update_mipmaps(texvlm.Texture(IMAGE), [(0.5, 0, 2, 2)]), "rects must be whole numbers"),
        (lambda: texvlm.sample_foveated(IMAGE, torch.rand(1, 1, 2)), "texture must be a texvlm.Texture, got Tensor"),
        (lambda: texvlm.sample_foveated(TEXTURE, [[0.5, 0.5]]), "fixation must be a tensor, got list"),
        (
            lambda: texvlm.sample_foveated(TEXTURE, torch.rand(2, 1, 2), texvlm.FoveaLayout(e0=torch.tensor(-5.0))),
            "e0 must be a finite number above 0, got -5",
        ),
        (lambda: texvlm.topk([1.0, 2.0], 1), "scores must be a tensor, got list"),
        (lambda: texvlm.topk(torch.rand(1, 4), None), "k must be an integer, got None"),
        (lambda: texvlm.topk(torch.rand(1, 4), 2**70), "k must be at least 0 and below 2.63, got 1180591620717411303424"),
        (lambda: texvlm.select(IMAGE, weights={"edge": float("nan")}), "weights must be finite, got edge = nan"),
        (lambda: texvlm.superpixels(IMAGE, 2.5), "n must be an integer, got 2.5"),
        (lambda: texvlm.optical_flow(None, IMAGE), "previous must be a tensor.*got NoneType"),
        (lambda: texvlm.optical_flow(IMAGE, None), "current must be a tensor.*got NoneType"),
        (lambda: texvlm.motion(None, IMAGE), "previous must be a tensor.*got NoneType"),
        (lambda: texvlm.motion(IMAGE, None), "motion takes two pictures: previous and current"),
        (lambda: texvlm.gaussian_splat(UV, torch.ones(2, 5), 0.1, 8, 8, keep=float("nan")), "keep must be finite, got nan"),
        (lambda: texvlm.build_channels(torch.rand(3, 0, 5)), "height and width must be at least 1 .*got 0 x 5"),
        (lambda: texvlm.build_channels(IMAGE, 5), "previous must be a tensor.*got int"),
        (lambda: texvlm.build_channels(IMAGE, channels=[2.5]), "channels must be names or indices from 0 to 39, got 2.5"),
        (lambda: texvlm.build_channels(IMAGE, channels=[True]), "channels must be names or indices from 0 to 39, got True"),
        (lambda: texvlm.build_channels(IMAGE, channels="every"), "no channel 'every'; leave channels out for all"),
        (lambda: texvlm.build_channels(IMAGE, fixation=[0.5, 0.5]), "fixation must be a tensor, got list"),
        (lambda: texvlm.build_channels(IMAGE, fixations=torch.rand(3, 4, 2)), r"fixations must be \[B, P, 2\] with B = 1"),
        (lambda: texvlm.build_channels(IMAGE, n_superpixels=0), "n_superpixels must be at least 1, got 0"),
        (lambda: texvlm.build_channels(IMAGE, given={"text": [[1]]}), r"given\['text'\] must be a tensor, got list"),
        (
            lambda: texvlm.build_channels(IMAGE, given={"text": torch.rand(1, 50, 50)}),
            r"given\['text'\] must be at most as large as the picture, \[32, 32\], got \[50, 50\]",
        ),
        (
            lambda: texvlm.build_channels(IMAGE, query=5, embedding=texvlm.DigitsEmbedding()),
            "query must be a text, texts or vectors",
        ),
        (
            lambda: texvlm.build_channels(IMAGE, query=torch.zeros(16), embedding=texvlm.DigitsEmbedding()),
            "query must have a direction",
        ),
        (lambda: texvlm.Embedding.fit(texvlm.DigitsEmbedding(), IMAGE, axes=0), "axes must be at least 1, got 0"),
        (lambda: texvlm.channel_planes(IMAGE[0]), r"image must be \[B, 3, H, W\], got \[3, 32, 32\]"),
        (lambda: texvlm.channel_planes(print), "image must be a tensor, got builtin_function_or_method"),
        (lambda: texvlm.PCA.fit(UV.numpy()), "features must be a tensor, or batches of them, got ndarray"),
        (lambda: texvlm.PCA.fit(5), "features must be a tensor, or batches of them, got int"),
        (lambda: AXES.transform(UV.numpy()), "features must be a tensor, got ndarray"),
        (lambda: AXES.transform_text(None), "texts must be a tensor, got NoneType"),
        (lambda: AXES.transform(torch.tensor(3.0)), r"features must be \[n, D\] or \[B, D, h, w\] with D = 9.*got \[\]"),
        (lambda: texvlm.select(IMAGE, weights=1j), "weights must be a mapping, got complex"),
        (lambda: texvlm.CascadeConfig.preset("salience").weighed({"edge": "1"}), "weights must be finite, got edge = '1'"),
        (lambda: texvlm.TextureBuffer(TEXTURE).set_extra_state(torch.zeros(2)), "state must be .height, width, levels., got"),
        (lambda: texvlm.level_count(4, 1.5), "width must be an integer, got 1.5"),
        (lambda: texvlm.line_axes([1.0, 0.0]), "direction must be a tensor, got list"),
        (lambda: texvlm.line_axes(torch.rand(4, 3)), r"direction must be \[..., 2\], got \[4, 3\]"),
        (lambda: torch.ops.texvlm.build_channels(IMAGE.to("meta"), [0], 2**63 - 1, [], []), "levels must be at most 63"),
        (lambda: torch.ops.texvlm.predict_cells(IMAGE.to("meta"), 0, 0.0), "cell must be at least 1, got 0"),
        (
            lambda: torch.ops.texvlm.dirty_tiles(IMAGE.to("meta"), IMAGE.to("meta"), 0, 0.0, "max"),
            "tile must be at least 1, got 0",
        ),
        (lambda: texvlm.soft_topk(UV[0], 1, noise=()), "noise must be a tensor, got tuple"),
        (lambda: texvlm.noise_gate(UV, None), "weights must be a tensor, got NoneType"),
        (lambda: texvlm.select(IMAGE, 4, memory=True), "memory must be a texvlm.Selection, got bool"),
        (lambda: texvlm.PCA.from_moments(texvlm.pca.Moments(), []), "texts must be Moments, got list"),
        (
            lambda: texvlm.cell_features(TEXTURE, torch.zeros(2, 1).long(), ["entropy"], query=torch.tensor(3.0)),
            r"query must be \[D\].*got \[\]",
        ),
        (lambda: texvlm.Texture.from_data(BUFFER.numpy(), 1, 1, 1), "data must be a tensor, got ndarray"),
        (lambda: texvlm.saliency_state(BUFFER), r"image must be \[B, 3, H, W\] and not empty, got \[1, 1, 3\]"),
        (lambda: texvlm.saliency_state(torch.rand(1, 3, 0, 4)), r"image must be .* not empty, got \[1, 3, 0, 4\]"),
        (lambda: texvlm.pack_cells(IMAGE, torch.zeros(1, 1).long(), (32,)), r"size must be \(height, width\), got \(32,\)"),
        (lambda: texvlm.DigitsEmbedding().encode_text([7]), "texts must be strings, got int"),
        (lambda: texvlm.FoveaLayout(2**40), "fovea and rings must make at most 2.20 tokens"),
        (lambda: texvlm.embedding_planes(IMAGE, texvlm.DigitsEmbedding(), []), "pca must be a texvlm.PCA, got list"),
        (lambda: texvlm.warp(IMAGE, ()), "flow must be a tensor, got tuple"),
        (lambda: texvlm.motion(previous=IMAGE, current=IMAGE, flow=object()), "flow must be a tensor, got object"),
        (lambda: texvlm.quadtree_cut([torch.rand(1, 3, 5).numpy()], 4), "values must be a tensor, got ndarray"),
        (lambda: texvlm.cell_features(TEXTURE, torch.zeros(2, 1).long(), [None]), "terms must be strings, got NoneType"),
        (lambda: texvlm.compact([True, False]), "mask must be a tensor, got list"),
        (lambda: texvlm.gumbel_noise(1.5), "like must be a tensor, got float"),
        (lambda: texvlm.PCA.fit(torch.rand(5, 0)), "features must have dimensions, got none"),
        (lambda: texvlm.fixation_history(torch.rand(3), 4, 4), r"fixations must be \[B, P, 2\] or \[P, 2\], got \[3\]"),
        (lambda: texvlm.gaze_history([], 4, 4), "gaze must be a tensor, got list"),
        (
            lambda: texvlm.fixation_history(UV, 4, 4, previous=[], flow=torch.zeros(2, 2, 4, 4)),
            "previous must be a tensor, got list",
        ),
        (lambda: texvlm.Embedding(texvlm.DigitsEmbedding()).query(torch.zeros(())), "query must be a vector, or one each"),
        (lambda: texvlm.line_axes(UV, 0.0), "aspect must be positive, got 0"),
        (lambda: texvlm.warp(print, torch.zeros(1, 2, 4, 4)), "planes must be a tensor, got builtin_function_or_method"),
        (lambda: texvlm.attention_map([[0.0]], 4, 4), "attention must be a tensor, got list"),
        (lambda: texvlm.relevance([[0.0]], UV[0, 0]), "source must be a tensor, got list"),
        (lambda: texvlm.relevance(UV, UV[0, 0]), r"source must be planes .* or a texture, got \[2, 5, 2\]"),
        (lambda: texvlm.straight_through(torch.zeros(1, 1).long(), 1j), "weights must be a tensor, got complex"),
        (lambda: texvlm.straight_through(torch.zeros(1, 1).long(), torch.rand(5)), r"weights must be \[B, N\], got \[5\]"),
        (
            lambda: texvlm.straight_through(torch.zeros(2, 1), UV[:, 0]),
            r"indices must be int64 \[2, k\], got torch.float32 \[2, 1\]",
        ),
        (
            lambda: texvlm.straight_through(torch.zeros(1, 1).long(), UV[:, 0]),
            r"indices must be int64 \[2, k\], got torch.int64 \[1, 1\]",
        ),
        (lambda: texvlm.noisy_topk(torch.rand(5), 1, noise=torch.rand(1, 5)), r"scores must be \[B, N\], got \[5\]"),
        (lambda: texvlm.noisy_topk(UV[0], 1, noise=UV[0, :1]), r"noise must be as large as scores, \[5, 2\], got \[1, 2\]"),
        (lambda: texvlm.DigitsEmbedding().encode_image(None), "pictures must be a tensor, got NoneType"),
        (lambda: texvlm.DigitsEmbedding().encode_image(IMAGE[0]), r"pictures must be \[B, 3, H, W\], got \[3, 32, 32\]"),
        (
            lambda: texvlm.PCA(AXES.mean, AXES.axes[0], AXES.variance, 1.0, AXES.text_mean, 9),
            r"axes must be \[16, D\], got \[9\]",
        ),
        (lambda: texvlm.PCA(AXES.mean[:3], AXES.axes, AXES.variance, 1.0, AXES.text_mean, 9), r"mean must be \[9\] .* got \[3\]"),
        (lambda: selected(grid=[-1]), r"grid must be \(rows, columns\), got \[-1\]"),
        (lambda: selected(size=None), r"size must be \(height, width\), got None"),
        (lambda: texvlm.noise_gate(IMAGE, 1j), "weights must be a tensor, got complex"),
        (lambda: selected(indices=None).centres(), "indices must be a tensor, got NoneType"),
        (lambda: selected(indices=torch.tensor(3)).boxes(), r"indices must be \[B, k\], got \[\]"),
        (lambda: selected(count=None).mask(), "count must be a tensor, got NoneType"),
        (lambda: selected(count=torch.tensor(3)).boxes(), r"count must be \[1\] beside indices, got \[\]"),
        (lambda: selected(lod=UV).boxes(), r"lod must be \[1, 1\] beside indices, got \[2, 5, 2\]"),
        (lambda: selected(cell=2**70).boxes(), "cell must be at least 1 and below 2.63, got 1180591620717411303424"),
        (lambda: texvlm.select(IMAGE, 4, path="learned", scorer=print), "what scorer returns must be a tensor, got NoneType"),
        (lambda: texvlm.Allocator(participation=()).fit_normalisation(torch.tensor(3.0)), r"features must be \[..., terms\]"),
        (lambda: texvlm.TensionBalancer(2)(torch.tensor(3.0)), r"features must be \[B, n, inputs\], got \[\]"),
        (lambda: texvlm.Participation(2, 2)(UV, UV, torch.tensor(3.0)), r"query must be \[B, query\], got \[\]"),
        (lambda: texvlm.FoveaLayout(rings=None), "rings must be a sequence, got None"),
        (lambda: texvlm.cell_features(TEXTURE, torch.zeros(2, 1).long(), None), "terms must be a sequence, got None"),
        (lambda: texvlm.CascadeConfig(None), "terms must be a mapping from terms to weights, got NoneType"),
        (
            lambda: torch.ops.texvlm.gaussian_splat_backward(UV, UV, torch.tensor(3.0), UV[..., 0], 0.1, 1.0, mask=[True] * 3),
            r"points must be \[B, P, 2\].*got \[\]",
        ),
    ],
)
def test_it_is_named(call, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def selected(**other) -> texvlm.Selection:
    """A selection made by hand."""
    one = torch.zeros(1, 1)
    given = {"indices": one.long(), "count": one[0].long(), "grid": (2, 2), "cell": 8, "lod": one, "size": (16, 16)} | other
    return texvlm.Selection(score=one, weight=one, weights_all=None, axes=None, **given)


SCORES = torch.rand(2, 9)
PLANES = torch.rand(2, 4, 4)
WITH_NUMBERS = {
    "lod of sample": ("lod", lambda n: TEXTURE.sample(UV, n)),
    "lod of sample_lod_hardware": ("lod", lambda n: texvlm.sample_lod_hardware(TEXTURE, UV, n)),
    "lod of extract_patches": ("lod", lambda n: TEXTURE.patches(UV, n, 2)),
    "radius of fixate": ("radius", lambda n: texvlm.fixate(PLANES, 2, n)),
    "aspect of line_axes": ("aspect", lambda n: texvlm.line_axes(UV, n)),
    "keep of gaussian_splat": ("keep", lambda n: texvlm.gaussian_splat(UV, UV[..., 0], 0.1, 4, 4, base=PLANES, keep=n)),
    "threshold of dirty_tiles": ("threshold", lambda n: texvlm.dirty_tiles(IMAGE, IMAGE, 8, n).count),
    "temperature of soft_topk": ("temperature", lambda n: texvlm.soft_topk(SCORES, 2, n)),
    "temperature of log_soft_topk": ("temperature", lambda n: texvlm.log_soft_topk(SCORES, 2, n)),
    "temperature of noisy_topk": ("temperature", lambda n: texvlm.noisy_topk(SCORES, 2, n)),
    "sigma of perturbed_topk": ("sigma", lambda n: texvlm.perturbed_topk(SCORES, 2, 5, n, 0)),
    "e0 of FoveaLayout": ("e0", lambda n: texvlm.FoveaLayout(1, (), e0=n).place(torch.float64, UV.device)),
    "weights of select": ("edge", lambda n: texvlm.select(IMAGE, 2, weights={"edge": n}).indices),
}


@pytest.mark.parametrize("where", WITH_NUMBERS)
def test_a_whole_number_of_any_size_is_a_number(where: str) -> None:
    """torch takes none beyond 64 bits, where a float of that size is as good as any."""
    argument, call = WITH_NUMBERS[where]
    torch.testing.assert_close(call(2**70), call(2.0**70), rtol=0, atol=0, equal_nan=True)
    with pytest.raises(ValueError, match=f"{argument} must be at most 1.8e308 in size"):
        call(10**400)


def test_a_file_that_holds_no_axes_is_named(tmp_path: Path) -> None:
    path = tmp_path / "axes.npz"
    AXES.save(path)
    good = path.read_bytes()
    broken = (b"", b"no archive", good[:-30], good.replace(b"variance", b"variants"), good[:50] + b"?" * 9 + good[59:])
    for content in broken:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"axes\.npz does not hold the axes that PCA\.save wrote: "):
            texvlm.PCA.load(path)


def test_a_picture_beyond_pillows_limit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip("PIL.Image")
    image.new("L", (8, 8)).save(tmp_path / "large.png")
    monkeypatch.setattr(image, "MAX_IMAGE_PIXELS", 9)
    with pytest.raises(ValueError, match=r"path must be of a picture within Pillow's limit of pixels, got .*large\.png"):
        texvlm.Texture.open(tmp_path / "large.png")


def test_status_never_raises() -> None:
    assert texvlm.gl.status("a toaster").reason == "no OpenGL here: 'a toaster' is no device"


def test_pil_pictures_of_other_colours_have_three_channels() -> None:
    image = pytest.importorskip("PIL.Image")
    for mode, channels in [
        ("LAB", 3),
        ("YCbCr", 3),
        ("HSV", 3),
        ("CMYK", 3),
        ("P", 3),
        ("1", 3),
        ("LA", 4),
        ("PA", 4),
        ("RGBA", 4),
    ]:
        assert texvlm.Texture(image.new(mode, (4, 4))).channels == channels, mode


def test_torch_load_takes_textures_and_selections_as_it_is() -> None:
    for value in (TEXTURE, texvlm.select(IMAGE, k=3)):
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        assert type(torch.load(file)) is type(value)
