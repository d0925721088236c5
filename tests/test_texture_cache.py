"""The arrays behind texture hardware: filled once per content, bounded, right on streams, in threads, forks and graphs.

On a GPU, or in builds that run CUDA kernels on the host; streams, graphs and a second device on a GPU only.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import pickle
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from test_hardware import arguments, emulates_cuda, noise

import texvlm
from texvlm import empty_texture_cache, texture_cache_stats

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    if not emulates_cuda():
        pytest.skip("no CUDA device")
    return torch.device("cpu")


@pytest.fixture(autouse=True)
def _empty() -> None:
    empty_texture_cache()


class Counted:
    """What the cache did since this object was made."""

    def __init__(self) -> None:
        self.before = texture_cache_stats()

    def __getattr__(self, name: str) -> int:
        return texture_cache_stats()[name] - self.before[name]


def sample(texture: texvlm.Texture, count: int = 5, lod: float = 0.5, **kwargs) -> torch.Tensor:
    uv = torch.linspace(0.1, 0.9, 2 * count * texture.data.shape[0], device=texture.data.device).reshape(-1, count, 2)
    return texture.sample(uv, lod, backend="texture", **kwargs)


def exact(texture: texvlm.Texture, **kwargs) -> torch.Tensor:
    """What `sample` shall be, up to the rounding of weights."""
    uv = torch.linspace(0.1, 0.9, 10 * texture.data.shape[0], device=texture.data.device).reshape(-1, 5, 2)
    return texture.sample(uv, 0.5, **kwargs)


def close(texture: texvlm.Texture) -> None:
    torch.testing.assert_close(
        sample(texture), exact(texture), rtol=0, atol=3 / 512 * texture.data.detach().abs().max().item() + 1e-6
    )


def test_statistics_are_there_without_a_gpu() -> None:
    names = {"arrays", "bytes", "limit", "held", "hits", "fills", "created", "evicted"}
    assert set(texture_cache_stats()) == names
    assert texture_cache_stats()["arrays"] == texture_cache_stats()["bytes"] == 0


def test_where_no_memory_is_left_what_is_kept_is_given_back(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, counted = noise(3, 20, 30).to(device), noise(3, 24, 30).to(device), Counted()
    close(first)
    if emulates_cuda():
        monkeypatch.setenv("TEXVLM_SHIM_ARRAYS", "1")
    close(second)
    assert counted.created == 2
    if emulates_cuda():
        assert texture_cache_stats()["arrays"] == 1
        monkeypatch.setenv("TEXVLM_SHIM_ARRAYS", "0")
        with pytest.raises(RuntimeError, match="cudaMallocMipmappedArray failed"):
            close(first)


def test_filled_once_until_the_texels_change(device: torch.device) -> None:
    texture, counted = noise(3, 20, 30).to(device), Counted()
    for _ in range(3):
        close(texture)
    assert (counted.created, counted.fills, counted.hits) == (1, 1, 2)
    sample(texture.replace(texture.data.detach()))  # another tensor, the same storage and version
    sample(texture, filter="bilinear", address="wrap")  # another sampler of the same array
    assert (counted.created, counted.fills) == (1, 1)
    texture.data.mul_(2)
    close(texture)
    texvlm.update_mipmaps(texture)
    close(texture)
    texture.level(0)[0, 0, 3, 4] = 7.0
    close(texture)
    assert (counted.created, counted.fills) == (1, 4)
    with torch.inference_mode():
        texture.data.mul_(0.5)  # a tensor with a version keeps counting
    close(texture)
    assert counted.fills == 5


def test_training_changes_the_texels_between_samples(device: torch.device) -> None:
    texture = noise(3, 16, 16).to(device)
    data = texture.data.requires_grad_()
    optimiser = torch.optim.SGD([data], lr=100.0)
    counted = Counted()
    for _ in range(3):
        optimiser.zero_grad()
        sample(texture).square().mean().backward()
        optimiser.step()
        close(texture)
    assert counted.created == 1 and counted.fills == 4


def test_inference_tensors_are_always_copied(device: torch.device) -> None:
    with torch.inference_mode():
        texture, counted = noise(3, 20, 30).to(device), Counted()
        close(texture)
        texture.data.mul_(3)
        close(texture)
        close(texture)
    assert (counted.created, counted.fills, counted.hits) == (1, 3, 0)


def test_two_textures_have_an_array_each_and_freed_ones_give_theirs_on(device: torch.device) -> None:
    counted = Counted()
    a, b = noise(3, 24, 24).to(device), noise(3, 24, 24).to(device)
    for _ in range(3):
        close(a)
        close(b)
    assert (counted.created, counted.fills) == (2, 2)
    before = texture_cache_stats()["bytes"]
    del a
    gc.collect()
    for _ in range(4):  # new memory, perhaps at the same address
        close(noise(3, 24, 24).to(device))
    assert counted.created == 2 and counted.fills == 6
    assert texture_cache_stats()["bytes"] == before
    close(b)
    assert counted.fills == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_bytes_are_those_of_the_texels(device: torch.device, dtype: torch.dtype) -> None:
    texture = noise(40, 20, 12, batch=3, dtype=dtype).to(device)
    sample(texture)
    size = 2 if dtype == torch.float16 else 4
    assert texture_cache_stats()["bytes"] == 3 * 40 * size * texture.data.shape[1]
    sample(noise(5, 20, 12, dtype=dtype).to(device))  # 5 channels are two layers of four
    assert texture_cache_stats()["bytes"] == (3 * 40 + 8) * size * texture.data.shape[1]
    empty_texture_cache()
    assert texture_cache_stats()["bytes"] == texture_cache_stats()["arrays"] == 0


def test_the_limit_holds(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEXVLM_TEXTURE_CACHE_MB", "1")
    textures = [noise(4, 100 + i, 120).to(device) for i in range(12)]  # 256 KB each
    counted = Counted()
    for texture in textures:
        close(texture)
        assert texture_cache_stats()["bytes"] <= texture_cache_stats()["limit"] == 1 << 20
    assert counted.created == 12 and counted.evicted == 12 - texture_cache_stats()["arrays"]
    close(textures[-1])
    assert counted.hits == 1
    close(textures[0])  # the one not used for longest is gone
    assert counted.created == 13
    large = noise(4, 512, 512).to(device)  # larger than the limit: works, alone
    close(large)
    assert texture_cache_stats()["arrays"] == 1
    other = noise(4, 512, 512).to(device)
    close(other)  # takes over the array instead of a second one
    close(large)
    assert texture_cache_stats()["arrays"] == 1


def test_layers_beyond_the_limit_are_refused(device: torch.device) -> None:
    texture = texvlm.Texture(torch.rand(1, 4 * 70000, 1, 1)).to(device)
    with pytest.raises(ValueError, match=r"data must be at most \d+ layers \(maxTexture2DLayered.* got 70000 layers"):
        sample(texture)
    with pytest.raises(ValueError, match=r"height and width must be at most \d+ x \d+ .* got 1 x 200000"):
        sample(texvlm.Texture(torch.rand(1, 1, 200000), levels=2).to(device))
    assert texture_cache_stats()["arrays"] == 0


def test_a_handle_of_ones_own(device: torch.device) -> None:
    texture = noise(10, 21, 34, batch=2, reducer=["mean"] * 9 + ["mode"]).to(device)
    uv, lod = torch.rand(2, 300, 2, device=device) * 1.2 - 0.1, torch.rand(2, 300, device=device) * 5
    counted = Counted()
    for layer_channels, layers in ((4, 6), (1, 20)):
        handle = torch.classes.texvlm.HardwareTexture(texture.data, *arguments(texture), layer_channels)
        assert (handle.layers(), handle.levels()) == (layers, texture.levels)
        assert handle.bytes() == texture.data.shape[1] * layers * layer_channels * 4
        for filter in ("nearest", "bilinear", "trilinear"):
            actual = handle.sample_lod(uv, lod, filter, "mirror")
            torch.testing.assert_close(actual, texvlm.sample_lod_hardware(texture, uv, lod, filter, "mirror"), rtol=0, atol=0)
        ddx, ddy = torch.full((2, 2, 300, 2), 0.05, device=device)
        torch.testing.assert_close(
            handle.sample_grad(uv, ddx, ddy, 4, "border"),
            texvlm.sample_grad_hardware(texture, uv, ddx, ddy, 4, "border"),
            rtol=0,
            atol=0,
        )
        before = handle.sample_lod(uv, lod)
        handle.update(texture.data * 2)
        torch.testing.assert_close(handle.sample_lod(uv, lod), before * 2, rtol=1e-6, atol=1e-6)
        with pytest.raises(ValueError, match="of the shape, dtype and device that the texture was made with"):
            handle.update(texture.data[:1])
        with pytest.raises(RuntimeError, match="a handle has no gradients"):
            handle.sample_lod(uv.clone().requires_grad_(), lod)
        with pytest.raises(RuntimeError, match="a handle has no gradients"):
            handle.update(texture.data.clone().requires_grad_())
        with pytest.raises(ValueError, match="lod must be"):
            handle.sample_lod(uv, lod[:, :3])
        with pytest.raises((RuntimeError, TypeError)):
            pickle.dumps(handle)
    assert counted.created == 1  # handles are not in the cache
    with pytest.raises(ValueError, match="layer_channels must be 4 or 1, got 2"):
        torch.classes.texvlm.HardwareTexture(texture.data, *arguments(texture), 2)
    with pytest.raises(ValueError, match="no float64"):
        torch.classes.texvlm.HardwareTexture(texture.data.double(), *arguments(texture))


def test_threads(device: torch.device) -> None:
    """Calls and backward passes from many threads, over few arrays."""

    def work(seed: int) -> bool:
        image = torch.rand(1, 3, 16 + seed % 3, 20, generator=torch.Generator().manual_seed(seed)).to(device)
        texture = texvlm.Texture(image.requires_grad_())
        for _ in range(5):
            out = sample(texture)
            out.sum().backward(retain_graph=True)
            if (out - exact(texture)).abs().max() > 3 / 512 + 1e-6:
                return False
        return bool(image.grad.abs().sum() > 0)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(24)))


def test_a_forked_child_leaves_the_arrays_alone(device: torch.device) -> None:
    if device.type == "cuda":
        return  # PyTorch itself refuses CUDA in a forked child
    texture = noise(3, 16, 18)
    wanted = sample(texture)
    handle = torch.classes.texvlm.HardwareTexture(texture.data, *arguments(texture))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()

    def child() -> None:
        nonlocal handle
        torch.set_num_threads(1)
        before = texture_cache_stats()
        same = torch.equal(sample(texture), wanted)
        del handle
        empty_texture_cache()
        queue.put((before["arrays"], before["created"], same))

    process = context.Process(target=child)
    process.start()
    assert queue.get(timeout=60) == (0, 0, True)
    process.join(60)
    assert process.exitcode == 0
    counted = Counted()
    assert torch.equal(sample(texture), wanted) and counted.hits == 1
    assert handle.layers() == 1


def test_a_process_ends_well(device: torch.device) -> None:
    """With arrays in the cache, and with a handle that outlives the interpreter's modules."""
    program = f"""
import torch, texvlm
texture = texvlm.generate_mipmaps(torch.rand(1, 3, 16, 16), backend="texture").to("{device}")
texture.sample(torch.rand(1, 4, 2, device="{device}"), 0.5)
texvlm.kept = torch.classes.texvlm.HardwareTexture(texture.data, 16, 16, ["mean"], texture.levels)
print(texvlm.texture_cache_stats()["arrays"])
"""
    here = Path(texvlm.__file__).parents[1]  # the same build, not the one of the working folder
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr.strip()) == (0, "1", "")


