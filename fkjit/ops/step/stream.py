"""Calls of `fkjit.models`: products of a decode step of up to 64 sequences on Hopper. No part of the
public API: they take what a Decoder has, and nothing else. In a CUDA graph the weight may not be
what kernels still under way write: it is read before they are over.
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
from fkjit.ops.op.shapes import rows_of
from fkjit.ops.step.call import check_indices, row_step
from fkjit.ops.step.stream_kernel import APPEND, BLOCK_K, HALF, LINEAR, TILES, TOKENS, Tile
from fkjit.runtime.interop import View
from fkjit.spec import Problem

ROWS = TOKENS[-1]  # of x, at most
_DTYPES = ("fp16", "bf16")
_HEADS = (64, 128)  # columns of a head, which is a tile
_SMS = 132  # of an H200
_WIDE_TILE = 128 * _SMS  # outputs from which tiles of 128 rows fill the GPU
_VECTOR = 8  # elements of 16 bytes


class Scaled(NamedTuple):
    """Rows before their RMSNorm: x times the norm's weight [m, k], and sums of squares of parts of
    x's rows, fp32 [parts, m]. A norm's factor is 1 / sqrt(mean of squares + eps)."""

    x: Any
    squares: Any
    eps: float


def fits(
    rows: int, widths: tuple[int, ...], head_dim: int, activation: str | None, gate: bool
) -> bool:
    """Whether both calls take steps of so many rows, of a model with these widths."""
    known = (activation or "none", gate) in SHIPPED
    return rows <= ROWS and known and head_dim in _HEADS and not any(n % _VECTOR for n in widths)


def streamed_linear(
    x: Any, weight: Any, bias: Any = None, *, activation: str | None = None, gate: bool = False,
    residual: Any = None, norm_weight: Any = None, tile: Tile | None = None,
) -> Any:  # fmt: skip
    """activation(x weightᵀ + bias) [* up] + residual, as `fkjit.linear`.

    Args:
        x: [m, k], up to 64 rows, fp16 or bf16; or `Scaled`: then each row of sums is times its
            norm's factor. weight: [n, k], with a gate [2 n, k]; bias: its rows, or None.
        norm_weight: [n] of an RMSNorm of the result, or None.
        tile: rows of the weight, blocks that share its k, KB for it; None: by the shape.

    Returns: [m, n]; with a norm_weight also that times the result, and the sums of squares of its
    parts: what `Scaled` takes.
    Raises ParameterError, ArgumentTypeError: shapes, strides, dtypes.
    """
    x, squares, eps = x if isinstance(x, Scaled) else (x, None, 0.0)
    arrays = (x, weight, bias, squares, residual, norm_weight)
    options = (activation or "none", gate, eps, norm_weight is not None, tile)
    return (_NORMED if norm_weight is not None else _LINEAR)(arrays, (), options)


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
    x, squares, eps = x if isinstance(x, Scaled) else (x, None, 0.0)
    arrays = (x, weight, bias, squares, slot_mapping, positions, table, *held.arrays[:2])
    return _APPEND(arrays, (), (heads_q, held.layout, eps, tile))


# ------------------------------------------------------------------ tiles


def tile_for(n: int, k: int, rows: int | None = None) -> Tile:
    """Of a product with so many rows of the weight. rows: those that a tile has to have."""
    rows = rows or (128 if n >= _WIDE_TILE // 2 else 64)
    tiles, steps = -(-n // rows), -(-k // BLOCK_K)
    share = 1
    while share < 8 and 2 * share * tiles <= _SMS and 2 * share <= steps:
        share *= 2
    return rows, share, HALF


# ------------------------------------------------------------------ checks

_Views = Mapping[str, View | None]


def _common(call: str, views: _Views, eps: float) -> dict[str, Any]:
    """What both say of the product: n counts rows of the weight."""
    seen = {name: view for name, view in views.items() if view is not None}
    floats = [name for name in ("x", "weight", "bias", "residual", "norm_weight") if name in seen]
    dtype = check_same_dtype(call, {name: seen[name] for name in floats}, _DTYPES)
    x, weight = seen["x"], seen["weight"]
    if len(x.shape) != 2 or len(weight.shape) != 2 or x.shape[1] != weight.shape[1]:
        raise ParameterError(
            f"{call}: x has shape {tuple(x.shape)}, weight {tuple(weight.shape)}; allowed: [m, k] "
            "and [n, k]"
        )
    (m, k), n = x.shape, weight.shape[0]
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
    parts = 0
    if "squares" in seen:
        check_dtype(call, "squares", seen["squares"], ("fp32",))
        parts = seen["squares"].shape[0]
        check_shape(call, "squares", seen["squares"], (parts, m), "[parts, m], here")
    return {
        "m": m, "n": n, "k": k, "dtype": dtype, "eps": eps, "bias": "bias" in seen,
        "square_parts": parts, "scaled": "squares" in seen,
        "tokens": next(most for most in TOKENS if most >= m),
        **{f"{name}_stride": row_step(call, name, seen[name]) for name in ("x", "weight")},
    }  # fmt: skip


def _tile(call: str, tile: Tile | None, usual: Tile, k: int) -> Tile:
    found = usual if tile is None else tuple(tile)
    if found not in TILES or found[1] > -(-k // BLOCK_K):
        raise ParameterError(f"{call}: tile={tile!r}; allowed: one of {TILES}, k for each block")
    return found


def _params(spec: Any, problem: Problem) -> dict[str, Any]:
    return {param.name: problem[param.name] for param in spec.params}


def _check_linear(
    views: _Views, activation: str, gate: bool, eps: float, normed: bool, tile: Tile | None
) -> Request:
    call = "streamed_linear"
    problem = {**_common(call, views, eps), "activation": activation, "gate": gate}
    n, m = problem["n"] // (2 if gate else 1), problem["m"]
    if (activation, gate) not in SHIPPED or problem["n"] % (16 if gate else 8):
        raise ParameterError(f"{call}: activation={activation!r}, gate={gate} has no kernel")
    residual, norm_weight = views["residual"], views["norm_weight"]
    usual = tile_for(problem["n"], problem["k"])
    problem |= {
        "n": n, "out_stride": n, "residual": residual is not None, "normed": normed,
        "residual_stride": 0 if residual is None else row_step(call, "residual", residual),
        "tile": _tile(call, tile, usual, problem["k"]),
    }  # fmt: skip
    if residual is not None:
        check_shape(call, "residual", residual, (m, n), "[m, n], here")
    outputs = {"out": Output((m, n), problem["dtype"])}
    if normed:
        assert norm_weight is not None
        check_shape(call, "norm_weight", norm_weight, (n,), "[n], here")
        outputs["scaled_out"] = Output((m, n), problem["dtype"])
        outputs["squares_out"] = Output((-(-n // problem["tile"][0]), m), "fp32")
    return Request(views, outputs, (Launch(LINEAR, _params(LINEAR, problem), problem),))


def _check_append(
    views: _Views, heads_q: int, layout: str, eps: float, tile: Tile | None
) -> Request:
    call = "streamed_append"
    seen = {name: view for name, view in views.items() if view is not None}
    problem = {**_common(call, views, eps), **check_pages(call, seen, layout)}
    heads_kv, dim, m = problem.pop("heads"), problem["head_dim"], problem["m"]
    pages = {name: seen[name] for name in ("k_pages", "v_pages")}
    check_same_dtype(call, {"x": seen["x"], **pages})
    if problem["n"] != (heads_q + 2 * heads_kv) * dim or dim not in _HEADS:
        raise ParameterError(
            f"{call}: weight has {problem['n']} rows; allowed: {heads_q} + 2 * {heads_kv} heads of "
            f"{dim} columns, one of {_HEADS}"
        )
    check_indices(call, seen, m, dim)
    usual = tile_for(problem["n"], problem["k"], dim)
    found = _tile(call, tile, usual, problem["k"])
    if found[0] != dim:
        raise ParameterError(f"{call}: tile={tile!r}; allowed: {dim} rows, as a head has")
    words = 2 if "positions" in seen and seen["positions"].dtype == "int64" else 1
    problem |= {
        "heads_q": heads_q, "heads_kv": heads_kv, "rope": "table" in seen,
        "position_words": words, "tile": found,
        "table_rows": seen["table"].shape[0] if "table" in seen else 0,
    }  # fmt: skip
    out = Output((m, heads_q, dim), problem["dtype"])
    return Request(views, {"out_q": out}, (Launch(APPEND, _params(APPEND, problem), problem),))


_INPUTS = ("x", "weight", "bias", "squares")
_OPTIONAL = ("bias", "squares", "residual", "norm_weight")
_LINEAR, _NORMED = (
    Op(
        "streamed_linear", inputs=(*_INPUTS, "residual", "norm_weight"), outputs=outputs,
        check=_check_linear, optional=_OPTIONAL,
    )
    for outputs in (("out",), ("out", "scaled_out", "squares_out"))
)  # fmt: skip
_APPEND = Op(
    "streamed_append",
    inputs=(*_INPUTS, "slot_mapping", "positions", "table", "k_pages", "v_pages"),
    outputs=("out_q",), check=_check_append,
    optional=("bias", "squares", "positions", "table"), written=("k_pages", "v_pages"),
)  # fmt: skip
