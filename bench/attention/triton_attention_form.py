"""Attention in its forms in Triton, the twin of kernels_cu/attention/ with a form rendered in.

The twin of attention (attention.py) with a band of keys in place of the causal mask, rules that a
score meets (a soft cap, ALiBi, a bias, a mask) and attention sinks. Each is a flag that is known
when the kernel is compiled. A program walks over the keys in three parts: those that the band cuts
at its left end, those that all of its rows see, and those that the band cuts at its right end.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fkjit.spec import Problem

from ..core.op import Arrays, Prepared
from .triton_attention import _config, _describable, _rows, _scratch

# By padded head dimension; beside rules there are registers for less. The last of each fits all.
_TILES: dict[int, list[triton.Config]] = {
    64: [_config(64, 64, 4, 3), _config(128, 64, 4, 3), _config(64, 32, 4, 2)],
    128: [_config(64, 64, 4, 3), _config(128, 64, 4, 2), _config(128, 64, 8, 3),
          _config(64, 32, 4, 2)],
    256: [_config(128, 64, 8, 2), _config(64, 32, 4, 1)],
}  # fmt: skip
_FP32_TILES = [_config(64, 32, 4, 2), _config(32, 32, 4, 1)]
_ALL = [*_FP32_TILES, *(tile for tiles in _TILES.values() for tile in tiles)]
_INTERPRETED = [_config(16, 32, 4, 1)]  # Triton's interpreter times nothing
_FLAGS = ["LEFT", "RIGHT", "SOFTCAP", "ALIBI", "BIAS", "MASK", "SINKS"]


def _candidates(configs: list[triton.Config], named: dict[str, Any], **constants: Any):
    """The tiles worth trying for a problem."""
    if named["q"].element_size() == 4:
        return _FP32_TILES
    return _TILES[max(64, constants["BLOCK_D"], constants["BLOCK_DV"])]


@triton.jit
def _ruled(
    s,  # [BLOCK_M, BLOCK_N] products
    rows,  # [BLOCK_M] queries
    keys,  # [BLOCK_N]
    slope,  # of this head, where ALIBI
    bias,  # of this batch and head, where BIAS
    mask,  # where MASK
    row_stride_bias,
    row_stride_mask,
    seqlen_q,
    seqlen_k,
    window_left,
    window_right,
    softmax_scale,
    softcap,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    BIAS: tl.constexpr,
    MASK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Final scores in units of log2."""
    if SOFTCAP or ALIBI or BIAS:
        s = s * softmax_scale
        if SOFTCAP:
            s = softcap * (2 * tl.sigmoid(2 * s / softcap) - 1)  # tanh
        ahead = keys[None, :] - (rows + seqlen_k - seqlen_q)[:, None]
        if ALIBI:
            s -= slope * tl.abs(ahead).to(tl.float32)
        if BIAS:
            s += _score_tile(bias, row_stride_bias, rows, keys, seqlen_q, seqlen_k).to(tl.float32)
        s = s * 1.4426950408889634
    else:
        s = s * (softmax_scale * 1.4426950408889634)
    if MASK:
        seen = _score_tile(mask, row_stride_mask, rows, keys, seqlen_q, seqlen_k)
        s = tl.where(seen != 0, s, float("-inf"))
    if not WHOLE:
        ahead = keys[None, :] - (rows + seqlen_k - seqlen_q)[:, None]
        seen = keys[None, :] < seqlen_k
        if LEFT:
            seen = seen & (ahead >= -window_left)
        if RIGHT:
            seen = seen & (ahead <= window_right)
        s = tl.where(seen, s, float("-inf"))
    return s


@triton.jit
def _score_tile(x, row_stride, rows, keys, seqlen_q, seqlen_k):
    """[BLOCK_M, BLOCK_N] of a bias or a mask of one head [seqlen_q, seqlen_k]."""
    inside = (rows < seqlen_q)[:, None] & (keys < seqlen_k)[None, :]
    place = tl.cast(rows, tl.int64)[:, None] * row_stride + keys[None, :]
    return tl.load(x + place, mask=inside, other=0)


