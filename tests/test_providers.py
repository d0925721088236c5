"""Opt-in providers: what they hand over is right in place and value, and what is missing is said in one line."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import texvlm
from texvlm import providers
from texvlm.providers.ocr import paint_quads

HEADS, PATCH, NATIVE = 4, 8, 32


def words() -> object:
    """A tokenizer of a few words, built here."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {w: i for i, w in enumerate(["[PAD]", "[BOS]", "[EOS]", "[UNK]", "a", "photo", "of", "red", "cat", "road"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="[BOS] $A [EOS]", special_tokens=[("[BOS]", 1), ("[EOS]", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", bos_token="[BOS]", eos_token="[EOS]", unk_token="[UNK]"
    )


def tiny(family: str, native: int = NATIVE):
    """A model of random weights, and its processor."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    text = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 48, "vocab_size": 10}
    text |= {"max_position_embeddings": 12, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    vision = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": HEADS, "intermediate_size": 48}
    vision |= {"image_size": native, "patch_size": PATCH}
    torch.manual_seed(0)
    if family == "clip":
        model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=24))
    else:
        model = transformers.SiglipModel(transformers.SiglipConfig(text_config=text, vision_config=vision))
    with torch.no_grad():  # biases start at zero and norms at one: nothing would notice if they were forgotten
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    pixels = SimpleNamespace(image_mean=[0.5, 0.4, 0.3], image_std=[0.2, 0.3, 0.4])
    return model.eval(), SimpleNamespace(image_processor=pixels, tokenizer=words())


def normalised(pictures: Tensor) -> Tensor:
    return (pictures - torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1)) / torch.tensor([0.2, 0.3, 0.4]).view(3, 1, 1)


@pytest.mark.parametrize("mixing", ["self", "value"])
def test_clip_is_the_last_block_without_its_mixing(mixing: str) -> None:
    """Block by block, head by head, patch by patch, as the papers write it."""
    model, processor = tiny("clip")
    pictures = torch.rand(2, 3, 32, 48)
    vision = model.vision_model
    with torch.no_grad():
        hidden = vision.pre_layrnorm(vision.embeddings(normalised(pictures), interpolate_pos_encoding=True))
        for block in vision.encoder.layers[:-1]:
            hidden = block(hidden, None)
        last = vision.encoder.layers[-1]
        tokens = last.layer_norm1(hidden)
        q, v = last.self_attn.q_proj(tokens), last.self_attn.v_proj(tokens)
        if mixing == "self":
            parts = []
            for head in range(HEADS):
                own = slice(head * 8, head * 8 + 8)
                attention = (q[..., own] @ q[..., own].transpose(1, 2) / 8**0.5).softmax(-1)
                parts.append(attention @ v[..., own])
            v = torch.cat(parts, -1)
        wanted = model.visual_projection(vision.post_layernorm(last.self_attn.out_proj(v)))[:, 1:]
    clip = texvlm.ClipEmbedding(model, processor, size=48, mixing=mixing)
    found = clip.encode_image(pictures)
    assert found.shape == (2, 24, 4, 6) and found.dtype == torch.float32
    torch.testing.assert_close(found.flatten(2).transpose(1, 2), F.normalize(wanted, dim=-1), rtol=1e-4, atol=1e-5)
    assert clip.mixing == mixing and texvlm.ClipEmbedding(model, processor).mixing == "self"


def test_clip_keeps_the_way_into_the_joint_space() -> None:
    """With the block as it was trained, the class token's row would be the model's own pooled output."""
    model, processor = tiny("clip")
    pixels = normalised(torch.rand(1, 3, 32, 32))
    with torch.no_grad():
        out = model.vision_model(pixel_values=pixels, output_hidden_states=True)
        row = model.visual_projection(model.vision_model.post_layernorm(out.hidden_states[-1][:, :1]))[:, 0]
        own = model.get_image_features(pixel_values=pixels)
    torch.testing.assert_close(row, getattr(own, "pooler_output", own))
    full = texvlm.ClipEmbedding(model, processor, size=32, mixing="full")._dense(pixels)
    patches = model.visual_projection(model.vision_model.post_layernorm(out.hidden_states[-1][:, 1:]))
    torch.testing.assert_close(full.flatten(2).transpose(1, 2), patches)


def test_siglip_of_one_patch_is_the_pooled_output() -> None:
    """A head that can attend to one patch alone attends to it: the value's path is then the model's own answer, to the bit."""
    model, processor = tiny("siglip", native=PATCH)
    picture = torch.rand(3, 3, PATCH, PATCH)
    found = texvlm.ClipEmbedding(model, processor, size=PATCH).encode_image(picture)
    with torch.no_grad():
        own = model.get_image_features(pixel_values=normalised(picture))
    assert found.shape == (3, 32, 1, 1)
    torch.testing.assert_close(found[:, :, 0, 0], F.normalize(getattr(own, "pooler_output", own), dim=1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["clip", "siglip"])
@pytest.mark.parametrize("size", [(37, 53), (1, 1), (3, 400), (200, 10)], ids=str)
def test_any_size_batch_and_dtype(family: str, size: tuple[int, int]) -> None:
    model, processor = tiny(family)
    pictures = torch.rand(2, 3, *size)
    for windows in (False, True):
        clip = texvlm.ClipEmbedding(model, processor, windows=windows)
        found = clip.encode_image(pictures)
        longest = max(found.shape[2:])
        assert longest == 8 and found.isfinite().all()  # twice the model's 32 pixels, in patches of 8
        torch.testing.assert_close(found.square().sum(1), torch.ones(2, *found.shape[2:]))
        torch.testing.assert_close(clip.encode_image(pictures[1:]), found[1:], rtol=1e-4, atol=1e-5)
    half = texvlm.ClipEmbedding(model.bfloat16(), processor, windows=True).encode_image(pictures)
    assert half.dtype == torch.float32 and (half * found).sum(1).mean() > 0.98


def test_windows_see_the_positions_of_training() -> None:
    """One window is the model at its own size; where windows overlap, their unit features are averaged."""
    model, processor = tiny("clip")
    pictures = torch.rand(1, 3, 32, 48)
    whole = texvlm.ClipEmbedding(model, processor, size=48, windows=True)
    single = texvlm.ClipEmbedding(model, processor, size=32)
    left, right = single.encode_image(pictures[..., :32]), single.encode_image(pictures[..., 16:])
    found = whole.encode_image(pictures)
    torch.testing.assert_close(found[..., :2], left[..., :2], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[..., 4:], right[..., 2:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[..., 2:4], F.normalize(left[..., 2:] + right[..., :2], dim=1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_texts_are_the_models_own(family: str) -> None:
    model, processor = tiny(family)
    clip = texvlm.ClipEmbedding(model, processor)
    found = clip.encode_text(["a red cat", "road"])
    ids = torch.tensor([[1, 4, 7, 8, 2] + [0] * 7, [1, 9, 2] + [0] * 9])
    with torch.no_grad():
        own = model.get_text_features(input_ids=ids, **({"attention_mask": (ids > 0).long()} if family == "clip" else {}))
    torch.testing.assert_close(found, F.normalize(getattr(own, "pooler_output", own), dim=1), rtol=1e-4, atol=1e-5)
    many = texvlm.ClipEmbedding(model, processor, templates=("{}", "a photo of a {}"))
    mean = found[0] + clip.encode_text(["a photo of a a red cat"])[0]
    torch.testing.assert_close(many.encode_text(["a red cat"])[0], F.normalize(mean, dim=0), rtol=1e-4, atol=1e-5)
    assert clip.encode_text(["cat " * 50]).shape == (1, found.shape[1])


def test_clip_through_the_axes_to_a_query() -> None:
    model, processor = tiny("clip")
    pictures = [torch.rand(3, 64, 96) for _ in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of random weights 16 axes may keep anything
        embedding = texvlm.Embedding.fit(texvlm.ClipEmbedding(model, processor), pictures, texts=["a cat", "a red road", "photo"])
    assert embedding.relevance(pictures[0], "a red cat").shape == (1, 5, 8)
    assert embedding.name.startswith("CLIPModel of random weights on 16 axes")
    picture = pictures[0].requires_grad_()
    embedding.relevance(picture, "cat").sum().backward()
    assert picture.grad.abs().sum() > 0
    assert not embedding.planes(pictures[1]).requires_grad


def test_clip_refuses() -> None:
    model, processor = tiny("clip")
    with pytest.raises(TypeError, match="CLIPModel or a SiglipModel of transformers, or built like one, got Linear"):
        texvlm.ClipEmbedding(torch.nn.Linear(2, 2), processor)
    with pytest.raises(TypeError, match="processor must know image_mean"):
        texvlm.ClipEmbedding(model, object())
    with pytest.raises(ValueError, match="mixing must be one of self, value, full, got 'none'"):
        texvlm.ClipEmbedding(model, processor, mixing="none")
    with pytest.raises(ValueError, match="templates must each hold"):
        texvlm.ClipEmbedding(model, processor, templates=("a photo",))
    with pytest.raises(ValueError, match="the pictures are on meta, the model on cpu"):
        texvlm.ClipEmbedding(model, processor).encode_image(torch.rand(1, 3, 8, 8, device="meta"))


# Text


def page(lines: list[tuple[str, int, int, int]], height: int = 480, width: int = 640, ink: int = 0, paper: int = 255):
    """A picture with lines (text, x, y, size) in DejaVu, and the pixels of their boxes, [H, W] bool."""
    from matplotlib import font_manager
    from PIL import Image, ImageDraw, ImageFont

    picture = Image.new("RGB", (width, height), (paper,) * 3)
    draw = ImageDraw.Draw(picture)
    boxes = torch.zeros(height, width, dtype=torch.bool)
    for text, x, y, size in lines:
        font = ImageFont.truetype(font_manager.findfont("DejaVu Sans"), size)
        draw.text((x, y), text, font=font, fill=(ink,) * 3)
        x0, y0, x1, y1 = (int(v) for v in draw.textbbox((x, y), text, font=font))
        boxes[y0:y1, x0:x1] = True
    return picture, boxes


LINES = [
    ("Total 42.50 EUR", 60, 60, 28),
    ("deliver to the back door", 200, 180, 22),
    ("OPEN", 380, 300, 60),
    ("small print matters", 40, 420, 18),
]


@pytest.fixture(scope="module")
def rapid():
    pytest.importorskip("rapidocr", reason="rapidocr is not installed")
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    return providers.RapidOcrText()


@pytest.mark.parametrize(("ink", "paper"), [(0, 255), (235, 40), (90, 160)])
def test_rapidocr_covers_the_words_and_little_else(rapid, ink: int, paper: int) -> None:
    picture, boxes = page(LINES, ink=ink, paper=paper)
    found = rapid(picture)
    assert found.shape == (1, 480, 640) and found.dtype == torch.float32 and found.min() >= 0 and found.max() <= 1
    covered = found[0] > 0
    assert covered[boxes].float().mean() > 0.9
    assert boxes[covered].float().mean() > 0.5 and covered.float().mean() < 2 * boxes.float().mean()
    assert found[0][covered].min() >= 0.5
    for text, x, y, size in LINES:  # each of them, not the large ones only
        assert covered[y + size // 2 : y + size, x : x + size * len(text) // 3].float().mean() > 0.9


def test_rapidocr_without_text_batches_and_other_inputs(rapid) -> None:
    blank = torch.full((1, 3, 200, 300), 0.7)
    assert (rapid(blank) == 0).all()
    picture, _ = page(LINES[:2], 200, 640)
    tensor = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
    both = rapid(torch.stack([tensor, torch.full_like(tensor, 200)]))
    torch.testing.assert_close(both[0], rapid(picture)[0])
    assert (both[1] == 0).all()
    torch.testing.assert_close(rapid(tensor.float() / 255)[0], both[0])
    assert isinstance(rapid, providers.PlaneProvider) and rapid(torch.rand(3, 1, 1)).shape == (1, 1, 1)


def test_quads_are_painted_where_they_are() -> None:
    turned = torch.tensor([[[10.0, 2.0], [18.0, 10.0], [10.0, 18.0], [2.0, 10.0]]])  # a square on its tip, of area 128
    for quad in (turned, turned.flip(1)):
        plane = paint_quads(quad, torch.tensor([0.5]), 20, 20)
        y, x = torch.meshgrid(torch.arange(20) + 0.5, torch.arange(20) + 0.5, indexing="ij")
        assert torch.equal(plane > 0, (x - 10).abs() + (y - 10).abs() <= 8)
    box = torch.tensor([[[-5.0, -5.0], [4.0, -5.0], [4.0, 3.0], [-5.0, 3.0]], [[2.0, 1.0], [90.0, 1.0], [90.0, 9.0], [2.0, 9.0]]])
    plane = paint_quads(box, torch.tensor([0.9, 0.6]), 10, 12)
    assert (
        (plane[:3, :4] == 0.9).all() and (plane[1:9, 4:] == 0.6).all() and (plane[9] == 0).all() and plane[3:9, 2:4].eq(0.6).all()
    )
    assert (paint_quads(torch.zeros(0, 4, 2), torch.zeros(0), 4, 4) == 0).all()


def test_doctr_boxes_straight_and_turned() -> None:
    """docTR's predictor returns boxes relative to the page; both of its layouts."""
    straight = lambda pages: [{"words": np.array([[0.25, 0.5, 0.75, 1.0, 0.8]])} for _ in pages]  # noqa: E731
    found = providers.DoctrText(straight)(torch.rand(2, 3, 40, 80))
    wanted = torch.zeros(2, 40, 80)
    wanted[:, 20:, 20:60] = 0.8
    torch.testing.assert_close(found, wanted)
    corners = np.array([[[0.25, 0.5], [0.75, 0.5], [0.75, 1.0], [0.25, 1.0], [0.8, 0.8]]])
    torch.testing.assert_close(providers.DoctrText(lambda pages: [corners])(torch.rand(3, 40, 80)), wanted[:1])
    assert (providers.DoctrText(lambda pages: [{"words": np.zeros((0, 5))}])(torch.rand(3, 8, 8)) == 0).all()


