"""Calls of `fkjit.models`: launches of a decode step of up to eight tokens. No part of the public
API: they take what a Decoder has, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fkjit.errors import ParameterError
from fkjit.ops.gemm.epilogue import SHIPPED
from fkjit.ops.kv.planes import planes
from fkjit.ops.kv.problem import check_pages
from fkjit.ops.op.checks import check_dtype, check_same_dtype, check_shape
from fkjit.ops.op.op import Launch, Op, Output, Request
from fkjit.ops.op.shapes import rows_of
from fkjit.ops.step.kernels import APPEND, LINEAR, ROWS, VECTOR, room_for
from fkjit.runtime.interop import View
from fkjit.spec import KernelSpec, Problem

_TILE = (16, 8, 4)
_DTYPES = ("fp16", "bf16")
_HALF = 8  # columns of a half of a head come by so many


class Norm(NamedTuple):
    """weight, bias [k]: of LayerNorm; without a bias RMSNorm's."""

    weight: Any
    bias: Any
    eps: float


def fits(rows: int, k: int, head_dim: int, activation: str | None, gate: bool) -> bool:
    """Whether both calls take steps of so many rows, of a model with these widths."""
    aligned = k % VECTOR == 0 and head_dim % (2 * _HALF) == 0
    known = (activation or "none", gate) in SHIPPED
    return rows <= ROWS and aligned and known and room_for(rows, k) is not None


def normed_linear(
    x: Any, weight: Any, bias: Any, norm: Norm, *, activation: str | None = None, gate: bool = False
) -> Any:
    """activation(norm(x) weightᵀ + bias), in one launch; with a gate as `fkjit.linear`.

    Args:
        x: [m, k], up to eight rows, fp16 or bf16. weight: [n, k], with a gate [2 n, k]; bias: its
            rows, or None. In a CUDA graph weight, bias and norm may not be what the kernel before
            this one writes: they are read before it is over.

    Returns: [m, n]. norm(x) is rounded to x's dtype, as `rms_norm` and `layer_norm` give it.
    Raises ParameterError, ArgumentTypeError: shapes, strides, dtypes.
    """
    arrays = (x, weight, bias, norm.weight, norm.bias)
    return _LINEAR(arrays, (), (activation or "none", gate, norm.eps))


def normed_append(
    x: Any, weight: Any, bias: Any, norm: Norm, cache: Any, slot_mapping: Any, positions: Any,
    table: Any, *, heads_q: int, layer: int,
) -> Any:  # fmt: skip
    """q, k and v = norm(x) weightᵀ + bias; q and k turned, k and v written to their slots.

    Args:
        x, weight, bias, norm: as for `normed_linear`; rows of the weight are heads of q, then of k,
            then of v.
        cache, slot_mapping, layer: as for `fkjit.kv_append`; slots int32. positions: [m] int32 or
            int64, and table, of `fkjit.rope_table` with as many columns as a head; or None, None:
            nothing turns.

    Returns: q [m, heads_q, head_dim].
    Raises ParameterError, ArgumentTypeError: shapes, strides, dtypes, a cache of fp8 or int8.
    """
    held = planes("normed_append", cache, layer, None)
    arrays = (x, weight, bias, norm.weight, norm.bias, slot_mapping, positions, table)
    options = (heads_q, held.layout, norm.eps)
    return _APPEND((*arrays, *held.arrays[:2]), (), options)


def prepare_linear(x: Any, weight: Any, bias: Any, norm: Norm, **options: Any) -> None:
    """Compile and load what `normed_linear` with the same arguments needs; launches nothing."""
    said = (options.get("activation") or "none", options.get("gate", False), norm.eps)
    _LINEAR.prepare((x, weight, bias, norm.weight, norm.bias), said)


def prepare_append(
    x: Any, weight: Any, bias: Any, norm: Norm, cache: Any, slot_mapping: Any, positions: Any,
    table: Any, *, heads_q: int,
) -> None:  # fmt: skip
    """As `prepare_linear`, for `normed_append`."""
    held = planes("normed_append", cache, 0, None)
    arrays = (x, weight, bias, norm.weight, norm.bias, slot_mapping, positions, table)
    _APPEND.prepare((*arrays, *held.arrays[:2]), (heads_q, held.layout, norm.eps))


# ------------------------------------------------------------------ checks

_Views = Mapping[str, View | None]


def _common(call: str, views: _Views, eps: float) -> dict[str, Any]:
    """What both say of the product: n counts rows of the weight."""
    seen = {name: view for name, view in views.items() if view is not None}
    floats = ("x", "weight", "bias", "norm_weight", "norm_bias")
    dtype = check_same_dtype(call, {n: seen[n] for n in floats if n in seen}, _DTYPES)
    m, n, k = product_of(call, seen["x"], seen["weight"])
    if not 1 <= m <= ROWS or k % VECTOR or room_for(m, k) is None:
        raise ParameterError(
            f"{call}: x has shape {(m, k)}; allowed: up to {ROWS} rows of a multiple of {VECTOR} "
            "columns, all of them in a block's shared memory"
        )
    for name, wide in (("bias", n), ("norm_weight", k), ("norm_bias", k)):
        if name in seen:
            check_shape(call, name, seen[name], (wide,), "here")
            rows_of(call, name, seen[name])
    return {
        "m": m, "n": n, "k": k, "dtype": dtype, "eps": eps, "bias": "bias" in seen,
        "norm": "layer" if "norm_bias" in seen else "rms",
        **{f"{name}_stride": row_step(call, name, seen[name]) for name in ("x", "weight")},
        "aligned": all(seen[n].pointer % 16 == 0 for n in floats if n in seen and n != "bias"),
    }  # fmt: skip


