"""PyTorch's norms, eager and compiled, and those of quack and FlashInfer."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from fkjit.spec import Problem

from ..core.op import Arrays, Candidate, Prepared, Refused


def first(returned: Any) -> Any:
    """The normalised rows, of a call that may also return the residual stream."""
    return returned[0] if isinstance(returned, tuple) else returned


def _plain(op: str, problem: Problem, arrays: Arrays) -> Callable[..., Any]:
    """The norm in PyTorch's words, with the residual added before."""
    functional = import_module("torch").nn.functional
    width, eps = (problem["columns"],), problem["eps"]

    def norm(x: Any, weight: Any, bias: Any, residual: Any) -> Any:
        s = x if residual is None else x + residual
        if op == "layer_norm":
            y = functional.layer_norm(s, width, weight, bias, eps)
        else:
            y = functional.rms_norm(s, width, weight, eps)
        return y if residual is None else (y, s)

    return norm


def _arguments(arrays: Arrays) -> tuple[Any, ...]:
    return tuple(arrays.get(name) for name in ("x", "weight", "bias", "residual"))


def _eager(op: str) -> Callable[[Problem, Arrays], Prepared]:
    def prepare(problem: Problem, arrays: Arrays) -> Prepared:
        norm, given = _plain(op, problem, arrays), _arguments(arrays)
        return Prepared(lambda: norm(*given), first)

    return prepare


def _compiled(op: str) -> Callable[[Problem, Arrays], Prepared]:
    def prepare(problem: Problem, arrays: Arrays) -> Prepared:
        torch, given = import_module("torch"), _arguments(arrays)
        norm = torch.compile(_plain(op, problem, arrays), fullgraph=True, dynamic=False)
        norm(*given)
        return Prepared(lambda: norm(*given), first)

    return prepare


def _quack(problem: Problem, arrays: Arrays) -> Prepared:
    rmsnorm = import_module("quack").rmsnorm
    x, weight, _, residual = _arguments(arrays)
    eps = problem["eps"]
    if residual is None:
        return Prepared(lambda: rmsnorm(x, weight, eps=eps))
    return Prepared(lambda: rmsnorm(x, weight, residual=residual, eps=eps, prenorm=True), first)


def _flashinfer(problem: Problem, arrays: Arrays) -> Prepared:
    """With a residual it works in place: the residual becomes the sum, and x the result."""
    if problem["dtype"] == "fp32":
        raise Refused("takes fp16 and bf16")
    flashinfer = import_module("flashinfer")
    x, weight, _, residual = _arguments(arrays)
    eps = problem["eps"]
    if residual is None:
        return Prepared(lambda: flashinfer.rmsnorm(x, weight, eps))
    target, stream = x.clone(), residual.clone()

    def once(_: Any) -> Any:
        """What is timed goes on from its own results; what is judged begins anew."""
        y, s = x.clone(), residual.clone()
        flashinfer.fused_add_rmsnorm(y, s, weight, eps)
        return y

    return Prepared(lambda: flashinfer.fused_add_rmsnorm(target, stream, weight, eps), once)


def _torch(op: str) -> tuple[Candidate, ...]:
    return (
        Candidate(name="eager", package="torch", module="torch", prepare=_eager(op)),
        Candidate(name="compiled", package="torch", module="torch", prepare=_compiled(op)),
    )


LAYER_NORM = _torch("layer_norm")
RMS_NORM = (
    *_torch("rms_norm"),
    Candidate(name="quack", package="quack-kernels", module="quack", prepare=_quack),
    Candidate(
        name="flashinfer", package="flashinfer-python", module="flashinfer", prepare=_flashinfer,
        slow="builds a module with nvcc, 15 to 45 s",
    ),
)  # fmt: skip
