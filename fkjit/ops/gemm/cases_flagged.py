"""How products with flags are checked: all flags are set; what is counted, and from which row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fkjit.ops.gemm import cases
from fkjit.ops.gemm.flagged import TELLS, counted
from fkjit.spec import Arrays, Params, Problem, Verification


def _problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """Two chunks, the last rows first, more tiles than blocks; columns that are cut."""
    rows = 256 if params["cluster"] > 1 else params["block"][0]
    wide, deep = (params["block"][1] // (2 if params["gate"] else 1), 136)
    if scale != "small":
        rows, wide, deep = 4 * rows, 5 * wide, 1000
    given = {"residual": False, "pre": False, "how": params["how"], "chunk_rows": rows}
    blocks = 2 * params["cluster"]
    found = [
        {**cases.problem(params, 2 * rows, wide + 24, deep, **given), "from_row": rows,
         "multiprocessors": blocks},
        {**cases.problem(params, rows, wide - 8, 64, **given, bias=False), "from_row": 0,
         "multiprocessors": blocks},
    ]  # fmt: skip
    return [{**p, "count": counted(params, p) if params["how"] == TELLS else 1} for p in found]


def outputs(params: Params, p: Problem) -> Arrays:
    """Flags that are set, or counts of nothing."""
    chunks = p["m"] // p["chunk_rows"]
    flags = np.full(chunks, 0 if params["how"] == TELLS else 1, np.int32)
    return {**cases.outputs(params, p), "flags": flags}


def reference(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """Out, and what is counted of each chunk."""
    flags = np.full(p["m"] // p["chunk_rows"], float(p["count"]))
    return {**cases.reference(p, arrays), "flags": flags}


FLAGGED = Verification(
    problems=_problems, inputs=cases.inputs, outputs=outputs, reference=reference,
    tolerance=lambda params: cases.TOLERANCE[params["dtype"]],
)  # fmt: skip
