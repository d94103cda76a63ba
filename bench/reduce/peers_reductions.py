"""Sums and maxima by PyTorch, and by CUB as CuPy calls it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from fkjit.spec import Problem

from ..core.op import Arrays, Candidate, Prepared, Refused


def _eager(problem: Problem, arrays: Arrays) -> Prepared:
    torch, x = import_module("torch"), arrays["x"]
    dims = (-1,) if problem["axis"] == -1 else ()
    call = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax}[problem["kind"]]
    return Prepared(lambda: call(x, *dims))


def _compiled(problem: Problem, arrays: Arrays) -> Prepared:
    torch, x = import_module("torch"), arrays["x"]
    import_module("torch._dynamo").reset()  # a fresh compilation, no dynamic shapes
    dims = (-1,) if problem["axis"] == -1 else ()
    named = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax}[problem["kind"]]
    call = torch.compile(lambda x: named(x, *dims), mode="max-autotune-no-cudagraphs")
    return Prepared(lambda: call(x))


def _cub(problem: Problem, arrays: Arrays) -> Prepared:
    """cupy.sum and cupy.max with the accelerator "cub", on torch's stream.

    Its workspace comes from torch's allocator, which may be asked while a graph is captured.
    """
    if problem["kind"] == "mean" or problem["dtype"] == "bf16":
        raise Refused("CuPy's CUB takes sums and maxima of fp16 and fp32")
    cupy, torch = import_module("cupy"), import_module("torch")
    if "cub" not in import_module("cupy._core").get_reduction_accelerators():
        import_module("cupy._core").set_reduction_accelerators(["cub"])
    x, axis = cupy.from_dlpack(arrays["x"]), problem["axis"]
    out = torch.empty(x.shape[:-1] if axis == -1 else (), dtype=arrays["x"].dtype, device="cuda")
    target = cupy.from_dlpack(out)
    reduce: Callable[..., Any] = {"sum": cupy.sum, "max": cupy.max}[problem["kind"]]
    current, memory = torch._C._cuda_getCurrentRawStream, torch.cuda
    allocator = cupy.cuda.PythonFunctionAllocator(
        lambda size, device: memory.caching_allocator_alloc(size, device, current(device)),
        lambda pointer, device: memory.caching_allocator_delete(pointer),
    )

    def call() -> Any:
        stream = cupy.cuda.ExternalStream(torch._C._cuda_getCurrentRawStream(0))
        with stream, cupy.cuda.using_allocator(allocator.malloc):
            reduce(x, axis=axis, out=target)
        return out

    return Prepared(call)


PEERS = (
    Candidate(name="eager", package="torch", module="torch", prepare=_eager),
    Candidate(
        name="compile", package="torch", module="torch", prepare=_compiled,
        slow="torch.compile(mode='max-autotune-no-cudagraphs') takes seconds a case",
    ),
    Candidate(name="cub", package="cupy-cuda13x", module="cupy", prepare=_cub),
)  # fmt: skip
