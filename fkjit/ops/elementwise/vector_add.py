"""`fkjit.vector_add`: the sum of two arrays, which measures memory bandwidth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from fkjit.arch import Arch
from fkjit.errors import ParameterError
from fkjit.ops.op.checks import FLOATS, check_output, check_same_dtype, check_shape
from fkjit.ops.op.node import Node, like
from fkjit.ops.op.op import Launch, Op, Output, Request, arch_of
from fkjit.ops.op.shapes import MAX_GRID, coalesce, log2_ceil
from fkjit.runtime.interop import ITEMSIZE, View, contiguous
from fkjit.spec import (
    Dim3,
    KernelSpec,
    Param,
    Params,
    Problem,
    Work,
    register,
    size_class,
)
from fkjit.tuning import tuned

_ARRAYS = ("a", "b", "out")
_VECTOR_BYTES = 16
_LARGE = 1 << 22  # elements, from which on large blocks are faster
_LARGEST_CLASS = 1 << 28  # beyond these it makes no difference
_OUTER = 3  # dimensions of rows, at most


def vector_add(a: Any, b: Any, *, out: Any = None) -> Any:
    """a + b, element by element, in one kernel.

    Args:
        a, b: fp16, bf16 or fp32, both alike, of one shape: nothing is broadcast (`expand` does
            that). torch, CuPy, NumPy or any DLPack arrays on one device, of any strides that leave
            at most four dimensions when those that lie behind each other are joined.
        out: where the sum is written; of the same shape and dtype; default: a new contiguous array.
            It may be a or b; any other overlap is refused.

    Returns:
        The sum, added in fp32 and rounded once, in a's dtype and framework (`out` if given).

    Raises:
        ParameterError: shapes that differ, too many strides, overlaps, tensors that require grad.
        ArgumentTypeError: not arrays, other or mixed dtypes. DeviceError: mixed devices.
        CaptureError: first call of a geometry under CUDA graph capture; see `fkjit.prepare`.

    Arrays whose rows are equally far from 16-byte boundaries are read and written 16 bytes at a
    time, others element by element.

    Example:
        >>> fkjit.vector_add(np.array([1, 2], np.float32), np.array([3, 4], np.float32))
        array([4., 6.], dtype=float32)
    """
    return _OP((a, b), (out,))


def _check(views: Mapping[str, View | None]) -> Request:
    a, b, out = views["a"], views["b"], views["out"]
    assert a is not None and b is not None
    dtype = check_same_dtype("vector_add", {"a": a, "b": b})
    shape = tuple(a.shape)
    check_shape("vector_add", "b", b, shape, "a's (nothing is broadcast)")
    check_output("vector_add", out, shape, dtype)
    inputs, outputs = {"a": a, "b": b}, {"out": Output(shape, dtype, out)}
    if 0 in shape:
        return Request(inputs, outputs, ())
    strides = [a.strides, b.strides, contiguous(shape) if out is None else out.strides]
    pointers = [a.pointer, b.pointer, 0 if out is None else out.pointer]  # new ones are aligned
    problem, vector = describe(dtype, shape, strides, pointers)
    params = parameters(problem, vector, arch_of(a))
    elements = problem["rows"] * problem["columns"]  # there are no more blocks than these
    if elements > MAX_GRID and grid(params, problem)[0] > MAX_GRID:
        raise ParameterError(
            f"vector_add: a has {problem['rows']} rows that do not lie behind each other, more "
            "than a launch can have; pass contiguous arrays"
        )
    return Request(inputs, outputs, (Launch(ADD, params, problem),))


def parameters(problem: Problem, vector: bool, arch: Arch) -> dict[str, Any]:
    """Of the variant that takes a problem."""
    large = problem["rows"] * problem["columns"] >= _LARGE
    params = {
        "dtype": problem["dtype"],
        "vector": vector,
        "dimensions": problem["dimensions"],
        "threads": 1024 if large else 256,
    }
    return tuned(ADD, params, problem, arch)


def shape_class(problem: Problem) -> dict[str, Any]:
    """Problems that share their tuned values."""
    return {"elements": size_class(problem["rows"] * problem["columns"], _LARGEST_CLASS)}


def describe(
    dtype: str, shape: Sequence[int], strides: Sequence[Sequence[int]], pointers: Sequence[int]
) -> tuple[dict[str, Any], bool]:
    """The problem of arrays a, b and out, and whether 16-byte accesses fit it."""
    sizes, steps = coalesce(shape, strides)
    if len(sizes) > _OUTER + 1:
        raise ParameterError(
            f"vector_add: strides {', '.join(str(tuple(s)) for s in strides)} of shape "
            f"{tuple(shape)} leave {len(sizes)} dimensions; allowed: {_OUTER + 1}; pass contiguous "
            "arrays"
        )
    missing = _OUTER + 1 - len(sizes)
    outer, columns = (1,) * missing + sizes[:-1], sizes[-1]
    padded = [(0,) * missing + step for step in steps]
    rows, itemsize = prod(outer), ITEMSIZE[dtype]
    vector = _vectors(padded, pointers, itemsize)
    return {
        "dtype": dtype,
        "columns": columns,
        "rows": rows,
        "sizes": outer,
        "dimensions": 0 if rows == 1 else 1 if outer[-1] == rows else _OUTER,
        "strides": dict(zip(_ARRAYS, padded, strict=True)),
        "shift": pointers[0] % _VECTOR_BYTES // itemsize if vector else 0,
    }, vector


def _vectors(strides: Sequence[Sequence[int]], pointers: Sequence[int], itemsize: int) -> bool:
    """Whether rows of all arrays are contiguous, and equally far from 16-byte boundaries."""
    first, *others = [pointer % _VECTOR_BYTES for pointer in pointers]
    if any([phase != first for phase in others]) or any([step[-1] != 1 for step in strides]):
        return False
    return not any([s * itemsize % _VECTOR_BYTES for step in strides for s in step[:-1]])


def _layout(params: Params, problem: Problem) -> tuple[int, int, int]:
    """(log2 of lanes in a row, blocks of a row, blocks)."""
    width = _VECTOR_BYTES // ITEMSIZE[params["dtype"]] if params["vector"] else 1
    accesses = -(-(problem["columns"] + problem["shift"]) // width)
    lanes_log2 = log2_ceil(params["threads"])
    if params["dimensions"]:
        lanes_log2 = min(lanes_log2, log2_ceil(accesses))
    pieces = -(-accesses // (1 << lanes_log2))
    return lanes_log2, pieces, pieces * -(-problem["rows"] // (params["threads"] >> lanes_log2))


def grid(params: Params, problem: Problem) -> Dim3:
    """Pieces of a row, for as many rows as a block has."""
    return (_layout(params, problem)[2], 1, 1)


def arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Kernel arguments by name."""
    strides, (_, rows_1, rows_2) = problem["strides"], problem["sizes"]
    lanes_log2, pieces, _ = _layout(params, problem)
    a, b, out = strides["a"], strides["b"], strides["out"]
    return {
        **{"a": arrays["a"], "b": arrays["b"], "out": arrays["out"]},
        **{"a_strides": a[:_OUTER], "b_strides": b[:_OUTER], "out_strides": out[:_OUTER]},
        **{"a_column": a[_OUTER], "b_column": b[_OUTER], "out_column": out[_OUTER]},
        **{"rows": problem["rows"], "rows_1": rows_1, "rows_2": rows_2},
        **{"columns": problem["columns"], "shift": problem["shift"]},
        **{"lanes_log2": lanes_log2, "pieces": pieces},
    }


