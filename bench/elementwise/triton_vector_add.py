"""The sum of two arrays in Triton, the twin of kernels_cu/elementwise/vector_add.cu.

A program adds BLOCK elements in fp32. Arrays have no gaps; the CUDA kernel takes any strides.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fkjit.spec import Problem

from ..core.op import Arrays, Prepared, Refused


def _config(block: int, warps: int) -> triton.Config:
    return triton.Config({"BLOCK": block}, num_warps=warps)


_ALL = [_config(1024, 4), _config(2048, 8), _config(4096, 8)]
_INTERPRETED = [_config(256, 4)]  # Triton's interpreter times nothing


@triton.autotune(
    configs=_INTERPRETED if triton.knobs.runtime.interpret else _ALL,
    key=["count"],
)
@triton.jit
def _vector_add(
    a,  # [count]
    b,
    out,
    count,
    BLOCK: tl.constexpr,
):
    places = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    left = tl.load(a + places, mask=inside).to(tl.float32)
    right = tl.load(b + places, mask=inside).to(tl.float32)
    tl.store(out + places, (left + right).to(out.dtype.element_ty), mask=inside)


def vector_add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a + b, fp16, bf16 or fp32, contiguous and of one shape."""
    out = torch.empty_like(a)
    count = out.numel()
    if count:
        _vector_add[lambda tiles: (triton.cdiv(count, tiles["BLOCK"]),)](a, b, out, count)
    return out


def prepare(problem: Problem, arrays: Arrays) -> Prepared:
    """The twin on a problem of the benchmark."""
    a, b = arrays["a"], arrays["b"]
    dense = a.is_contiguous() and b.is_contiguous() and a.shape == b.shape
    if not dense or a.numel() != problem["rows"] * problem["columns"]:
        raise Refused("takes arrays without gaps")
    return Prepared(lambda: vector_add(a, b))
