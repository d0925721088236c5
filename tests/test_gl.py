"""What mipmaps by the graphics driver mean: ours where sides are even, the driver's own where they are odd, and one clear line
where there is no OpenGL. Threads, forks, storage that stays, a context that is lost.

On Mesa's software driver in CI; on whatever driver there is elsewhere.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

import texvlm
from texvlm import _C, gl, reference

pytestmark = pytest.mark.gl

op = torch.ops.texvlm.generate_mipmaps_gl


def native(image: torch.Tensor, levels: int | None = None) -> torch.Tensor:
    return texvlm.generate_mipmaps(image, levels=levels, backend="native").data


def by_gl(image: torch.Tensor, levels: int | None = None) -> torch.Tensor:
    return texvlm.generate_mipmaps(image, levels=levels, backend="gl").data


def expected(image: torch.Tensor) -> torch.Tensor:
    """What the driver of this machine should make of any size."""
    filters = gl.status(image.device)
    assert filters.even_filter == "box"
    if filters.odd_filter == "bilinear":
        return reference.generate_mipmaps_gl(image, texvlm.level_count(*image.shape[2:]))
    assert filters.odd_filter == "box", "a filter that texvlm does not know: look at what status() measures"
    return native(image)


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in a process of its own."""
    root = str(Path(texvlm.__file__).resolve().parent.parent)
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
    env = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False, timeout=120)


# ---- what is computed ----


@pytest.mark.parametrize("channels", [1, 3, 4, 5, 40])
@pytest.mark.parametrize("size", [(64, 64), (512, 256), (2, 128)], ids=str)
def test_even_sizes_equal_ours(size: tuple[int, int], channels: int) -> None:
    image = torch.rand(3, channels, *size)
    actual, wanted = by_gl(image), native(image)
    assert actual.shape == wanted.shape
    torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(actual[:, : size[0] * size[1]], wanted[:, : size[0] * size[1]], rtol=0, atol=0)


def test_a_batch_is_one_array_and_one_call() -> None:
    image = torch.rand(32, 3, 64, 64)
    by_gl(image)
    before = gl.stats()
    together = by_gl(image)
    after = gl.stats()
    assert after["generated"] - before["generated"] == 1 and after["textures_made"] == before["textures_made"]
    torch.testing.assert_close(together, native(image), rtol=0, atol=1e-6)
    assert torch.equal(together[7], by_gl(image[7:8])[0])


@pytest.mark.parametrize("shape", [(2, 3, 64, 64), (1, 40, 64, 32), (3, 4, 16, 16)], ids=str)
def test_half_is_within_one_unit_in_the_last_place_per_level(shape: tuple[int, ...]) -> None:
    image = (torch.rand(*shape) * 4 - 2).half()
    texture = texvlm.generate_mipmaps(image, backend="gl")
    assert texture.data.dtype == torch.float16 and torch.equal(texture.level(0), image)
    for level in range(1, texture.levels):
        exact = reference.generate_mipmaps(texture.level(level - 1).float(), ["mean"], 2)[
            :, -texture.level(level)[0, 0].numel() :
        ]
        exact = exact.permute(0, 2, 1).reshape(texture.level(level).shape)
        unit = torch.finfo(torch.float16).eps * 2.0 ** exact.abs().clamp_min(2.0**-14).log2().floor()
        assert ((texture.level(level).float() - exact).abs() <= unit).all()


@examples(30)
@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([1, 3, 4, 6]), st.integers(1, 2))
def test_every_size_is_what_the_probed_filter_makes(height: int, width: int, channels: int, batch: int) -> None:
    image = torch.rand(batch, channels, height, width)
    coordinates = 2e-7 * max(height, width)  # the driver interpolates them in float32, and weights are their fractions
    torch.testing.assert_close(by_gl(image), expected(image), rtol=0, atol=1e-6 + coordinates)