# Segments


class Prompted:
    """Answers each point with the disc, square or ground it lies on, as SAM would: three masks, the second the good one."""

    config = SimpleNamespace(vision_config=SimpleNamespace(image_size=256), _name_or_path="")

    def __init__(self, regions: Tensor) -> None:
        self.regions = regions  # labels over the padded square, [64, 64]

    def get_image_embeddings(self, pixels: Tensor) -> Tensor:
        assert pixels.shape == (1, 3, 256, 256)
        return pixels[:, :1]

    def __call__(self, image_embeddings: Tensor, input_points: Tensor, multimask_output: bool) -> SimpleNamespace:
        x, y = (input_points[0, :, 0] / 4).long().clamp(max=63).unbind(1)
        good = (self.regions[None] == self.regions[y, x][:, None, None]).float() * 20 - 10
        bad = torch.rand_like(good) * 20 - 10
        return SimpleNamespace(
            pred_masks=torch.stack([bad, good, bad], 1)[None], iou_scores=torch.tensor([0.3, 0.95, 0.9]).expand(1, len(x), 3)
        )


def test_segments_lie_where_they_are() -> None:
    """A wide picture fills the upper half of the model's square; overlapping and missing masks are settled."""
    height, width = 150, 300
    y, x = torch.meshgrid(torch.arange(64) + 0.5, torch.arange(64) + 0.5, indexing="ij")
    regions = torch.full((64, 64), 0)
    regions[((x - 16) ** 2 + (y - 16) ** 2) < 64] = 1
    regions[(x > 40) & (x < 56) & (y > 8) & (y < 24)] = 2
    labels = providers.SamSegmentation(Prompted(regions), points=16)(torch.rand(2, 3, height, width))
    assert labels.shape == (2, height, width) and labels.dtype == torch.int64
    assert labels.unique().tolist() == [0, 1, 2]
    v, u = torch.meshgrid((torch.arange(height) + 0.5) / height * 32, (torch.arange(width) + 0.5) / width * 64, indexing="ij")
    square = (u > 40) & (u < 56) & (v > 8) & (v < 24)
    disc = (u - 16) ** 2 + (v - 16) ** 2 < 64
    for part, label in ((square, 1), (disc, 2), (~square & ~disc, 0)):
        assert (labels[0][part] == label).float().mean() > 0.97  # the larger first; edges of a quarter-size mask
    torch.testing.assert_close(labels[0], labels[1])


