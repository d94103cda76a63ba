"""Choices sorted by expert in Triton: two kernels, as libraries do it, and atomics that decide.

The first kernel counts in one program, and clears the list in others; the second one lets every
choice claim the next place of its expert by an atomic addition, so that the order within an expert
is another one at each run. kernels_cu/moe/regroup.cu takes one launch and one order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fkjit.ops.moe.groups import places_of
from fkjit.spec import Problem

from ..core.op import Arrays, Prepared

_CHUNK = 4096
_CLEARED = 8192  # places that a program clears
_CLAIMED = 256  # choices of a program


@triton.jit
def _count(
    ids,  # [items]
    cursor,  # [experts]: where an expert's next choice goes
    ends,  # [experts]
    sorted_ids,  # [places]
    items,
    experts,
    block_size,
    places,
    WIDTH: tl.constexpr,  # more than experts
    CHUNK: tl.constexpr,
    CLEARED: tl.constexpr,
):
    program = tl.program_id(0)
    if program == 0:
        counts = tl.zeros([WIDTH], tl.int32)
        for begin in range(0, items, CHUNK):
            at = begin + tl.arange(0, CHUNK)
            counts += tl.histogram(tl.load(ids + at, mask=at < items, other=experts), WIDTH)
        expert = tl.arange(0, WIDTH)
        counts = tl.where(expert < experts, counts, 0)
        wide = (counts + block_size - 1) // block_size * block_size
        end = tl.cumsum(wide, 0)
        tl.store(cursor + expert, end - wide, mask=expert < experts)
        tl.store(ends + expert, end, mask=expert < experts)
    else:
        at = (program - 1) * CLEARED + tl.arange(0, CLEARED)
        tl.store(sorted_ids + at, items, mask=at < places)


@triton.jit
def _claim(
    ids,  # [items]
    cursor,  # [experts]
    ends,  # [experts]
    sorted_ids,  # [places]
    expert_ids,  # [tiles]
    items,
    experts,
    block_size,
    tiles,
    WIDTH: tl.constexpr,
    CLAIMED: tl.constexpr,
):
    at = tl.program_id(0) * CLAIMED + tl.arange(0, CLAIMED)
    expert = tl.load(ids + at, mask=at < items, other=0)
    place = tl.atomic_add(cursor + expert, 1, mask=at < items)
    tl.store(sorted_ids + place, at, mask=at < items)
    tile = tl.program_id(0)
    while tile < tiles:
        every = tl.arange(0, WIDTH)
        end = tl.load(ends + every, mask=every < experts, other=2147483647)
        owner = tl.sum((end <= tile * block_size).to(tl.int32), 0)
        tl.store(expert_ids + tile, tl.where(owner < experts, owner, -1))
        tile += tl.num_programs(0)


def moe_regroup(
    ids: torch.Tensor, experts: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(sorted_token_ids, expert_ids, where each expert's places end) of int32 [tokens, top_k]."""
    items = ids.numel()
    places = places_of(items, experts, block_size)
    sizes = (places, places // block_size, experts, experts)
    sorted_ids, expert_ids, ends, cursor = (
        torch.empty(size, dtype=torch.int32, device=ids.device) for size in sizes
    )
    width = triton.next_power_of_2(experts + 1)
    if items:
        _count[(1 + triton.cdiv(places, _CLEARED),)](
            ids, cursor, ends, sorted_ids, items, experts, block_size, places,
            WIDTH=width, CHUNK=_CHUNK, CLEARED=_CLEARED, num_warps=32,
        )  # fmt: skip
        _claim[(triton.cdiv(items, _CLAIMED),)](
            ids, cursor, ends, sorted_ids, expert_ids, items, experts, block_size,
            places // block_size, WIDTH=width, CLAIMED=_CLAIMED, num_warps=8,
        )  # fmt: skip
    return sorted_ids, expert_ids, ends


def ordered(made: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """sorted_token_ids, each expert's in order."""
    from .cases_moe import in_order

    ends = made[2]
    return in_order(made[0], torch.cat([ends.new_zeros(1), ends]))


def prepare(problem: Problem, arrays: Arrays) -> Prepared:
    """The twin on a problem of the benchmark."""
    ids, experts, size = arrays["topk_ids"], problem["experts"], problem["block_size"]
    return Prepared(lambda: moe_regroup(ids, experts, size), ordered)
