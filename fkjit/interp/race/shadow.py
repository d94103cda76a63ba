"""The accesses to one memory: who last read and wrote each unit of it, and which pairs conflict.

A unit is as many bytes as the kernel's narrowest access, so that no two accesses share a unit
without sharing a byte. Most accesses are far from any conflict: the chunk of 16 bytes was last
touched before the block's last barrier. Those are only queued; the exact state, one record a unit
and kind of access, is brought up to date when a chunk looks suspicious.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fkjit.interp.core.accesses import READ, STRONG_READ, STRONG_WRITE, WRITE
from fkjit.interp.race.clocks import Clock, Clocks

CHUNK = 16
MAX_QUEUED = 1 << 21  # lane accesses
Known = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]  # see `Shadow.conflict`

_READS = (READ, STRONG_READ)
# What each kind conflicts with. Strong accesses (atomics, volatile, acquire/release) go together.
_AGAINST = {
    READ: (WRITE, STRONG_WRITE),
    WRITE: (WRITE, READ, STRONG_WRITE, STRONG_READ),
    STRONG_READ: (WRITE,),
    STRONG_WRITE: (WRITE, READ),
}


@dataclass
class Access:
    """Accesses by some actors: units, and who and when of each."""

    kind: str
    units: np.ndarray
    actors: np.ndarray
    stamps: np.ndarray


@dataclass
class Queued:
    """The same, of lanes, before it is spread out."""

    kind: str
    positions: np.ndarray
    width: int
    lanes: np.ndarray
    first_cta: int
    stamp: int


@dataclass
class Conflict:
    """Two accesses that nothing orders."""

    at: int  # which of the checked units
    kind: str  # of the earlier access
    actor: int
    stamp: int


class _Record:
    """For every unit the last access of one kind; `many` where several actors' matter."""

    def __init__(self, units: int) -> None:
        self.who = np.full(units, -1, np.int32)
        self.when = np.zeros(units, np.int32)
        self.many = np.zeros(units, bool)
        self.log: list[Access] = []
        self.limit = 256  # entries of the log before the next pruning


