"""One call: drawn from its number, made, judged, and made smaller while it fails as before."""

from __future__ import annotations

import dataclasses
import functools
import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import texvlm
from fuzz import files, hostile
from fuzz.programs import NAMES, OVERFLOWING, Program, sizes

REFUSALS = (ValueError, TypeError, RuntimeError, ImportError, OSError)
CLEAR = (  # what torch says for its ops: of the memory there is, of a type, of a negated view that is written to
    "can't allocate memory",
    "Unable to allocate",
    "Expected a value of type",
    "MathBits",
)
UNCLEAR = re.compile(r"INTERNAL ASSERT|std::|basic_string|vector::|map::|values to unpack|NoneType' object|^\W*$")
MODULES = (
    "Allocator",
    "Information",
    "Participation",
    "Perspective",
    "TensionBalancer",
)  # as in torch.nn, nothing is checked twice


@dataclasses.dataclass(frozen=True)
class Call:
    """A program with its holes filled."""

    program: Program
    sizes: dict[str, Any]
    seed: int
    holes: tuple[str, ...]
    finite: bool  # whether its results must be

    def code(self) -> str:
        """To be pasted into Python."""
        text = self.program.filled(list(self.holes))
        used = [name for name in self.sizes if re.search(rf"\b{name}\b", text)]
        lines = ["import torch, texvlm", "from math import inf, nan"]
        lines += ["from fuzz import files  # PYTHONPATH=tests"] if "files." in text else []
        lines += [f"{', '.join(used)} = {', '.join(str(self.sizes[n]) for n in used)}"] if used else []
        return "\n".join([*lines, f"torch.manual_seed({self.seed})", f"result = {text}", ""])


@functools.cache
def kind_of(usual: str, dtype: torch.dtype) -> str:
    """Of what usually stands in a hole."""
    if "files." in usual:
        return "file"
    names = sizes(random.Random(0)) | {"D": dtype, "E": torch.float32}
    return hostile.kind(eval(usual, dict(NAMES), names))


def drawn(programs: Sequence[Program], rare: Sequence[Program], seed: int, number: int) -> Call:
    """The call of this number: always the same."""
    rng = random.Random((seed << 40) + number)
    program = rng.choice(rare if rng.random() < 0.02 else programs)
    names = sizes(rng, program.dtypes)
    holes, finite = program.holes, not program.infinite
    for _ in range(rng.choices((0, 1, 2, 3), (10, 60, 20, 10))[0]) if holes else ():
        i = rng.randrange(len(holes))
        holes[i], still = hostile.filling(rng, program.holes[i], kind_of(program.holes[i], names["D"]))
        finite = finite and still
    return Call(program, names, number & 0xFFFF, tuple(holes), finite)


def finite(t: torch.Tensor, overflows: bool) -> bool:
    """Whether a result is; in float16, whose range is short, that of a program which may leave it need only be no NaN."""
    if not t.is_floating_point() or t.layout != torch.strided or t.device.type != "cpu":
        return True
    return not bool((t.isnan() if overflows and t.dtype == torch.float16 else ~t.isfinite()).any())


def tensors(result: Any) -> Iterator[torch.Tensor]:
    """What a result consists of."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for item in result:
            yield from tensors(item)
    elif isinstance(result, dict):
        yield from tensors(list(result.values()))
    elif isinstance(result, texvlm.Texture):
        yield result.data
    elif isinstance(result, texvlm.Selection):  # beyond what is kept, its scores are -inf
        there = torch.arange(result.indices.shape[1]) < result.count[:, None]
        yield from tensors([*(vars(result) | {"score": torch.where(there, result.score, 0)}).values()])
    elif dataclasses.is_dataclass(result):
        yield from tensors(list(vars(result).values()))


def judged(call: Call) -> str | None:
    """Makes a call; what is wrong with how it went, in a line, without what differs from call to call."""
    torch.manual_seed(call.seed)
    try:
        names = {**NAMES, **call.sizes, "files": files}
        result = eval(call.program.filled(list(call.holes)), names)
        leaves = [t for t in tensors(result) if t.requires_grad and t.device.type == "cpu"]
        if leaves:
            torch.autograd.backward([t.sum() for t in leaves])
        if call.finite and not all(finite(t, call.program.name in OVERFLOWING) for t in tensors(result)):
            return "not finite"
    except MemoryError:
        return None
    except REFUSALS as error:
        text = str(error)
        if call.program.name in MODULES:
            return None
        if UNCLEAR.search(text) and not any(words in text for words in CLEAR):
            return f"{type(error).__name__}: {signature(text)}"
    except BaseException as error:
        if isinstance(error, LookupError) and re.search("must be|no channel", str(error)):  # Texture.level, Texture.index
            return None
        if spoilt(call):
            return None
        if isinstance(error, AttributeError) and call.program.name in MODULES:
            return None
        return f"{type(error).__name__}: {signature(str(error))}"
    return None


def spoilt(call: Call) -> bool:
    """Whether what stands in a hole fails by itself."""
    for hole in call.holes:
        try:
            eval(hole, {**NAMES, **call.sizes, "files": files})
        except Exception:
            return True
    return False


def signature(message: str) -> str:
    """The first line of a message without its numbers."""
    message = re.sub(r"'[\w.]+' object", "object", message)
    return re.sub(r"-?\d[\d.e+-]*", "#", (message.strip() or "no message").splitlines()[0])[:120]


def smaller(call: Call, fails: Callable[[Call], bool]) -> Call:
    """With as many holes filled as usual as it fails with."""
    for i, usual in enumerate(call.program.holes):
        if call.holes[i] != usual:
            other = dataclasses.replace(call, holes=(*call.holes[:i], usual, *call.holes[i + 1 :]))
            call = other if fails(other) else call
    return call


def quiet() -> None:
    """No warnings: they are a dozen a second."""
    warnings.simplefilter("ignore")
