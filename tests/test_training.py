"""Training of allocators: the proxy task decides nothing but by the query, every estimator learns, and runs can be repeated exactly."""

from __future__ import annotations

import doctest
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import texvlm
from texvlm import pretrained, training
from texvlm.training import ESTIMATORS, Annealing, Choice, Noise, ProxyTask, Settings, Trainer, hard, heat_map
from texvlm.training.__main__ import main
from texvlm.training.loop import entropy, load_balance
from texvlm.training.proxy import BUDGET, CELL, HELD_OUT, KINDS, SIDE, Batch, picture, textures

EMBEDDING = [f"mean:embedding_{i}" for i in range(16)]


class Toy:
    """Cells are inside where a feature is large, of a query's choosing: cheap, and learned by alignment alone."""

    k = 8

    def __init__(self) -> None:
        self.held_out = self.draw(64, torch.Generator().manual_seed(99))

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        features = torch.randn(count, 64, 4, generator=generator)
        asked = torch.randint(4, (count,), generator=generator)
        wanted = features.gather(2, asked[:, None, None].expand(-1, 64, 1))[..., 0]
        inside = torch.zeros(count, 64).scatter(1, texvlm.topk(wanted, self.k)[1], 1.0)
        return Batch(features, torch.eye(4)[(asked + 1) % 4], inside)

    def figure(self, choice: Choice, batch: Batch) -> Tensor:
        return choice.read(batch.inside)

    def random(self) -> float:
        return self.k / 64


def toy(**arguments) -> texvlm.Allocator:
    torch.manual_seed(0)
    terms = [f"mean:embedding_{i}" for i in range(4)]
    return texvlm.Allocator(information=[], perspective=[], participation=terms, query=4, **arguments)


@pytest.fixture(scope="module")
def small() -> tuple[texvlm.Allocator, ProxyTask]:
    allocator = texvlm.Allocator(information=["rms:edge", "mean:saliency"], perspective=["mean:eccentricity"])
    task = ProxyTask(allocator, pictures=64, held_out=32)
    return allocator, task


def fresh(task: ProxyTask) -> texvlm.Allocator:
    torch.manual_seed(0)
    allocator = texvlm.Allocator(information=["rms:edge", "mean:saliency"], perspective=["mean:eccentricity"])
    return allocator.fit_normalisation(task.features)


# ---- the task ----


def test_pictures() -> None:
    first = picture(3)
    assert first.image.shape == (3, SIDE, SIDE) and first.image.min() >= 0 and first.image.max() <= 1
    assert torch.equal(first.image, picture(3).image) and not torch.equal(first.image, picture(4).image)
    assert first.boxes.shape == (KINDS, 4) and (first.boxes[:, 2:] - first.boxes[:, :2] == 48).all()
    covered = torch.zeros(SIDE, SIDE)
    for x0, y0, x1, y1 in first.boxes.tolist():
        covered[y0:y1, x0:x1] += 1
    assert covered.max() == 1  # no two overlap


def test_the_figure_is_intersection_over_union_over_the_oracles(small: tuple[texvlm.Allocator, ProxyTask]) -> None:
    _, task = small
    batch = task.held_out
    keys = torch.rand(len(batch.inside), 256, generator=torch.Generator().manual_seed(0)) + batch.inside
    figure, best = task.figure(hard(keys, BUDGET), batch), task.figure(hard(batch.inside, BUDGET), batch)
    torch.testing.assert_close(best, torch.ones_like(best))
    for i in range(4):  # by pixels
        x0, y0, x1, y1 = picture(HELD_OUT + i).boxes[task.asked[i]].tolist()
        box = torch.zeros(SIDE, SIDE, dtype=torch.bool)
        box[y0:y1, x0:x1] = True
        overlaps = []
        for scores in (keys[i], batch.inside[i]):
            cells = torch.zeros(256, dtype=torch.bool)
            cells[texvlm.topk(scores, BUDGET)[1]] = True
            kept = cells.view(16, 16).repeat_interleave(CELL, 0).repeat_interleave(CELL, 1)
            overlaps.append(int((kept & box).sum()) / int((kept | box).sum()))
        assert overlaps[0] / overlaps[1] == pytest.approx(float(figure[i]), abs=1e-5)


