"""texvlm.vllm in the real vLLM, offline, on tiny random models: stock without a budget, the adapter with one; and its server."""

from __future__ import annotations

import base64
import io
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

# In one process, so that an engine ends with its test; quietly, and without a word to anybody.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
pytest.importorskip("vllm", reason="vllm is not installed: make test-vllm brings it into an environment of its own")

import served
import vllm
from served import PICTURES, answer, answers, engine, film, request

import texvlm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served.save(tmp_path_factory.mktemp("qwen3_vl"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> served.Reference:
    return served.Reference(folder)


@pytest.fixture(scope="module")
def llm(folder: Path) -> vllm.LLM:
    """With nothing said: the plugin is there because it is installed."""
    return engine(folder)


@pytest.fixture(scope="module")
def bounded(folder: Path) -> vllm.LLM:
    return engine(folder, mm_processor_kwargs={"texvlm_keep": 12, "texvlm_max": 30, "texvlm_embedding": "digits"})


def assert_same(ours: tuple[list[int], torch.Tensor], theirs: tuple[list[int], torch.Tensor], within: float = 1e-4) -> None:
    assert ours[0] == theirs[0]
    assert ours[1].shape == theirs[1].shape
    assert (ours[1] - theirs[1]).abs().max() <= within
    assert torch.equal(ours[1].argmax(1), theirs[1].argmax(1))


@pytest.fixture(scope="module")
def stock(folder: Path) -> dict[str, tuple[list[int], torch.Tensor]]:
    """What vLLM's own says, in a process that is told to load no plugin."""
    out = folder / "stock.pt"
    served.run("stock", str(folder), str(out), VLLM_PLUGINS="none")
    found: dict[str, tuple[list[int], torch.Tensor]] = torch.load(out)
    return found


def assert_equal(ours: tuple[list[int], torch.Tensor], theirs: tuple[list[int], torch.Tensor]) -> None:
    """To the last bit."""
    assert ours[0] == theirs[0]
    assert torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("asked", served.STOCK)
def test_without_a_budget_it_is_stock(llm: vllm.LLM, stock: dict[str, Any], asked: str) -> None:
    assert llm.apply_model(lambda model: type(model).__module__) == ["texvlm.vllm.models"]
    assert stock["module"] == ["vllm.model_executor.models.qwen3_vl"]
    assert_equal(answer(llm, *served.STOCK[asked]), stock[asked])


@pytest.mark.parametrize("said", [{"texvlm_keep": 80}, {"texvlm_keep": 10**6}, {"texvlm_keep": None}])
def test_all_kept_is_stock(llm: vllm.LLM, stock: dict[str, Any], said: dict[str, Any]) -> None:
    assert_equal(answer(llm, PICTURES, **said), stock["three pictures"])


@pytest.mark.parametrize("path", ["learned", "salience", "uniform"])
@pytest.mark.parametrize("k", [1, 10, 33, "auto"])
def test_a_budget_is_the_adapters(llm: vllm.LLM, reference: served.Reference, path: str, k: Any) -> None:
    assert_same(answer(llm, PICTURES[:1], texvlm_keep=k, texvlm_path=path), reference(PICTURES[:1], k, path))


def test_several_pictures_with_a_budget_each_are_the_adapters(llm: vllm.LLM, reference: served.Reference) -> None:
    """The first and the last are one picture, with two budgets."""
    assert_same(answer(llm, PICTURES, texvlm_keep=[20, 7, 9]), reference(PICTURES, [20, 7, 9]))
    assert_same(answer(llm, PICTURES, texvlm_keep=[None, 7, 9]), reference(PICTURES, [80, 7, 9]))


def test_a_batch_of_several_budgets_is_each_alone(llm: vllm.LLM) -> None:
    asked = [request(PICTURES[:1], texvlm_keep=k) for k in (5, 21)]
    asked += [request(PICTURES[:2]), request(PICTURES[1:], texvlm_keep=16), request()]
    for together, one in zip(answers(llm, *asked), asked):
        assert_same(together, answers(llm, one)[0], within=1e-5)


def test_the_cache_knows_budgets_paths_and_places_apart(llm: vllm.LLM, reference: served.Reference) -> None:
    said: list[dict[str, Any]] = [{"texvlm_keep": 24}, {"texvlm_keep": 12}, {"texvlm_keep": 12, "texvlm_path": "uniform"}]
    said += [{"texvlm_keep": [24]}, {"texvlm_keep": [12]}, {}]
    for _ in range(2):  # the second time, all are there
        for each in said:
            k = each.get("texvlm_keep")
            expected = reference(PICTURES[:1], k, each.get("texvlm_path", "learned"))
            assert_same(answer(llm, PICTURES[:1], **each), expected)
    both = answer(llm, [PICTURES[0], PICTURES[2]], texvlm_keep=[24, 6])  # the first is there, the same with another budget is not
    assert_same(both, reference([PICTURES[0], PICTURES[2]], [24, 6]))


def test_a_video_keeps_as_many_of_each_frame(llm: vllm.LLM, reference: served.Reference) -> None:
    frames, about = film()
    whole, _ = answer(llm, PICTURES[:1], [(frames, about)])
    processor = reference.processor
    made = dict(processor.image_processor(PICTURES[:1], return_tensors="pt"))
    made |= processor.video_processor([torch.from_numpy(frames).permute(0, 3, 1, 2)], do_sample_frames=False, return_tensors="pt")
    made["input_ids"] = torch.tensor([whole])
    names = ("input_ids", "pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
    expected = reference.of({name: made[name] for name in names}, 6, "learned")
    ours = answer(llm, PICTURES[:1], [(frames, about)], texvlm_keep=6)
    assert len(ours[0]) == len(whole) - (80 - 6) - 2 * (42 - 6)  # frames of 128 x 160, enlarged by the processor
    assert_same(ours, expected)
    with pytest.raises(ValueError, match="texvlm_keep and texvlm_query must be one for all where there are videos"):
        answer(llm, PICTURES[:1], [(frames, about)], texvlm_keep=[6])


def test_a_server_says_what_counts_and_the_most(bounded: vllm.LLM, reference: served.Reference) -> None:
    for said, k in (({}, 12), ({"texvlm_keep": 20}, 20), ({"texvlm_keep": 100}, 30), ({"texvlm_keep": None}, 30)):
        assert_same(answer(bounded, PICTURES[:1], **said), reference(PICTURES[:1], k))
    assert_same(answer(bounded, PICTURES[:2], texvlm_keep=[60, 5]), reference(PICTURES[:2], [30, 5]))
    info = bounded.llm_engine.renderer.mm_processor.info
    assert info.get_mm_max_tokens_per_item(512, {"image": 1})["image"] == 30


def test_a_query_chooses(bounded: vllm.LLM, reference: served.Reference) -> None:
    embedding = texvlm.Embedding(texvlm.DigitsEmbedding())
    for query in ("seven", "three", embedding.query("seven").tolist()):
        ours = answer(bounded, PICTURES[:1], texvlm_path="query", texvlm_query=query)
        given = query if isinstance(query, str) else torch.tensor(query)
        assert_same(ours, reference(PICTURES[:1], 12, "query", given, embedding))
    ours = answer(bounded, PICTURES[:2], texvlm_path="query", texvlm_query=["seven", "three"])
    assert_same(ours, reference(PICTURES[:2], 12, "query", ["seven", "three"], embedding))


REFUSED = {
    "texvlm_keep must be a whole number of at least 1, 'auto' or None, got 0": {"texvlm_keep": 0},
    "mm_processor_kwargs must be of .*, got texvlm_kept": {"texvlm_kept": 5},
    "texvlm_max is for the server to say, got it in a request": {"texvlm_max": 5000},
    "texvlm_path must be one of .*, got 'multiscale'": {"texvlm_path": "multiscale"},
    "texvlm_path must be one of .*, got 'os:system'": {"texvlm_path": "os:system"},
    "query: this selector takes none": {"texvlm_path": "salience", "texvlm_query": "7"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_request_is_refused_by_name_and_the_next_is_served(bounded: vllm.LLM, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        answer(bounded, PICTURES[:1], **REFUSED[message])
    assert "\n" not in str(refused.value)
    assert len(answer(bounded, PICTURES[:1])[0]) == 12 + 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"video_pruning_rate": 0.5}, "video_pruning_rate cannot be used with texvlm_keep"),
        ({"mm_encoder_tp_mode": "data"}, "mm_encoder_tp_mode='data' cannot be used with texvlm_keep"),
        ({"mm_processor_kwargs": {"texvlm_keep": 9, "texvlm_path": "multiscale"}}, "texvlm_path must be one of"),
        ({"mm_processor_kwargs": {"texvlm_keep": 9, "texvlm_max": 3}}, "texvlm_max must be at least texvlm_keep, 9, got 3"),
    ],
)
def test_a_server_is_refused_by_name(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine(folder, **{"mm_processor_kwargs": {"texvlm_keep": 9}, **options})


def test_a_budget_is_refused_where_vllm_prunes_videos_itself(folder: Path) -> None:
    """And without one, its processor prunes as it does: all tokens in the first frame, which cutting would not understand."""
    pruned = engine(folder, video_pruning_rate=0.5)
    processor = pruned.llm_engine.renderer.mm_processor
    made = processor(served.prompt(0, 1), processor.info.parse_mm_data({"video": [film()]}))
    assert made["prompt_token_ids"].count(served.VIDEO) == 42
    with pytest.raises(ValueError, match="video_pruning_rate cannot be used with texvlm_keep"):
        answer(pruned, PICTURES[:1], texvlm_keep=9)


def test_mixtures_of_experts(tmp_path: Path) -> None:
    """In processes of their own: vLLM has groups of experts only where its first model has. The weights are vLLM's dummies."""
    folder, out = served.save(tmp_path, "qwen3_vl_moe"), tmp_path / "answers.pt"
    found = []
    for plugins in ("none", "texvlm"):
        served.run("dummies", str(folder), str(out), VLLM_PLUGINS=plugins)
        found.append(torch.load(out))
    (stock, theirs), (ours, all_kept, few) = found
    assert (stock, ours) == ("vllm.model_executor.models.qwen3_vl_moe", "texvlm.vllm.models")
    assert_equal(all_kept, theirs)
    assert len(few[0]) == len(theirs[0]) - (80 - 9) - (30 - 9) - (80 - 9)


def test_qwen3_5(tmp_path: Path) -> None:
    """On a CPU, vLLM's linear attention is in bfloat16 alone."""
    folder = served.save(tmp_path, "qwen3_5")
    reference = served.Reference(folder)
    llm = engine(folder, dtype="bfloat16")
    for k in (None, 33, 9):
        ours, theirs = answer(llm, PICTURES, texvlm_keep=k), reference(PICTURES, k)
        assert ours[0] == theirs[0]
        assert (ours[1][0] - theirs[1][0]).abs().max() < 0.15


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    """The address of vLLM's server, on the loopback, of this machine alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", "tiny"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "512", "--enforce-eager"]
    command += [
        "--max-num-seqs",
        "4",
        "--trust-request-mm-kwargs",
        "--mm-processor-kwargs",
        '{"texvlm_keep": 12, "texvlm_max": 30}',
    ]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_PLUGINS": "texvlm"}
    with (
        (folder / "server.log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True) as process,
    ):
        try:
            for _ in range(240):
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                    break
                except OSError:
                    assert process.poll() is None, (folder / "server.log").read_text()[-4000:]
                    time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # with the engine that it started


def chat(client: Any, images: list[Any], **said: Any) -> Any:
    """vLLM's server asked by OpenAI's client."""
    content: list[dict[str, Any]] = [{"type": "text", "text": "what is here"}]
    for image in images:
        file = io.BytesIO()
        image.save(file, "PNG")
        address = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        content.append({"type": "image_url", "image_url": {"url": address}})
    body = {"mm_processor_kwargs": said} if said else None
    messages = [{"role": "user", "content": content}]
    return client.chat.completions.create(model="tiny", messages=messages, max_tokens=3, temperature=0, extra_body=body)


def test_the_server_and_its_client(server: str) -> None:
    """By default, by request, and at once; what is refused is told in a line, and the server goes on."""
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=server, api_key="none", max_retries=0) as client:
        text = chat(client, PICTURES[:1]).usage.prompt_tokens - 12
        for said, kept in (
            ({"texvlm_keep": 20}, 20),
            ({"texvlm_keep": 100}, 30),
            ({"texvlm_keep": 5, "texvlm_path": "uniform"}, 5),
        ):
            assert chat(client, PICTURES[:1], **said).usage.prompt_tokens == text + kept
        with ThreadPoolExecutor(4) as pool:
            budgets = [3, 9, 3, 27, 12, 9]
            found = list(pool.map(lambda k: chat(client, PICTURES[:1], texvlm_keep=k), budgets))
        assert [answer.usage.prompt_tokens for answer in found] == [text + k for k in budgets]
        assert found[0].choices[0].message.content == found[2].choices[0].message.content
        with pytest.raises(
            openai.BadRequestError, match="texvlm_keep must be a whole number of at least 1, 'auto' or None, got -1"
        ):
            chat(client, PICTURES[:1], texvlm_keep=-1)
        with pytest.raises(openai.BadRequestError, match="texvlm_max is for the server to say"):
            chat(client, PICTURES[:1], texvlm_max=4000)
        assert chat(client, PICTURES[:1]).usage.prompt_tokens == text + 12