def product_of(call: str, x: View, weight: View) -> tuple[int, int, int]:
    """m, n and k of x [m, k] and weight [n, k]."""
    if len(x.shape) != 2 or len(weight.shape) != 2 or x.shape[1] != weight.shape[1]:
        raise ParameterError(
            f"{call}: x has shape {tuple(x.shape)}, weight {tuple(weight.shape)}; allowed: [m, k] "
            "and [n, k]"
        )
    return x.shape[0], weight.shape[0], x.shape[1]


def row_step(call: str, name: str, view: View) -> int:
    """Elements from a row to the next."""
    step = rows_of(call, name, view)[2]
    if step % VECTOR:
        raise ParameterError(
            f"{call}: {name} has rows {step} elements apart; allowed: a multiple of {VECTOR}"
        )
    return step


def _launch(call: str, spec: KernelSpec, problem: Problem) -> Launch:
    if not problem["aligned"]:
        raise ParameterError(
            f"{call}: an array does not start on 16 bytes; allowed: a contiguous copy of it"
        )
    named = {param.name: problem.get(param.name) for param in spec.params}
    room = room_for(problem["m"], problem["k"])
    return Launch(spec, {**named, "room": room, "tile": _TILE}, problem)


def _check_linear(views: _Views, activation: str, gate: bool, eps: float) -> Request:
    call = "normed_linear"
    problem = {**_common(call, views, eps), "activation": activation, "gate": gate}
    if (activation, gate) not in SHIPPED or (gate and problem["n"] % 2):
        raise ParameterError(f"{call}: activation={activation!r}, gate={gate} has no kernel")
    problem["n"] //= 2 if gate else 1
    problem["out_stride"] = problem["n"]
    out = Output((problem["m"], problem["n"]), problem["dtype"])
    return Request(views, {"out": out}, (_launch(call, LINEAR, problem),))


def _check_append(views: _Views, heads_q: int, layout: str, eps: float) -> Request:
    call = "normed_append"
    seen = {name: view for name, view in views.items() if view is not None}
    problem = {**_common(call, views, eps), **check_pages(call, seen, layout)}
    heads_kv, dim, m = problem.pop("heads"), problem["head_dim"], problem["m"]
    pages = {name: seen[name] for name in ("k_pages", "v_pages")}
    check_same_dtype(call, {"x": seen["x"], **pages})
    if problem["n"] != (heads_q + 2 * heads_kv) * dim or dim % (2 * _HALF):
        raise ParameterError(
            f"{call}: weight has {problem['n']} rows; allowed: {heads_q} + 2 * {heads_kv} heads of "
            f"{dim} columns, a multiple of {2 * _HALF}"
        )
    check_indices(call, seen, m, dim)
    words = 2 if "positions" in seen and seen["positions"].dtype == "int64" else 1
    problem |= {
        "heads_q": heads_q, "heads_kv": heads_kv, "rope": "table" in seen,
        "position_words": words,
        "table_rows": seen["table"].shape[0] if "table" in seen else 0,
    }  # fmt: skip
    out = Output((m, heads_q, dim), problem["dtype"])
    return Request(views, {"out_q": out}, (_launch(call, APPEND, problem),))


def check_indices(call: str, seen: Mapping[str, View], m: int, dim: int) -> None:
    check_dtype(call, "slot_mapping", seen["slot_mapping"], ("int32",))
    check_shape(call, "slot_mapping", seen["slot_mapping"], (m,), "[m], here")
    if ("positions" in seen) != ("table" in seen):
        raise ParameterError(f"{call}: positions and table; allowed: both, or neither")
    for name, view in seen.items():
        if name in ("slot_mapping", "positions", "table"):
            rows_of(call, name, view)
    if "table" in seen:
        check_dtype(call, "positions", seen["positions"], ("int32", "int64"))
        check_shape(call, "positions", seen["positions"], (m,), "[m], here")
        check_dtype(call, "table", seen["table"], ("fp32",))
        check_shape(call, "table", seen["table"], (seen["table"].shape[0], dim), "here")
        if rows_of(call, "table", seen["table"])[2] != dim:
            raise ParameterError(f"{call}: table has gaps between its rows; allowed: none")


_INPUTS = ("x", "weight", "bias", "norm_weight", "norm_bias")
_LINEAR = Op(
    "normed_linear", inputs=_INPUTS, outputs=("out",), check=_check_linear,
    optional=("bias", "norm_bias"),
)  # fmt: skip
_APPEND = Op(
    "normed_append",
    inputs=(*_INPUTS, "slot_mapping", "positions", "table", "k_pages", "v_pages"),
    outputs=("out_q",), check=_check_append,
    optional=("bias", "norm_bias", "positions", "table"), written=("k_pages", "v_pages"),
)  # fmt: skip
