"""What comes before the products of attention's backward, and after them: delta and lse of each
row, and dq out of its fp32 sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fkjit.ops.attention.backward import problem
from fkjit.ops.attention.features import PLAIN
from fkjit.runtime.interop import ITEMSIZE
from fkjit.spec import KernelSpec, Param, Params, Problem, Work

OP = "attention_backward"
OP_FEATURES = "attention_backward_form"
CASES = "fkjit.ops.attention.backward.cases"
NEEDS = frozenset({"cp_async", "ldmatrix", "bf16_mma"})
HALF = Param("dtype", ("fp16", "bf16"), "element type of all arrays but lse and delta")
ALIGNED = Param("aligned", (True, False), "rows of all arrays start on 16-byte boundaries")
_THREADS = 256
_PACKED = {"varlen": True, "seqlen_q": "max_seqlen_q"}


def _row_lanes(one: Problem) -> int:
    """Lanes that share a row: 16 bytes each, or several times 16."""
    vectors = -(-one["head_dim_v"] * ITEMSIZE[one["dtype"]] // 16)
    return min(32, 1 << (vectors - 1).bit_length())


def _row_grid(length: Callable[[Problem], int]) -> Callable[..., Any]:
    """Thread blocks for so many rows of each head; none has rows of two."""

    def grid(params: Params, one: Problem) -> tuple[int, int, int]:
        blocks = -(-length(one) * _row_lanes(one) // _THREADS)
        return one["batch"] * one["heads_q"] * blocks, 1, 1

    return grid


def _row_arguments(params: Params, one: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {**problem.arguments(params, one, arrays), "lanes": _row_lanes(one)}


def _derive(params: Params) -> dict[str, Any]:
    return {"threads": _THREADS, "varlen": False, **PLAIN}


PREPROCESS = KernelSpec(
    op=OP,
    name="rows",
    source="attention/backward_preprocess.cu",
    entry="attention_backward_rows",
    doc="delta = rowsum(dout * o) - dlse, and lse in powers of two",
    params=(Param("dtype", ("fp16", "bf16", "fp32"), "element type of dout and o"), ALIGNED),
    derive=_derive,
    block=lambda params: (_THREADS, 1, 1),
    grid=_row_grid(problem.rows_padded),
    arguments=_row_arguments,
    work=Work(bytes=lambda one: 8.0 * math.prod(problem.rows_shape(one))),
    verification=f"{CASES}_rows:PREPROCESS",
)
POSTPROCESS = KernelSpec(
    op=OP,
    name="dq",
    source="attention/backward_dq_convert.cu",
    entry="attention_backward_dq",
    doc="dq out of its sums",
    params=(HALF,),
    derive=_derive,
    features=lambda params: NEEDS,
    block=lambda params: (_THREADS, 1, 1),
    grid=lambda params, one: (-(-math.prod(problem.sums_shape(one)) // 32 // _THREADS), 1, 1),
    arguments=problem.arguments,
    work=Work(bytes=lambda one: 6.0 * math.prod(problem.shape(one, "q"))),
    verification=f"{CASES}_rows:POSTPROCESS",
)


def _packed_dq_grid(params: Params, one: Problem) -> tuple[int, int, int]:
    vectors = -(-one["seqlen_q"] // 16) * one["sum_columns"] // 2
    return one["batch"] * one["heads_q"] * -(-vectors // _THREADS), 1, 1


# The same for packed sequences: blocks for the longest one each.
PREPROCESS_PACKED, POSTPROCESS_PACKED = (
    replace(
        spec, op=OP_FEATURES, derive=lambda params: {**_derive(params), **_PACKED}, grid=grid
    )
    for spec, grid in (
        (PREPROCESS, _row_grid(problem.longest_padded)), (POSTPROCESS, _packed_dq_grid),
    )
)  # fmt: skip
