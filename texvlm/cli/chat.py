"""`chat`: questions about pictures to a Qwen with eyes that sees what a budget keeps of them, several turns on one cache."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from texvlm.cli import DEFAULT_PATH, Complaint, plural
from texvlm.cli.image import read_picture
from texvlm.cli.output import is_plain, writing
from texvlm.cli.select import query_text


class Clock:
    """A streamer of `generate`: when it began and when each token came, and what to do with the tokens."""

    def __init__(self, said: Any = None) -> None:
        self.times: list[float] = []
        self.said = said

    def put(self, value: Any) -> None:
        """The prompt, and then each token."""
        self.times.append(time.perf_counter())
        if self.said is not None:
            self.said.put(value)

    def end(self) -> None:
        """There are no more."""
        if self.said is not None:
            self.said.end()


def load(args: argparse.Namespace) -> tuple[Any, Any, tuple[int, int] | None]:
    """The model, what makes its prompts, and the pixels that its pictures may have."""
    if (args.model is None) == (args.tiny is None):
        raise Complaint("one of --model NAME and --tiny is needed")
    try:
        from texvlm.qwen import tiny_model
        from texvlm.qwen.prompts import TinyPrompts
        from texvlm.qwen.prompts import load as load_by_name
    except ImportError as error:
        raise Complaint(str(error)) from None
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise Complaint(f"--device {device}: {_line(error)}") from None
    if args.model is not None and Path(args.model).is_absolute() and not Path(args.model).is_dir():
        raise Complaint(f"no such folder: {args.model}")
    try:
        if args.tiny is not None:
            return tiny_model(args.tiny).to(device), TinyPrompts(), None
        return load_by_name(args.model, device)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise Complaint(_line(error)) from None


def _line(error: Exception) -> str:
    """The first line of what was said."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def questions(args: argparse.Namespace) -> Iterator[str]:
    """Those of --ask; without, lines of standard input, until it ends or one is empty."""
    if args.ask:
        yield from args.ask
        return
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if not line.strip():
            return
        yield line.strip()


def run(args: argparse.Namespace) -> int:
    """The command."""
    if "-" in args.image and not args.ask:
        raise Complaint("a picture on standard input leaves none for questions: use --ask")
    pictures = [read_picture(name, args.max_size) for name in args.image]
    if args.show is not None:
        _check_writable(args.show)
    query = query_text(args)
    model, prompts, pixels = load(args)
    from texvlm.qwen import QwenVLAdapter

    options: dict[str, Any] = {}
    if query is not None:
        import texvlm

        options["embedding"] = texvlm.Embedding(texvlm.DigitsEmbedding())
    try:
        selector = args.path or (DEFAULT_PATH if query is None else "query")
        adapter = QwenVLAdapter(model, selector, args.budget, thumbnail=args.thumbnail, pixels=pixels, **options)
    except (ValueError, TypeError) as error:
        raise Complaint(_line(error)) from None
    if args.tiny is not None:
        print(f"a random {args.tiny} without a tokenizer: words become ids by their hash, answers are ids and mean nothing")
    for picture in pictures:
        for remark in picture.remarks:
            print(f"{picture.name}: {remark}")
    talk(args, adapter, prompts, [picture.image for picture in pictures], query)
    return 0


def talk(args: argparse.Namespace, adapter: Any, prompts: Any, images: list[Any], query: Any) -> None:
    """Turn by turn; the pictures come with the first."""
    from transformers import DynamicCache, TextStreamer

    model, state = adapter.model, None
    cache = DynamicCache(config=model.config)
    for question in questions(args):
        start = time.perf_counter()
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                if state is None:
                    inputs = {"input_ids": torch.tensor([prompts.opening(question, len(images))])}
                    batch = adapter.prepare(inputs, images, query)
                else:
                    inputs = {"input_ids": torch.tensor([prompts.following(question, int(state["input_ids"][0, -1]))])}
                    batch = adapter.prepare(inputs, past=state)
        except ValueError as error:
            raise Complaint(_line(error)) from None
        for line in dict.fromkeys(str(w.message) for w in warned if "texvlm" in str(w.filename)):
            print(f"texvlm: {line}", file=sys.stderr)
        chosen = time.perf_counter() - start
        if state is None and args.show is not None:
            show(adapter.show(batch), args.show)
        batch = batch.to(model.device)
        tokenizer = getattr(prompts, "tokenizer", None)
        clock = Clock(None if tokenizer is None else TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))
        with torch.no_grad():
            sequences = adapter.generate(
                batch,
                past_key_values=cache,
                streamer=clock,
                max_new_tokens=args.max_new_tokens,
                do_sample=False,
                suppress_tokens=[model.config.image_token_id, model.config.video_token_id],  # an answer holds no pictures
            )
        asked = batch["input_ids"].shape[1]
        if tokenizer is None:
            print(prompts.text(sequences[0, asked:].tolist()))
        print(_figures(batch, adapter, state is None, chosen, clock), file=sys.stderr)
        state = adapter.state(batch, sequences)


def _figures(batch: Any, adapter: Any, first: bool, chosen: float, clock: Clock) -> str:
    """What a turn kept and took."""
    prompt, *came = clock.times
    parts = []
    if first:
        grids = batch["texvlm_grids"]
        total = int(grids[:, 2:].prod(1).sum()) // adapter.sizes.unit
        kept = int((batch["input_ids"] == adapter.model.config.image_token_id).sum())
        parts.append(f"{kept:,} of {plural(total, 'token')} of {plural(len(grids), 'picture')}")
        parts.append(f"selection and packing {1e3 * chosen:.0f} ms")
        parts.append(f"tower and prefill {1e3 * (came[0] - prompt):.0f} ms")
    else:
        parts.append(f"prefill {1e3 * (came[0] - prompt):.0f} ms")
    if len(came) > 1:
        parts.append(f"{(len(came) - 1) / (came[-1] - came[0]):.1f} tokens/s")
    return "[" + ", ".join(parts) + "]"


def _check_writable(path: str) -> None:
    if not path.lower().endswith(".png") and is_plain(Path(path)):
        raise Complaint(f"--show must end in .png, got {path}")
    if not Path(path).resolve().parent.is_dir():
        raise Complaint(f"no such folder: {Path(path).parent}")


def show(kept: list[Any], path: str) -> None:
    """Writes the kept pictures, one below the other."""
    from PIL import Image

    width = max(picture.shape[2] for picture in kept)
    padded = [torch.nn.functional.pad(picture, (0, width - picture.shape[2])) for picture in kept]
    with writing(path, "wb") as file:
        Image.fromarray(torch.cat(padded, dim=1).permute(1, 2, 0).numpy()).save(file, "PNG")
