"""Decoding in Triton, the twin of kernels_cu/attention/decode.cu.

A program has a sequence, a KV head and one of SPLITS pieces of its keys, with the query heads that
share the KV head as rows of one tile; a second kernel adds up the pieces. One new token, keys and
values as they are kept, in pages or in one piece (a page a sequence).

Source: Dao et al., "Flash-Decoding for long-context inference" (2023).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from fkjit.spec import Problem

from ..core.op import Arrays, Prepared, Refused

_PROGRAMS = 4 * 132  # enough for every SM of the largest GPUs
_LEAST_KEYS = 256  # of a piece


def _config(block_n: int, warps: int, stages: int) -> triton.Config:
    return triton.Config({"BLOCK_N": block_n}, num_warps=warps, num_stages=stages)


CONFIGS = [_config(64, 4, 3), _config(64, 4, 4), _config(128, 4, 3), _config(32, 2, 5)]
if triton.knobs.runtime.interpret:
    CONFIGS = CONFIGS[:1]


@triton.autotune(configs=CONFIGS, key=["heads_kv", "D", "longest", "page_size"])
@triton.jit
def _pieces(
    q,  # [batch, heads_q, D]
    k_pages,  # [pages, heads_kv, page_size, D] in any order
    v_pages,
    table,  # [batch, width]
    lengths,  # [batch]
    parts,  # [batch, heads_q, SPLITS, D] fp32
    totals,  # [batch, heads_q, SPLITS]: log2 of the sum of exponentials
    heads_kv,
    group,
    width,
    longest,
    page_size,
    page_step,
    head_step,
    token_step,
    scale_log2,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    split, kv_head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + b)
    piece = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK_N) * BLOCK_N
    begin, end = split * piece, tl.minimum(length, (split + 1) * piece)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, D)
    head = tl.cast(b, tl.int64) * heads_kv * group + kv_head * group + rows
    mine = rows < group
    queries = tl.load(q + head[:, None] * D + dims[None, :], mask=mine[:, None], other=0.0)
    acc = tl.zeros([ROWS, D], tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    for start in tl.range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        seen = key < end
        page = tl.load(table + b * width + key // page_size, mask=seen, other=0)
        place = tl.cast(page, tl.int64) * page_step + (key % page_size) * token_step
        at = place[:, None] + kv_head * head_step + dims[None, :]
        keys = tl.load(k_pages + at, mask=seen[:, None], other=0.0)
        s = tl.where(seen[None, :], tl.dot(queries, keys.T) * scale_log2, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1))
        p = tl.exp2(s - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(p, 1)
        values = tl.load(v_pages + at, mask=seen[:, None], other=0.0)
        acc = tl.dot(p.to(values.dtype), values, acc * shrink[:, None])
        row_max = new_max
    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    slot = head * SPLITS + split
    tl.store(parts + slot[:, None] * D + dims[None, :], acc, mask=mine[:, None])
    tl.store(totals + slot, row_max + tl.log2(row_sum), mask=mine)


@triton.jit
def _merge(
    parts,  # [rows, SPLITS, D]
    totals,  # [rows, SPLITS]
    o,  # [rows, D]
    D: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row = tl.cast(tl.program_id(0), tl.int64)
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, D)
    total = tl.load(totals + row * SPLITS + splits)
    top = tl.max(total, 0)
    weight = tl.exp2(total - tl.where(top == float("-inf"), 0.0, top))
    part = tl.load(parts + (row * SPLITS + splits)[:, None] * D + dims[None, :])
    all_of_it = tl.sum(weight, 0)
    o_row = tl.sum(part * weight[:, None], 0) / tl.where(all_of_it == 0.0, 1.0, all_of_it)
    tl.store(o + row * D + dims, o_row.to(o.dtype.element_ty))


def attention_decode(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    softmax_scale: float,
) -> torch.Tensor:
    """o [B, Hq, D] of q [B, Hq, D]; pages are seen as [pages, heads, page_size, D], of any strides
    but the same of k and v; table [B, pages of a sequence], lengths [B] int32."""
    batch, heads_q, dim = q.shape
    heads_kv, page_size = k_pages.shape[1:3]
    longest = table.shape[1] * page_size
    wanted = max(1, min(_PROGRAMS // (batch * heads_kv), longest // _LEAST_KEYS))
    splits = triton.next_power_of_2(wanted)
    parts = q.new_empty(batch, heads_q, splits, dim, dtype=torch.float32)
    totals = q.new_empty(batch, heads_q, splits, dtype=torch.float32)
    o = torch.empty_like(q)
    group = heads_q // heads_kv
    _pieces[splits, heads_kv, batch](
        q, k_pages, v_pages, table, lengths, parts, totals, heads_kv, group, table.stride(0),
        longest, page_size, k_pages.stride(0), k_pages.stride(1), k_pages.stride(2),
        softmax_scale * math.log2(math.e), D=dim, ROWS=max(16, triton.next_power_of_2(group)),
        SPLITS=splits,
    )  # fmt: skip
    _merge[(batch * heads_q,)](parts, totals, o, D=dim, SPLITS=splits)
    return o


def prepare(problem: Problem, arrays: Arrays) -> Prepared:
    """The twin on a problem of the benchmark."""
    if problem["storage"] != "same" or problem["seqlen_q"] != 1:
        raise Refused("takes one new token, and keys and values as they are")
    q, table = arrays["q"].squeeze(2).contiguous(), arrays.get("page_table")
    k, v = (arrays[side].transpose(1, 2) if problem["layout"] == "nhd" else arrays[side]
            for side in "kv")  # fmt: skip
    if table is None:
        table = torch.arange(len(q), dtype=torch.int32, device=q.device)[:, None]
    rest = (table, arrays["seq_lens"], problem["softmax_scale"])
    return Prepared(lambda: attention_decode(q, k, v, *rest), lambda o: o.unsqueeze(2))
