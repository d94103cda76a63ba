"""PyTorch's products of codes, and its bf16 product of the weight as it was."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import fkjit
from fkjit.spec import Problem

from ..core.op import Arrays, Candidate, Prepared, Refused


def _scaled_mm(problem: Problem, arrays: Arrays) -> Prepared:
    """torch._scaled_mm: cuBLASLt, of rows CUTLASS."""
    torch = import_module("torch")
    if problem["scheme"] not in ("fp8_tensor", "fp8_row"):
        raise Refused("takes e4m3 with scales of tensors or rows here")
    x, weight = (arrays[name].view(torch.float8_e4m3fn) for name in ("x", "weight"))
    by_x, by_weight = arrays["x_scales"], arrays["scales"]
    if problem["scheme"] == "fp8_row":
        by_x, by_weight = by_x.reshape(-1, 1), by_weight.reshape(1, -1)
    turned = weight.t()

    def call() -> Any:
        return torch._scaled_mm(
            x, turned, scale_a=by_x, scale_b=by_weight, out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )  # fmt: skip

    return Prepared(call)


def _int_mm(problem: Problem, arrays: Arrays) -> Prepared:
    """torch._int_mm, whose int32 sums PyTorch then multiplies: two passes more."""
    torch = import_module("torch")
    if problem["scheme"] != "int8_row":
        raise Refused("takes int8 codes")
    x, weight = arrays["x"], arrays["weight"].t()
    by_x, by_weight = arrays["x_scales"].reshape(-1, 1), arrays["scales"].reshape(1, -1)

    def call() -> Any:
        return (torch._int_mm(x, weight) * by_x * by_weight).to(torch.bfloat16)

    return Prepared(call)


def _bf16(problem: Problem, arrays: Arrays) -> Prepared:
    """The product of the same numbers, 16 bits each: what codes are to be faster than."""
    torch = import_module("torch")
    if problem["scheme"] not in ("int4_group", "int8_group"):
        raise Refused("stands beside weights of codes alone")
    codes = fkjit.QuantizedTensor(arrays["weight"], arrays["scales"], problem["scheme"])
    x, weight = arrays["x"], fkjit.dequantize(codes, "bf16")
    return Prepared(lambda: torch.nn.functional.linear(x, weight))


PEERS = (
    Candidate(name="scaled_mm", package="torch", module="torch", prepare=_scaled_mm),
    Candidate(name="int_mm", package="torch", module="torch", prepare=_int_mm),
    Candidate(name="bf16", package="torch", module="torch", prepare=_bf16),
)
