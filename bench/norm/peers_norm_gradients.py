"""The norms' gradients by PyTorch: its own kernels, and the formula compiled."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from fkjit.spec import Problem

from ..core.op import Arrays, Candidate, Prepared, Refused
from .peers_norms import first

_NAMES = ("dy", "dsum", "x", "weight", "mean", "rstd")


def _eager(op: str) -> Callable[[Problem, Arrays], Prepared]:
    def prepare(problem: Problem, arrays: Arrays) -> Prepared:
        aten, width = import_module("torch").ops.aten, [problem["columns"]]
        dy, dsum, x, weight, mean, rstd = (arrays.get(name) for name in _NAMES)
        bias, column = arrays.get("bias"), rstd[:, None]

        def call() -> Any:
            if op == "layer_norm":
                made = aten.native_layer_norm_backward(
                    dy, x, width, mean[:, None], column, weight, bias, [True] * 3
                )
            else:
                made = aten._fused_rms_norm_backward(dy, x, width, column, weight, [True] * 2)
            return made if dsum is None else (made[0] + dsum, *made[1:])

        if op != "layer_norm" and not hasattr(aten, "_fused_rms_norm_backward"):
            raise Refused("this PyTorch has no kernel for it")
        return Prepared(call, first)

    return prepare


def textbook(dy: Any, dsum: Any, x: Any, weight: Any, mean: Any, rstd: Any) -> tuple[Any, ...]:
    """(dx, dweight, dbias) in fp32; RMSNorm has no mean and no bias."""
    wide, given, column = x.float(), dy.float(), rstd[:, None]
    h = (wide if mean is None else wide - mean[:, None]) * column
    g = given * weight.float()
    dx = g - h * (g * h).mean(-1, keepdim=True)
    dx = (dx if mean is None else dx - g.mean(-1, keepdim=True)) * column
    dx = dx if dsum is None else dx + dsum.float()
    dweight = (given * h).sum(0).to(weight.dtype)
    return (dx.to(x.dtype), dweight, *(() if mean is None else (given.sum(0).to(weight.dtype),)))


def _compiled(problem: Problem, arrays: Arrays) -> Prepared:
    given = tuple(arrays.get(name) for name in _NAMES)
    call = import_module("torch").compile(textbook, fullgraph=True, dynamic=False)
    call(*given)
    return Prepared(lambda: call(*given), first)


def peers(op: str) -> tuple[Candidate, ...]:
    """Of "layer_norm" or "rms_norm"."""
    return (
        Candidate(name="eager", package="torch", module="torch", prepare=_eager(op)),
        Candidate(name="compiled", package="torch", module="torch", prepare=_compiled),
    )
