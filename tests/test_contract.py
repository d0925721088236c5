"""The contract that every op keeps, over the case tables in tests/cases: equal to the reference, right gradients, at home in PyTorch."""

from __future__ import annotations

import pytest
import torch
from cases import Bad, Case, all_bad, all_cases, one_of_each
from conftest import TOLERANCE
from effort import EMULATED
from torch.autograd import forward_ad
from torch.library import opcheck
from torch.utils._pytree import tree_map

from texvlm import reference

CASES = all_cases()
DIFFERENTIABLE = [c for c in CASES if c.grads]
ONE_OF_EACH = one_of_each(CASES)


def op_of(case: Case | Bad):
    return getattr(torch.ops.texvlm, case.op).default


def tensors(result) -> list[torch.Tensor]:
    if result is None:
        return []
    return [result] if isinstance(result, torch.Tensor) else list(result)


def leaf(args: tuple, i: int | tuple[int, int]) -> torch.Tensor:
    """The argument at a position of Case.grads."""
    return args[i] if isinstance(i, int) else args[i[0]][i[1]]


def filled(args: tuple, positions: tuple, values) -> tuple:
    """The arguments with other values at these positions."""
    full = [list(a) if isinstance(a, (list, tuple)) else a for a in args]
    for i, value in zip(positions, values, strict=True):
        if isinstance(i, int):
            full[i] = value
        else:
            full[i[0]][i[1]] = value
    return tuple(full)


def with_grad(case: Case, args: tuple) -> tuple:
    return filled(args, case.grads, [leaf(args, i).detach().clone().requires_grad_() for i in case.grads])


def clones(args: tuple) -> tuple:
    return tree_map(lambda a: a.clone() if isinstance(a, torch.Tensor) else a, args)


def run(case: Case, args: tuple) -> list[torch.Tensor]:
    """The results of the op, and of one that writes in place, what it wrote."""
    result = op_of(case)(*args)
    return [*tensors(result), *(args[i] for i in case.mutates)]


def expected(case: Case, args: tuple) -> list[torch.Tensor]:
    return tensors((case.reference or getattr(reference, case.op))(*args))


def outputs_with_grad(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [o for o in outputs if o.requires_grad]


def close(case: Case, actual: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    if not actual.is_floating_point() or (case.exact and dtype in (torch.float32, torch.float64)):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)
    else:
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=case.atol or tolerance, equal_nan=True)


def dtypes(case: Case) -> tuple[torch.dtype, ...]:
    """Those to compare with the reference in; where kernels are emulated one, but for one case of each op and set of gradients."""
    few = EMULATED and case not in ONE_OF_EACH and torch.float32 in case.dtypes
    return (torch.float32,) if few else case.dtypes


@pytest.mark.parametrize(("case", "dtype"), [pytest.param(c, d, id=f"{c}-{str(d)[6:]}") for c in CASES for d in dtypes(c)])
def test_equals_reference(case: Case, dtype: torch.dtype, generator: torch.Generator) -> None:
    args = case.make(dtype, generator)
    wanted = expected(case, clones(args))
    actual = run(case, clones(args) if case.mutates else args)  # a clone would lose the strides
    assert len(actual) == len(wanted)
    for a, w in zip(actual, wanted, strict=True):
        assert a.dtype == w.dtype and a.shape == w.shape
        close(case, a, w, dtype)


@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=str)
def test_gradients_equal_reference(case: Case, generator: torch.Generator) -> None:
    args = case.make(torch.float64, generator)
    mine, theirs = with_grad(case, args), with_grad(case, args)
    out, ref = outputs_with_grad(run(case, mine)), outputs_with_grad(expected(case, theirs))
    assert out and len(out) == len(ref)
    weights = [torch.randn(o.shape, dtype=o.dtype, generator=generator) for o in out]
    a = torch.autograd.grad(out, [leaf(mine, i) for i in case.grads], weights)
    b = torch.autograd.grad(ref, [leaf(theirs, i) for i in case.grads], weights)
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=str)
def test_gradcheck(case: Case, generator: torch.Generator) -> None:
    """Of most cases a random projection of the Jacobian: all of every gradient is compared with the reference's."""
    args = with_grad(case, case.make(torch.float64, generator))

    def f(*inputs):
        return tuple(outputs_with_grad(run(case, filled(args, case.grads, inputs))))

    inputs = tuple(leaf(args, i) for i in case.grads)
    assert torch.autograd.gradcheck(f, inputs, eps=1e-6, atol=1e-5, rtol=1e-4, fast_mode=case not in ONE_OF_EACH)


