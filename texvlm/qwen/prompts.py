"""Conversations as token ids, one placeholder for each picture: by a model's own chat template, or by hashed words for tiny models."""

from __future__ import annotations

import zlib
from typing import Any, Protocol

from texvlm.qwen.families import family_of
from texvlm.qwen.tiny import END, IMAGE, START

_ANSWER = "ANSWER"


class Prompts(Protocol):
    """What turns of a conversation are as ids, and back."""

    def opening(self, question: str, pictures: int = 1) -> list[int]:
        """The first turn: pictures, the question, and what an answer follows."""

    def following(self, question: str, last: int) -> list[int]:
        """A later turn, after an answer whose last id is `last`."""

    def answer(self, text: str) -> list[int]:
        """An answer, and its end."""

    def text(self, ids: list[int]) -> str:
        """What ids say."""


class TemplatePrompts:
    """By the chat template of a processor or tokenizer; it gets no pictures, and says no more of one than that it is there.

    Args:
        processor: of transformers, with a chat template that knows pictures. One that thinks before it answers is asked not to.
        image: the id that stands for a picture.

    Raises:
        ValueError: no template, or one that does not put exactly one placeholder where a picture is.
    """

    def __init__(self, processor: Any, image: int) -> None:
        self.processor, self.image = processor, image
        self.tokenizer = getattr(processor, "tokenizer", processor)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _render(self, *turns: Any) -> str:
        messages = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(turns)]
        return str(
            self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)
        )

    def opening(self, question: str, pictures: int = 1) -> list[int]:
        """See `Prompts`."""
        ids = self._ids(self._render([{"type": "image"}] * pictures + [{"type": "text", "text": question}]))
        if ids.count(self.image) != pictures:
            raise ValueError(
                f"the chat template must have {pictures} x token {self.image} for pictures, got {ids.count(self.image)}"
            )
        return ids

    def following(self, question: str, last: int) -> list[int]:
        """See `Prompts`. What the template writes after an answer: its end, unless it was generated, and the next question."""
        asked = [{"type": "text", "text": question}]
        ids = self._ids(self._render(asked, [{"type": "text", "text": _ANSWER}], asked).rpartition(_ANSWER)[2])
        return ids[1:] if ids[0] == last else ids

    def answer(self, text: str) -> list[int]:
        """See `Prompts`."""
        return self._ids(text + (self.tokenizer.eos_token or ""))

    def text(self, ids: list[int]) -> str:
        """See `Prompts`."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


class TinyPrompts:
    """For tiny models, which have no tokenizer: a word is one of 47 ids by its hash, and ids are said as numbers.

    Example:
        >>> from texvlm.qwen.prompts import TinyPrompts
        >>> TinyPrompts().opening("Which colour?")
        [58, 60, 57, 5, 29]
    """

    words, eos = range(3, 50), 2

    def _ids(self, text: str) -> list[int]:
        return [self.words[zlib.crc32(word.lower().encode()) % len(self.words)] for word in text.split()]

    def opening(self, question: str, pictures: int = 1) -> list[int]:
        """See `Prompts`."""
        return [START, IMAGE, END] * pictures + self._ids(question)

    def following(self, question: str, last: int) -> list[int]:
        """See `Prompts`."""
        return ([] if last == self.eos else [self.eos]) + self._ids(question)

    def answer(self, text: str) -> list[int]:
        """See `Prompts`."""
        return [*self._ids(text), self.eos]

    def text(self, ids: list[int]) -> str:
        """See `Prompts`."""
        return " ".join(str(i) for i in ids)


def load(name: str, device: str = "cpu") -> tuple[Any, TemplatePrompts, tuple[int, int] | None]:
    """A model by its name or folder, what makes its prompts, and the least and the most pixels that its processor resizes to.

    Without torchvision transformers has no processor of videos, and so none of Qwen: its tokenizer, which has the template, is enough.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer
    from transformers.image_processing_base import ImageProcessingMixin

    family_of(AutoConfig.from_pretrained(name))  # before gigabytes of another model come
    try:
        processor = AutoProcessor.from_pretrained(name)
    except ImportError:
        processor = AutoTokenizer.from_pretrained(name)
    model: Any = AutoModelForImageTextToText.from_pretrained(name, dtype="auto")
    model = model.to(device).eval()
    resizing = ImageProcessingMixin.get_image_processor_dict(name)[0]
    size = resizing.get("size") or {}
    least, most = resizing.get("min_pixels") or size.get("shortest_edge"), resizing.get("max_pixels") or size.get("longest_edge")
    bounds = None if least is None or most is None else (int(least), int(most))
    return model, TemplatePrompts(processor, model.config.image_token_id), bounds
