"""What does the perturbed top-k cost beside its dense form in torch, and how much memory does it take?"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor

import texvlm
from benchmarks._harness import US, Bench, Call


def dense(scores: Tensor, k: int, samples: int, sigma: float) -> Tensor:
    """Indicators [B, k, N] averaged over samples, as patch selection does it, with the gradient as the noise-weighted mean."""

    class Perturbed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, scores):  # type: ignore[no-untyped-def]
            noise = torch.randn(scores.shape[0], samples, scores.shape[1])
            indices = torch.topk(scores[:, None] + sigma * noise, k, dim=-1).indices.sort(-1).values
            hot = F.one_hot(indices, scores.shape[1]).float()
            ctx.save_for_backward(noise, hot)
            return hot.mean(1)

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            noise, hot = ctx.saved_tensors
            worth = torch.einsum("bmkn,bkn->bm", hot, grad)
            return (worth[..., None] * noise).mean(1) / sigma

    return Perturbed.apply(scores)


def main() -> int:
    bench = Bench(__doc__)
    batch, cells, k, samples = (2, 256, 10, 50) if bench.quick else (4, 1024, 32, 100)
    scores = torch.randn(batch, cells, requires_grad=True)
    tokens = torch.randn(batch, cells, 16)

    def ours() -> None:
        scores.grad = None
        indices, gate = texvlm.perturbed_topk(scores, k, samples, 0.05)
        kept = tokens.gather(1, indices.flatten(1)[..., None].expand(-1, -1, 16)).unflatten(1, (samples, k))
        (kept * gate[..., None]).sum(1).square().sum().backward()

    def in_torch() -> None:
        scores.grad = None
        (dense(scores, k, samples, 0.05) @ tokens).square().sum().backward()

    calls: dict[str, Call] = {US: ours, "dense": in_torch}
    times = bench.compare(f"[{batch}, {cells}], k = {k}, {samples} samples, with backward", calls)
    bench.gate("times as fast as the dense form", times.ratio("dense"), at_least=2)
    index = batch * samples * k * 12
    matrix = batch * samples * k * cells * 4
    bench.figure("bytes", {US: index, "dense": matrix})
    return bench.finish(f"{times.ratio('dense'):.1f} times as fast, and {matrix / index:.0f} times less memory")


if __name__ == "__main__":
    sys.exit(main())
