"""Products by PyTorch: cuBLAS with kernels of their own for what follows, cuBLASLt's epilogue,
torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any

from fkjit.spec import Problem

from ..core.op import Arrays, Candidate, Prepared, Refused
from ..core.patience import within
from .products import activated, is_tf32, label, operands

_COMPILING = 60.0  # seconds that max-autotune gets for a case

Tail = Callable[[Any, Any], Any]  # (z, residual) -> out


def _tail(problem: Problem) -> Tail:
    """What follows the product and its bias, in the words of PyTorch."""
    functional, n = import_module("torch").nn.functional, problem["n"]

    def tail(z: Any, residual: Any) -> Any:
        y = activated(functional, problem["activation"], z[:, :n])
        y = y * z[:, n:] if problem["gate"] else y
        return y if residual is None else y + residual

    return tail


def _given(problem: Problem, arrays: Arrays) -> tuple[Any, Any, Any, Any]:
    """x, weight, bias, residual."""
    return (*operands(problem, arrays), arrays.get("bias"), arrays.get("residual"))


def _torch(problem: Problem, arrays: Arrays) -> Prepared:
    """nn.Linear, then a kernel for each thing that follows."""
    linear, tail = import_module("torch").nn.functional.linear, _tail(problem)
    x, weight, bias, residual = _given(problem, arrays)
    return Prepared(lambda: tail(linear(x, weight, bias), residual))


def _cublaslt(problem: Problem, arrays: Arrays) -> Prepared:
    """nn.Linear again, where PyTorch asks cuBLASLt's heuristics in place of cuBLAS."""
    if not arrays["x"].is_cuda:
        raise Refused("is for GPUs")
    prefer = import_module("torch").backends.cuda.preferred_blas_library
    made = _torch(problem, arrays)

    def call() -> Any:
        before = prefer()
        prefer("cublaslt")
        try:
            return made.call()
        finally:
            prefer(before)

    return Prepared(call)


def _one_more(problem: Problem, arrays: Arrays) -> Prepared:
    """nn.Linear, and one compiled kernel for all that follows."""
    if not _follows(problem):
        raise Refused("nothing follows the product")
    torch = import_module("torch")
    x, weight, bias, residual = _given(problem, arrays)
    tail = torch.compile(_tail(problem), fullgraph=True, dynamic=False)
    linear = torch.nn.functional.linear
    tail(linear(x, weight, bias), residual)
    return Prepared(lambda: tail(linear(x, weight, bias), residual))


def _epilogue(problem: Problem, arrays: Arrays) -> Prepared:
    """cuBLASLt's epilogue: bias, and GeLU's tanh form or ReLU."""
    activation = problem["activation"]
    if activation not in ("gelu_tanh", "relu") or problem["gate"] or not problem["bias"]:
        raise Refused("takes bias and gelu_tanh or relu")
    torch, (x, weight, bias, residual) = import_module("torch"), _given(problem, arrays)
    columns, gelu = weight.t(), activation == "gelu_tanh"

    def call() -> Any:
        y = torch._addmm_activation(bias, x, columns, use_gelu=gelu)
        return y if residual is None else y + residual

    return Prepared(call)


def _added(problem: Problem, arrays: Arrays) -> Prepared:
    """cuBLAS with the residual as the matrix that it adds to."""
    plain = problem["activation"] == "none" and not problem["gate"] and not problem["bias"]
    if not plain or not problem["residual"]:
        raise Refused("takes a residual, and nothing else")
    torch, (x, weight, _, residual) = import_module("torch"), _given(problem, arrays)
    columns = weight.t()
    return Prepared(lambda: torch.addmm(residual, x, columns))


def _compiled(problem: Problem, arrays: Arrays) -> Prepared:
    """All of it by Inductor, which tries its own kernels for the product too; within a minute."""
    torch, tail = import_module("torch"), _tail(problem)
    import_module("torch._dynamo").reset()
    linear = torch.nn.functional.linear
    x, weight, bias, residual = _given(problem, arrays)
    mode = "max-autotune-no-cudagraphs"  # graphs are the suite's
    call = torch.compile(
        lambda x, weight, bias, residual: tail(linear(x, weight, bias), residual),
        mode=mode, dynamic=False,
    )  # fmt: skip
    with within(_COMPILING, f"torch.compile of {label(problem)}"):
        call(x, weight, bias, residual)
    return Prepared(lambda: call(x, weight, bias, residual))


def _matmul(problem: Problem, arrays: Arrays) -> Prepared:
    """cuBLAS alone, of operands however they lie."""
    torch, (x, weight) = import_module("torch"), operands(problem, arrays)
    columns = weight.t()
    return Prepared(lambda: torch.mm(x, columns))


def _follows(problem: Problem) -> bool:
    return problem["activation"] != "none" or problem["gate"] or problem["residual"]


def _peer(name: str, prepare: Callable[[Problem, Arrays], Prepared], **more: Any) -> Candidate:
    def as_exact(problem: Problem, arrays: Arrays) -> Prepared:
        """fp32 as exact as the problem wants it."""
        matmul, tf32 = import_module("torch").backends.cuda.matmul, is_tf32(problem)
        with _allowed(matmul, tf32):
            made = prepare(problem, arrays)

        def call() -> Any:
            with _allowed(matmul, tf32):
                return made.call()

        return made if problem["dtype"] != "fp32" else replace(made, call=call)

    return Candidate(name=name, package="torch", module="torch", prepare=as_exact, **more)


@contextmanager
def _allowed(matmul: Any, tf32: bool) -> Iterator[None]:
    before, matmul.allow_tf32 = matmul.allow_tf32, tf32
    try:
        yield
    finally:
        matmul.allow_tf32 = before


PEERS = (
    _peer("torch", _torch),
    _peer("cublaslt", _cublaslt),
    _peer("torch + compiled tail", _one_more),
    _peer("addmm_activation", _epilogue),
    _peer("addmm", _added),
    _peer("compile", _compiled, slow="torch.compile(mode='max-autotune') takes a minute a case"),
)
GRADIENTS = (_peer("torch", _matmul),)
