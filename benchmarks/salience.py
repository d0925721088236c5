"""How often is the peak of saliency on the odd item of a pop-out display, against OpenCV's two methods, and what does it cost?

Generated displays (_popout.py): the odd item differs in colour, in orientation, in size, or lacks a feature that all others have. A
hit: the highest place is nearer to the odd item's centre than half the distance between items; chance is below 1 in 25. Time is that
of a picture's saliency over that of its mips.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

import texvlm
from benchmarks._harness import US, Bench, Call
from benchmarks._popout import CLASSES, display
from benchmarks.distance import textured

Model = Callable[[torch.Tensor], torch.Tensor]  # uint8 [3, H, W] to [H, W]


def opencv() -> dict[str, Model]:
    try:
        import cv2
        from cv2 import saliency
    except ImportError:
        print(
            "OpenCV's contributed modules are not installed: its rows are left out (pip install opencv-contrib-python-headless)"
        )
        return {}
    methods = {
        "OpenCV spectral residual": saliency.StaticSaliencySpectralResidual_create(),
        "OpenCV fine-grained": saliency.StaticSaliencyFineGrained_create(),
    }

    def model(method: cv2.saliency.StaticSaliency) -> Model:
        def run(image: torch.Tensor) -> torch.Tensor:
            found, value = method.computeSaliency(image.flip(0).permute(1, 2, 0).contiguous().numpy())
            return torch.from_numpy(value).float() if found else torch.zeros(image.shape[1:])

        return run

    return {name: model(method) for name, method in methods.items()}


def main() -> int:
    bench = Bench(__doc__)
    peers = opencv()
    models: dict[str, Model] = {US: lambda image: texvlm.saliency(image)[0], **peers}
    count = 40 if bench.quick else 150
    rates: dict[str, dict[str, float]] = {name: {} for name in models}
    for kind in CLASSES:
        displays = [display(kind, 70000 + seed) for seed in range(count)]
        for name, model in models.items():
            rates[name][kind] = sum(d.hit(model(d.image)) for d in displays) / count
    bench.figure("hit rates", rates)
    print(f"\nshare of {count} displays of each class whose peak is on the odd item")
    print(f"  {'':28}" + "".join(f"{kind:>13}" for kind in CLASSES) + f"{'all':>13}")
    for name, row in rates.items():
        print(f"  {name:28}" + "".join(f"{v:13.2f}" for v in [*row.values(), sum(row.values()) / len(CLASSES)]))
    small: dict[str, float] = {}
    for side in (64, 128):
        for kind in CLASSES:
            displays = [display(kind, 71000 + seed, side) for seed in range(count)]
            small[f"{kind}, {side} px"] = sum(d.hit(texvlm.saliency(d.image)[0]) for d in displays) / count
    bench.figure("hit rates in small pictures", small)
    print("  small pictures: " + "; ".join(f"{name} {rate:.2f}" for name, rate in small.items()))
    total = {name: sum(row.values()) / len(CLASSES) for name, row in rates.items()}
    for kind in CLASSES:
        best = max((rates[name][kind] for name in peers), default=0.0)
        bench.gate(f"{kind}: ours less the better peer's", rates[US][kind] - best, at_least=0.01)

    ratios = []
    for height, width in [(1024, 1024), (1080, 1920)]:
        image = textured(2048)[..., :height, :width].contiguous()
        with torch.no_grad():
            calls: dict[str, Call] = {
                US: lambda image=image: texvlm.saliency(image),
                "mips of the picture": lambda image=image: texvlm.generate_mipmaps(image),
            }
            for name, model in peers.items():
                bytes_ = (image[0] * 255).to(torch.uint8)
                calls[name] = lambda model=model, bytes_=bytes_: model(bytes_)
            times = bench.compare(f"{width} x {height}", calls)
        ratios.append(1 / times.ratio("mips of the picture"))
        bench.gate(f"{width} x {height}: time over the mips'", ratios[-1], at_most=1.5)
    picture = textured(1024).requires_grad_()
    result = texvlm.saliency(picture)
    bench.compare("backward, 1024 x 1024", {US: lambda: torch.autograd.grad(result.sum(), picture, retain_graph=True)})
    others = "; ".join(f"{name} {total[name]:.0%}" for name in peers)
    return bench.finish(
        f"the peak is on the odd item in {total[US]:.0%} of the displays ({others}); {max(ratios):.2f} of the time of the mips"
    )


if __name__ == "__main__":
    sys.exit(main())
