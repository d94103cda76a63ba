"""How the list of a mixed batch's long sequences is checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fkjit.ops.attention.features import LISTED
from fkjit.spec import Arrays, Params, Problem, Verification


def _inputs(params: Params, problem: Problem, rng: np.random.Generator) -> Arrays:
    lengths = rng.choice((0, 1, 1, 2, 300), problem["batch"])
    return {"cu_seqlens_q": np.cumsum((0, *lengths)).astype(np.int32)}


def _listed(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """As doubles; what is behind the list is as it was."""
    found = np.flatnonzero(np.diff(arrays["cu_seqlens_q"]) > 1)
    made = np.full(1 + problem["batch"], -7.0)
    made[0], made[1 : 1 + len(found)] = len(found), found
    return {LISTED: made}


MIXED_PLAN = Verification(
    problems=lambda params, scale: [{"batch": batch} for batch in (1, 70, 2 * 256 + 9)],
    inputs=_inputs,
    outputs=lambda params, problem: {LISTED: np.full(1 + problem["batch"], -7, np.int32)},
    reference=_listed,
)