def test_targets_and_distractors_are_matched(small: tuple[texvlm.Allocator, ProxyTask]) -> None:
    """In channels 3, 8 and 39 a kind cannot be told from the others, and no channel of the 40 by itself finds what is asked for."""
    names = [channel.name for channel in texvlm.CHANNELS]
    assert (names[3], names[8], names[39]) == ("edge", "saliency", "text")
    texture, boxes = textures(range(HELD_OUT, HELD_OUT + 48), names)
    level = texture.level(0)
    patches = torch.stack(
        [torch.stack([level[b, :, y0:y1, x0:x1].mean((1, 2)) for x0, y0, x1, y1 in boxes[b].tolist()]) for b in range(48)]
    )  # [pictures, KINDS, 40]
    for channel in (3, 8, 39):
        of = patches[..., channel]
        above = torch.stack(  # how often a patch of a kind is above one of another, per kind
            [(of[:, kind, None] > of[:, torch.arange(KINDS) != kind]).float().mean() for kind in range(KINDS)]
        )
        assert ((above - 0.5).abs() < 0.25).all(), (names[channel], above)
        asked = torch.randint(KINDS, (48,), generator=torch.Generator().manual_seed(3))
        target = of.gather(1, asked[:, None])
        assert abs(float((target > of).float().sum() / (48 * (KINDS - 1))) - 0.5) < 0.1
    figures = small[1].channels(["mean"])
    assert len(figures) == 40 and max(figures.values()) < 0.3, figures


# ---- the loop ----


def test_learned_deployed_and_by_the_query_alone(small: tuple[texvlm.Allocator, ProxyTask], tmp_path: Path) -> None:
    _, task = small
    allocator = fresh(task)
    trainer = Trainer(allocator, task, Settings(steps=200, batch=16, warmup=20), tmp_path, every=100, sample=task.sample())
    report = trainer.fit(progress=False)
    assert report.hard > 0.5, report
    assert abs(report.gap) <= 0.02, report
    assert float(trainer.measure(task.shuffled()).mean()) <= report.random + 0.05
    # What is saved, in the hands of select: the same cells, so the same figure.
    same = texvlm.Allocator.from_pretrained(tmp_path / "allocator")
    texture, _ = textures(range(HELD_OUT, HELD_OUT + 8), same.channels)
    selection = texvlm.select(texture, BUDGET, CELL, "learned", task.held_out.query[:8], scorer=same)
    batch = Batch(*(t[:8] for t in task.held_out))
    chosen = Choice(selection.indices, torch.full((8, BUDGET), 1 / BUDGET))
    torch.testing.assert_close(task.figure(chosen, batch), trainer.measure()[:8])
    assert sorted(p.name for p in tmp_path.glob("map-*.png")) == ["map-000000.png", "map-000100.png", "map-000200.png"]
    assert json.loads((tmp_path / "report.json").read_text())["hard"] == report.hard


def test_nothing_is_learned_from_noise() -> None:
    allocator = texvlm.Allocator("mlp")
    task = ProxyTask(allocator, pictures=64, held_out=128, noise=True)
    trainer = Trainer(allocator.fit_normalisation(task.features), task, Settings(steps=100, warmup=10))
    before = [p.clone() for p in allocator.parameters()]
    report = trainer.fit(progress=False)
    assert abs(report.hard - report.random) <= 0.02, report
    # Not because nothing was tried: the weights moved, scores differ from cell to cell, and pictures keep different cells.
    assert any((p - q).abs().max() > 0.05 for p, q in zip(allocator.parameters(), before))
    scores = trainer.scores(task.held_out)
    assert scores.isfinite().all() and (scores.std(1) > 0.01).all()
    kept = torch.zeros(128, 256).scatter(1, texvlm.topk(scores, BUDGET)[1], 1.0).mean(0)
    assert kept.max() < 0.3


