"""Codes of rows as a norm or a gate makes them, beside both calls: rows in, codes out."""

from __future__ import annotations

from typing import Any

import fkjit
from fkjit.arch import Arch
from fkjit.ops.quantize.kernels_made import tile_of
from fkjit.ops.quantize.schemes import SCHEMES
from fkjit.spec import KernelSpec, Params, Problem

from ..core.accuracy import Expected
from ..core.op import Arrays, Candidate, Op, Prepared

_STEP = {"fp8": 2.0**-4, "int8": 2.0**-5}  # of the rows
_EPS = 1e-6


def problem(
    source: str, scheme: str, rows: int, columns: int, residual: bool = False
) -> dict[str, Any]:
    """bf16 rows without gaps, a weight beside a norm; of "gated" SwiGLU's two halves."""
    return {
        "source": source, "scheme": scheme, "rows": rows, "columns": columns, "residual": residual,
        "dtype": "bf16", "x_stride": columns, "other_stride": columns, "eps": _EPS,
        "weight_offset": 0.0, **SCHEMES[scheme]._asdict(),
    }  # fmt: skip


def label(p: Problem) -> str:
    """ "rms_norm fp8_row 8192x8192 residual"."""
    added = " residual" if p["residual"] else ""
    return f"{p['source']} {p['scheme']} {p['rows']}x{p['columns']}{added}"


_SCHEMES = ("fp8_row", "fp8_block", "int8_row")
SETS = {
    "default": [
        *(problem("rms_norm", scheme, 8192, 4096) for scheme in _SCHEMES),
        problem("rms_norm", "fp8_row", 8192, 4096, True),
        problem("rms_norm", "fp8_row", 64, 8192),
        problem("layer_norm", "int8_row", 8192, 4096),
        problem("gated", "fp8_row", 8192, 14_336),
    ],
    "quick": [problem("rms_norm", "fp8_row", 4096, 4096)],
}


def inputs(problem: Problem, device: Any) -> Arrays:
    """Fresh N(0, 1)."""
    torch, (rows, columns) = device.torch, (problem["rows"], problem["columns"])
    place = getattr(device, "place", "cuda")
    gated = problem["source"] == "gated"
    shapes: dict[str, tuple[int, ...]] = {"x": (rows, columns)}
    if gated or problem["residual"]:
        shapes["up" if gated else "residual"] = (rows, columns)
    if not gated:
        shapes["weight"] = (columns,)
    if problem["source"] == "layer_norm":
        shapes["bias"] = (columns,)
    return {
        name: torch.randn(*shape, dtype=torch.bfloat16, device=place)
        for name, shape in shapes.items()
    }


def made(problem: Problem, arrays: Arrays) -> Any:
    """The rows, in float64."""
    import torch

    given = {name: array.double() for name, array in arrays.items()}
    x, functional = given["x"], torch.nn.functional
    if problem["source"] == "gated":
        return functional.silu(x) * given["up"]
    if problem["residual"]:
        x = (x + given["residual"]).bfloat16().double()
    width = (problem["columns"],)
    if problem["source"] == "layer_norm":
        return functional.layer_norm(x, width, given["weight"], given["bias"], problem["eps"])
    return functional.rms_norm(x, width, given["weight"], problem["eps"])


def expected(problem: Problem, arrays: Arrays) -> Expected:
    """The numbers themselves, within the steps of their codes."""
    return Expected([(slice(None), made(problem, arrays))], _STEP[problem["code"]])


def _numbers(returned: Any) -> Any:
    codes = returned[0] if isinstance(returned[0], tuple) else returned
    return fkjit.dequantize(codes, "fp32")


def ours(problem: Problem, arrays: Arrays) -> Prepared:
    """The public call."""
    scheme, (x, residual) = problem["scheme"], (arrays["x"], arrays.get("residual"))
    if problem["source"] == "gated":
        return Prepared(lambda: fkjit.quantize_gated(x, arrays["up"], scheme), _numbers)
    weight = arrays["weight"]
    if problem["source"] == "layer_norm":
        bias, eps = arrays["bias"], problem["eps"]
        return Prepared(
            lambda: fkjit.quantize_layer_norm(x, weight, bias, scheme, eps=eps, residual=residual),
            _numbers,
        )
    return Prepared(lambda: fkjit.quantize_rms_norm(x, weight, scheme, residual=residual), _numbers)


def _both(problem: Problem, arrays: Arrays) -> Prepared:
    """The norm, or PyTorch's gate, and `quantize`: 16-bit rows between."""
    import torch

    scheme, (x, residual) = problem["scheme"], (arrays["x"], arrays.get("residual"))
    silu, source, eps = torch.nn.functional.silu, problem["source"], problem["eps"]

    def call() -> Any:
        if source == "gated":
            return fkjit.quantize(silu(x) * arrays["up"], scheme)
        norm = fkjit.layer_norm if source == "layer_norm" else fkjit.rms_norm
        more = {"bias": arrays["bias"]} if source == "layer_norm" else {}
        y = norm(x, arrays["weight"], eps=eps, residual=residual, **more)
        return fkjit.quantize(y if residual is None else y[0], scheme)

    return Prepared(call, _numbers)


def choose(spec: KernelSpec, problem: Problem, arch: Arch) -> Params:
    """The variant that the public call takes."""
    kinds = {name: problem[name] for name in ("dtype", "source", "code", "span")}
    activation = "silu" if problem["source"] == "gated" else "none"
    tile = tile_of(problem["columns"])
    return {**kinds, "weight_dtype": problem["dtype"], "activation": activation, **tile}


OP = Op(
    name="quantize_rows", sets=SETS, label=label, inputs=inputs, expected=expected, ours=ours,
    choose=choose, kernel="quantize.made_rows",
    peers=(Candidate(name="two calls", package="torch", module="torch", prepare=_both),),
)  # fmt: skip
