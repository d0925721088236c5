"""A tiny random model as vLLM serves it, with its processor, in a folder; and what transformers says of the same prompt."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from test_qwen_processor import real_processor

from texvlm.qwen import QwenVLAdapter, tiny_model
from texvlm.qwen.tiny import END, IMAGE, START, VIDEO

USER, WORDS = 4, [6, 7, 8]
VISION = {"patch_size": 16, "hidden_size": 64, "num_heads": 2, "intermediate_size": 128, "out_hidden_size": 64}
TEXT: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
ROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True}
# Heads as wide as vLLM's kernels for CPUs take them.
DECODERS = {
    "qwen3_vl": {**TEXT, "head_dim": 32, "rope_parameters": {**ROPE, "mrope_section": [8, 4, 4]}},
    "qwen3_5": {
        **TEXT,
        "head_dim": 64,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "rope_parameters": {**ROPE, "mrope_section": [3, 3, 2], "partial_rotary_factor": 0.25},
    },
}
DECODERS["qwen3_vl_moe"] = {**DECODERS["qwen3_vl"], "norm_topk_prob": True}


def save(folder: Path, family: str = "qwen3_vl") -> Path:
    """The folder, with model and processor."""
    tiny_model(family, vision=VISION, text=DECODERS[family]).save_pretrained(folder)
    real_processor("qwen3_vl", folder).save_pretrained(folder)
    return folder


def picture(height: int = 256, width: int = 320, seed: int = 0) -> Image.Image:
    """Noise that is stronger on one side, so that places differ."""
    rng = np.random.default_rng(seed)
    noise = rng.integers(-128, 128, (height, width, 3)) * np.linspace(0.1, 1, width)[None, :, None]
    return Image.fromarray((128 + noise).astype(np.uint8))


def film(count: int = 4, height: int = 128, width: int = 160) -> tuple[np.ndarray, dict[str, Any]]:
    """Frames, and what vLLM wants to be told of them."""
    frames = np.stack([np.asarray(picture(height, width, seed)) for seed in range(count)])
    about = {"fps": 2.0, "total_num_frames": count, "duration": count / 2, "frames_indices": list(range(count))}
    return frames, {**about, "video_backend": "opencv", "do_sample_frames": False}


def prompt(images: int = 1, videos: int = 0) -> list[int]:
    """Ids with one placeholder for each picture."""
    return [USER, *[START, IMAGE, END] * images, *[START, VIDEO, END] * videos, *WORDS]


PICTURES = [picture(), picture(160, 192, 1), picture()]
"""The first and the last are one."""

STOCK: dict[str, tuple[Any, Any]] = {"no picture": ((), ()), "a picture": (PICTURES[:1], ()), "three pictures": (PICTURES, ())}
STOCK["a picture and a video"] = (PICTURES[:1], [film()])
"""What is asked of vLLM's own too: pictures, and videos."""


def engine(folder: Path, **options: Any) -> Any:
    import vllm

    options = {"dtype": "float32", "limit_mm_per_prompt": {"image": 3, "video": 1}, **options}
    return vllm.LLM(str(folder), max_model_len=512, max_num_seqs=4, enforce_eager=True, max_logprobs=64, **options)


def request(images: Any = (), videos: Any = (), **said: Any) -> dict[str, Any]:
    data = {name: list(items) for name, items in (("image", images), ("video", videos)) if items}
    asked = {"prompt_token_ids": prompt(len(images), len(videos)), "multi_modal_data": data}
    return asked | ({"mm_processor_kwargs": said} if said else {})


def answers(llm: Any, *requests: dict[str, Any]) -> list[tuple[list[int], torch.Tensor]]:
    """The prompt's ids, and the log-probabilities [steps, 64] of what is said next, of requests in one batch."""
    import vllm

    found = []
    for out in llm.generate(list(requests), vllm.SamplingParams(temperature=0, max_tokens=4, logprobs=64), use_tqdm=False):
        steps = [[step[i].logprob for i in range(64)] for step in out.outputs[0].logprobs]
        found.append((list(out.prompt_token_ids), torch.tensor(steps)))
    return found


def answer(llm: Any, images: Any = (), videos: Any = (), **said: Any) -> tuple[list[int], torch.Tensor]:
    return answers(llm, request(images, videos, **said))[0]


class Reference:
    """The same model in transformers, behind the adapter."""

    def __init__(self, folder: Path, family: str = "qwen3_vl") -> None:
        from transformers import AutoModelForImageTextToText

        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self.processor = real_processor("qwen3_vl", folder)

    @torch.no_grad()
    def __call__(
        self, images: list[Image.Image], k: Any, selector: Any = "learned", query: Any = None, embedding: Any = None
    ) -> tuple[list[int], torch.Tensor]:
        """The prompt's ids, and the log-probabilities [steps, vocabulary] of what is said next."""
        made = self.processor.image_processor(images, return_tensors="pt")
        counts = (made["image_grid_thw"].prod(1) // 4).tolist()
        ids = [USER, *(i for n in counts for i in [START, *[IMAGE] * n, END]), *WORDS]
        return self.of({"input_ids": torch.tensor([ids]), **made}, k, selector, query, embedding)

    @torch.no_grad()
    def of(self, inputs: Any, k: Any, selector: Any, query: Any = None, embedding: Any = None) -> tuple[list[int], torch.Tensor]:
        """Of a processor's output."""
        adapter = QwenVLAdapter(self.model, selector, k=None, embedding=embedding)
        batch = adapter.prepare(inputs, query=query, k=k)
        out = adapter.generate(batch, max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True)
        return batch["input_ids"][0].tolist(), torch.cat(out.logits).float().log_softmax(-1)


def run(*arguments: str, **environment: str) -> None:
    """This file as a program, in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, *arguments], env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]


def stock(folder: str, out: str) -> None:
    """What vLLM says without a plugin."""
    llm = engine(Path(folder))
    found: dict[str, Any] = {name: answer(llm, *asked) for name, asked in STOCK.items()}
    found["module"] = llm.apply_model(lambda model: type(model).__module__)
    torch.save(found, out)


def dummies(folder: str, out: str) -> None:
    """Whose model it is, and what it says of three pictures, with vLLM's dummy weights: of all, and with a budget where there is one."""
    llm = engine(Path(folder), load_format="dummy")
    module = llm.apply_model(lambda model: type(model).__module__)[0]
    budgets = [{"texvlm_keep": 80}, {"texvlm_keep": 9}] if module.startswith("texvlm") else [{}]
    torch.save([module, *(answer(llm, PICTURES, **said) for said in budgets)], out)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