def test_a_loss_that_is_not_finite_stops() -> None:
    trainer = Trainer(toy(), Toy(), Settings(steps=2, batch=4))
    with torch.no_grad():
        trainer.allocator.participation.gain.fill_(torch.nan)
    before = trainer.allocator.participation.align.weight.clone()
    with pytest.raises(FloatingPointError, match="got nan at step 0"):
        trainer.advance()
    assert torch.equal(trainer.allocator.participation.align.weight, before)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_estimators_learn(estimator: str) -> None:
    task = Toy()
    start = 0.3 if estimator == "perturbed" else 1.0
    settings = Settings(200, 16, 0.03, 10, estimator=estimator, temperature=Annealing(start, 0.05), samples=20)
    report = Trainer(toy(), task, settings).fit(progress=False)
    assert report.hard > 0.6, report
    assert report.random == 0.125


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_choices(estimator: str) -> None:
    scores = torch.randn(3, 50, requires_grad=True)
    noise = Noise(torch.zeros(3, 50), torch.Generator().manual_seed(0), 0)
    choice = ESTIMATORS[estimator](scores, 5, 0.5, noise, 7)
    torch.testing.assert_close(choice.weight.sum(1), torch.ones(3))
    values = torch.randn(3, 50, 2)
    torch.testing.assert_close(choice.read(values)[..., 0], choice.read(values[..., 0]))
    choice.read(values).square().sum().backward()
    assert scores.grad is not None and scores.grad.abs().sum() > 0 and scores.grad.isfinite().all()
    if estimator not in ("soft", "gumbel"):
        kept = choice.indices.view(3, -1, 5).sort(-1).values
        assert (kept.diff(dim=-1) > 0).all()  # k different cells
    if estimator in ("noisy_topk", "noisy_gate", "straight_through"):  # without noise here
        assert torch.equal(choice.indices, texvlm.topk(scores.detach(), 5)[1])


@pytest.mark.parametrize("estimator", ["noisy_topk", "perturbed"])
def test_the_mean_gradient_is_that_of_the_mean_of_hard_choices(estimator: str) -> None:
    """Against the exact gradient for Gumbel top-2 of 6 cells: all 30 ordered pairs, with their probabilities."""
    scores = torch.tensor([0.5, 0.3, 0.0, -0.2, -0.6, -1.0], requires_grad=True)
    values, draws = torch.tensor([0.0, 1.0, 0.2, 0.9, 0.1, 0.6]), 20000
    p = scores.softmax(0)
    pairs = p[:, None] * p / (1 - p)[:, None] * (1 - torch.eye(6))
    exact = torch.autograd.grad((pairs * (values[:, None] + values) / 2).sum(), scores)[0]
    g = torch.Generator().manual_seed(0)
    rows = scores.detach().expand(draws, -1).clone().requires_grad_()
    uniform = torch.rand(draws, 6, generator=g)
    choice = ESTIMATORS[estimator](rows, 2, 1.0, Noise(-(-uniform.log()).log(), g, 0), 10)
    found = torch.autograd.grad(choice.read(values.expand(draws, -1)).sum(), rows)[0].mean(0)
    cosine = torch.nn.functional.cosine_similarity(found, exact, dim=0)
    assert cosine > 0.97, (cosine, found, exact)