@triton.jit
def _attend(
    acc,  # [BLOCK_M, BLOCK_DV] fp32: the sum of p v so far
    row_sum,  # [BLOCK_M]
    row_max,  # [BLOCK_M] of scores in units of log2
    q,  # [BLOCK_M, BLOCK_D]
    k,  # of one head: a descriptor or a pointer
    v,
    row_stride_k,
    row_stride_v,
    begin,
    end,
    rows, slope, bias, mask, row_stride_bias, row_stride_mask, seqlen_q, seqlen_k, window_left,
    window_right, softmax_scale, softcap,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    BIAS: tl.constexpr, MASK: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    DESCRIBED: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """The state after keys begin to end - 1; WHOLE: all of them are in each row's band."""
    for start in tl.range(begin, end, BLOCK_N):
        k_tile = _rows(k, start, row_stride_k, seqlen_k, D, BLOCK_N, BLOCK_D, WHOLE, DESCRIBED)
        s = tl.dot(q, k_tile.T, input_precision=PRECISION)
        s = _ruled(
            s, rows, start + tl.arange(0, BLOCK_N), slope, bias, mask, row_stride_bias,
            row_stride_mask, seqlen_q, seqlen_k, window_left, window_right, softmax_scale, softcap,
            LEFT, RIGHT, SOFTCAP, ALIBI, BIAS, MASK, WHOLE,
        )  # fmt: skip
        new_max = tl.maximum(row_max, tl.max(s, 1))
        base = new_max
        if not WHOLE or BIAS or MASK:  # rows that see nothing yet
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(row_max - base)
        row_sum = row_sum * shrink + tl.sum(p, 1)
        v_tile = _rows(v, start, row_stride_v, seqlen_k, DV, BLOCK_N, BLOCK_DV, WHOLE, DESCRIBED)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision=PRECISION)
        row_max = new_max
    return acc, row_sum, row_max


