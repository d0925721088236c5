"""texvlm inside PyTorch: export, autocast, autograd's corners, workers and forks.

What works is shown; what does not is refused in one line.
"""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import texvlm

ops = torch.ops.texvlm


def texture(channels: int = 3, dtype: torch.dtype = torch.float32) -> texvlm.Texture:
    return texvlm.Texture(torch.rand(2, channels, 24, 20), dtype=dtype)


class Sampler(torch.nn.Module):
    def forward(self, image: torch.Tensor, uv: torch.Tensor) -> torch.Tensor:
        return texvlm.Texture(image).sample(uv, 0.7)


def test_export() -> None:
    args = (torch.rand(1, 3, 24, 20), torch.rand(1, 9, 2))
    program = torch.export.export(Sampler(), args, strict=False)
    torch.testing.assert_close(program.module()(*args), Sampler()(*args))


def test_aot_inductor(tmp_path) -> None:
    args = (torch.rand(1, 3, 24, 20), torch.rand(1, 9, 2))
    program = torch.export.export(Sampler(), args, strict=False)
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "sampler.pt2"))
    torch.testing.assert_close(torch._inductor.aoti_load_package(package)(*args), Sampler()(*args))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_autocast_keeps_texels_and_promotes_coordinates(dtype: torch.dtype) -> None:
    source = texture(dtype=dtype)
    uv = torch.rand(2, 5, 2).bfloat16()
    arguments = (source.height, source.width, list(source.reducer), source.levels)
    wanted = ops.sample_lod(source.data, uv.float(), torch.full((2, 5), 0.5), *arguments)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = ops.sample_lod(source.data, uv, torch.full((2, 5), 0.5).bfloat16(), *arguments)
        patches = ops.extract_patches(source.data, uv, torch.full((2, 5), 0.5).bfloat16(), *arguments, 4)
        footprints = ops.sample_grad(source.data, uv, uv * 0.1, uv * 0.05, *arguments)
    assert actual.dtype == patches.dtype == footprints.dtype == dtype
    torch.testing.assert_close(actual, wanted, rtol=0, atol=0)


def test_gradients_accumulate_and_reach_leaves_in_half() -> None:
    image = torch.rand(1, 3, 16, 16, dtype=torch.float16, requires_grad=True)
    for _ in range(2):
        texvlm.Texture(image).level(1).float().sum().backward()
    torch.testing.assert_close(image.grad, torch.full_like(image, 0.5))


def test_gradient_of_expanded_and_strided_incoming_gradients() -> None:
    image = torch.rand(1, 2, 6, 5, dtype=torch.float64, requires_grad=True)
    data = texvlm.Texture(image).data
    (by_sum,) = torch.autograd.grad(data.sum(), image, retain_graph=True)
    (by_ones,) = torch.autograd.grad(data, image, torch.ones_like(data), retain_graph=True)
    (by_strides,) = torch.autograd.grad(data, image, torch.ones(1, 2, data.shape[1], dtype=torch.float64).transpose(1, 2))
    torch.testing.assert_close(by_sum, by_ones)
    torch.testing.assert_close(by_sum, by_strides)


class Pictures(Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return texvlm.Texture(torch.full((3, 300, 300), float(index))).level(-1)[0, :, 0, 0]


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_data_loader_workers(start: str) -> None:
    """After the parent has used its threads: forked workers must not wait for threads that the fork did not copy."""
    texvlm.Texture(torch.rand(3, 512, 512))
    loader = DataLoader(Pictures(), batch_size=2, num_workers=2, multiprocessing_context=start, timeout=60)
    assert torch.cat(list(loader))[:, 0].tolist() == [0, 1, 2, 3]


def test_fork_after_threads() -> None:
    """A plain fork keeps PyTorch's thread count but not its threads; with one thread, as DataLoader sets it, everything works."""
    texvlm.Texture(torch.rand(3, 512, 512))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()

    def child() -> None:
        torch.set_num_threads(1)
        queue.put(texvlm.Texture(torch.ones(3, 512, 512)).level(-1).mean().item())

    process = context.Process(target=child)
    process.start()
    assert queue.get(timeout=60) == 1.0
    process.join(60)
    assert process.exitcode == 0


def test_autograd_from_other_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    def one(seed: int) -> torch.Tensor:
        image = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        texvlm.Texture(image).data.square().sum().backward()
        return image.grad

    with ThreadPoolExecutor(4) as pool:
        for seed, grad in enumerate(pool.map(one, range(8))):
            torch.testing.assert_close(grad, one(seed))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no second GPU")
def test_second_gpu() -> None:
    image = torch.rand(1, 3, 64, 64)
    torch.testing.assert_close(texvlm.Texture(image.to("cuda:1")).data.cpu(), texvlm.Texture(image).data)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_mixed_devices_are_refused() -> None:
    source = texture().to("cuda")
    with pytest.raises(ValueError, match="on the device of the other arguments"):
        ops.sample_lod(source.data, torch.rand(2, 5, 2), torch.zeros(2, 5), 24, 20, ["mean"], source.levels)


def test_meta_tensors_give_shapes_without_work() -> None:
    data = ops.generate_mipmaps(torch.empty(2, 40, 40000, 40000, device="meta"), ["mean"], 16)
    assert data.shape == (2, texvlm.pyramid.texel_count(40000, 40000, 16), 40)
    assert data.numel() > 2**36


def test_functorch_used_before_changes_nothing() -> None:
    """Its traces in the thread are no transform: without gradients nothing is recorded."""
    torch.func.vmap(lambda x: x + 1)(torch.zeros(2))
    uv = torch.rand(1, 3, 2, requires_grad=True)
    with torch.no_grad():
        assert not texvlm.sample_lod(texvlm.Texture(torch.rand(1, 4, 4)), uv).requires_grad
    handle = torch.rand(1, 1, 4, 4, requires_grad=True)
    with torch.no_grad():
        assert texvlm.generate_mipmaps(handle).data.grad_fn is None


@pytest.mark.parametrize(
    "call",
    [
        lambda meta: texvlm.saliency(torch.rand(1, 3, 8, 8), meta(1, 3, 8, 8)),
        lambda meta: texvlm.Texture(torch.rand(2, 3, 9, 6)).sample(meta(2, 5, 2)),
        lambda meta: texvlm.Texture(torch.rand(2, 3, 9, 6)).patches(torch.rand(2, 5, 2), meta(2, 5)),
        lambda meta: texvlm.warp(torch.rand(1, 3, 8, 8), meta(1, 2, 8, 8)),
        lambda meta: texvlm.update_mipmaps(texvlm.Texture(torch.rand(1, 3, 8, 8)), meta(1, 4).long()),
    ],
    ids=["saliency", "sample", "patches", "warp", "update_mipmaps"],
)
def test_a_tensor_without_data_is_not_mixed_with_others(call) -> None:
    with pytest.raises(ValueError, match=r"must be on the (device of the other arguments \(cpu\)|CPU), got meta"):
        call(lambda *shape: torch.rand(shape, device="meta"))
