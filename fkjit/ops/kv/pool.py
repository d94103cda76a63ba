"""Which pages of a KV cache belong to which sequence: on the host alone, without any memory.

A page holds `page_size` tokens. Sequences that were forked share pages; a page that several share
is copied before one of them writes to it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fkjit.arguments import as_list, whole
from fkjit.errors import (
    ParameterError,
    PoolExhaustedError,
    SequenceTooLongError,
    UnknownSequenceError,
)

_CALL = "PagedKVCache"
Copies = list[tuple[int, int]]  # (source page, target page)


@dataclass
class _Held:
    """One sequence."""

    row: int  # its place in the tables
    length: int = 0  # tokens
    capacity: int = 0  # tokens that may be there before the next reserve()
    pages: list[int] = field(default_factory=list)


class PagePool:
    """Pages, sequences and their tables. Every call either does all it says or raises and changes
    nothing.

    Args:
        num_pages: pages of the pool; at least 1.
        page_size: tokens of a page.
        max_sequences: sequences at a time.
        max_pages: pages of a sequence.

    Attributes:
        page_table: int32 [max_sequences, max_pages]; -1 where a sequence has no page.
        lengths, capacities: int32 [max_sequences]; tokens there are, and tokens there may be.
        changed: (first, last + 1) of what was written in `state`, the three of them in one array,
            since somebody last emptied the list.
    """

    def __init__(self, num_pages: int, page_size: int, max_sequences: int, max_pages: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.max_sequences, self.max_pages = max_sequences, max_pages
        cells = max_sequences * max_pages
        self.state = np.zeros(cells + 2 * max_sequences, np.int32)
        self.page_table = self.state[:cells].reshape(max_sequences, max_pages)
        self.page_table[...] = -1
        self.lengths = self.state[cells : cells + max_sequences]
        self.capacities = self.state[cells + max_sequences :]
        self.changed: list[tuple[int, int]] = [(0, self.state.size)]
        self._shared = np.zeros(num_pages, np.int64)  # sequences that have the page
        self._free = list(range(num_pages))  # heaps: the lowest one first
        self._rows = list(range(max_sequences))
        self._sequences: dict[int, _Held] = {}
        self._next = 0

    @property
    def free_pages(self) -> int:
        """Pages that no sequence has."""
        return len(self._free)

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences there are, the oldest first."""
        return tuple(self._sequences)

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        return self._held("length", sequence).length

    def capacity(self, sequence: int) -> int:
        """Tokens that a sequence may have before the next `reserve`."""
        return self._held("capacity", sequence).capacity

    def pages(self, sequence: int) -> tuple[int, ...]:
        """Pages of a sequence in the order of its tokens, those still empty at the end."""
        return tuple(self._held("pages", sequence).pages)

    def row(self, sequence: int) -> int:
        """The row of the tables that a sequence has until it is freed."""
        return self._held("row", sequence).row

    def allocate(self) -> int:
        """A new, empty sequence: a number that no other one ever has. It has no pages yet."""
        self._need_row("allocate")
        return self._enrol(_Held(heapq.heappop(self._rows)))

    def fork(self, sequence: int, length: int | None = None) -> int:
        """A new sequence with the first `length` tokens (default: all) of another, in its pages."""
        parent = self._held("fork", sequence)
        length = parent.length if length is None else whole(f"{_CALL}.fork", "length", length)
        if length > parent.length:
            raise SequenceTooLongError(
                f"{_CALL}.fork: length={length}, but sequence {sequence} has {parent.length} tokens"
            )
        self._need_row("fork")
        pages = parent.pages[: self._pages_of(length)]
        child = _Held(heapq.heappop(self._rows), length, length, list(pages))
        self._shared[pages] += 1
        if not self._owns_end(parent):
            self._set_capacity(parent, parent.length)
        return self._enrol(child)

    def free(self, sequence: int) -> None:
        """End a sequence; pages that no other one shares are free again."""
        held = self._held("free", sequence)
        del self._sequences[int(sequence)]
        self._release(held.pages)
        self.page_table[held.row, : len(held.pages)] = -1
        self._table_changed(held.row, 0, len(held.pages))
        self._set_length(held, 0)
        self._set_capacity(held, 0)
        heapq.heappush(self._rows, held.row)

    def reserve(self, sequences: Sequence[int], tokens: Sequence[int]) -> Copies:
        """Make room for so many more tokens in each sequence.

        Returns the pages to copy, sources first, before anything is written to the sequences.
        PoolExhaustedError where pages are missing, SequenceTooLongError beyond `max_pages`.
        """
        held = self.batch("reserve", sequences)
        counts = self._counts("reserve", sequences, tokens)
        short, copied = self._missing(sequences, held, counts)
        needed = sum(short) + sum(copied)
        if needed > len(self._free):
            raise PoolExhaustedError(
                f"{_CALL}.reserve: {sum(counts)} tokens in {len(held)} sequences need {needed} "
                f"pages; {len(self._free)} of {self.num_pages} are free: free a sequence, or make "
                "the pool larger",
                needed,
                len(self._free),
            )
        copies = [self._own(one) for one, copy in zip(held, copied, strict=True) if copy]
        for one, more, count in zip(held, short, counts, strict=True):
            self._extend(one, more)
            if count:
                self._set_capacity(one, len(one.pages) * self.page_size)
        return copies

    def advance(self, sequences: Sequence[int], tokens: Sequence[int]) -> None:
        """Count tokens that were written, on the host alone: whoever wrote them counted them in
        the tables. SequenceTooLongError for more than were reserved."""
        held = self.batch("advance", sequences)
        counts = self._counts("advance", sequences, tokens)
        for sequence, one, count in zip(sequences, held, counts, strict=True):
            if one.length + count > one.capacity:
                raise SequenceTooLongError(
                    f"{_CALL}.advance: sequence {sequence} has {one.length} tokens and room for "
                    f"{one.capacity}; {count} more were not reserved"
                )
        for one, count in zip(held, counts, strict=True):
            one.length += count
            self.lengths[one.row] = one.length

    def place(self, sequences: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        """Count tokens that nobody else counts, in what was reserved: their slots, [sum of tokens]
        int32, sequence by sequence."""
        begins = [one.length for one in self.batch("place", sequences)]
        self.advance(sequences, tokens)
        made = [np.zeros(0, np.int32)]
        for begin, sequence in zip(begins, sequences, strict=True):
            held = self._sequences[int(sequence)]
            self._set_length(held, held.length)
            at = np.arange(begin, held.length, dtype=np.int32)
            pages = np.array(held.pages, np.int32)
            made.append(pages[at // self.page_size] * self.page_size + at % self.page_size)
        return np.concatenate(made)

    def defragment(self) -> dict[int, int]:
        """Give the pages in use the lowest numbers. Returns where each page that moves goes.

        No target is a source, so all can be copied at once.
        """
        used = np.flatnonzero(self._shared)
        moving = used[used >= len(used)]
        targets = np.flatnonzero(self._shared[: len(used)] == 0)
        moved = dict(zip(moving.tolist(), targets.tolist(), strict=True))
        if not moved:
            return moved
        self._shared[targets], self._shared[moving] = self._shared[moving], 0
        self._free = list(range(len(used), self.num_pages))
        for held in self._sequences.values():
            if not moved.keys().isdisjoint(held.pages):
                held.pages = [moved.get(page, page) for page in held.pages]
                self.page_table[held.row, : len(held.pages)] = held.pages
                self._table_changed(held.row, 0, len(held.pages))
        return moved

    def batch(self, call: str, sequences: Sequence[int]) -> list[_Held]:
        """The sequences, each of them once."""
        sequences = as_list(f"{_CALL}.{call}", "sequences", sequences)
        held = [self._held(call, sequence) for sequence in sequences]
        if len({id(one) for one in held}) != len(held):
            twice = sorted({int(s) for s in sequences if sequences.count(s) > 1})
            raise ParameterError(f"{_CALL}.{call}: sequences {twice} appear more than once")
        return held

    def _held(self, call: str, sequence: Any) -> _Held:
        sequence = whole(f"{_CALL}.{call}", "sequence", sequence, -(1 << 63))
        try:
            return self._sequences[sequence]
        except KeyError:
            was = "was freed already" if 0 <= sequence < self._next else "was never allocated"
            raise UnknownSequenceError(
                f"{_CALL}.{call}: sequence {sequence} {was} ({len(self._sequences)} are there)"
            ) from None

    def _counts(self, call: str, sequences: Sequence[int], tokens: Sequence[int]) -> list[int]:
        counts = [whole(f"{_CALL}.{call}", "tokens", count) for count in tokens]
        if len(counts) != len(sequences):
            raise ParameterError(
                f"{_CALL}.{call}: {len(counts)} counts of tokens for {len(sequences)} sequences"
            )
        return counts

    def _need_row(self, call: str) -> None:
        if not self._rows:
            raise PoolExhaustedError(
                f"{_CALL}.{call}: all {self.max_sequences} sequences are in use; free one, or "
                "create the cache with more max_sequences",
                1,
                0,
            )

    def _enrol(self, held: _Held) -> int:
        self.page_table[held.row, : len(held.pages)] = held.pages
        self._table_changed(held.row, 0, len(held.pages))
        self._set_length(held, held.length)
        self._set_capacity(held, held.capacity)
        sequence, self._next = self._next, self._next + 1
        self._sequences[sequence] = held
        return sequence

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _owns_end(self, held: _Held) -> bool:
        """Whether the next token goes to a page that no other sequence has (or to none)."""
        at = held.length // self.page_size
        return at >= len(held.pages) or self._shared[held.pages[at]] == 1

    def _missing(
        self, sequences: Sequence[int], held: list[_Held], counts: list[int]
    ) -> tuple[list[int], list[bool]]:
        """For each sequence the pages it lacks, and whether its last one is to be copied."""
        short, copied = [], []
        left: dict[int, int] = {}  # sharers of a page, once those before have copied it
        for sequence, one, count in zip(sequences, held, counts, strict=True):
            need = self._pages_of(one.length + count)
            if need > self.max_pages:
                raise SequenceTooLongError(
                    f"{_CALL}.reserve: sequence {sequence} has {one.length} tokens; {count} more "
                    f"are beyond {self.max_pages * self.page_size}, the most a sequence may have"
                )
            short.append(max(0, need - len(one.pages)))
            copied.append(bool(count) and not self._owns_end(one))
            if copied[-1]:
                page = one.pages[one.length // self.page_size]
                sharers = left.get(page, int(self._shared[page]))
                copied[-1] = sharers > 1
                left[page] = sharers - 1
        return short, copied

    def _own(self, held: _Held) -> tuple[int, int]:
        """Give a sequence a page of its own in place of the shared one it writes to next."""
        at = held.length // self.page_size
        source, target = held.pages[at], heapq.heappop(self._free)
        self._shared[source] -= 1
        self._shared[target] = 1
        held.pages[at] = target
        self.page_table[held.row, at] = target
        self._table_changed(held.row, at, at + 1)
        return source, target

    def _extend(self, held: _Held, more: int) -> None:
        first = len(held.pages)
        held.pages += [heapq.heappop(self._free) for _ in range(more)]
        self._shared[held.pages[first:]] += 1
        self.page_table[held.row, first : first + more] = held.pages[first:]
        self._table_changed(held.row, first, first + more)

    def _release(self, pages: list[int]) -> None:
        self._shared[pages] -= 1
        for page in pages:
            if not self._shared[page]:
                heapq.heappush(self._free, page)

    def _table_changed(self, row: int, first: int, last: int) -> None:
        if first < last:
            self.changed.append((row * self.max_pages + first, row * self.max_pages + last))

    def _set_length(self, held: _Held, length: int) -> None:
        held.length = self.lengths[held.row] = length
        at = self.max_sequences * self.max_pages + held.row
        self.changed.append((at, at + 1))

    def _set_capacity(self, held: _Held, capacity: int) -> None:
        held.capacity = capacity
        if self.capacities[held.row] != capacity:
            self.capacities[held.row] = capacity
            at = self.max_sequences * (self.max_pages + 1) + held.row
            self.changed.append((at, at + 1))
