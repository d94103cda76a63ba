"""The kernels of `fkjit.quantize` and `fkjit.dequantize`.

A problem has rows and columns, x_stride (elements from a row of x to the next), dtype (of the
numbers), code and span (see schemes.py). Arrays: x -> data, scales; or data, scales -> out. Codes
have no gaps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fkjit.ops.quantize.schemes import WIDTH, Scheme, scale_dtype
from fkjit.runtime.interop import ITEMSIZE
from fkjit.spec import Dim3, KernelSpec, Param, Params, Problem, Work, register

_THREADS = 256
_OF_ROW, _HELD = (256, 128, 64), 32  # threads of a row; numbers of one that registers hold
_EIGHTS_OF_GROUP = 16  # threads that share a group
_AMAX_BLOCKS = 1024  # at most
_CODES = {"fp8": "Fp8Codes", "int8": "Int8Codes", "int4": "Int4Codes"}
_BITS = {"fp8": 8, "int8": 8, "int4": 4}
_SPANS = {"fp8": ("tensor", "row", "group", "block"), "int8": ("row", "group"), "int4": ("group",)}
_DTYPES = ("bf16", "fp16", "fp32")
_WIDE = Param("wide", (True, False), "rows start on 16-byte boundaries and are whole eights")
_PARAMS = (
    Param("dtype", _DTYPES, "element type of the numbers"),
    Param("code", tuple(_CODES), "what a number becomes"),
    Param("span", _SPANS["fp8"], "the numbers that share a scale"),
    _WIDE,
)


def _illegal(params: Params) -> str | None:
    if params["span"] not in _SPANS[params["code"]]:
        return f"has no scale a {params['span']} for {params['code']}"
    if params.get("threads", _THREADS) != _THREADS and params["span"] != "row":
        return "has fewer threads for rows alone"
    return None


def _derive(params: Params) -> dict[str, Any]:
    scheme = Scheme(params["code"], params["span"])
    return {
        "codes": _CODES[params["code"]],
        "span": params["span"].upper(),
        "scale_dtype": scale_dtype(scheme, params["dtype"]),
    }


def threads_of(span: str, columns: int) -> int:
    """Of a block: a row's, where they hold all of it in registers."""
    if span != "row":
        return _THREADS
    return next((count for count in sorted(_OF_ROW) if count * _HELD >= columns), _THREADS)


def groups_of(problem: Problem) -> int:
    """Spans beside each other."""
    return 1 if problem["span"] == "row" else -(-problem["columns"] // WIDTH)


def spans_of(problem: Problem) -> int:
    """Spans; of a whole tensor the pieces of 128 columns that it is taken in."""
    rows = -(-problem["rows"] // WIDTH) if problem["span"] == "block" else problem["rows"]
    return rows * groups_of(problem)


def _spans_grid(params: Params, problem: Problem) -> Dim3:
    several = 1 if problem["span"] in ("row", "block") else _THREADS // _EIGHTS_OF_GROUP
    return (-(-spans_of(problem) // several), 1, 1)


def amax_blocks(problem: Problem) -> int:
    """As many as have four pieces a team, up to a few for each multiprocessor."""
    return min(-(-spans_of(problem) // (4 * _THREADS // _EIGHTS_OF_GROUP)), _AMAX_BLOCKS)


def _eights(problem: Problem) -> int:
    return -(-problem["columns"] // 8)


def _arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    named = ("x", "data", "scales", "out", "workspace", "counters")
    return {
        **{name: arrays[name] for name in named if name in arrays},
        **{name: problem[name] for name in ("rows", "columns", "x_stride")},
        "groups": groups_of(problem),
        "spans": spans_of(problem),
        "eights": _eights(problem),
    }


def traffic(problem: Problem) -> float:
    """Bytes of numbers and of codes, each once (the numbers twice with one scale for all)."""
    times = 2 if problem["span"] == "tensor" and problem.get("amax", True) else 1
    numbers = problem["rows"] * problem["columns"]
    return float(numbers * (times * ITEMSIZE[problem["dtype"]] + _BITS[problem["code"]] / 8))


_WORK = Work(
    flops=lambda problem: 2.0 * problem["rows"] * problem["columns"],
    bytes=traffic,
    interpreter_flops=2e7,
)

SPANS = register(
    KernelSpec(
        op="quantize",
        name="spans",
        source="quantize/spans.cu",
        entry="quantize_spans",
        doc="codes of numbers and the scale of each row, group or block, in one pass",
        params=(*_PARAMS, Param("threads", _OF_ROW, "of a block; fewer where it has a short row")),
        derive=_derive,
        illegal=_illegal,
        block=lambda params: (params["threads"], 1, 1),
        grid=_spans_grid,
        pdl=True,
        arguments=_arguments,
        work=_WORK,
        verification="fkjit.ops.quantize.cases:SPANS",
    )
)

AMAX = register(
    KernelSpec(
        op="quantize",
        name="amax",
        source="quantize/amax.cu",
        entry="quantize_amax",
        doc="the scale of a whole tensor",
        params=(_PARAMS[0], Param("code", ("fp8",), "what a number becomes"), _WIDE),
        derive=lambda params: {"codes": _CODES[params["code"]], "threads": _THREADS},
        block=lambda params: (_THREADS, 1, 1),
        grid=lambda params, problem: (amax_blocks(problem), 1, 1),
        pdl=True,
        arguments=_arguments,
        work=_WORK,
        verification="fkjit.ops.quantize.cases:AMAX",
    )
)

DEQUANTIZE = register(
    KernelSpec(
        op="dequantize",
        name="eights",
        source="quantize/dequantize.cu",
        entry="dequantize",
        doc="numbers of codes and scales",
        params=(
            *_PARAMS,
            Param("scale_dtype", ("fp32", "bf16", "fp16"), "element type of the scales"),
        ),
        derive=lambda params: {
            "codes": _CODES[params["code"]], "span": params["span"].upper(), "threads": _THREADS,
        },
        illegal=lambda params: _illegal(params) or _illegal_scale(params),
        block=lambda params: (_THREADS, 1, 1),
        grid=lambda params, problem: (-(-problem["rows"] * _eights(problem) // _THREADS), 1, 1),
        pdl=True,
        arguments=_arguments,
        work=_WORK,
        verification="fkjit.ops.quantize.cases:DEQUANTIZE",
    )
)  # fmt: skip


def _illegal_scale(params: Params) -> str | None:
    if (
        params["scale_dtype"] == "fp32"
        or scale_dtype(Scheme(params["code"], params["span"]), params["scale_dtype"])
        == params["scale_dtype"]
    ):
        return None
    return f"has scales of fp32 for {params['code']} by the {params['span']}"
