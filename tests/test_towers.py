"""Attention of vision towers replaced and given back: what they compute, what they collect, what it costs them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import texvlm
from texvlm import attention, towers
from texvlm.towers import grids
from texvlm.towers.calibration import shared_out
from texvlm.towers.finding import layers_of, tower_of

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
VIEWS = {
    "vit": ("ViT", {}),
    "deit": ("DeiT", {}),
    "dinov2": ("Dinov2WithRegisters", {"num_register_tokens": 3}),
    "dinov3": ("DINOv3ViT", {"num_register_tokens": 4}),
    "ijepa": ("IJepa", {}),
    "clip": ("CLIPVision", {}),
    "siglip": ("SiglipVision", {}),
}
QWENS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


@cache
def pristine(kind: str) -> Any:
    """A random model whose attention is not flat."""
    from texvlm.qwen import tiny_model

    if kind in QWENS:
        return tiny_model(kind)
    if kind == "siglip2":
        config = transformers.Siglip2VisionConfig(patch_size=4, num_patches=64, **SIZES)
        model = transformers.Siglip2VisionModel(config)
    else:
        prefix, more = VIEWS[kind]
        config = getattr(transformers, f"{prefix}Config")(image_size=64, patch_size=4, **SIZES, **more)
        model = getattr(transformers, f"{prefix}Model")(config)
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 1.5 * weight[0].numel() ** -0.5, generator=generator)
    return model.eval()


def made(kind: str) -> Any:
    return copy.deepcopy(pristine(kind))


def pixels(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def inputs(kind: str) -> dict[str, Tensor]:
    """Pictures whose sides differ, where the model takes them."""
    from texvlm.qwen.tiny import tiny_batch

    if kind in QWENS:
        return tiny_batch(pristine(kind), [[(64, 96), (72, 56)], [(48, 48)]])
    if kind == "siglip2":
        rows = pixels(2, 90, 48)
        shapes = torch.tensor([[9, 10], [12, 7]])
        return {
            "pixel_values": rows,
            "spatial_shapes": shapes,
            "pixel_attention_mask": torch.arange(90) < shapes.prod(1)[:, None],
        }
    more = {"interpolate_pos_encoding": True} if kind in ("vit", "deit", "ijepa", "clip", "siglip") else {}
    return {"pixel_values": pixels(2, 3, 52, 76), **more}


def seen(kind: str, model: Any) -> Tensor:
    """What comes out of places that count."""
    given = inputs(kind)
    out = model(**given)
    if kind in QWENS:
        return out.logits
    return out.last_hidden_state if kind != "siglip2" else out.last_hidden_state[given["pixel_attention_mask"]]


@pytest.mark.parametrize("kind", [*VIEWS, "siglip2", *QWENS])
def test_all_read_is_the_model_as_it_was_and_removed_it_is_to_the_bit(kind: str) -> None:
    model = made(kind)
    implementations = [layer.config._attn_implementation for layer in layers_of(tower_of(model))]
    with torch.no_grad():
        before = seen(kind, model)
        with attention.replace(model, keep=1):
            torch.testing.assert_close(seen(kind, model), before, rtol=1e-4, atol=1e-5)
        with attention.replace(model, keep=0.1) as replaced:
            partly = seen(kind, model)
            assert replaced.keep == [0.1] * len(replaced.layers)
        assert torch.equal(seen(kind, model), before)
    assert 1e-3 < float((partly - before).norm() / before.norm()) < 0.7
    assert [layer.config._attn_implementation for layer in layers_of(tower_of(model))] == implementations
    assert "forward" not in tower_of(model).__dict__
    assert all(layer.config is model.config for layer in layers_of(model)) or kind in (*QWENS, "clip")


@pytest.mark.parametrize("kind", QWENS)
def test_rows_of_a_qwen_lie_where_its_positions_say(kind: str) -> None:
    from transformers import vision_utils

    tower = tower_of(pristine(kind))
    shapes = torch.tensor([[2, 12, 18], [1, 14, 8]])
    call = grids.of_call(tower, {"grid_thw": shapes}, None)
    assert call.grids == [(12, 18), (12, 18), (14, 8)]
    positions = vision_utils.get_vision_position_ids(shapes, tower.config.spatial_merge_size)
    if call.window:
        order, _ = vision_utils.get_vision_window_index(
            shapes, spatial_merge_size=2, window_size=tower.config.window_size, patch_size=tower.config.patch_size
        )
        positions = positions.reshape(len(order), -1, 2)[order].flatten(0, 1)
    ends = 0
    for rows, columns in call.grids:
        begins, ends = ends, ends + rows * columns
        here = (rows, columns, call.merge, call.window, torch.device("cpu"))
        of_rows = grids.place_of_rows(*here)
        assert torch.equal(positions[begins:ends] @ torch.tensor([columns, 1]), of_rows)
        assert torch.equal(of_rows[grids.row_of_places(*here)], torch.arange(rows * columns))


def test_class_tokens_are_read_by_all_and_choose_alone() -> None:
    """Of one layer, by hand."""
    model = made("vit")
    layer = layers_of(model)[0]
    x = torch.randn(2, 1 + 13 * 19, 32)
    with torch.no_grad(), attention.replace(model, keep=0.15, layers=[0], grid=(13, 19)):
        found, _ = layer(x)
        q, k, v = (p(x).unflatten(2, (2, 16)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
        packed = attention.pack_keys(k[:, :, 1:], v[:, :, 1:], (13, 19), keep=0.15)
        parts = [
            texvlm.hierarchical_attention(part, packed, prefix=(k[:, :, :1], v[:, :, :1])) for part in (q[:, :, :1], q[:, :, 1:])
        ]
        torch.testing.assert_close(found, layer.o_proj(torch.cat(parts, 2).transpose(1, 2).flatten(2)))


def test_each_layer_has_its_own_share() -> None:
    model = made("vit")
    given = {"pixel_values": pixels(1, 3, 64, 64), "output_hidden_states": True}
    with torch.no_grad():
        before = model(**given).hidden_states
        asked = ({2: 0.1}, {-1: 0.1})
        for keep in asked:
            with attention.replace(model, keep) as replaced:
                found = model(**given).hidden_states
            assert replaced.layers == [2]
            assert all(map(torch.equal, found[:3], before[:3])) and not torch.equal(found[3], before[3])
        errors = []
        for keep in ([0.4, 1], [0.05, 1]):
            with attention.replace(model, keep, layers=[1, 0]) as replaced:
                found = model(**given).hidden_states
            assert (replaced.layers, replaced.keep) == ([1, 0], keep)
            torch.testing.assert_close(found[1], before[1], rtol=1e-4, atol=1e-5)
            errors.append((found[2] - before[2]).norm())
        assert 0 < errors[0] < errors[1]


def gradients(model: Any, run: Callable[[], Tensor]) -> list[Tensor]:
    model.zero_grad()
    run().square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("kind", ["vit", "siglip", "qwen2_5_vl"])
def test_gradients_are_those_of_the_model_where_all_is_read(kind: str) -> None:
    model = made(kind)
    before = gradients(model, lambda: seen(kind, model))
    with attention.replace(model, keep=1):
        found = gradients(model, lambda: seen(kind, model))
    for one, other in zip(found, before, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_it_learns() -> None:
    model = made("dinov2").train()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    losses = []
    with attention.replace(model, keep=0.1):
        for _ in range(8):
            loss = model(pixel_values=pixels(2, 3, 64, 64)).last_hidden_state.square().sub(1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["siglip", "dinov3", "qwen3_vl"])
def test_checkpointed_layers_run_again_as_they_ran(kind: str, reentrant: bool) -> None:
    """Also where other pictures went through since, and where they are removed by then."""
    model = tower_of(made(kind)).train()

    def both() -> Tensor:
        parts = []
        for rows, columns in ((12, 16), (16, 12)):  # as many places, elsewhere
            if kind in QWENS:
                picture = pixels(rows * columns, 96, seed=1).requires_grad_()
                parts.append(model(picture, torch.tensor([[1, rows, columns]])).pooler_output)
            else:
                more = {"interpolate_pos_encoding": True} if kind == "siglip" else {}
                picture = pixels(1, 3, 4 * rows, 4 * columns).requires_grad_()
                parts.append(model(pixel_values=picture, **more).last_hidden_state)
        return parts[0].flatten() + parts[1].flatten()

    torch.manual_seed(0)  # DINOv3 jitters its positions
    with attention.replace(model, keep=0.1):
        expected = gradients(model, both)
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = True
            module._gradient_checkpointing_func = partial(checkpoint, use_reentrant=reentrant)
    torch.manual_seed(0)
    functions = [m.__dict__.get("_gradient_checkpointing_func") for m in model.modules()]
    model.zero_grad()
    with attention.replace(model, keep=0.1, mass=True) as replaced:
        loss = both().square().mean()
        mass = replaced.mass()
    loss.backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert torch.equal(mass, replaced.mass())
    assert [m.__dict__.get("_gradient_checkpointing_func") for m in model.modules()] == functions
    assert all(layer.config._attn_implementation == "sdpa" for layer in layers_of(model))


def test_mass_is_where_the_attention_goes() -> None:
    """The mean of all queries, heads and layers, exactly where all is read."""
    model = made("dinov3")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = torch.stack(model(pixel_values=pixels(2, 3, 52, 76), output_attentions=True).attentions)
        with attention.replace(model, keep=1, mass=True) as replaced:
            model(pixel_values=pixels(2, 3, 52, 76))
            dense = replaced.mass()
        with attention.replace(model, keep=0.2, layers=[1], mass=True) as replaced:
            model(pixel_values=pixels(2, 3, 52, 76))
            coarse = replaced.mass()
    torch.testing.assert_close(dense, weights.mean((0, 2, 3))[:, 5:].unflatten(1, (13, 19)), rtol=1e-4, atol=1e-7)
    expected = weights[1].mean((1, 2))[:, 5:].unflatten(1, (13, 19))
    assert torch.corrcoef(torch.stack([coarse.flatten(), expected.flatten()]))[0, 1] > 0.5
    torch.testing.assert_close(coarse.sum((1, 2)), expected.sum((1, 2)), rtol=0.05, atol=0)


def test_mass_of_pictures_of_several_sizes() -> None:
    model = made("qwen3_vl")
    with torch.no_grad(), attention.replace(model, keep=0.2, mass=True) as replaced:
        model(**inputs("qwen3_vl"))
        assert [tuple(plane.shape) for plane in replaced.mass()] == [(16, 24), (18, 14), (12, 12)]
        assert all(float(plane.sum()) == pytest.approx(1, abs=1e-4) for plane in replaced.mass())


def test_what_a_tower_looks_at_is_selected() -> None:
    """Its attention becomes channels 35 and 36, and a selection by them follows it."""
    picture = pixels(1, 3, 64, 64)
    model = made("siglip")
    with torch.no_grad():
        found = []
        for layer in (1, 2):
            with attention.replace(model, keep=0.2, layers=[layer], mass=True) as replaced:
                model(pixel_values=picture)
                mass = replaced.mass()
            found.append(mass / (mass + mass.mean((1, 2), keepdim=True)))
    texture = texvlm.build_channels(picture, given={"previous_attention": found[0], "attention": found[1]})
    names = [texture.names.index(name) for name in ("previous_attention", "attention")]
    assert names == [35, 36]
    for index, plane in zip(names, found):
        torch.testing.assert_close(texture.level(0)[:, index], texvlm.attention_map(plane, 64, 64))
    chosen = texvlm.select(texture, k=16, path="query", cell=4)
    kept = torch.zeros(256, dtype=torch.bool)
    kept[chosen.indices[0]] = True
    assert float(found[1].flatten()[kept].min()) > 0.55 > float(found[1].flatten()[~kept].mean())


def test_pictures_too_small_for_cells_are_read_whole() -> None:
    model = made("dinov2")
    given = {"pixel_values": pixels(1, 3, 16, 16)}
    with torch.no_grad():
        before = model(**given).last_hidden_state
        with attention.replace(model, keep=0.1):
            torch.testing.assert_close(model(**given).last_hidden_state, before, rtol=1e-4, atol=1e-5)


def test_rows_that_somebody_chose_are_no_grid() -> None:
    """Behind an adapter of `texvlm.qwen` a tower reads its rows whole."""
    from texvlm.qwen import QwenVLAdapter
    from texvlm.qwen.tiny import tiny_batch

    model = made("qwen3_vl")
    adapter = QwenVLAdapter(model, k=12)
    batch = adapter.prepare(tiny_batch(model, [(64, 96)]))
    with torch.no_grad():
        before = adapter(batch).logits
        with attention.replace(model, keep=0.1, mass=True) as replaced:
            assert torch.equal(adapter(batch).logits, before)
            with pytest.raises(RuntimeError, match="the rows of the last call were no grid"):
                replaced.mass()


def test_errors_leave_the_model_as_it_was() -> None:
    model = made("vit")
    given = {"pixel_values": pixels(1, 3, 64, 64)}
    with torch.no_grad():
        before = model(**given).last_hidden_state
        with pytest.raises(ZeroDivisionError), attention.replace(model, keep=0.1):
            raise ZeroDivisionError
        replaced = attention.replace(model, keep=0.1)
        with pytest.raises(RuntimeError, match="is replaced already"):
            attention.replace(model, keep=0.2, layers=[0])
        partly = model(**given).last_hidden_state
        with pytest.raises(ValueError, match="pixel_values"):
            model()
        with pytest.raises(ValueError, match="Input image size"):
            model(pixel_values=pixels(1, 3, 32, 32))
        assert torch.equal(model(**given).last_hidden_state, partly)
        replaced.remove()
        replaced.remove()
        with attention.replace(model, keep=0.1):
            assert torch.equal(model(**given).last_hidden_state, partly)
        assert torch.equal(model(**given).last_hidden_state, before)


def test_a_copy_has_its_own_attention() -> None:
    model = made("vit")
    given = {"pixel_values": pixels(1, 3, 64, 64)}
    with torch.no_grad():
        before = model(**given).last_hidden_state
        replaced = attention.replace(model, keep=0.1)
        other = copy.deepcopy(model)
        torch.testing.assert_close(other(**given).last_hidden_state, before)
        assert not torch.equal(model(**given).last_hidden_state, before)
        replaced.remove()
        torch.testing.assert_close(other(**given).last_hidden_state, before)


def test_threads_have_their_own_pictures() -> None:
    model = made("dinov2")
    given = [{"pixel_values": pixels(1, 3, *size)} for size in ((48, 64), (64, 48), (52, 60), (32, 96))]
    found: dict[int, Tensor] = {}

    def run(i: int) -> None:
        with torch.no_grad():
            for _ in range(3):
                found[i] = model(**given[i]).last_hidden_state

    with attention.replace(model, keep=0.1), torch.no_grad():
        expected = [model(**one).last_hidden_state for one in given]
        workers = [threading.Thread(target=run, args=(i,)) for i in range(len(given))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert all(torch.equal(found[i], one) for i, one in enumerate(expected))


def test_only_the_tower_of_a_model_is_replaced() -> None:
    config = transformers.SiglipConfig(
        vision_config={"image_size": 64, "patch_size": 4, **SIZES},
        text_config={"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, **SIZES},
    )
    model = transformers.SiglipModel(config).eval()
    with attention.replace(model, keep=0.1):
        names = {id(m): m.config._attn_implementation for m in layers_of(model)}
        assert all(names[id(m)] == "sdpa" for m in layers_of(model.text_model))
        assert all(names[id(m)] == "texvlm_hierarchical" for m in layers_of(model.vision_model))


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: attention.replace(torch.nn.Linear(2, 2)), "must be or hold a vision tower .* got Linear"),
        (lambda: attention.replace("vit"), "must be a model of transformers, got str"),
        (lambda: attention.replace(torch.nn.ModuleList([made("vit"), made("siglip")])), "several: hand in one of 0, 1"),
        (lambda: attention.replace(made("vit"), 0.0), "keep must be a number above 0"),
        (lambda: attention.replace(made("vit"), [0.1, 0.2]), "one for each of the 3 layers, got 2"),
        (lambda: attention.replace(made("vit"), {0: 0.1}, layers=[0, 2]), "keep must say how much of layers 2 is read"),
        (lambda: attention.replace(made("vit"), layers=[3]), "layers must be from -3 to 2, got 3"),
        (lambda: attention.replace(made("vit"), layers=[]), "layers must name at least one layer"),
        (lambda: attention.replace(made("qwen2_5_vl"), layers=[0]), "layer 0 attends within windows: .* only 1, 3 can"),
        (lambda: attention.replace(made("vit"), stages=(0, 1)), "stages must be levels that decrease to 0"),
        (lambda: attention.replace(made("vit"), importance="size"), "importance must be one of spread, mass, bound"),
        (lambda: attention.replace(made("qwen3_vl"), grid=(4, 4)), "grid must be left out"),
        (lambda: attention.calibrate(made("vit"), [], quiet=True), "pictures must bring grids"),
        (lambda: attention.calibrate(made("vit"), pixels(1, 3, 64, 64), total=0.01), "total must be at least 0.1"),
        (lambda: attention.calibrate(made("vit"), pixels(1, 3, 64, 64), total=0.5, error=0.1), "must not both be given"),
        (lambda: attention.calibrate(made("vit"), pixels(1, 3, 64, 64), keep=[1]), "keep must be values below 1"),
    ],
)
def test_what_is_refused_is_named(ask: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask()


def test_calls_that_cannot_be_replaced_are_named() -> None:
    model = made("vit")
    with (
        attention.replace(model, keep=0.1, grid=(20, 20)),
        pytest.raises(ValueError, match="layer 0 has 257 tokens, fewer than the 20 x 20"),
    ):
        model(pixel_values=pixels(1, 3, 64, 64))
    model.config.attention_probs_dropout_prob = 0.1
    dropping = transformers.ViTModel(model.config).train()
    with attention.replace(dropping, keep=0.1), pytest.raises(ValueError, match=r"layer 0 has attention dropout 0.1"):
        dropping(pixel_values=pixels(1, 3, 64, 64))
    with attention.replace(made("vit"), keep=0.1) as replaced, pytest.raises(RuntimeError, match="it is not collected"):
        replaced.mass()
    with (
        attention.replace(made("vit"), keep=0.1, mass=True) as replaced,
        pytest.raises(RuntimeError, match="no picture went through"),
    ):
        replaced.mass()
    model = made("vit")
    mask = torch.ones(1, 1, 257, 257, dtype=torch.bool).tril()
    with attention.replace(model, keep=0.1), pytest.raises(ValueError, match="differs between queries"):
        model(pixel_values=pixels(1, 3, 64, 64), attention_mask=mask)


def test_calibration_measures_and_shares_out(capsys: pytest.CaptureFixture[str]) -> None:
    model = made("dinov3").train()
    # A layer that attends to nothing in particular can be read coarsely.
    layers_of(model)[2].q_proj.weight.data.mul_(0.02)
    pictures = [pixels(1, 3, 64, 64, seed=s) for s in range(2)]
    found = attention.calibrate(model, [pictures[0], {"pixel_values": pictures[1]}], keep=[0.4, 0.05, 0.15], total=0.26)
    table = capsys.readouterr().out
    assert "layer" in table and f"{100 * found.errors[0][0]:.1f}" in table and f"{found.total:.3f}" in table
    assert found.shares == [0.05, 0.15, 0.4, 1.0] and found.layers == [0, 1, 2]
    assert found.read[:3] == [attention.plan((16, 16), keep).read for keep in found.shares[:3]]
    assert all(errors == sorted(errors, reverse=True) and errors[-1] == 0 for errors in found.errors)
    assert found.total <= 0.26
    assert found.keep[2] == 0.05 and found.keep[0] > 0.05
    assert model.training and all(m.training for m in model.modules())
    assert all(m.config is model.config for m in layers_of(model))
    # What it says is what comes of it.
    model.eval()
    with torch.no_grad():
        weights = {}
        layer = layers_of(model)[0]
        hook = layer.o_proj.register_forward_pre_hook(lambda _, args: weights.setdefault(len(weights), args[0]))
        model(pixel_values=pictures[0])
        with attention.replace(model, found, layers=[0]):
            model(pixel_values=pictures[0])
        hook.remove()
    one = attention.calibrate(model, pictures[0], keep=[found.keep[0]], error=1, quiet=True)
    assert float((weights[1] - weights[0]).norm() / weights[0].norm()) == pytest.approx(one.errors[0][0], rel=1e-3)
    assert capsys.readouterr().out == ""
    less = attention.calibrate(model, pictures, keep=[0.05, 0.15, 0.4], error=found.error / 2, quiet=True)
    assert less.error <= found.error / 2 and less.total > found.total
    with attention.replace(model, found) as replaced:
        assert replaced.keep == found.keep
    with attention.replace(model, found.keep) as replaced:
        assert replaced.keep == found.keep


def test_shares_of_a_qwen() -> None:
    model = made("qwen2_5_vl")
    found = attention.calibrate(model, inputs("qwen2_5_vl"), quiet=True)
    assert found.layers == [1, 3] and len(found.keep) == 2
    with torch.no_grad(), attention.replace(model, found):
        model(**inputs("qwen2_5_vl"))


def test_what_is_shared_out_is_shared_out_best() -> None:
    """Against all there are, for totals at which a step ends."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        read = [0.1, 0.2, 0.5, 1.0]
        errors = (torch.rand(3, 4, generator=generator).sort(descending=True).values * torch.tensor([1, 1, 1, 0])).tolist()
        for total in (0.15, 0.3, 0.6):
            at = shared_out(errors, read, total, None)
            spent = sum(read[i] for i in at) / 3
            assert spent <= total + 1e-9
            every = [picked for picked in product(range(4), repeat=3) if sum(read[i] for i in picked) <= 3 * spent + 1e-9]
            best = min(sum(errors[layer][i] for layer, i in enumerate(picked)) for picked in every)
            wrong = sum(errors[layer][i] for layer, i in enumerate(at))
            # Greedy may leave less than a step unspent; what it has spent is spent within one step of the best.
            assert wrong <= best + 0.35
        at = shared_out(errors, read, None, 0.2)
        assert sum(errors[layer][i] for layer, i in enumerate(at)) <= 0.6 + 1e-9


def test_it_is_public() -> None:
    assert texvlm.attention.replace is towers.replace and texvlm.attention.calibrate is towers.calibrate
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = texvlm.attention.nothing