def test_a_resumed_run_gives_the_same_weights(tmp_path: Path) -> None:
    task, settings = Toy(), Settings(steps=24, batch=8)
    straight = Trainer(toy(form="mlp"), task, settings, tmp_path / "straight", every=5)
    straight.fit(progress=False)
    stopped = Trainer(toy(form="mlp"), task, settings, tmp_path / "stopped", every=5)
    for _ in range(10):
        stopped.advance()
    stopped.save()
    stopped.advance()  # is lost
    torch.manual_seed(1234)  # nothing depends on it
    resumed = Trainer(texvlm.Allocator(**stopped.allocator.config), task, settings, tmp_path / "stopped", every=5)
    report = resumed.fit(resume=True, progress=False)
    assert report.steps == 24
    for name, tensor in straight.allocator.state_dict().items():
        assert torch.equal(tensor, resumed.allocator.state_dict()[name]), name
    again = Trainer(toy(form="mlp"), task, settings, tmp_path / "stopped")
    assert again.fit(resume=True, progress=False).hard == report.hard  # all done: nothing moves
    for other, what in ((Settings(steps=25, batch=8), "steps = 24 there, 25 here"), (Settings(24, 8, seed=1), "seed = 0 there")):
        with pytest.raises(ValueError, match=what):
            Trainer(toy(form="mlp"), task, other, tmp_path / "stopped").fit(resume=True)
    with pytest.raises(ValueError, match="form = 'mlp' there, 'linear' here"):
        Trainer(toy(), task, settings, tmp_path / "stopped").fit(resume=True)


PROCESS = """
import sys
import torch
from test_training import Toy, toy
from texvlm.training import Settings, Trainer, distributed
with distributed():
    trainer = Trainer(toy(form="mlp"), Toy(), Settings(steps=3, batch=8))
    loss = trainer.loss(0)
    loss.backward()
    gradients = [p.grad.clone() for p in trainer.allocator.parameters()]
    for _ in range(3):
        trainer.advance()
    torch.save((trainer.world, gradients, list(trainer.allocator.parameters())), f"{sys.argv[1]}/{trainer.rank}.pt")
"""


def test_two_processes_have_the_gradients_of_one(tmp_path: Path) -> None:
    script = tmp_path / "process.py"
    script.write_text(PROCESS)
    here = Path(__file__).parent
    paths = os.pathsep.join((str(here), str(here.parent), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, str(script), str(tmp_path)], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (world, gradients, weights), (_, _, others) = (torch.load(tmp_path / f"{i}.pt", weights_only=False) for i in (0, 1))
    assert world == 2
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights, others))  # after three steps
    one = Trainer(toy(form="mlp"), Toy(), Settings(steps=3, batch=8))
    one.loss(0).backward()
    for ours, theirs in zip(one.allocator.parameters(), gradients):
        torch.testing.assert_close(ours.grad, theirs, rtol=1e-4, atol=1e-6)


def test_half_precision_learns_as_well() -> None:
    settings = Settings(200, 16, 0.03, 10, precision="bf16")
    trainer = Trainer(toy(form="mlp"), Toy(), settings)
    assert trainer.fit(progress=False).hard > 0.6
    batch = trainer.task.held_out
    assert trainer.scores(batch).dtype == torch.float32
    assert not torch.equal(trainer.scores(batch), trainer.allocator(batch.features, batch.query))


def test_gradients_are_clipped() -> None:
    trainer = Trainer(toy(), Toy(), Settings(steps=2, batch=8, clip=1e-3))
    trainer.advance()
    norms = torch.stack([p.grad.norm() for p in trainer.allocator.parameters() if p.grad is not None])
    assert float(norms.norm()) == pytest.approx(1e-3, rel=1e-3)


def test_annealing() -> None:
    for shape, half in (("geometric", 0.1), ("linear", 0.505), ("cosine", 0.505)):
        anneal = Annealing(1.0, 0.01, shape)
        assert [anneal(t) for t in (-1, 0, 0.5, 1, 2)] == pytest.approx([1, 1, half, 0.01, 0.01])
    assert Annealing(1.0, 0.01, "cosine")(0.25) > Annealing(1.0, 0.01, "linear")(0.25)
    trainer = Trainer(toy(), Toy(), Settings(steps=10, warmup=2))
    assert trainer.temperature() == 1 and trainer.rate() == pytest.approx(0.005)
    trainer.step = 9
    assert trainer.temperature() == pytest.approx(0.05) and trainer.rate() < 0.001


