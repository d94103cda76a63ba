"""How the portable products are checked: ragged tiles and single ones, all of the epilogue."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fkjit.ops.gemm import cases
from fkjit.ops.gemm.kernels_mma import fma_scratch
from fkjit.spec import Params


def _problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """Several tiles that are cut on each side, with gaps between rows; and less than one tile."""
    block_m, block_n, block_k = params["block"]
    columns = block_n // 2 if params.get("gate") else block_n
    tiles, steps = (1, 2) if scale == "small" else (9, 40)
    step = 8 if params["aligned"] else 1  # odd sizes where rows need no boundaries
    ragged = (tiles * block_m + 24 + step % 8, tiles * columns + 24 + step % 8)
    k = steps * block_k + block_k // 2 + step % 8
    kept = _kept(params)
    more = {**kept, "gap": 8, "scale": 0.75}
    return [
        cases.problem(params, *ragged, k, **more),
        cases.problem(params, block_m, columns, 5 * block_k, **kept, bias=False),
        cases.problem(params, step, step, step, **kept),
    ]


def _fma_problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """With a k of more than one long run where there are such, and parts of one step or of none."""
    made = _problems(params, scale)
    if not params["long_k"]:
        return made
    return [*made, cases.problem(params, 64, 64, 2 * 1024 + 24, **_kept(params))]


def _kept(params: Params) -> dict[str, Any]:
    return {name: params[name] for name in ("residual", "pre")}


FMA = cases.with_scratch(cases.verification(_fma_problems), fma_scratch)
_PLAIN = cases.verification(_problems)
_TF32_TOLERANCE = 6e-3  # each factor is rounded to ten bits of fraction


def _tolerance(params: Params) -> float:
    return _TF32_TOLERANCE if params["dtype"] == "fp32" else _PLAIN.tolerance(params)


MMA = replace(_PLAIN, tolerance=_tolerance)
