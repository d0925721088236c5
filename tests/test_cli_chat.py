"""`texvlm chat`: with all kept it is the dense model, turn by turn; with a budget it says what it kept; what is wrong is one line."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

np = pytest.importorskip("numpy")
PIL = pytest.importorskip("PIL.Image", reason="Pillow is not installed")

import qwen_folder  # noqa: E402
from transformers import AutoProcessor  # noqa: E402
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil  # noqa: E402

from texvlm import cli  # noqa: E402
from texvlm.qwen import FAMILIES, tiny_families, tiny_model  # noqa: E402
from texvlm.qwen.prompts import TinyPrompts  # noqa: E402
from texvlm.qwen.tiny import IMAGE, VIDEO  # noqa: E402

SIZE = (64, 96)
GROUPS = 8 * 12


@pytest.fixture
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, (*SIZE, 3), dtype=np.uint8)


@pytest.fixture
def photo(pixels: np.ndarray, tmp_path: Path) -> Path:
    path = tmp_path / "photo.png"
    PIL.fromarray(pixels).save(path)
    return path


def said(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[list[str], list[str]]:
    """What a chat answered, and the lines of what it kept and took."""
    assert cli.main(["chat", *(str(a) for a in argv)]) == 0
    out, err = capsys.readouterr()
    return out.splitlines(), [line for line in err.splitlines() if line.startswith("[") and "token" in line]


def complaint(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """The one line that it refuses with."""
    assert cli.main(["chat", *(str(a) for a in argv)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    return err


def dense(family: str, image: np.ndarray, turns: list[str], count: int) -> list[list[int]]:
    """The answers of the model itself, which reads all of the conversation again for each."""
    model, prompts = tiny_model(family), TinyPrompts()
    processor = Qwen2VLImageProcessorPil(
        patch_size=4,
        merge_size=2,
        size={"shortest_edge": 64, "longest_edge": 2**20},
        image_mean=FAMILIES[family].mean,
        image_std=FAMILIES[family].std,
    )
    picture = processor(PIL.fromarray(image), return_tensors="pt")
    ids: list[int] = []
    answers = []
    for turn in turns:
        ids += prompts.following(turn, ids[-1]) if ids else prompts.opening(turn)
        whole = torch.tensor([[j for i in ids for j in [i] * (GROUPS if i == IMAGE else 1)]])
        whole = {
            "input_ids": whole,
            "attention_mask": torch.ones_like(whole),
            "mm_token_type_ids": (whole == IMAGE).int(),
            **picture,
        }
        out = model.generate(**whole, max_new_tokens=count, do_sample=False, suppress_tokens=[IMAGE, VIDEO])
        answers.append(out[0, whole["input_ids"].shape[1] :].tolist())
        ids += answers[-1]
    return answers


@pytest.mark.parametrize("family", [f for f in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5") if f in tiny_families()])
def test_all_kept_is_the_dense_conversation(
    family: str, pixels: np.ndarray, photo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = ["what is here", "and there", "why"]
    asked = [part for turn in turns for part in ("--ask", turn)]
    answers, figures = said(
        capsys, "--tiny", family, "--image", photo, "--budget", 4096, "--path", "uniform", "--max-new-tokens", 6, *asked
    )
    assert answers[0].startswith(f"a random {family}")
    assert [[int(i) for i in line.split()] for line in answers[1:]] == dense(family, pixels, turns, 6)
    assert len(figures) == 3 and figures[0].startswith(f"[{GROUPS} of {GROUPS} tokens of 1 picture, selection and packing ")
    assert all("prefill" in line and "tokens/s" in line for line in figures)
    assert "selection" not in figures[1]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (["--budget", "20"], 20),
        (["--budget", "20", "--path", "multiscale"], 20),
        (["--budget", "20", "--path", "random"], 20),
        (["--budget", "20", "--thumbnail", "segment"], 20),
        (["--budget", "20", "--query", "seven"], 20),
        (["--budget", "auto"], 48),
    ],
)
def test_a_budget_is_kept(options: list[str], kept: int, photo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, figures = said(capsys, "--tiny", "--image", photo, "--ask", "what", "--max-new-tokens", 2, *options)
    assert figures[0].startswith(f"[{kept} of {GROUPS} tokens")


def test_several_pictures(photo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, figures = said(
        capsys, "--tiny", "--image", photo, "--image", photo, "--ask", "what", "--budget", 20, "--max-new-tokens", 2
    )
    assert figures[0].startswith(f"[40 of {2 * GROUPS} tokens of 2 pictures")


def test_questions_come_from_standard_input_until_one_is_empty(
    photo: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ["--tiny", "--image", photo, "--budget", 20, "--max-new-tokens", 3]
    expected, _ = said(capsys, *common, "--ask", "what is here", "--ask", "and there")
    for text in ("what is here\nand there\n\nnot this\n", "what is here\nand there"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        assert said(capsys, *common)[0] == expected
    assert len(expected) == 3


def test_show_is_what_the_model_sees(pixels: np.ndarray, photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(
        capsys,
        "--tiny",
        "--image",
        photo,
        "--ask",
        "what",
        "--budget",
        10,
        "--max-new-tokens",
        1,
        "--show",
        tmp_path / "seen.png",
    )
    seen = np.asarray(PIL.open(tmp_path / "seen.png")).astype(int)
    assert seen.shape == (*SIZE, 3)
    same = (abs(seen - pixels) <= 1).all(2).reshape(8, 8, 12, 8).all((1, 3))
    assert same.sum() == 10


def test_a_model_by_its_folder(tmp_path: Path, photo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = qwen_folder.save(tmp_path / "model")
    answers, figures = said(
        capsys,
        "--model",
        folder,
        "--image",
        photo,
        "--budget",
        20,
        "--ask",
        "what is here",
        "--ask",
        "and",
        "--max-new-tokens",
        4,
    )
    known = {*qwen_folder.WORDS, "<|unknown|>"}
    assert len(answers) == 2 and all(word in known for line in answers for word in line.split())
    assert figures[0].startswith(f"[20 of {GROUPS} tokens")


class Stub:
    """A processor that writes down what it is asked, and can do nothing with pictures."""

    def __init__(self) -> None:
        self.tokenizer = qwen_folder.tokenizer()
        self.rendered: list[str] = []

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("the processor is not to be called")

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        self.rendered.append(self.tokenizer.apply_chat_template(messages, **options))
        return self.rendered[-1]


def test_the_processor_gets_no_picture(
    tmp_path: Path, photo: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, stub = qwen_folder.save(tmp_path / "model"), Stub()
    monkeypatch.setattr(AutoProcessor, "from_pretrained", lambda name: stub)
    pictures = ["--image", photo, "--image", photo]
    said(capsys, "--model", folder, *pictures, "--budget", 20, "--ask", "what", "--ask", "which", "--max-new-tokens", 4)
    first, second = stub.rendered
    assert first.count("<|image_pad|>") == 2 and "what" in first and "system" in first
    assert "<|image_pad|>" not in second and "which" in second


def test_refusals(tmp_path: Path, photo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask = ("--image", photo, "--ask", "what")
    assert "one of --model NAME and --tiny" in complaint(capsys, *ask)
    assert "one of --model NAME and --tiny" in complaint(capsys, "--tiny", "--model", "x", *ask)
    assert "no such file" in complaint(capsys, "--tiny", "--image", tmp_path / "absent.png", "--ask", "what")
    assert "family must be one of qwen2_vl" in complaint(capsys, "--tiny", "llama", *ask)
    assert "no such folder" in complaint(capsys, "--model", tmp_path / "absent", *ask)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "must be one of the families qwen2_vl" in complaint(capsys, "--model", tmp_path, *ask)
    assert "end in .png" in complaint(capsys, "--tiny", "--show", tmp_path / "out.jpg", *ask)
    assert "no such folder" in complaint(capsys, "--tiny", "--show", tmp_path / "absent" / "out.png", *ask)
    assert "--query is empty" in complaint(capsys, "--tiny", "--query", " ", *ask)
    assert "--device nonsense" in complaint(capsys, "--tiny", "--device", "nonsense", *ask)
    assert "use --ask" in complaint(capsys, "--tiny", "--image", "-")
    for option, value in (("--budget", "0"), ("--budget", "many"), ("--max-new-tokens", "0"), ("--path", "nowhere")):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["chat", "--tiny", "--image", str(photo), option, value])
        assert option in capsys.readouterr().err


def test_without_transformers_it_says_how_to_get_it(photo: Path) -> None:
    code = "import sys; sys.modules['transformers'] = None; from texvlm import cli; sys.exit(cli.main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "chat", "--tiny", "--image", photo], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert re.fullmatch(r"texvlm chat: texvlm\.qwen needs transformers >= 5\.9: pip install 'texvlm\[qwen\]'\n", done.stderr)
