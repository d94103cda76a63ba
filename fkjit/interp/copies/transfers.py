"""Asynchronous copies in flight: bulk copies, tensor copies, st.async and red.async.

A copy acts as late as is legal: when its thread waits for its group, or when no thread can run
without it. Those that may act at one time do so in a random order (the same in every run).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np

from fkjit.interp.copies.mbarrier import Mbarriers
from fkjit.interp.core.accesses import ATOMIC
from fkjit.interp.core.lanes import Group, distinct
from fkjit.interp.core.ptx import Instruction
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.memory.atomics import one_by_one
from fkjit.interp.memory.cluster import Cluster
from fkjit.interp.race.clocks import Clock
from fkjit.interp.race.finder import Operation, race_of
from fkjit.interp.spaces.shared import MBARRIER

SEED = 2024
CHUNK = 16  # bytes: bulk and tensor copies move multiples of them


@dataclass
class Chunks:
    """Chunks of 1 to 16 bytes by their positions in shared memory or in the arena."""

    shared: bool
    positions: np.ndarray
    width: int


@dataclass
class Update:
    """What a reduction does with the old and the new value, in a type of its own."""

    dtype: np.dtype
    combine: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


@dataclass(eq=False)
class Transfer:
    """One copy on behalf of lanes of one block."""

    ins: Instruction
    lanes: np.ndarray
    engine: Hashable
    source: Chunks | None  # None: `values` are given
    target: Chunks
    values: np.ndarray | None = None  # once they have been read
    fill: tuple[Chunks, np.ndarray] | None = None  # a box with bytes outside a tensor; their value
    update: Update | None = None
    convert: Callable[[np.ndarray], np.ndarray] | None = None
    signals: list[tuple[int, int]] = field(default_factory=list)  # mbarrier position, bytes
    number: int | None = None  # of the commit group
    reading: list[Operation | None] = field(default_factory=list)
    writing: list[Operation | None] = field(default_factory=list)
    clock: Clock | None = None  # of what is over

    def blocks(self, size: int) -> set[int]:
        """The blocks whose shared memory (of `size` bytes) it is still to access."""
        sides = [self.target] if self.values is not None else [self.target, self.source]
        found = [s.positions // size for s in sides if s is not None and s.shared]
        return set(distinct(np.concatenate(found)).tolist()) if found else set()


@dataclass(frozen=True)
class _Landed:
    """A copy of a commit group: what is known once it has read, and once it is done."""

    lane: int
    number: int
    has_read: Clock | None
    done: Clock | None


class Transfers:
    """All copies of the batch that are in flight, and each thread's commit groups."""

    def __init__(self, d: Decoder) -> None:
        self.machine, self.race = d.machine, race_of(d)
        self.memory, self.shared = d.machine.memory, d.machine.memory.shared
        self.barriers, self.cluster = d.part(Mbarriers), d.part(Cluster)
        self.random = random.Random(SEED)
        self.flying: list[Transfer] = []
        self.commits = np.zeros(d.machine.layout.lanes, np.int64)
        self.landed: list[_Landed] = []  # before their threads waited for them
        d.machine.on_start.append(self._clear)
        d.machine.engines.append(self._act)
        self.barriers.incoming.append(self._incoming)
        d.machine.on_exit.append(self._check_ended)

    def _clear(self) -> None:
        self.flying.clear()
        self.landed.clear()
        self.commits[:] = 0
        self.random = random.Random(SEED)

    # -- life of a copy ------------------------------------------------------------------------

    def start(self, transfer: Transfer) -> None:
        """The copy is under way from now on."""
        for position, _ in transfer.signals:
            self.barriers.get(position, transfer.lanes, transfer.ins)
        target = transfer.fill[0] if transfer.fill else transfer.target  # all that changes
        if target.shared:
            self._check_no_mbarrier(target, transfer)
        if self.race is not None:
            self._tell(transfer, target)
        if target.shared and transfer.update is None:
            self.shared.bulk_in_flight(target.positions, target.width)
        self.flying.append(transfer)

    def _tell(self, transfer: Transfer, target: Chunks) -> None:
        """Begin the accesses that races are looked for in; reductions are atomics when they act."""
        assert self.race is not None
        for side, write in ((transfer.source, False), (target, True)):
            if side is not None and not (write and transfer.update):
                operation = self.race.start(
                    transfer.lanes, transfer.engine, side.positions, side.width, transfer.ins,
                    write, side.shared,
                )  # fmt: skip
                (transfer.writing if write else transfer.reading).append(operation)

    def _check_no_mbarrier(self, target: Chunks, transfer: Transfer) -> None:
        for part in range(0, target.width, 8):
            bad = np.flatnonzero(self.shared.init.take(target.positions + part) == MBARRIER)
            if bad.size:
                raise self.barriers.fault(
                    "plain access to an mbarrier", "an asynchronous copy over it",
                    (int(target.positions[bad[0]]) + part) & ~7, transfer.ins, transfer.lanes,
                )  # fmt: skip

    def read(self, transfer: Transfer) -> None:
        """The source has been read; its thread knows."""
        source = transfer.source
        if transfer.values is not None or source is None:
            return
        shift = source.width.bit_length() - 1
        if source.shared:
            who = np.broadcast_to(transfer.lanes[:1], source.positions.shape)
            group = Group(np.zeros(0, bool), -1)
            self.shared.check_initialised(source.positions, source.width, group, transfer.ins, who)
        views = self.shared.views if source.shared else self.memory.globals.views
        transfer.values = views[source.width].take(source.positions >> shift)
        self._finish(transfer, transfer.reading)

    def land(self, transfer: Transfer) -> None:
        """The copy is done: the data are there and its mbarriers have been told."""
        self.read(transfer)
        has_read = transfer.clock
        self.flying.remove(transfer)
        assert transfer.values is not None
        values = transfer.convert(transfer.values) if transfer.convert else transfer.values
        if transfer.fill is not None:
            self._write(transfer, *transfer.fill)
        self._write(transfer, transfer.target, values)
        self._finish(transfer, transfer.writing)
        for position, size in transfer.signals:
            self.barriers.transfer(position, size, transfer.clock, transfer.lanes, transfer.ins)
        if self.race is not None and transfer.number is not None:
            lane = int(transfer.lanes[0])
            self.landed.append(_Landed(lane, transfer.number, has_read, transfer.clock))

    def _write(self, transfer: Transfer, target: Chunks, values: np.ndarray) -> None:
        if not target.positions.size:
            return
        views = self.shared.views if target.shared else self.memory.globals.views
        view, at = views[target.width], target.positions >> (target.width.bit_length() - 1)
        update = transfer.update
        if update is None:
            view[at] = values.view(view.dtype)
            if target.shared:
                self.shared.written(target.positions, target.width)
            return
        if target.shared:
            who = np.broadcast_to(transfer.lanes[:1], at.shape)
            group = Group(np.zeros(0, bool), -1)
            self.shared.check_initialised(target.positions, target.width, group, transfer.ins, who)
        self._see_update(transfer, target)
        given = values.view(update.dtype)
        one_by_one(view.view(update.dtype), at, given, given, update.combine)

    def _see_update(self, transfer: Transfer, target: Chunks) -> None:
        """A reduction is an atomic access of its thread where it happens."""
        who = np.broadcast_to(transfer.lanes[:1], target.positions.shape)
        for see in self.machine.observers:
            see(ATOMIC, target.shared, target.positions, target.width, who, transfer.ins)
        if self.race is not None:
            transfer.clock = self.race.join(transfer.clock, self.race.release(transfer.lanes))

    def _finish(self, transfer: Transfer, operations: list[Operation | None]) -> None:
        if self.race is not None:
            for operation in operations:
                clock = self.race.finish(operation)
                transfer.clock = self.race.join(transfer.clock, clock)
        operations.clear()

    def _incoming(self, position: int) -> int:
        """Bytes in flight that an mbarrier will hear of."""
        signals = (signal for transfer in self.flying for signal in transfer.signals)
        return sum(size for place, size in signals if place == position)

    # -- commit groups -------------------------------------------------------------------------

    def commit(self, group: Group) -> None:
        """cp.async.bulk.commit_group: each thread's copies since its last one."""
        for transfer in self.flying:
            if not transfer.signals and transfer.number is None:
                lane = int(transfer.lanes[0])
                if group.mask[lane]:
                    transfer.number = int(self.commits[lane])
        self.commits[group.lanes] += 1

    def wait(self, group: Group, pending: int, reading: bool) -> None:
        """wait_group{.read}: all but the newest `pending` groups are done (or have been read)."""
        due = []
        for transfer in self.flying:
            lane, number = int(transfer.lanes[0]), transfer.number
            if number is None or not group.mask[lane]:
                continue
            if number < self.commits[lane] - pending:
                due.append(transfer)
        self.random.shuffle(due)
        for transfer in due:
            if reading:
                self.read(transfer)
            else:
                self.land(transfer)
            if self.race is not None:
                self.race.acquire(transfer.lanes, transfer.clock)
        self._learn(group, pending, reading)

    def _learn(self, group: Group, pending: int, reading: bool) -> None:
        """Threads that wait learn of their copies that were done before."""
        kept = []
        for one in self.landed:
            due = group.mask[one.lane] and one.number < self.commits[one.lane] - pending
            if due and self.race is not None:
                self.race.acquire(np.array([one.lane]), one.has_read if reading else one.done)
            if reading or not due:
                kept.append(one)
        self.landed = kept

    # -- the machine's hooks -------------------------------------------------------------------

    def _act(self) -> bool:
        """No thread can run: one copy lands, if possible one that an mbarrier hears of."""
        if not self.flying:
            return False
        heard = [transfer for transfer in self.flying if transfer.signals]
        self.land(self.random.choice(heard or self.flying))
        return True

    def _check_ended(self) -> None:
        """A block must not end while its shared memory is still to be read or written."""
        for transfer in self.flying:
            for block in transfer.blocks(self.shared.size):
                if not self.cluster.living(block):
                    if transfer.target.shared:
                        detail = "it still writes to shared memory (nobody waits for its mbarrier)"
                    else:
                        detail = (
                            "it still reads shared memory (cp.async.bulk.wait_group.read 0 must "
                            "stand before the end)"
                        )
                    raise self.machine.reporter.fault(
                        "block ended under an asynchronous copy", detail, transfer.ins,
                        transfer.lanes,
                    )  # fmt: skip
