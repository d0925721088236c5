"""In vLLM, how long until the first token of an answer about a picture of 2048 pixels, with 273 chosen groups, and on all 4096?

vLLM's engine, offline, a request at a time, each with a picture that no cache knows; from the call to the answer's one token. Two
checkpoints of Qwen3-VL: a tiny one, where what is not the model shows, and one of the width of the 8B with random weights and BLOCKS of 27
blocks of the tower and LAYERS of 36 layers, whose tower and prefill are multiplied up for a sum at full depth. vLLM without the plugin runs
in a process of its own. All is on one core, whose seconds (CPU time) are given for the parts: those others use count in the wall time
alone. Where vLLM is not installed, this says so and measures nothing; `make test-vllm` makes an environment that has it.
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
from benchmarks.qwen import BLOCKS, DECODER, LAYERS, SECTIONS, TOWER, enlarged

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
    """Seconds of a core in functions of others, put around them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def around(self, owner: Any, name: str, part: str) -> None:
        """Counts what this method takes as this part."""
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds[part] = self.seconds.get(part, 0.0) + time.process_time() - start

        setattr(owner, name, timed)


def measure(folder: str, rounds: int, out: str, budgets: list[int | None]) -> None:
    """In a process of its own: seconds of each part, and of all cores together, a sample a round, of each budget; None: none is said."""
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
    llm.apply_model(lambda model: clock.around(model.visual, "forward", "tower"))
    picture, one = enlarged(SIDE).permute(1, 2, 0).numpy(), SamplingParams(max_tokens=1, temperature=0)
    found: dict[str, list[dict[str, float]]] = {str(k): [] for k in budgets}
    for turn in range(rounds):
        for k in budgets:
            fresh = picture.copy()
            fresh[0, 0] = turn  # no cache knows it
            asked: dict[str, Any] = {"prompt_token_ids": [1, START, IMAGE, END, 2], "multi_modal_data": {"image": fresh}}
            if k is not None:
                asked["mm_processor_kwargs"] = {"texvlm_keep": k}
            clock.seconds = {}
            start, cores = time.perf_counter(), time.process_time()
            answer = llm.generate(asked, one, use_tqdm=False)[0]
            whole, cores = time.perf_counter() - start, time.process_time() - cores
            parts = {**clock.seconds, "prefill": cores - sum(clock.seconds.values())}  # with what vLLM does around all of it
            found[str(k)].append({**parts, "first token": whole, "of a core": cores, "prompt": len(answer.prompt_token_ids)})
    Path(out).write_text(json.dumps(found))


def measured(folder: str, rounds: int, plugins: str, *budgets: int | None) -> list[dict[str, float]]:
    """Medians of all rounds but the first, which warms up."""
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    one = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    environment = {**os.environ, **quiet, **one, "VLLM_PLUGINS": plugins}
    out = f"{folder}/{plugins}.json"
    code = f"from benchmarks.serving import measure; measure({folder!r}, {rounds}, {out!r}, {list(budgets)})"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"vLLM ended with {done.returncode}: {done.stderr[-2000:]}")
    found = json.loads(Path(out).read_text())
    return [{part: median(r[part] for r in rows[1:]) for part in rows[0]} for rows in found.values()]


def show(name: str, times: dict[str, float]) -> None:
    parts = ", ".join(f"{part} {1e3 * times[part]:.0f}" for part in ("processor", "choice", "tower", "prefill") if part in times)
    whole, cores = 1e3 * times["first token"], 1e3 * times["of a core"]
    print(f"  {name:24} {times['prompt']:5.0f} tokens, first after {whole:8.0f} ms, {cores:8.0f} of a core: {parts}", flush=True)


def at_full_depth(times: dict[str, float]) -> float:
    return sum(times.get(part, 0.0) * DEPTH.get(part, 1.0) for part in ("processor", "choice", "tower", "prefill"))


def main() -> int:
    bench = Bench(__doc__)
    if importlib.util.find_spec("vllm") is None:
        return bench.finish("not measured: vllm is not installed, see make test-vllm")
    answers, chosen = [], f"{K} chosen groups"
    for name, widths, rounds in (("tiny", TINY, 7), ("wide", WIDE, 2)):
        if name == "wide" and bench.quick:
            continue
        with tempfile.TemporaryDirectory() as folder:
            checkpoint(folder, widths)
            found = {"all groups, vLLM alone": measured(folder, rounds, "none", None)[0]}
            if name == "tiny":
                found["all groups"], found[chosen] = measured(folder, rounds, "texvlm", None, K)
            else:
                found[chosen] = measured(folder, 5, "texvlm", K)[0]
        print(f"\n{name}, {SIDE} x {SIDE}, medians (wide, all groups: one round), milliseconds")
        for way, times in found.items():
            show(way, times)
        bench.figure(name, found)
        alone, ours = found["all groups, vLLM alone"], found[chosen]
        for what in ("first token", "of a core"):
            if name == "tiny":
                bench.gate(
                    f"tiny, {what}: without a budget, over vLLM alone", found["all groups"][what] / alone[what], at_most=1.1
                )
            bench.gate(
                f"{name}, {what}: vLLM alone over {chosen}", alone[what] / ours[what], at_least=1 if name == "tiny" else 10
            )
        ratio = alone["first token"] / ours["first token"]
        text = f"{name}: {1e3 * ours['first token']:.0f} ms against {1e3 * alone['first token']:.0f} ({ratio:.1f} x)"
        if name == "wide":
            full, dense = at_full_depth(ours), at_full_depth(alone)
            bench.figure("wide at full depth, seconds", {chosen: full, "all groups, vLLM alone": dense})
            text += f", at full depth {full:.0f} s against {dense:.0f} ({dense / full:.1f} x)"
        answers.append(text)
    return bench.finish(f"to the first token, {'; '.join(answers)}")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main())
