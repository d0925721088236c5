"""How many launches does a call cost on a card, what do they move at the least, and how long does that take?

No card is asked. In a build of the kernels for the host (tests/shim) with TEXVLM_EMULATE=1 the ops take the way of CUDA for tensors of the
CPU; counted are the kernels of texvlm as they are launched, and the ops of torch that write memory, as one kernel each. With
TEXVLM_EMULATE=traffic at build time each kernel also tells which sectors of 32 bytes it reads and which it writes; an op of torch moves
what it is given and gives. The time is that of a card that neither waits for latency nor computes: MICROSECONDS for each launch, one after
another in a captured graph, and the bytes at SHARE of PEAK. A kernel with little parallelism takes longer than that. What is not seen: the
zero fill of a large gradient, which on the CPU is a fresh page, and fetches of texture hardware.

    python -m benchmarks._launches                   # makes build/traffic first, which takes a while
    python -m benchmarks._launches --kernels all     # which kernels are launched by the calls whose names hold "all"
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.profiler import ExecutionTraceObserver

import texvlm

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "traffic"
PEAK, SHARE = 4.8e12, 0.75  # bytes a second of an H200, and what of them a copy gets
MICROSECONDS = 2.0  # from the end of a kernel to the end of an empty one after it, in a graph
WHOLE = "picture to 40 channels and 273 cells"
NO_KERNEL = {"aten::detach_", "aten::resize_", "aten::set_", "aten::as_strided_", "aten::requires_grad_"}

Call = Callable[[], Any]
LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64)


@dataclass
class Cost:
    """Of one call."""

    kernels: Counter[str] = field(default_factory=Counter)  # by source, or by op of torch
    read: int = 0
    written: int = 0
    traffic: bool = False  # whether the kernels of texvlm told theirs

    @property
    def launches(self) -> int:
        return self.kernels.total()

    @property
    def microseconds(self) -> float:
        return self.launches * MICROSECONDS + (self.read + self.written) / (PEAK * SHARE) * 1e6


def emulated() -> bool:
    """Whether the calls of this process run the kernels, on the host."""
    return texvlm.build_info()["cuda_archs"] == "emulated" and os.environ.get("TEXVLM_EMULATE") == "1"


def cost_of(call: Call) -> Cost:
    """Runs a call twice, and counts the second time."""
    call()
    cost = Cost()

    def launched(source: bytes, kernel: bytes, read: int, written: int) -> None:
        cost.kernels[Path(source.decode()).name] += 1
        cost.read, cost.written, cost.traffic = cost.read + read, cost.written + written, cost.traffic or read + written > 0

    library = ctypes.CDLL(str(Path(texvlm.__file__).parent / "lib" / "libtexvlm.so"))
    listener, observer = LISTENER(launched), ExecutionTraceObserver()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        observer.register_callback(file.name)
        library.texvlm_shim_tell(listener)
        observer.start()
        try:
            call()
        finally:
            observer.stop()
            observer.unregister_callback()
            library.texvlm_shim_tell(LISTENER())
        nodes = json.loads(Path(file.name).read_text())["nodes"]
    for name, read, written in torch_kernels(nodes):
        cost.kernels[name] += 1
        cost.read, cost.written = cost.read + read, cost.written + written
    return cost


def torch_kernels(nodes: list[dict[str, Any]]) -> Iterator[tuple[str, int, int]]:
    """Name, bytes read and bytes written of the ops of torch that write memory and are made of no others that do."""
    parts: dict[int, list[dict[str, Any]]] = {}
    for node in nodes:
        parts.setdefault(node["ctrl_deps"], []).append(node)

    def writes(node: dict[str, Any]) -> bool:
        name, given = node["name"], set(tensors(node["inputs"]["values"]))
        if not name.startswith("aten::") or name in NO_KERNEL or name.startswith(("aten::empty", "aten::new_empty")):
            return False
        made = set(tensors(node["outputs"]["values"]))
        changes = name.endswith("_") and not name.endswith("__")
        return any(size for _, size in made) and (changes or not {of for of, _ in made} <= {of for of, _ in given})

    def inside(node: dict[str, Any]) -> list[dict[str, Any]]:
        below = [leaf for part in parts.get(node["id"], ()) if part is not node for leaf in inside(part)]
        return below or ([node] if writes(node) else [])

    for root in nodes:
        if root["name"].startswith("[pytorch|profiler|execution_trace|thread]"):
            for leaf in inside(root):
                yield (
                    leaf["name"],
                    sum(size for _, size in set(tensors(leaf["inputs"]["values"]))),
                    sum(size for _, size in set(tensors(leaf["outputs"]["values"]))),
                )


def tensors(values: Any) -> Iterator[tuple[int, int]]:
    """Storage and bytes of the tensors among the values of a trace: [id, storage, offset, count, bytes each, device]."""
    if isinstance(values, list):
        if len(values) == 6 and isinstance(values[5], str) and all(isinstance(value, int) for value in values[:5]):
            yield values[1], values[3] * values[4]
        else:
            for value in values:
                yield from tensors(value)


def backward(make: Callable[..., Any], *leaves: Tensor) -> Call:
    """The way back of a call, to these arguments of it."""
    wanted = [leaf.detach().requires_grad_() for leaf in leaves]
    made = make(*wanted)
    ones = torch.ones_like(made)
    return lambda: torch.autograd.grad(made, wanted, ones, retain_graph=True)


def calls(n: int) -> dict[str, Callable[[], Call]]:
    """The public calls, on a picture of n x n."""
    torch.manual_seed(0)
    image, wide = torch.rand(1, 3, n, n), torch.rand(1, 40, n, n)
    uv, lod, gaze = torch.rand(1, 4096, 2), torch.rand(1, 4096) * 4, torch.full((1, 1, 2), 0.5)
    centres = torch.rand(1, 273, 2)

    def texture(picture: Tensor) -> texvlm.Texture:
        return texvlm.generate_mipmaps(picture)

    def of(data: Tensor, channels: int) -> texvlm.Texture:
        return texvlm.Texture.from_data(data, n, n, n.bit_length(), ["mean"] * channels)

    def sampled(data: Tensor, at: Tensor, level: Tensor) -> Tensor:
        return texvlm.sample_lod(of(data, 40), at, level)

    def patched(data: Tensor) -> Tensor:
        return texvlm.extract_patches(of(data, 3), centres)

    def foveated(data: Tensor, at: Tensor) -> Tensor:
        return texvlm.sample_foveated(of(data, 3), at).patches

    def minimal(picture: Tensor) -> Tensor:
        return texvlm.build_channels(picture, channels="minimal").data

    def everything(picture: Tensor) -> Tensor:
        return texvlm.build_channels(picture).data

    def softly(picture: Tensor) -> Tensor:
        return texvlm.select(picture, path="soft").weights_all

    def whole() -> Any:
        return texvlm.select(texvlm.build_channels(image))

    thin, thick = texture(image).data, texture(wide).data
    return {
        "generate_mipmaps, 3 channels": lambda: lambda: texture(image),
        "generate_mipmaps, 40 channels": lambda: lambda: texture(wide),
        "generate_mipmaps, 40 channels, backward": lambda: backward(lambda x: texture(x).data, wide),
        "sample, 4096 of 40 channels": lambda: lambda: sampled(thick, uv, lod),
        "sample, 4096 of 40 channels, backward": lambda: backward(sampled, thick, uv, lod),
        "patches, 273 of 16 x 16 x 3": lambda: lambda: patched(thin),
        "patches, 273 of 16 x 16 x 3, backward": lambda: backward(patched, thin),
        "sample_foveated": lambda: lambda: foveated(thin, gaze),
        "sample_foveated, backward": lambda: backward(foveated, thin, gaze),
        "build_channels, minimal": lambda: lambda: minimal(image),
        "build_channels, minimal, backward": lambda: backward(minimal, image),
        "build_channels, all": lambda: lambda: everything(image),
        "build_channels, all, backward": lambda: backward(everything, image),
        "select": lambda: lambda: texvlm.select(image),
        "select, soft": lambda: lambda: softly(image),
        "select, soft, backward": lambda: backward(softly, image),
        "distance_transform": lambda: lambda: texvlm.distance_transform(image[:, 0] > 0.99),
        "superpixels": lambda: lambda: texvlm.superpixels(image),
        "text_regions": lambda: lambda: texvlm.text_regions(image),
        "optical_flow": lambda: lambda: texvlm.optical_flow(image, image.roll(2, -1)),
        WHOLE: lambda: whole,
    }


def show(costs: dict[str, Cost], n: int, traffic: bool) -> None:
    """Prints the table."""
    moved = ["read, MB", "written, MB"] if traffic else []
    table = Table("call", "launches", "of them torch's", *moved, "at least, us", title=f"{n} x {n}")
    for name, cost in costs.items():
        theirs = sum(count for kernel, count in cost.kernels.items() if kernel.startswith("aten::"))
        moved = [f"{size / 1e6:.2f}" for size in (cost.read, cost.written)] if traffic else []
        table.add_row(name, str(cost.launches), str(theirs), *moved, f"{cost.microseconds:.0f}")
    Console(width=140).print(table)


def run_in_a_build_of_its_own() -> int:
    """Makes the build that tells of traffic, and runs this again in it."""
    print(f"compiling the kernels for the host into {BUILD.relative_to(ROOT)}", flush=True)
    flags = {"TEXVLM_EMULATE": "traffic", "CXXFLAGS": "-O1 -g0 -DTEXVLM_NO_ISA_DISPATCH"}
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", str(BUILD), "--build-lib", str(BUILD / "lib")]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **flags}, stdout=subprocess.DEVNULL, check=True)
    found = {**os.environ, "TEXVLM_EMULATE": "1", "PYTHONPATH": str(BUILD / "lib")}
    return subprocess.run([sys.executable, __file__, *sys.argv[1:]], cwd=ROOT, env=found, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1024, help="of the picture, each side")
    parser.add_argument("--kernels", metavar="NAME", help="only calls whose names hold this, kernel by kernel")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not emulated():
        return run_in_a_build_of_its_own()
    costs = {}
    for name, make in calls(args.size).items():
        if args.kernels is None or args.kernels in name:
            costs[name] = cost_of(make())
            if args.kernels is not None:
                print(name, dict(costs[name].kernels.most_common()), flush=True)
    traffic = any(cost.traffic for cost in costs.values())
    if not traffic:
        print("this build does not tell what its kernels read and write (TEXVLM_EMULATE=traffic does): launches alone")
    show(costs, args.size, traffic)
    if args.json:
        rows = {
            name: {"launches": cost.launches} | ({"read": cost.read, "written": cost.written} if traffic else {})
            for name, cost in costs.items()
        }
        args.json.write_text(json.dumps({"size": args.size, "calls": rows}, indent=1) + "\n")
    if WHOLE in costs:
        print(f"{WHOLE}: {costs[WHOLE].launches} launches, at least {costs[WHOLE].microseconds:.0f} us")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