def traffic(problem: Problem) -> float:
    """Bytes of a, b read and out written."""
    return 3.0 * ITEMSIZE[problem["dtype"]] * problem["rows"] * problem["columns"]


ADD = register(
    KernelSpec(
        op="vector_add",
        name="rows",
        source="elementwise/vector_add.cu",
        entry="vector_add",
        pdl=True,
        doc="a + b in 16-byte accesses where rows allow it; any strides",
        params=(
            Param("dtype", FLOATS, "element type of a, b and out"),
            Param("vector", (True, False), "16-byte accesses: rows alike to 16-byte boundaries"),
            Param("dimensions", (0, 1, _OUTER), "of the rows; 0: a single one"),
            Param("threads", (256, 1024), "threads of a block", tunable=True),
        ),
        block=lambda params: (params["threads"], 1, 1),
        grid=grid,
        shape_class=shape_class,
        arguments=arguments,
        work=Work(flops=lambda problem: float(problem["rows"] * problem["columns"]), bytes=traffic),
        verification="fkjit.ops.elementwise.cases:ROWS",
    )
)

_OP = Op(
    "vector_add",
    inputs=("a", "b"),
    outputs=("out",),
    check=_check,
    in_place=(("out", "a"), ("out", "b")),
    node=Node(lambda a, b: [like(a)]),
)
vector_add.prepare = _OP.preparing(vector_add)  # type: ignore[attr-defined]
