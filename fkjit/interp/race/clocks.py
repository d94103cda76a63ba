"""Vector clocks: what every thread knows of every other's past.

Accesses are stamped with a counter. Thread t knows u's past up to a stamp s if all that u did up to
s happened before what t does now. A barrier of a whole block costs nothing: its stamp, the block's
`floor`, says that everybody knows everything up to it. Only synchronisation among fewer threads
needs the table of who knows whom. Asynchronous engines are further columns of it. Knowledge of
other blocks, rare, hangs on the thread as a `Clock`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import numpy as np

from fkjit.interp.core.lanes import Layout, distinct

ENGINES = 48  # columns of a block for engines; more engines than that share them
NEVER = np.iinfo(np.int32).max  # what a thread knows of itself: everything


@dataclass(frozen=True)
class Clock:
    """Knowledge that can be handed on: by block, the stamp up to which each actor is known."""

    rows: Mapping[int, np.ndarray] = field(default_factory=dict)
    block_only: bool = False  # released at .cta scope: nothing for other blocks

    def joined(self, other: Clock | None) -> Clock:
        """What both know."""
        if other is None or other is self:
            return self
        rows = dict(self.rows)
        for block, row in other.rows.items():
            rows[block] = np.maximum(rows[block], row) if block in rows else row
        return Clock(rows, self.block_only and other.block_only)

    def knows(self, block: int, index: np.ndarray, when: np.ndarray) -> np.ndarray:
        """Whether the actors' accesses at those stamps are known."""
        row = self.rows.get(block)
        return np.zeros(index.size, bool) if row is None else row[index] >= when


