"""What can be wrong with a call of LayerNorm or RMSNorm, and the launches of one that is right."""

from __future__ import annotations

import math
from collections.abc import Mapping
from math import prod
from typing import Any

from fkjit.arguments import shown
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.ops.norm import kernels as forward
from fkjit.ops.norm import kernels_backward as backward
from fkjit.ops.norm.kernels import size
from fkjit.ops.op.checks import check_dtype, check_output, check_same_dtype, check_shape
from fkjit.ops.op.op import Launch, Output, Request, arch_of
from fkjit.ops.op.request import Delegate
from fkjit.ops.op.shapes import check_columns, rows_of
from fkjit.runtime.device import multiprocessors
from fkjit.runtime.interop import CPU, View
from fkjit.spec import Problem

Views = Mapping[str, View | None]
MAX_COLUMNS = 1 << 24  # counts are fp32
MAX_ROWS = 1 << 30
_CPU_BLOCKS = 4  # of a "multiprocessor" of the interpreter, so that blocks take several rows


def request(
    op: str, views: Views, options: tuple[Any, Any], statistics: bool, copied: Delegate
) -> Request:
    """Of a forward call. `statistics`: mean and rstd are wanted too, for the backward. copied:
    answers it where rows or weights have to be brought into a form that kernels take."""
    x, residual, out, total = (views[name] for name in forward.STRIDED)
    eps, offset = options
    assert x is not None
    weight, bias = views["weight"], views["bias"]
    dtype = check_same_dtype(op, {"x": x, "residual": residual})
    shape = tuple(x.shape)
    _check_width(op, shape)
    if residual is not None:
        check_shape(op, "residual", residual, shape, "x's")
    weight_dtype = _check_weights(op, views, dtype, shape[-1])
    check_output(op, out, shape, dtype)
    if total is not None and residual is None:
        raise ParameterError(f"{op}: sum is given without a residual; leave it out")
    check_output(op, total, shape, dtype, "sum")
    rows = {"x": x, "residual": residual, "out": out, "sum": total}
    if _check_offset(op, offset, views["weight"]) or not _are_apart_alike(op, rows):
        _check_eps(op, eps)
        return Request(views, {}, (), delegate=copied)
    problem = _problem(op, rows, dtype, weight_dtype, shape)
    problem["eps"] = _check_eps(op, eps)
    problem["residual"] = residual is not None
    problem["affine"] = "both" if bias else "weight" if weight else "none"
    stats = Output(shape[:-1], "fp32") if statistics else None
    outputs = {
        "out": Output(shape, dtype, out),
        "sum": None if residual is None else Output(shape, dtype, total),
        "mean": stats if op == "layer_norm" else None,
        "rstd": stats,
    }
    inputs = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    return Request(inputs, outputs, () if 0 in shape else (_launch(op, problem, views),))


def _launch(op: str, problem: dict[str, Any], views: Views) -> Launch:
    x = views["x"]
    assert x is not None
    dtype, vector, arch = problem["dtype"], _vector(problem, views), arch_of(x)
    sizes = problem["columns"], problem["rows"]
    spec, free = forward.choose(op, dtype, *sizes, vector, "cluster" in arch.features)
    params = {"dtype": dtype, "weight_dtype": problem["weight_dtype"], "vector": vector, **free}
    params = forward.parameters(spec, params, problem, arch)
    problem["most"] = _most(op, x, params.get("tile"))
    return Launch(spec, params, problem)


def gradient_request(
    op: str, views: Views, weight: bool, bias: bool, tile: forward.Tile | None
) -> Request:
    """Of the backward: dx, and dweight and dbias where they are wanted. Arrays are our own.

    `tile`: of the rows that fit into registers; None: the one chosen for them.
    """
    x, like = views["x"], views["like"]
    assert x is not None
    shape, dtype = tuple(x.shape), x.dtype
    kind = dtype if like is None else like.dtype
    rows = {name: views[name] for name in ("dy", "dsum", "x")}
    problem = _problem(op, rows, dtype, kind, shape)
    problem["residual"] = views["dsum"] is not None
    launches = _gradient_launches(op, problem, views, tile, weight or bias)
    parts = Output((problem["parts"], shape[-1]), "fp32", returned=False)
    outputs = {
        "dx": Output(shape, dtype),
        "dweight": Output(shape[-1:], kind) if weight else None,
        "dbias": Output(shape[-1:], kind) if bias else None,
        "dweight_parts": parts if weight else None,
        "dbias_parts": parts if bias else None,
    }
    return Request(dict(views), outputs, launches)


def _problem(
    op: str, rows: Views, dtype: str, weight_dtype: str, shape: tuple[int, ...]
) -> dict[str, Any]:
    """Sizes, and strides of the `rows` that are there; other arrays of rows have no gaps."""
    count = prod(shape[:-1])
    return {
        "dtype": dtype,
        "weight_dtype": weight_dtype,
        "rows": count,
        "columns": shape[-1],
        "stride": shape[-1],
        "strides": _strides(op, rows, count, shape[-1]),
    }


def _kinds(problem: Problem) -> dict[str, str]:
    return {name: problem[name] for name in ("dtype", "weight_dtype")}


