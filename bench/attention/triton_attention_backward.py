"""Attention's gradients in Triton, the twin of kernels_cu/attention/backward_*.cu.

    p = exp(softmax_scale * q k^T - lse)       delta = rowsum(dout * o)
    ds = p * (dout v^T - delta)
    dv = p^T dout       dk = softmax_scale * ds^T q       dq = softmax_scale * ds k

A program of `_keys` owns BLOCK_N keys of one KV head and walks over the queries of all its query
heads; one of `_queries` owns BLOCK_M queries and walks over keys. Nothing is added up by atomics.
Head dimensions are padded to powers of two with zeros.

Source: Dao, "FlashAttention-2" (2023), for the formulas.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from fkjit.spec import Problem

from ..core.op import Arrays, Prepared


def _config(block_m: int, block_n: int, warps: int, stages: int) -> triton.Config:
    return triton.Config(
        {"BLOCK_M": block_m, "BLOCK_N": block_n}, num_warps=warps, num_stages=stages
    )


_WIDE = [_config(64, 128, 8, 2), _config(64, 64, 4, 2), _config(128, 64, 8, 2)]
_TILES = [*_WIDE, _config(32, 64, 4, 2), _config(32, 32, 4, 1)]
_INTERPRETED = [_config(16, 16, 4, 1)]  # Triton's interpreter times nothing
_CONFIGS = _INTERPRETED if triton.knobs.runtime.interpret else _TILES
_KEY = ["seqlen_q", "seqlen_k", "D", "DV", "CAUSAL"]


def _fitting(configs: list[triton.Config], named: dict[str, Any], **constants: Any):
    """Fewer rows where a program would hold too much."""
    wide = max(constants["BLOCK_D"], constants["BLOCK_DV"]) * named["q"].element_size()
    return configs if wide <= 256 else configs[-2:] if wide <= 512 else configs[-1:]


@triton.jit
def _load(x, rows, row_stride, length, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of one head; zeros past the end and in the padding."""
    dims = tl.arange(0, BLOCK_D)
    places = x + tl.cast(rows, tl.int64)[:, None] * row_stride + dims[None, :]
    return tl.load(places, mask=(rows < length)[:, None] & (dims < D)[None, :], other=0.0)


