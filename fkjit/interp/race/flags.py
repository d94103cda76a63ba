"""Threads that learn from one another through memory: flags, counters and locks with fences.

The patterns of the PTX memory model: a fence, then a strong store or atomic, publishes what the
thread knew at the fence; a strong load or atomic that sees it, then a fence, learns it. `.release`
and `.acquire` are both in one. Plain accesses publish nothing.
"""

from __future__ import annotations

import numpy as np

from fkjit.interp.core.accesses import STRONG_READ, STRONG_WRITE
from fkjit.interp.core.ptx import Function, Instruction
from fkjit.interp.race.clocks import Clock, Clocks

_BLOCK = ("cta",)


class Flags:
    """What is published at which place, and who has seen what without a fence yet."""

    def __init__(self, clocks: Clocks, function: Function) -> None:
        self.clocks = clocks
        self.used = any(
            ins.op[0] in ("fence", "membar")
            or any(part in ("acquire", "release", "acq_rel") for part in ins.op)
            for ins in function.instructions
        )
        layout = clocks.layout
        self.published: dict[tuple[bool, int], Clock] = {}  # (shared?, byte position)
        self.seen: dict[int, Clock] = {}  # by lane: to be learnt at its next fence
        self.fenced = np.full(layout.lanes, -1, np.int64)  # stamp of the last fence
        self.wide = np.zeros(layout.lanes, bool)  # whether it was wider than .cta
        self.knew: np.ndarray | None = None  # [block, thread, actor] at the last fence

    def clear(self) -> None:
        """A new launch."""
        self.published.clear()
        self.start_batch()

    def start_batch(self) -> None:
        """Other blocks; what has been published in global memory stays."""
        self.published = {key: clock for key, clock in self.published.items() if not key[0]}
        self.seen.clear()
        self.fenced[:] = -1
        self.knew = None

    def fence(self, lanes: np.ndarray, ins: Instruction) -> None:
        """What the lanes know may be published now; what they have seen they have learnt."""
        for lane in lanes.tolist():
            if lane in self.seen:
                self.clocks.acquire(np.array([lane]), self.seen.pop(lane))
        layout = self.clocks.layout
        if self.knew is None:
            self.knew = np.zeros((layout.ctas, self.clocks.threads, self.clocks.width), np.int32)
        self.fenced[lanes] = self.clocks.now
        self.wide[lanes] = not any(part in _BLOCK for part in ins.op)
        cta, thread = layout.cta[lanes], layout.thread[lanes]
        self.knew[cta, thread] = self._row(cta, thread)

    def _row(self, cta: np.ndarray, thread: np.ndarray) -> np.ndarray:
        """All that threads know of their own block."""
        clocks = self.clocks
        row = np.zeros((cta.size, clocks.width), np.int32)
        if clocks.rows is not None:
            row = clocks.rows[cta, thread].copy()
        threads = row[:, : clocks.threads]
        np.maximum(threads, clocks.floor[cta, None].clip(max=clocks.now), out=threads)
        row[np.arange(cta.size), thread] = clocks.now
        return row

    def access(
        self, kind: str, order: str, atomic: bool, shared: bool, positions: np.ndarray,
        lanes: np.ndarray,
    ) -> None:  # fmt: skip
        """Strong accesses in lane order: each sees what was published, then publishes."""
        reads = kind == STRONG_READ or atomic
        writes = kind == STRONG_WRITE
        learns, tells = order in ("acquire", "acq_rel", "sc"), order in ("release", "acq_rel", "sc")
        fenced = self.fenced[lanes] >= 0
        if not (self.published or tells or fenced.any()):
            return
        for number, (position, lane) in enumerate(
            zip(positions.tolist(), lanes.tolist(), strict=True)
        ):
            there = self.published.get((shared, position))
            if reads and there is not None:
                self._see(lane, there, learns)
            if not writes:
                continue
            mine = self._publishes(lane, tells) if tells or fenced[number] else None
            if mine is not None:
                self.published[shared, position] = mine.joined(there) if atomic else mine
            elif not atomic:
                self.published.pop((shared, position), None)

    def _see(self, lane: int, clock: Clock, learns: bool) -> None:
        if learns:
            self.clocks.acquire(np.array([lane]), clock)
        else:
            self.seen[lane] = clock.joined(self.seen.get(lane))

    def _publishes(self, lane: int, release: bool) -> Clock | None:
        """What a strong write of this lane tells: all it knows, or what it knew at its fence.

        Other threads' accesses count too if they were fenced before a barrier that this lane knows.
        """
        clocks = self.clocks
        one = np.array([lane])
        now = clocks.release(one)
        if release:
            return now
        assert self.knew is not None
        layout = clocks.layout
        cta, thread = int(layout.cta[lane]), int(layout.thread[lane])
        block = layout.first_cta + cta
        own = self.fenced[cta * layout.padded : (cta + 1) * layout.padded]
        row = now.rows[block].copy()
        row[: clocks.threads] = np.minimum(row[: clocks.threads], np.maximum(own, 0))
        row[clocks.threads :] = 0
        row = np.maximum(row, self.knew[cta, thread])
        row[thread] = self.fenced[lane]
        return Clock({**now.rows, block: row}, block_only=not self.wide[lane])
