"""Attention forward in Triton, the twin of kernels_cu/attention/.

    o = softmax(softmax_scale * q k^T + causal mask) v         lse = log(sum(exp(scores)))

A program owns BLOCK_M query rows of one head and walks over the keys in tiles of BLOCK_N: first the
tiles that every row sees whole, then those that the causal diagonal or the end of the keys cuts.
Head dimensions are padded to powers of two with zeros.

Source: Dao, "FlashAttention-2" (2023), for the algorithm.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from fkjit.spec import Problem

from ..core.op import Arrays, Prepared

_SHORT = 16  # query rows that one row of tensor-core tiles holds


def _config(block_m: int, block_n: int, warps: int, stages: int) -> triton.Config:
    return triton.Config(
        {"BLOCK_M": block_m, "BLOCK_N": block_n}, num_warps=warps, num_stages=stages
    )


# By what a program holds: the bytes of an element, and the wider padded head dimension. Found on an
# H200; the last of each also fits GPUs with less shared memory.
_TILES: dict[tuple[int, int], list[triton.Config]] = {
    (2, 64): [_config(64, 128, 4, 2), _config(128, 64, 8, 3), _config(64, 64, 4, 3)],
    (2, 128): [_config(128, 64, 4, 2), _config(64, 64, 4, 3), _config(64, 32, 4, 2)],
    (2, 256): [_config(128, 64, 8, 2), _config(64, 64, 4, 2), _config(64, 32, 4, 1)],
    (4, 64): [_config(128, 64, 8, 2), _config(64, 64, 4, 2), _config(64, 32, 4, 2)],
    (4, 128): [_config(128, 64, 8, 1), _config(128, 32, 8, 2), _config(32, 32, 4, 2)],
    (4, 256): [_config(32, 32, 4, 1)],
}
_SHORT_TILES = [_config(16, 128, 4, 2), _config(16, 64, 4, 4), _config(16, 32, 4, 1)]
_ALL = [*_SHORT_TILES, *(tile for tiles in _TILES.values() for tile in tiles)]
_INTERPRETED = [_config(16, 32, 4, 1)]  # Triton's interpreter times nothing


def _candidates(configs: list[triton.Config], named: dict[str, Any], **constants: Any):
    """The tiles worth trying for a problem."""
    if named["seqlen_q"] <= _SHORT:
        return _SHORT_TILES
    width = max(64, constants["BLOCK_D"], constants["BLOCK_DV"])
    return _TILES[named["q"].element_size(), width]


@triton.jit
def _rows(
    x,  # a tensor descriptor of one head, or a pointer to it
    start,
    row_stride,
    length,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """Rows start to start + ROWS - 1 of a head [length, WIDTH]: [ROWS, BLOCK], padded with zeros.

    WHOLE: none of them is beyond the end.
    """
    if DESCRIBED:
        tile = x.load([start, 0])
    else:
        rows, dims = tl.arange(0, ROWS), tl.arange(0, BLOCK)
        mask = (dims < WIDTH)[None, :]
        if not WHOLE:
            mask = mask & (start + rows < length)[:, None]
        first = x + tl.cast(start, tl.int64) * row_stride
        tile = tl.load(first + rows[:, None] * row_stride + dims[None, :], mask=mask, other=0.0)
    return tile


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
    visible,  # [BLOCK_M]: how many keys each row sees
    seqlen_k,
    scale_log2,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    DESCRIBED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The state after keys begin to end - 1; WHOLE: every row sees all of them."""
    for start in tl.range(begin, end, BLOCK_N):
        k_tile = _rows(k, start, row_stride_k, seqlen_k, D, BLOCK_N, BLOCK_D, WHOLE, DESCRIBED)
        s = tl.dot(q, k_tile.T, input_precision=PRECISION)
        if not WHOLE:
            keys = start + tl.arange(0, BLOCK_N)
            s = tl.where(keys[None, :] < visible[:, None], s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1) * scale_log2)
        base = new_max
        if not WHOLE:  # rows that see nothing yet
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(s * scale_log2 - base[:, None])
        shrink = tl.exp2(row_max - base)
        row_sum = row_sum * shrink + tl.sum(p, 1)
        v_tile = _rows(v, start, row_stride_v, seqlen_k, DV, BLOCK_N, BLOCK_DV, WHOLE, DESCRIBED)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision=PRECISION)
        row_max = new_max
    return acc, row_sum, row_max


