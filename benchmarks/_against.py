"""Which ops are slower, or faster, here than in another checkout of texvlm?

    python -m benchmarks._against ../texvlm-before          # all calls; its extension must have been built in place
    python -m benchmarks._against ../texvlm-before warp     # those whose name has "warp" in it

Two processes, one with each package, are told in turn to time the same call, so that noise meets both alike; only one of them computes at
a time. A ratio over 1 says that this tree is faster: the median, over the rounds, of the ratios of two turns one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch

Call = Callable[[], Any]
SIDE, PATCHES, SAMPLES = 1024, 273, 65536
TURN_SECONDS = 0.25  # what a turn of one process takes, beyond three calls


def picture(side: int = SIDE, channels: int = 3) -> torch.Tensor:
    """Smooth shapes, edges and some noise, which flow, saliency, text and superpixels can work on."""
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    planes = [((x * (3 + c) + y * 5) // 64 % 2 + (x / (20.0 + c)).sin() + (y / 31.0).cos()) / 4 + 0.25 for c in range(channels)]
    return (torch.stack(planes)[None] + 0.05 * torch.rand(1, channels, side, side)).clamp(0, 1)


def cases() -> dict[str, Callable[[], Call]]:
    """By name: what makes a call. Only what the oldest tree to compare with has, too."""
    import texvlm

    def texture(channels: int, side: int = SIDE, levels: int | None = None) -> texvlm.Texture:
        return texvlm.Texture(torch.rand(1, channels, side, side), levels=levels)

    def gradients(of: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Call:
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]

        def run() -> tuple[torch.Tensor, ...]:
            out = of(*leaves)
            return torch.autograd.grad(out, leaves, torch.ones_like(out))

        return run

    def mips(channels: int, last: bool) -> Call:
        image = torch.rand(1, channels, SIDE, SIDE)
        image = image.contiguous(memory_format=torch.channels_last) if last else image
        return lambda: texvlm.generate_mipmaps(image)

    def in_place(channels: int) -> Call:
        own = texture(channels)
        return lambda: texvlm.update_mipmaps(own)

    def mips_gradient(channels: int) -> Call:
        return gradients(lambda image: texvlm.generate_mipmaps(image).data, torch.rand(1, channels, SIDE, SIDE))

    def sampled(channels: int, backward: bool) -> Call:
        own, uv, lod = texture(channels, 512), torch.rand(1, SAMPLES, 2), torch.rand(1, SAMPLES) * 4
        if backward:
            return gradients(lambda data, at: texvlm.sample_lod(own.replace(data), at, lod), own.data, uv)
        return lambda: texvlm.sample_lod(own, uv, lod)

    def footprints(channels: int, backward: bool) -> Call:
        own, uv = texture(channels), torch.rand(1, SAMPLES, 2)
        long = torch.tensor([8.0 / SIDE, 0.0]).expand(1, SAMPLES, 2).contiguous()
        short = torch.tensor([0.0, 1.0 / SIDE]).expand(1, SAMPLES, 2).contiguous()
        if backward:
            return gradients(lambda data, at: texvlm.sample_grad(own.replace(data), at, long, short), own.data, uv)
        return lambda: texvlm.sample_grad(own, uv, long, short)

    def patches(channels: int, backward: bool) -> Call:
        own, centers = texture(channels), torch.rand(1, PATCHES, 2)
        if backward:
            return gradients(lambda data, at: texvlm.extract_patches(own.replace(data), at), own.data, centers)
        return lambda: own.patches(centers, lod=0.0)

    def foveated(backward: bool) -> Call:
        own, at = texture(3), torch.tensor([[[0.4, 0.6]]])
        if backward:
            return gradients(lambda data: texvlm.sample_foveated(own.replace(data), at).patches, own.data)
        return lambda: texvlm.sample_foveated(own, at)

    def bands(channels: int, backward: bool) -> Call:
        own = texture(channels)
        if backward:
            return gradients(lambda data: texvlm.laplacian_decompose(own.replace(data)).data, own.data)
        return lambda: texvlm.laplacian_decompose(own)

    def saliency(backward: bool) -> Call:
        image = picture()
        return gradients(texvlm.saliency, image) if backward else lambda: texvlm.saliency(image)

    def warped(channels: int, backward: bool) -> Call:
        planes, flow = torch.rand(1, channels, SIDE, SIDE), torch.randn(1, 2, SIDE // 4, SIDE // 4)
        return gradients(texvlm.warp, planes, flow) if backward else lambda: texvlm.warp(planes, flow)

    def flow(side: int) -> Call:
        now = picture(side)
        before = torch.roll(now, (2, 3), (2, 3))
        return lambda: texvlm.optical_flow(before, now)

    def distance() -> Call:
        mask = picture()[:, 0] > 0.5
        return lambda: texvlm.distance_transform(mask)

    def regions(of: Callable[[torch.Tensor], Any]) -> Call:
        image = picture()
        return lambda: of(image)

    def labelled() -> Call:
        image = picture()
        labels, _ = texvlm.superpixels(image)
        return lambda: texvlm.boundaries(image, labels=labels)

    def channels(names: str | None, side: int) -> Call:
        image = picture(side)
        return lambda: texvlm.build_channels(image, channels=names)

    def chosen(given: str) -> Call:
        image = picture()
        own = texvlm.build_channels(image) if given == "texture" else image
        return lambda: texvlm.select(own, PATCHES)

    def best(batch: int) -> Call:
        scores = torch.rand(batch, 4096)
        return lambda: texvlm.topk(scores, PATCHES)

    def splat() -> Call:
        points, weights = torch.rand(1, 64, 2), torch.rand(1, 64)
        return lambda: texvlm.gaussian_splat(points, weights, 0.05, SIDE, SIDE)

    both = (("", False), (", forward + backward", True))
    found: dict[str, Callable[[], Call]] = {}
    for c in (3, 40):
        found[f"generate_mipmaps {c} ch"] = lambda c=c: mips(c, False)
        found[f"generate_mipmaps {c} ch channels_last"] = lambda c=c: mips(c, True)
        found[f"update_mipmaps {c} ch"] = lambda c=c: in_place(c)
        found[f"generate_mipmaps {c} ch, forward + backward"] = lambda c=c: mips_gradient(c)
    for more, backward in both:
        for c in (3, 40):
            found[f"sample_lod {c} ch{more}"] = lambda c=c, b=backward: sampled(c, b)
            found[f"sample_grad {c} ch{more}"] = lambda c=c, b=backward: footprints(c, b)
            found[f"patches {c} ch{more}"] = lambda c=c, b=backward: patches(c, b)
            found[f"laplacian_decompose {c} ch{more}"] = lambda c=c, b=backward: bands(c, b)
            found[f"warp {c} ch{more}"] = lambda c=c, b=backward: warped(c, b)
        found[f"sample_foveated 3 ch{more}"] = lambda b=backward: foveated(b)
        found[f"saliency{more}"] = lambda b=backward: saliency(b)
    for side in (256, SIDE):
        found[f"optical_flow {side}"] = lambda s=side: flow(s)
        found[f"build_channels minimal {side}"] = lambda s=side: channels("minimal", s)
        found[f"build_channels all {side}"] = lambda s=side: channels(None, s)
    found |= {
        "distance_transform": distance,
        "superpixels": lambda: regions(texvlm.superpixels),
        "boundaries": labelled,
        "text_regions": lambda: regions(texvlm.text_regions),
        "contrast_edges": lambda: regions(texvlm.contrast_edges),
        "gaussian_splat 64 points": splat,
        "topk 1 x 4096": lambda: best(1),
        "topk 32 x 4096": lambda: best(32),
        "select of a picture": lambda: chosen("picture"),
        "select of a texture": lambda: chosen("texture"),
    }
    return found


def serve() -> None:
    """A process with one tree: reads names of calls, answers seconds a call."""
    torch.set_num_threads(int(os.environ["TEXVLM_AGAINST_THREADS"]))
    found, name, call = cases(), None, None
    print(json.dumps(list(found)), flush=True)
    for line in sys.stdin:
        try:
            if name != line.strip():
                name = line.strip()
                torch.manual_seed(0)
                call = found[name]()
                call(), call()
            samples: list[float] = []
            until = time.perf_counter() + TURN_SECONDS
            while len(samples) < 3 or time.perf_counter() < until:
                start = time.perf_counter()
                call()
                samples.append(time.perf_counter() - start)
            print(json.dumps(statistics.median(samples)), flush=True)
        except Exception as error:  # the other tree may not know this call: a row says so
            name = None
            print(json.dumps(f"{type(error).__name__}: {error}".split("\n", 1)[0]), flush=True)


class Tree:
    """A checkout, and the process that runs its package."""

    def __init__(self, folder: Path, threads: int) -> None:
        environment = {**os.environ, "PYTHONPATH": str(folder.resolve()), "TEXVLM_AGAINST_THREADS": str(threads)}
        command = [sys.executable, "-P", str(Path(__file__).resolve()), "--serve"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        self.names: list[str] = self._answer()

    def _answer(self) -> Any:
        out: IO[str] = self.process.stdout  # type: ignore[assignment]
        line = out.readline()
        if not line:
            raise SystemExit("a process ended: is its extension built in place (setup.py build_ext --inplace)?")
        return json.loads(line)

    def time(self, name: str) -> float | str:
        """Seconds a call, or what was said instead."""
        wanted: IO[str] = self.process.stdin  # type: ignore[assignment]
        wanted.write(name + "\n")
        wanted.flush()
        return self._answer()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("before", type=Path, nargs="?", help="the other checkout, built in place")
    parser.add_argument("names", nargs="*", help="parts of the names of calls (default: all)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve()
        return 0
    if args.before is None or not (args.before / "texvlm").is_dir():
        parser.error(f"before must be a checkout of texvlm, got {args.before}")
    here, before = Tree(Path(__file__).resolve().parents[1], args.threads), Tree(args.before, args.threads)
    rows: dict[str, dict[str, float]] = {}
    print(f"{'':44} {'before ms':>10} {'now ms':>10} {'ratio':>7}  of rounds")
    for name in here.names:
        if args.names and not any(part in name for part in args.names):
            continue
        turns = []
        for turn in range(args.rounds):
            order = (here, before) if turn % 2 else (before, here)
            said = {tree: tree.time(name) for tree in order}
            turns.append((said[before], said[here]))
        if failed := next((said for pair in turns for said in pair if isinstance(said, str)), None):
            print(f"{name:44} {failed[:80]}", flush=True)
            continue
        ratios = sorted(old / new for old, new in turns)
        old, new = (1e3 * statistics.median(pair[i] for pair in turns) for i in (0, 1))
        rows[name] = {"before_ms": old, "now_ms": new, "ratio": statistics.median(ratios), "least": ratios[0], "most": ratios[-1]}
        print(
            f"{name:44} {old:10.4f} {new:10.4f} {statistics.median(ratios):7.2f}  {ratios[0]:.2f} .. {ratios[-1]:.2f}", flush=True
        )
    if args.json:
        args.json.write_text(json.dumps({"threads": args.threads, "rounds": args.rounds, "rows": rows}, indent=1) + "\n")
    slower = [name for name, row in rows.items() if row["ratio"] < 1 / 1.05]
    print(
        f"{len(rows) - len(slower)} of {len(rows)} calls take what they took within 5 %, or less; slower: {', '.join(slower) or 'none'}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
