"""How the rotary embedding is checked: problems, arrays, references in float64."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from fkjit.ops.rope.frequencies import (
    THETA,
    Llama3Scaling,
    YarnScaling,
    frequencies,
    rope_table,
)
from fkjit.ops.rope.kernels import ORDER
from fkjit.runtime.interop import numpy_dtype
from fkjit.spec import Arrays, Params, Problem, Verification

_TABLE_ROWS = 400  # of a test's table


def problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """Each layout and kind of positions; whole and partial rotation; k of fewer heads, or none."""
    many = 1 if scale == "small" else 40
    whole, part = (64, 32) if params["vector"] else (14, 6)
    shared = {"dtype": params["dtype"], "interleaved": params["interleaved"], "theta": THETA}
    cases = (
        # layout, B, S, Hq, Hkv, rotary_dim, positions, scaling, inverse
        ("bhsd", 2, 5 * many, 3, 1, whole, "none", None, False),
        ("bshd", 2, 7 * many, 4, 2, part, "ids", Llama3Scaling(), True),
        ("bshd", 3, 1, 9, 0, whole, "starts", None, False),
        ("thd", 1, 9 * many, 5, 5, part, "ids", Llama3Scaling(32.0, 1.0, 4.0, 64), False),
    )
    return [
        {
            **shared,
            "layout": layout,
            "batch": batch,
            "length": length,
            "heads_q": heads_q,
            "heads_k": heads_k,
            "head_dim": whole,
            "rotary_dim": rotary,
            "positions": positions,
            "start": 3 if positions == "none" else 0,
            "scaling": scaling,
            "inverse": inverse,
        }
        for layout, batch, length, heads_q, heads_k, rotary, positions, scaling, inverse in cases
    ]


def shape_of(problem: Problem, heads: int) -> tuple[int, ...]:
    """Of q or k."""
    batch, length, dim = problem["batch"], problem["length"], problem["head_dim"]
    return {
        "bhsd": (batch, heads, length, dim),
        "bshd": (batch, length, heads, dim),
        "thd": (length, heads, dim),
    }[problem["layout"]]


def inputs(params: Params, problem: Problem, rng: np.random.Generator) -> Arrays:
    """Fresh N(0, 1) q and k, positions up to a million."""
    return _inputs(problem, rng, 1_000_001)


def table_inputs(params: Params, problem: Problem, rng: np.random.Generator) -> Arrays:
    """The same with a table, of YaRN's frequencies in every second problem."""
    scaling = YarnScaling(4.0, 100) if problem["heads_q"] % 2 else None
    table = rope_table(_TABLE_ROWS, problem["rotary_dim"], scaling=scaling)
    return {**_inputs(problem, rng, _TABLE_ROWS), "table": table}


def _inputs(problem: Problem, rng: np.random.Generator, limit: int) -> Arrays:
    made: dict[str, Any] = {}
    for name, heads in (("q", problem["heads_q"]), ("k", problem["heads_k"])):
        values = rng.standard_normal(shape_of(problem, heads), dtype=np.float32)
        made |= {name: values.astype(numpy_dtype(problem["dtype"]))} if heads else {}
    shape: tuple[int, ...] = (problem["batch"], problem["length"])
    if problem["positions"] == "starts":
        made["positions"] = rng.integers(0, limit - problem["length"], shape[:1], np.int64)
    elif problem["positions"] == "ids":
        shape = shape[1:] if problem["layout"] == "thd" else shape
        made["positions"] = rng.integers(0, limit, shape, np.int32)
    return made


def outputs(params: Params, problem: Problem) -> Arrays:
    """out_q and out_k, poisoned with NaN."""
    made: dict[str, Any] = {}
    for name, heads in (("out_q", problem["heads_q"]), ("out_k", problem["heads_k"])):
        shape, dtype = shape_of(problem, heads), numpy_dtype(problem["dtype"])
        made |= {name: np.full(shape, np.nan, dtype)} if heads else {}
    return made


def positions_of(problem: Problem, ids: Any) -> np.ndarray:
    """[batch, length] int64."""
    rows = np.arange(problem["length"], dtype=np.int64) + problem["start"]
    shape = (problem["batch"], problem["length"])
    if problem["positions"] == "none":
        return np.broadcast_to(rows, shape)
    ids = np.asarray(ids).astype(np.int64)
    return ids[:, None] + rows if problem["positions"] == "starts" else np.broadcast_to(ids, shape)


def rotated(problem: Problem, x: np.ndarray, cosine: np.ndarray, sine: np.ndarray) -> np.ndarray:
    """x in float64, turned by angles [batch, length, pairs], in x's layout."""
    order = [1 if axis is None else axis for axis in ORDER[problem["layout"]]]
    batched = x[None] if problem["layout"] == "thd" else x
    order = order if problem["layout"] != "thd" else [0, 2, 1]
    seen = np.transpose(batched, [*order, 3]).astype(np.float64)  # [B, H, S, D], a copy
    rotary, half = problem["rotary_dim"], problem["rotary_dim"] // 2
    one = slice(0, rotary, 2) if problem["interleaved"] else slice(0, half)
    two = slice(1, rotary, 2) if problem["interleaved"] else slice(half, rotary)
    u, v = seen[..., one].copy(), seen[..., two].copy()
    cosine, sine = cosine[:, None], sine[:, None] * (-1 if problem["inverse"] else 1)
    seen[..., one], seen[..., two] = u * cosine - v * sine, v * cosine + u * sine
    back = np.transpose(seen, [*np.argsort(order), 3])
    return back[0] if problem["layout"] == "thd" else back


def reference(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """out_q and out_k in float64, by the table if there is one."""
    at = positions_of(problem, arrays.get("positions"))
    if arrays.get("table") is not None:
        entry = np.asarray(arrays["table"]).astype(np.float64)[at]
        cosine, sine = np.split(entry, 2, -1)
    else:
        turning = frequencies(problem["rotary_dim"], problem["theta"], problem["scaling"])
        angle = at[..., None].astype(np.longdouble) * turning
        cosine, sine = (f(angle).astype(np.float64) for f in (np.cos, np.sin))
    return {
        f"out_{name}": rotated(problem, np.asarray(arrays[name]), cosine, sine)
        for name in ("q", "k")
        if arrays.get(name) is not None
    }


_VERIFICATION = partial(
    Verification,
    problems=problems,
    outputs=outputs,
    reference=reference,
    tolerance=lambda params: {"fp16": 6e-4, "bf16": 4.5e-3, "fp32": 4e-7}[params["dtype"]],
)
FUSED = _VERIFICATION(inputs=inputs)
TABLE = _VERIFICATION(inputs=table_inputs)
