"""What stands in a hole instead: by the kind of what usually does, as text."""

from __future__ import annotations

import random
from typing import Any

import torch

from fuzz import files

SAME_VALUES = (  # strides, layouts and views behind which the values are as before
    "{}.transpose(0, -1).contiguous().transpose(0, -1)",
    "torch.stack([{0}, {0}], -1)[..., 0]",
    "{}.flip(-1).flip(-1)",
    "{}.detach().clone().requires_grad_()",
    "torch.cat([{0}, {0}])[: len({0})]",
    "torch.nn.Parameter({})",
)
SHAPES = (
    "{}[:0]",
    "{}[..., :0]",
    "{}[None]",
    "{}[0]",
    "{}[..., :1]",
    "{}[:, :1]",
    "{}[..., None]",
    "{}.flatten()",
    "{}.new_zeros(())",
    "{}.new_zeros(0)",
    "torch.cat([{0}, {0}])",
    "torch.cat([{0}, {0}], -1)",
    "{}[:1].expand(5, *{}.shape[1:])",
    "{}[..., :1].expand_as({})",
    "{}.mT",
    "{}[..., ::2]",
    "{}.new_zeros((2,) * 9)",
)
DTYPES = tuple(
    f"{{}}.to(torch.{name})"
    for name in ("float16", "bfloat16", "float32", "float64", "uint8", "int8", "int32", "int64", "uint16", "bool", "complex64")
)
VALUES = (  # as good as before, or not
    "{} * nan",
    "{}.masked_fill(torch.rand({}.shape) < .1, nan)",
    "{}.masked_fill(torch.rand({}.shape) < .1, inf)",
    "{}.masked_fill(torch.rand({}.shape) < .1, -inf)",
    "{} * inf",
    "{} * 1e30",
    "{} * -1e30",
    "{} * 1e-42",
    "{} * 1e300",
    "-{}",
    "{} - .5",
    "{} * 0",
    "{} * 0 - 1",
    "{} * 1000",
    "{} + 2**31",
    "{} + 2**62",
    "{} - 2**62",
    "torch.full_like({}, 1)",
)
ODD_TENSORS = (
    "{}.to('meta')",
    "{}.to_sparse()",
    "torch._neg_view({})",
    "{}.numpy()",
    "{}.tolist()",
    "torch.view_as_real(torch.complex({0}, {0}))[..., 1]",
)
ANYTHING = (
    "None",
    "0",
    "-1",
    "'x'",
    "[]",
    "()",
    "{{}}",
    "object()",
    "1.5",
    "True",
    "b'x'",
    "torch.rand(1, 3, 4, 4)",
    "torch.tensor(3)",
    "1j",
    "print",
)
WHOLE = (
    "0",
    "-1",
    "1",
    "2",
    "3",
    "7",
    "16",
    "64",
    "1000",
    "2**15",
    "2**31 - 1",
    "2**31",
    "2**62",
    "2**63 - 1",
    "2**63",
    "-2**63",
    "2**70",
    "10**400",
)
REAL = (
    "0.",
    "-1.",
    "-0.",
    "nan",
    "inf",
    "-inf",
    "5e-324",
    "1e-45",
    "1e-8",
    "1e8",
    "1e38",
    "1e308",
    "1.",
    "3",
    "2**70",
    "10**400",
)
TEXT = ("''", "'x'", "'mean'", "'nearest'", "'exact'", "'auto'", "'gl'", "'\\0'", "'\\udcff'", "'é' * 1000", "['max']")


def kind(value: Any) -> str:
    """Of what usually stands in a hole."""
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, bool) or value is None:
        return "anything"
    if isinstance(value, (list, tuple)):
        return "list"
    return {int: "whole", float: "real", str: "text"}.get(type(value), "anything")


def filling(rng: random.Random, usual: str, of: str) -> tuple[str, bool]:
    """Something else for a hole, and whether results must be finite all the same."""
    if "files." in usual:
        return files.another(rng, usual), True
    if rng.random() < 0.06:
        return rng.choice(ANYTHING).format(), False
    whole = f"({usual})"
    if of == "tensor":
        group = rng.choice((SAME_VALUES, SHAPES, SHAPES, DTYPES, VALUES, VALUES, ODD_TENSORS))
        text = rng.choice(group)
        return text.format(*[whole] * text.count("{}") or [whole]), group in (SAME_VALUES, SHAPES)
    if of == "list":
        return rng.choice(
            (
                "[]",
                f"{whole} * 2",
                f"{whole}[::-1]",
                f"{whole}[:1]",
                f"tuple({whole})",
                f"[*{whole}, None]",
                "[nan]",
                "[-1]",
                "[2**62]",
            )
        ), False
    return rng.choice({"whole": WHOLE, "real": REAL, "text": TEXT}.get(of, ANYTHING)).format(), False
