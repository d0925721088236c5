"""What does soft top-k, forward and backward, cost beside a softmax?"""

from __future__ import annotations

import sys

import torch

import texvlm
from benchmarks._harness import US, Bench, Call
from texvlm.reference import soft_topk as bisected


def main() -> int:
    bench = Bench(__doc__)
    batch, cells, k = (8, 1024, 68) if bench.quick else (32, 4096, 273)
    scores = torch.randn(batch, cells, requires_grad=True)
    grad = torch.rand(batch, cells)

    def both(forward: Call) -> Call:
        def call() -> None:
            scores.grad = None
            forward().backward(grad)

        return call

    answer = ""
    for link, temperature in (("logistic", 1.0), ("logistic", 0.1), ("logistic", 0.01), ("logistic", 1e-4), ("gumbel", 1.0)):
        calls: dict[str, Call] = {
            US: both(lambda link=link, t=temperature: texvlm.soft_topk(scores, k, t, link)),
            "torch.softmax": both(lambda: torch.softmax(scores, 1)),
        }
        times = bench.compare(f"[{batch}, {cells}], k = {k}, {link}, temperature {temperature:g}, with backward", calls)
        if (link, temperature) == ("logistic", 1.0):
            bench.gate("times as long as softmax", 1 / times.ratio("torch.softmax"), at_most=3)
            answer = f"{1 / times.ratio('torch.softmax'):.1f} times as much as torch.softmax ({1e6 * times.median():.0f} us)"
    few = scores.detach()[:1, :512]
    with torch.no_grad():
        calls = {US: lambda: texvlm.soft_topk(few, 34), "bisection in torch": lambda: bisected(few, 34, 1.0)}
        bench.compare("[1, 512], forward", calls)
        calls = {
            US: lambda: texvlm.sample_exact(texvlm.soft_topk(scores, k)),
            "torch.multinomial": lambda: torch.multinomial(scores.softmax(1), k),
        }
        bench.compare(f"a sample of {k} of {cells}, {batch} rows", calls)
    return bench.finish(answer)


if __name__ == "__main__":
    sys.exit(main())
