"""RoPE and the append to a paged KV cache in one launch of Triton, the twin of
kernels_cu/kv/rope_append.cu.

A program has TOKENS tokens of HEADS heads of q, of k or of v: programs of q come first, then those
of k and of v. What it takes is as in rope.py and kv_append.py.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fkjit.spec import Problem

from ..core.op import Arrays, Prepared, Refused
from ..rope.triton_rope import angles, turns
from .peers_kv_cache import emptied
from .triton_kv_append import pages_of, steps


def _config(tokens: int, heads: int, warps: int) -> triton.Config:
    return triton.Config({"TOKENS": tokens, "HEADS": heads}, num_warps=warps)


_ALL = [_config(*sizes) for sizes in ((1, 8, 2), (1, 8, 4), (2, 8, 4), (4, 8, 4), (4, 8, 8))]
_INTERPRETED = [_config(2, 4, 4)]  # Triton's interpreter times nothing


@triton.jit
def _turn(x, out, source, target, mask, cosine, sine, dim: tl.constexpr):
    """Heads at x + source, turned, to out + target; both offsets [TOKENS, HEADS, 1]."""
    pair = tl.arange(0, dim // 2)[None, None, :]
    left = tl.load(x + source + pair, mask=mask).to(tl.float32)
    right = tl.load(x + source + dim // 2 + pair, mask=mask).to(tl.float32)
    kind = out.dtype.element_ty
    tl.store(out + target + pair, (left * cosine - right * sine).to(kind), mask=mask)
    tl.store(out + target + dim // 2 + pair, (right * cosine + left * sine).to(kind), mask=mask)


@triton.autotune(
    configs=_INTERPRETED if triton.knobs.runtime.interpret else _ALL,
    key=["tokens", "heads_q", "heads", "dim"],
)
@triton.jit
def _rope_append(
    q,  # [tokens, heads_q, dim]
    k,  # [tokens, heads, dim]
    v,
    out_q,
    k_pages,  # [pages, page_size, heads, dim], or heads before page_size
    v_pages,
    positions,  # [tokens]
    slots,  # [tokens]
    turning,  # [pairs] fp64 turns a token
    tokens,
    heads_q,
    heads,
    page_size,
    page_step,
    head_step,
    token_step,
    dim: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.cast(tl.program_id(0), tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    slot = tl.load(slots + token, mask=inside, other=-1)
    place = (slot // page_size).to(tl.int64) * page_step + (slot % page_size) * token_step
    blocks_q, blocks = tl.cdiv(heads_q, HEADS), tl.cdiv(heads, HEADS)
    block = tl.program_id(1)
    if block < blocks_q + blocks:
        at = tl.load(positions + token, mask=inside, other=0)
        cosine, sine = angles(at, turning, dim, False)
        cosine, sine = cosine[:, None, :], sine[:, None, :]
        if block < blocks_q:
            head = (block * HEADS + tl.arange(0, HEADS))[None, :, None]
            mask = inside[:, None, None] & (head < heads_q)
            source = (token[:, None, None] * heads_q + head) * dim
            _turn(q, out_q, source, source, mask, cosine, sine, dim)
        else:
            head = ((block - blocks_q) * HEADS + tl.arange(0, HEADS))[None, :, None]
            mask = (slot >= 0)[:, None, None] & (head < heads)
            source = (token[:, None, None] * heads + head) * dim
            target = place[:, None, None] + head * head_step
            _turn(k, k_pages, source, target, mask, cosine, sine, dim)
    else:
        head = ((block - blocks_q - blocks) * HEADS + tl.arange(0, HEADS))[None, :, None]
        column = tl.arange(0, dim)[None, None, :]
        mask = (slot >= 0)[:, None, None] & (head < heads)
        source = (token[:, None, None] * heads + head) * dim
        target = place[:, None, None] + head * head_step
        tl.store(v_pages + target + column, tl.load(v + source + column, mask=mask), mask=mask)


def rope_kv_append(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor, positions: torch.Tensor, turning: torch.Tensor, layout: str = "nhd",
) -> torch.Tensor:  # fmt: skip
    """q [tokens, heads_q, dim] turned; k turned and v as it is into (k_pages, v_pages)."""
    out, (tokens, heads_q, dim), heads = torch.empty_like(q), q.shape, k.shape[1]

    def grid(tiles: dict[str, Any]) -> tuple[int, int]:
        size = tiles["HEADS"]
        several = triton.cdiv(heads_q, size) + 2 * triton.cdiv(heads, size)
        return triton.cdiv(tokens, tiles["TOKENS"]), several

    if tokens:
        _rope_append[grid](
            q, k, v, out, *pages, positions, slots, turning, tokens, heads_q, heads,
            *steps(pages[0], layout), dim=dim,
        )  # fmt: skip
    return out


def prepare(problem: Problem, arrays: Arrays) -> Prepared:
    """The twin on a problem of the benchmark."""
    dim = problem["head_dim"]
    if problem["interleaved"] or problem["rotary_dim"] != dim or dim & (dim - 1):
        raise Refused("turns whole heads of a power of two, in halves")
    pages = pages_of(problem, emptied(arrays))
    q, k, v, slots, at = (arrays[n] for n in ("q", "k", "v", "slot_mapping", "positions"))
    if not all(x.is_contiguous() for x in (q, k, v)):
        raise Refused("takes contiguous tokens")
    turning, layout = turns(problem, q.device), problem["layout"]
    return Prepared(lambda: rope_kv_append(q, k, v, pages, slots, at, turning, layout))
