"""How `rope_kv_append` is checked: problems, arrays, references of both of its halves."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from fkjit.ops.kv import cases as kv
from fkjit.ops.rope import cases as rope
from fkjit.ops.rope.frequencies import THETA, Llama3Scaling, rope_table
from fkjit.runtime.interop import numpy_dtype
from fkjit.spec import Arrays, Params, Problem, Verification

_TABLE_ROWS = 400  # of a test's table


def problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """Whole and partial rotation, one token and several, both layouts."""
    many = 1 if scale == "small" else 60
    whole, part = (64, 32) if params["vector"] else (14, 6)
    found = []
    for tokens, heads_q, heads, rotary, layout, words in (
        (1, 4, 1, whole, "nhd", 1),
        (13 * many, 5, 2, part, "hnd", 2),
    ):
        pages = -(-tokens // 16) + 2
        one = kv.problem_of(params, tokens, heads, whole, 16, pages, layout, slot_step=words)
        found.append(
            {
                **one,
                **{"heads_q": heads_q, "rotary_dim": rotary, "theta": THETA},
                **{"interleaved": params["interleaved"], "skipped": 0.2 * (tokens > 1)},
                "scaling": Llama3Scaling() if tokens > 1 else None,
            }
        )
    return found


def inputs(params: Params, problem: Problem, rng: np.random.Generator) -> Arrays:
    """Fresh q, k, v, slots, scales; positions up to a million."""
    return _inputs(params, problem, rng, 1_000_001)


def tabled_inputs(params: Params, problem: Problem, rng: np.random.Generator) -> Arrays:
    """The same with a table."""
    table = rope_table(_TABLE_ROWS, problem["rotary_dim"])
    return {**_inputs(params, problem, rng, _TABLE_ROWS), "table": table}


def _inputs(params: Params, problem: Problem, rng: np.random.Generator, limit: int) -> Arrays:
    shape = (problem["tokens"], problem["heads_q"], problem["head_dim"])
    kind = np.int64 if problem["slot_step"] == 2 else np.int32
    return {
        "q": rng.standard_normal(shape, dtype=np.float32).astype(numpy_dtype(problem["dtype"])),
        **kv.append_inputs(params, problem, rng),
        "positions": rng.integers(0, limit, shape[:1], kind),
    }


def outputs(params: Params, problem: Problem) -> Arrays:
    """out_q, poisoned with NaN, and pages with the same number everywhere."""
    shape = (problem["tokens"], problem["heads_q"], problem["head_dim"])
    q = np.full(shape, np.nan, numpy_dtype(problem["dtype"]))
    return {"out_q": q, **kv.append_outputs(params, problem)}


def turned(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """out_q and out_k in float64."""
    turning = {
        **{"layout": "thd", "batch": 1, "length": problem["tokens"], "start": 0},
        **{name: problem[name] for name in ("rotary_dim", "theta", "scaling", "interleaved")},
        **{"inverse": False, "positions": "ids"},
    }
    return rope.reference(turning, arrays)


def reference(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """out_q and v_pages; k_pages where they hold numbers and not codes, of which a last bit of k
    may make the next one."""
    k = kv.seen_tokens(problem, np.asarray(arrays["k"]), "k")
    names = {name: arrays.get(name) for name in ("q", "positions", "table")}
    found = turned(problem, {**names, "k": k})
    pages = kv.appended(problem, arrays)
    if problem["storage"] == "same":
        slots = np.asarray(arrays["slot_mapping"])
        kept = kv.by_slot(problem, pages["k_pages"]).copy()
        kept[slots[slots >= 0]] = found["out_k"][slots >= 0]
        pages["k_pages"] = kv.from_slots(problem, kept)
    else:
        del pages["k_pages"]
    return {"out_q": found["out_q"], **pages}


_VERIFICATION = partial(
    Verification,
    problems=problems,
    outputs=outputs,
    reference=reference,
    tolerance=lambda params: {"fp16": 6e-4, "bf16": 4.5e-3, "fp32": 4e-7}[params["dtype"]],
)
COMPUTED = _VERIFICATION(inputs=inputs)
TABLED = _VERIFICATION(inputs=tabled_inputs)