def _gradient_launches(
    op: str, problem: dict[str, Any], views: Views, tile: forward.Tile | None, weights: bool
) -> tuple[Launch, ...]:
    x, vector = views["x"], _vector(problem, views)
    assert x is not None
    kinds, processors = {**_kinds(problem), "vector": vector}, _processors(x)
    tile = tile or backward.tile(op, kinds, problem, arch_of(x))
    if tile is not None:
        problem["parts"] = backward.parts_of(tile, problem["rows"], processors)
        rows = [Launch(backward.BACKWARD[op], {**kinds, "tile": tile}, problem)]
    elif backward.takes_staged(op, kinds, problem, arch_of(x)):
        problem["parts"] = min(problem["rows"], processors)
        params = {**_kinds(problem), "tile": backward.STAGED_TILE}
        rows = [Launch(backward.BACKWARD_STAGED[op], params, problem)]
    else:
        problem["parts"] = backward.parts_of_wide(problem, processors)
        threads = {"threads": backward.WIDE_THREADS}
        rows = [Launch(backward.BACKWARD_WIDE[op], {**kinds, **threads}, problem)]
        if weights:
            params = {
                "dtype": problem["dtype"], "vector": vector, "threads": backward.PART_THREADS,
            }  # fmt: skip
            rows.append(Launch(backward.WEIGHT_PARTS[op], params, problem))
    if weights:
        params = {"weight_dtype": problem["weight_dtype"], "warps": backward.SUM_WARPS}
        rows.append(Launch(backward.SUM_PARTS[op], params, problem))
    return tuple(rows)


def _check_width(op: str, shape: tuple[int, ...]) -> None:
    if not shape or shape[-1] > MAX_COLUMNS or prod(shape[:-1]) > MAX_ROWS:
        raise ParameterError(
            f"{op}: x has shape {shape}; allowed: [..., columns] with up to {MAX_COLUMNS:,} "
            f"columns and {MAX_ROWS:,} rows"
        )


def _check_weights(op: str, views: Views, dtype: str, columns: int) -> str:
    """The dtype of weight and bias."""
    kinds = (dtype,) if dtype == "fp32" else (dtype, "fp32")
    given = {"weight": views["weight"], "bias": views["bias"]}
    for name, view in given.items():
        if view is not None:
            check_dtype(op, name, view, kinds)
            check_shape(op, name, view, (columns,), "the width of x")
            rows_of(op, name, view)
    return check_same_dtype(op, given) or dtype


def _check_eps(op: str, eps: Any) -> float:
    try:
        if isinstance(eps, (str, bytes, bool)) or getattr(eps, "requires_grad", False):
            raise TypeError
        value = float(eps)
    except (TypeError, ValueError, OverflowError):
        raise ArgumentTypeError(f"{op}: eps={eps!r} is not a plain number") from None
    if not 0 <= value < math.inf:
        raise ParameterError(f"{op}: eps={value} is not a finite number from 0")
    return value


def _check_offset(op: str, offset: Any, weight: View | None) -> float:
    """What is added to the weight."""
    try:
        if isinstance(offset, (str, bytes, bool)) or getattr(offset, "requires_grad", False):
            raise TypeError
        value = float(offset)
    except (TypeError, ValueError, OverflowError):
        raise ArgumentTypeError(
            f"{op}: weight_offset={shown(offset)} is not a plain number"
        ) from None
    if not abs(value) < math.inf or (value and weight is None):
        raise ParameterError(
            f"{op}: weight_offset={value}; allowed: a finite number, 0 without a weight"
        )
    return value


def _are_apart_alike(op: str, rows: Views) -> bool:
    """Whether the rows of each array are at one distance."""
    for name, view in rows.items():
        if view is not None:
            check_columns(op, name, view)
            try:
                rows_of(op, name, view)
            except ParameterError:
                return False
    return True


def _strides(op: str, views: Views, rows: int, columns: int) -> dict[str, int]:
    """Elements from one row to the next, by name."""
    found = {n: rows_of(op, n, view)[2] for n, view in views.items() if view is not None}
    return found if rows > 1 else dict.fromkeys(found, columns)


def _vector(problem: Problem, views: Views) -> bool:
    """Whether all rows start on 16-byte boundaries and are whole vectors long."""
    whole = size(problem["dtype"])
    if any([step % whole for step in (problem["columns"], *problem["strides"].values())]):
        return False
    return not any([view.pointer % 16 for view in views.values() if view is not None])


def _processors(x: View) -> int:
    return 1 if x.device == CPU else multiprocessors(x.device)


def _most(op: str, x: View, tile: forward.Tile | None) -> int | None:
    """Blocks (or clusters) that run at once, where they take several rows each."""
    if tile not in forward.PIPELINED:
        return None
    assert tile is not None
    return (
        _CPU_BLOCKS if x.device == CPU else multiprocessors(x.device) * forward.resident(op, tile)
    )


def check(op: str, statistics: bool, copied: Delegate) -> Any:
    """The `check` of a forward `Op`."""

    def checked(views: Views, eps: Any, weight_offset: Any = 0.0) -> Request:
        return request(op, views, (eps, weight_offset), statistics, copied)

    return checked


def check_gradient(op: str, tile: forward.Tile | None) -> Any:
    """The `check` of a backward `Op`."""

    def checked(views: Views, weight: bool, bias: bool) -> Request:
        return gradient_request(op, views, weight, bias, tile)

    return checked
