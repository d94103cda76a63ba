"""What all kernels of attention's forward share: arguments and work.

A problem has batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v, dtype,
softmax_scale and causal. With score features it has window=(left, right) in place of causal (a side
without a bound is as wide as the scores), softcap and score_scalars {name: value}. Axes say where
batch, head and row stand in the arrays, by default in this order. Packed sequences have total_q and
total_k; seqlen_q and seqlen_k are those of the longest then. Keys in pages have page_axes (of page,
head and token), page_size, num_pages and table_width in place of total_k.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fkjit.ops.attention.features import LISTED, PAGES, SCALES, SLOTS
from fkjit.ops.attention.shapes import MAX_HEAD_DIM
from fkjit.runtime.interop import ITEMSIZE
from fkjit.spec import Dim3, Params, Problem, Work

NAIVE_ROWS = 4  # query rows of a block of the naive kernel, a warp each
_AXES = (0, 1, 2, 3)
Axes = tuple[int | None, int, int]  # where batch, head and row stand
_NO_STRIDES = (0, 0, 0)


def split_block(block: Any) -> tuple[int, int]:
    """64 -> (64, 64); (128, 64) stays."""
    return block if isinstance(block, tuple) else (block, block)


def grid(params: Params, problem: Problem) -> Dim3:
    """One block for each block_q query rows of each head."""
    rows = split_block(params["block"])[0] if "block" in params else NAIVE_ROWS
    blocks_q = -(-problem["seqlen_q"] // rows)
    return (blocks_q * problem["heads_q"] * problem["batch"], 1, 1)


def axes(problem: Problem) -> Axes:
    """Where batch, head and row stand in q, k, v and o; packed arrays have no batch."""
    return problem.get("axes", _AXES)[:3]


def key_axes(problem: Problem) -> Axes:
    """The same of k and v alone, which may be pages, each in place of a batch."""
    return problem.get("page_axes") or axes(problem)


def window(problem: Problem) -> tuple[int, int]:
    """How many keys before and after its own a query sees; without bounds, as many as there are."""
    wide = max(problem["seqlen_q"], problem["seqlen_k"])
    return problem.get("window") or (wide, 0 if problem["causal"] else wide)


def flops(problem: Problem) -> float:
    """Multiplications and additions of the two products, over visible (query, key) pairs."""
    sq, sk = problem["seqlen_q"], problem["seqlen_k"]
    last = np.arange(sq, dtype=np.float64) + sk - sq
    left, right = window(problem)
    seen = np.clip(last + right + 1, 0, sk) - np.clip(last - left, 0, sk)
    dims = problem["head_dim"] + problem["head_dim_v"]
    return 2.0 * problem["batch"] * problem["heads_q"] * seen.clip(0).sum() * dims


def padded_flops(params: Params, problem: Problem) -> float:
    """What a kernel multiplies: whole tiles of padded head dimensions; with its rules of scores,
    some kernels twice as much."""
    sq, sk = problem["seqlen_q"], problem["seqlen_k"]
    block_q, block_k = split_block(params["block"]) if "block" in params else (NAIVE_ROWS, 1)
    rows, keys = grid(params, problem)[0] * block_q, -(-sk // block_k) * block_k
    least = MAX_HEAD_DIM if "head_dim" not in params else 0  # naive takes any, in registers for all
    dims = sum(max(params.get(name, 0), least) for name in ("head_dim", "head_dim_v"))
    if "window" in problem:
        return 4.0 * rows * keys * dims
    exact = problem["batch"] * problem["heads_q"] * sq * sk
    exact *= 2.0 * (problem["head_dim"] + problem["head_dim_v"])
    return 2.0 * rows * keys * dims * (flops(problem) / exact if exact else 0.0)


def traffic(problem: Problem) -> float:
    """Bytes of q, k, v read once, o and lse written once, and a bias or mask that is there."""
    d, dv, sq, sk = (problem[n] for n in ("head_dim", "head_dim_v", "seqlen_q", "seqlen_k"))
    rows_q = problem["batch"] * problem["heads_q"] * sq
    rows_k = problem["batch"] * problem["heads_kv"] * sk
    rows = ITEMSIZE[problem["dtype"]] * (rows_q + rows_k) * (d + dv) + 4 * rows_q
    return float(rows) + problem.get("form_bytes", 0)


def shape_class(problem: Problem) -> dict[str, Any]:
    """What decides which tile is best, coarsely: a few thousand rows are like many thousand."""

    def up_to(most: int, size: int) -> int:
        return min(1 << (max(size, 1) - 1).bit_length(), most)

    return {
        "seqlen_q": up_to(16_384, problem["seqlen_q"]),
        "seqlen_k": up_to(16_384, problem["seqlen_k"]),
        "heads": up_to(512, problem["batch"] * problem["heads_q"]),
        "causal": problem["window"][1] == 0 if "window" in problem else problem["causal"],
    }


def arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Kernel arguments by name. Strides are taken from the arrays (NumPy or CuPy)."""
    places, held, q, k, v, o = (
        axes(problem), key_axes(problem), arrays["q"], arrays["k"], arrays["v"], arrays["o"]
    )  # fmt: skip
    found = {
        "q": q, "k": k, "v": v, "o": o, "lse": arrays.get("lse"),
        "q_strides": row_strides(places, q), "k_strides": row_strides(held, k),
        "v_strides": row_strides(held, v), "o_strides": row_strides(places, o),
        **scalars(problem),
    }  # fmt: skip
    return found | feature_arguments(problem, arrays) if "window" in problem else found


