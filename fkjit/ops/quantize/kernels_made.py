"""The kernel of `quantize_rms_norm`, `quantize_layer_norm` and `quantize_gated`.

A problem has rows, columns, x_stride and other_stride (elements), eps, weight_offset, residual
(whether there is one) and affine ("none", "weight", "both"). Arrays: x, residual, weight, bias
-> data, scales, sum; or gate, up -> data, scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fkjit.ops.gemm.epilogue import ACTIVATIONS
from fkjit.ops.quantize.schemes import WIDTH
from fkjit.runtime.interop import ITEMSIZE
from fkjit.spec import KernelSpec, Param, Params, Problem, Work, register

SOURCES = ("rms_norm", "layer_norm", "gated")
SPANS = ("row", "group")
_THREADS, _HELD = (64, 128, 256, 512, 1024), (4, 2)  # of a row; eights that each holds
_MOST = 2048  # eights of a block in registers
_CODES = {"fp8": "Fp8Codes", "int8": "Int8Codes"}
_NAMES = ("x", "residual", "gate", "up", "weight", "bias", "sum", "data", "scales")


def tile_of(columns: int, held: int = _HELD[0]) -> dict[str, int]:
    """As many threads as hold a row in registers, if any do."""
    threads = [count for count in _THREADS if count * held <= _MOST]
    found = next((count for count in threads if count * held * 8 >= columns), threads[-1])
    return {"threads": found, "held": held}


def _illegal(params: Params) -> str | None:
    if params["threads"] * params["held"] > _MOST:
        return "has more threads than registers"
    if params["span"] == "group" and params["code"] == "int8":
        return "has a scale a row for int8"
    if params["weight_dtype"] not in (params["dtype"], "fp32"):
        return f"has weights of dtype={params['dtype']} or fp32"
    if params["source"] == "gated":
        if params["weight_dtype"] != params["dtype"]:
            return "has no weight beside a gate"
        return "is no gate without an activation" if params["activation"] == "none" else None
    if params["activation"] != "none":
        return "has activations of gates alone"
    return None


def _resident(params: Params) -> int:
    """Threads of an SM, at least: what keeps a mean or an error function wants more registers."""
    wide = params["source"] == "layer_norm" or params["activation"] == "gelu"
    if params["held"] == _HELD[0]:
        return 512 if wide else 1024
    return 1024 if wide else max(1536, params["threads"])


def _derive(params: Params) -> dict[str, Any]:
    first, second = ("gate", "up") if params["source"] == "gated" else ("x", "residual")
    return {
        "first": first, "second": second,
        "resident": _resident(params) // params["threads"],
        "codes": _CODES[params["code"]], "groups": params["span"] == "group",
        "source": params["source"].upper(), "activation": ACTIVATIONS[params["activation"]],
        "has_mod": False, "epilogue_mod": "x", "epilogue_mod_grad": "1.f",
    }  # fmt: skip


def _arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    named = ("columns", "x_stride", "other_stride", "eps", "weight_offset")
    return {
        **{name: arrays.get(name) for name in _NAMES},
        **{name: problem[name] for name in named},
    }


def traffic(problem: Problem) -> float:
    """Bytes of rows read, of codes and of the residual stream."""
    reads = 2 if problem["source"] == "gated" else 1 + 2 * problem["residual"]
    numbers = problem["rows"] * problem["columns"]
    return float(numbers * (reads * ITEMSIZE[problem["dtype"]] + 1) + 4 * problem["rows"])


def groups_of(problem: Problem) -> int:
    """Scales of a row."""
    return -(-problem["columns"] // WIDTH) if problem["span"] == "group" else 1


MADE_ROWS = register(
    KernelSpec(
        op="quantize",
        name="made_rows",
        source="quantize/made_rows.cu",
        entry="quantize_made_rows",
        doc="codes of rows that a norm or a gate makes, in one pass",
        params=(
            Param("dtype", ("bf16", "fp16"), "element type of x, of the residual stream, of up"),
            Param("weight_dtype", ("bf16", "fp16", "fp32"), "of weight and bias: dtype or fp32"),
            Param("source", SOURCES, "what makes the rows"),
            Param("activation", tuple(ACTIVATIONS), "of a gate"),
            Param("code", tuple(_CODES), "what a number becomes"),
            Param("span", SPANS, "the numbers that share a scale: a row or 128 of its columns"),
            Param("threads", _THREADS, "of a row"),
            Param("held", _HELD, "eights of a thread in registers"),
        ),
        derive=_derive,
        illegal=_illegal,
        block=lambda params: (params["threads"], 1, 1),
        grid=lambda params, problem: (problem["rows"], 1, 1),
        pdl=True,
        arguments=_arguments,
        work=Work(
            flops=lambda problem: 10.0 * problem["rows"] * problem["columns"], bytes=traffic,
            interpreter_flops=2e7,
        ),
        verification="fkjit.ops.quantize.cases_made:MADE_ROWS",
    )
)  # fmt: skip
