"""How long does `select` take on 1024 x 1024, and when do stages beat one fused pass that scores every cell?

Stage by stage against a copy of the bytes of each; the whole against one pass over every pixel of every cell, and against the plain
PyTorch reference that does so; what stages lose of what that keeps, on photographs and on small faint print amid coarse texture, beside a
random first stage as the control; `topk` against `torch.topk`; peak memory.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw

import texvlm
from benchmarks._documents import load_font
from benchmarks._harness import US, Bench, peak_memory
from benchmarks._photographs import photographs
from texvlm import reference
from texvlm.paths import SCHEDULES, SCORE_CHANNELS, SCORERS, CascadeConfig
from texvlm.stages import kept_cells

SIDE, CELL, K = 1024, 16, 273
MINIMAL_CHANNELS = 13
FLOAT, INDEX = 4, 8  # bytes
ONE_PASS = "one fused pass"
TERMS = list(SCORERS["salience"])


def textured(side: int) -> torch.Tensor:
    """A random picture [1, 3, side, side] with detail at all scales."""
    total = torch.zeros(1, 3, side, side)
    for octave in range(8):
        noise = torch.rand(1, 3, side >> octave, side >> octave)
        total += torch.nn.functional.interpolate(noise, (side, side), mode="bilinear") * 2.0 ** (octave - 8)
    return total / total.amax()


def faint_print(seed: int) -> torch.Tensor:
    """Lines of small print, barely darker than their smooth ground, amid coarse texture: what a coarse look misses."""
    g = torch.Generator().manual_seed(seed)
    image = Image.new("L", (SIDE, SIDE), 150)
    draw = ImageDraw.Draw(image)
    for i in range(12):
        x, y = (int(v) for v in torch.randint(0, SIDE - 200, (2,), generator=g))
        draw.text((x, y), f"item {i} serial {seed}{i}", fill=135, font=load_font("DejaVuSans.ttf", 11))
    plane = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(SIDE, SIDE).float() / 255
    rough = F.interpolate(torch.rand(1, 1, 64, 64, generator=g), (SIDE, SIDE), mode="bicubic")[0, 0]
    patches = F.interpolate((torch.rand(1, 1, 8, 8, generator=g) < 0.3).float(), (SIDE, SIDE))[0, 0]
    return torch.where((patches > 0) & (plane > 0.58), rough, plane).expand(1, 3, -1, -1).clamp(0, 1).contiguous()


def overlap(bench: Bench) -> None:
    """What stages keep of what one pass keeps, and a random first stage."""
    pictures = [
        (name, F.interpolate(image[None].float() / 255, (SIDE, SIDE), mode="bicubic").clamp(0, 1))
        for name, image in photographs()
    ]
    pictures += [(f"faint print {seed}", faint_print(seed)) for seed in range(4)]
    rows: dict[str, list[float]] = {}
    for name, image in pictures:
        texture = texvlm.build_channels(image, channels=SCORE_CHANNELS)
        wanted = set(texvlm.select(texture, K, CELL, CascadeConfig(schedule=1)).indices[0].tolist())
        for stages in (3, 5):
            kept = set(texvlm.select(texture, K, CELL, CascadeConfig(schedule=stages)).indices[0].tolist())
            rows.setdefault(f"{stages} stages", []).append(len(wanted & kept) / K)
        chance = set(torch.randperm(4096, generator=torch.Generator().manual_seed(len(name)))[:2000].tolist())
        rows.setdefault("2000 cells at random first", []).append(len(wanted & chance) / K)
        reference_kept = set(reference.select(image, K, CELL, schedule=1).indices[0].tolist()) if not bench.quick else wanted
        rows.setdefault("the reference, every pixel", []).append(len(wanted & reference_kept) / K)
    print(f"\nshare of the {K} cells of one pass that are kept too, on {len(pictures)} pictures: mean, least (and where)")
    for name, shares in rows.items():
        least = min(range(len(shares)), key=shares.__getitem__)
        print(f"  {name:28} {sum(shares) / len(shares):.3f}  {shares[least]:.3f} ({pictures[least][0]})")
    bench.figure("share of one pass", {name: dict(zip((n for n, _ in pictures), shares)) for name, shares in rows.items()})
    bench.gate("3 stages: share of one pass, the least", min(rows["3 stages"]), at_least=0.9)


def stages(bench: Bench, image: torch.Tensor, texture: texvlm.Texture) -> None:
    """Each stage by itself, in the order of the pipeline."""
    data, levels = texture.data, texture.levels
    table = list(reference.cascade.SCORE_CHANNELS)
    weights = torch.tensor(list(SCORERS["salience"].values()))
    shape = (SIDE, SIDE, list(texture.reducer), levels)
    texel = FLOAT * data.shape[2]
    level0 = texel * SIDE * SIDE
    calls = {US: lambda: torch.ops.texvlm.build_channels(image, table, 1, [], [])}
    bench.compare("channels (5 planes of level 0)", calls, moves=FLOAT * image.numel() + level0, fresh=True)
    calls = {US: lambda: torch.ops.texvlm.update_mipmaps(data, *shape)}
    bench.compare("pyramid (levels above 0)", calls, moves=texel * data.shape[1])

    total = (SIDE // CELL) ** 2
    cells = torch.arange(total)[None]
    for name, samples, kept in zip(("coarse", "middle", "fine"), (*(n for n, _ in SCHEDULES[3]), CELL), kept_cells(K, total)):

        def score(cells: torch.Tensor = cells, samples: int = samples) -> torch.Tensor:
            return texvlm.cell_features(texture, cells, TERMS, CELL, samples) @ weights

        count = cells.shape[1]
        moves = count * (samples * samples * texel + INDEX + FLOAT)
        bench.compare(f"{name} stage: {count} cells x {samples * samples} samples", {US: score}, moves=moves)
        scores = score()
        calls = {
            US: lambda s=scores, n=kept: torch.ops.texvlm.select_topk(s, n),
            "torch.topk": lambda s=scores, n=kept: torch.topk(s, n),
        }
        moves = count * FLOAT + kept * (FLOAT + INDEX)
        bench.compare(f"topk: {kept} of {count} (torch's order of ties is not defined)", calls, moves=moves)
        cells = cells.gather(1, texvlm.topk(scores, kept)[1]).sort(dim=1).values


def main() -> int:
    bench = Bench(__doc__)
    image = textured(SIDE)
    texture = texvlm.build_channels(image, channels=SCORE_CHANNELS)
    scores = torch.rand(1, 4096)
    with torch.no_grad():
        stages(bench, image, texture)
        calls = {US: lambda: texvlm.topk(scores, K), "torch.topk": lambda: torch.topk(scores, K)}
        times = bench.compare("topk: 273 of 4096 random scores", calls)
        bench.gate("topk against torch.topk, which keeps no order of ties", 1 / times.ratio("torch.topk"), at_most=2)
        many = torch.rand(32, 4096)
        calls = {
            US: lambda: torch.ops.texvlm.select_topk(many, K),
            "torch.topk": lambda: torch.topk(many, K),
        }
        times = bench.compare("topk: 273 of 4096, 32 rows", calls)
        bench.gate("32 rows: faster than torch.topk", times.ratio("torch.topk"), at_least=1)
        calls = {
            US: lambda: texvlm.select(texture, K, CELL),
            ONE_PASS: lambda: texvlm.select(texture, K, CELL, CascadeConfig(schedule=1)),
            "5 stages": lambda: texvlm.select(texture, K, CELL, "five_stage"),
        }
        cascade = bench.compare("select from a texture: 4096 cells", calls)
        bench.gate("3 stages: faster than one fused pass", cascade.ratio(ONE_PASS), at_least=1)
        samples = [4096 * 1, 2000 * 16, 500 * 256]
        print(
            f"  samples read: {sum(samples)} in stages ({sum(samples) / 4096:.1f} a cell), {4096 * 256} in one pass (256 a cell)"
        )
        for side in (256, 512, 768):
            few = texvlm.build_channels(textured(side), channels=SCORE_CHANNELS)
            n = (side // CELL) ** 2
            calls = {
                US: lambda t=few, k=n // 15: texvlm.select(t, k, CELL, CascadeConfig(schedule=3)),
                ONE_PASS: lambda t=few, k=n // 15: texvlm.select(t, k, CELL, CascadeConfig(schedule=1)),
            }
            bench.compare(f"3 stages or one: {n} cells", calls)
        overlap(bench)
        bench.gate("three stages, milliseconds", 1e3 * cascade.median(), at_most=1.5)

        data = texture.data
        levels_bytes = FLOAT * data.numel()
        level0_bytes = FLOAT * data.shape[2] * SIDE * SIDE
        moves = FLOAT * image.numel() + level0_bytes + levels_bytes
        calls = {
            US: lambda: texvlm.select(image, K, CELL),
            ONE_PASS: lambda: texvlm.select(image, K, CELL, CascadeConfig(schedule=1)),
            "reference": lambda: reference.select(image, K, CELL),
            "reference, every pixel": lambda: reference.select(image, K, CELL, schedule=1),
        }
        whole = bench.compare("select from a picture", calls, moves=moves, fresh=True)
        bench.gate("select: faster than the reference", whole.ratio("reference"), at_least=5)

        same = torch.equal(texvlm.select(image, K, CELL).indices, reference.select(image, K, CELL).indices)
        print(f"  the same {K} cells in the same order as the reference: {'yes' if same else 'no'}")
        bench.figure("same cells as the reference", same)
        peak = peak_memory(lambda: texvlm.select(image, K, CELL))
        minimal = MINIMAL_CHANNELS * FLOAT * data.shape[1]
        if peak is None:
            print("  peak memory: this system does not tell")
        else:
            print(f"  peak memory of select: {peak / 1e6:.1f} MB; 13 channels: {minimal / 1e6:.1f} MB")
            bench.figure("peak_bytes", peak)
            bench.gate("peak memory over the 13-channel texture", peak / minimal, at_most=1.5)
    return bench.finish(
        f"select takes {1e3 * whole.median():.2f} ms ({1e3 * cascade.median():.2f} of them in the stages), "
        f"{whole.ratio('reference'):.0f} times less than the reference and {whole.against_copy:.2f} times "
        "the copy of its bytes."
    )


if __name__ == "__main__":
    sys.exit(main())