def test_regularisers() -> None:
    assert float(entropy(torch.tensor([[0.0, 1.0]]))) < 1e-4
    assert float(entropy(torch.full((2, 3), 0.5))) == pytest.approx(math.log(2))
    assert float(load_balance(torch.eye(4))) == pytest.approx(0)  # each cell used once
    assert float(load_balance(torch.eye(4)[[2, 2, 2, 2]])) == pytest.approx(3)
    plain, pressed = (Trainer(toy(), Toy(), Settings(steps=30, batch=8, entropy=e)) for e in (0.0, 30.0))
    spread = []
    for trainer in (plain, pressed):
        trainer.fit(progress=False)
        scores = trainer.scores(trainer.task.held_out).detach()
        spread.append(float(entropy(texvlm.soft_topk(scores, 8))))
    assert spread[1] < spread[0]
    assert math.isfinite(Trainer(toy(), Toy(), Settings(steps=1, batch=8, balance=1.0)).advance())


def test_heat_map(small: tuple[texvlm.Allocator, ProxyTask]) -> None:
    sample = small[1].sample(2)
    scores = torch.zeros(256)
    scores[17] = 1  # row 1, column 1
    drawn = heat_map(sample._replace(box=None), scores, 1, scale=1)
    assert drawn.size == (3 * SIDE + 8, SIDE)
    assert drawn.getpixel((SIDE + 4 + 24, 24)) == (255, 255, 255) and drawn.getpixel((SIDE + 4 + 40, 24)) == (0, 0, 0)
    lit, dark = drawn.getpixel((2 * SIDE + 8 + 24, 24)), drawn.getpixel((2 * SIDE + 8 + 40, 24))
    assert lit == drawn.getpixel((24, 24)) and sum(dark) < 0.5 * sum(drawn.getpixel((40, 24)))


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "proxy",
        "--steps",
        "4",
        "--batch",
        "4",
        "--pictures",
        "2",
        "--held-out",
        "2",
        "--every",
        "2",
        "--folder",
        str(tmp_path),
    ]
    assert main([*arguments, "--form", "mlp"]) == 0
    out = capsys.readouterr().out
    assert "step 2 of 4" in out and "deployed hard" in out.splitlines()[-1]
    assert main([*arguments, "--form", "mlp", "--resume"]) == 0
    assert texvlm.Allocator.from_pretrained(tmp_path / "allocator").config["form"] == "mlp"
    for wrong, what in ((["--steps", "0"], "steps must be at least 1"), (["--temperature", "1", "0"], "must be positive")):
        with pytest.raises(SystemExit):
            main([*arguments, *wrong])
        assert what in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["proxy", "--resume"])
    assert "--resume needs --folder" in capsys.readouterr().err


def test_errors() -> None:
    for arguments, what in (
        ({"estimator": "hard"}, "estimator must be noisy_topk, .* got 'hard'"),
        ({"precision": "fp16"}, "precision must be fp32, bf16, got 'fp16'"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=what):
            Settings(**arguments)
    with pytest.raises(ValueError, match="shape must be geometric, linear, cosine, got 'step'"):
        Annealing(shape="step")
    with pytest.raises(ValueError, match="resume needs folder="):
        Trainer(toy(), Toy(), Settings(steps=1)).fit(resume=True)
    with pytest.raises(ValueError, match="cells of 16 pixels, got 32"):
        ProxyTask(texvlm.Allocator(cell=32), 1, 1)


@pytest.mark.parametrize("name", [n for n in training.__all__ if isinstance(getattr(training, n), type)] + ["Pretrained"])
def test_examples_in_docstrings(name: str) -> None:
    thing = getattr(training, name, pretrained.Pretrained)
    assert thing.__doc__
    runner = doctest.DocTestRunner()
    for test in doctest.DocTestFinder(recurse=False).find(thing, name, globs={}):
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0
