"""What all kernels of a product with a quantized weight share.

    out[m, n] = act(scale * x[m, k] . weight + bias) + residual

A problem has m, n, k; dtype (of bias, and of x where it is not quantized) and out_dtype; code and
span of the weight (see schemes.py; x of quantized products has the same code, and spans "tensor",
"row" or "group"); x_stride, out_stride, residual_stride (elements); scale, a number; activation and
gate. With gate the weight has 2 n outputs, gate first, and so have bias and scales. Codes and
scales have no gaps.

Arrays: x, x_scales, weight, scales, bias, residual -> out; bias, residual, x_scales may be None.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fkjit.ops.gemm.problem import flops, outputs_of, shape_class
from fkjit.runtime.interop import ITEMSIZE
from fkjit.spec import Param, Params, Problem, Work

BITS = {"fp8": 8, "int8": 8, "int4": 4}
EVEN = {"int4": 32, "int8": 16, "fp8": 16}  # what k is a multiple of
SMS = 132  # where there is no GPU to ask
_POINTERS = ("x", "x_scales", "weight", "scales", "bias", "residual", "out")
DTYPES = (
    Param("dtype", ("bf16", "fp16"), "element type of bias, and of x that is not quantized"),
    Param("out_dtype", ("bf16", "fp16", "fp32"), "element type of residual and out"),
)


def illegal_dtypes(params: Params) -> str | None:
    """Why an out_dtype does not go with a dtype, or None."""
    if params["out_dtype"] not in (params["dtype"], "fp32"):
        return f"has no out_dtype={params['out_dtype']} for {params['dtype']}"
    return None


def is_quantized(problem: Problem) -> bool:
    """Whether x is, too."""
    return problem["code"] == "fp8" or problem["span"] == "row"


def traffic(problem: Problem) -> float:
    """Bytes of x, weight, scales of groups and bias read once, out written once."""
    m, n, k, wide = problem["m"], problem["n"], problem["k"], outputs_of(problem)
    weight = wide * k * BITS[problem["code"]] / 8
    if not is_quantized(problem):
        weight += ITEMSIZE[problem["dtype"]] * wide * -(-k // 128)
    read = m * k * (1 if is_quantized(problem) else ITEMSIZE[problem["dtype"]])
    rows = 2 if problem.get("residual") else 1
    return float(weight + read + ITEMSIZE[problem["out_dtype"]] * rows * m * n)


def arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Kernel arguments by name; a kernel takes those that it has."""
    return {
        **{name: arrays.get(name) for name in _POINTERS},
        **{name: arrays.get(name) for name in ("workspace", "counters")},
        **{name: problem[name] for name in ("m", "n", "k", "scale")},
        **{f"{name}_stride": problem[f"{name}_stride"] for name in ("x", "out", "residual")},
    }


# The part of a KernelSpec that all of them have.
CONTRACT: Mapping[str, Any] = {
    "op": "quantized_linear",
    "arguments": arguments,
    "shape_class": shape_class,
    "work": Work(flops=flops, bytes=traffic, interpreter_flops=1e8),
    "pdl": True,
}
