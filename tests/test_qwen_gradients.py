"""Gradients through the model to what chooses: finite differences in every mode, checkpointing, and an optimiser between two steps."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from qwen_recipe import ATTENTIVE, FAMILIES, ONE_EACH, places, unchanged
from torch import Tensor, nn

import texvlm
from texvlm.features import all_cells, cell_features, node_features
from texvlm.quadtree import log_soft_cut, node_numbers, tree_shapes
from texvlm.qwen import QwenVLAdapter, tiny_batch, tiny_model
from texvlm.qwen.pictures import unpack_rows
from texvlm.qwen.selectors import Kept, Selecting

pytestmark = pytest.mark.filterwarnings("ignore:bias acts")
KEPT = places(7, 12)
WAYS = [("scale", "bias"), ("blend", "bias"), ("bias", "bias")] + [
    (mode, gate) for mode in ("prune_pre", "prune_post") for gate in ("bias", "scale", "blend")
]
"""Modes and gates; a gate is for what is cut."""


class Given(nn.Module):
    """The same cells always, with weights that are learned themselves."""

    def __init__(self, groups: int = 12) -> None:
        super().__init__()
        start = torch.rand(groups, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.weights = nn.Parameter(0.2 + 0.7 * start)

    def forward(self, image: Tensor, grid: tuple[int, int], k: int) -> tuple[Tensor, Tensor]:
        return torch.tensor(KEPT), self.weights


class Counted:
    """How often a module was run."""

    def __init__(self, module: nn.Module) -> None:
        self.count = 0
        module.register_forward_pre_hook(self.add)

    def add(self, module: nn.Module, args: Any) -> None:
        self.count += 1


def double_model(family: str) -> Any:
    model = tiny_model(family).double()
    if "moe" in family or family == "qwen4_exp":
        model.set_experts_implementation("eager")  # the default knows no float64
    return model


@pytest.fixture
def exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers computes in float32 whatever the model's dtype (norms, positions, routers) is float64."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(Tensor, "float", Tensor.double)


def loss_of(adapter: QwenVLAdapter, batch: Any) -> Tensor:
    """In float64: the model's own is float32."""
    out = adapter({k: v for k, v in batch.items() if k != "labels"})
    return nn.functional.cross_entropy(out.logits[0, -5:-1], batch["input_ids"][0, -4:])


def batch_of(adapter: QwenVLAdapter, seed: int = 0) -> Any:
    return adapter.prepare(tiny_batch(adapter.model, [(24, 32)], seed=seed, labels=True, text=4))


def differences(loss: Any, parameter: Tensor, along: Tensor, step: float = 1e-5) -> float:
    """Of a loss along a direction, central."""
    with torch.no_grad():
        parameter += step * along
    above = float(loss().detach())
    with torch.no_grad():
        parameter -= 2 * step * along
    below = float(loss().detach())
    with torch.no_grad():
        parameter += step * along
    return (above - below) / (2 * step)


def directions(gradient: Tensor) -> list[Tensor]:
    """Along the gradient, and two others."""
    generator = torch.Generator().manual_seed(1)
    others = [torch.randn(gradient.shape, generator=generator, dtype=gradient.dtype) for _ in range(2)]
    return [d / d.norm() for d in (gradient, *others)]


@pytest.mark.parametrize(
    ("family", "mode", "gate"), [(f, *way) for f in FAMILIES for way in WAYS if f in ONE_EACH or way[0] != "prune_post"]
)
def test_gradients_of_weights_are_finite_differences(exactly: None, family: str, mode: str, gate: str) -> None:
    model = double_model(family)
    selector = Given()
    adapter = QwenVLAdapter(model, selector, k=7, mode=mode, gate=gate)
    batch = batch_of(adapter)

    def loss() -> Tensor:
        return loss_of(adapter, batch)

    with unchanged(model):
        loss().backward()
    gradient = selector.weights.grad
    assert gradient is not None and gradient.norm() > 1e-4
    if mode.startswith("prune"):
        assert not gradient[[i for i in range(12) if i not in KEPT]].any()
    for along in directions(gradient):
        assert differences(loss, selector.weights, along) == pytest.approx(float(gradient @ along), rel=1e-4, abs=1e-8)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("mode", "gate"), [("blend", "bias"), ("bias", "bias"), ("prune_pre", "bias"), ("prune_pre", "scale")])
def test_checkpointing_changes_no_gradient(family: str, mode: str, gate: str) -> None:
    model = double_model(family).train()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        selector = Given()
        adapter = QwenVLAdapter(model, selector, k=7, mode=mode, gate=gate)
        with adapter:
            runs = Counted(model.model.language_model.layers[0].mlp)
            loss_of(adapter, batch_of(adapter)).backward()
        assert runs.count == 1 + checkpointing  # it was computed again
        assert selector.weights.grad is not None
        gradients.append(selector.weights.grad)
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-7, rtol=1e-4)


