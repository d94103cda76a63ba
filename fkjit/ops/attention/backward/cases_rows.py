"""How the backward's kernels without products are checked: delta and lse of rows, dq out of its
sums, gradients of sinks and slopes, sums of a bias's gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fkjit.ops.attention.backward import cases
from fkjit.ops.attention.backward import problem as backward
from fkjit.ops.attention.backward.features import SHOWN, SHOWN_DENSE
from fkjit.runtime.interop import numpy_dtype
from fkjit.spec import Arrays, Params, Problem, Verification

_SIZES = ("batch", "heads_q", "seqlen_q", "head_dim", "head_dim_v", "sum_columns")
_FIXED = {"heads_kv": 1, "seqlen_k": 1, "softmax_scale": 0.3, "causal": False}


def _problem(params: Params, *sizes: int) -> dict[str, Any]:
    return {"dtype": params["dtype"], **_FIXED, **dict(zip(_SIZES, sizes, strict=True))}


# ------------------------------------------------------------------ delta and lse of each row


def _row_problems(params: Params, scale: str) -> list[dict[str, Any]]:
    sizes = [(2, 3, 70, 64), (1, 2, 130, 200), (1, 1, 5, 24)]
    if not params["aligned"]:
        sizes = [(2, 3, 70, 61), (1, 1, 3, 1)]
    return [
        {**_problem(params, *one[:3], 64, one[3], 64 * (i % 2)), "dlse": i != 1}
        for i, one in enumerate(sizes)
    ]


def _row_inputs(params: Params, problem: Problem, rng: np.random.Generator) -> Arrays:
    dtype = numpy_dtype(problem["dtype"])
    sizes = backward.shape(problem, "o")
    made: Arrays = {n: rng.standard_normal(sizes, np.float32).astype(dtype) for n in ("dout", "o")}
    made["lse"] = rng.standard_normal(sizes[:3], np.float32)
    made["lse"][..., ::5] = -np.inf
    if problem["dlse"]:
        made["dlse"] = rng.standard_normal(sizes[:3], np.float32)
    return made


def _row_outputs(params: Params, problem: Problem) -> Arrays:
    rows = backward.rows_shape(problem)
    sizes: dict[str, tuple[int, ...]] = {"lse_log2": rows, "delta": rows}
    if problem["sum_columns"]:
        sizes |= {"dq_sum": backward.sums_shape(problem), "turns": backward.order_shape(problem)}
    return {name: np.full(size, np.nan, np.float32) for name, size in sizes.items()}


def _row_reference(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
    double = {n: np.asarray(a).astype(np.float64) for n, a in arrays.items() if a is not None}
    delta = (double["dout"] * double["o"]).sum(-1) - double.get("dlse", 0.0)
    lse = double["lse"] * math.log2(math.e)
    past = ((0, 0), (0, 0), (0, backward.rows_padded(problem) - problem["seqlen_q"]))
    made: Arrays = {
        "lse_log2": np.pad(np.where(np.isneginf(lse), np.inf, lse), past, constant_values=np.inf),
        "delta": np.pad(delta, past),
    }
    if problem["sum_columns"]:
        made["dq_sum"] = np.zeros(backward.sums_shape(problem))
        made["turns"] = np.zeros(backward.order_shape(problem))
    return made


PREPROCESS = Verification(
    problems=_row_problems,
    inputs=_row_inputs,
    outputs=_row_outputs,
    reference=_row_reference,
    tolerance=lambda params: 4e-6,
)

# ------------------------------------------------------------------ dq out of its sums


def _dq_inputs(params: Params, problem: Problem, rng: np.random.Generator) -> Arrays:
    dq = rng.standard_normal(backward.shape(problem, "dq"), np.float32)
    return {"dq_sum": cases.dq_sum(problem, {}, dq).astype(np.float32), "exact": dq}


POSTPROCESS = Verification(
    problems=lambda params, scale: [
        _problem(params, 1, 2, 37, 64, 64, 64), _problem(params, 2, 1, 130, 72, 72, 128),
    ],
    inputs=_dq_inputs,
    outputs=lambda params, problem: cases.outputs(params, problem, ("dq",)),
    reference=lambda problem, arrays: {"dq": np.asarray(arrays["exact"], np.float64)},
    tolerance=lambda params: {"fp16": 1e-3, "bf16": 8e-3}[params["dtype"]],
)  # fmt: skip

# ------------------------------------------------------------------ gradients of sinks and slopes


def _as_products(params: Params) -> dict[str, Any]:
    """Parameters of a kernel whose inputs and outputs are those of `heads`."""
    return {
        **{"dtype": "fp32", "head_dim": 64, "head_dim_v": 64, "aligned": True},
        "form": SHOWN if params["varlen"] else SHOWN_DENSE,
    }


def _head_inputs(params: Params, problem: Problem, rng: np.random.Generator) -> Arrays:
    made = cases.inputs(_as_products(params), problem, rng)
    rows = cases.reference(problem, made)["dalibi_rows"]
    return made | {"dalibi_rows": rows.astype(np.float32)}


def _head_reference(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
    found = cases.reference(problem, arrays)
    return {name: found[name] for name in ("dsinks", "dalibi_slopes")}


HEADS = Verification(
    problems=lambda params, scale: cases.feature_problems(_as_products(params), scale),
    inputs=_head_inputs,
    outputs=lambda params, problem: cases.outputs({}, problem, ("dsinks", "dalibi_slopes")),
    reference=_head_reference,
    tolerance=lambda params: 4e-6,
)

# ------------------------------------------------------------------ dbias out of its partial sums


def _partial_inputs(params: Params, problem: Problem, rng: np.random.Generator) -> Arrays:
    names = ("bias_batch", "batches", "heads", "shared", "columns")
    shape = tuple(problem[name] for name in names)
    return {"dbias_parts": rng.standard_normal(shape, np.float32)}


def _dbias(params: Params, problem: Problem) -> Arrays:
    shape = tuple(problem[name] for name in ("bias_batch", "heads", "columns"))
    return {"dbias": np.full(shape, np.nan, numpy_dtype(params["bias_dtype"]))}


ZEROS = Verification(
    problems=lambda params, scale: [
        {"bias_shape": (1, 3, 9), "seqlen_k": 40},
        {"bias_shape": (1, 1, 40 if scale == "small" else 4000), "seqlen_k": 1000},
    ],
    inputs=lambda params, problem, rng: {},
    outputs=lambda params, problem: {
        "dbias": np.full(
            (*problem["bias_shape"], problem["seqlen_k"]), np.nan, numpy_dtype(params["bias_dtype"])
        )
    },
    reference=lambda problem, arrays: {
        "dbias": np.zeros((*problem["bias_shape"], problem["seqlen_k"]))
    },
)

DBIAS_SUM = Verification(
    problems=lambda params, scale: [
        {"bias_batch": 2, "heads": 3, "columns": 101, "batches": 2, "shared": 5}
    ],
    inputs=_partial_inputs,
    outputs=_dbias,
    reference=lambda problem, arrays: {
        "dbias": arrays["dbias_parts"].astype(np.float64).sum((1, 3))
    },
    tolerance=lambda params: {"fp16": 1e-3, "bf16": 8e-3, "fp32": 1e-6}[params["bias_dtype"]],
)
