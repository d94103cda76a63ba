"""dz and dbias in Triton, the twin of kernels_cu/gemm/activation_backward.cu.

A program has some columns, and goes down every so many rows; it leaves sums of its rows, which a
second launch adds up, always in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fkjit.spec import Problem

from ..core.op import Arrays, Prepared

_COLUMNS, _ROWS = 256, 8
_PARTS = 64  # programs that share the rows of some columns


@triton.jit
def _slopes(z, ACTIVATION: tl.constexpr):
    """(value, slope) of the activation."""
    if ACTIVATION == "none":
        value, slope = z, z * 0.0 + 1.0
    elif ACTIVATION == "relu":
        value, slope = tl.maximum(z, 0.0), tl.where(z > 0.0, 1.0, 0.0)
    elif ACTIVATION == "silu":
        s = tl.sigmoid(z)
        value, slope = z * s, s * (1.0 + z * (1.0 - s))
    elif ACTIVATION == "gelu":
        p = 0.5 + 0.5 * tl.erf(z * 0.7071067811865476)
        value, slope = z * p, p + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)
    else:
        s = tl.sigmoid(z * (1.5957691216057308 + 0.07135481282639408 * z * z))
        inner = 1.5957691216057308 + 3 * 0.07135481282639408 * z * z
        value, slope = z * s, s + z * s * (1.0 - s) * inner
    return value, slope


@triton.jit
def _backward(
    dy,  # [m, n]
    pre,  # [m, n], or [m, 2 n] where GATE; not read without MAKES_DZ
    dz,  # as pre
    partials,  # [parts, n], or [parts, 2 n]: sums of rows
    m,
    n,
    dy_stride,
    ACTIVATION: tl.constexpr,
    GATE: tl.constexpr,
    MAKES_DZ: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part, parts = tl.program_id(1), tl.num_programs(1)
    wide = n * 2 if GATE else n
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    sums_up = sums
    for first in range(part * ROWS, m, parts * ROWS):
        rows = first + tl.arange(0, ROWS)
        inside = (rows < m)[:, None] & (columns < n)[None, :]
        row = tl.cast(rows, tl.int64)[:, None]
        made = tl.load(dy + row * dy_stride + columns[None, :], mask=inside, other=0.0)
        made = made.to(tl.float32)
        if MAKES_DZ:
            at = row * wide + columns[None, :]
            z = tl.load(pre + at, mask=inside, other=0.0).to(tl.float32)
            value, slope = _slopes(z, ACTIVATION)
            if GATE:
                up = tl.load(pre + at + n, mask=inside, other=0.0).to(tl.float32)
                made_up = made * value
                tl.store(dz + at + n, made_up.to(dz.dtype.element_ty), mask=inside)
                sums_up += made_up
                slope *= up
            made *= slope
            tl.store(dz + at, made.to(dz.dtype.element_ty), mask=inside)
        sums += made
    tl.store(partials + part * wide + columns, tl.sum(sums, 0), mask=columns < n)
    if GATE:
        tl.store(partials + part * wide + n + columns, tl.sum(sums_up, 0), mask=columns < n)


@triton.jit
def _sum(
    partials,  # [parts, wide]
    dbias,  # [wide]
    parts,
    wide,
    COLUMNS: tl.constexpr,
):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < wide
    total = tl.zeros([COLUMNS], tl.float32)
    for part in range(parts):
        total += tl.load(partials + part * wide + columns, mask=inside, other=0.0)
    tl.store(dbias + columns, total.to(dbias.dtype.element_ty), mask=inside)


def backward(
    dy: torch.Tensor, pre: torch.Tensor | None, *, activation: str = "none", gate: bool = False
) -> tuple[torch.Tensor, ...]:
    """(dz, dbias) of dy [m, n] and pre [m, n], or with gate [m, 2 n]; (dbias,) without pre."""
    m, n = dy.shape
    wide = n * (2 if gate else 1)
    parts = max(1, min(_PARTS, m // _ROWS))
    dz = dy if pre is None else torch.empty_like(pre)
    partials = dy.new_empty(parts, wide, dtype=torch.float32)
    dbias = dy.new_empty(wide)
    _backward[(triton.cdiv(n, _COLUMNS), parts)](
        dy, dy if pre is None else pre, dz, partials, m, n, dy.stride(0), ACTIVATION=activation,
        GATE=gate, MAKES_DZ=pre is not None, ROWS=_ROWS, COLUMNS=_COLUMNS,
    )  # fmt: skip
    _sum[(triton.cdiv(wide, _COLUMNS),)](partials, dbias, parts, wide, COLUMNS=_COLUMNS)
    return (dbias,) if pre is None else (dz, dbias)


def prepare(problem: Problem, arrays: Arrays) -> Prepared:
    """The twin on a problem of the benchmark."""
    dy, pre = arrays["dy"], arrays.get("pre")
    activation, gate = problem["activation"], problem["gate"]
    return Prepared(
        lambda: backward(dy, pre, activation=activation, gate=gate), lambda made: made[0]
    )
