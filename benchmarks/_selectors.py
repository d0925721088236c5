"""What chooses cells of Megapixel Digits and what reads them: one scorer, one reader, and every way to train the one through the other.

The estimators of the peers are here as their papers have them, on the same scorer and reader as ours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import texvlm
from benchmarks._megapixel import CELL, CLASSES, Batch

MIP = 2.0  # the level that the scorer reads: 8 x 8 samples a cell
WIDTH = 64
NOISE = (1.0, 0.1)  # scale of the Gumbel noise of ours, at the beginning and at the end of training
SAMPLES = 100  # of the perturbed optimiser
SIGMA = (0.05, 0.005)  # of its noise, on scores scaled to [0, 1]
EMPTY = 2.0  # log-odds of nothing, to begin with
ENTROPY = 1e-4  # weight of attention sampling's regulariser
EXPLORED = (56, 20)  # cells that the reader of ours reads beside the picked in training, in the first WARM of it and later
WARM = 0.05
STRAY = 0.002  # of all cells are explored whatever their score
TEACH = 20.0  # weight of what the reader tells the scorer
SPARSE, SETTLED = 0.1, 0.2  # weight of the number of cells that hold something, and the share of training without it


def levelled(patches: Tensor) -> Tensor:
    """Each patch [..., h, w] without its mean, over its contrast."""
    centred = patches - patches.mean((-2, -1), keepdim=True)
    return centred / (centred.square().mean((-2, -1), keepdim=True) + 1e-3).sqrt()


class Scorer(nn.Module):
    """Mips of cells [B, N, 1, 8, 8] -> scores [B, N]."""

    def __init__(self, noise: bool = False) -> None:
        """With `noise` it sees noise instead of the picture: the negative control."""
        super().__init__()
        side = round(CELL / 2**MIP)
        self.noise = noise
        self.net = nn.Sequential(
            nn.Linear(side * side, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)
        )

    def forward(self, batch: Batch) -> Tensor:
        mips = levelled(batch.patches(batch.everything(), MIP)).flatten(2)
        return self.net(torch.randn_like(mips) if self.noise else mips).squeeze(-1)


class Reader(nn.Module):
    """Sharp cells -> what each of them holds, one of the classes or nothing -> how many there are of each class -> classes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(CELL * CELL // 4, 3 * WIDTH), nn.ReLU(), nn.Dropout(0.2), nn.Linear(3 * WIDTH, WIDTH), nn.ReLU()
        )
        self.head = nn.Linear(WIDTH, CLASSES + 1)
        with torch.no_grad():
            self.head.bias[CLASSES] = EMPTY
        self.scale = nn.Parameter(torch.tensor(0.0))

    def says(self, patches: Tensor) -> Tensor:
        """What each of the cells [B, n, 1, CELL, CELL] holds, logits [B, n, CLASSES + 1], the last of them of nothing."""
        halved = F.avg_pool2d(patches.flatten(0, 1), 2)  # glyphs are coarser than that
        return self.head(self.net(levelled(halved).flatten(1))).unflatten(0, patches.shape[:2])

    def forward(self, patches: Tensor, bias: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
        """Logits [B, CLASSES], with log-weights [B, n] as a bias, or weights [B, n] that sum to 1, by which cells count."""
        return self.count(self.says(patches), bias, weight)

    def count(self, said: Tensor, bias: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
        """The answer to what was said of the cells, [B, n, CLASSES + 1] -> [B, CLASSES]."""
        holds = said.softmax(2)[..., :CLASSES]
        if weight is not None:
            holds = holds * (weight * weight.shape[1])[..., None]
        elif bias is not None:
            holds = holds * bias.exp()[..., None]
        return self.scale.exp() * holds.sum(1)


class Downscaled(nn.Module):
    """Reads the whole canvas with as many samples as k cells have."""

    def __init__(self) -> None:
        super().__init__()
        widths = (1, 16, 32, WIDTH)
        layers = [(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.ReLU()) for a, b in itertools.pairwise(widths)]
        self.net = nn.Sequential(*(layer for pair in layers for layer in pair))
        self.attention = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, batch: Batch, k: int) -> Tensor:
        size = min(math.isqrt(k * CELL * CELL), batch.texture.width)
        lod = math.log2(batch.texture.width / size)
        middle = torch.full((len(batch.labels), 1, 2), 0.5)
        small = batch.texture.patches(middle, lod, size=size).float()[:, 0]
        tokens = self.net(4 * (small - small.mean((1, 2, 3), keepdim=True))).flatten(2).transpose(1, 2)
        return self.head((self.attention(tokens).softmax(1) * tokens).sum(1))


class Picked(NamedTuple):
    """What is read of a canvas, and with what gradient."""

    indices: Tensor  # [B, n], or [B, samples, k], which are blended by `gate`
    bias: Tensor | None = None  # [B, n], joins the reader's attention
    weight: Tensor | None = None  # [B, n], instead of the reader's attention
    gate: Tensor | None = None  # [B, samples, k]
    loss: Tensor | None = None  # a regulariser


class Context(NamedTuple):
    """What an estimator is told beside the scores."""

    k: int
    progress: float  # 0 to 1
    generator: torch.Generator

    def between(self, ends: tuple[float, float]) -> float:
        """From the first to the second, geometrically, as training goes on."""
        return ends[0] ** (1 - self.progress) * ends[1] ** self.progress


Estimator = Callable[[Tensor, Context], Picked]


def noisy_topk(scores: Tensor, of: Context) -> Picked:
    """Hard top-k of noisy scores; the log-weights of the kept join the reading, at work too."""
    noise = of.between(NOISE) * texvlm.gumbel_noise(scores, of.generator)
    indices, _ = texvlm.noisy_topk(scores.detach(), of.k, noise=noise)
    return biased(scores, indices, of)


def trusted(scores: Tensor, picked: Picked) -> Picked:
    """Each cell also counts by the probability that it holds something, of which a taught score is the log-odds."""
    assert picked.bias is not None
    return picked._replace(bias=picked.bias + F.logsigmoid(scores.gather(1, picked.indices)))


def noisy_taught(scores: Tensor, of: Context) -> Picked:
    """The default: `noisy_topk` for scores that the reader teaches (`taught`)."""
    return trusted(scores, noisy_topk(scores, of))


def biased(scores: Tensor, indices: Tensor, of: Context) -> Picked:
    return Picked(indices, texvlm.log_soft_topk(scores, of.k).gather(1, indices))


def neutral(scores: Tensor, of: Context) -> Picked:
    """The same cells with a gate that is 1 in value: the reader's own attention may do the selector's work."""
    noise = of.between(NOISE) * texvlm.gumbel_noise(scores, of.generator)
    indices, gate = texvlm.noisy_topk(scores, of.k, noise=noise)
    return Picked(indices, gate.log())


def gumbel_topk(scores: Tensor, of: Context) -> Picked:
    """A sample without replacement; the log of their inclusion probabilities joins the reader's attention."""
    indices = texvlm.gumbel_topk(scores.detach(), of.k, of.between(NOISE), of.generator)
    return Picked(indices, texvlm.log_soft_topk(scores, of.k, 1.0, "gumbel").gather(1, indices))


def explored(scores: Tensor, picked: Picked, of: Context) -> Tensor:
    """The picked cells, then others, [B, n], for the reader to read in training alone: the next best by noisy scores, and strays."""
    picks, cells = picked.indices.shape[1], scores.shape[1]
    more = min(cells - picks, EXPLORED[of.progress > WARM])
    order = scores.detach() + texvlm.gumbel_noise(scores, of.generator)
    order = order.masked_fill(torch.rand(scores.shape, generator=of.generator) < STRAY, torch.inf)
    return torch.cat([picked.indices, order.scatter(1, picked.indices, -torch.inf).topk(more, 1).indices], 1)


def taught(reader: Reader, batch: Batch, scores: Tensor, picked: Picked, of: Context) -> tuple[Tensor, Tensor]:
    """Logits of what was picked, and the loss by which the reader teaches the scorer what it sees in the cells that it reads.

    The reader also answers from all explored cells without a word of the scorer, and so learns by itself what counts; holding many
    cells for something costs. The score learns to be the log-odds, as the reader has them, that a cell holds something. No cell has a
    label: all of it comes from the canvas's.
    """
    cells = explored(scores, picked, of)
    said = reader.says(batch.patches(cells))
    holds = 1 - said.softmax(2)[..., CLASSES]
    told = F.binary_cross_entropy_with_logits(scores.gather(1, cells), holds.detach())
    sparse = SPARSE * max(0.0, of.progress - SETTLED) * holds.sum(1).mean()
    loss = F.cross_entropy(reader.count(said), batch.labels) + TEACH * told + sparse
    return reader.count(said[:, : picked.indices.shape[1]], picked.bias), loss


def sample_exact(scores: Tensor, of: Context) -> Picked:
    """Exactly k cells, each included with the probability that its soft weight is; their mean has an unbiased gradient."""
    temperature = of.between(NOISE)
    weights = texvlm.soft_topk(scores.detach(), of.k, temperature)
    indices = texvlm.sample_exact(weights, of.k, of.generator)
    drawn = texvlm.log_soft_topk(scores, of.k, temperature).gather(1, indices)
    return Picked(indices, weight=(drawn - drawn.detach()).exp() / of.k)


def straight_through(scores: Tensor, of: Context) -> Picked:
    """Hard top-k without noise, their mean with the gradient of the soft weights."""
    indices = texvlm.topk(scores.detach(), of.k)[1]
    gate = texvlm.straight_through(indices, texvlm.soft_topk(scores, of.k))
    return Picked(indices, weight=gate / of.k)


def soft_bias(scores: Tensor, of: Context) -> Picked:
    """All cells are read, biased by the log of their soft weights: what is known not to teach selection."""
    everything = torch.arange(scores.shape[1]).expand_as(scores)
    return Picked(everything, texvlm.log_soft_topk(scores, of.k))


def perturbed_topk(scores: Tensor, of: Context) -> Picked:
    """The perturbed optimiser, each sample's worth taken relative to the others' (`dps` without that)."""
    seed = int(torch.randint(2**31, (), generator=of.generator))
    indices, gate = texvlm.perturbed_topk(scaled(scores), of.k, SAMPLES, of.between(SIGMA), seed)
    return Picked(indices, gate=gate)


def scaled(scores: Tensor) -> Tensor:
    """To [0, 1] in each row."""
    low, high = scores.amin(1, keepdim=True), scores.amax(1, keepdim=True)
    return (scores - low) / (high - low + 1e-5)


def ats(scores: Tensor, of: Context) -> Picked:
    """Attention sampling (Katharopoulos and Fleuret 2019): the mean over k draws from the softmax, with its unbiased gradient."""
    log_p = scores.log_softmax(1)
    indices = torch.multinomial(log_p.detach().exp(), of.k, replacement=True, generator=of.generator)
    drawn = log_p.gather(1, indices)
    entropy = -(log_p.exp() * log_p).sum(1).mean()
    return Picked(indices, weight=(1 + drawn - drawn.detach()) / of.k, loss=-ENTROPY * entropy)


class _Perturbed(torch.autograd.Function):
    """The k best of scores [B, N] + sigma times Gaussian noise, by index: their sets [B, samples, k] and a gate of 1 / samples.

    The gate has the gradient of the perturbed optimiser (Berthet et al. 2020): what a set is worth, times its noise over sigma.
    """

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, k: int, samples: int, sigma: float, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        noise = torch.randn(len(scores), samples, scores.shape[1], generator=generator)
        best = texvlm.topk((scores[:, None] + sigma * noise).flatten(0, 1), k)[1]
        indices = best.sort(1).values.unflatten(0, noise.shape[:2])  # so that a place means the same in all sets
        ctx.save_for_backward(noise)
        ctx.sigma = sigma
        ctx.mark_non_differentiable(indices)
        return indices, scores.new_full(indices.shape, 1 / samples)

    @staticmethod
    def backward(ctx: Any, _: Tensor, gate: Tensor) -> tuple[Tensor, None, None, None, None]:
        (noise,) = ctx.saved_tensors
        return torch.einsum("bs,bsn->bn", gate.sum(2), noise) / (ctx.sigma * noise.shape[1]), None, None, None, None


def dps(scores: Tensor, of: Context) -> Picked:
    """Differentiable patch selection (Cordonnier et al. 2021): patches averaged over perturbed top-k sets, scores scaled to [0, 1]."""
    indices, gate = _Perturbed.apply(scaled(scores), of.k, SAMPLES, of.between(SIGMA), of.generator)
    return Picked(indices, gate=gate)


def ips(scores: Tensor, of: Context) -> Picked:
    """Iterative patch selection (Bergner et al. 2023): top-k without gradient, the scores of the kept are the attention."""
    values, indices = texvlm.topk(scores, of.k)
    return Picked(indices, weight=values.softmax(1))


def top(scores: Tensor, of: Context) -> Picked:
    """Deployed: exactly the best k, no bias."""
    return Picked(texvlm.topk(scores, of.k)[1])


def top_biased(scores: Tensor, of: Context) -> Picked:
    """Deployed: exactly the best k, with their log-weights."""
    return biased(scores, texvlm.topk(scores, of.k)[1], of)


def top_taught(scores: Tensor, of: Context) -> Picked:
    """Deployed: exactly the best k, by what they count for in `noisy_taught`."""
    return trusted(scores, top_biased(scores, of))


def top_mean(scores: Tensor, of: Context) -> Picked:
    """Deployed: the mean of exactly the best k."""
    return Picked(texvlm.topk(scores, of.k)[1], weight=torch.full((len(scores), of.k), 1 / of.k))


def relaxed(scores: Tensor, of: Context, shown: int = 8) -> Picked:
    """The soft weights as they are, over the `shown` k cells of the largest, as a bias."""
    return biased(scores, texvlm.topk(scores, min(shown * of.k, scores.shape[1]))[1], of)


TAUGHT = "noisy_topk"  # the row whose reader teaches its scorer (`taught`)
UNTAUGHT = "noisy_topk, untaught"
OURS: dict[str, Estimator] = {
    TAUGHT: noisy_taught,
    UNTAUGHT: noisy_topk,
    "neutral gate": neutral,
    "gumbel_topk": gumbel_topk,
    "sample_exact": sample_exact,
    "straight_through": straight_through,
    "perturbed_topk": perturbed_topk,
    "soft bias": soft_bias,
}
PEERS: dict[str, Estimator] = {"ATS": ats, "DPS": dps, "IPS": ips}
ESTIMATORS = {**OURS, **PEERS}
DEPLOYED: dict[str, Estimator] = {
    TAUGHT: top_taught,
    UNTAUGHT: top_biased,
    "neutral gate": top,
    "gumbel_topk": top_biased,
    "sample_exact": top_mean,
    "straight_through": top_mean,
    "perturbed_topk": top,
    "soft bias": top,
    "ATS": ips,
    "DPS": top,
    "IPS": ips,
}
"""How exactly the best k are read at work: as in training, but for the noise. (ATS weighs what it sampled by the softmax.)"""


def blended(batch: Batch, picked: Picked) -> Tensor:
    """The k mean patches [B, k, 1, CELL, CELL] of the samples; through all cells where these are fewer than the samples'."""
    indices, gate = picked.indices, picked.gate
    assert gate is not None
    cells = batch.grid**2
    if cells > indices[0].numel():
        return torch.einsum("bsk,bskchw->bkchw", gate, batch.patches(indices.flatten(1)).unflatten(1, indices.shape[1:]))
    share = gate.new_zeros(len(indices), indices.shape[2], cells).scatter_add(2, indices.transpose(1, 2), gate.transpose(1, 2))
    return torch.einsum("bkn,bnchw->bkchw", share, batch.patches(batch.everything()))


def read(reader: Reader, batch: Batch, picked: Picked) -> Tensor:
    """Logits [B, CLASSES] of what was picked."""
    patches = batch.patches(picked.indices) if picked.gate is None else blended(batch, picked)
    return reader(patches, picked.bias, picked.weight)
