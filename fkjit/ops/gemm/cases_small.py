"""How the kernels of products with few rows of x are checked: problems that fit their tiles."""

from __future__ import annotations

from typing import Any

from fkjit.ops.gemm import cases
from fkjit.ops.gemm.kernels_small import gemv_span, skinny_scratch
from fkjit.spec import Params


def _everything(params: Params, gap: int = 8) -> dict[str, Any]:
    """All that an epilogue does; `pre` has the dtype of x, which sets another tolerance."""
    alike = params["out_dtype"] == params["dtype"]
    return {"residual": True, "pre": alike, "scale": 0.5, "gap": gap}


def _gemv(params: Params, scale: str) -> list[dict[str, Any]]:
    """A ragged last tile, spans of k that not all warps have, and everything in the epilogue."""
    (outputs, warps, unroll), more = params["tile"], _everything(params)
    ragged = 2 * outputs + (3 if params["weight_layout"] == "nk" else 8)
    k = gemv_span(params) * warps * unroll + (44 if params["dtype"] == "fp32" else 40)
    if scale == "full":
        shapes = ((1, 4096, 4096), (8, 4104, 1000), (5, ragged, 14336))
        return [cases.problem(params, *shape, **more) for shape in shapes]
    return [
        cases.problem(params, 5, ragged, k, **more),
        cases.problem(params, 8, outputs, 72),
        cases.problem(params, 1, 8, 8, bias=False, residual=True),
    ]


def _skinny(params: Params, scale: str) -> list[dict[str, Any]]:
    """The same, with k in one part and in several, of which one may be shorter than the ring."""
    rows, block_k, _ = params["tile"]
    tokens, even = params["tokens"], 8 if params["aligned"] else 1
    if scale == "full":
        shapes = ((tokens, 4096, 4096, 1), (tokens - 3, 4104, 1000, 3), (5, 136, 14336, 7))
        return [
            cases.problem(params, *shape, split=s, **_everything(params)) for *shape, s in shapes
        ]
    ragged = _everything(params, even)
    return [
        cases.problem(params, tokens - 3, rows + 3 * even, 7 * block_k + even, split=3, **ragged),
        cases.problem(params, tokens, rows, 6 * block_k, split=1),
        cases.problem(params, 1, 8, 8, bias=False, residual=True, split=2),
    ]


GEMV = cases.verification(_gemv)
SKINNY = cases.with_scratch(cases.verification(_skinny), skinny_scratch)
