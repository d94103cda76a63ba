"""Quantization: bytes of numbers in, of codes out."""

from __future__ import annotations

from typing import Any

import fkjit
from fkjit.arch import Arch
from fkjit.ops.quantize.schemes import SCHEMES, Scheme
from fkjit.spec import KernelSpec, Params, Problem

from ..core.accuracy import Expected
from ..core.op import Arrays, Op, Prepared

_STEP = {"fp8": 2.0**-4, "int8": 2.0**-7, "int4": 1 / 7}  # of a number, or of the greatest


def problem(scheme: str, rows: int, columns: int, weight: bool = False) -> dict[str, Any]:
    """bf16 rows without gaps; `weight`: scales of 128 by 128."""
    how = Scheme("fp8", "block") if weight else SCHEMES[scheme]
    return {
        "rows": rows, "columns": columns, "x_stride": columns, "dtype": "bf16", **how._asdict(),
        "scheme": scheme, "weight": weight,
    }  # fmt: skip


def label(p: Problem) -> str:
    """ "fp8_row 8192x8192"."""
    kind = f"{p['scheme']}{' weight' if p['weight'] else ''}"
    return f"{kind} {p['rows']}x{p['columns']}"


SETS = {
    "default": [
        *(problem(scheme, 8192, 8192) for scheme in SCHEMES),
        problem("fp8_block", 8192, 8192, True),
        problem("fp8_row", 8, 4096),
    ],
    "quick": [problem("fp8_row", 4096, 4096)],
}


def inputs(problem: Problem, device: Any) -> Arrays:
    """Fresh N(0, 1)."""
    torch = device.torch
    shape, place = (problem["rows"], problem["columns"]), getattr(device, "place", "cuda")
    return {"x": torch.randn(*shape, dtype=torch.bfloat16, device=place)}


def expected(problem: Problem, arrays: Arrays) -> Expected:
    """The numbers themselves, within the steps of their codes."""
    return Expected([(slice(None), arrays["x"].double())], _STEP[problem["code"]])


def ours(problem: Problem, arrays: Arrays) -> Prepared:
    """The public call."""
    x, scheme, weight = arrays["x"], problem["scheme"], problem["weight"]
    return Prepared(
        lambda: fkjit.quantize(x, scheme, weight=weight),
        output=lambda made: fkjit.dequantize(made, "fp32"),
    )


def choose(spec: KernelSpec, problem: Problem, arch: Arch) -> Params:
    """The variant that the public call takes."""
    kinds = {name: problem[name] for name in ("dtype", "code", "span")}
    return {**{k: v for k, v in kinds.items() if any(k == p.name for p in spec.params)},
            "wide": problem["columns"] % 8 == 0}  # fmt: skip


OP = Op(
    name="quantize", sets=SETS, label=label, inputs=inputs, expected=expected, ours=ours,
    choose=choose, kernel="quantize.spans",
)  # fmt: skip