class Shadow:
    """`check` finds a conflict with what was `add`ed before; positions are in bytes."""

    def __init__(self, size: int, unit: int, clocks: Clocks, one_block: bool) -> None:
        self.size, self.unit, self.clocks = size, unit, clocks
        self.one_block = one_block  # every chunk is accessed by its own block only
        self.keep_writes = False  # even those that everybody knows of: engines may not
        self.shift = unit.bit_length() - 1
        self.units = -(-size // unit)
        chunks = -(-size // CHUNK)
        self.last_write = np.zeros(chunks, np.int32)
        self.last_read = np.zeros(chunks, np.int32)
        self.owner = np.full(chunks, -1, np.int32)  # block; -2: several
        self.records: dict[str, _Record] = {}
        self.queue: list[Queued] = []
        self.queued = 0
        self.mark: np.ndarray | None = None

    def clear(self) -> None:
        """Forget everything."""
        self.last_write[:], self.last_read[:], self.owner[:] = 0, 0, -1
        self.records.clear()
        self.queue.clear()
        self.queued = 0

    def spread(self, positions: np.ndarray, width: int) -> tuple[np.ndarray, int]:
        """The units of accesses, and how many each has (they follow one another)."""
        units, each = positions >> self.shift, max(width >> self.shift, 1)
        if each == 1:
            return units, 1
        return (units[:, None] + np.arange(each)).reshape(-1), each

    # -- the short way -------------------------------------------------------------------------

    def quiet(self, kind: str, positions: np.ndarray, width: int, lanes: np.ndarray) -> bool:
        """Whether no access can conflict; if so the chunks are stamped with the current time."""
        chunks = positions >> 4
        cta = self.clocks.layout.cta[lanes]
        floor, now = self.clocks.floor[cta], self.clocks.now
        spans = range(0, max(width, 1), CHUNK)
        for span in spans:
            at = chunks + (span >> 4) if span else chunks
            if not self._calm(kind, at, cta, floor):
                return False
        for span in spans:
            at = chunks + (span >> 4) if span else chunks
            (self.last_read if kind in _READS else self.last_write)[at] = now
            if not self.one_block:
                self._own(at, cta + self.clocks.layout.first_cta)
        return True

    def _own(self, chunks: np.ndarray, blocks: np.ndarray) -> None:
        before = self.owner[chunks]
        self.owner[chunks] = np.where((before == -1) | (before == blocks), blocks, -2)
        crowd = self.owner[chunks] != np.where(before == -1, blocks, self.owner[chunks])
        self.owner[chunks[crowd]] = -2

    def _calm(self, kind: str, chunks: np.ndarray, cta: np.ndarray, floor: np.ndarray) -> bool:
        seen = self.last_write[chunks]
        if kind not in _READS:
            seen = np.maximum(seen, self.last_read[chunks])
        if self.one_block:
            return bool((seen <= floor).all())
        owner = self.owner[chunks]
        mine = (owner == cta + self.clocks.layout.first_cta) & (seen <= floor)
        if kind in _READS:
            mine |= seen == 0
        return bool((mine | (owner == -1)).all())

    def enqueue(self, kind: str, positions: np.ndarray, width: int, lanes: np.ndarray) -> None:
        """Remember accesses that conflict with nothing so far."""
        first, now = self.clocks.layout.first_cta, self.clocks.now
        self.queue.append(Queued(kind, positions, width, lanes, first, now))
        self.queued += positions.size
        if self.queued > MAX_QUEUED:
            self.flush()

    def stamp_chunks(self, kind: str, units: np.ndarray, blocks: np.ndarray) -> None:
        """What `quiet` does for accesses that went the exact way."""
        chunks = units << self.shift >> 4
        (self.last_read if kind in _READS else self.last_write)[chunks] = self.clocks.now
        if not self.one_block:
            self._own(chunks, blocks)

    # -- the exact way -------------------------------------------------------------------------

    def flush(self) -> None:
        """Bring the exact state up to date."""
        queue, self.queue, self.queued = self.queue, [], 0
        oldest = int(self.clocks.floor.min()) if self.one_block else 0
        for one in queue:
            if one.stamp > oldest or (self.keep_writes and one.kind not in _READS):
                units, each = self.spread(one.positions, one.width)
                actors = self.clocks.actors(one.lanes, one.first_cta)
                self._apply(one.kind, units, np.repeat(actors, each), one.stamp)

    def conflict(
        self, kind: str, units: np.ndarray, actors: np.ndarray,
        known: Known,
        among: tuple[str, ...] | None = None,
    ) -> Conflict | None:  # fmt: skip
        """The first earlier access that conflicts and is not known.

        `known(at, who, when)`: for accesses number `at` of these, whether the accesses of `who` at
        `when` happened before.
        """
        self.flush()
        for other in _AGAINST[kind] if among is None else among:
            record = self.records.get(other)
            if record is None:
                continue
            who, when = record.who[units], record.when[units]
            at = np.flatnonzero((who >= 0) & (who != actors))
            if at.size:
                ok = known(at, who[at], when[at])
                if not ok.all():
                    first = at[np.flatnonzero(~ok)[0]]
                    return Conflict(int(first), other, int(who[first]), int(when[first]))
            if record.many[units].any():
                found = self._in_log(record, other, units, actors, known)
                if found:
                    return found
        return None

    def _in_log(
        self, record: _Record, kind: str, units: np.ndarray, actors: np.ndarray,
        known: Known,
    ) -> Conflict | None:  # fmt: skip
        """Look at every access since the units' last write."""
        if self.mark is None:
            self.mark = np.full(self.units, -1, np.int32)
        self.mark[units] = np.arange(units.size)
        try:
            for access in reversed(record.log):
                at = self.mark[access.units]
                hit = np.flatnonzero(at >= 0)
                if not hit.size:
                    continue
                at, who, when = at[hit], access.actors[hit], access.stamps[hit]
                live = (who != actors[at]) & (when > self._written(units[at]))
                at, who, when = at[live], who[live], when[live]
                ok = known(at, who, when)
                if not ok.all():
                    first = int(np.flatnonzero(~ok)[0])
                    return Conflict(int(at[first]), kind, int(who[first]), int(when[first]))
        finally:
            self.mark[units] = -1
        return None

    def _written(self, units: np.ndarray) -> np.ndarray | int:
        record = self.records.get(WRITE)
        return 0 if record is None else record.when[units]

    def doubled(self, units: np.ndarray, actors: np.ndarray, each: int) -> tuple[int, int] | None:
        """Two accesses of one instruction (by number) that go to one unit, by different actors."""
        first = units[::each] if each > 1 else units
        if self.mark is None:
            self.mark = np.full(self.units, -1, np.int32)
        number = np.arange(first.size, dtype=np.int32)
        self.mark[first] = number
        other = self.mark[first]
        self.mark[first] = -1
        twice = np.flatnonzero((other != number) & (actors[::each][other] != actors[::each]))
        return (int(twice[0]), int(other[twice[0]])) if twice.size else None

    def _apply(self, kind: str, units: np.ndarray, actors: np.ndarray, stamp: int) -> None:
        record = self.records.get(kind)
        if record is None:
            record = self.records[kind] = _Record(self.units)
        if kind != WRITE:
            self._crowd(record, kind, units, actors, stamp)
        record.who[units], record.when[units] = actors, stamp

    def _crowd(
        self, record: _Record, kind: str, units: np.ndarray, actors: np.ndarray, stamp: int
    ) -> None:
        """Where a unit has several actors since its last write, each of them goes into the log."""
        who, when, many = record.who[units], record.when[units], record.many[units]
        live = when > self._written(units)
        second = live & (who != actors) & ~many
        record.many[units] = crowd = (live & many) | second
        record.who[units] = actors
        together = record.who[units] != actors  # several lanes of this instruction
        if together.any():
            record.many[units[together]] = True
            crowd = record.many[units]
        if second.any():
            record.log.append(Access(kind, units[second], who[second], when[second]))
        if crowd.any():
            stamps = np.full(int(np.count_nonzero(crowd)), stamp, np.int32)
            record.log.append(Access(kind, units[crowd], actors[crowd], stamps))
            if len(record.log) > record.limit:
                self._prune(record)

    def _prune(self, record: _Record) -> None:
        """Drop accesses that a later write, or every block's floor, has made irrelevant."""
        oldest = int(self.clocks.floor.min()) if self.one_block else 0
        written = self._written
        record.log = [
            access for access in record.log
            if (access.stamps > np.maximum(written(access.units), oldest)).any()
        ]  # fmt: skip
        record.limit = max(256, 2 * len(record.log))

    def add(self, kind: str, units: np.ndarray, actors: np.ndarray) -> None:
        """Record accesses that `conflict` has let through; flushed already."""
        self._apply(kind, units, actors, self.clocks.now)
        self.stamp_chunks(kind, units, actors // self.clocks.width)


def knows_by_lane(clocks: Clocks, lanes: np.ndarray) -> Known:
    """The judge of `conflict` for accesses by lanes."""
    return lambda at, who, when: clocks.known(lanes[at], who, when)


def knows_by_clock(clocks: Clocks, clock: Clock) -> Known:
    """The judge of `conflict` for accesses on behalf of threads whose joined clock is given."""
    return lambda at, who, when: clocks.known_by(clock, who, when)
