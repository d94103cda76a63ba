"""What a call of attention's backward works on: options, sizes, strides, arguments, work.

A problem has SIZES, dtype, causal and softmax_scale, of a call also the `strides` of its arrays.
With score features it has window=(left, right) in place of causal (a side without a bound is as
wide as the scores), softcap and score_scalars {name: value}; packed sequences have total_q and the
axes on which batch, head and row stand, and seqlen_q and seqlen_k of the longest. Gradients of a
bias and of slopes need bias_shape (batch, heads, rows), bias_parts and alibi_batches (1 where all
batches share their slopes).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fkjit.ops.attention import problem as forward
from fkjit.runtime.interop import ITEMSIZE
from fkjit.spec import Params, Problem

ROW_STEP = 128  # lse_log2 and delta have so many rows, or a multiple
ORDER_ROWS = (
    16  # of dq share one count of the blocks that have added to them, where there is an order
)
BITS_BLOCK_K = 128  # keys of a block of a mask as bits
SIZES = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v")
STRIDED = ("dout", "q", "k", "v", "o", "dq", "dk", "dv")
PACKED = "packed"  # a layout: [total, heads, head_dim]
_STRIDES = {name: f"{name}_strides" for name in STRIDED}
_POINTERS = (
    *STRIDED,
    *("lse", "dlse", "lse_log2", "delta", "dq_sum", "turns", "dbias", "dbias_parts", "dsinks"),
    *("dalibi_rows", "dalibi_slopes"),
)


class Options(NamedTuple):
    """Of a call, in the order of the operator fkjit::attention_form_backward.

    features: the text of `ScoreFeatures`, "" for none but causal. layout: "bhsd", "bshd" or
    PACKED. window: -1 for a side without a bound. max_seqlen_*: of packed sequences. wanted: the
    inputs whose gradients are made, in the order of `checks.DIFFERENTIABLE`. deterministic: False
    lets blocks add up dq in any order. score_scalars: (name, "float" or "int", value) of a
    score_mod. impl: "auto", "portable" or "flash_sm90".
    """

    features: str = ""
    layout: str = "bhsd"
    causal: Any = False
    softmax_scale: Any = None
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    wanted: tuple[str, ...] = ("q", "k", "v")
    deterministic: Any = True
    score_scalars: tuple[tuple[str, str, Any], ...] = ()
    impl: str = "auto"


# ------------------------------------------------------------------ sizes


def shape(problem: Problem, name: str) -> tuple[int, int, int, int]:
    """Of an array of [batch, head, row, column], whatever its gradient is called."""
    of = name.removeprefix("d") if name in ("dq", "dk", "dv") else name
    side = "q" if of in ("q", "dout", "o") else "k"
    heads = problem["heads_q" if side == "q" else "heads_kv"]
    dim = problem["head_dim" if of in ("q", "k") else "head_dim_v"]
    return problem["batch"], heads, problem[f"seqlen_{side}"], dim


def rows_padded(problem: Problem) -> int:
    """Rows of lse_log2 and delta: whole tiles of queries, of packed sequences one tile more each
    (templates/attention/backward/padded_rows.cuh)."""
    packed = "total_q" in problem
    rows = problem["total_q" if packed else "seqlen_q"]
    return -(-rows // ROW_STEP) * ROW_STEP + ROW_STEP * problem["batch"] * packed


def longest_padded(problem: Problem) -> int:
    """Rows of the longest sequence's tiles."""
    return -(-problem["seqlen_q"] // ROW_STEP) * ROW_STEP


def rows_shape(problem: Problem) -> tuple[int, int, int]:
    """Of lse_log2 and delta."""
    batch = 1 if "total_q" in problem else problem["batch"]
    return batch, problem["heads_q"], rows_padded(problem)


def sums_shape(problem: Problem) -> tuple[int, int, int, int]:
    """Of the fp32 sums that dq is rounded from."""
    return (*rows_shape(problem), problem["sum_columns"])


def order_shape(problem: Problem) -> tuple[int, int, int]:
    """Of the counts that blocks wait for where they add to dq in order."""
    batch, heads, rows = rows_shape(problem)
    return batch, heads, rows // ORDER_ROWS


def bits_shape(block_q: int, problem: Problem) -> tuple[int, int, int, int, int]:
    """Of a mask as bits, in words: batches, heads, tiles of queries, whole blocks of keys."""
    batch, heads, rows = problem["mask_shape"]
    keys = -(-problem["seqlen_k"] // BITS_BLOCK_K) * BITS_BLOCK_K
    return batch, heads, -(-rows // block_q), keys, block_q // 32


def bits_strides(block_q: int, problem: Problem) -> tuple[int, ...]:
    """Words between their batches, heads and tiles: 0 where there is but one."""
    sizes = bits_shape(block_q, problem)
    return tuple(math.prod(sizes[i + 1 :]) * (sizes[i] > 1) for i in range(3))


def bias_size(problem: Problem) -> int:
    """Elements of the gradient of a bias."""
    return math.prod(problem["bias_shape"]) * problem["seqlen_k"]


# ------------------------------------------------------------------ arguments


def arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the backward's kernels by name: each takes those that it has."""
    bias = problem.get("bias_shape", (1, 1, 1))
    return {
        **{name: arrays.get(name) for name in _POINTERS},
        **{to: strides(problem, name, arrays.get(name)) for name, to in _STRIDES.items()},
        **_scalars(problem),
        **{"batch": problem["batch"], "total_q": problem.get("total_q", 0)},
        **dict(zip(("bias_batch", "bias_heads", "bias_rows"), bias, strict=True)),
        "first_batch": problem.get("first_batch", 0),
        **{"parts": problem.get("bias_parts", 1), "size": math.prod(bias) * problem["seqlen_k"]},
        "alibi_batch_stride": problem["heads_q"] if problem.get("alibi_batches", 1) > 1 else 0,
        "sum_columns": problem.get("sum_columns", 0),
        **(forward.feature_arguments(problem, arrays) if "window" in problem else {}),
    }


def strides(problem: Problem, name: str, array: Any) -> tuple[int, ...]:
    """Elements between batches, heads and rows: of a call's array as the check found them, else of
    the array itself; 0 of what is not there."""
    known = problem.get("strides")
    if known is not None:
        return known[name]
    if array is None or not array.shape:
        return (0, 0, 0)
    return forward.row_strides(forward.axes(problem), array)


def _scalars(problem: Problem) -> dict[str, Any]:
    scale = problem["softmax_scale"]
    return {
        **forward.scalars(problem),
        "rows_padded": rows_padded(problem),
        "softmax_scale": float(np.float32(scale)),
        "inverse_scale": 1 / scale if scale else 0.0,
    }


# ------------------------------------------------------------------ work


def flops(problem: Problem) -> float:
    """Of the whole backward, as everybody counts it: five products where the forward has two."""
    return 2.5 * forward.flops(problem)


def products(problem: Problem, of_scores: int, of_values: int) -> float:
    """Of one kernel: products with head_dim, and those with head_dim_v, over visible pairs."""
    dims = problem["head_dim"] + problem["head_dim_v"]
    pairs = forward.flops(problem) / dims
    return pairs * (of_scores * problem["head_dim"] + of_values * problem["head_dim_v"])


def traffic(problem: Problem) -> float:
    """Bytes of dout, q, k, v, o and lse read and dq, dk, dv written, all of it once."""
    elements = sum(math.prod(shape(problem, name)) for name in STRIDED)
    rows = problem["batch"] * problem["heads_q"] * problem["seqlen_q"]
    return float(ITEMSIZE[problem["dtype"]] * elements + 4 * rows)
