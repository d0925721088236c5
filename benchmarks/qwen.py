"""What does a Qwen3-VL tower of real width cost when 273 groups are chosen before it, at 1024 and 2048 pixels, against its peers?

The peers are the same model on all groups (dense), on 273 that are cut after the tower, and on the picture that the processor itself
shrinks to as many groups. Weights are random: time, memory and operations do not depend on them; quality does, and is not measured here.
Width is that of Qwen3-VL-8B (tower 1152 x 4304, decoder 4096 x 12288); depth is reduced to BLOCKS of 27 and LAYERS of 36, and what is
selected and packed is held against these few, so at full depth it is a smaller part.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks._harness import Bench, peak_memory
from benchmarks._photographs import photographs
from texvlm.qwen import QwenVLAdapter, tiny_model

K, CELL = 273, 32
BLOCKS, LAYERS = 2, 1
TOWER = {
    "depth": BLOCKS,
    "hidden_size": 1152,
    "num_heads": 16,
    "intermediate_size": 4304,
    "patch_size": 16,
    "out_hidden_size": 4096,
}
TOWER |= {"num_position_embeddings": 2304, "deepstack_visual_indexes": [0]}
DECODER = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": LAYERS, "num_attention_heads": 32}
DECODER |= {"num_key_value_heads": 8, "head_dim": 128}
SECTIONS = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}


def operations(rows: int, groups: int, tokens: int) -> tuple[float, float]:
    """Floating point operations of the tower on so many rows, and of the prefill of so many tokens: products of matrices only."""
    h, f, out = TOWER["hidden_size"], TOWER["intermediate_size"], TOWER["out_hidden_size"]
    block = 2 * rows * (4 * h * h + 2 * h * f) + 4 * rows * rows * h
    mergers = 2 * 2 * groups * (4 * h * 4 * h + 4 * h * out)
    d, wide, heads, kv, size = (
        DECODER[n] for n in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    layer = 2 * tokens * (d * size * (2 * heads + 2 * kv) + 3 * d * wide) + 2 * tokens * tokens * heads * size
    return BLOCKS * block + mergers + 2 * rows * 3 * 2 * 256 * h, LAYERS * layer


class Stopwatch:
    """Seconds in the tower, by hooks."""

    def __init__(self, tower: Any) -> None:
        self.seconds = 0.0
        tower.register_forward_pre_hook(self._begin)
        tower.register_forward_hook(self._end)

    def _begin(self, *_: object) -> None:
        self.begun = time.perf_counter()

    def _end(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self.begun


def prompt(model: Any, groups: int) -> dict[str, torch.Tensor]:
    """Ids of a picture between a question's words."""
    config = model.config
    ids = [5, 6, 7, config.vision_start_token_id, *[config.image_token_id] * groups, config.vision_end_token_id, *range(8, 24)]
    tokens = torch.tensor([ids])
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "mm_token_type_ids": (tokens == config.image_token_id).int(),
    }


def enlarged(side: int) -> torch.Tensor:
    """A photograph, uint8 [3, side, side]."""
    _, photograph = next(photographs(("astronaut",)))
    return F.interpolate(photograph[None].float(), (side, side), mode="bicubic").round().clamp(0, 255).byte()[0]


def main() -> int:
    bench = Bench(__doc__)
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    model = tiny_model("qwen3_vl", vision=TOWER, text={**DECODER, "rope_parameters": SECTIONS})
    watch = Stopwatch(model.model.visual)
    processor = Qwen2VLImageProcessorPil(
        patch_size=16,
        merge_size=2,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        size={"shortest_edge": 65536, "longest_edge": 1 << 24},
    )
    before, after = QwenVLAdapter(model, "learned", K), QwenVLAdapter(model, "learned", K, "prune_post")
    answers = []
    for side, rounds in ((1024, 3), (2048, 1 if bench.quick else 2)):
        picture = enlarged(side)
        groups = (side // CELL) ** 2
        few = {"shortest_edge": 4 * CELL**2, "longest_edge": K * CELL**2}

        def processed(size: dict[str, int] | None = None, picture: torch.Tensor = picture) -> dict[str, torch.Tensor]:
            options = {} if size is None else {"size": size}
            made = processor(list(picture[None].numpy()), return_tensors="pt", **options)
            return {**prompt(model, int(made["image_grid_thw"].prod()) // 4), **made}

        ways = {
            "prune_pre, packed from the picture": lambda p=picture, g=groups: before.prepare(prompt(model, g), images=[p]),
            "prune_pre, from the processor's rows": lambda: before.prepare(processed()),
            "prune_post": lambda: after.prepare(processed()),
            "downscaled by the processor": lambda few=few: processed(few),
            "dense": processed,
        }
        rows: dict[str, dict[str, float]] = {}
        for name, way in ways.items():
            run = after if name == "prune_post" else (lambda batch: model(**batch))
            samples: dict[str, list[float]] = {"input": [], "tower": [], "prefill": []}
            peak = None
            with torch.no_grad():
                for turn in range(rounds + 1):  # the first warms up
                    start = time.perf_counter()
                    batch = way()
                    middle = time.perf_counter()
                    if turn == rounds and name != "dense":
                        peak = peak_memory(lambda run=run, batch=batch: run(batch))
                    begun = time.perf_counter()
                    run(batch)
                    end = time.perf_counter()
                    if turn:
                        samples["input"].append(middle - start)
                        samples["tower"].append(watch.seconds)
                        samples["prefill"].append(end - begun - watch.seconds)
                if name == "dense":
                    peak = peak_memory(lambda batch=batch: model(**batch)) if side == 1024 else None
            row = {part: statistics.median(values) for part, values in samples.items()}
            tokens = batch["input_ids"].shape[1]
            row["tokens"] = tokens
            row["tower TFLOP"], row["prefill TFLOP"] = (
                f / 1e12 for f in operations(len(batch["pixel_values"]), len(batch["pixel_values"]) // 4, tokens)
            )
            if peak is not None:
                row["peak MB"] = peak / 1e6
            rows[name] = row
        print(f"\n{side} x {side}, {groups} groups, {rounds} rounds; seconds (TFLOP)")
        for name, row in rows.items():
            memory = f"{row['peak MB']:8.0f} MB" if "peak MB" in row else ""
            print(
                f"  {name:38} {row['tokens']:5.0f} tokens   input {row['input']:7.3f}   "
                f"tower {row['tower']:8.3f} ({row['tower TFLOP']:.2f})   "
                f"prefill {row['prefill']:7.3f} ({row['prefill TFLOP']:.2f}) {memory}",
                flush=True,
            )
        bench.figure(f"{side}", rows)
        ours, dense = rows["prune_pre, packed from the picture"], rows["dense"]
        faster = dense["tower"] / ours["tower"]
        share = ours["input"] / (ours["tower"] + ours["prefill"])
        if side == 2048:
            bench.gate("2048: times less tower time than dense", faster, at_least=20)
        bench.gate(f"{side}: selection and packing over tower and prefill", share, at_most=0.10)
        whole = sum(dense[p] for p in ("input", "tower", "prefill")) / sum(ours[p] for p in ("input", "tower", "prefill"))
        answers.append(f"at {side}: tower {faster:.0f} x, all {whole:.1f} x less than dense")
    return bench.finish(f"with {K} groups, {BLOCKS} of 27 blocks and {LAYERS} of 36 layers, " + "; ".join(answers))


if __name__ == "__main__":
    sys.exit(main())