@triton.autotune(
    configs=_INTERPRETED if triton.knobs.runtime.interpret else _ALL,
    key=["seqlen_q", "seqlen_k", "D", "DV", "DESCRIBED", *_FLAGS],
    prune_configs_by={"early_config_prune": _candidates},
)
@triton.jit
def _attention(
    q,  # [batch, heads_q, seqlen_q, D]      strides in elements, last dimension contiguous
    k,  # [batch, heads_kv, seqlen_k, D]
    v,  # [batch, heads_kv, seqlen_k, DV]
    o,  # [batch, heads_q, seqlen_q, DV]
    lse,  # [batch, heads_q, seqlen_q] contiguous, or None
    alibi_slopes,  # [batch, heads_q], broadcast, or None, as all that follow
    bias,  # [batch, heads_q, seqlen_q, seqlen_k]
    mask,  # the same
    sinks,  # [heads_q]
    batch_stride_q, head_stride_q, row_stride_q,
    batch_stride_k, head_stride_k, row_stride_k,
    batch_stride_v, head_stride_v, row_stride_v,
    batch_stride_o, head_stride_o, row_stride_o,
    batch_stride_bias, head_stride_bias, row_stride_bias,
    batch_stride_mask, head_stride_mask, row_stride_mask,
    batch_stride_alibi,
    heads_q,
    group_size,  # query heads a KV head
    seqlen_q,
    seqlen_k,
    window_left,  # query i sees keys from i + seqlen_k - seqlen_q - window_left, where LEFT
    window_right,  # to i + seqlen_k - seqlen_q + window_right, where RIGHT
    softmax_scale,  # above 0
    softcap,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    BIAS: tl.constexpr,
    MASK: tl.constexpr,
    SINKS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,  # padded to powers of two
    BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
    DESCRIBED: tl.constexpr,  # k and v are aligned well enough for tensor descriptors
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(seqlen_q, BLOCK_M)
    block = blocks - 1 - tl.program_id(0) % blocks  # the longest rows of a causal mask first
    head_of_all = tl.program_id(0) // blocks
    batch, head = tl.cast(head_of_all // heads_q, tl.int64), head_of_all % heads_q
    kv_head = tl.cast(head // group_size, tl.int64)
    head = tl.cast(head, tl.int64)
    q += batch * batch_stride_q + head * head_stride_q
    k += batch * batch_stride_k + kv_head * head_stride_k
    v += batch * batch_stride_v + kv_head * head_stride_v
    o += batch * batch_stride_o + head * head_stride_o
    slope = 0.0
    if ALIBI:
        slope = tl.load(alibi_slopes + batch * batch_stride_alibi + head)
    if BIAS:
        bias += batch * batch_stride_bias + head * head_stride_bias
    if MASK:
        mask += batch * batch_stride_mask + head * head_stride_mask
    if DESCRIBED:
        k = tl.make_tensor_descriptor(k, [seqlen_k, D], [row_stride_k, 1], [BLOCK_N, BLOCK_D])
        v = tl.make_tensor_descriptor(v, [seqlen_k, DV], [row_stride_v, 1], [BLOCK_N, BLOCK_DV])

    first = block * BLOCK_M
    q_tile = _rows(q, first, row_stride_q, seqlen_q, D, BLOCK_M, BLOCK_D, False, False)
    rows = first + tl.arange(0, BLOCK_M)
    diagonal = first + seqlen_k - seqlen_q
    begin = 0  # the first key that any row sees, in whole tiles
    whole_begin = 0  # and the first one that all of them see
    whole_end = seqlen_k
    end = seqlen_k
    if RIGHT:
        whole_end = tl.minimum(seqlen_k, tl.maximum(diagonal + window_right + 1, 0))
        end = tl.minimum(seqlen_k, diagonal + BLOCK_M + window_right)
    if LEFT:
        begin = tl.maximum(diagonal - window_left, 0) // BLOCK_N * BLOCK_N
        whole_begin = tl.cdiv(tl.maximum(diagonal + BLOCK_M - 1 - window_left, 0), BLOCK_N)
        whole_begin = tl.minimum(whole_begin * BLOCK_N, tl.cdiv(seqlen_k, BLOCK_N) * BLOCK_N)
    whole_end = tl.maximum(whole_end // BLOCK_N * BLOCK_N, whole_begin)

    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if SINKS:
        row_sum += 1.0
        row_max = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks + head) * 1.4426950408889634
    bounds = (begin, whole_begin, whole_end, end)
    for part in tl.static_range(3):
        if LEFT or part > 0:
            acc, row_sum, row_max = _attend(
                acc, row_sum, row_max, q_tile, k, v, row_stride_k, row_stride_v, bounds[part],
                bounds[part + 1], rows, slope, bias, mask, row_stride_bias, row_stride_mask,
                seqlen_q, seqlen_k, window_left, window_right, softmax_scale, softcap, LEFT, RIGHT,
                SOFTCAP, ALIBI, BIAS, MASK, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, PRECISION, DESCRIBED,
                part == 1,
            )  # fmt: skip

    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    dims = tl.arange(0, BLOCK_DV)
    o_rows = o + tl.cast(rows, tl.int64)[:, None] * row_stride_o
    o_mask = (rows < seqlen_q)[:, None] & (dims < DV)[None, :]
    tl.store(o_rows + dims[None, :], acc.to(o.dtype.element_ty), mask=o_mask)
    if lse is not None:
        total = (row_max + tl.log2(row_sum)) * 0.6931471805599453
        start = tl.cast(head_of_all, tl.int64) * seqlen_q
        tl.store(lse + start + rows, total, mask=rows < seqlen_q)


def _steps(x: torch.Tensor | None, sizes: tuple[int, int, int]) -> list[int]:
    """Strides of batch, head and row of an array that is broadcast to `sizes`."""
    return [0] * 3 if x is None else list(x.expand(*sizes, -1).stride()[:3])


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> Any:
    """o [B, Hq, Sq, Dv], or (o, lse), of what `fkjit.attention` takes by these names.

    fp16, bf16 or fp32, dimensions up to 256; any strides with a contiguous last dimension.
    """
    (batch, heads_q, seqlen_q, d), (heads_kv, seqlen_k, dv) = q.shape, v.shape[1:]
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    if scale < 0:
        q, scale = -q, -scale
    left, right = (None if side == -1 else side for side in window or (None, None))
    right = 0 if causal else right
    o = q.new_empty(batch, heads_q, seqlen_q, dv)
    lse = q.new_empty(o.shape[:3], dtype=torch.float32) if return_lse else None
    if o.numel():
        triton.set_allocator(_scratch)
        sizes = (batch, heads_q, seqlen_q)
        strides = [stride for x in (q, k, v, o) for stride in x.stride()[:3]]
        strides += [*_steps(bias, sizes), *_steps(mask, sizes)]
        slopes = None if alibi_slopes is None else alibi_slopes.expand(batch, heads_q).contiguous()
        _attention[lambda tiles: (triton.cdiv(seqlen_q, tiles["BLOCK_M"]) * heads_q * batch,)](
            q, k, v, o, lse, slopes, bias, None if mask is None else mask.view(torch.uint8), sinks,
            *strides, heads_q, heads_q, heads_q // heads_kv, seqlen_q, seqlen_k, left or 0,
            right or 0, scale, softcap or 1.0,
            LEFT=left is not None,
            RIGHT=right is not None,
            SOFTCAP=bool(softcap),
            ALIBI=alibi_slopes is not None,
            BIAS=bias is not None,
            MASK=mask is not None,
            SINKS=sinks is not None,
            D=d,
            DV=dv,
            BLOCK_D=max(16, triton.next_power_of_2(d)),
            BLOCK_DV=max(16, triton.next_power_of_2(dv)),
            PRECISION="tf32x3" if q.dtype == torch.float32 else None,
            DESCRIBED=_describable(k) and _describable(v),
        )  # fmt: skip
    return (o, lse) if return_lse else o


def prepare(problem: Problem, arrays: Arrays) -> Prepared:
    """The twin on a problem of the benchmark."""
    (left, right), length = problem["window"], problem["seqlen_k"]
    window = (left if left < length else None, right if right < length else None)
    names = ("alibi_slopes", "bias", "mask", "sinks")
    options: dict[str, Any] = {name: arrays[name] for name in names if name in arrays}
    options |= {"softcap": problem["softcap"], "softmax_scale": problem["softmax_scale"]}
    rows = [arrays[name] for name in "qkv"]
    return Prepared(lambda: attention(*rows, window=window, **options))
