"""How products of ragged tiles are checked: experts with one tile of any number of rows, with
several, with none; rows of k that no whole step has; NaN where nobody's places are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fkjit.ops.gemm.cases import TOLERANCE
from fkjit.ops.gemm.problem import outputs_of
from fkjit.ops.grouped import cases
from fkjit.ops.grouped.kernels_ragged import EVEN
from fkjit.ops.quantize.cases import decode, encode, scales_of
from fkjit.ops.quantize.schemes import Scheme
from fkjit.runtime.interop import numpy_dtype
from fkjit.spec import Arrays, Params, Problem, Verification

_ROW, _SUMS = Scheme("fp8", "row"), 4e-3


def problem(params: Params, blocks: tuple[int, ...], n: int, k: int, **given: Any) -> Problem:
    """`blocks` of 16 places of each expert. With two multiprocessors and two columns of tiles a
    block had the same columns of all experts, and would write over its own rows of a neighbour's.
    """
    m = (sum(blocks) + 2) * EVEN  # there is room for two more
    names = ("dtype", "weight_layout", "activation", "gate", "pre", "codes")
    return {
        "m": m, "n": n, "k": k, "experts": len(blocks), "blocks": blocks, "block_size": EVEN,
        "groups": "ROWS", "gather": False, "x_layout": "mk",
        "x_stride": k, "out_stride": n, "residual_stride": n, "scale": 1.0, "bias": True,
        "residual": False, **{name: params[name] for name in names}, "out_dtype": params["dtype"],
        "multiprocessors": 3, **given,
    }  # fmt: skip


def problems(params: Params, scale: str) -> list[Problem]:
    """Columns of out that are no whole tile's."""
    n, k = 72 if params["gate"] else 152, 192 if params["codes"] else 80
    if scale == "full":
        return [problem(params, (3, 0, 17, 7, 21, 40), 1032, 1296, multiprocessors=132)]
    return [
        problem(params, (3, 0, 17), n, k),
        problem(params, (0, 21), n, 48, bias=False),
    ]


def inputs(params: Params, p: Problem, rng: np.random.Generator) -> Arrays:
    """N(0, 1) and weights such that sums are."""
    if not p["codes"]:
        return cases.inputs(params, p, rng)
    m, k, wide, experts = p["m"], p["k"], outputs_of(p), p["experts"]
    x = rng.standard_normal((m, k)) * 4.0 ** rng.integers(-1, 2, (m, 1))
    weight = rng.standard_normal((experts * wide, k)) / math.sqrt(k)
    weight *= 2.0 ** rng.integers(-2, 1, (experts * wide, 1))
    x, weight = x.astype(np.float32), weight.astype(np.float32)
    x_scales, scales = scales_of(x, _ROW), scales_of(weight, _ROW)
    codes, end = encode(x, x_scales, _ROW), cases.starts(p)[-1]
    codes[end:], x_scales[end:] = 0x7F, np.nan
    made = {
        "x": codes, "x_scales": x_scales, "scales": scales.reshape(experts, wide),
        "weight": encode(weight, scales, _ROW).reshape(experts, wide, k),
        "offsets": cases.starts(p),
    }  # fmt: skip
    if p["bias"]:
        made["bias"] = rng.standard_normal((experts, wide)).astype(numpy_dtype(p["dtype"]))
    return made


def reference(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """Of codes the products of the numbers that they stand for."""
    if not p["codes"]:
        return cases.reference(p, arrays)
    x = decode(np.asarray(arrays["x"]), np.asarray(arrays["x_scales"]), _ROW)
    codes, scales = np.asarray(arrays["weight"]), np.asarray(arrays["scales"])
    weight = decode(codes.reshape(-1, p["k"]), scales.reshape(-1), _ROW).reshape(codes.shape)
    return cases.reference(p, {**arrays, "x": x, "weight": weight})


def tolerance(params: Params) -> float:
    """Of e4m3 at least what tensor cores leave of sums, 13 bits."""
    return max(TOLERANCE[params["dtype"]], _SUMS if params["codes"] else 0.0)


RAGGED = Verification(
    problems=problems, inputs=inputs, outputs=cases.outputs, reference=reference,
    tolerance=tolerance,
)  # fmt: skip
