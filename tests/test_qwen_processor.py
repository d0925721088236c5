"""The adapter behind the real processors, with a chat template, built offline. They need torchvision; torch's CPU build has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from texvlm.qwen import QwenVLAdapter, tiny_model

try:
    import torchvision  # noqa: F401
except (ImportError, RuntimeError) as error:
    pytest.skip(f"torchvision is not there: {error}", allow_module_level=True)

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} "
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %} {{ part['text'] }} {% endif %}"
    "{% endfor %} {% endfor %}"
)
SPECIAL = {"<|vision_end|>": 57, "<|vision_start|>": 58, "<|video_pad|>": 59, "<|image_pad|>": 60}
WORDS = ["<pad>", "<bos>", "<eos>", "<unk>", "user", "assistant", "what", "is", "here", "and", "there"]


def real_processor(family: str, folder: Path) -> Any:
    """A family's own processor over a vocabulary of a few words."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: i for i, word in enumerate(WORDS)} | {f"word{i}": i for i in range(len(WORDS), 57)} | SPECIAL
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    fast.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    fast.image_token, fast.video_token = "<|image_pad|>", "<|video_pad|>"
    fast.vision_start_token, fast.vision_end_token = "<|vision_start|>", "<|vision_end|>"
    size = {"shortest_edge": 64 * 64, "longest_edge": 512 * 512}
    if family == "qwen3_vl":
        image = transformers.Qwen2VLImageProcessor(
            patch_size=16, merge_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3, size=size
        )
        return transformers.Qwen3VLProcessor(image, fast, transformers.Qwen3VLVideoProcessor(), chat_template=TEMPLATE)
    image = transformers.Qwen2VLImageProcessor(size=size)
    return transformers.Qwen2_5_VLProcessor(image, fast, transformers.Qwen2VLVideoProcessor(), chat_template=TEMPLATE)


@pytest.fixture(params=["qwen3_vl", "qwen2_5_vl"])
def there(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Any]:
    """A model with patches of the family's real size, and its processor."""
    vision = {"patch_size": 16} if request.param == "qwen3_vl" else {"patch_size": 14, "window_size": 56}
    return tiny_model(request.param, vision=vision), real_processor(request.param, tmp_path)


def pictures() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, 256, (height, width, 3), dtype=np.uint8) for height, width in ((150, 203), (96, 120))]


def chat(count: int) -> list[dict[str, Any]]:
    content = [{"type": "image"} for _ in range(count)] + [{"type": "text", "text": "what is here"}]
    return [{"role": "user", "content": content}]


def test_all_kept_is_dense(there: tuple[Any, Any]) -> None:
    model, processor = there
    texts = [processor.apply_chat_template(chat(n), tokenize=False) for n in (1, 1)]
    inputs = processor(text=texts, images=pictures(), padding=True, return_tensors="pt")
    batch = QwenVLAdapter(model, "uniform", k=None).prepare(inputs)
    mask = inputs["attention_mask"].bool()
    with torch.no_grad():
        difference = (model(**batch).logits - model(**inputs).logits)[mask].abs().max()
    assert difference <= 1e-6
    generated = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    assert torch.equal(QwenVLAdapter(model, "uniform", k=None).generate(batch, max_new_tokens=5, do_sample=False), generated)


def test_a_budget(there: tuple[Any, Any]) -> None:
    model, processor = there
    text = processor.apply_chat_template(chat(2), tokenize=False)
    inputs = processor(text=[text], images=pictures(), return_tensors="pt")
    adapter = QwenVLAdapter(model, "learned", k=5)
    batch = adapter.prepare(inputs)
    assert int((batch["input_ids"] == 60).sum()) == 10
    said, asked = (t.replace("<|image_pad|>", "").replace(" ", "") for t in (processor.batch_decode(batch["input_ids"])[0], text))
    assert said == asked
    assert adapter.generate(batch, max_new_tokens=3).shape[1] > batch["input_ids"].shape[1]


def test_pictures_need_no_processing(there: tuple[Any, Any]) -> None:
    """Straight from the file: the tokenizer alone, and rows that the processor would have made (torchvision rounds a resize otherwise)."""
    model, processor = there
    text = processor.apply_chat_template(chat(2), tokenize=False)
    adapter = QwenVLAdapter(model, "uniform", k=None, pixels=(64 * 64, 512 * 512))
    straight = adapter.prepare(processor.tokenizer([text], return_tensors="pt"), images=pictures())
    inputs = processor(text=[text], images=pictures(), return_tensors="pt")
    processed = adapter.prepare(inputs)
    assert torch.equal(straight["input_ids"], processed["input_ids"])
    assert torch.equal(straight["position_ids"], processed["position_ids"])
    step = 1 / 255 / 0.26
    assert (straight["pixel_values"] - processed["pixel_values"]).abs().max() <= 1.01 * step
