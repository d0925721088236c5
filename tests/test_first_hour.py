"""What a newcomer hands in and expects to work: traps that would be silent are named, other forms are taken, textures feel like tensors."""

from __future__ import annotations

import copy
import inspect
import io
import pydoc
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import texvlm
from texvlm import pictures

G = torch.Generator().manual_seed(0)
IMAGE = torch.rand(3, 40, 56, generator=G)
BYTES = (IMAGE * 255).to(torch.uint8)
HWC = BYTES.permute(1, 2, 0).contiguous().numpy()
BATCH = texvlm.Texture(torch.rand(3, 4, 24, 20, generator=G))
ONE = BATCH[1]
UV = torch.rand(7, 2, generator=G)


def heard(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught]


def saved(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file)


# ---- traps ----


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("shape", [(300, 451, 3), (2, 32, 16, 4)])
def test_a_tensor_with_its_colours_last_is_doubted(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    (said,) = heard(lambda: texvlm.Texture(torch.zeros(shape, dtype=dtype)))
    assert f"{shape[-3]} channels of {shape[-2]} x {shape[-1]}" in said
    assert ("permute(2, 0, 1)" if len(shape) == 3 else "permute(0, 3, 1, 2)") in said
    with pytest.raises(ValueError, match=r"channels; are its colours last\? permute"):
        texvlm.build_channels(torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize("shape", [(512, 1, 1), (256, 4, 4), (8, 8, 3), (2, 3, 40, 4), (300, 451, 1)])
def test_small_feature_maps_are_not_doubted(shape: tuple[int, ...]) -> None:
    assert heard(lambda: texvlm.Texture(torch.zeros(shape))) == []


@pytest.mark.parametrize(
    "call",
    [
        lambda x: texvlm.build_channels(x, channels=["edge"]),
        lambda x: texvlm.select(x, k=3),
        lambda x: texvlm.saliency(x),
        lambda x: texvlm.select(x.requires_grad_(), k=3),
        lambda x: texvlm.build_channels(x.half(), channels=["edge"]),
    ],
)
def test_floats_up_to_255_are_doubted(call: Callable[[torch.Tensor], Any]) -> None:
    (said,) = heard(lambda: call(IMAGE * 255))
    assert "divide it by 255" in said
    assert heard(lambda: call(IMAGE.clone())) == []


def test_a_doubt_is_at_the_line_that_called_and_is_heard_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            texvlm.build_channels(IMAGE * 255)
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_doubts_do_not_stand_in_the_way_of_compiling_or_transforms() -> None:
    bright = IMAGE * 255
    compiled = torch.compile(lambda x: texvlm.build_channels(x, channels=["edge"]).data, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(IMAGE), texvlm.build_channels(IMAGE, channels=["edge"]).data)
    assert heard(lambda: compiled(bright)) == []
    assert torch.func.vmap(lambda x: texvlm.saliency(x))(torch.stack([IMAGE, IMAGE])).shape == (2, 1, 40, 56)


def test_motion_takes_the_previous_picture_first() -> None:
    previous, current = IMAGE, IMAGE.roll(3, 2)
    flow, occlusion = texvlm.optical_flow(previous, current)
    right = torch.ops.texvlm.motion(current[None], previous[None], flow, occlusion)
    wrong = torch.ops.texvlm.motion(previous[None], current[None], flow, occlusion)
    assert not torch.equal(right, wrong)
    for named in ({"previous": previous, "current": current}, {"image": current, "previous": previous}):
        assert heard(lambda named=named: texvlm.motion(**named, flow=flow, occlusion=occlusion)) == []
        assert torch.equal(texvlm.motion(**named, flow=flow, occlusion=occlusion), right)
    assert heard(lambda: texvlm.motion(previous, current)) == []
    assert torch.equal(texvlm.motion(previous, current), texvlm.motion(current, previous))
    for call in (lambda: texvlm.motion(previous, current, flow), lambda: texvlm.motion(previous, current, flow=flow)):
        (said,) = heard(call)
        assert "previous picture first" in said
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(texvlm.motion(previous, current, flow, occlusion), right)
    with pytest.raises(TypeError, match="previous"):
        texvlm.motion(current, previous=previous, image=current)
    assert list(inspect.signature(texvlm.motion).parameters)[:2] == ["previous", "current"]


def test_a_transform_says_what_to_use_instead() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return texvlm.build_channels(x, channels=["edge", "low_pass"]).data.square().sum()

    with pytest.raises(RuntimeError, match=r"torch\.autograd\.grad\(loss, inputs\)"):
        torch.func.grad(loss)(IMAGE)
    (by_grad,) = torch.autograd.grad(loss(x := IMAGE.clone().requires_grad_()), x)
    torch.testing.assert_close(torch.autograd.functional.vjp(loss, IMAGE)[1], by_grad)
    torch.testing.assert_close(torch.autograd.functional.jacobian(loss, IMAGE), by_grad)


def test_no_name_in_dir_is_a_module() -> None:
    assert [name for name in dir(texvlm) if inspect.ismodule(getattr(texvlm, name))] == []
    assert {"Texture", "CHANNELS", "select", "__version__"} <= set(dir(texvlm))


def test_ops_have_docstrings() -> None:
    from pydoc import render_doc

    names = {n.split("::")[1].partition(".")[0] for n in torch._C._dispatch_get_all_op_names() if n.startswith("texvlm::")}
    for name in names:
        doc = getattr(torch.ops.texvlm, name).__doc__
        assert f"texvlm::{name}(" in doc, name
        assert len(doc.splitlines()[0]) > 20, name
    assert "Samples a texture at given places" in render_doc(torch.ops.texvlm.sample_lod)
    assert "The gradients of torch.ops.texvlm.sample_lod" in render_doc(torch.ops.texvlm.sample_lod_backward)


# ---- pictures ----


def test_pil_pictures_are_turned_upright(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for orientation, turned in ((6, np.rot90(HWC, -1)), (2, HWC[:, ::-1]), (1, HWC)):
        exif = image.Exif()
        exif[0x0112] = orientation
        image.fromarray(HWC).save(tmp_path / "photo.png", exif=exif)
        texture = texvlm.Texture(image.open(tmp_path / "photo.png"))
        assert torch.equal(texture.data, texvlm.Texture(np.ascontiguousarray(turned)).data), orientation
        assert torch.equal(texvlm.Texture.open(tmp_path / "photo.png").data, texture.data)
    assert texvlm.Texture.open(str(tmp_path / "photo.png"), levels=2, dtype=torch.float16).dtype == torch.float16


def test_deep_pil_pictures_are_scaled() -> None:
    image = pytest.importorskip("PIL.Image")
    grey = np.linspace(0, 65535, 12).reshape(3, 4)
    wanted = torch.from_numpy(grey / 65535).float()
    for array in (grey.astype(np.uint16), grey.astype(np.int32), (grey / 65535).astype(np.float32), grey.astype(np.float32)):
        got = texvlm.Texture(image.fromarray(array)).level(0)[0]
        torch.testing.assert_close(got[0], wanted, atol=2e-5, rtol=0)
    dim = texvlm.Texture(image.fromarray(np.array([[0, 51, 255]], np.float32))).level(0).flatten().tolist()
    assert dim == pytest.approx([0, 0.2, 1])
    with pytest.raises(ValueError, match=r"image has pixels outside what a picture can show \(mode F\)"):
        texvlm.Texture(image.fromarray(np.array([[-1.0, 2.0]], np.float32)))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float16, np.float32, np.float64, ">f4"])
def test_arrays_of_all_kinds(dtype: Any) -> None:
    array = (HWC.astype(dtype) * 257) if dtype == np.uint16 else HWC if dtype == np.uint8 else (HWC / 255).astype(dtype)
    wanted = IMAGE.mul(255).floor() / 255
    for given in (array, array.transpose(2, 0, 1), array[None], array.transpose(2, 0, 1)[None], array[::-1][::-1]):
        got = texvlm.Texture(given).level(0)[0].float()
        torch.testing.assert_close(got, wanted, atol=5e-4 if dtype == np.float16 else 1e-6, rtol=0)
    assert texvlm.Texture(array[..., 0]).shape == (1, 1, 40, 56)
    assert torch.equal(texvlm.saliency(np.ascontiguousarray(array.transpose(2, 0, 1))), texvlm.saliency(array))


def test_arrays_that_may_be_either_are_as_documented() -> None:
    assert texvlm.Texture(np.zeros((3, 5, 4), np.uint8)).shape == (1, 4, 3, 5)
    assert texvlm.Texture(np.zeros((6, 7, 5), np.uint8)).shape == (1, 5, 6, 7)
    with pytest.raises(ValueError, match=r"may be \[H, W, C\] or \[C, H, W\]"):
        texvlm.Texture(np.zeros((6, 7, 5), np.float32))
    for array in (np.zeros((4, 4), np.int64), np.zeros(4, np.uint8), np.zeros((4, 4), bool)):
        with pytest.raises(ValueError, match="image as an ndarray must be uint8, uint16 or floating point"):
            texvlm.Texture(array)


def test_lists_of_pictures_are_batches() -> None:
    image = pytest.importorskip("PIL.Image")
    assert torch.equal(texvlm.Texture([IMAGE, IMAGE.flip(2)]).data, texvlm.Texture(torch.stack([IMAGE, IMAGE.flip(2)])).data)
    assert torch.equal(texvlm.Texture((image.fromarray(HWC), HWC, BYTES)).data, texvlm.Texture(BYTES.expand(3, -1, -1, -1)).data)
    assert texvlm.select([HWC, HWC], k=2).indices.shape == (2, 2)
    half = texvlm.build_channels([IMAGE.half()], channels=["edge"])
    assert half.dtype == torch.float16
    leaf = IMAGE.clone().requires_grad_()
    texvlm.Texture([leaf, leaf]).data.sum().backward()
    assert leaf.grad is not None
    for bad, message in (
        ([], "image must hold at least one picture"),
        (
            [IMAGE, IMAGE[:, :-1]],
            r"image\[1\] must have the size of image\[0\], 3 channels of 40 x 56, got 3 channels of 39 x 56",
        ),
        ([IMAGE, BYTES], r"image\[1\] must have the dtype of image\[0\]"),
        ([0.5], r"image\[0\] must be a tensor, an ndarray, a PIL image or a list of them, got float"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            texvlm.Texture(bad)


def test_the_command_line_and_python_know_the_same_channels() -> None:
    from texvlm.cli.view import channel_names

    for said in ("all", "minimal", "embedding"):
        assert [texvlm.CHANNELS[i].name for i in texvlm.channels.channel_indices(said)] == channel_names(said)
    assert texvlm.build_channels(IMAGE, channels=["embedding", "red"], levels=1).names[-2:] == ("embedding_15", "red")
    moved = texvlm.build_channels(IMAGE, IMAGE.roll(2, 2), channels="all")
    assert torch.equal(moved.data, texvlm.build_channels(IMAGE, IMAGE.roll(2, 2)).data)


# ---- places ----

SAMPLERS = {
    "sample": lambda t, uv: t.sample(uv, 0.7),
    "hardware": lambda t, uv: t.sample(uv, 0.7, backend="texture"),
    "footprint": lambda t, uv: t.sample_footprint(uv, torch.tensor([0.1, 0.02]), torch.tensor([0.0, 0.03])),
    "footprint by hardware": lambda t, uv: t.sample_footprint(uv, uv * 0 + 0.1, uv * 0, backend="texture"),
    "patches": lambda t, uv: t.patches(uv, 0.7, 4, axes=torch.tensor([[1.0, 0.5], [0.0, 1.0]])),
}


@pytest.mark.parametrize("sample", SAMPLERS.values(), ids=list(SAMPLERS))
def test_results_have_the_shape_of_the_places(sample: Callable[[texvlm.Texture, Any], torch.Tensor]) -> None:
    wanted = sample(ONE, UV[None])
    tail = wanted.shape[2:]
    assert torch.equal(sample(ONE, UV), wanted[0])
    assert torch.equal(sample(BATCH, UV), sample(BATCH, UV.expand(3, -1, -1)))
    assert torch.equal(sample(BATCH, UV[None]), sample(BATCH, UV.expand(3, -1, -1)))
    grid = torch.rand(3, 5, 6, 2, generator=G)
    assert sample(BATCH, grid).shape == (3, 5, 6, *tail)
    assert torch.equal(sample(BATCH, grid).flatten(1, 2), sample(BATCH, grid.flatten(1, 2)))
    assert torch.equal(sample(ONE, grid).flatten(1, 2), sample(ONE, grid.flatten(1, 2)))
    assert torch.equal(sample(BATCH, grid[:1]), sample(BATCH, grid[:1].expand(3, -1, -1, -1)))


def test_places_and_levels_as_arrays_and_in_the_shape_of_the_places() -> None:
    grid, lod = torch.rand(3, 5, 6, 2, generator=G), torch.rand(3, 5, 6, generator=G)
    wanted = BATCH.sample(grid.flatten(1, 2), lod.flatten(1)).unflatten(1, (5, 6))
    assert torch.equal(BATCH.sample(grid, lod), wanted)
    assert torch.equal(BATCH.sample(grid.numpy()[::-1][::-1], lod.numpy()), wanted)
    assert torch.equal(BATCH.sample(grid, lod[:1, :, :1]), BATCH.sample(grid, lod[:1, :, :1].expand(3, 5, 6)))
    assert torch.equal(ONE.sample(UV.double().numpy(), np.float32(0.5)), ONE.sample(UV, 0.5))
    assert torch.equal(ONE.sample(UV, lod.flatten()[:7]), ONE.sample(UV[None], lod.flatten()[None, :7])[0])
    with pytest.raises(ValueError, match=r"lod must be a number, or broadcast to \[3, 5, 6\], .*got \[5\]"):
        BATCH.sample(grid, lod[0, :, 0])


def test_gradients_of_shared_places_are_summed() -> None:
    shared = UV.clone().requires_grad_()
    BATCH.sample(shared, 0.5).square().sum().backward()
    each = UV.expand(3, -1, -1).clone().requires_grad_()
    BATCH.sample(each, 0.5).square().sum().backward()
    torch.testing.assert_close(shared.grad, each.grad.sum(0))


def test_one_fixation_for_each_picture() -> None:
    layout = texvlm.FoveaLayout(fovea=2, rings=(3,), patch=4)
    at = torch.rand(3, 2, generator=G)
    wanted = texvlm.sample_foveated(BATCH, at[:, None], layout)
    for given in (at, at.numpy()):
        got = texvlm.sample_foveated(BATCH, given, layout)
        assert got.patches.shape == (3, 7, 4, 4, 4)
        assert all(torch.equal(a, b[:, 0]) for a, b in zip(got, wanted, strict=True))
    alone = texvlm.sample_foveated(ONE, at[1], layout)
    assert alone.uv.shape == (7, 2)
    assert all(torch.equal(a, b[1, 0]) for a, b in zip(alone, wanted, strict=True))
    assert texvlm.sample_foveated(BATCH, at[1], layout).lod.shape == (3, 7)
    assert texvlm.sample_foveated(BATCH, at[None, :2], layout).lod.shape == (3, 2, 7)
    axes = texvlm.line_axes(torch.tensor([1.0, 0.0]))
    turned = texvlm.sample_foveated(BATCH, at, layout, axes=axes.expand(3, 2, 2))
    assert torch.equal(turned.uv, texvlm.sample_foveated(BATCH, at[:, None], layout, axes=axes.expand(3, 1, 2, 2)).uv[:, 0])
    eye = texvlm.build_channels(IMAGE, channels=["eccentricity"], fixation=np.array([0.2, 0.8]))
    assert torch.equal(eye.data, texvlm.build_channels(IMAGE, channels=["eccentricity"], fixation=torch.tensor([0.2, 0.8])).data)


# ---- a texture is like a tensor ----


def test_a_texture_has_what_a_tensor_has() -> None:
    assert BATCH.shape == (3, 4, 24, 20)
    assert (BATCH.dtype, BATCH.device, BATCH.requires_grad, len(BATCH)) == (torch.float32, torch.device("cpu"), False, 3)
    assert BATCH.half().dtype == torch.float16
    assert BATCH.half().float().dtype == torch.float32
    assert torch.equal(BATCH.cpu().data, BATCH.data)
    graph = texvlm.Texture(IMAGE.clone().requires_grad_())
    assert graph.requires_grad
    assert not graph.detach().requires_grad
    assert texvlm.Texture(torch.zeros(0, 3, 4, 4)), "an empty batch is true, as before"


def test_channels_by_name_and_pictures_by_number() -> None:
    texture = texvlm.build_channels(torch.stack([IMAGE, IMAGE.flip(1)]), channels="minimal")
    edge = texture["edge"]
    assert (edge.names, edge.reducer, edge.meta, edge.shape) == (("edge",), ("max",), {"edge": "picture"}, (2, 1, 40, 56))
    assert torch.equal(edge.level(2), texvlm.build_channels(torch.stack([IMAGE, IMAGE.flip(1)]), channels=["edge"]).level(2))
    assert texture[["blue", "red"]].names == ("blue", "red")
    assert torch.equal(texture[["blue", "red"]].level(1), texture.level(1)[:, [2, 0]])
    for at, wanted in ((0, [0]), (-1, [1]), (np.int64(1), [1]), (slice(None, None, 2), [0]), ([1, 0], [1, 0])):
        assert torch.equal(texture[at].data, texture.data[wanted])
        assert texture[at].meta == texture.meta
    assert len(list(texture)) == 2
    for at, error in ((2, IndexError), (-3, IndexError), ("nothing", KeyError), (["edge", "edge"], ValueError), (1.5, TypeError)):
        with pytest.raises(error):
            texture[at]
    leaf = IMAGE.clone().requires_grad_()
    texvlm.build_channels(leaf, channels=["red", "edge"])["edge"].data.sum().backward()
    assert leaf.grad.abs().sum() > 0


def test_textures_are_stacked() -> None:
    query = texvlm.build_channels(IMAGE, channels=["red"])
    other = texvlm.build_channels(IMAGE.flip(2), channels=["red"])
    other.meta["red"] = "elsewhere"
    both = texvlm.Texture.stack([query, other])
    assert (both.shape, both.names, both.meta) == ((2, 1, 40, 56), ("red",), {})
    assert torch.equal(both[1].data, other.data)
    assert texvlm.Texture.stack([query, query]).meta == query.meta
    with pytest.raises(ValueError, match=r"textures\[1\] must have the height of textures\[0\], 40, got 39"):
        texvlm.Texture.stack([query, texvlm.build_channels(IMAGE[:, :-1], channels=["red"])])
    with pytest.raises(ValueError, match="at least one texture"):
        texvlm.Texture.stack([])


class Textures(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[texvlm.Texture, int]:
        return texvlm.Texture(torch.full((3, 16, 16), float(index)), names=["r", "g", "b"]), index


@pytest.mark.parametrize(("workers", "start"), [(0, None), (2, "fork"), (1, "spawn")])
def test_a_data_loader_stacks_textures(workers: int, start: str | None) -> None:
    loader = DataLoader(Textures(), batch_size=2, num_workers=workers, multiprocessing_context=start, timeout=60 * bool(workers))
    batches = list(loader)
    assert [b.shape for b, _ in batches] == [(2, 3, 16, 16)] * 2
    assert torch.cat([b["g"].level(-1).flatten() for b, _ in batches]).tolist() == [0, 1, 2, 3]


def test_a_module_holds_a_texture() -> None:
    texture = texvlm.build_channels(IMAGE, channels=["red", "edge"])
    module = torch.nn.Sequential(texvlm.TextureBuffer(texture))
    held = module[0]
    assert (held.texture.names, held.texture.reducer, held.texture.meta) == (texture.names, texture.reducer, texture.meta)
    assert torch.equal(held(UV, 0.5), texture.sample(UV, 0.5))
    assert not list(module.parameters())
    other = texvlm.TextureBuffer(texvlm.build_channels(IMAGE.flip(1), channels=["red", "edge"]))
    assert not other.load_state_dict(saved(held.state_dict()), strict=True).missing_keys
    assert torch.equal(other.texture.data, texture.data)
    assert all(isinstance(value, torch.Tensor) for value in held.state_dict().values())
    twin = copy.deepcopy(module).half()
    assert (twin[0].texture.dtype, held.texture.dtype) == (torch.float16, torch.float32)
    assert twin.to(torch.float64)[0].texture.dtype == torch.float64
    turned = texvlm.TextureBuffer(texvlm.build_channels(IMAGE.transpose(1, 2), channels=["red", "edge"], levels=texture.levels))
    assert turned.data.shape == held.data.shape
    with pytest.raises(ValueError, match="the state is of a texture of 40 x 56 with 6 levels, not 56 x 40 with 6"):
        turned.load_state_dict(held.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        held.load_state_dict({}, strict=True)


def test_axes_and_layouts_load_as_they_are() -> None:
    pca = texvlm.PCA.fit(torch.rand(50, 20, generator=G))
    assert torch.equal(saved(pca).axes, pca.axes)
    layout = texvlm.FoveaLayout(fovea=3, rings=(4,), e0=torch.tensor(40.0))
    assert torch.equal(saved(layout).offsets, layout.offsets)
    assert saved(texvlm.FoveaLayout()).count == 273


def test_the_look_at_values_is_of_the_processor_alone() -> None:
    """On another device it would wait for that."""
    assert heard(lambda: pictures.as_rgb(torch.full((3, 32, 32), 200.0, device="meta"))) == []


def test_help_fits_on_a_few_screens_and_tells_no_tales() -> None:
    text = pydoc.render_doc(texvlm, renderer=pydoc.plaintext)
    assert len(text.splitlines()) < 150
    rows = [
        line.split("  ", 1)[1] for line in (texvlm.__doc__ or "").splitlines() if line.startswith("    ") and ">>>" not in line
    ]
    names = {name for row in rows for name in re.findall(r"[A-Za-z_.]*[A-Za-z]", re.sub(r"\(.*?\)", "", row))}
    for name in {"select", "Texture", "build_channels"} | {n for n in names if n[0].isupper() or "_" in n}:
        thing = texvlm
        for part in name.removeprefix("texvlm.").split("."):
            thing = getattr(thing, part)