# ---- captured graphs ----


class HostCapture:
    """A capture as the host's CUDA runtime pretends it: launches run at once, but the stream says that it is capturing."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(str(Path(texvlm.__file__).with_name("lib") / "libtexvlm.so"))
        self.library.texvlm_shim_begin_capture.restype = ctypes.c_void_p
        self.library.texvlm_shim_destroy_graph.argtypes = [ctypes.c_void_p]
        self.graph = None

    def __enter__(self) -> HostCapture:
        self.graph = self.library.texvlm_shim_begin_capture()
        return self

    def __exit__(self, *error: object) -> None:
        self.library.texvlm_shim_end_capture()

    def destroy(self) -> None:
        self.library.texvlm_shim_destroy_graph(self.graph)


def test_arrays_and_captures_on_the_host(device: torch.device) -> None:
    """Nothing is created while a graph is captured, everything is copied, and the array is the graph's until it is destroyed."""
    if device.type == "cuda":
        return  # test_graphs
    texture, other = noise(6, 20, 12), noise(6, 20, 12)
    with HostCapture() as nothing, pytest.raises(RuntimeError, match="make the same call once before each capture"):
        sample(texture)
    nothing.destroy()
    sample(texture)
    counted = Counted()
    with HostCapture() as first:
        for t in (texture, texture, other):
            close(t)
        with pytest.raises(RuntimeError, match="make the same call once before each capture"):
            sample(texture, address="mirror")  # a sampler that does not exist yet
    assert (counted.fills, counted.hits, counted.created, counted.held) == (3, 0, 0, 1)
    close(texture)  # in an array of its own
    assert (counted.fills, counted.created) == (4, 1)
    with HostCapture() as second:
        close(texture)
    assert (counted.created, counted.held) == (1, 2)
    empty_texture_cache()
    assert texture_cache_stats()["arrays"] == texture_cache_stats()["held"] == 2
    with HostCapture() as third, pytest.raises(RuntimeError, match="make the same call once before each capture"):
        sample(texture)
    third.destroy()
    first.destroy()
    assert texture_cache_stats()["held"] == 1
    close(texture)
    assert (counted.created, counted.arrays) == (1, 1)
    second.destroy()
    empty_texture_cache()
    assert texture_cache_stats()["arrays"] == 0