def test_segments_fill_holes_and_survive_none() -> None:
    regions = torch.full((64, 64), 0)
    regions[:, 32:] = 1
    model = Prompted(regions)
    whole = providers.SamSegmentation(model, points=8)(torch.rand(3, 64, 64))
    assert (whole[0, :, :30] != whole[0, :, 34:].max()).all() and whole.min() == 0 and whole.max() == 1
    assert (providers.SamSegmentation(model, points=4, iou=2.0)(torch.rand(3, 20, 30)) == 0).all()
    with pytest.raises(TypeError, match="SamModel of transformers, or built like one, got object"):
        providers.SamSegmentation(object())


def test_a_real_sam_of_random_weights_runs() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    vision = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 64,
        "patch_size": 16,
        "output_channels": 16,
    }
    vision |= {"mlp_dim": 32, "global_attn_indexes": [1], "window_size": 2, "num_pos_feats": 8}
    prompt = {"hidden_size": 16, "image_size": 64, "patch_size": 16, "mask_input_channels": 4}
    decoder = {"hidden_size": 16, "mlp_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "iou_head_hidden_dim": 16}
    config = transformers.SamConfig(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder)
    model = transformers.SamModel(config).eval()
    labels = providers.SamSegmentation(model, points=4, batch=5, iou=-100.0, stability=0.0)(torch.rand(3, 50, 33))
    assert labels.shape == (1, 50, 33) and labels.min() == 0 and len(labels.unique()) == labels.max() + 1


# Saliency and flow


def test_any_network_is_a_saliency() -> None:
    net = torch.nn.Conv2d(3, 1, 3, 2, 1)
    pictures = torch.rand(2, 3, 41, 60)
    found = providers.ModuleSaliency(net, name="one convolution")(pictures)
    assert found.shape == (2, 41, 60)
    assert found.amin((1, 2)).tolist() == [0, 0] and found.amax((1, 2)).tolist() == [1, 1]
    seen = []
    density = providers.ModuleSaliency(
        lambda x: seen.append(x) or x.mean(1), size=(20, 30), mean=(0.5,) * 3, std=(0.25,) * 3, scale=255, activation=torch.exp
    )
    assert density(torch.ones(1, 3, 8, 8)).eq(0).all()  # a constant map
    assert seen[0].shape == (1, 3, 20, 30) and seen[0].eq(510).all()
    with pytest.raises(ValueError, match=r"must return \[B, 1, h, w\] or \[B, h, w\] for 2 pictures, got \[2, 3, 41, 60\]"):
        providers.ModuleSaliency(torch.nn.Identity())(pictures)
    with pytest.raises(TypeError, match="module must be callable, got int"):
        providers.ModuleSaliency(3)


def shifted(dx: float, dy: float):
    """A network that knows the answer: previous = current moved by (dx, dy), so the flow from current to previous is that."""

    def net(first: Tensor, second: Tensor) -> list[Tensor]:
        assert first.shape[2] % 8 == 0 and first.shape[3] >= 128 and first.min() >= -1 and first.max() <= 1
        sign = 1.0 if first.flatten()[0] > second.flatten()[0] else -1.0
        flow = sign * torch.tensor([dx, dy]).view(1, 2, 1, 1).expand(len(first), 2, *first.shape[2:])
        return [torch.zeros_like(flow), flow]

    return net


def test_flow_goes_from_current_to_previous_and_finds_what_left() -> None:
    previous, current = torch.zeros(1, 3, 50, 70), torch.ones(1, 3, 50, 70)
    flow, occlusion = providers.RaftFlow(shifted(5, -3), name="known")(previous, current)
    assert flow.shape == (1, 2, 50, 70) and occlusion.shape == (1, 50, 70)
    assert (flow[:, 0] == 5).all() and (flow[:, 1] == -3).all()
    gone = torch.zeros(50, 70, dtype=torch.bool)
    gone[:, -5:], gone[:3] = True, True
    assert torch.equal(occlusion[0], gone)
    assert texvlm.warp(previous, flow, occlusion).shape == previous.shape
    made = texvlm.build_channels(current, previous, channels=["motion"], flow=(flow, occlusion))
    assert made.meta["motion"].endswith("flow")
    # There and back disagree: everything is occluded.
    both = providers.RaftFlow(lambda a, b: torch.full((1, 2, *a.shape[2:]), 4.0))(previous, current)
    assert (both[1] == 1).all()
    with pytest.raises(ValueError, match="shape of current"):
        providers.RaftFlow(shifted(1, 1))(previous[..., :-1], current)


@pytest.mark.parametrize(
    ("module", "make", "message"),
    [
        ("rapidocr", "RapidOcrText", "RapidOcrText needs rapidocr onnxruntime: pip install rapidocr onnxruntime"),
        ("doctr", "DoctrText", "DoctrText needs python-doctr: pip install python-doctr"),
        ("torchvision", "RaftFlow", "RaftFlow needs torchvision: pip install torchvision"),
    ],
)
def test_what_is_missing_is_said(monkeypatch, module: str, make: str, message: str) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=message):
        getattr(providers, make)()


def test_nothing_heavy_is_imported() -> None:
    """Importing texvlm, and the names of its providers, imports none of what they need."""
    import subprocess

    code = "import sys, texvlm, texvlm.providers as p; [getattr(p, n) for n in p.__all__ if n[0] != '_']; "
    code += "print(sorted({n.partition('.')[0] for n in sys.modules} & set(sys.argv[1:])))"
    heavy = ["transformers", "rapidocr", "onnxruntime", "doctr", "sklearn", "torchvision"]
    done = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        providers.Nothing  # noqa: B018
    assert importlib.util.find_spec("texvlm.providers.clip")
