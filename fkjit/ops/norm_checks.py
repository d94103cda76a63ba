"""What can be wrong with a call of LayerNorm or RMSNorm, and the launches of one that is right."""

from __future__ import annotations

import math
from collections.abc import Mapping
from math import prod
from typing import Any

from fkjit.device import multiprocessors
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.interop import CPU, View
from fkjit.ops import norm_backward_kernels as backward
from fkjit.ops import norm_kernels as forward
from fkjit.ops.norm_problem import size
from fkjit.ops.simple import Launch, Output, Request, arch_of
from fkjit.ops.simple_checks import check_dtype, check_output, check_same_dtype, check_shape
from fkjit.ops.simple_shapes import rows_of
from fkjit.spec import Problem

Views = Mapping[str, View | None]
MAX_COLUMNS = 1 << 24  # counts are fp32
MAX_ROWS = 1 << 30
_CPU_BLOCKS = 4  # of a "multiprocessor" of the interpreter, so that blocks take several rows


def request(op: str, views: Views, eps: Any, statistics: bool) -> Request:
    """Of a forward call. `statistics`: mean and rstd are wanted too, for the backward."""
    x, residual, out = views["x"], views["residual"], views["out"]
    assert x is not None
    dtype = check_same_dtype(op, {"x": x, "residual": residual})
    shape = tuple(x.shape)
    _check_width(op, shape)
    if residual is not None:
        check_shape(op, "residual", residual, shape, "x's")
    weight_dtype = _check_weights(op, views, dtype, shape[-1])
    check_output(op, out, shape, dtype)
    eps = _check_eps(op, eps)
    given = [views[name] for name in ("weight", "bias") if views.get(name) is not None]
    stats = Output(shape[:-1], "fp32") if statistics else None
    outputs = {
        "out": Output(shape, dtype, out),
        "sum": None if residual is None else Output(shape, dtype),
        "mean": stats if op == "layer_norm" else None,
        "rstd": stats,
    }
    inputs = {name: views[name] for name in views if name not in outputs}
    rows = _rows(op, {"x": x, "residual": residual, "out": out}, shape)
    if 0 in shape:
        return Request(inputs, outputs, ())
    strides = {**dict.fromkeys(forward.STRIDED, shape[-1]), **rows}
    problem = {
        "dtype": dtype,
        "weight_dtype": weight_dtype,
        "rows": prod(shape[:-1]),
        "columns": shape[-1],
        "stride": shape[-1],
        "strides": strides,
        "affine": ("none", "weight", "both")[len(given)],
        "residual": residual is not None,
        "eps": eps,
    }
    vector = _vector(dtype, problem, [v for v in views.values() if v is not None])
    clusters = "cluster" in arch_of(x).features
    spec, tuned = forward.choose(op, dtype, shape[-1], problem["rows"], vector, clusters)
    problem["most"] = _most(x, tuned.get("tile"))
    params = {"dtype": dtype, "weight_dtype": weight_dtype, "vector": vector, **tuned}
    return Request(inputs, outputs, (Launch(spec, params, problem),))


def gradient_request(op: str, views: Views, weight: bool, bias: bool) -> Request:
    """Of the backward: dx, and dweight and dbias where they are wanted. Arrays are our own."""
    x = views["x"]
    assert x is not None
    shape, dtype = tuple(x.shape), x.dtype
    columns = shape[-1]
    scale = views["weight"]
    kind = views["like"].dtype if views["like"] is not None else dtype
    strides = _rows(op, {name: views[name] for name in ("dy", "dsum", "x")}, shape)
    problem = {
        "dtype": dtype,
        "weight_dtype": kind,
        "rows": prod(shape[:-1]),
        "columns": columns,
        "stride": columns,
        "strides": {**dict.fromkeys(backward.STRIDED, columns), **strides},
        "affine": "none" if scale is None else "weight",
        "residual": views["dsum"] is not None,
    }
    vector = _vector(dtype, problem, [v for v in views.values() if v is not None])
    launches = _gradient_launches(op, problem, vector, _processors(x), weight or bias)
    parts = Output((problem["parts"], columns), "fp32", returned=False)
    outputs = {
        "dx": Output(shape, dtype),
        "dweight": Output((columns,), kind) if weight else None,
        "dbias": Output((columns,), kind) if bias else None,
        "dweight_parts": parts if weight else None,
        "dbias_parts": parts if bias else None,
    }
    return Request(dict(views), outputs, launches)


def _gradient_launches(
    op: str, problem: dict[str, Any], vector: bool, processors: int, weights: bool
) -> tuple[Launch, ...]:
    kinds = {"dtype": problem["dtype"], "weight_dtype": problem["weight_dtype"], "vector": vector}
    tile = backward.choose(problem["dtype"], problem["columns"], vector)
    if tile is not None:
        problem["parts"] = backward.parts_of(tile, problem["rows"], processors)
        rows = [Launch(backward.BACKWARD[op], {**kinds, "tile": tile}, problem)]
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
    given = {n: views[n] for n in ("weight", "bias") if views.get(n) is not None}
    kinds = (dtype,) if dtype == "fp32" else (dtype, "fp32")
    for name, view in given.items():
        assert view is not None
        check_dtype(op, name, view, kinds)
        check_shape(op, name, view, (columns,), "the width of x")
        rows_of(op, name, view)
    return check_same_dtype(op, given) if given else dtype


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


def _rows(op: str, views: Views, shape: tuple[int, ...]) -> dict[str, int]:
    """Elements from one row to the next, by name."""
    found = {n: rows_of(op, n, view)[2] for n, view in views.items() if view is not None}
    return found if prod(shape[:-1]) > 1 else dict.fromkeys(found, shape[-1])


def _vector(dtype: str, problem: Problem, views: list[View]) -> bool:
    """Whether all rows start on 16-byte boundaries and are whole vectors long."""
    lengths = (problem["columns"], *problem["strides"].values())
    aligned = all(view.pointer % 16 == 0 for view in views)
    return aligned and all(length % size(dtype) == 0 for length in lengths)


def _processors(x: View) -> int:
    return 1 if x.device == CPU else multiprocessors(x.device)


def _most(x: View, tile: forward.Tile | None) -> int | None:
    """Blocks (or clusters) that run at once, where they take several rows each."""
    if tile not in forward.PIPELINED:
        return None
    return _CPU_BLOCKS if x.device == CPU else multiprocessors(x.device) * forward.PIPELINED[tile]


def check(op: str, statistics: bool) -> Any:
    """The `check` of a forward `Op`."""

    def checked(views: Views, eps: Any) -> Request:
        return request(op, views, eps, statistics)

    return checked


def check_gradient(op: str) -> Any:
    """The `check` of a backward `Op`."""

    def checked(views: Views, weight: bool, bias: bool) -> Request:
        return gradient_request(op, views, weight, bias)

    return checked