def test_handles_and_captures_on_the_host(device: torch.device) -> None:
    if device.type == "cuda":
        return
    texture = noise(3, 8, 8)
    uv, lod = torch.rand(1, 5, 2), torch.rand(1, 5)
    handle = torch.classes.texvlm.HardwareTexture(texture.data, *arguments(texture))
    with HostCapture() as early, pytest.raises(RuntimeError, match="this sampler does not exist yet"):
        handle.sample_lod(uv, lod)
    early.destroy()
    wanted = handle.sample_lod(uv, lod)
    graphs = []
    for _ in range(2):  # two graphs may read one handle
        with HostCapture() as capture:
            handle.update(texture.data)
            assert torch.equal(handle.sample_lod(uv, lod), wanted)
        graphs.append(capture)
    del handle  # the array outlives it: the graphs would write into it
    for graph in graphs:
        graph.destroy()
    sample(texture)  # frees it


# ---- a GPU only ----


def test_streams(cuda: torch.device) -> None:
    """A texture is overwritten and sampled on two streams that wait for each other only where the user says so."""
    texture = noise(4, 512, 512).to(cuda)
    uv = torch.rand(1, 200_000, 2, device=cuda)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for turn in range(20):
        writer, reader = streams[turn % 2], streams[1 - turn % 2]
        with torch.cuda.stream(writer):
            texture.data.fill_(float(turn))
            out = texture.sample(uv, 0.3, backend="texture")
        reader.wait_stream(writer)
        with torch.cuda.stream(reader):
            again = texture.sample(uv, 0.3, backend="texture")
        writer.wait_stream(reader)
        torch.cuda.synchronize()
        assert (out == turn).all() and (again == turn).all()