# ---- an allocator ----

TERMS = {"information": ["entropy", "rms:edge"], "perspective": ["mean:eccentricity"], "participation": []}


def allocator() -> texvlm.Allocator:
    torch.manual_seed(3)
    out = texvlm.Allocator(form="mlp", hidden=4, normalisation="none", **TERMS)
    for p in out.parameters():
        nn.init.normal_(p)
    return out


def gradient_of(module: nn.Module) -> Tensor:
    assert all(p.grad is not None for p in module.parameters())
    return torch.cat([p.grad.flatten().double() for p in module.parameters()])  # type: ignore[union-attr]


@pytest.mark.parametrize("family", ONE_EACH)
@pytest.mark.parametrize("mode", ["scale", "blend", "bias"])
def test_an_allocator_learns_through_soft_weights(family: str, mode: str) -> None:
    """All stay, and count as their soft weights say: finite differences of its parameters."""
    model = double_model(family)
    selector = allocator().eval()
    adapter = QwenVLAdapter(model, selector, k=5, mode=mode, temperature=2.0)
    batch = batch_of(adapter)
    loss_of(adapter, batch).backward()
    gradient = gradient_of(selector)
    assert gradient.norm() > 1e-4
    flat = nn.utils.parameters_to_vector(selector.parameters()).detach()

    def loss() -> Tensor:
        nn.utils.vector_to_parameters(flat, selector.parameters())
        return loss_of(adapter, batch)

    for along in directions(gradient):
        assert differences(loss, flat, along.float(), 1e-2) == pytest.approx(float(gradient @ along), rel=5e-2, abs=2e-4)


@pytest.mark.parametrize("family", ONE_EACH)
@pytest.mark.parametrize(("mode", "gate"), [w for w in WAYS if w[0] == "prune_pre"])
def test_an_allocator_learns_through_gates(family: str, mode: str, gate: str) -> None:
    """A gate is 1; its gradient is that of the loss by a weight, times that of the logarithm of being kept."""
    model = double_model(family)
    selector = allocator().eval()
    adapter = QwenVLAdapter(model, selector, k=5, mode=mode, gate=gate, temperature=2.0)
    batch = batch_of(adapter)
    with torch.no_grad():
        plain = model(**{k: v for k, v in batch.items() if not k.startswith("texvlm_")}).loss
    out = adapter(batch).loss
    assert float(out.detach()) == pytest.approx(float(plain), abs=1e-6)
    out.backward()
    kept = batch["texvlm_cells"][:, 2]
    fixed = nn.Module()
    fixed.weights = nn.Parameter(torch.ones(12, dtype=torch.float64))
    fixed.forward = lambda image, grid, k: (kept, fixed.weights)  # type: ignore[method-assign]
    other = QwenVLAdapter(model, fixed, k=5, mode=mode, gate=gate)
    other(batch_of(other)).loss.backward()
    rows = tiny_batch(model, [(24, 32)], labels=True, text=4)["pixel_values"]
    texture = texvlm.build_channels(unpack_rows(rows, (6, 8), adapter.sizes, adapter.family)[None], channels=selector.channels)
    scores = selector(cell_features(texture, all_cells(texture, 8), selector.terms, 8))[0]
    log = texvlm.soft_topk(scores, 5, 2.0, "gumbel").log()[kept]
    expected = torch.autograd.grad((log.double() * fixed.weights.grad[kept]).sum(), list(selector.parameters()))
    torch.testing.assert_close(gradient_of(selector), torch.cat([e.flatten().double() for e in expected]), atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("gate", ["blend", "bias"])
def test_an_allocator_of_several_levels_learns_through_gates(gate: str) -> None:
    """The gates of its tokens are 1 and have the gradient of the logarithm of being kept among all nodes; it deploys what `select` does."""
    model = double_model("qwen3_vl")
    torch.manual_seed(3)
    selector = texvlm.Allocator("mlp", ("mean:red", "rms:edge", "level"), (), (), hidden=4, normalisation="none", levels=3).eval()
    adapter = QwenVLAdapter(model, selector, k=5, gate=gate)
    inputs = tiny_batch(model, [(32, 48)], labels=True, text=4)
    batch = adapter.prepare(inputs)
    cells, levels = batch["texvlm_cells"][:, 2:].unbind(1)
    assert len(cells) == 5 and int(levels.max()) > 0
    picture = unpack_rows(inputs["pixel_values"], (8, 12), adapter.sizes, adapter.family)[None]
    chosen = texvlm.select(picture, 5, 8, "multiscale", scorer=selector)
    assert set(zip(cells.tolist(), levels.tolist())) == set(zip(chosen.indices[0].tolist(), chosen.lod[0].long().tolist()))
    with torch.no_grad():
        plain = model(**{k: v for k, v in batch.items() if not k.startswith("texvlm_")}).loss
    out = adapter(batch).loss
    assert float(out.detach()) == pytest.approx(float(plain), abs=1e-6)
    out.backward()

    texture = texvlm.build_channels(picture, channels=selector.channels)
    nodes = node_features(texture, selector.terms, 8, 3, 16)
    kept = node_numbers(cells, levels, (4, 6), 3)
    gates = torch.ones(5, dtype=torch.float64, requires_grad=True)
    adapter.preparation.selecting.gates = lambda frames: [(gates, None)]  # type: ignore[method-assign]
    adapter(batch).loss.backward()
    slopes = gates.grad
    assert slopes is not None
    log = log_soft_cut(selector(nodes), 5, (4, 6), 3)[0, kept]
    expected = torch.autograd.grad((log.double() * slopes).sum(), list(selector.parameters()))
    assert slopes.abs().max() > 1e-5
    torch.testing.assert_close(gradient_of(selector), torch.cat([e.flatten().double() for e in expected]), atol=1e-6, rtol=1e-2)


def test_gates_of_several_frames_are_those_of_each() -> None:
    """Frames that are alike are scored together, those with groups that are none, or of other sizes, apart; the order stays."""
    torch.manual_seed(0)
    for levels, grid, other in ((1, (3, 4), (2, 4)), (2, (3, 4), (2, 4))):
        terms = ("entropy", "rms:edge") if levels == 1 else ("entropy", "rms:edge", "level")
        selecting = Selecting(texvlm.Allocator("mlp", terms, (), (), levels=levels), 16)
        frames = []
        for size, hole in ((grid, False), (other, False), (grid, True), (grid, False)):
            nodes = sum(h * w for h, w in tree_shapes(*size, levels))
            evidence = torch.randn(nodes, 2 + (levels > 1))
            evidence[:, 2:] = (torch.arange(nodes) >= size[0] * size[1]).float()[:, None]
            if hole:
                evidence[1, 0] = torch.nan
            frames.append(Kept(evidence, torch.tensor([0, 5, 3]), size))
        for (gates, everything), frame in zip(selecting.gates(frames), frames):
            alone, alone_everything = selecting.gates([frame])[0]
            assert (everything is None) == (levels > 1)
            for a, b in ((gates, alone), (everything, alone_everything)):
                if a is not None:
                    torch.testing.assert_close(a, b)
            wanted, found = (
                torch.autograd.grad(
                    (g * torch.tensor([1.0, 2.0, -1.0])).sum(), selecting.selector.information.head[0].weight, retain_graph=True
                )[0]
                for g in (alone, gates)
            )
            torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-4)


