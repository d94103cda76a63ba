"""LayerNorm and RMSNorm in Triton, the twin of kernels_cu/norm/ (forward).

A program has one row, padded to a power of two: wider ones than 65,536 do not fit. Rows lie behind
each other; the CUDA kernels take rows at any distance, and have gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fkjit.spec import Problem

from ..core.op import Arrays, Prepared, Refused
from .peers_norms import first

_WIDEST = 65_536


@triton.jit
def _norm(
    x,  # [rows, columns]
    residual,  # [rows, columns] where RESIDUAL
    weight,  # [columns] where WEIGHT
    bias,  # [columns] where BIAS
    out,  # [rows, columns]
    stream,  # [rows, columns] where RESIDUAL
    columns,
    eps,
    BLOCK: tl.constexpr,
    CENTERED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
):
    row = tl.cast(tl.program_id(0), tl.int64) * columns
    places = tl.arange(0, BLOCK)
    inside = places < columns
    s = tl.load(x + row + places, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        s += tl.load(residual + row + places, mask=inside, other=0.0).to(tl.float32)
        rounded = s.to(stream.dtype.element_ty)
        tl.store(stream + row + places, rounded, mask=inside)
        s = rounded.to(tl.float32)
    if CENTERED:
        s = tl.where(inside, s - tl.sum(s, 0) / columns, 0.0)
    y = s * tl.rsqrt(tl.sum(s * s, 0) / columns + eps)
    if WEIGHT:
        y *= tl.load(weight + places, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        y += tl.load(bias + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + places, y.to(out.dtype.element_ty), mask=inside)


def norm(
    x: torch.Tensor, weight: Any = None, bias: Any = None, eps: float = 1e-5, residual: Any = None,
    *, centered: bool = True,
) -> Any:  # fmt: skip
    """LayerNorm (`centered`) or RMSNorm over the last dimension; (rows, stream) with a residual."""
    out, columns = torch.empty_like(x), x.shape[-1]
    stream = None if residual is None else torch.empty_like(x)
    if x.numel():
        block = triton.next_power_of_2(columns)
        _norm[(x.numel() // columns,)](
            x, residual, weight, bias, out, stream, columns, eps, block, centered,
            residual is not None, weight is not None, bias is not None,
            num_warps=min(max(block // 512, 1), 16),
        )  # fmt: skip
    return out if residual is None else (out, stream)


def prepare(problem: Problem, arrays: Arrays, *, centered: bool = True) -> Prepared:
    """The twin on a problem of the benchmark."""
    given = [array for array in arrays.values() if array is not None]
    if not all(array.is_contiguous() for array in given) or problem["columns"] > _WIDEST:
        raise Refused(f"takes rows without gaps, of up to {_WIDEST} columns")
    x, weight, bias, residual = (arrays.get(n) for n in ("x", "weight", "bias", "residual"))
    eps = problem["eps"]
    return Prepared(lambda: norm(x, weight, bias, eps, residual, centered=centered), first)