def test_two_textures_fill_one_array_from_two_streams(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit leaves room for one array: each refill must wait for the reads of the other stream, which nobody else orders."""
    monkeypatch.setenv("TEXVLM_TEXTURE_CACHE_MB", "1")
    textures = [texvlm.Texture(torch.full((1, 4, 512, 512), float(i), device=cuda)) for i in range(2)]
    uv = torch.rand(1, 200_000, 2, device=cuda)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    outs = []
    for turn in range(40):
        with torch.cuda.stream(streams[turn % 2]):
            outs.append(textures[turn % 2].sample(uv, 0.0, backend="texture"))
    torch.cuda.synchronize()
    assert texture_cache_stats()["arrays"] == 1
    assert all((out == turn % 2).all() for turn, out in enumerate(outs))


def test_graphs(cuda: torch.device) -> None:
    """A graph fills its array in every replay, keeps it to itself, and gives it back when it is destroyed."""
    texture = noise(6, 64, 48).to(cuda)
    uv = torch.rand(1, 500, 2, device=cuda)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="make the same call once before each capture"), torch.cuda.graph(graph):
        texture.sample(uv, 0.4, backend="texture")
    torch.cuda.synchronize()
    texture.sample(uv, 0.4, backend="texture")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = texture.sample(uv, 0.4, backend="texture")
        second = texture.sample(uv, 1.4, backend="texture")
    assert texture_cache_stats()["held"] == 1
    for scale in (1.0, 2.0):
        texture.data.mul_(scale)
        texture.sample(uv, 0.4, backend="texture")  # eager, in an array of its own
        other = noise(6, 64, 48).to(cuda)
        other.sample(uv, 0.4, backend="texture")
        graph.replay()
        for out, lod in ((first, 0.4), (second, 1.4)):
            torch.testing.assert_close(out, texture.sample(uv, lod, backend="texture"), rtol=0, atol=0)
    empty_texture_cache()
    assert texture_cache_stats()["arrays"] == texture_cache_stats()["held"] == 1
    graph.replay()
    torch.testing.assert_close(first, texture.sample(uv, 0.4, backend="texture"), rtol=0, atol=0)
    torch.cuda.synchronize()
    del graph
    gc.collect()
    torch.cuda.synchronize()
    until = time.monotonic() + 10  # CUDA lets go in a thread of its own, which nothing waits for
    while texture_cache_stats()["held"] and time.monotonic() < until:
        time.sleep(0.01)
    assert texture_cache_stats()["held"] == 0
    texture.sample(uv, 0.4, backend="texture")


def test_graph_of_training(cuda: torch.device) -> None:
    texture = noise(4, 32, 32).to(cuda)
    data, uv = texture.data.requires_grad_(), torch.rand(1, 100, 2, device=cuda)

    def step() -> torch.Tensor:
        (grad,) = torch.autograd.grad(texture.sample(uv, 0.5, backend="texture").square().sum(), data)
        with torch.no_grad():
            data.sub_(0.01 * grad)
        return grad

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grad = step()
    before = data.detach().clone()
    graph.replay()
    graph.replay()
    assert (data - before).abs().max() > 0 and grad.isfinite().all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no second GPU")
def test_second_device() -> None:
    texture = noise(3, 24, 24)
    counted = Counted()
    results = [sample(texture.to(f"cuda:{i}")) for i in (0, 1, 0)]
    assert counted.created == 2
    for result in results[1:]:
        torch.testing.assert_close(result.cpu(), results[0].cpu())
