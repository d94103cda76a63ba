"""Reading a paged KV cache in Triton, the twin of kernels_cu/kv/read.cu.

A program copies k and v of TOKENS tokens, whole, as they are; what it takes is as in kv_append.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fkjit.spec import Problem

from ..core.op import Arrays, Prepared
from .triton_kv_append import CONFIGS, pages_of, places, steps


@triton.autotune(configs=CONFIGS, key=["tokens", "heads", "dim"])
@triton.jit
def _read(
    k_pages,  # [pages, page_size, heads, dim], or heads before page_size
    v_pages,
    slots,  # [tokens]
    k,  # [tokens, heads, dim]
    v,
    tokens,
    heads,
    dim,
    page_size,
    page_step,
    head_step,
    token_step,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slots + token, mask=token < tokens, other=-1)
    column = tl.arange(0, WIDTH)
    whole = (column < heads * dim)[None, :]
    known, written = (slot >= 0)[:, None] & whole, (token < tokens)[:, None] & whole
    source = places(slot, heads, dim, page_size, page_step, head_step, token_step, WIDTH)
    target = token.to(tl.int64)[:, None] * (heads * dim) + column[None, :]
    keys = tl.load(k_pages + source, mask=known, other=0.0)
    values = tl.load(v_pages + source, mask=known, other=0.0)
    tl.store(k + target, keys, mask=written)
    tl.store(v + target, values, mask=written)


def kv_read(
    pages: tuple[torch.Tensor, torch.Tensor], slots: torch.Tensor, layout: str = "nhd"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(k, v) [tokens, heads, dim] of these slots; zeros where they are below 0."""
    head_at = 2 if layout == "nhd" else 1
    tokens, heads, dim = len(slots), pages[0].shape[head_at], pages[0].shape[3]
    k, v = (x.new_empty(tokens, heads, dim) for x in pages)
    if tokens:
        _read[lambda tiles: (triton.cdiv(tokens, tiles["TOKENS"]),)](
            *pages, slots, k, v, tokens, heads, dim, *steps(pages[0], layout),
            WIDTH=triton.next_power_of_2(heads * dim),
        )  # fmt: skip
    return k, v


def prepare(problem: Problem, arrays: Arrays) -> Prepared:
    """The twin on a problem of the benchmark."""
    pages, layout = pages_of(problem, arrays), problem["layout"]
    slots = arrays["slot_mapping"]
    return Prepared(lambda: kv_read(pages, slots, layout), torch.stack)
