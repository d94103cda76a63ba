"""PyTorch's products of codes, and its bf16 product of the weight as it was."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import fkjit
from fkjit.spec import Problem

from ..core.op import Arrays, Candidate, Prepared, Refused


def _scaled_mm(fast: bool) -> Callable[[Problem, Arrays], Prepared]:
    """PyTorch's: cuBLASLt, of rows CUTLASS. fast: sums as tensor cores keep them, not promoted."""

    def prepare(problem: Problem, arrays: Arrays) -> Prepared:
        torch = import_module("torch")
        if problem["code"] != "fp8" or (problem["scheme"] == "fp8_block" and not fast):
            raise Refused("takes e4m3; of blocks in one way alone")
        x, weight = (arrays[name].view(torch.float8_e4m3fn) for name in ("x", "weight"))
        by_x, by_weight = arrays["x_scales"], arrays["scales"]
        if problem["scheme"] == "fp8_block":
            return _by_blocks(x, weight, by_x, by_weight)
        if problem["scheme"] == "fp8_row":
            by_x, by_weight = by_x.reshape(-1, 1), by_weight.reshape(1, -1)
        turned = weight.t()

        def call() -> Any:
            return torch._scaled_mm(
                x, turned, scale_a=by_x, scale_b=by_weight, out_dtype=torch.bfloat16,
                use_fast_accum=fast,
            )  # fmt: skip

        return Prepared(call)

    return prepare


def _by_blocks(x: Any, weight: Any, by_x: Any, by_weight: Any) -> Prepared:
    """1 x 128 by 128 x 128."""
    torch = import_module("torch")
    functional = torch.nn.functional
    if not hasattr(functional, "scaled_mm"):
        raise Refused("takes blocks from PyTorch 2.10 on")
    if weight.shape[0] % 16:
        raise Refused("takes outputs by sixteens")
    kinds, turned = functional.ScalingType, weight.t()
    by_rows, by_blocks = by_x.t().contiguous().t(), by_weight.t()

    def call() -> Any:
        return functional.scaled_mm(
            x, turned, by_rows, kinds.BlockWise1x128, by_blocks, kinds.BlockWise128x128,
            output_dtype=torch.bfloat16,
        )  # fmt: skip

    return Prepared(call)


def _short(problem: Problem, arrays: Arrays) -> Prepared:
    """Ours with sums as tensor cores keep them, as PyTorch's fast ones."""
    if problem["scheme"] not in ("fp8_tensor", "fp8_row"):
        raise Refused("takes e4m3 with scales of tensors or rows")
    x, weight = (
        fkjit.QuantizedTensor(arrays[name], arrays[scales], problem["scheme"])
        for name, scales in (("x", "x_scales"), ("weight", "scales"))
    )
    return Prepared(lambda: fkjit.linear(x, weight, precision="short"))


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
    Candidate(name="fkjit short", kind="ours", prepare=_short),
    Candidate(name="scaled_mm", package="torch", module="torch", prepare=_scaled_mm(True)),
    Candidate(name="scaled_mm exact", package="torch", module="torch", prepare=_scaled_mm(False)),
    Candidate(name="int_mm", package="torch", module="torch", prepare=_int_mm),
    Candidate(name="bf16", package="torch", module="torch", prepare=_bf16),
)
