"""How grouped products of codes are checked: experts with some rows and with none, NaN where
nobody's places are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fkjit.ops.gemm.cases import TOLERANCE, activated
from fkjit.ops.gemm.problem import outputs_of
from fkjit.ops.grouped.cases import runs, starts
from fkjit.ops.quantize.cases import decode, encode, scales_of
from fkjit.ops.quantize.cases_bytes import CODE_STEP, numbers
from fkjit.ops.quantize.schemes import WIDTH, Scheme
from fkjit.runtime.interop import numpy_dtype
from fkjit.spec import Arrays, Params, Problem, Verification

_SUMS = 2e-3
_OF_X, _OF_WEIGHT, _BLOCK = Scheme("fp8", "group"), Scheme("fp8", "block"), 64
_OF_ROWS = Scheme("fp8", "row")


def _schemes(p: Problem) -> tuple[Scheme, Scheme]:
    """Of x, and of the weight."""
    return (_OF_ROWS, _OF_ROWS) if p["scales"] == "rows" else (_OF_X, _OF_WEIGHT)


def problem(params: Params, blocks: tuple[int, ...], n: int, k: int, **given: Any) -> Problem:
    """`blocks` of places of each expert."""
    m = (sum(blocks) + 2) * _BLOCK  # there is room for two more
    names = ("dtype", "out_dtype", "activation", "gate")
    return {
        "m": m, "n": n, "k": k, "experts": len(blocks), "blocks": blocks, "block_size": _BLOCK,
        "groups": "ROWS", "x_stride": k, "out_stride": n, "residual_stride": n, "scale": 1.0,
        "bias": True, "residual": False, **{name: params[name] for name in names},
        "coded": params.get("coded", False), "scales": "rows", "multiprocessors": 2, **given,
    }  # fmt: skip


def problems(params: Params, scale: str) -> list[Problem]:
    """Ragged columns, unless gate and up have their own scales; a last step of k that is short."""
    blocks = "coded" in params
    n = (2 if params.get("coded") else 1) * WIDTH if params["gate"] else 2 * WIDTH + 24
    scales = {"scales": "blocks" if blocks else "rows"}
    if scale == "full":
        return [problem(params, (3, 0, 1, 7, 2), 1024, 1296, multiprocessors=132, **scales)]
    return [
        problem(params, (1, 0, 4), n, WIDTH + 48, **scales),
        problem(params, (0, 3), n, 64, bias=False, **scales),
    ]


def inputs(params: Params, p: Problem, rng: np.random.Generator) -> Arrays:
    """N(0, 1) and weights such that sums are, of numbers of quite another size in each block."""
    m, k, wide, experts = p["m"], p["k"], outputs_of(p), p["experts"]
    x = rng.standard_normal((m, k)).astype(np.float32)
    x *= 4.0 ** rng.integers(-1, 2, (m, 1))
    of_x, of_weight = _schemes(p)
    x_scales = scales_of(x, of_x)
    codes = encode(x, x_scales, of_x)
    codes[starts(p)[-1] :], x_scales[starts(p)[-1] :] = 0x7F, np.nan
    weight = rng.standard_normal((experts, wide, k)).astype(np.float32) / math.sqrt(k)
    weight *= 2.0 ** rng.integers(-2, 1, (experts, 1, 1))
    scales = np.stack([scales_of(own, of_weight) for own in weight])
    each = zip(weight, scales, strict=True)
    made = {
        "x": codes, "x_scales": x_scales, "scales": scales, "offsets": starts(p),
        "weight": np.stack([encode(own, by, of_weight) for own, by in each]),
    }  # fmt: skip
    if p["bias"]:
        made["bias"] = rng.standard_normal((experts, wide)).astype(numpy_dtype(p["dtype"]))
    return made


def outputs(params: Params, p: Problem) -> Arrays:
    """NaN, which stays where nobody's places are."""
    if p["coded"]:
        codes = np.full((p["m"], p["n"]), 0x7F, np.uint8)
        return {"out": codes, "out_scales": np.full((p["m"], p["n"] // WIDTH), np.nan, np.float32)}
    return {"out": np.full((p["m"], p["n"]), np.nan, numpy_dtype(p["out_dtype"]))}


def reference(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """The products of the numbers that codes stand for, expert by expert."""
    of_x, of_weight = _schemes(p)
    x = decode(np.asarray(arrays["x"]), np.asarray(arrays["x_scales"]), of_x).astype(np.float64)
    z = np.full((p["m"], outputs_of(p)), np.nan)
    for expert, run in enumerate(runs(p)):
        codes, scales = (np.asarray(arrays[name])[expert] for name in ("weight", "scales"))
        z[run] = x[run] @ decode(codes, scales, of_weight).astype(np.float64).T
        if p["bias"]:
            z[run] += np.asarray(arrays["bias"])[expert].astype(np.float64)
    y, n = activated(p["activation"], z[:, : p["n"]]), p["n"]
    y = y * z[:, n:] if p["gate"] else y
    if not p["coded"]:
        return {"out": y}
    scales = scales_of(y.astype(np.float32), _OF_X)
    return {"out": encode(y.astype(np.float32), scales, _OF_X), "out_scales": scales}


def tolerance(params: Params) -> float:
    """Of codes a step of the greatest ones, 32 of 448: a sum in another order rounds to another.
    Else at least what Hopper's tensor cores leave of sums of e4m3 products, some 14 bits."""
    return CODE_STEP if params.get("coded") else max(TOLERANCE[params["out_dtype"]], _SUMS)


CODES = BLOCKS = Verification(
    problems=problems, inputs=inputs, outputs=outputs, reference=reference, tolerance=tolerance,
    numbers=numbers,
)  # fmt: skip