def test_entropy_of_frames_is_that_of_their_first_tokens() -> None:
    torch.manual_seed(0)
    selecting = Selecting(texvlm.Allocator("mlp", ("entropy", "rms:edge"), (), ()), 16, temperature=0.5)
    weight = selecting.selector.information.head[0].weight
    evidence = torch.randn(3, 12, 2)
    evidence[1, 4] = torch.nan  # a group that is never kept
    frames = [Kept(e, torch.tensor([0, 5, 3]), (3, 4)) for e in evidence]
    wanted = []
    for e in evidence:
        share = (selecting.selector(e[e.isfinite().all(1)][None])[0] / 0.5).softmax(0)
        wanted.append(-(share * share.log()).sum())
    found, mean = selecting.entropy(frames), sum(wanted) / 3
    torch.testing.assert_close(found, mean)
    torch.testing.assert_close(torch.autograd.grad(found, weight)[0], torch.autograd.grad(mean, weight)[0])
    assert 0 < found < torch.tensor(12.0).log()


def test_entropy_needs_a_scorer_and_pictures() -> None:
    model = tiny_model("qwen3_vl")
    adapter = QwenVLAdapter(model, "salience", k=6)
    batch = adapter.prepare(tiny_batch(model, [(64, 64)]))
    with pytest.raises(ValueError, match="selector must score"):
        adapter.entropy(batch)
    with pytest.raises(ValueError, match="batch must hold pictures that a selector which learns has chosen from"):
        QwenVLAdapter(model, texvlm.Allocator(participation=[]), k=6, gate="blend").entropy(batch)


