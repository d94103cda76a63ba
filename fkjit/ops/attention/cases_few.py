"""What the kernels for few queries of many keys are verified with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fkjit.ops.attention.cases import PLAIN, PLAIN_SM90, attend, inputs
from fkjit.ops.attention.cases import reference as exactly
from fkjit.ops.attention.kernels_sm90 import COUNTERS
from fkjit.ops.attention.merge.cases import merged
from fkjit.ops.attention.problem import split_block
from fkjit.runtime.interop import numpy_dtype
from fkjit.spec import Arrays, Params, Problem


def problems(params: Params, scale: str) -> Sequence[Problem]:
    """Few rows and several tiles of them, causal and not; more parts than tiles of keys."""
    (block_q, block_k), d, heads = (
        split_block(params["block"]),
        params["head_dim"],
        params["heads"],
    )
    rows = block_q // heads
    shapes = [  # batch, heads_kv, seqlen_q, seqlen_k, causal, parts
        (1, 1, rows + 3, 2 * block_k + 5, True, 2),
        (2, 1, 5, block_k - 3, False, 3),
    ]
    if scale != "small":
        shapes = [
            (2, 2, 33, 4099, False, 7),
            (1, 3, rows + 1, 8191, True, 16),
            (3, 1, 300, 301, True, 5),
            (1, 1, 17, 70_001, False, 64),
        ]
    base = {"dtype": params["dtype"], "head_dim": d, "head_dim_v": params["head_dim_v"]}
    base |= {"softmax_scale": d**-0.5, "rows": rows, "block_k": block_k}
    names = ("batch", "heads_kv", "seqlen_q", "seqlen_k", "causal", "parts")
    found = []
    for shape in shapes:
        problem: dict[str, Any] = {**base, **dict(zip(names, shape, strict=True))}
        problem["heads_q"] = problem["heads_kv"] * max(heads, 2)
        problem["width"] = problem["head_dim_v"]
        if not params["parts"]:
            del problem["parts"]
        if scale == "small":
            problem["multiprocessors"] = 2
        found.append(problem)
    return found


def outputs(params: Params, problem: Problem) -> Arrays:
    """Of the parts, or o and lse, poisoned with NaN; and the counter that work is drawn from."""
    counters = np.zeros(COUNTERS, np.uint32)
    whole = PLAIN.outputs(params, problem)
    if "parts" not in problem:
        return {**whole, "counters": counters}
    shape = (problem["parts"], *(problem[n] for n in ("batch", "heads_q", "seqlen_q")))
    o = np.full((*shape, problem["width"]), np.nan, np.float32)
    lse = np.full(shape, np.nan, np.float32)
    return {**whole, "o_parts": o, "lse_parts": lse, "counters": counters}


def reference(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """o and lse in float64, or those of each part."""
    if "parts" not in problem:
        return exactly(problem, arrays)
    exact = {name: np.asarray(arrays[name]).astype(np.float64) for name in "qkv"}
    parts = range(problem["parts"])
    made = [[_part(problem, exact, b, part) for b in range(problem["batch"])] for part in parts]
    o, lse = (np.stack([[one[i] for one in part] for part in made]) for i in (0, 1))
    return {"o_parts": o, "lse_parts": lse}


def _part(
    problem: Problem, exact: Mapping[str, np.ndarray], b: int, part: int
) -> tuple[np.ndarray, np.ndarray]:
    """One part of one sequence: which keys it has depends on the tile of queries."""
    sq, sk, block_k = problem["seqlen_q"], problem["seqlen_k"], problem["block_k"]
    key, first, end = np.arange(sk), np.zeros(sq, int), np.zeros(sq, int)
    for q0 in range(0, sq, problem["rows"]):
        last = min(q0 + problem["rows"], sq) - 1
        seen = min(sk, last + sk - sq + 1) if problem["causal"] else sk
        tiles = -(-max(seen, 1) // block_k)
        first[q0 : last + 1] = tiles * part // problem["parts"] * block_k
        end[q0 : last + 1] = tiles * (part + 1) // problem["parts"] * block_k
    if problem["causal"]:
        end = np.minimum(end, np.arange(sq) + sk - sq + 1)
    here = slice(first.min(), max(end.max(), 0))  # of the keys, those of any row
    mask = (key[here] >= first[:, None]) & (key[here] < end[:, None])
    q, k, v = (exact[name][b] for name in "qkv")
    rows = (q, k[:, here], v[:, here])
    return attend({**problem, "causal": False}, {**exact, "mask": mask[None, None]}, 0, *rows)


FEW = replace(PLAIN_SM90, problems=problems, inputs=inputs, outputs=outputs, reference=reference)


# ------------------------------------------------------------------ parts put together


def combine_problems(params: Params, scale: str) -> Sequence[Problem]:
    """One part, several, more than a thread has under way; columns that are padded, o strided."""
    width = params["head_dim_v"]
    shapes = [(1, 2, 3, 1), (2, 3, 17, 6)]
    if scale != "small":
        shapes = [(3, 16, 77, 16), (1, 8, 128, 64)]
    names = ("batch", "heads_q", "seqlen_q", "parts")
    return [
        {**dict(zip(names, shape, strict=True)), "dtype": params["dtype"], "width": width,
         "head_dim_v": width - 8 * (i % 2), "axes": ((0, 1, 2, 3), (0, 2, 1, 3))[i % 2]}
        for i, shape in enumerate(shapes)
    ]  # fmt: skip


def combine_inputs(params: Params, problem: Problem, rng: np.random.Generator) -> Arrays:
    """Fresh parts, of which some rows saw no key: their o is 0."""
    shape = tuple(problem[name] for name in ("parts", "batch", "heads_q", "seqlen_q"))
    o = rng.standard_normal((*shape, problem["width"]), dtype=np.float32)
    lse = (4 * rng.standard_normal(shape, dtype=np.float32)).astype(np.float32)
    nothing = rng.random(shape) < 0.2
    o[nothing], lse[nothing] = 0.0, -np.inf
    return {"o_parts": o, "lse_parts": lse}


def combine_outputs(params: Params, problem: Problem) -> Arrays:
    """o and lse, poisoned with NaN."""
    sizes = [problem[name] for name in ("batch", "heads_q", "seqlen_q")]
    shape = [sizes[axis] for axis in problem["axes"][:3]]
    dtype = numpy_dtype(problem["dtype"])
    return {
        "o": np.full((*shape, problem["head_dim_v"]), np.nan, dtype),
        "lse": np.full(sizes, np.nan, np.float32),
    }


def combine_reference(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """o and lse in float64."""
    o, lse = merged(np.asarray(arrays["o_parts"]), np.asarray(arrays["lse_parts"]))
    axes = problem["axes"]
    return {"o": o[..., : problem["head_dim_v"]].transpose(axes), "lse": lse}


COMBINE = replace(
    PLAIN, problems=combine_problems, inputs=combine_inputs, outputs=combine_outputs,
    reference=combine_reference,
)  # fmt: skip
