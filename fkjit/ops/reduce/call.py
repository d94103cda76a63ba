"""`fkjit.reduce_sum`, `reduce_max`, `reduce_mean`: over all elements or over the last axis."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.ops.op.checks import check_dtype, check_flag, check_output
from fkjit.ops.op.node import Node, of_dtype
from fkjit.ops.op.op import Launch, Op, Output, Request, arch_of
from fkjit.ops.op.shapes import MAX_GRID, coalesce, leading_rows
from fkjit.ops.reduce.kernels import VECTOR_BYTES, choose
from fkjit.runtime.interop import ITEMSIZE, View


def reduce_sum(
    x: Any,
    axis: int | None = None,
    *,
    dtype: str | None = None,
    keepdim: bool = False,
    out: Any = None,
) -> Any:
    """The sum over all elements (axis=None) or over the last axis (axis=-1), in one kernel.

    Args:
        x: fp16, bf16 or fp32; torch, CuPy, NumPy or any DLPack array. axis=-1: [..., n], of which
            the leading dimensions are one when joined (rows at one distance), of any stride along
            the last one. axis=None: two dimensions at most are left when all are joined. Memory in
            one piece is fastest: 16 bytes at a time.
        dtype: of the result: x's (default) or "fp32". Sums are made in fp32 either way.
        keepdim: leave reduced axes as 1.
        out: where the result is written: contiguous, of its shape and dtype, not overlapping x.

    Returns:
        The sums, in x's framework; of nothing: 0. NaN and infinities as in torch. On one input
        the same bits at every call, on every GPU, and in the interpreter.

    Raises:
        ParameterError: another axis, strides, shapes, overlaps, tensors that require grad.
        ArgumentTypeError: not an array, other dtypes. CaptureError: first call of a geometry under
        CUDA graph capture; see `fkjit.prepare`.

    Example:
        >>> x = np.arange(6, dtype=np.float32).reshape(2, 3)
        >>> fkjit.reduce_sum(x), fkjit.reduce_sum(x, axis=-1)
        (array(15., dtype=float32), array([ 3., 12.], dtype=float32))
    """
    return _SUM((x,), (out,), (axis, dtype, keepdim))


def reduce_mean(
    x: Any,
    axis: int | None = None,
    *,
    dtype: str | None = None,
    keepdim: bool = False,
    out: Any = None,
) -> Any:
    """`reduce_sum` divided by how many elements were added, in fp32; of nothing: NaN.

    Example:
        >>> fkjit.reduce_mean(np.array([[1, 5], [7, 2]], np.float32), axis=-1, keepdim=True)
        array([[3. ],
               [4.5]], dtype=float32)
    """
    return _MEAN((x,), (out,), (axis, dtype, keepdim))


def reduce_max(x: Any, axis: int | None = None, *, keepdim: bool = False, out: Any = None) -> Any:
    """The greatest element, as `reduce_sum` takes its arguments; NaN if there is one.

    The result has x's dtype. ParameterError for the maximum of nothing.

    Example:
        >>> fkjit.reduce_max(np.array([[1, 5], [7, 2]], np.float32), axis=-1)
        array([5., 7.], dtype=float32)
    """
    return _MAX((x,), (out,), (axis, None, keepdim))


def _check(
    call: str, kind: str, views: Mapping[str, View | None], axis: Any, dtype: Any, keepdim: Any
) -> Request:
    x, out = views["x"], views["out"]
    assert x is not None
    check_dtype(call, "x", x)
    whole = _is_whole(call, axis, len(x.shape))
    out_dtype = _result_dtype(call, dtype, x.dtype)
    kept = check_flag(call, "keepdim", keepdim)
    shape = _result_shape(tuple(x.shape), whole, kept)
    check_output(call, out, shape, out_dtype)
    _check_contiguous(call, out)
    problem = _describe(call, x, whole)
    if kind == "max" and not problem["columns"]:
        raise ParameterError(f"{call}: x has shape {tuple(x.shape)}: nothing has no maximum")
    count = problem["columns"] * problem["segments"]
    problem |= {
        "operation": "max" if kind == "max" else "sum",
        "out_dtype": out_dtype,
        "divisor": float(count) if kind == "mean" else 1.0,
    }
    outputs = {"out": Output(shape, out_dtype, out)}
    if 0 in shape:
        return Request({"x": x}, outputs, ())
    spec, params, blocks, meeting = choose(problem, arch_of(x))
    many = problem["rows"] > MAX_GRID  # only then there are as many blocks
    if many and spec.grid(params, problem)[0] > MAX_GRID:
        raise ParameterError(f"{call}: x has {problem['rows']} rows, more than a launch can have")
    launch = Launch(spec, params, problem)
    return Request({"x": x}, outputs, (launch,), workspace=4 * blocks, counters=meeting)


def _is_whole(call: str, axis: Any, dimensions: int) -> bool:
    """Whether everything is reduced."""
    if axis is None:
        return True
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise ArgumentTypeError(f"{call}: axis={axis!r} is not None or a whole number")
    if axis not in (-1, max(dimensions, 1) - 1):
        raise ParameterError(
            f"{call}: axis={axis} is not None (all) or -1 (the last one); for another axis pass a "
            "contiguous transpose"
        )
    return False


def _result_dtype(call: str, dtype: Any, own: str) -> str:
    if dtype is None:
        return own
    if not isinstance(dtype, str) or dtype not in (own, "fp32"):
        allowed = ", ".join(dict.fromkeys((own, "fp32")))
        raise ParameterError(f"{call}: dtype={dtype!r} is not one of {allowed} or None")
    return dtype


def _result_shape(shape: tuple[int, ...], whole: bool, keepdim: bool) -> tuple[int, ...]:
    if whole:
        return (1,) * len(shape) if keepdim else ()
    return (*shape[:-1], *((1,) if keepdim and shape else ()))


def _check_contiguous(call: str, out: View | None) -> None:
    if out is not None and 0 not in out.shape:
        for i, (n, step) in enumerate(zip(out.shape, out.strides, strict=True)):
            if n > 1 and step != prod(out.shape[i + 1 :]):
                raise ParameterError(
                    f"{call}: out (shape {tuple(out.shape)}, strides {tuple(out.strides)}) is not "
                    "contiguous; it must be"
                )


def _describe(call: str, x: View, whole: bool) -> dict[str, Any]:
    """Rows of columns, and how far each is from the next; a row may have several segments."""
    rows = segments = step = columns = stride = 1
    if 0 in x.shape:
        *leading, last = x.shape
        rows, columns = (1, 0) if whole else (prod(leading), last)
    elif whole:
        sizes, (steps,) = coalesce(x.shape, [x.strides])
        if len(sizes) > 2:
            raise ParameterError(
                f"{call}: strides {tuple(x.strides)} of shape {tuple(x.shape)} leave {len(sizes)} "
                "dimensions; allowed: 2; pass a contiguous copy of x"
            )
        segments, columns = (1, *sizes)[-2:]
        step, stride = (1, *steps)[-2:]
    else:
        rows, step = leading_rows(call, "x", x)
        if x.shape:
            columns, stride = tuple(x.shape)[-1], x.strides[-1]
    itemsize = ITEMSIZE[x.dtype]
    one = rows == segments == 1
    vector = columns > 0 and (stride == 1 or columns == 1)
    vector = vector and (one or step * itemsize % VECTOR_BYTES == 0)
    return {
        "dtype": x.dtype,
        "rows": rows,
        "columns": columns,
        "segments": segments,
        "row_stride": step,
        "column_stride": 1 if vector else stride,
        "vector": vector,
        "shift": x.pointer % VECTOR_BYTES // itemsize if vector else 0,
    }


def _op(kind: str) -> Op:
    call = f"reduce_{kind}"
    node = Node(partial(_fake, call), "int? axis, str? dtype, bool keepdim")
    return Op(call, inputs=("x",), outputs=("out",), check=partial(_check, call, kind), node=node)


def _fake(call: str, x: Any, axis: Any, dtype: str | None, keepdim: bool) -> list[Any]:
    shape = _result_shape(tuple(x.shape), _is_whole(call, axis, x.dim()), keepdim)
    return [x.new_empty(shape) if dtype is None else of_dtype(x, shape, dtype)]


_SUM, _MEAN, _MAX = (_op(kind) for kind in ("sum", "mean", "max"))
reduce_sum.prepare = _SUM.preparing(reduce_sum)  # type: ignore[attr-defined]
reduce_mean.prepare = _MEAN.preparing(reduce_mean)  # type: ignore[attr-defined]


def _prepare_max(
    x: Any, axis: int | None = None, *, keepdim: bool = False, out: Any = None
) -> None:
    """As `reduce_sum.prepare`."""
    _MAX.prepare([x, out], (axis, None, keepdim))


reduce_max.prepare = _prepare_max  # type: ignore[attr-defined]
