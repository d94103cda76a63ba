"""How the kernel for few rows of each expert is checked: experts without rows, with one, with more
than are multiplied together, with more than a tile has places; choices in any order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fkjit.ops.gemm.cases import TOLERANCE, activated
from fkjit.ops.gemm.problem import outputs_of
from fkjit.runtime.interop import numpy_dtype
from fkjit.spec import Arrays, Params, Problem, Verification

_BLOCK, _TOP_K = 64, 2
_LISTS = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded", "offsets", "counts")


def problem(params: Params, counts: tuple[int, ...], n: int, k: int, **given: Any) -> Problem:
    """`counts`: rows of each expert, of which the sum is even."""
    tiles = sum(-(-count // _BLOCK) for count in counts)
    names = ("dtype", "activation", "gate", "weight_layout", "gather")
    return {
        "m": (tiles + 2) * _BLOCK, "n": n, "k": k, "experts": len(counts), "counts": counts,
        "block_size": _BLOCK, "top_k": _TOP_K, "x_stride": k + 8, "bias": True,
        **{name: params[name] for name in names}, "multiprocessors": 1, **given,
    }  # fmt: skip


def problems(params: Params, scale: str) -> list[Problem]:
    """Ragged columns and k; few blocks, so that each takes several parts."""
    (outputs, warps, unroll), rows = params["tile"], params["rows"]
    n = 3 * outputs + (3 if params["weight_layout"] == "nk" else 8)
    if scale == "full":
        return [
            problem(params, (1, 0, 1, 6), 768, 4096, multiprocessors=132),
            problem(params, (70, 0, 9, 1) * 8, 776, 1000, multiprocessors=132),
        ]
    k = 32 * warps * unroll + 40
    return [
        problem(params, (1, 0, rows + 3, 0, rows // 2 + 4), n, k),
        problem(params, (0, 66), outputs, 72, bias=False, multiprocessors=3),
    ]


def lists(p: Problem) -> Arrays:
    """What moe_regroup makes of choices that lie in some order."""
    counts, block = np.asarray(p["counts"]), p["block_size"]
    taken = -(-counts // block) * block
    offsets = np.concatenate([[0], np.cumsum(taken)])
    choices = np.random.default_rng(3).permutation(int(counts.sum()))
    ids, experts = np.full(p["m"], len(choices)), np.full(p["m"] // block, -1)
    for expert, count in enumerate(counts):
        first = int(counts[:expert].sum())
        ids[offsets[expert] :][:count] = choices[first : first + count]
        experts[offsets[expert] // block : offsets[expert + 1] // block] = expert
    made = (ids, experts, offsets[-1:], offsets, counts)
    return {name: a.astype(np.int32) for name, a in zip(_LISTS, made, strict=True)}


def inputs(params: Params, p: Problem, rng: np.random.Generator) -> Arrays:
    """N(0, 1) and weights such that sums are. Rows that nobody has, and gaps, are NaN."""
    dtype, wide, k = numpy_dtype(p["dtype"]), outputs_of(p), p["k"]
    x = np.full((_rows(p), p["x_stride"]), np.nan, dtype)
    found = lists(p)
    there = np.unique(_row_of_places(p, found)) if sum(p["counts"]) else []
    x[there, :k] = rng.standard_normal((len(there), k)).astype(dtype)
    shape = (wide, k) if p["weight_layout"] == "nk" else (k, wide)
    weight = rng.standard_normal((p["experts"], *shape)) / math.sqrt(k)
    weight[np.asarray(p["counts"]) == 0] = np.nan  # of experts without rows nothing counts
    bias = rng.standard_normal((p["experts"], wide)).astype(dtype)
    made = {"x": x, "weight": weight.astype(dtype), **found}
    return made | ({"bias": bias} if p["bias"] else {})


def _rows(p: Problem) -> int:
    return sum(p["counts"]) // p["top_k"] if p["gather"] else p["m"]


def _places(found: Mapping[str, Any]) -> np.ndarray:
    """Places that choices have."""
    ids, counts = np.asarray(found["sorted_token_ids"]), np.asarray(found["counts"])
    return np.flatnonzero(ids < counts.sum())


def _row_of_places(p: Problem, found: Mapping[str, Any]) -> np.ndarray:
    """The row of x of each such place."""
    places = _places(found)
    ids = np.asarray(found["sorted_token_ids"])
    return ids[places] // p["top_k"] if p["gather"] else places


def outputs(params: Params, p: Problem) -> Arrays:
    """NaN, which stays where nobody is."""
    return {"out": np.full((p["m"], p["n"]), np.nan, numpy_dtype(p["dtype"]))}


def reference(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """In float64, place by place."""
    x, weight = (np.asarray(arrays[name]).astype(np.float64) for name in ("x", "weight"))
    n, k, experts = p["n"], p["k"], np.asarray(arrays["expert_ids"])
    out = np.full((p["m"], n), np.nan)
    for place, row in zip(_places(arrays), _row_of_places(p, arrays), strict=True):
        expert = experts[place // p["block_size"]]
        own = weight[expert].T if p["weight_layout"] == "nk" else weight[expert]
        z = x[row, :k] @ own
        if arrays.get("bias") is not None:
            z = z + np.asarray(arrays["bias"])[expert].astype(np.float64)
        y = activated(p["activation"], z[:n])
        out[place] = y * z[n:] if p["gate"] else y
    return {"out": out}


STREAM = Verification(
    problems=problems, inputs=inputs, outputs=outputs, reference=reference,
    tolerance=lambda params: TOLERANCE[params["dtype"]],
)  # fmt: skip
