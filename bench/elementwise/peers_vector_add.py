"""PyTorch's and CuPy's sums of two arrays."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fkjit.spec import Problem

from ..core.op import Arrays, Candidate, Prepared, Refused


def _eager(problem: Problem, arrays: Arrays) -> Prepared:
    a, b, torch = arrays["a"], arrays["b"], import_module("torch")
    return Prepared(lambda: torch.add(a, b))


def _cupy(problem: Problem, arrays: Arrays) -> Prepared:
    if problem["dtype"] == "bf16":
        raise Refused("CuPy adds no bf16 here")
    cupy, torch = import_module("cupy"), import_module("torch")
    out = torch.empty_like(arrays["a"])
    a, b, target = (cupy.from_dlpack(x) for x in (arrays["a"], arrays["b"], out))

    def call() -> Any:
        with cupy.cuda.ExternalStream(torch._C._cuda_getCurrentRawStream(0)):
            cupy.add(a, b, out=target)
        return out

    return Prepared(call)


PEERS = (
    Candidate(name="eager", package="torch", module="torch", prepare=_eager),
    Candidate(name="cupy", package="cupy-cuda13x", module="cupy", prepare=_cupy),
)