@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=str)
def test_second_derivatives_pass_or_raise(case: Case, generator: torch.Generator) -> None:
    args = with_grad(case, case.make(torch.float64, generator))
    inputs = [leaf(args, i) for i in case.grads]
    out = outputs_with_grad(run(case, args))
    weights = [torch.randn(o.shape, dtype=o.dtype, generator=generator).requires_grad_() for o in out]
    first = torch.autograd.grad(out, inputs, weights, create_graph=True)
    recorded = [g for g in first if g.requires_grad]
    assert recorded, "a gradient that is silently constant would make second derivatives zero"
    try:
        torch.autograd.grad([g.square().sum() for g in recorded], [*inputs, *weights], allow_unused=True)
    except RuntimeError as error:
        assert "not implemented" in str(error) or "second derivatives" in str(error)
        return

    def f(*values):
        return tuple(outputs_with_grad(run(case, filled(args, case.grads, values))))

    assert torch.autograd.gradgradcheck(f, tuple(inputs), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_opcheck(case: Case, generator: torch.Generator) -> None:
    opcheck(op_of(case), with_grad(case, case.make(torch.float32 if torch.float32 in case.dtypes else case.dtypes[0], generator)))


@pytest.mark.parametrize("case", [c for c in CASES if c.inductor or c in ONE_OF_EACH], ids=str)
def test_compiles(case: Case, generator: torch.Generator) -> None:
    """That every other case is traced, with sizes that are not known, is for opcheck."""
    dtype = torch.float32 if torch.float32 in case.dtypes else case.dtypes[0]
    for backend in ["aot_eager", "inductor"] if case.inductor else ["aot_eager"]:
        torch._dynamo.reset()
        args = case.make(dtype, generator)
        eager_args, compiled_args = with_grad(case, args), with_grad(case, args)
        if case.mutates:
            eager_args, compiled_args = clones(args), clones(args)
        compiled = torch.compile(lambda *a: run(case, a), fullgraph=True, dynamic=True, backend=backend)
        eager, out = run(case, eager_args), compiled(*compiled_args)
        for a, b in zip(out, eager, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        if case.grads:
            for outputs, inputs in ((eager, eager_args), (out, compiled_args)):
                sum(o.double().square().sum() for o in outputs_with_grad(outputs)).backward()
                assert all(leaf(inputs, i).grad is not None for i in case.grads)
            for i in case.grads:
                torch.testing.assert_close(leaf(compiled_args, i).grad, leaf(eager_args, i).grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_independent_of_thread_count(case: Case, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    args = case.make(torch.float32 if torch.float32 in case.dtypes else case.dtypes[0], generator)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            mine = clones(args) if case.mutates else with_grad(case, args)
            out = run(case, mine)
            grads = (
                torch.autograd.grad([o.sum() for o in outputs_with_grad(out)], [leaf(mine, i) for i in case.grads])
                if case.grads
                else []
            )
            results.append([*out, *grads])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(other, results[0], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=str)
def test_functorch_raises_or_is_right(case: Case, generator: torch.Generator) -> None:
    args = case.make(torch.float64, generator)
    of = leaf(args, case.grads[0])

    def f(x):
        out = run(case, filled(args, case.grads[:1], (x,)))
        return (outputs_with_grad(out) if x.requires_grad else out)[0]

    with pytest.raises(RuntimeError):
        torch.func.grad(lambda x: f(x).sum())(of)
    with pytest.raises(RuntimeError):
        torch.func.jvp(f, (of,), (torch.ones_like(of),))
    with forward_ad.dual_level(), pytest.raises(RuntimeError):
        f(forward_ad.make_dual(of, torch.ones_like(of)))
    stacked = torch.stack([of, of])
    try:
        mapped = torch.func.vmap(f)(stacked)
    except RuntimeError:
        return
    torch.testing.assert_close(mapped, torch.stack([f(x) for x in stacked]))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cuda_equals_cpu(case: Case, generator: torch.Generator, cuda: torch.device) -> None:
    args = case.make(torch.float32 if torch.float32 in case.dtypes else case.dtypes[0], generator)
    on_gpu = tree_map(lambda a: a.to(cuda) if isinstance(a, torch.Tensor) else a, args)
    drivers = case.atol if case.op.endswith("_gl") else None  # two graphics drivers, each with its own rounding of halves
    for a, b in zip(run(case, on_gpu), run(case, clones(args)), strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=drivers or 1e-5, equal_nan=True)


@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=str)
def test_cuda_gradients_equal_cpu(case: Case, generator: torch.Generator, cuda: torch.device) -> None:
    args, results, weights = case.make(torch.float64, generator), [], None
    for device in (cuda, torch.device("cpu")):
        mine = with_grad(case, tree_map(lambda a, device=device: a.to(device) if isinstance(a, torch.Tensor) else a, args))
        out = outputs_with_grad(run(case, mine))
        weights = weights or [torch.randn(o.shape, dtype=o.dtype, generator=generator) for o in out]
        inputs = [leaf(mine, i) for i in case.grads]
        results.append(torch.autograd.grad(out, inputs, [w.to(device) for w in weights]))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("bad", all_bad(), ids=str)
def test_bad_input(bad: Bad) -> None:
    args = bad.make()
    before = clones(args)
    with pytest.raises(bad.error, match=bad.message):
        op_of(bad)(*args)
    for a, b in zip(args, before, strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_every_op_has_a_case_and_a_fake() -> None:
    """Backward ops are reached through the gradients of their forward op."""
    names = {s.name.removeprefix("texvlm::") for s in torch._C._jit_get_all_schemas() if s.name.startswith("texvlm::")}
    covered = {c.op for c in CASES if c.dtypes}
    missing = {n for n in names if n.removesuffix("_backward") not in covered}
    assert not missing, f"ops without a case: {sorted(missing)}"
    for name in names:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"texvlm::{name}", "Autograd"), f"{name} has no Autograd entry"
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"texvlm::{name}", "CUDA"), f"{name} has no CUDA entry"