@pytest.mark.parametrize("mode", ["prune_pre", "bias"])
def test_a_batch_prepared_before_the_optimiser_steps(mode: str) -> None:
    """The choice stands; weights and gradients are those of now, as if the batch were prepared again with the same cells."""
    model = double_model("qwen3_vl")
    selector = Given()
    adapter = QwenVLAdapter(model, selector, k=7, mode=mode)
    early = batch_of(adapter)
    with torch.no_grad():
        selector.weights.mul_(0.5).add_(0.1)
    late = batch_of(adapter)
    found = []
    for batch in (early, late):
        selector.zero_grad()
        loss = adapter(batch).loss
        loss.backward()
        found.append((float(loss.detach()), selector.weights.grad.clone()))  # type: ignore[union-attr]
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])
    with torch.no_grad():  # without gradients it is what was prepared
        assert float(adapter(early).loss) != float(adapter(late).loss)


@pytest.mark.parametrize("mode", ["prune_pre", "bias", "blend"])
def test_an_allocator_in_training_learns_something(mode: str) -> None:
    """Noise included: the loss of one batch falls as only the selector learns, and a batch of pictures of two sizes runs."""
    model = tiny_model("qwen3_vl").requires_grad_(False)
    selector = allocator()
    with QwenVLAdapter(model, selector, k=5, mode=mode, generator=torch.Generator().manual_seed(0)) as adapter:
        assert "texvlm_selector.information.head.0.weight" in dict(model.named_parameters())
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)
        before = copy.deepcopy(selector.state_dict())
        inputs = tiny_batch(model, [[(24, 32)], [(16, 32), (40, 24)]], labels=True)
        losses = []
        for _ in range(6):
            loss = model(**adapter.prepare(inputs)).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert any(not torch.equal(v, before[n]) for n, v in selector.state_dict().items() if v.is_floating_point())
    assert not [n for n, _ in model.named_parameters() if "texvlm" in n]


def test_prepared_batches_carry_no_graph() -> None:
    """They may come from workers, and be saved."""
    adapter = QwenVLAdapter(tiny_model("qwen3_vl"), allocator(), k=5)
    for mode in ("prune_pre", "blend"):
        adapter = QwenVLAdapter(adapter.model, allocator(), k=5, mode=mode)
        batch = batch_of(adapter)
        assert not [n for n, v in batch.items() if isinstance(v, Tensor) and v.requires_grad]
        torch.save(dict(batch), io.BytesIO())


@pytest.mark.parametrize("family", ATTENTIVE[:1])
def test_a_selector_that_returns_no_weights_cannot_learn(family: str) -> None:
    class Silent(Given):
        def forward(self, image: Tensor, grid: tuple[int, int], k: int) -> Any:
            return torch.arange(k)

    adapter = QwenVLAdapter(double_model(family), Silent(), k=7)
    with pytest.raises(ValueError, match=r"trained must return its weights beside the indices"), unchanged(adapter.model):
        adapter(batch_of(adapter))


@pytest.mark.parametrize(("mode", "gate"), [w for w in WAYS if w[0] != "prune_post"])
def test_reentrant_checkpoints_are_right_or_refused(mode: str, gate: str) -> None:
    """They give gradients to positional arguments alone: embeddings are such, biases are not."""
    model = double_model("qwen3_vl").train()
    gradients = []
    for options in (None, {"use_reentrant": True}):
        if options:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        selector = Given()
        adapter = QwenVLAdapter(model, selector, k=7, mode=mode, gate=gate)
        with adapter:
            if options and gate == "bias" and mode in ("bias", "prune_pre"):
                with pytest.raises(ValueError, match=r"use_reentrant=True gives biases no gradients: use_reentrant=False, or"):
                    loss_of(adapter, batch_of(adapter))
                return
            loss_of(adapter, batch_of(adapter)).backward()
        assert selector.weights.grad is not None
        gradients.append(selector.weights.grad)
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-7, rtol=1e-4)


def test_an_allocator_learns_for_a_question() -> None:
    """The question travels with the batch as a vector; without one, or without what reads it, it is refused."""
    model = tiny_model("qwen3_vl").requires_grad_(False)
    selector = texvlm.Allocator(information=["entropy"], perspective=[])
    adapter = QwenVLAdapter(model, selector, k=5, mode="blend", embedding=texvlm.DigitsEmbedding())
    inputs = tiny_batch(model, [(24, 32)], labels=True, text=4)
    gradients = []
    for query in ("seven", "two"):
        selector.zero_grad()
        adapter(adapter.prepare(inputs, query=query)).loss.backward()
        gradients.append(gradient_of(selector))
    assert gradients[0].norm() > 1e-7 and not torch.equal(*gradients)
    with pytest.raises(ValueError, match=r"query: this selector asks for one, and embedding="):
        adapter.prepare(inputs)
    with pytest.raises(ValueError, match=r"query: this selector asks for one, and embedding="):
        QwenVLAdapter(model, selector, k=5).prepare(inputs, query="seven")