def test_the_bilinear_filter_of_odd_sizes_is_known() -> None:
    """5 -> 2: a quarter and three quarters, the middle texel is lost; so the mean is not kept."""
    impulses = torch.eye(5)[None, :, None, :]  # one channel per texel
    weights = reference.generate_mipmaps_gl(impulses, 2)[0, 5:, :]
    assert torch.equal(weights, torch.tensor([[0.25, 0.75, 0, 0, 0], [0, 0, 0, 0.75, 0.25]]))
    if gl.status().odd_filter == "bilinear":
        torch.testing.assert_close(by_gl(impulses, 2)[0, 5:, :], weights, rtol=0, atol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_layers_are_independent(value: float) -> None:
    image = torch.rand(2, 9, 32, 32)
    clean = by_gl(image)
    image[1, 5, 3, 4] = value
    dirty = by_gl(image)
    assert not dirty[1, -1, 5].isfinite()
    dirty[1, :, 5] = clean[1, :, 5]
    assert torch.equal(dirty, clean)


def test_pictures_of_every_kind() -> None:
    image = torch.randint(0, 256, (32, 64, 3), dtype=torch.uint8)
    as_array = texvlm.generate_mipmaps(image.numpy(), backend="gl")
    as_tensor = texvlm.generate_mipmaps(image.permute(2, 0, 1), backend="gl", levels=3)
    assert as_array.levels == 7 and as_tensor.levels == 3 and as_tensor.reducer == ("mean",)
    assert torch.equal(as_array.data[:, : as_tensor.data.shape[1]], as_tensor.data)
    torch.testing.assert_close(as_array.data, native(image.permute(2, 0, 1)), rtol=0, atol=1e-6)
    half = gl.generate(image.permute(2, 0, 1), dtype=torch.float16)
    assert torch.equal(half.data, texvlm.generate_mipmaps(image.permute(2, 0, 1), backend="gl", dtype=torch.float16).data)
    torch.testing.assert_close(half.data.float(), as_array.data, rtol=0, atol=4e-3)


# ---- gradients ----


@pytest.mark.parametrize("shape", [(2, 3, 16, 64), (1, 4, 1, 32)], ids=str)
def test_gradients_of_even_sizes_are_ours(shape: tuple[int, ...]) -> None:
    a, b = torch.rand(*shape).requires_grad_(), torch.rand(*shape).requires_grad_()
    out = by_gl(a)
    weight = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, a, weight)
    (wanted,) = torch.autograd.grad(native(b), b, weight)  # the pyramid is linear: the place does not matter
    assert torch.equal(grad, wanted)
    assert texvlm.gl.status().differentiable(*shape[2:])


def test_gradients_of_odd_sizes_are_refused_where_the_filter_is_not_ours() -> None:
    for height, width, levels in [(12, 16, None), (16, 6, None), (5, 8, 2)]:
        image = torch.rand(1, 3, height, width, requires_grad=True)
        if gl.status().differentiable(height, width, levels):
            by_gl(image, levels).sum().backward()
            continue
        with pytest.raises(RuntimeError, match=f"no gradient of a picture of {height} x {width}: the driver's filter for odd"):
            by_gl(image, levels)
        with torch.no_grad():
            assert by_gl(image, levels).isfinite().all()
    image = torch.rand(1, 3, 12, 16, requires_grad=True)
    by_gl(image, 3).sum().backward()  # 12, 6, 3: even as far as it goes
    assert torch.equal(image.grad, torch.full_like(image, 1 + 1 / 4 + 1 / 16))


def test_half_gradients_second_derivatives_and_opcheck() -> None:
    half = torch.rand(1, 3, 8, 8).half().requires_grad_()
    by_gl(half).float().sum().backward()
    assert half.grad.dtype == torch.float16
    image = torch.rand(1, 3, 8, 8, requires_grad=True)
    (first,) = torch.autograd.grad(by_gl(image).square().sum(), image, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), image)
    other = image.detach().requires_grad_()
    (a,) = torch.autograd.grad(native(other).square().sum(), other, create_graph=True)
    torch.testing.assert_close(second, torch.autograd.grad(a.square().sum(), other)[0], rtol=1e-5, atol=1e-5)
    torch.library.opcheck(op.default, (torch.rand(2, 3, 8, 4, requires_grad=True), 4))


def test_gradients_under_compile() -> None:
    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def f(image: torch.Tensor) -> torch.Tensor:
        return texvlm.generate_mipmaps(image, levels=3, backend="gl").data * 2

    for size in (8, 16):
        image = torch.rand(1, 3, size, size, requires_grad=True)
        f(image).sum().backward()
        assert torch.equal(image.grad, torch.full_like(image, 2 * (1 + 1 / 4 + 1 / 16)))


