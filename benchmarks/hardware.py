"""From how much reuse on is a texture sampled faster through texture hardware than by our own kernels?

On a GPU: filling an array, fetching from it and creating it, in float4 and half4, in layers of four channels and of one, against
the native sampler, which reads the pyramid where it lies; isotropic and anisotropic. Also what the weights turn out to be: how many bits,
and how they are rounded. Without a GPU there is no hardware to time: then this is what the emulation costs beside the exact sampler.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

import texvlm
from benchmarks._harness import Bench, Call

SIDE, COUNT, QUEUED = 1024, 1 << 18, 10
NATIVE = "native sampler"


def steps_of_weights(device: torch.device) -> dict[str, tuple[int, float]]:
    """For texels and levels: the steps of a weight from 0 to 1, and at what part of a step the first one is taken (0.5: to nearest)."""
    fine = 1 << 16
    at = (torch.arange(fine, device=device) + 0.5) / fine
    ramp = texvlm.Texture(torch.tensor([[[0.0, 1.0]]], device=device), levels=1)
    two = texvlm.Texture(torch.zeros(1, 2, 2, device=device))
    two.data[:, -1] = 1.0
    middle = torch.full_like(at, 0.5)
    values = {
        "texels": texvlm.sample_lod_hardware(ramp, torch.stack([0.25 + at / 2, middle], -1)[None])[0, :, 0],
        "levels": texvlm.sample_lod_hardware(two, torch.stack([middle, middle], -1)[None], at[None])[0, :, 0],
    }
    found = {}
    for name, value in values.items():
        steps = len(value.unique()) - 1
        found[name] = steps, float(at[int((value > 0.5 / steps).nonzero()[0])]) * steps
    return found


def queued(call: Callable[[], object]) -> Call:
    """QUEUED calls, then one wait for the device."""

    def run() -> None:
        for _ in range(QUEUED):
            call()
        torch.cuda.synchronize()

    return run


def on_gpu(bench: Bench, channels: int, dtype: torch.dtype) -> str:
    device = torch.device("cuda")
    texture = texvlm.Texture(torch.rand(1, channels, SIDE, SIDE, device=device), dtype=dtype)
    uv, lod = torch.rand(1, COUNT, 2, device=device), torch.rand(1, COUNT, device=device) * 3
    rows = torch.stack(torch.meshgrid(*(2 * [torch.linspace(0, 1, 512, device=device)]), indexing="xy"), -1).reshape(1, -1, 2)
    ddx, ddy = torch.tensor([8 / SIDE, 0.0], device=device), torch.tensor([0.0, 1 / SIDE], device=device)
    ddx, ddy = ddx.expand(1, COUNT, 2), ddy.expand(1, COUNT, 2)
    arguments = (texture.height, texture.width, list(texture.reducer), texture.levels)
    four, one = (torch.classes.texvlm.HardwareTexture(texture.data, *arguments, n) for n in (4, 1))
    name = f"1024 x 1024 x {channels}, {str(dtype).removeprefix('torch.')}, {COUNT} queries; each row is {QUEUED} calls"
    fetch, fill = "hardware, fetch, layers of 4", "hardware, fill, layers of 4"
    times = bench.compare(
        f"random places, trilinear: {name}",
        {
            fetch: queued(lambda: four.sample_lod(uv, lod)),
            "hardware, fetch, layers of 1": queued(lambda: one.sample_lod(uv, lod)),
            "hardware, op with its cache": queued(lambda: texvlm.sample_lod_hardware(texture, uv, lod)),
            NATIVE: queued(lambda: texvlm.sample_lod(texture, uv, lod)),
            fill: queued(lambda: four.update(texture.data)),
            "hardware, fill, layers of 1": queued(lambda: one.update(texture.data)),
            "torch copy of the pyramid": queued(texture.data.clone),
        },
    )
    error = (four.sample_lod(uv, lod) - texvlm.sample_lod(texture, uv, lod)).abs().max().item()
    bench.gate("largest difference from the native sampler / (3 / 512)", error / (3 / 512 + 1e-3), at_most=1.0)
    in_rows = bench.compare(
        f"neighbouring places, level 0: {name}",
        {
            fetch: queued(lambda: four.sample_lod(rows, lod * 0)),
            NATIVE: queued(lambda: texvlm.sample_lod(texture, rows, lod * 0)),
        },
    )
    long = bench.compare(
        f"footprints of 8 x 1 texels: {name}",
        {
            fetch: queued(lambda: four.sample_grad(uv, ddx, ddy, 8)),
            NATIVE: queued(lambda: texvlm.sample_grad(texture, uv, ddx, ddy, 8)),
        },
    )
    made = bench.compare(
        f"making an array (without the cache): {name}",
        {"create, fill, free": queued(lambda: torch.classes.texvlm.HardwareTexture(texture.data, *arguments, 4))},
    )
    verdicts = []
    for what, table in (("random", times), ("in rows", in_rows), ("8:1 footprints", long)):
        gain = table.median(NATIVE) - table.median(fetch)
        reuse = times.median(fill) / gain if gain > 0 else float("inf")
        bench.figure(f"{channels} {dtype} {what}: calls per fill from which on hardware wins", reuse)
        verdicts.append(f"{what} {f'from {reuse:.1f} calls on' if gain > 0 else 'never'}")
    creation = (made.median() - times.median(fill)) / QUEUED
    return f"C = {channels} {str(dtype).removeprefix('torch.')}: {', '.join(verdicts)} (creation {1e6 * creation:.0f} us)"


def on_cpu(bench: Bench) -> str:
    texture = texvlm.Texture(torch.rand(1, 4, SIDE, SIDE))
    uv, lod = torch.rand(1, 65536, 2), torch.rand(1, 65536) * 3
    times = bench.compare(
        "no GPU: the emulation of its weights, 65,536 queries, C = 4, trilinear",
        {
            "emulation": lambda: texvlm.sample_lod_hardware(texture, uv, lod),
            NATIVE: lambda: texvlm.sample_lod(texture, uv, lod),
        },
    )
    error = (texvlm.sample_lod_hardware(texture, uv, lod) - texvlm.sample_lod(texture, uv, lod)).abs().max().item()
    bench.gate("largest difference from the native sampler / (3 / 512)", error / (3 / 512), at_most=1.0)
    return f"No GPU here, so no answer; the emulation on the CPU takes {times.median() / times.median(NATIVE):.1f}x the native sampler."


def main() -> int:
    bench = Bench(__doc__)
    gpu = torch.cuda.is_available()
    steps = steps_of_weights(torch.device("cuda" if gpu else "cpu"))
    for name, (count, first) in steps.items():
        print(f"weights between {name}: {count} steps, the first one taken after {first:.2f} of a step")
        bench.figure(f"weights between {name}", {"steps": count, "first": first})
        bench.gate(f"{name}: steps of the emulation", count, at_least=256)
        bench.gate(f"{name}: rounding as in the emulation", abs(first - 0.5), at_most=0.02)
    if not gpu:
        return bench.finish(on_cpu(bench))
    answers = [on_gpu(bench, c, dtype) for c in (4, 40) for dtype in (torch.float32, torch.float16)]
    return bench.finish("Hardware wins: " + "; ".join(answers) + ".")


if __name__ == "__main__":
    sys.exit(main())
