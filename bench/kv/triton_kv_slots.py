"""Slots of the tokens of sequences in Triton, the twin of kernels_cu/kv/slots.cu.

A program has a sequence, as a block has there, and goes through its tokens BLOCK at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fkjit.spec import Problem

from ..core.op import Arrays, Prepared

_ALL = [triton.Config({"BLOCK": block}, num_warps=warps)
        for block, warps in ((128, 1), (512, 4), (1024, 8), (4096, 16))]  # fmt: skip
_INTERPRETED = [triton.Config({"BLOCK": 32}, num_warps=1)]  # Triton's interpreter times nothing


@triton.autotune(
    configs=_INTERPRETED if triton.knobs.runtime.interpret else _ALL,
    key=["tokens", "max_sequences"],
    restore_value=["lengths"],
)
@triton.jit
def _slots(
    rows,  # [sequences]
    ends,  # [sequences + 1] where SEVERAL
    page_table,  # [max_sequences, max_pages]
    lengths,  # [max_sequences]
    capacities,  # [max_sequences]
    slots,  # [tokens]
    tokens,
    page_size,
    max_sequences,
    max_pages,
    APPEND: tl.constexpr,
    SEVERAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0)
    row = tl.load(rows + sequence)
    known = (row >= 0) & (row < max_sequences)
    first, count = sequence, 1
    if SEVERAL:
        first = tl.load(ends + sequence)
        count = tl.minimum(tl.load(ends + sequence + 1), tokens) - first
    length = tl.load(lengths + row, mask=known, other=0)
    begin, end = 0, length
    if APPEND:
        begin, end = length, tl.load(capacities + row, mask=known, other=0)
    pages = page_table + row.to(tl.int64) * max_pages
    for start in range(0, count, BLOCK):
        token = start + tl.arange(0, BLOCK)
        position, inside = begin + token, token < count
        page = tl.load(pages + position // page_size, mask=inside & (position < end), other=-1)
        slot = tl.where(page < 0, -1, page * page_size + position % page_size)
        tl.store(slots + first + token, slot, mask=inside)
    if APPEND:
        tl.debug_barrier()  # everybody has read the length
        tl.store(lengths + row, tl.minimum(begin + count, end), mask=known & (count > 0))


def kv_slots(
    rows: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor], page_size: int,
    ends: torch.Tensor | None = None, tokens: int | None = None, append: bool = True,
) -> torch.Tensor:  # fmt: skip
    """[tokens] slots; tables: page_table, lengths, capacities. Without `ends` a token each."""
    count = len(rows) if tokens is None else tokens
    slots = torch.empty(count, dtype=torch.int32, device=rows.device)
    if len(rows):
        _slots[(len(rows),)](
            rows, ends, *tables, slots, count, page_size, *tables[0].shape, append,
            ends is not None,
        )  # fmt: skip
    return slots


def prepare(problem: Problem, arrays: Arrays) -> Prepared:
    """The twin on a problem of the benchmark."""
    tables: Any = tuple(arrays[name] for name in ("page_table", "lengths", "capacities"))
    several = problem["tokens"] != problem["sequences"]
    given = (arrays["cu_seqlens"], problem["tokens"]) if several else (None, None)
    rows, size, append = arrays["rows"], problem["page_size"], problem["append"]
    return Prepared(lambda: kv_slots(rows, tables, size, *given, append))
