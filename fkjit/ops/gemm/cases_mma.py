"""How the portable products are checked: ragged tiles and single ones, all of the epilogue."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fkjit.ops.gemm import cases
from fkjit.spec import Params


def _problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """Several tiles that are cut on each side, with gaps between rows; and less than one tile."""
    block_m, block_n, block_k = params["block"]
    columns = block_n // 2 if params.get("gate") else block_n
    tiles, steps = (1, 2) if scale == "small" else (9, 40)
    step = 8 if params["aligned"] else 1  # odd sizes where rows need no boundaries
    ragged = (tiles * block_m + 24 + step % 8, tiles * columns + 24 + step % 8)
    k = steps * block_k + block_k // 2 + step % 8
    kept = {name: params[name] for name in ("residual", "pre")}
    more = {**kept, "gap": 8, "scale": 0.75}
    return [
        cases.problem(params, *ragged, k, **more),
        cases.problem(params, block_m, columns, 5 * block_k, **kept, bias=False),
        cases.problem(params, step, step, step, **kept),
    ]


FMA = cases.verification(_problems)
_TF32_TOLERANCE = 6e-3  # each factor is rounded to ten bits of fraction


def _tolerance(params: Params) -> float:
    return _TF32_TOLERANCE if params["dtype"] == "fp32" else FMA.tolerance(params)


MMA = replace(FMA, tolerance=_tolerance)
