"""Calls of `fkjit.models`: products of a decode step of up to 64 sequences on Hopper. No part of
the public API: they take what a Decoder has, and nothing else. In a CUDA graph the weight may not
be what kernels still under way write: it is read before they are over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fkjit.errors import ParameterError
from fkjit.ops.gemm.epilogue import SHIPPED
from fkjit.ops.kv.planes import planes
from fkjit.ops.kv.problem import check_pages
from fkjit.ops.op.checks import check_dtype, check_same_dtype, check_shape
from fkjit.ops.op.op import Launch, Op, Output, Request
from fkjit.ops.step.call import Norm, check_indices, product_of, row_step
from fkjit.ops.step.stream_kernel import APPEND, BLOCK_K, HALF, LINEAR, TILES, TOKENS, WHOLE, Tile
from fkjit.runtime.interop import View
from fkjit.spec import Problem

ROWS = 64  # of x, at most
_DTYPES = ("fp16", "bf16")
_HEADS = (64, 128)  # columns of a head, which is a tile
_SMS = 132  # of an H200
_WIDE_TILE = 128 * _SMS  # outputs from which tiles of 128 rows fill the GPU
_FULL = 120  # blocks that fill it
_FEW, _DEEP = 16, 4  # rows of x; k by n, of the product down
_VECTOR = 8  # elements of 16 bytes


class Scaled(NamedTuple):
    """Rows before their norm: x times the norm's weight [m, k]; of parts of x's rows sums of
    squares, fp32 [parts, m], for LayerNorm sums and squares of distances from the parts' means,
    [parts, m, 2]; and the norm."""

    x: Any
    moments: Any
    norm: Norm


def fits(
    rows: int, widths: tuple[int, ...], head_dim: int, activation: str | None, gate: bool
) -> bool:
    """Whether both calls take steps of so many rows, of a model with these widths."""
    known = (activation or "none", gate) in SHIPPED
    return rows <= ROWS and known and head_dim in _HEADS and not any(n % _VECTOR for n in widths)


def streamed_linear(
    x: Any, weight: Any, bias: Any = None, *, activation: str | None = None, gate: bool = False,
    residual: Any = None, norm: Norm | None = None, tile: Tile | None = None,
) -> Any:  # fmt: skip
    """activation(x weightᵀ + bias) [* up] + residual, as `fkjit.linear`.

    Args:
        x: [m, k], up to 64 rows, fp16 or bf16; or `Scaled`: then x's norm is what is multiplied.
            weight: [n, k], with a gate [2 n, k]; bias: its rows, or None.
        norm: of the result, which comes behind it, or None.
        tile: rows of the weight, blocks that share its k, KB for it; None: by the shape.

    Returns: [m, n]; with a norm also the same as `Scaled`.
    Raises ParameterError, ArgumentTypeError: shapes, strides, dtypes.
    """
    op, arrays, options = _linear_call(x, weight, bias, activation, gate, residual, norm, tile)
    if norm is None:
        return op(arrays, (), options)
    out, scaled, moments = op(arrays, (), options)
    return out, Scaled(scaled, moments, norm)


def prepare_linear(
    x: Any, weight: Any, bias: Any, residual: Any, norm: Norm | None, *,
    activation: str | None = None, gate: bool = False,
) -> None:  # fmt: skip
    """Compile and load what `streamed_linear` with the same arguments needs; launches nothing."""
    call = _linear_call(x, weight, bias, activation, gate, residual, norm, None)
    call[0].prepare(*call[1:])


def _linear_call(
    x: Any, weight: Any, bias: Any, activation: str | None, gate: bool, residual: Any,
    norm: Norm | None, tile: Tile | None,
) -> tuple[Op, tuple[Any, ...], tuple[Any, ...]]:  # fmt: skip
    x, of_norm, eps = taken(x)
    weight_behind = None if norm is None else norm.weight
    arrays = (x, weight, bias, *of_norm, residual, weight_behind)
    options = (activation or "none", gate, eps, _kind(norm), tile)
    return _LINEAR if norm is None else _LEAVING, arrays, options


def streamed_append(
    x: Any, weight: Any, bias: Any, cache: Any, slot_mapping: Any, positions: Any, table: Any, *,
    heads_q: int, layer: int, tile: Tile | None = None,
) -> Any:  # fmt: skip
    """q, k and v = x weightᵀ + bias; q and k turned, k and v written to their slots.

    Args: x, weight, bias, tile as for `streamed_linear`, the others as for `normed_append`; heads
    of 64 or 128 columns.

    Returns: q [m, heads_q, head_dim].
    Raises ParameterError, ArgumentTypeError: shapes, strides, dtypes, a cache of fp8 or int8.
    """
    held = planes("streamed_append", cache, layer, None)
    x, of_norm, eps = taken(x)
    arrays = (x, weight, bias, *of_norm, slot_mapping, positions, table, *held.arrays[:2])
    return _APPEND(arrays, (), (heads_q, held.layout, eps, tile))


def prepare_append(
    x: Any, weight: Any, bias: Any, cache: Any, slot_mapping: Any, positions: Any, table: Any, *,
    heads_q: int,
) -> None:  # fmt: skip
    """As `prepare_linear`, for `streamed_append`."""
    held = planes("streamed_append", cache, 0, None)
    x, of_norm, eps = taken(x)
    arrays = (x, weight, bias, *of_norm, slot_mapping, positions, table, *held.arrays[:2])
    _APPEND.prepare(arrays, (heads_q, held.layout, eps, None))


def _kind(norm: Norm | None) -> str:
    return "none" if norm is None else "rms" if norm.bias is None else "layer"


def taken(x: Any) -> tuple[Any, tuple[Any, Any, Any], float]:
    """x as it lies, what the product takes of its norm, and eps."""
    if not isinstance(x, Scaled):
        return x, (None, None, None), 0.0
    norm, centered = x.norm, x.norm.bias is not None
    return x.x, (x.moments, norm.weight if centered else None, norm.bias), norm.eps


# ------------------------------------------------------------------ tiles


def tile_for(n: int, k: int, rows: int | None = None, m: int = ROWS) -> Tile:
    """Of a product of m rows of x with so many rows of the weight, as was fastest in steps of
    Llama-3.2-1B and GPT-2. rows: those that a tile has to have."""
    if m <= _FEW and rows is None and k >= _DEEP * n and _FULL <= 8 * -(-n // 128) <= _SMS:
        return 128, 4, WHOLE
    rows = rows or (128 if n >= _WIDE_TILE // 2 else 64)
    if m <= _FEW and rows == 128 and _FULL <= -(-n // rows) <= _SMS:
        return rows, 1, WHOLE
    tiles, steps = -(-n // rows), -(-k // BLOCK_K)
    share = 1
    while share < 8 and 2 * share * tiles <= _SMS and 2 * share <= steps:
        share *= 2
    return rows, share, HALF


# ------------------------------------------------------------------ checks

Views = Mapping[str, View | None]


def common(call: str, views: Views, eps: float) -> dict[str, Any]:
    """What both say of the product: n counts rows of the weight."""
    seen = {name: view for name, view in views.items() if view is not None}
    named = ("x", "weight", "bias", "x_weight", "x_bias", "residual", "norm_weight")
    floats = [name for name in named if name in seen]
    dtype = check_same_dtype(call, {name: seen[name] for name in floats}, _DTYPES)
    m, n, k = product_of(call, seen["x"], seen["weight"])
    if not 1 <= m <= ROWS or k % _VECTOR:
        raise ParameterError(
            f"{call}: x has shape {(m, k)}; allowed: up to {ROWS} rows of a multiple of {_VECTOR} "
            "columns"
        )
    if "bias" in seen:
        check_shape(call, "bias", seen["bias"], (n,), "here")
    if any(seen[name].pointer % 16 for name in floats):
        raise ParameterError(
            f"{call}: an array does not start on 16 bytes; allowed: a contiguous copy of it"
        )
    norm, parts = _of_x(call, seen, m, k)
    rows = m if norm != "layer" else -(-m // 8) * 8 + 16
    return {
        "m": m, "n": n, "k": k, "dtype": dtype, "eps": eps, "bias": "bias" in seen,
        "parts": parts, "norm": norm, "tokens": next(most for most in TOKENS if most >= rows),
        **{f"{name}_stride": row_step(call, name, seen[name]) for name in ("x", "weight")},
    }  # fmt: skip


def _of_x(call: str, seen: Mapping[str, View], m: int, k: int) -> tuple[str, int]:
    """The norm of x, and how many parts its moments have."""
    if "moments" not in seen:
        return "none", 0
    moments, centered = seen["moments"], "x_bias" in seen
    check_dtype(call, "moments", moments, ("fp32",))
    parts = moments.shape[0]
    shape = (parts, m, 2) if centered else (parts, m)
    check_shape(call, "moments", moments, shape, "[parts, m], with LayerNorm [parts, m, 2], here")
    if not centered:
        return "rms", parts
    for name in ("x_weight", "x_bias"):
        check_shape(call, name, seen[name], (k,), "[k], here")
    return "layer", parts


def tile_of(call: str, tile: Tile | None, usual: Tile, k: int) -> Tile:
    found = usual if tile is None else (*tile,)
    if found not in TILES or found[1] > -(-k // BLOCK_K):
        raise ParameterError(f"{call}: tile={tile!r}; allowed: one of {TILES}, k for each block")
    return found


def params_of(spec: Any, problem: Problem) -> dict[str, Any]:
    return {param.name: problem[param.name] for param in spec.params}


def _check_linear(
    views: Views, activation: str, gate: bool, eps: float, leaves: str, tile: Tile | None
) -> Request:
    call = "streamed_linear"
    problem = {**common(call, views, eps), "activation": activation, "gate": gate}
    n, m = problem["n"] // (2 if gate else 1), problem["m"]
    if (activation, gate) not in SHIPPED or problem["n"] % (16 if gate else 8):
        raise ParameterError(f"{call}: activation={activation!r}, gate={gate} has no kernel")
    residual, norm_weight = views["residual"], views["norm_weight"]
    usual = tile_for(problem["n"], problem["k"], m=m)
    problem |= {
        "n": n, "out_stride": n, "residual": residual is not None, "leaves": leaves,
        "residual_stride": 0 if residual is None else row_step(call, "residual", residual),
        "tile": tile_of(call, tile, usual, problem["k"]),
    }  # fmt: skip
    if residual is not None:
        check_shape(call, "residual", residual, (m, n), "[m, n], here")
    outputs = {"out": Output((m, n), problem["dtype"])}
    if leaves != "none":
        assert norm_weight is not None
        rows = problem["tile"][0]
        check_shape(call, "norm_weight", norm_weight, (n,), "[n], here")
        if leaves == "layer" and n % rows:
            raise ParameterError(f"{call}: {n} columns; allowed: a multiple of {rows}, for a norm")
        outputs["scaled_out"] = Output((m, n), problem["dtype"])
        pair = (2,) if leaves == "layer" else ()
        outputs["moments_out"] = Output((-(-n // rows), m, *pair), "fp32")
    return Request(views, outputs, (Launch(LINEAR, params_of(LINEAR, problem), problem),))


def _check_append(
    views: Views, heads_q: int, layout: str, eps: float, tile: Tile | None
) -> Request:
    call = "streamed_append"
    seen = {name: view for name, view in views.items() if view is not None}
    problem = {**common(call, views, eps), **check_pages(call, seen, layout)}
    heads_kv, dim, m = problem.pop("heads"), problem["head_dim"], problem["m"]
    pages = {name: seen[name] for name in ("k_pages", "v_pages")}
    check_same_dtype(call, {"x": seen["x"], **pages})
    if problem["n"] != (heads_q + 2 * heads_kv) * dim or dim not in _HEADS:
        raise ParameterError(
            f"{call}: weight has {problem['n']} rows; allowed: {heads_q} + 2 * {heads_kv} heads of "
            f"{dim} columns, one of {_HEADS}"
        )
    check_indices(call, seen, m, dim)
    _check_boundaries(call, {**pages, **({"table": seen["table"]} if "table" in seen else {})})
    usual = tile_for(problem["n"], problem["k"], dim)
    found = tile_of(call, tile, usual, problem["k"])
    if found[0] != dim:
        raise ParameterError(f"{call}: tile={tile!r}; allowed: {dim} rows, as a head has")
    words = 2 if "positions" in seen and seen["positions"].dtype == "int64" else 1
    problem |= {
        "heads_q": heads_q, "heads_kv": heads_kv, "rope": "table" in seen,
        "position_words": words, "tile": found,
        "table_rows": seen["table"].shape[0] if "table" in seen else 0,
    }  # fmt: skip
    out = Output((m, heads_q, dim), problem["dtype"])
    return Request(views, {"out_q": out}, (Launch(APPEND, params_of(APPEND, problem), problem),))


def _check_boundaries(call: str, views: Mapping[str, View]) -> None:
    """Four columns are read and written at a time."""
    for name, view in views.items():
        if view.pointer % 16 or any(step % 4 for step in view.strides[:-1]):
            raise ParameterError(
                f"{call}: {name} has strides {tuple(view.strides)}; allowed: from 16 bytes on, "
                "heads of multiples of four columns"
            )


INPUTS = ("x", "weight", "bias", "moments", "x_weight", "x_bias")
_OPTIONAL = INPUTS[2:]
_LINEAR, _LEAVING = (
    Op(
        "streamed_linear", inputs=(*INPUTS, "residual", "norm_weight"), outputs=outputs,
        check=_check_linear, optional=(*_OPTIONAL, "residual", "norm_weight"),
    )
    for outputs in (("out",), ("out", "scaled_out", "moments_out"))
)  # fmt: skip
_APPEND = Op(
    "streamed_append",
    inputs=(*INPUTS, "slot_mapping", "positions", "table", "k_pages", "v_pages"),
    outputs=("out_q",), check=_check_append, optional=(*_OPTIONAL, "positions", "table"),
    written=("k_pages", "v_pages"),
)  # fmt: skip