@triton.autotune(
    configs=_INTERPRETED if triton.knobs.runtime.interpret else _ALL,
    key=["seqlen_q", "seqlen_k", "D", "DV", "CAUSAL", "DESCRIBED"],
    prune_configs_by={"early_config_prune": _candidates},
)
@triton.jit
def _attention(
    q,  # [batch, heads_q, seqlen_q, D]      strides in elements, last dimension contiguous
    k,  # [batch, heads_kv, seqlen_k, D]
    v,  # [batch, heads_kv, seqlen_k, DV]
    o,  # [batch, heads_q, seqlen_q, DV]
    lse,  # [batch, heads_q, seqlen_q] contiguous, or None
    batch_stride_q, head_stride_q, row_stride_q,
    batch_stride_k, head_stride_k, row_stride_k,
    batch_stride_v, head_stride_v, row_stride_v,
    batch_stride_o, head_stride_o, row_stride_o,
    heads_q,
    group_size,  # query heads a KV head
    seqlen_q,
    seqlen_k,
    scale_log2,  # softmax_scale * log2(e), above 0
    CAUSAL: tl.constexpr,  # query i sees keys up to i + seqlen_k - seqlen_q
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

    if DESCRIBED:
        k = tl.make_tensor_descriptor(k, [seqlen_k, D], [row_stride_k, 1], [BLOCK_N, BLOCK_D])
        v = tl.make_tensor_descriptor(v, [seqlen_k, DV], [row_stride_v, 1], [BLOCK_N, BLOCK_DV])

    first = block * BLOCK_M
    q_tile = _rows(q, first, row_stride_q, seqlen_q, D, BLOCK_M, BLOCK_D, False, False)
    rows = first + tl.arange(0, BLOCK_M)
    visible = tl.zeros_like(rows) + seqlen_k
    least = seqlen_k  # keys that every row of the block sees
    most = seqlen_k
    if CAUSAL:
        first_hidden = first + seqlen_k - seqlen_q + 1  # to the first row
        visible = tl.minimum(visible, rows + seqlen_k - seqlen_q + 1)
        least = tl.minimum(seqlen_k, tl.maximum(first_hidden, 0))
        most = tl.minimum(seqlen_k, first_hidden + BLOCK_M - 1)
    whole = least // BLOCK_N * BLOCK_N

    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    acc, row_sum, row_max = _attend(
        acc, row_sum, row_max, q_tile, k, v, row_stride_k, row_stride_v, 0, whole, visible,
        seqlen_k, scale_log2, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, PRECISION, DESCRIBED, True,
    )  # fmt: skip
    acc, row_sum, row_max = _attend(
        acc, row_sum, row_max, q_tile, k, v, row_stride_k, row_stride_v, whole, most, visible,
        seqlen_k, scale_log2, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, PRECISION, DESCRIBED, False,
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


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Memory for the descriptors that a kernel makes."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _describable(x: torch.Tensor) -> bool:
    """Whether every row of every head begins on 16 bytes, which the copy engine asks for."""
    places = [x.data_ptr(), *(stride * x.element_size() for stride in x.stride()[:3])]
    return x.numel() > 0 and all(place % 16 == 0 for place in places)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
) -> Any:
    """o [B, Hq, Sq, Dv] of q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv]; or (o, lse).

    fp16, bf16 or fp32, dimensions up to 256; any strides with a contiguous last dimension. lse
    [B, Hq, Sq] is fp32, and -inf where a query sees no key.
    """
    (batch, heads_q, seqlen_q, d), (heads_kv, seqlen_k, dv) = q.shape, v.shape[1:]
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    if scale < 0:
        q, scale = -q, -scale
    o = q.new_empty(batch, heads_q, seqlen_q, dv)
    lse = q.new_empty(o.shape[:3], dtype=torch.float32) if return_lse else None
    if o.numel():
        triton.set_allocator(_scratch)
        strides = [stride for x in (q, k, v, o) for stride in x.stride()[:3]]
        _attention[lambda tiles: (triton.cdiv(seqlen_q, tiles["BLOCK_M"]) * heads_q * batch,)](
            q, k, v, o, lse, *strides, heads_q, heads_q // heads_kv, seqlen_q, seqlen_k,
            max(scale * math.log2(math.e), 1e-30),  # 0 would turn a masked -inf into NaN
            CAUSAL=causal,
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
    q, k, v = (arrays[name] for name in "qkv")
    causal, scale = problem["causal"], problem["softmax_scale"]
    return Prepared(lambda: attention(q, k, v, causal=causal, softmax_scale=scale))
