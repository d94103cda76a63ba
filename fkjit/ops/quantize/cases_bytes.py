"""How the kernels of products of codes with codes are checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fkjit.ops.gemm.cases import TOLERANCE
from fkjit.ops.quantize import cases_linear
from fkjit.ops.quantize.cases import encode, scales_of
from fkjit.ops.quantize.cases_linear import inputs, problem
from fkjit.ops.quantize.schemes import WIDTH, Scheme
from fkjit.spec import Arrays, Params, Problem, Verification

CODE_STEP = 33 / 448  # of the greatest codes: a sum in another order rounds to another
_SUMS = 2e-3  # what tensor cores leave of sums of e4m3 products, some 13 bits
_OF_ROWS = Scheme("fp8", "group")


def _problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """Ragged tiles, a last step of k that is short, more tiles than blocks."""
    rows, outputs_of = params["block"]
    columns = outputs_of // (2 if params["gate"] else 1)
    blocks = params["scales"] == "blocks"
    spans = {"span": "block", "x_span": "group"} if blocks else {"span": "row", "x_span": "row"}
    coded = params.get("coded", False)
    more = {**spans, "residual": params["residual"], "scale": 0.5, "coded": coded}
    even = 128 if blocks and params["gate"] else 1  # outputs that gate has to have
    if scale == "full":
        shapes = ((4096, 4096, 4096), (333, 1280, 7184), (16, 4096, 4096))
        return [problem(params, *shape, **more) for shape in shapes]
    tensor = {"span": "tensor"} if not blocks and params["code"] == "fp8" else {}
    wide = -(-(2 * columns + 24) // even) * even
    few = -(-40 // even) * even
    return [
        problem(params, 21, wide, 128 * 2 + 48, gap=0 if coded else 8, multiprocessors=2, **more),
        problem(params, rows + 5, few, 64, bias=False, **{**more, **tensor}),
    ]


def outputs(params: Params, p: Problem) -> Arrays:
    """NaN where the kernel must write."""
    if not p["coded"]:
        return cases_linear.outputs(params, p)
    codes = np.full((p["m"], p["n"]), 0x7F, np.uint8)
    return {"out": codes, "out_scales": np.full((p["m"], p["n"] // WIDTH), np.nan, np.float32)}


def reference(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """The product of the numbers that codes stand for, quantized where it is codes."""
    made = cases_linear.reference(p, arrays)
    if not p["coded"]:
        return made
    y = made["out"].reshape(p["m"], p["n"]).astype(np.float32)
    scales = scales_of(y, _OF_ROWS)
    return {"out": encode(y, scales, _OF_ROWS), "out_scales": scales}


def numbers(params: Params, name: str, array: Any) -> Any:
    """e4m3 codes as what they stand for: bytes on both sides of 0 are far from each other."""
    if name != "out" or not params.get("coded"):
        return array
    import ml_dtypes

    return np.asarray(array).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def _tolerance(params: Params) -> float:
    return CODE_STEP if params.get("coded") else TOLERANCE[params["out_dtype"]]


def _block_problems(params: Params, scale: str) -> list[dict[str, Any]]:
    return _problems({**params, "scales": "blocks", "code": "fp8"}, scale)


BLOCKS = Verification(
    problems=_block_problems, inputs=inputs, outputs=outputs, reference=reference,
    tolerance=lambda params: max(_tolerance(params), _SUMS), numbers=numbers,
)  # fmt: skip
BYTES = Verification(
    problems=_problems, inputs=inputs, outputs=outputs, reference=reference,
    tolerance=_tolerance, numbers=numbers,
)  # fmt: skip
