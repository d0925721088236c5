"""In vLLM, how long until the first token of an answer about a picture of 2048 pixels, with 273 chosen groups, and on all 4096?

vLLM's engine, offline, a request at a time, each with a picture that no cache knows; from the call to the answer's one token. Two
checkpoints of Qwen3-VL: a tiny one, where what is not the model shows, and one of the width of the 8B with random weights and BLOCKS of 27
blocks of the tower and LAYERS of 36 layers, whose tower and prefill are multiplied up for a sum at full depth. vLLM without the plugin runs
in a process of its own. Where vLLM is not installed, this says so and measures nothing; `make test-vllm` makes an environment that has it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks._harness import Bench
from benchmarks.qwen import BLOCKS, DECODER, LAYERS, SECTIONS, TOWER, Stopwatch, enlarged

K, SIDE = 273, 2048
DEPTH = {"tower": 27 / BLOCKS, "prefill": 36 / LAYERS}
TINY = (
    {"patch_size": 16, "hidden_size": 64, "num_heads": 2, "intermediate_size": 128, "out_hidden_size": 64},
    {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    | {"rope_parameters": {**SECTIONS, "mrope_section": [8, 4, 4]}},
)
WIDE = (TOWER, {**DECODER, "rope_parameters": SECTIONS})
START, IMAGE, END = 58, 60, 57


def checkpoint(folder: str, widths: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """A folder with all but weights, which vLLM makes up."""
    import transformers
    from tokenizers import Tokenizer, models

    from texvlm.qwen import tiny_model

    model = tiny_model("qwen3_vl", vision=widths[0], text=widths[1])
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    special = {"<|vision_end|>": END, "<|vision_start|>": START, "<|video_pad|>": 59, "<|image_pad|>": IMAGE}
    words = {f"word{i}": i for i in range(57)} | special
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="word0")))
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.image_token, tokenizer.video_token = "<|image_pad|>", "<|video_pad|>"
    tokenizer.vision_start_token, tokenizer.vision_end_token = "<|vision_start|>", "<|vision_end|>"
    size = {"shortest_edge": 65536, "longest_edge": SIDE * SIDE}
    pictures = transformers.Qwen2VLImageProcessor(
        patch_size=16, merge_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3, size=size
    )
    transformers.Qwen3VLProcessor(pictures, tokenizer, transformers.Qwen3VLVideoProcessor()).save_pretrained(folder)


class Clock:
    """Seconds in functions of others, put around them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def around(self, owner: Any, name: str, part: str) -> None:
        """Counts what this method takes as this part."""
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start

        setattr(owner, name, timed)


def measure(folder: str, rounds: str, out: str) -> None:
    """In a process of its own: seconds of each part, a sample a round, of all groups and, where the plugin is there, of K."""
    from vllm import LLM, SamplingParams
    from vllm.model_executor.models.qwen3_vl import Qwen3VLMultiModalProcessor

    clock = Clock()
    clock.around(Qwen3VLMultiModalProcessor, "_apply_hf_processor_main", "processor")
    if os.environ["VLLM_PLUGINS"] == "texvlm":
        from texvlm.vllm.choosing import Chooser

        clock.around(Chooser, "cut", "choice")
    options = {"max_model_len": 4400, "max_num_batched_tokens": 8192, "max_num_seqs": 1, "enforce_eager": True}
    options |= {"enable_prefix_caching": False, "mm_processor_cache_gb": 0, "limit_mm_per_prompt": {"image": 1, "video": 0}}
    llm = LLM(folder, load_format="dummy", dtype="float32", **options)
    watches: list[Stopwatch] = []
    llm.apply_model(lambda model: watches.append(Stopwatch(model.visual)))
    picture, one = enlarged(SIDE).permute(1, 2, 0).numpy(), SamplingParams(max_tokens=1, temperature=0)
    ways: dict[str, dict[str, Any]] = {"all groups": {}}
    if os.environ["VLLM_PLUGINS"] == "texvlm":
        ways[f"{K} chosen groups"] = {"mm_processor_kwargs": {"texvlm_keep": K}}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for turn in range(int(rounds)):
        for name, said in ways.items():
            fresh = picture.copy()
            fresh[0, 0] = turn  # no cache knows it
            asked = {"prompt_token_ids": [1, START, IMAGE, END, 2], "multi_modal_data": {"image": fresh}, **said}
            clock.seconds = {}
            watches[0].seconds = 0.0
            start = time.perf_counter()
            answer = llm.generate(asked, one, use_tqdm=False)[0]
            whole = time.perf_counter() - start
            parts = {**clock.seconds, "tower": watches[0].seconds}
            parts["prefill"] = whole - sum(parts.values())  # with what vLLM does around all of it
            found[name].append({**parts, "first token": whole, "prompt": len(answer.prompt_token_ids)})
    Path(out).write_text(json.dumps(found))


