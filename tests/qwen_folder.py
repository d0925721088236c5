"""A tiny model in a folder, with a tokenizer and a chat template like Qwen's: what is loaded by name, without the Hub."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from texvlm.qwen import tiny_model
from texvlm.qwen.tiny import END, IMAGE, START

WORDS = [
    "what",
    "which",
    "is",
    "colour",
    "here",
    "there",
    "red",
    "green",
    "blue",
    "yellow",
    "and",
    "user",
    "assistant",
    "system",
    "ANSWER",
]
WORDS += [f"word{i}" for i in range(64 - 3 - 3 - 1 - len(WORDS))]
SPECIAL = {
    "<|pad|>": 0,
    "<|im_start|>": 1,
    "<|im_end|>": 2,
    "<|vision_end|>": END,
    "<|vision_start|>": START,
    "<|image_pad|>": IMAGE,
}
PIXELS = {"shortest_edge": 1024, "longest_edge": 65536}
TEMPLATE = (
    "{% if messages[0].role != 'system' %}<|im_start|> system red <|im_end|>{% endif %}"
    "{% for message in messages %}<|im_start|> {{ message.role }} "
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %} <|im_end|> {% endfor %}{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Whole words; what it does not know is 63."""
    free = [i for i in range(64) if i not in SPECIAL.values()]
    vocabulary = {**SPECIAL, **dict(zip([*WORDS, "<|unknown|>"], free))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|im_end|>", pad_token="<|pad|>", unk_token="<|unknown|>")
    made.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    made.chat_template = TEMPLATE
    return made


def save(folder: Path, family: str = "qwen3_vl") -> Path:
    """The folder, with model and tokenizer."""
    tiny_model(family).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=PIXELS).save_pretrained(folder)
    return folder
