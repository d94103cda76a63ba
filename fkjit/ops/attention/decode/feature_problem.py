"""Decoding with a form: arguments, reference, problems for tests.

A problem is that of decode_grid.py with window=(left, right) in place of causal (a side without a
bound is as wide as the scores), softcap and score_scalars {name: value}.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fkjit.ops.attention import feature_problem as forms
from fkjit.ops.attention.decode import grid as grid
from fkjit.ops.attention.decode import problem as plain
from fkjit.ops.attention.features import SLOTS, parse
from fkjit.spec import Arrays, Params, Problem

POINTERS = tuple(name for name in forms.POINTERS if not name.startswith("cu_seqlens"))
# Of the small problems and of the full ones; None: as wide as the scores.
_WINDOWS = {"small": ((24, 0), (140, 3)), "full": ((300, 0), (None, 0), (1000, 2), (4095, 0))}


def arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Kernel arguments by name."""
    usual = grid.arguments(params, {**problem, "causal": False}, arrays)
    return {**usual, **forms.form_arguments(problem, arrays)}


def padded_flops(params: Params, problem: Problem) -> float:
    """What the kernel multiplies, and its rules."""
    return 2 * grid.padded_flops(params, problem)


def traffic(problem: Problem) -> float:
    """Bytes of what is read and written, with a bias or mask that is there."""
    return grid.traffic(problem) + problem.get("form_bytes", 0)


def problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """Those of decoding, seen through windows."""
    form = parse(params["form"])
    found = []
    for (left, right), usual in zip(_WINDOWS[scale], plain.problems(params, scale), strict=True):
        longest = usual["longest"]
        found.append({
            **usual, "causal": False, "seqlen_k": longest, "softcap": 2.0 * form.softcap,
            "window": (longest if left is None else left, right), "score_mod": form.score_mod,
            "score_scalars": {name: 0.01 for name, _ in form.scalars},
            "score_slots": tuple((n, SLOTS[i]) for i, (n, _) in enumerate(form.arrays)),
        })  # fmt: skip
    return found


def inputs(params: Params, problem: Problem, rng: np.random.Generator) -> Arrays:
    """Those of decoding, and what scores meet."""
    usual = plain.inputs(params, problem, rng)
    return usual | forms.form_inputs(parse(params["form"]), problem, rng)


def reference(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """o and lse in float64, sequence by sequence."""
    shape = tuple(problem[n] for n in ("batch", "heads_q", "seqlen_q", "head_dim_v"))
    o, lse = np.zeros(shape), np.full(shape[:3], -np.inf)
    names = ("q", *POINTERS)
    exact = {n: np.asarray(arrays[n]).astype(np.float64) for n in names if n in arrays}
    for b, length in enumerate(np.asarray(arrays["seq_lens"])):
        k, v = (plain.keys_of(problem, arrays, side, b, int(length)) for side in ("k", "v"))
        o[b], lse[b] = forms.attend(problem, exact, b, exact["q"][b], k, v)
    return {"o": o, "lse": lse}
