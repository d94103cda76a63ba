"""Sums, means and maxima: of everything, and of rows."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import fkjit
from fkjit.arch import Arch
from fkjit.ops.reduce import kernels as kernels
from fkjit.spec import KernelSpec, Params, Problem

from ..core.accuracy import LIMITS, Expected
from ..core.kernels import arch_of
from ..core.op import Arrays, Op, Prepared
from .peers_reductions import PEERS

_CALLS = {"sum": fkjit.reduce_sum, "mean": fkjit.reduce_mean, "max": fkjit.reduce_max}
_LIMITS = {**LIMITS, "fp32": 1e-5}  # of sums near their usual size: rows add up to no small number


def problem(
    kind: str, rows: int, columns: int, dtype: str = "fp32", axis: int | None = None
) -> dict[str, Any]:
    """`kind` of everything (axis None, one row), or of each row (-1)."""
    return {
        "kind": kind,
        "axis": axis,
        "operation": "max" if kind == "max" else "sum",
        "dtype": dtype,
        "out_dtype": dtype,
        "rows": rows,
        "segments": 1,
        "columns": columns,
        "row_stride": columns,
        "column_stride": 1,
        "vector": columns * (4 if dtype == "fp32" else 2) % 16 == 0,
        "shift": 0,
        "divisor": float(columns) if kind == "mean" else 1.0,
    }


def label(p: Problem) -> str:
    """ "fp32 sum 2^28", "bf16 max 16384x4096"."""
    n = p["columns"]
    if p["axis"] == -1:
        return f"{p['dtype']} {p['kind']} {p['rows']}x{n}"
    size = f"2^{n.bit_length() - 1}" if n & (n - 1) == 0 else str(n)
    return f"{p['dtype']} {p['kind']} {size}"


_ROWS = ((1 << 20, 128), (1 << 17, 1024), (16_384, 4096), (4096, 16_384), (64, 1 << 20))
SETS: dict[str, list[dict[str, Any]]] = {
    "default": [
        *(problem("sum", 1, 1 << e) for e in (16, 20, 24, 28)),
        problem("max", 1, 1 << 28),
        problem("sum", 1, 1 << 28, "bf16"),
        *(problem("sum", rows, columns, axis=-1) for rows, columns in _ROWS),
    ],
    "quick": [problem("sum", 1, 1 << 20), problem("sum", 16_384, 4096, axis=-1)],
    "sizes": [problem("sum", 1, 1 << e) for e in range(10, 31, 2)],
    "rows": [
        problem(kind, rows, columns, dtype, -1)
        for kind in ("mean", "max")
        for dtype in ("fp32", "bf16")
        for rows, columns in _ROWS
    ],
}


def inputs(problem: Problem, device: Any) -> Arrays:
    """Fresh |N(0, 1)| in [rows, columns], or [columns] where everything is reduced.

    Positive: the error of a sum is measured against its size, which is then that of its numbers.
    """
    torch = device.torch
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[problem["dtype"]]
    shape = (problem["rows"], problem["columns"]) if problem["axis"] == -1 else problem["columns"]
    return {"x": torch.randn(shape, dtype=dtype, device=getattr(device, "place", "cuda")).abs_()}


def expected(problem: Problem, arrays: Arrays) -> Expected:
    """The whole result, from float64; in pieces, since it takes much memory."""
    x, dims = arrays["x"], (-1,) if problem["axis"] == -1 else (0,)
    pieces = x.split(1 << 24 if x.ndim == 1 else max(1, (1 << 24) // problem["columns"]))
    torch = import_module("torch")
    if problem["kind"] == "max":
        parts = [piece.double().amax(dims) for piece in pieces]
    else:
        parts = [piece.double().sum(dims) / problem["divisor"] for piece in pieces]
    if x.ndim == 2:
        whole = torch.cat(parts)
    else:
        whole = torch.stack(parts).amax(0) if problem["kind"] == "max" else sum(parts)
    return Expected([(..., whole)], _LIMITS[problem["dtype"]])


def ours(problem: Problem, arrays: Arrays) -> Prepared:
    """The public call."""
    x, axis, call = arrays["x"], problem["axis"], _CALLS[problem["kind"]]
    variant = kernels.choose(problem, arch_of(x))[:2] if x.is_cuda else None
    return Prepared(lambda: call(x, axis), variant=variant)


def choose(spec: KernelSpec, problem: Problem, arch: Arch) -> Params:
    """What the public call would take, or this kernel as it is tuned."""
    found, params, _, _ = kernels.choose(problem, arch)
    if found is spec:
        return params
    fixed = {name: problem[name] for name in ("dtype", "out_dtype", "operation", "vector")}
    gaps = {} if spec is kernels.LANES else {"gaps": False}
    return next(p for p in spec.variants(arch) if {**p, **fixed, **gaps} == p)


def launch(
    spec: KernelSpec, params: Params, problem: Problem, arrays: Arrays, device: Any
) -> Prepared:
    """With what the blocks of a row meet in."""
    torch, x = import_module("torch"), arrays["x"]
    partial, counters = kernels.meeting(params, problem) if spec is kernels.BLOCKS else (0, 0)
    named = {
        "x": x,
        "out": x.new_empty(problem["rows"]),
        "workspace": x.new_empty(max(partial, 1), dtype=torch.float32),
        "counters": x.new_zeros(max(counters, 1), dtype=torch.int32),
    }
    if spec is kernels.LANES:
        named = {name: named[name] for name in ("x", "out")}
    shape = x.shape[:-1] if problem["axis"] == -1 else ()
    return Prepared(
        lambda: fkjit.launch(spec, params, problem, named),
        lambda _: named["out"].reshape(shape),
        variant=(spec, params),
    )


OP = Op(
    name="reduce",
    sets=SETS,
    label=label,
    inputs=inputs,
    expected=expected,
    ours=ours,
    choose=choose,
    launch=launch,
    peers=PEERS,
)
