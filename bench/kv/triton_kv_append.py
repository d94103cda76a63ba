"""Appending to a paged KV cache in Triton, the twin of kernels_cu/kv/append.cu.

A program copies k and v of TOKENS tokens, whole, as they are. Tokens are contiguous, of at most
8192 elements, and so is the cache; the CUDA kernel takes any strides, and keeps fp8 and int8.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fkjit.spec import Problem

from ..core.op import Arrays, Prepared, Refused
from .peers_kv_cache import emptied

WIDEST = 8192  # elements of a token


def _config(tokens: int, warps: int) -> triton.Config:
    return triton.Config({"TOKENS": tokens}, num_warps=warps)


_ALL = [_config(1, 2), _config(1, 4), _config(2, 4), _config(4, 4), _config(4, 8)]
_INTERPRETED = [_config(2, 4)]  # Triton's interpreter times nothing
CONFIGS = _INTERPRETED if triton.knobs.runtime.interpret else _ALL


@triton.jit
def places(slot, heads, dim, page_size, page_step, head_step, token_step, WIDTH: tl.constexpr):
    """Offsets [TOKENS, WIDTH] of the tokens in these slots, head by head."""
    column = tl.arange(0, WIDTH)
    inside = (column // dim) * head_step + column % dim
    page, token = slot // page_size, slot % page_size
    return (page.to(tl.int64) * page_step + token * token_step)[:, None] + inside[None, :]


@triton.autotune(configs=CONFIGS, key=["tokens", "heads", "dim"])
@triton.jit
def _append(
    k,  # [tokens, heads, dim]
    v,
    k_pages,  # [pages, page_size, heads, dim], or heads before page_size
    v_pages,
    slots,  # [tokens]
    tokens,
    heads,
    dim,
    page_size,
    page_step,
    head_step,
    token_step,
    WIDTH: tl.constexpr,  # heads * dim, or the next power of two
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slots + token, mask=token < tokens, other=-1)
    column = tl.arange(0, WIDTH)
    mask = (slot >= 0)[:, None] & (column < heads * dim)[None, :]
    source = token.to(tl.int64)[:, None] * (heads * dim) + column[None, :]
    target = places(slot, heads, dim, page_size, page_step, head_step, token_step, WIDTH)
    keys = tl.load(k + source, mask=mask)
    values = tl.load(v + source, mask=mask)
    tl.store(k_pages + target, keys, mask=mask)
    tl.store(v_pages + target, values, mask=mask)


def steps(pages: torch.Tensor, layout: str) -> tuple[int, ...]:
    """(page_size, elements from page to page, from head to head, from token to token)."""
    token, head = (1, 2) if layout == "nhd" else (2, 1)
    return pages.shape[token], pages.stride(0), pages.stride(head), pages.stride(token)


def kv_append(
    k: torch.Tensor, v: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor, layout: str = "nhd",
) -> None:  # fmt: skip
    """k and v [tokens, heads, dim] into (k_pages, v_pages)."""
    tokens, heads, dim = k.shape
    if tokens:
        _append[lambda tiles: (triton.cdiv(tokens, tiles["TOKENS"]),)](
            k, v, *pages, slots, tokens, heads, dim, *steps(pages[0], layout),
            WIDTH=triton.next_power_of_2(heads * dim),
        )  # fmt: skip


def pages_of(problem: Problem, arrays: Arrays) -> Any:
    """(k_pages, v_pages) of a problem that the twins take."""
    if problem["storage"] != "same":
        raise Refused("keeps numbers as they are")
    if problem["heads"] * problem["head_dim"] > WIDEST:
        raise Refused(f"takes tokens of up to {WIDEST} elements")
    return arrays["k_pages"], arrays["v_pages"]


def prepare(problem: Problem, arrays: Arrays) -> Prepared:
    """The twin on a problem of the benchmark."""
    pages = pages_of(problem, emptied(arrays))
    k, v = arrays["k"], arrays["v"]
    if k.ndim != 3 or not (k.is_contiguous() and v.is_contiguous()):
        raise Refused("takes contiguous tokens")
    slots, layout = arrays["slot_mapping"], problem["layout"]
    return Prepared(lambda: kv_append(k, v, pages, slots, layout), lambda _: torch.stack(pages))
