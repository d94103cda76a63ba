"""What kernels that go on where other keys left are verified with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fkjit.ops.attention import cases
from fkjit.runtime.interop import numpy_dtype
from fkjit.spec import Arrays, Params, Problem, Verification

_MORE_ROWS = 3  # of sums and lse than the call has: they are parts of longer arrays


def _with_done(usual: Callable[..., Sequence[Problem]]) -> Callable[..., Sequence[Problem]]:
    """Of the rows none, some in the middle, and all are done."""

    def problems(params: Params, scale: str) -> Sequence[Problem]:
        found = []
        for index, problem in enumerate(usual(params, scale)):
            rows, dv = problem["seqlen_q"], problem["head_dim_v"]
            done = ((rows // 3, rows - 2), (0, rows), (0, 0))[index % 3]
            found.append({**problem, "done": done, "head_dim_v": dv - 8 * (index % 2)})
        return found

    return problems


def inputs(params: Params, problem: Problem, rng: np.random.Generator) -> Arrays:
    """Fresh q, k and v."""
    return cases.inputs(params, problem, rng)


def outputs(params: Params, problem: Problem) -> Arrays:
    """o, poisoned; sums and lse of earlier keys, the same for a problem: some rows saw none, and
    what their sums hold is poison as well."""
    rng = np.random.default_rng(problem["seqlen_k"])
    sizes = [problem[name] for name in ("batch", "heads_q", "seqlen_q", "head_dim_v")]
    longer = (*sizes[:2], sizes[2] + _MORE_ROWS)
    sums = rng.standard_normal((*longer, sizes[3]), dtype=np.float32)
    lse = (4.0 * rng.standard_normal(longer, dtype=np.float32)).astype(np.float32)
    nothing = rng.random(longer) < 0.2
    sums[nothing], lse[nothing] = np.nan, -np.inf
    rows = slice(1, 1 + sizes[2])
    o = np.full(sizes, np.nan, numpy_dtype(problem["dtype"]))
    return {"o": o, "sums": sums[:, :, rows], "lse": lse[:, :, rows]}


def outputs_sm90(params: Params, problem: Problem) -> Arrays:
    """Also the counter that work is drawn from."""
    return {**outputs(params, problem), "counters": np.zeros(1, np.uint32)}


def reference(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """In float64: rows that are done are in o, the others in sums; what is not written stays."""
    before = outputs({}, problem)
    made = cases.reference(problem, {name: arrays[name] for name in "qkv"})
    lse = [np.asarray(x, np.float64) for x in (before["lse"], made["lse"])]
    top = np.maximum(*lse)
    top = np.where(np.isfinite(top), top, 0.0)
    weights = [np.exp(x - top) for x in lse]
    total = weights[0] + weights[1]
    scale = np.where(total == 0, 1.0, total)[..., None]
    sums = np.where(np.isneginf(lse[0])[..., None], 0.0, before["sums"].astype(np.float64))
    o = (weights[0][..., None] * sums + weights[1][..., None] * made["o"]) / scale
    with np.errstate(divide="ignore"):
        found = np.log(total) + top
    row = np.arange(problem["seqlen_q"])
    done = ((row >= problem["done"][0]) & (row < problem["done"][1]))[:, None]
    old = before["sums"].astype(np.float64)
    return {"o": np.where(done, o, np.nan), "sums": np.where(done, old, o), "lse": found}


PORTABLE = Verification(
    problems=_with_done(cases.problems), inputs=inputs, outputs=outputs, reference=reference,
    tolerance=cases.tolerance,
)  # fmt: skip
SM90 = replace(PORTABLE, problems=_with_done(cases.problems_sm90), outputs=outputs_sm90)