def test_transforms_raise() -> None:
    image = torch.rand(1, 3, 8, 8)
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda x: op(x, 4).sum())(image)
    with pytest.raises(RuntimeError):
        torch.func.jvp(lambda x: op(x, 4), (image,), (image,))


# ---- storage, threads, processes ----


def test_storage_stays() -> None:
    shapes = [(1, 3, 64, 64), (2, 3, 64, 64), (1, 5, 32, 64)]
    for shape in shapes:
        by_gl(torch.rand(*shape))
    before = gl.stats()
    for i in range(50):
        by_gl(torch.rand(*shapes[i % 3]))
    after = gl.stats()
    assert after.pop("generated") - before.pop("generated") == 50
    assert after == before


def test_storage_is_limited_and_the_oldest_goes_first() -> None:
    done = python(
        """if True:
        import torch, texvlm
        from texvlm import gl
        make = lambda n: texvlm.generate_mipmaps(torch.rand(1, 4, n, n), backend="gl")
        make(128), make(256), make(128), make(512)   # 512^2 and its levels take 5.6 MB of the 6, 256^2 1.4, 128^2 0.35
        s = gl.stats()
        assert (s["textures"], s["textures_made"] - s["textures"]) == (2, 3), s   # two of the probe, and 256^2
        assert s["texture_bytes"] <= 6 << 20
        make(1024)                                    # alone above the limit: it is there, alone
        assert gl.stats()["textures"] == 1
        make(64)
        assert gl.stats()["texture_bytes"] < 100_000
        """,
        TEXVLM_GL_CACHE_MB="6",
    )
    assert done.returncode == 0, done.stderr


def test_close_gives_everything_back() -> None:
    image = torch.rand(1, 3, 16, 16)
    wanted = by_gl(image)
    gl.close()
    assert gl.stats()["textures"] == 0 and gl.stats()["texture_bytes"] == 0
    gl.close()
    assert torch.equal(by_gl(image), wanted)


