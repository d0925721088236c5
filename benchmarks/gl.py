"""Hardware or software mipmaps: does the graphics driver halve pictures faster than our own kernels?

On the CPU: our kernels against OpenGL as the machine has it (Mesa's llvmpipe where there is no graphics card), tensors in and out of
the driver included. With an NVIDIA GPU also: our CUDA kernels, the same and then into a texture object, OpenGL with the texture shared
(mapping and copies included), and the detour through the CPU. Whole pyramids from NCHW, single pictures and batches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

import texvlm
from benchmarks._harness import US, Bench, Times
from texvlm import gl

SINGLE, BATCH, MANY = (1, 3, 1024, 1024), (32, 3, 256, 256), (1, 40, 512, 512)
STEP_CALLS = 5


def waited(call: Callable, device: torch.device) -> Callable:
    """On CUDA the work is waited for."""
    if device.type == "cpu":
        return call

    def run() -> None:
        call()
        torch.cuda.synchronize(device)

    return run


def steps(bench: Bench, title: str, image: torch.Tensor, total: float) -> dict[str, float]:
    """What a call of the GL path consists of, in ms; `around` is level 0, regrouping channels and handing over to the thread."""
    texvlm.generate_mipmaps(image, backend="gl")
    with gl.profile() as seconds:
        for _ in range(STEP_CALLS):
            texvlm.generate_mipmaps(image, backend="gl")
    found = {name: 1e3 * s / STEP_CALLS for name, s in seconds.items()}
    found["around"] = max(0.0, 1e3 * total - sum(found.values()))
    print(
        f"  {title}" * (total == 0)
        + "  GL by step, each waited for: "
        + ", ".join(f"{name} {ms:.3f} ms" for name, ms in found.items())
    )
    bench.figure(f"{title}: GL by step, ms", found)
    return found


def table(bench: Bench, device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Times, str]:
    """One table: native, GL, and what else there is on this device. Returns it and the name of the GL row."""
    image = torch.rand(*shape).to(device, dtype)
    driver = gl.status(device).renderer
    name = f"GL ({driver.split(' (')[0]})"
    calls = {
        US: lambda: texvlm.generate_mipmaps(image, backend="native"),
        name: lambda: texvlm.generate_mipmaps(image, backend="gl"),
    }
    if device.type == "cuda":
        texture = texvlm.generate_mipmaps(image)
        array = torch.classes.texvlm.HardwareTexture(texture.data, texture.height, texture.width, ["mean"], texture.levels)
        calls["texvlm, into a texture object"] = lambda: array.update(texvlm.generate_mipmaps(image).data)
        if gl.status("cpu").available:
            calls["GL on the CPU and back"] = lambda: texvlm.generate_mipmaps(image.cpu(), backend="gl").data.to(device)
    size = " x ".join(str(n) for n in shape)
    title = f"{'CPU' if device.type == 'cpu' else 'CUDA'}, {size}, {str(dtype)[6:]}"
    times = bench.compare(title, {n: waited(c, device) for n, c in calls.items()}, seconds=1.5)
    steps(bench, title, image, times.median(name))
    return times, name


def main() -> int:
    bench = Bench(__doc__)
    devices = [torch.device("cpu")] + [torch.device("cuda")] * torch.cuda.is_available()
    verdicts = []
    for device in devices:
        status = gl.status(device)
        print(f"\n{device.type}: {status.reason or f'{status.vendor}, {status.renderer}, OpenGL {status.version}'}")
        bench.figure(
            f"OpenGL, {device.type}", status.reason or f"{status.renderer}, {status.version}; odd sizes: {status.odd_filter}"
        )
        if not status.available:
            verdicts.append(f"{device.type}: no OpenGL to compare with")
            continue
        found = texvlm._C.gl_status(-1 if device.type == "cpu" else torch.cuda.current_device())
        bench.figure(f"the driver's filter, {device.type}", {k: v for k, v in found.items() if "_from_" in k})
        steps(
            bench,
            f"{device.type}, 1 x 4 x 8 x 8, float32: what a call costs whatever its size",
            torch.rand(1, 4, 8, 8).to(device),
            0.0,
        )
        ratios = {}
        for dtype in (torch.float32, torch.float16):
            for label, shape in (("one picture", SINGLE), ("a batch of 32", BATCH), ("40 channels", MANY)):
                times, row = table(bench, device, shape, dtype)
                ratios[label, dtype] = times.ratio(row)
        for label in ("one picture", "a batch of 32", "40 channels"):
            bench.gate(f"{device.type}, {label}, float32: native is faster than GL", ratios[label, torch.float32], at_least=1.0)
        bench.figure(f"statistics, {device.type}", gl.stats())
        single, batch, many = (ratios[label, torch.float32] for label in ("one picture", "a batch of 32", "40 channels"))
        halves = [ratios[label, torch.float16] for label in ("one picture", "a batch of 32", "40 channels")]
        winner = "software" if min(single, batch, many) >= 1 else "it depends"
        driver = status.renderer.split(" (")[0]
        verdicts.append(
            f"{device.type}: {winner}; the driver ({driver}) takes {single:.1f}x our time for one 1024^2 picture, {batch:.1f}x for 32 of "
            f"256^2, {many:.1f}x for 40 channels (float16: {min(halves):.1f}x to {max(halves):.1f}x)"
        )
    if len(devices) == 1:
        verdicts.append("CUDA and texture objects: not measured, no GPU here")
    return bench.finish("; ".join(verdicts))


if __name__ == "__main__":
    sys.exit(main())