class Clocks:
    """The clocks of the blocks that run together. Actor = block * width + thread or engine."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.threads, self.width = layout.padded, layout.padded + ENGINES
        self.now = 0
        self.floor = np.zeros(layout.ctas, np.int64)
        self.rows: np.ndarray | None = None  # [block of the batch, thread, actor]
        self.foreign: dict[int, Clock] = {}  # by lane
        self.engines: dict[Hashable, int] = {}
        self.names: dict[int, Hashable] = {}  # actor -> engine

    def start_batch(self) -> None:
        """Other blocks: nobody knows anything of anybody. Stamps go on."""
        self.floor[:] = 0
        self.rows = None
        self.foreign.clear()
        self.engines.clear()

    def tick(self) -> int:
        """The stamp of the next access."""
        self.now += 1
        return self.now

    def actors(self, lanes: np.ndarray, first_cta: int | None = None) -> np.ndarray:
        """The actor that each lane is (or was, in the batch that began at `first_cta`)."""
        layout = self.layout
        first = layout.first_cta if first_cta is None else first_cta
        return (first + layout.cta[lanes]) * self.width + layout.thread[lanes]

    def engine(self, cta: int, name: Hashable) -> int:
        """The actor that an engine of a block is."""
        key = (cta, name)
        if key not in self.engines:
            used = sum(1 for at, _ in self.engines if at == cta)  # type: ignore[misc]
            self.engines[key] = used % ENGINES
        block = self.layout.first_cta + cta
        actor = block * self.width + self.threads + self.engines[key]
        self.names[actor] = name
        return actor

    def _table(self) -> np.ndarray:
        if self.rows is None:
            self.rows = np.zeros((self.layout.ctas, self.threads, self.width), np.int32)
            each = np.arange(self.threads)
            self.rows[:, each, each] = NEVER
        return self.rows

    # -- asking --------------------------------------------------------------------------------

    def known(self, lanes: np.ndarray, who: np.ndarray, when: np.ndarray) -> np.ndarray:
        """Whether accesses of `who` at `when` happened before what each lane does now."""
        layout = self.layout
        cta, thread = layout.cta[lanes], layout.thread[lanes]
        block, index = who // self.width, who % self.width
        own = block == cta + layout.first_cta
        ok = own & (((index < self.threads) & (when <= self.floor[cta])) | (index == thread))
        if self.rows is not None and not ok.all():
            rest = np.flatnonzero(own & ~ok)
            ok[rest] = self.rows[cta[rest], thread[rest], index[rest]] >= when[rest]
        if self.foreign:
            rest = np.flatnonzero(~own)
            for at in rest[np.isin(lanes[rest], list(self.foreign))].tolist():
                one = slice(at, at + 1)
                ok[at] = self.foreign[int(lanes[at])].knows(int(block[at]), index[one], when[one])[
                    0
                ]
        return ok

    def known_by(self, clock: Clock, who: np.ndarray, when: np.ndarray) -> np.ndarray:
        """`known` to whoever has the clock."""
        block, index = np.divmod(who, self.width)
        if block.size and (block == block[0]).all():
            return clock.knows(int(block[0]), index, when)
        ok = np.zeros(who.size, bool)
        for number in distinct(block).tolist():
            mine = block == number
            ok[mine] = clock.knows(number, index[mine], when[mine])
        return ok

    # -- handing on ----------------------------------------------------------------------------

    def release(self, lanes: np.ndarray) -> Clock:
        """All that lanes of one block know now, joined."""
        cta, threads = int(self.layout.cta[lanes[0]]), self.layout.thread[lanes]
        row = np.zeros(self.width, np.int32)
        if self.rows is not None:
            row = self.rows[cta, threads].max(0)
        row[: self.threads] = np.maximum(row[: self.threads], self.floor[cta])
        row[threads] = self.now
        clock = Clock({self.layout.first_cta + cta: row})
        for lane in self._with_foreign(lanes):
            clock = clock.joined(self.foreign[lane])
        return clock

    def _with_foreign(self, lanes: np.ndarray) -> list[int]:
        if not self.foreign:
            return []
        return [lane for lane in lanes.tolist() if lane in self.foreign]

    def acquire(self, lanes: np.ndarray, clock: Clock | None) -> None:
        """The lanes know from now on what the clock knows."""
        if clock is None or not lanes.size:
            return
        layout = self.layout
        ctas = layout.cta[lanes]
        alone = bool((ctas == ctas[0]).all())
        for cta in [int(ctas[0])] if alone else distinct(ctas).tolist():
            mine = lanes if alone else lanes[ctas == cta]
            block = layout.first_cta + cta
            if block in clock.rows:
                table, threads = self._table(), layout.thread[mine]
                table[cta, threads] = np.maximum(table[cta, threads], clock.rows[block])
            others = {b: row for b, row in clock.rows.items() if b != block}
            if others and not clock.block_only:
                for lane in mine.tolist():
                    self.foreign[lane] = Clock(others).joined(self.foreign.get(lane))

    def meet(self, lanes: np.ndarray, group: np.ndarray, alive: np.ndarray) -> None:
        """Lanes of equal group (by lane of `lanes`; all of one block) know all of one another."""
        if not lanes.size:
            return
        order = np.argsort(group, kind="stable")
        lanes, group = lanes[order], group[order]
        starts = np.flatnonzero(np.concatenate(([True], group[1:] != group[:-1])))
        sizes = np.diff(np.append(starts, lanes.size))
        cta = self.layout.cta[lanes[starts]]
        living = np.bincount(self.layout.cta[alive], minlength=self.layout.ctas)
        whole = sizes == living[cta]
        if whole.any():
            self._whole_blocks(cta[whole])
        for size in distinct(sizes[~whole]).tolist():
            some = starts[~whole & (sizes == size)]
            self._partly(lanes[some[:, None] + np.arange(size)])
        if self.foreign:
            for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
                self._share_foreign(lanes[start : start + size])

    def _whole_blocks(self, ctas: np.ndarray) -> None:
        self.floor[ctas] = self.now
        if self.rows is not None:
            engines = self.rows[ctas, :, self.threads :]
            self.rows[ctas, :, self.threads :] = engines.max(1, keepdims=True)

    def _partly(self, groups: np.ndarray) -> None:
        """Each row of lanes meets."""
        table = self._table()
        cta, threads = self.layout.cta[groups], self.layout.thread[groups]
        row = table[cta, threads].max(1)
        np.put_along_axis(row, threads, self.now, 1)
        table[cta, threads] = row[:, None]
        table[cta, threads, threads] = NEVER

    def _share_foreign(self, lanes: np.ndarray) -> None:
        clock: Clock | None = None
        for lane in self._with_foreign(lanes):
            clock = self.foreign[lane].joined(clock)
        if clock is not None:
            self.foreign.update(dict.fromkeys(lanes.tolist(), clock))