def test_several_threads_at_once() -> None:
    images = [torch.rand(1 + i % 2, 1 + i, 32 << (i % 2), 32) for i in range(8)]
    wanted = [native(image) for image in images]
    results: list[list[torch.Tensor]] = [[] for _ in images]

    def work(i: int) -> None:
        for turn in range(6):
            if i == 0 and turn == 3:
                gl.close()  # under the feet of the others
            results[i].append(by_gl(images[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(images))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for found, right in zip(results, wanted, strict=True):
        assert len(found) == 6
        for data in found:
            torch.testing.assert_close(data, right, rtol=0, atol=1e-6)


@pytest.mark.alone
def test_python_runs_on_while_the_driver_works() -> None:
    image = torch.rand(8, 40, 128, 128)
    by_gl(image)
    thread = threading.Thread(target=lambda: [by_gl(image) for _ in range(3)])
    ticks = 0
    thread.start()
    while thread.is_alive():
        ticks += 1
        time.sleep(0.001)
    assert ticks > 10  # one a call, if the lock of the interpreter were held


def test_autograd_threads() -> None:
    """A backward pass that runs the GL path in autograd's own thread."""

    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return by_gl(grad)[:, : grad.shape[2] * grad.shape[3]].permute(0, 2, 1).reshape(grad.shape)

    image = torch.rand(1, 3, 8, 8, requires_grad=True)
    Through.apply(image).sum().backward()
    assert torch.equal(image.grad, torch.ones_like(image))


class Pictures(torch.utils.data.Dataset):
    """Pyramids made in the workers of a DataLoader."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> torch.Tensor:
        return texvlm.generate_mipmaps(torch.full((3, 16, 16), float(i)), backend="gl").data[0]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_loader_workers_fork_and_spawn(method: str) -> None:
    image = torch.rand(1, 3, 32, 32)
    before = by_gl(image)  # the parent has a context and a thread
    loader = torch.utils.data.DataLoader(
        Pictures(), batch_size=None, num_workers=2, multiprocessing_context=multiprocessing.get_context(method), timeout=100
    )
    for i, data in enumerate(loader):
        assert (data == i).all()
    assert torch.equal(by_gl(image), before)


def test_fork_of_a_fork_and_while_other_threads_work() -> None:
    done = python(
        """if True:
        import os, sys, threading, torch, texvlm
        torch.set_num_threads(1)
        image = torch.rand(1, 3, 64, 64)
        wanted = texvlm.generate_mipmaps(image).data
        def right():
            return (texvlm.generate_mipmaps(image, backend="gl").data - wanted).abs().max() < 1e-6
        stop, wrong = threading.Event(), []
        def busy():
            while not stop.is_set():
                right() or wrong.append(1)
        threads = [threading.Thread(target=busy) for _ in range(2)]
        [t.start() for t in threads]
        assert right()
        for _ in range(3):
            child = os.fork()
            if child == 0:
                ok = right()
                grandchild = os.fork()
                if grandchild == 0:
                    os._exit(0 if right() else 1)
                ok = ok and os.waitpid(grandchild, 0)[1] == 0 and right()
                os._exit(0 if ok else 1)
            assert os.waitpid(child, 0)[1] == 0
            assert right()
        stop.set()
        [t.join() for t in threads]
        assert not wrong
        """
    )
    assert done.returncode == 0, done.stderr


def test_ends_in_silence() -> None:
    """At exit, of a child too, with the context in use a moment before."""
    done = python(
        """if True:
        import os, torch, texvlm
        torch.set_num_threads(1)
        use = lambda: texvlm.generate_mipmaps(torch.rand(1, 3, 128, 128), backend="gl")
        use()
        child = os.fork()
        use()
        if child:
            assert os.waitpid(child, 0)[1] == 0
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---- refusals ----


def test_too_large_is_said_in_one_line() -> None:
    status, pixel = gl.status(), torch.zeros(1, 1, 1, 1)
    cases = {
        (1, 3, status.max_size + 1, 8): f"at most {status.max_size} .GL_MAX_TEXTURE_SIZE.",
        (status.max_layers + 1, 4, 2, 2): f"at most {status.max_layers} layers .GL_MAX_ARRAY_TEXTURE_LAYERS.",
    }
    if "llvmpipe" in status.renderer:  # it has a limit of its own; elsewhere this would fill the memory of the card
        cases[1, 16, status.max_size, status.max_size] = "out of memory .21845 MB."
    for shape, message in cases.items():
        with pytest.raises(RuntimeError, match=message) as refusal:
            op(pixel.expand(*shape), 1 + (shape[2] > 8192 and shape[1] > 3) * 14)
        assert "\n" not in str(refusal.value)
    assert by_gl(torch.rand(1, 3, 8, 8)).isfinite().all()


def test_what_it_does_not_do() -> None:
    with pytest.raises(ValueError, match="reducer mean only, got 'max'"):
        texvlm.generate_mipmaps(torch.rand(3, 8, 8), "max", backend="gl")
    for dtype in (torch.float64, torch.bfloat16):
        with pytest.raises(ValueError, match=r"image must be float32, float16 or uint8 \(OpenGL has no textures"):
            texvlm.generate_mipmaps(torch.rand(3, 8, 8).to(dtype), backend="gl")
    for image in (torch.rand(1, 3, 8, 8), torch.rand(1, 3, 8, 8, requires_grad=True)):  # whose gradient is looked at before
        with pytest.raises(ValueError, match="levels must be from 1 to 4 for 8 x 8, got 4611686018427387904"):
            op(image, 2**62)


USE = """
import texvlm, torch
assert texvlm.generate_mipmaps(torch.rand(3, 8, 8)).levels == 4    # auto does without
status = texvlm.gl.status()
assert not status.available and status.vendor == "" and not status.differentiable(8, 8), status
for _ in range(2):
    try:
        texvlm.generate_mipmaps(torch.rand(3, 8, 8), backend="gl")
    except RuntimeError as error:
        assert str(error) == "texvlm: " + status.reason and "\\n" not in str(error), error
        print(error)
"""


def test_without_libegl(tmp_path: Path) -> None:
    (tmp_path / "libEGL.so.1").write_text("no library")
    done = python(USE, LD_LIBRARY_PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "no OpenGL here:" in done.stdout and "libEGL.so.1" in done.stdout and "apt install" in done.stdout


def test_without_a_driver() -> None:
    done = python(USE, __EGL_VENDOR_LIBRARY_FILENAMES="/nowhere.json")
    if "assert not status.available" in done.stderr:
        pytest.fail("this libEGL is no dispatcher, so its driver cannot be hidden")
    assert done.returncode == 0, done.stderr
    assert "no OpenGL here: EGL" in done.stdout


def test_nothing_is_loaded_before_it_is_needed() -> None:
    done = python(
        """if True:
        import texvlm, torch
        texvlm.generate_mipmaps(torch.rand(3, 8, 8))
        assert "libEGL" not in open("/proc/self/maps").read()
        """
    )
    assert done.returncode == 0, done.stderr


def test_a_lost_context_is_made_again_once() -> None:
    image = torch.rand(1, 3, 32, 32)
    wanted, before = by_gl(image), gl.stats()
    _C.gl_simulate_loss(1)
    assert torch.equal(by_gl(image), wanted)
    assert gl.stats()["contexts"] == before["contexts"] + 1
    _C.gl_simulate_loss(2)
    with pytest.raises(RuntimeError, match="context was lost"):
        by_gl(image)
    assert torch.equal(by_gl(image), wanted)
    assert gl.stats()["textures"] == 1


def test_status_and_profile() -> None:
    status = gl.status()
    assert status.available and status.reason is None
    assert status.vendor and status.renderer and status.version and status.platform in ("surfaceless", "device")
    assert status.max_size >= 16384 and status.max_layers >= 2048
    assert status.even_filter == "box" and status.odd_filter in ("box", "bilinear", "other")
    if not torch.cuda.is_available():
        assert gl.status("cuda").reason == "no OpenGL here: no device cuda"
    image = torch.rand(1, 3, 64, 64)
    with gl.profile() as steps:
        by_gl(image)
    assert set(steps) == {"upload", "generate", "read"} and all(seconds > 0 for seconds in steps.values())
    with gl.profile() as steps:
        pass
    assert all(seconds == 0 for seconds in steps.values())


# ---- a CUDA device: the texture is shared, nothing crosses the bus ----


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("shape", [(1, 3, 64, 64), (3, 4, 128, 32), (2, 40, 64, 64), (1, 1, 256, 256)], ids=str)
def test_cuda_even_sizes_equal_ours(cuda: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert gl.status(cuda).even_filter == "box"
    image = torch.rand(*shape, device=cuda).to(dtype)
    levels = texvlm.level_count(*shape[2:])
    for _ in range(3):
        actual = by_gl(image)
        assert actual.device.type == "cuda"
        unit = torch.finfo(torch.float16).eps * levels
        torch.testing.assert_close(actual, native(image), rtol=0, atol=1e-6 if dtype == torch.float32 else unit)


@pytest.mark.gpu
def test_cuda_odd_sizes_are_what_the_probed_filter_makes(cuda: torch.device) -> None:
    image = torch.rand(2, 3, 37, 50, device=cuda)
    if gl.status(cuda).odd_filter != "other":
        torch.testing.assert_close(by_gl(image).cpu(), expected(image).cpu(), rtol=0, atol=2.0**-7)


@pytest.mark.gpu
def test_cuda_registers_once_and_follows_streams(cuda: torch.device) -> None:
    image = torch.rand(4, 3, 256, 256, device=cuda)
    by_gl(image)
    before = gl.stats()
    streams = [torch.cuda.Stream() for _ in range(3)]
    for i in range(30):
        with torch.cuda.stream(streams[i % 3]):
            torch.cuda._sleep(200_000)
            fresh = torch.rand(4, 3, 256, 256, device=cuda)
            data = by_gl(fresh)
            assert (data - native(fresh)).abs().max() < 1e-6
    after = gl.stats()
    assert (after["registered"], after["textures_made"]) == (before["registered"], before["textures_made"])


@pytest.mark.gpu
def test_cuda_gradients(cuda: torch.device) -> None:
    image = torch.rand(1, 3, 64, 64, device=cuda, requires_grad=True)
    by_gl(image).sum().backward()
    twin = image.detach().requires_grad_()
    native(twin).sum().backward()
    torch.testing.assert_close(image.grad, twin.grad)


@pytest.mark.gpu
def test_cuda_graphs_are_refused(cuda: torch.device) -> None:
    image = torch.rand(1, 3, 64, 64, device=cuda)
    by_gl(image)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        by_gl(image)


@pytest.mark.gpu
def test_cuda_second_device(cuda: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("no second GPU")
    image = torch.rand(1, 3, 64, 64, device="cuda:1")
    torch.testing.assert_close(by_gl(image), native(image), rtol=0, atol=1e-6)