def row_strides(places: Axes, array: Any) -> tuple[int, int, int]:
    """Elements from one batch, head and row, which stand at these places, to the next."""
    batch, head, row = places
    steps, size = array.strides, array.itemsize
    of_batch = 0 if batch is None else steps[batch] // size
    return of_batch, steps[head] // size, steps[row] // size


def scalars(problem: Problem) -> dict[str, Any]:
    """The scalar arguments of every attention kernel."""
    # A scale of 0 would turn a masked -inf into NaN; 1e-30 leaves exp2(score * scale) = 1.
    scale = float(np.float32(problem["softmax_scale"] * math.log2(math.e))) or 1e-30
    heads, seqlen_q, seqlen_k = problem["heads_q"], problem["seqlen_q"], problem["seqlen_k"]
    return {
        "heads_q": heads, "group_size": heads // problem["heads_kv"],
        "seqlen_q": seqlen_q, "seqlen_k": seqlen_k,
        "max_seqlen_q": seqlen_q, "max_seqlen_k": seqlen_k,
        "head_dim": problem["head_dim"], "head_dim_v": problem["head_dim_v"],
        "softmax_scale_log2": scale,
        "causal": int("window" not in problem and problem["causal"]),
    }  # fmt: skip


def feature_arguments(problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Those of score features."""
    left, right = problem["window"]
    alibi, bias, mask = arrays.get("alibi_slopes"), arrays.get("bias"), arrays.get("mask")
    form = (
        *_broadcast_strides(bias),
        *_broadcast_strides(mask),
        left,
        right,
        0 if alibi is None or len(alibi.shape) < 2 else _step(alibi, 0),
        problem.get("total_q", 0),
        problem["softcap"],
        problem["softmax_scale"],
    )
    named: dict[str, Any] = {
        "form": form, "alibi_slopes": alibi, "bias": bias, "mask": mask,
        "sinks": arrays.get("sinks"),
        "cu_seqlens_q": arrays.get("cu_seqlens_q"), "cu_seqlens_k": arrays.get("cu_seqlens_k"),
    }  # fmt: skip
    for name in SLOTS:
        if name in arrays:
            named[name] = arrays[name]
    if "page_size" in problem:
        named |= {name: arrays.get(name) for name in (*PAGES, *SCALES, LISTED)}
        named |= {"table_width": problem["table_width"], "num_pages": problem["num_pages"]}
        named["page_log2"] = problem["page_size"].bit_length() - 1
    for name, value in problem["score_scalars"].items():
        named[f"score_{name}"] = value
    return named


def _step(array: Any, axis: int) -> int:
    """Elements from one index to the next, 0 where there is but one."""
    return array.strides[axis] // array.itemsize if array.shape[axis] > 1 else 0


def _broadcast_strides(array: Any) -> tuple[int, ...]:
    """Of batch, head and row of a [batch | 1, heads | 1, seqlen_q | 1, seqlen_k] array or None."""
    if array is None or not hasattr(array, "shape") or len(array.shape) != 4:
        return _NO_STRIDES
    return tuple(_step(array, axis) for axis in range(3))


# Of every kernel; `cases` is imported when a kernel is verified.
CONTRACT: dict[str, Any] = {
    "op": "attention", "grid": grid, "shape_class": shape_class, "arguments": arguments,
    "work": Work(flops=flops, bytes=traffic, interpreter_work=padded_flops),
    "verification": "fkjit.ops.attention.cases:PLAIN",
}  # fmt: skip
