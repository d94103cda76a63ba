"""How the kernels of products with few rows of x are checked: problems that fit their tiles."""

from __future__ import annotations

from typing import Any

from fkjit.ops.gemm import cases
from fkjit.spec import Params


def _gemv(params: Params, scale: str) -> list[dict[str, Any]]:
    """A ragged last tile, spans of k that not all warps have, and everything in the epilogue."""
    outputs, warps, unroll = params["tile"]
    more = {"residual": True, "pre": True, "scale": 0.5, "gap": 8}
    if scale == "full":
        shapes = ((1, 4096, 4096), (8, 4104, 1000), (5, 2 * outputs + 8, 14336))
        return [cases.problem(params, *shape, **more) for shape in shapes]
    return [
        cases.problem(params, 5, 2 * outputs + 8, 32 * warps * unroll + 40, **more),
        cases.problem(params, 8, outputs, 72),
        cases.problem(params, 1, 8, 8, bias=False, residual=True),
    ]


GEMV = cases.verification(_gemv)
