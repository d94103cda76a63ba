"""What kernels that go over contiguous arrays, element by element, have alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fkjit.ops.op.checks import FLOATS
from fkjit.runtime.interop import ITEMSIZE, View
from fkjit.spec import Param, Params, Problem, size_class

_BYTES = 16  # of an access
_LARGEST_CLASS = 1 << 28

PARAMS = (
    Param("dtype", FLOATS, "element type of all arrays"),
    Param("vector", (True, False), "16-byte accesses"),
    Param("threads", (128, 256), "threads of a block", tunable=True),
)


def usual(dtype: str, arrays: Iterable[View | None]) -> dict[str, Any]:
    """The parameters for these arrays, which have one dtype."""
    vector = not any(view.pointer % _BYTES for view in arrays if view is not None)
    return {"dtype": dtype, "vector": vector, "threads": 256}


def blocks(params: Params, problem: Problem) -> int:
    """So many that each thread has one access."""
    width = _BYTES // ITEMSIZE[params["dtype"]] if params["vector"] else 1
    return -(-problem["elements"] // (params["threads"] * width))


def shape_class(problem: Problem) -> dict[str, int]:
    """By the number of elements."""
    return {"elements": size_class(problem["elements"], _LARGEST_CLASS)}