def measured(folder: str, rounds: int, plugins: str) -> dict[str, dict[str, float]]:
    """Medians of all rounds but the first, which warms up."""
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment = {**os.environ, **quiet, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": plugins}
    out = f"{folder}/{plugins}.json"
    code = f"from benchmarks.serving import measure; measure({folder!r}, '{rounds}', {out!r})"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"vLLM ended with {done.returncode}: {done.stderr[-2000:]}")
    found = json.loads(Path(out).read_text())
    return {name: {part: median(r[part] for r in rows[1:]) for part in rows[0]} for name, rows in found.items()}


def show(name: str, times: dict[str, float]) -> None:
    parts = ", ".join(f"{part} {1e3 * times[part]:.0f}" for part in ("processor", "choice", "tower", "prefill") if part in times)
    print(f"  {name:30} {times['prompt']:5.0f} tokens, first after {1e3 * times['first token']:8.0f} ms: {parts}", flush=True)


def at_full_depth(times: dict[str, float]) -> float:
    return sum(times.get(part, 0.0) * DEPTH.get(part, 1.0) for part in ("processor", "choice", "tower", "prefill"))


def main() -> int:
    bench = Bench(__doc__)
    if importlib.util.find_spec("vllm") is None:
        return bench.finish("not measured: vllm is not installed, see make test-vllm")
    answers = []
    for name, widths, rounds in (("tiny", TINY, 7), ("wide", WIDE, 4)):
        if name == "wide" and bench.quick:
            continue
        with tempfile.TemporaryDirectory() as folder:
            checkpoint(folder, widths)
            found = {
                "all groups, vLLM alone": measured(folder, rounds, "none")["all groups"],
                **measured(folder, rounds, "texvlm"),
            }
        print(f"\n{name}, {SIDE} x {SIDE}, medians of {rounds - 1} rounds, milliseconds")
        for way, times in found.items():
            show(way, times)
        bench.figure(name, found)
        alone, ours = found["all groups, vLLM alone"], found[f"{K} chosen groups"]
        ratio = alone["first token"] / ours["first token"]
        bench.gate(
            f"{name}: without a budget, over vLLM alone", found["all groups"]["first token"] / alone["first token"], at_most=1.1
        )
        bench.gate(f"{name}: the first token, vLLM alone over {K} chosen groups", ratio, at_least=1.0 if name == "tiny" else 10.0)
        text = f"{name}: {1e3 * ours['first token']:.0f} ms against {1e3 * alone['first token']:.0f} ({ratio:.1f} x)"
        if name == "wide":
            full, dense = at_full_depth(ours), at_full_depth(alone)
            bench.figure("wide at full depth, seconds", {f"{K} chosen groups": full, "all groups, vLLM alone": dense})
            text += f", at full depth {full:.0f} s against {dense:.0f} ({dense / full:.1f} x)"
        answers.append(text)
    return bench.finish(f"to the first token, {'; '.join(answers)}")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main())
