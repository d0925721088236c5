"""Does texvlm keep its targets on this card, and what do texture hardware and OpenGL add?

How texture hardware rounds comes first, as tests take the answer (`--only rounding` asks nothing else); what has been measured is in the
file of `--json` after every row, so that a run that is cut off has measured something. Then the figures that the CUDA kernels were designed
for, the questions about texture hardware that only a card answers, and the peers: torch, and where they are installed CuPy and nvdiffrast.
Part of `make gpu-verify`; `python -m benchmarks._gpu --smoke` runs the same code on tiny pictures on any device, so that a first run on a
card does not fail for a slip.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import texvlm

Call = Callable[[], Any]
CALLS = 20  # in a captured graph: of one short kernel, the launch of the graph would be measured


class Card:
    """Times calls on one device and keeps what they gave, row by row."""

    def __init__(self, device: torch.device, smoke: bool, file: Path | None = None) -> None:
        self.device, self.smoke, self.file = device, smoke, file
        self.rows: list[dict[str, Any]] = []
        self.notes: dict[str, Any] = {}

    def size(self, n: int) -> int:
        """A side or a count, made small in smoke runs."""
        return max(16, n // 32) if self.smoke else n

    def rand(self, *sizes: int) -> torch.Tensor:
        """Uniform values in [0, 1) on the device, the same in every run."""
        generator = torch.Generator().manual_seed(0)
        return torch.rand(*sizes, generator=generator).to(self.device)

    def save(self) -> None:
        """Writes what there is; the file is whole at any time."""
        if self.file is None:
            return
        fresh = self.file.with_suffix(".part")
        measured = {"device": str(self.device), "rows": self.rows, "answers": self.notes}
        fresh.write_text(json.dumps(measured, indent=1, default=str) + "\n")
        fresh.replace(self.file)

    def graphed(self, call: Call) -> float:
        """Median milliseconds of a call in a captured CUDA graph of CALLS of them, so that kernels are timed and not Python."""
        if self.device.type != "cuda":
            return self.time(call)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                call()
        return self.time(graph.replay) / CALLS

    def time(self, call: Call) -> float:
        """Median milliseconds of one call."""
        rounds, samples = (1, 3) if self.smoke else (20, 15)
        for _ in range(3):
            call()
        taken = []
        for _ in range(samples):
            if self.device.type == "cuda":
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                for _ in range(rounds):
                    call()
                end.record()
                torch.cuda.synchronize()
                taken.append(begin.elapsed_time(end) / rounds)
            else:
                start = time.perf_counter()
                call()
                taken.append((time.perf_counter() - start) * 1e3)
        return sorted(taken)[len(taken) // 2]

    def row(self, name: str, call: Call, *, at_most: float | None = None, against: dict[str, Call] | None = None) -> float:
        """One row: milliseconds as a graph and as a plain call, a target where there is one, and peers timed as graphs."""
        entry: dict[str, Any] = {"name": name, "ms": self.graphed(call), "call_ms": self.time(call)}
        if at_most is not None:
            entry |= {"target_ms": at_most, "kept": entry["ms"] <= at_most}
        for peer, other in (against or {}).items():
            try:
                entry.setdefault("peers", {})[peer] = self.graphed(other)
            except Exception as error:  # a peer that fails is a row without it
                self.notes[f"{name}: {peer}"] = str(error).splitlines()[0]
        self.rows.append(entry)
        self.save()
        return entry["ms"]

    def ask(self, question: str, answer: Callable[[], Any]) -> Any:
        """One open question; what goes wrong is the answer then."""
        try:
            self.notes[question] = answer()
        except Exception as error:
            self.notes[question] = f"not answered: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        self.save()
        return self.notes[question]


def mipmaps(card: Card) -> None:
    n, large = card.size(1024), card.size(4096)
    picture, batch, wide = card.rand(1, 3, n, n), card.rand(4 if card.smoke else 32, 3, n, n), card.rand(1, 4, large, large)

    def pools(image: torch.Tensor) -> Call:
        def chain() -> None:
            level = image
            while min(level.shape[2:]) > 1:
                level = F.avg_pool2d(level, 2)

        return chain

    card.row("mips 1024^2 x 3", lambda: texvlm.generate_mipmaps(picture), at_most=0.02, against={"avg_pool2d": pools(picture)})
    count = batch.shape[0]
    card.row(
        "mips of 32 pictures 1024^2 x 3",
        lambda: texvlm.generate_mipmaps(batch),
        at_most=0.01 * count,
        against={"avg_pool2d": pools(batch)},
    )
    texture = texvlm.generate_mipmaps(wide)
    moved = texture.data.nbytes + wide.nbytes / 3  # levels above 0 are written; level 0 is read
    source = torch.empty(int(moved) // 2, dtype=torch.uint8, device=card.device)
    target = torch.empty_like(source)
    copy = card.graphed(lambda: target.copy_(source))
    card.row(
        "mips 4096^2 x 4, in place",
        lambda: texvlm.update_mipmaps(texture),
        at_most=1.5 * copy,
        against={"avg_pool2d": pools(wide), "copy of as many bytes": lambda: target.copy_(source)},
    )
    features = card.rand(1, 40, n, n)
    card.row("mips 1024^2 x 40", lambda: texvlm.generate_mipmaps(features), against={"avg_pool2d": pools(features)})


def sampling(card: Card) -> None:
    n, queries = card.size(1024), card.size(4096)
    for channels, target in ((3, None), (40, 0.05)):
        image = card.rand(1, channels, n, n)
        texture = texvlm.generate_mipmaps(image)
        uv, lod = card.rand(1, queries, 2), card.rand(1, queries) * 4
        grid = (uv * 2 - 1)[:, None]
        last = image.contiguous(memory_format=torch.channels_last)
        peers: dict[str, Call] = {
            "grid_sample (one level)": lambda image=image, grid=grid: F.grid_sample(image, grid, align_corners=False),
            "grid_sample channels_last": lambda last=last, grid=grid: F.grid_sample(last, grid, align_corners=False),
        }
        if dr := optional("nvdiffrast.torch"):
            nhwc = image.permute(0, 2, 3, 1).contiguous()
            stack = dr.texture_construct_mip(nhwc)
            bias = lod[:, None]
            peers["nvdiffrast"] = lambda nhwc=nhwc, uv=uv, stack=stack, bias=bias, dr=dr: dr.texture(
                nhwc, uv[:, None], mip=stack, mip_level_bias=bias, boundary_mode="clamp", filter_mode="linear-mipmap-linear"
            )
        card.row(
            f"{queries} trilinear samples, C = {channels}",
            lambda texture=texture, uv=uv, lod=lod: texvlm.sample_lod(texture, uv, lod),
            at_most=target,
            against=peers,
        )
        gradient(card, image, uv, f"{queries} bilinear samples, C = {channels}, backward", 5 if channels == 40 else None)
    texture = texvlm.generate_mipmaps(card.rand(1, 3, n, n))
    centers = card.rand(1, 273, 2)
    card.row("273 patches 16 x 16 x 3", lambda: texvlm.extract_patches(texture, centers), at_most=0.02)


def gradient(card: Card, image: torch.Tensor, uv: torch.Tensor, name: str, faster: float | None) -> None:
    """The backward alone, of a one-level texture against grid_sample: to texels and to uv.

    Both fill a gradient as large as the texture with zeros, which takes most of their time and is torch's: the target is for what comes on
    top of that.
    """
    texture = texvlm.Texture(image, levels=1)
    grad = torch.ones(1, uv.shape[1], image.shape[1], device=card.device)
    lod = torch.zeros(1, uv.shape[1], device=card.device)
    plain = torch.ops.aten.grid_sampler_2d_backward
    grid, up = (uv * 2 - 1)[:, None], grad.transpose(1, 2)[:, :, None].contiguous()

    def backward() -> Any:
        args = (grad, texture.data, uv, lod, texture.height, texture.width, ["mean"], 1, "bilinear", "clamp")
        return torch.ops.texvlm.sample_lod_backward(*args, mask=[True, True, False])

    ours = card.row(name, backward, against={"grid_sample backward": lambda: plain(up, image, grid, 0, 1, False, [True, True])})
    if faster and (peer := card.rows[-1].get("peers", {}).get("grid_sample backward")):
        fill = card.graphed(lambda: torch.zeros_like(texture.data))
        ratio = max(peer - fill, 0.0) / max(ours - fill, 1e-6)
        card.rows[-1] |= {"zero_fill_ms": fill, "target_ratio": faster, "ratio": ratio, "kept": ratio >= faster}
        card.save()
    torch.use_deterministic_algorithms(True)
    try:
        card.row(f"{name}, deterministic", backward)
    finally:
        torch.use_deterministic_algorithms(False)


def selection(card: Card) -> None:
    n = card.size(1024)
    image, scores = card.rand(1, 3, n, n), card.rand(1, card.size(65536))
    card.row(
        "top 273 of 65,536",
        lambda: texvlm.topk(scores, 273),
        against={"torch.topk": lambda: torch.topk(scores, min(273, scores.shape[1]))},
    )
    card.row("select 273 cells of 1024^2 x 3", lambda: texvlm.select(image))
    card.row("13 channels of 1024^2", lambda: texvlm.build_channels(image, channels="minimal"))
    mask = card.rand(1, n, n) > 0.99
    card.row(
        "exact distance transform 1024^2",
        lambda: texvlm.distance_transform(mask),
        against={"jump flooding": lambda: texvlm.distance_transform(mask, method="jfa")},
    )
    if (cupy := optional("cupy")) and (edt := optional("cucim.core.operations.morphology")):
        array = cupy.from_dlpack((~mask[0]).to(torch.uint8))
        card.ask("distance transform 1024^2 by cuCIM, ms", lambda: card.time(lambda: edt.distance_transform_edt(array)))


def rounding(card: Card) -> None:
    """How texture hardware rounds weights and levels: to how many bits, and to the nearest or down."""

    def bits(values: torch.Tensor) -> float:
        return round(math.log2(max(1, values.unique().numel() - 1)), 2)

    def direction(values: torch.Tensor) -> str:
        scale = 2 ** round(bits(values))
        for name, add in (("nearest", 0.5), ("down", 0.0)):
            if ((steps * scale + add).floor() / scale - values).abs().le(0.25 / scale).double().mean() > 0.99:
                return name
        return "neither to the nearest nor down"

    steps = torch.linspace(0, 1, 1 << 14, device=card.device)
    ramp = texvlm.Texture(torch.tensor([[[0.0, 1.0]]], device=card.device), levels=1)
    across = torch.stack([0.25 + 0.5 * steps, torch.full_like(steps, 0.5)], -1)[None]
    flat = texvlm.generate_mipmaps(torch.zeros(1, 1, 4, 4, device=card.device))
    flat.level(1).fill_(1.0)
    middle = torch.full((1, len(steps), 2), 0.5, device=card.device)
    sampled: dict[str, Call] = {
        "a weight": lambda: texvlm.sample_lod_hardware(ramp, across, torch.zeros_like(steps)[None], filter="bilinear").flatten(),
        "the LOD": lambda: texvlm.sample_lod_hardware(flat, middle, steps[None], filter="trilinear").flatten(),
    }
    for what, call in sampled.items():
        card.ask(f"fractional bits of {what}", lambda call=call: bits(call()))
        card.ask(f"rounding of {what}", lambda call=call: direction(call()))


def texture_hardware(card: Card) -> None:
    """Hardware or own sampling: fills, fetches, formats, and from how much reuse on hardware wins."""
    n = card.size(1024)
    uv, lod = card.rand(1, card.size(65536), 2), card.rand(1, card.size(65536)) * 4
    for channels, dtype in ((4, torch.float32), (4, torch.float16), (40, torch.float32), (40, torch.float16)):
        data = texvlm.generate_mipmaps(card.rand(1, channels, n, n)).to(dtype)
        name = f"65,536 trilinear samples, C = {channels}, {str(dtype)[6:]}"
        own = card.row(f"{name}: own", lambda data=data: texvlm.sample_lod(data, uv, lod))
        fetch, fill = hardware(card, data, uv, lod, name)
        gain = own - fetch
        card.notes[f"{name}: fill ms"] = fill
        card.notes[f"{name}: hardware wins from this many calls per fill"] = math.ceil(fill / gain) if gain > 0 else "never"

    def creation() -> float:
        taken = []
        for i in range(2 if card.smoke else 10):
            data = texvlm.generate_mipmaps(card.rand(1, 4, n + 2 * i, n))
            synchronise(card.device)
            start = time.perf_counter()
            texvlm.sample_lod_hardware(data, uv, lod)
            synchronise(card.device)
            taken.append((time.perf_counter() - start) * 1e3)
        return sorted(taken)[len(taken) // 2]

    card.ask("first call with a new shape (array, surfaces, samplers, fill, fetch), ms", creation)


def hardware(card: Card, data: texvlm.Texture, uv: torch.Tensor, lod: torch.Tensor, name: str) -> tuple[float, float]:
    """Milliseconds of a fetch and of filling the array, apart: by a handle, since the op in a graph fills on every replay."""
    if card.device.type != "cuda":
        return card.row(f"{name}: hardware", lambda: texvlm.sample_lod_hardware(data, uv, lod)), 0.0
    handle = torch.classes.texvlm.HardwareTexture(data.data, data.height, data.width, list(data.reducer), data.levels)
    fetch = card.row(f"{name}: hardware", lambda: handle.sample_lod(uv, lod))
    card.row(f"{name}: hardware, the op", lambda: texvlm.sample_lod_hardware(data, uv, lod))
    return fetch, card.row(f"{name}: filling the array", lambda: handle.update(data.data))


def graphics(card: Card) -> None:
    """OpenGL's mipmaps: what the driver's filter is, what a call costs with and without interop."""
    status = card.ask("OpenGL", lambda: vars(texvlm.gl.status(card.device)))
    if not isinstance(status, dict) or status.get("reason"):
        return
    n = card.size(1024)
    for name, batch in (("one picture", 1), ("32 pictures", 2 if card.smoke else 32)):
        image = card.rand(batch, 4, n, n)
        card.ask(
            f"glGenerateMipmap, {name} 1024^2 x 4, upload and read-back included, ms",
            lambda image=image: card.time(lambda: texvlm.generate_mipmaps(image, backend="gl")),
        )
        card.ask(f"own mips, {name} 1024^2 x 4, ms", lambda image=image: card.time(lambda: texvlm.generate_mipmaps(image)))
    image = card.rand(1, 4, n, n)
    card.ask(
        "largest difference of OpenGL's mips from ours",
        lambda: (texvlm.generate_mipmaps(image, backend="gl").data - texvlm.generate_mipmaps(image).data).abs().max().item(),
    )


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def optional(name: str) -> Any:
    """A module, or None where it is not installed."""
    try:
        return importlib.import_module(name)
    except Exception:
        return None


def show(card: Card) -> str:
    """Prints what was measured; returns the answer line."""
    line = "{:56} {:>10} {:>10}  {:18} {}"
    print(line.format("what", "ms (graph)", "ms (call)", "target", "peers, ms"))
    for row in card.rows:
        target = (
            f"{row['target_ms']:.3f} ms" if "target_ms" in row else f"{row['target_ratio']:g}x" if "target_ratio" in row else ""
        )
        verdict = "" if not target else " kept" if row["kept"] else " MISSED"
        peers = ", ".join(f"{name} {ms:.4f}" for name, ms in row.get("peers", {}).items())
        print(line.format(row["name"], f"{row['ms']:.4f}", f"{row['call_ms']:.4f}", target + verdict, peers).rstrip())
    for question, answer in card.notes.items():
        print(f"{question}: {answer}")
    targets = [row for row in card.rows if "kept" in row]
    return f"{sum(row['kept'] for row in targets)} of {len(targets)} targets kept on {card.device}"


PARTS = (rounding, mipmaps, sampling, selection, texture_hardware, graphics)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--smoke", action="store_true", help="tiny pictures, few rounds: does it run?")
    parser.add_argument("--only", choices=[part.__name__ for part in PARTS], help="this part alone")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    card = Card(torch.device(args.device), args.smoke, args.json)
    if card.device.type == "cpu" and not args.smoke:
        print("no CUDA device: nothing measured (--smoke runs the same code on tiny pictures)")
        return 1
    failed = []
    for part in PARTS:
        if args.only not in (None, part.__name__):
            continue
        try:
            part(card)
        except Exception as error:  # a failing part does not stop the others
            failed.append(part.__name__)
            card.notes[f"{part.__name__} failed"] = f"{type(error).__name__}: {error}"
        card.save()
    answer = show(card)
    print(answer if not failed else f"{answer}; failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
