"""A product with its epilogue in Triton, the twin of kernels_cu/gemm/.

    out = activation(x weight^T + bias) [* up] + residual

A program owns BLOCK_M rows and BLOCK_N columns of out; with a gate it has two sums of each element.
Programs take tiles in groups of GROUP rows of tiles, so that those which run at a time share
operands in L2. Operands come through tensor descriptors (TMA) where their rows are aligned.

Sources: Triton's tutorial on matrix multiplication, for the order of tiles.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fkjit.spec import Problem

from ..core.op import Arrays, Prepared
from ..core.triton_tuning import quickly
from .products import operands

GROUP = 8  # rows of tiles


def _config(m: int, n: int, k: int, warps: int, stages: int) -> triton.Config:
    tiles = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}
    return triton.Config(tiles, num_warps=warps, num_stages=stages)


# By the rows of x (up to), and by what a program keeps: one sum or two, or fp32 operands.
_LARGE = 1 << 40
_TILES = {
    16: [_config(16, 64, 128, 4, 5), _config(16, 32, 256, 4, 4), _config(16, 128, 64, 4, 5)],
    64: [_config(64, 64, 128, 4, 4), _config(64, 128, 64, 4, 4), _config(64, 32, 128, 4, 5)],
    _LARGE: [_config(128, 256, 64, 8, 3), _config(128, 128, 64, 8, 4), _config(64, 128, 64, 4, 4)],
}
_GATED = {
    16: [_config(16, 32, 128, 4, 5), _config(16, 64, 64, 4, 5)],
    64: [_config(64, 64, 64, 4, 4), _config(64, 32, 128, 4, 4)],
    _LARGE: [_config(128, 128, 64, 8, 3), _config(128, 64, 64, 4, 4)],
}
_WIDE = {
    16: [_config(16, 64, 64, 4, 3), _config(16, 32, 64, 4, 3)],
    _LARGE: [_config(64, 64, 32, 4, 3), _config(128, 64, 16, 8, 3), _config(32, 32, 32, 4, 2)],
}
_TABLES = (_TILES, _GATED, _WIDE)
_ALL = list(
    {str(tile): tile for table in _TABLES for tiles in table.values() for tile in tiles}.values()
)
_INTERPRETED = [_config(32, 32, 32, 4, 1)]  # Triton's interpreter times nothing


def _candidates(configs: list[triton.Config], named: dict[str, Any], **constants: Any):
    """The tiles worth trying for a problem."""
    table = _GATED if constants["GATE"] else _TILES
    if named["x"].element_size() == 4:
        table = _WIDE
    return next(tiles for most, tiles in table.items() if named["m"] <= most)


@triton.jit
def _tile(
    matrix,  # [rows, columns] as it lies: a descriptor or a pointer
    row,
    column,
    rows,
    columns,
    stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """[ROWS, COLUMNS] from (row, column) on; zeros outside."""
    if DESCRIBED:
        tile = matrix.load([row, column])
    else:
        r, c = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        at = tl.cast(r, tl.int64)[:, None] * stride + c[None, :]
        inside = (r < rows)[:, None] & (c < columns)[None, :]
        tile = tl.load(matrix + at, mask=inside, other=0.0)
    return tile


@triton.jit
def _activated(z, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        z = tl.maximum(z, 0.0)
    elif ACTIVATION == "silu":
        z = z * tl.sigmoid(z)
    elif ACTIVATION == "gelu":
        z = z * (0.5 + 0.5 * tl.erf(z * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        z = z * tl.sigmoid(z * (1.5957691216057308 + 0.07135481282639408 * z * z))
    return z


@triton.autotune(
    configs=_INTERPRETED if triton.knobs.runtime.interpret else _ALL,
    key=["m", "n", "k", "X_KM", "WEIGHT_KN", "GATE", "ACTIVATION", "PRECISION"],
    prune_configs_by={"early_config_prune": _candidates},
    do_bench=quickly,
)
@triton.jit
def _linear(
    x,  # [m, k], or [k, m] where X_KM
    weight,  # [outputs, k], or [k, outputs] where WEIGHT_KN; 2 n outputs where GATE
    bias,  # [outputs], or None
    residual,  # [m, n], or None
    out,  # [m, n]
    m,
    n,
    k,
    x_stride,  # elements from row to row, as they lie
    weight_stride,
    residual_stride,
    out_stride,
    X_KM: tl.constexpr,
    WEIGHT_KN: tl.constexpr,
    GATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DESCRIBED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    outputs = n * 2 if GATE else n
    x_rows = k if X_KM else m
    x_columns = m if X_KM else k
    w_rows = k if WEIGHT_KN else outputs
    w_columns = outputs if WEIGHT_KN else k
    X_ROWS: tl.constexpr = BLOCK_K if X_KM else BLOCK_M
    X_COLUMNS: tl.constexpr = BLOCK_M if X_KM else BLOCK_K
    W_ROWS: tl.constexpr = BLOCK_K if WEIGHT_KN else BLOCK_N
    W_COLUMNS: tl.constexpr = BLOCK_N if WEIGHT_KN else BLOCK_K
    if DESCRIBED:
        x = tl.make_tensor_descriptor(x, [x_rows, x_columns], [x_stride, 1], [X_ROWS, X_COLUMNS])
        weight = tl.make_tensor_descriptor(
            weight, [w_rows, w_columns], [weight_stride, 1], [W_ROWS, W_COLUMNS]
        )

    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    group = tl.program_id(0) // (GROUP * tiles_n)
    among = tl.program_id(0) % (GROUP * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP, GROUP)
    row = (group * GROUP + among % height) * BLOCK_M
    column = among // height * BLOCK_N

    z = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = z
    for at in range(0, k, BLOCK_K):
        a = _tile(
            x, at if X_KM else row, row if X_KM else at, x_rows, x_columns, x_stride,
            X_ROWS, X_COLUMNS, DESCRIBED,
        )  # fmt: skip
        a = a.T if X_KM else a
        b = _tile(
            weight, at if WEIGHT_KN else column, column if WEIGHT_KN else at, w_rows, w_columns,
            weight_stride, W_ROWS, W_COLUMNS, DESCRIBED,
        )  # fmt: skip
        z = tl.dot(a, b if WEIGHT_KN else b.T, z, input_precision=PRECISION)
        if GATE:
            b = _tile(
                weight, at if WEIGHT_KN else n + column, n + column if WEIGHT_KN else at, w_rows,
                w_columns, weight_stride, W_ROWS, W_COLUMNS, DESCRIBED,
            )  # fmt: skip
            up = tl.dot(a, b if WEIGHT_KN else b.T, up, input_precision=PRECISION)

    rows, columns = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    if bias is not None:
        z += tl.load(bias + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
        if GATE:
            up += tl.load(bias + n + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
    y = _activated(z, ACTIVATION)
    if GATE:
        y *= up
    wide = tl.cast(rows, tl.int64)[:, None]
    if residual is not None:
        added = tl.load(
            residual + wide * residual_stride + columns[None, :], mask=inside, other=0.0
        )
        y += added.to(tl.float32)
    tl.store(out + wide * out_stride + columns[None, :], y.to(out.dtype.element_ty), mask=inside)


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Memory for the descriptors that a kernel makes."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _as_it_lies(matrix: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """The matrix with contiguous rows, and whether it is the transpose."""
    return (matrix, False) if matrix.stride(1) == 1 else (matrix.t(), True)


def _describable(matrix: torch.Tensor) -> bool:
    """Whether rows begin on 16 bytes, which the copy engine asks for."""
    size = matrix.element_size()
    return matrix.data_ptr() % 16 == 0 and matrix.stride(0) * size % 16 == 0 and matrix.numel() > 0


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    activation: str = "none",
    gate: bool = False,
    precision: str = "ieee",
) -> torch.Tensor:
    """[m, n] of x [m, k] and weight [n, k] (with gate [2 n, k], gate first), each of which may be a
    transpose. fp16, bf16, or fp32, which is exact (no tensor cores) unless precision is "tf32"."""
    (m, k), n = x.shape, weight.shape[0] // (2 if gate else 1)
    out = x.new_empty(m, n)
    if not out.numel():
        return out
    triton.set_allocator(_scratch)
    (x, x_km), (weight, weight_kn) = _as_it_lies(x), _as_it_lies(weight)
    _linear[lambda tiles: (triton.cdiv(m, tiles["BLOCK_M"]) * triton.cdiv(n, tiles["BLOCK_N"]),)](
        x, weight, bias, residual, out, m, n, k, x.stride(0), weight.stride(0),
        0 if residual is None else residual.stride(0), n,
        X_KM=x_km,
        WEIGHT_KN=weight_kn,
        GATE=gate,
        ACTIVATION=activation,
        DESCRIBED=_describable(x) and _describable(weight),
        PRECISION=precision if x.dtype == torch.float32 else None,
        GROUP=GROUP,
    )  # fmt: skip
    return out


def prepare(problem: Problem, arrays: Arrays) -> Prepared:
    """The twin on a problem of the benchmark."""
    x, weight = operands(problem, arrays)
    bias, residual = arrays.get("bias"), arrays.get("residual")
    named = {name: problem[name] for name in ("activation", "gate")}
    precision = problem.get("precision", "ieee")
    return Prepared(lambda: linear(x, weight, bias, residual, precision=precision, **named))