@triton.jit
def _store(x, rows, row_stride, length, value, D: tl.constexpr, BLOCK_D: tl.constexpr):
    dims = tl.arange(0, BLOCK_D)
    places = x + tl.cast(rows, tl.int64)[:, None] * row_stride + dims[None, :]
    mask = (rows < length)[:, None] & (dims < D)[None, :]
    tl.store(places, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _probabilities(
    q, k, lse, rows, keys, seqlen_q, seqlen_k, scale_log2, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """[rows, keys]; 0 where a row does not see a key."""
    s = tl.dot(q, k.T, input_precision=PRECISION)
    seen = (rows < seqlen_q)[:, None] & (keys < seqlen_k)[None, :] & (lse > float("-inf"))[:, None]
    if CAUSAL:
        seen = seen & (keys[None, :] <= rows[:, None] + seqlen_k - seqlen_q)
    return tl.exp2(
        tl.where(seen, s * scale_log2 - lse[:, None] * 1.4426950408889634, float("-inf"))
    )


@triton.autotune(configs=_CONFIGS, key=_KEY, prune_configs_by={"early_config_prune": _fitting})
@triton.jit
def _keys(
    dout,  # [batch, heads_q, seqlen_q, DV]      contiguous, as all arrays
    q,  # [batch, heads_q, seqlen_q, D]
    k,  # [batch, heads_kv, seqlen_k, D]
    v,  # [batch, heads_kv, seqlen_k, DV]
    lse,  # [batch, heads_q, seqlen_q]
    delta,  # the same
    dk,  # as k
    dv,  # as v
    group_size, heads_kv, seqlen_q, seqlen_k, scale, scale_log2,
    CAUSAL: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(seqlen_k, BLOCK_N)
    keys = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    kv_head = tl.cast(tl.program_id(0) // blocks, tl.int64)  # of all batches
    k += kv_head * seqlen_k * D
    v += kv_head * seqlen_k * DV
    k_tile = _load(k, keys, D, seqlen_k, D, BLOCK_D)
    v_tile = _load(v, keys, DV, seqlen_k, DV, BLOCK_DV)
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    first = 0
    if CAUSAL:
        first = tl.maximum(tl.program_id(0) % blocks * BLOCK_N - seqlen_k + seqlen_q, 0)
        first = first // BLOCK_M * BLOCK_M
    for member in range(group_size):
        head = kv_head * group_size + member
        q_head, do_head = q + head * seqlen_q * D, dout + head * seqlen_q * DV
        for start in tl.range(first, seqlen_q, BLOCK_M):
            rows = start + tl.arange(0, BLOCK_M)
            q_tile = _load(q_head, rows, D, seqlen_q, D, BLOCK_D)
            do_tile = _load(do_head, rows, DV, seqlen_q, DV, BLOCK_DV)
            lse_row = tl.load(lse + head * seqlen_q + rows, mask=rows < seqlen_q, other=0.0)
            less = tl.load(delta + head * seqlen_q + rows, mask=rows < seqlen_q, other=0.0)
            p = _probabilities(
                q_tile, k_tile, lse_row, rows, keys, seqlen_q, seqlen_k, scale_log2, CAUSAL,
                PRECISION,
            )  # fmt: skip
            dv_acc = tl.dot(p.to(q.dtype.element_ty).T, do_tile, dv_acc, input_precision=PRECISION)
            dp = tl.dot(do_tile, v_tile.T, input_precision=PRECISION)
            ds = (p * (dp - less[:, None])).to(q.dtype.element_ty)
            dk_acc = tl.dot(ds.T, q_tile, dk_acc, input_precision=PRECISION)
    _store(dk + kv_head * seqlen_k * D, keys, D, seqlen_k, dk_acc * scale, D, BLOCK_D)
    _store(dv + kv_head * seqlen_k * DV, keys, DV, seqlen_k, dv_acc, DV, BLOCK_DV)


@triton.autotune(configs=_CONFIGS, key=_KEY, prune_configs_by={"early_config_prune": _fitting})
@triton.jit
def _queries(
    dout, q, k, v, lse, delta, dq,  # as above; dq as q
    group_size, heads_kv, seqlen_q, seqlen_k, scale, scale_log2,
    CAUSAL: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(seqlen_q, BLOCK_M)
    block = blocks - 1 - tl.program_id(0) % blocks  # the longest rows of a causal mask first
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.cast(tl.program_id(0) // blocks, tl.int64)  # of all batches
    k += head // group_size * seqlen_k * D
    v += head // group_size * seqlen_k * DV
    q_tile = _load(q + head * seqlen_q * D, rows, D, seqlen_q, D, BLOCK_D)
    do_tile = _load(dout + head * seqlen_q * DV, rows, DV, seqlen_q, DV, BLOCK_DV)
    lse_row = tl.load(lse + head * seqlen_q + rows, mask=rows < seqlen_q, other=0.0)
    less = tl.load(delta + head * seqlen_q + rows, mask=rows < seqlen_q, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    end = seqlen_k
    if CAUSAL:
        end = tl.minimum(seqlen_k, (block + 1) * BLOCK_M + seqlen_k - seqlen_q)
    for start in tl.range(0, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        k_tile = _load(k, keys, D, seqlen_k, D, BLOCK_D)
        v_tile = _load(v, keys, DV, seqlen_k, DV, BLOCK_DV)
        p = _probabilities(
            q_tile, k_tile, lse_row, rows, keys, seqlen_q, seqlen_k, scale_log2, CAUSAL, PRECISION
        )
        dp = tl.dot(do_tile, v_tile.T, input_precision=PRECISION)
        ds = (p * (dp - less[:, None])).to(q.dtype.element_ty)
        acc = tl.dot(ds, k_tile, acc, input_precision=PRECISION)
    _store(dq + head * seqlen_q * D, rows, D, seqlen_q, acc * scale, D, BLOCK_D)


def gradients(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv of contiguous [B, H, S, D] tensors; PyTorch makes delta."""
    (batch, heads_q, seqlen_q, d), (heads_kv, seqlen_k, dv) = q.shape, v.shape[1:]
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    delta = (dout.float() * o.float()).sum(-1)
    made = [torch.empty_like(x) for x in (q, k, v)]
    shared = {
        "CAUSAL": causal, "D": d, "DV": dv, "BLOCK_D": max(16, triton.next_power_of_2(d)),
        "BLOCK_DV": max(16, triton.next_power_of_2(dv)),
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else None,
    }  # fmt: skip
    numbers = (
        heads_q // heads_kv, heads_kv, seqlen_q, seqlen_k, scale, scale * math.log2(math.e),
    )  # fmt: skip
    given = (dout, q, k, v, lse, delta)
    _keys[lambda tiles: (triton.cdiv(seqlen_k, tiles["BLOCK_N"]) * heads_kv * batch,)](
        *given, made[1], made[2], *numbers, **shared
    )
    _queries[lambda tiles: (triton.cdiv(seqlen_q, tiles["BLOCK_M"]) * heads_q * batch,)](
        *given, made[0], *numbers, **shared
    )
    return made[0], made[1], made[2]


def prepare(problem: Problem, arrays: Arrays) -> Prepared:
    """The twin on a problem of the benchmark."""
    from .peers_attention_backward import flat

    given = [arrays[name].contiguous() for name in ("dout", "q", "k", "v", "o", "lse")]
    options = {"causal": problem["causal"], "softmax_scale": problem["softmax_scale"]}
    return Prepared(lambda: gradients(*given, **options), flat)
