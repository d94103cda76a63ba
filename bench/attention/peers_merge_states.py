"""Partial attention put together by PyTorch, eager and compiled, and by FlashInfer.

FlashInfer builds its module with nvcc when it is first used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

from fkjit.spec import Problem

from ..core.op import Arrays, Candidate, Prepared, Refused


def _pair(o: Any, lse: Any, other: Any, other_lse: Any) -> Any:
    """o [B, S, H, D], lse [B, H, S]."""
    whole = import_module("torch").logaddexp(lse, other_lse)
    one, two = ((x - whole).exp().transpose(-1, -2)[..., None] for x in (lse, other_lse))
    return (one * o + two * other).to(o.dtype), whole


def _stack(o: Any, lse: Any) -> Any:
    weights = lse.softmax(0).transpose(-1, -2)[..., None]
    return (weights * o).sum(0).to(o.dtype), lse.logsumexp(0)


def _torch(compiled: bool) -> Callable[[Problem, Arrays], Prepared]:
    def prepare(p: Problem, arrays: Arrays) -> Prepared:
        names = ("o", "lse", "other", "other_lse") if p["pair"] else ("o", "lse")
        given = [arrays[name] for name in names]
        merge: Callable[..., Any] = _pair if p["pair"] else _stack
        if compiled:
            import_module("torch._dynamo").reset()
            merge = import_module("torch").compile(merge, dynamic=False)
        return Prepared(lambda: merge(*given), _rows)

    return prepare


def _rows(made: Any) -> Any:
    return made[0].flatten(0, -2)


def _flashinfer(p: Problem, arrays: Arrays) -> Prepared:
    """Its arrays are [tokens, H, D], stacks [tokens, parts, H, D]; its logarithms those of 2."""
    if p["dtype"] == "fp32":
        raise Refused("is measured in fp16 and bf16")
    flashinfer = import_module("flashinfer")

    def sums(lse: Any) -> Any:
        return (lse.transpose(-1, -2).flatten(-3, -2) * math.log2(math.e)).contiguous()

    if p["pair"]:
        one, two = (
            (arrays[o].flatten(0, 1), sums(arrays[lse]))
            for o, lse in (("o", "lse"), ("other", "other_lse"))
        )
        return Prepared(lambda: flashinfer.merge_state(*one, *two), _rows)
    o = arrays["o"].flatten(1, 2).transpose(0, 1).contiguous()
    lse = sums(arrays["lse"]).transpose(0, 1).contiguous()
    return Prepared(lambda: flashinfer.merge_states(o, lse), _rows)


PEERS = (
    Candidate(name="torch", package="torch", module="torch", prepare=_torch(False)),
    Candidate(
        name="compile", package="torch", module="torch", prepare=_torch(True),
        slow="torch.compile takes seconds a case",
    ),
    Candidate(
        name="flashinfer", package="flashinfer-python", module="flashinfer", prepare=_flashinfer,
        slow="builds a module with nvcc, 15 to 45 s each",
    ),
)  # fmt: skip
