"""Who knows of what: races are accesses to one byte, one of them a write, that nothing orders.

`race_of` gives a launch's `Race` where races are looked for, else None. Threads' accesses come to
`access`; barriers, fences and flags tell it what orders them; asynchronous engines begin and finish
theirs. Exact for the run that was made: vector clocks a thread, accesses by the byte.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from fkjit.interp.core.accesses import ATOMIC, READ, STRONG_READ, STRONG_WRITE, WRITE
from fkjit.interp.core.lanes import distinct
from fkjit.interp.core.ptx import Function, Instruction
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.machine.machine import Machine
from fkjit.interp.race.clocks import Clock, Clocks
from fkjit.interp.race.flags import Flags
from fkjit.interp.race.pending import Pending
from fkjit.interp.race.report import RaceReport
from fkjit.interp.race.shadow import CHUNK, Known, Shadow, knows_by_clock, knows_by_lane
from fkjit.interp.race.widths import narrowest

_STRONG = ("relaxed", "acquire", "release", "acq_rel", "volatile", "mmio", "sc")


@dataclass
class Operation:
    """An asynchronous access that has begun."""

    shadow: Shadow
    units: np.ndarray
    actor: int
    write: bool
    ins: Instruction


class Race:
    """Happens-before between the threads and engines of a launch."""

    def __init__(self, machine: Machine, function: Function) -> None:
        self.machine, layout = machine, machine.layout
        self.clocks = Clocks(layout)
        self.flags = Flags(self.clocks, function)
        self.report = RaceReport(machine, self.clocks)
        self.unit = narrowest(function)
        shared = machine.memory.shared
        alone = layout.cluster == (1, 1, 1)
        self.shared = Shadow(layout.ctas * shared.size, self.unit, self.clocks, alone)
        self.shared.keep_writes = any(
            ins.op[0] == "wgmma" or "bulk" in ins.op for ins in function.instructions
        )
        self.globals: Shadow | None = None
        self.writable = np.zeros(0, bool)  # by chunk of the arena
        self.pending: dict[int, Pending] = {}  # by id of shadow
        self.proxy = np.full(layout.lanes, -1, np.int64)  # last fence.proxy.async
        self.strength: dict[int, tuple[str, str, bool]] = {}
        machine.on_start.append(self._start_batch)
        machine.on_exit.append(self._ended)
        machine.observers.append(self.access)

    # -- life ----------------------------------------------------------------------------------

    def start_launch(self) -> None:
        """New arrays: what threads did to others' is forgotten."""
        arena = self.machine.memory.globals
        self.clocks.now = 0
        del self.report.events[:]
        self.globals = Shadow(arena.raw.size, self.unit, self.clocks, one_block=False)
        self.writable = np.zeros(-(-arena.raw.size // CHUNK), bool)
        for place in arena.allocations:
            if place.writable:
                self.writable[place.start // CHUNK : -(-(place.start + place.size) // CHUNK)] = True
        self.flags.clear()

    def end_launch(self) -> None:
        """What an idle kernel need not remember."""
        self.globals = None
        self.shared.clear()
        self.pending.clear()

    def _start_batch(self) -> None:
        self.clocks.start_batch()
        self.shared.clear()
        for pending in self.pending.values():
            pending.clear()
        self.proxy[:] = -1
        self.flags.start_batch()
        self._ended()

    def _ended(self) -> None:
        """Blocks that have ended hold nobody up."""
        layout = self.machine.layout
        living = np.bincount(layout.cta[self.machine.alive], minlength=layout.ctas)
        self.clocks.floor[living == 0] = np.iinfo(np.int32).max

    # -- accesses ------------------------------------------------------------------------------

    def access(
        self, kind: str, shared: bool, positions: np.ndarray, width: int, lanes: np.ndarray,
        ins: Instruction,
    ) -> None:  # fmt: skip
        """Threads access memory; raises SanitizerError at a race."""
        shadow = self._shadow(shared, positions)
        if shadow is None:
            return
        self._tick(ins)
        kind, order, atomic = self._kind(kind, ins)
        pending = self.pending.get(id(shadow))
        if pending is not None and pending.count:
            self._check_pending(shadow, pending, kind, positions, width, lanes, ins)
        if kind == WRITE and lanes.size > 1:
            self._check_doubled(shadow, positions, width, lanes, ins)
        if order:
            self.flags.access(kind, order, atomic, shared, positions, lanes)
        if shadow.quiet(kind, positions, width, lanes):
            shadow.enqueue(kind, positions, width, lanes)
            return
        units, each = shadow.spread(positions, width)
        actors = np.repeat(self.clocks.actors(lanes), each)
        who = np.repeat(lanes, each)
        found = shadow.conflict(kind, units, actors, knows_by_lane(self.clocks, who))
        if found is None and kind == STRONG_WRITE and "cta" in ins.op and not shared:
            found = shadow.conflict(
                kind, units, actors, self._own_block(who), (STRONG_WRITE, STRONG_READ)
            )
        if found is not None:
            raise self.report.conflict(
                found, kind, shared, int(units[found.at]) << shadow.shift,
                int(who[found.at]), ins, self.machine.reporter,
            )  # fmt: skip
        shadow.add(kind, units, actors)

    def _own_block(self, lanes: np.ndarray) -> Known:
        """.cta scope is enough within a block only."""
        layout, clocks = self.machine.layout, self.clocks

        def known(at: np.ndarray, who: np.ndarray, when: np.ndarray) -> np.ndarray:
            same = who // clocks.width == layout.first_cta + layout.cta[lanes[at]]
            return same | clocks.known(lanes[at], who, when)

        return known

    def _tick(self, ins: Instruction) -> int:
        self.report.events.append(ins.pc)
        return self.clocks.tick()

    def _shadow(self, shared: bool, positions: np.ndarray) -> Shadow | None:
        """The memory's shadow; None for arrays that nobody may write."""
        if not positions.size:
            return None
        if shared:
            return self.shared
        return self.globals if self.writable[positions >> 4].any() else None

    def _kind(self, kind: str, ins: Instruction) -> tuple[str, str, bool]:
        """Strong or not, how ordered ("" where no thread can learn from it), and whether atomic."""
        known = self.strength.get(ins.pc)
        if known is None:
            strong = kind == ATOMIC or any(part in _STRONG for part in ins.op)
            mine = {READ: STRONG_READ, WRITE: STRONG_WRITE}.get(kind, STRONG_WRITE)
            order = next((p for p in ins.op if p in _STRONG), "relaxed")
            atomic = kind == ATOMIC
            known = (
                (mine, order if self.flags.used else "", atomic) if strong else (kind, "", False)
            )
            self.strength[ins.pc] = known
        return known

    def _check_doubled(
        self, shadow: Shadow, positions: np.ndarray, width: int, lanes: np.ndarray,
        ins: Instruction,
    ) -> None:  # fmt: skip
        units = positions >> shadow.shift
        twice = shadow.doubled(units, self.clocks.actors(lanes), 1)
        if twice is not None:
            raise self.report.same_instruction(
                shadow is self.shared, int(positions[twice[0]]), lanes[list(twice)], ins
            )

    def _check_pending(
        self, shadow: Shadow, pending: Pending, kind: str, positions: np.ndarray, width: int,
        lanes: np.ndarray, ins: Instruction,
    ) -> None:  # fmt: skip
        if not pending.near(positions, width):
            return
        units, each = shadow.spread(positions, width)
        first = pending.first(units, kind in (WRITE, STRONG_WRITE))
        if first is not None:
            other, write = pending.whose(int(units[first]))
            raise self.report.missing_wait(
                kind, shadow is self.shared, int(units[first]) << shadow.shift,
                int(lanes[first // each]), ins, other, write,
            )  # fmt: skip

    # -- synchronisation -----------------------------------------------------------------------

    def meet(self, mask: np.ndarray, group_of_lane: np.ndarray) -> None:
        """Lanes (a mask) of equal group number wait for one another and order memory."""
        lanes = np.flatnonzero(mask)
        self.clocks.meet(lanes, group_of_lane[lanes], self.machine.alive)

    def release(self, lanes: np.ndarray) -> Clock:
        """What lanes of one block know now."""
        return self.clocks.release(lanes)

    @staticmethod
    def join(one: Clock | None, other: Clock | None) -> Clock | None:
        """What two clocks know together."""
        return other if one is None else one.joined(other)

    def acquire(self, lanes: np.ndarray, clock: Clock | None) -> None:
        """Lanes know from now on what the clock knows."""
        self.clocks.acquire(lanes, clock)

    def fence(self, lanes: np.ndarray, ins: Instruction) -> None:
        """membar or fence."""
        self.flags.fence(lanes, ins)

    def proxy_fence(self, lanes: np.ndarray) -> None:
        """fence.proxy.async: what these threads know becomes visible to asynchronous engines."""
        self.proxy[lanes] = self.clocks.now

    # -- engines -------------------------------------------------------------------------------

    def start(
        self, lanes: np.ndarray, engine: Hashable, positions: np.ndarray, width: int,
        ins: Instruction, write: bool, shared: bool = True,
    ) -> Operation | None:  # fmt: skip
        """An engine begins to access chunks of `width` bytes on behalf of lanes of one block."""
        shadow = self._shadow(shared, positions)
        if shadow is None:
            return None
        self._tick(ins)
        actor = self.clocks.engine(int(self.machine.layout.cta[lanes[0]]), engine)
        units, _ = shadow.spread(positions, width)
        units = distinct(units)
        clock = self.clocks.release(lanes)
        self._check_engine(shadow, units, actor, clock, lanes, ins, write)
        self._pending(shadow).begin(units, ins, write)
        self._tell(True, write, shadow, units, ins)
        return Operation(shadow, units, actor, write, ins)

    def finish(self, *operations: Operation | None) -> Clock | None:
        """Accesses of one instruction by one engine are over; whoever acquires the clock comes
        after them."""
        over = [operation for operation in operations if operation is not None]
        if not over:
            return None
        one, units = over[0], over[0].units
        for operation in over:
            self._pending(one.shadow).end(operation.units, one.ins, one.write)
            self._tell(False, one.write, one.shadow, operation.units, one.ins)
        if len(over) > 1:
            units = distinct(np.concatenate([operation.units for operation in over]))
        stamp = self._tick(one.ins)
        one.shadow.flush()
        one.shadow.add(WRITE if one.write else READ, units, np.full(units.size, one.actor))
        row = np.zeros(self.clocks.width, np.int32)
        row[one.actor % self.clocks.width] = stamp
        return Clock({one.actor // self.clocks.width: row})

    def copy_begins(
        self, positions: np.ndarray, width: int, lanes: np.ndarray, ins: Instruction
    ) -> None:
        """cp.async of these lanes into shared memory."""
        shadow = self.shared
        self._tick(ins)
        units, each = shadow.spread(positions, width)
        pending = self._pending(shadow)
        self._check_doubled(shadow, positions, width, lanes, ins)
        if pending.count:
            self._check_pending(shadow, pending, WRITE, positions, width, lanes, ins)
        if not shadow.quiet(WRITE, positions, width, lanes):
            who = np.repeat(lanes, each)
            actors = self.clocks.actors(who)
            found = shadow.conflict(WRITE, units, actors, knows_by_lane(self.clocks, who))
            if found is not None:
                raise self.report.conflict(
                    found, WRITE, True, int(units[found.at]) << shadow.shift,
                    int(who[found.at]), ins, self.machine.reporter,
                )  # fmt: skip
        pending.begin(units, ins, True)
        self._tell(True, True, shadow, units, ins)

    def copy_lands(
        self, positions: np.ndarray, width: int, lanes: np.ndarray, ins: Instruction
    ) -> None:
        """The copy is there, for the lanes that have waited."""
        self._tick(ins)
        shadow = self.shared
        units, each = shadow.spread(positions, width)
        actors = self.clocks.actors(lanes)
        self._pending(shadow).end(units, ins, True)
        self._tell(False, True, shadow, units, ins)
        if shadow.quiet(WRITE, positions, width, lanes):
            shadow.enqueue(WRITE, positions, width, lanes)
        else:
            shadow.flush()
            shadow.add(WRITE, units, np.repeat(actors, each))

    def _tell(
        self, begins: bool, write: bool, shadow: Shadow, units: np.ndarray, ins: Instruction
    ) -> None:
        if shadow is self.shared:
            for observer in self.machine.engine_observers:
                observer(begins, write, units << shadow.shift, ins)

    def _pending(self, shadow: Shadow) -> Pending:
        if id(shadow) not in self.pending:
            self.pending[id(shadow)] = Pending(shadow)
        return self.pending[id(shadow)]

    def _check_engine(
        self, shadow: Shadow, units: np.ndarray, actor: int, clock: Clock, lanes: np.ndarray,
        ins: Instruction, write: bool,
    ) -> None:  # fmt: skip
        pending = self.pending.get(id(shadow))
        shared, kind = shadow is self.shared, WRITE if write else READ
        if pending is not None and pending.count:
            first = pending.first(units, write)
            if first is not None:
                unit = int(units[first])
                other, writes = pending.whose(unit)
                raise self.report.missing_wait(
                    kind, shared, unit << shadow.shift, int(lanes[0]), ins, other, writes
                )
        actors = np.full(units.size, actor)
        found = shadow.conflict(kind, units, actors, knows_by_clock(self.clocks, clock))
        if found is not None:
            raise self.report.conflict(
                found, kind, shared, int(units[found.at]) << shadow.shift, int(lanes[0]), ins,
                self.machine.reporter,
            )  # fmt: skip
        if ins.op[0] in ("cp", "wgmma"):  # st.async is of the threads' own proxy
            self._check_proxy(shadow, units, lanes, ins)

    def _check_proxy(
        self, shadow: Shadow, units: np.ndarray, lanes: np.ndarray, ins: Instruction
    ) -> None:
        """An engine comes after what threads have stored only behind a fence.proxy.async."""
        record = shadow.records.get(WRITE)
        if record is None:
            return
        when = record.when[units]
        if not (when > self.proxy[lanes].max()).any():
            return
        layout, width, who = self.machine.layout, self.clocks.width, record.who[units]
        lane = (who // width - layout.first_cta) * layout.padded + who % width
        by_thread = (who >= 0) & (who % width < layout.padded)
        by_thread &= (lane >= 0) & (lane < layout.lanes)
        at = np.flatnonzero(by_thread & (when > self.proxy[lanes].max()))
        at = at[self.proxy[lane[at]] < when[at]]
        if at.size:
            first = int(at[0])
            raise self.report.missing_proxy_fence(
                shadow is self.shared, int(units[first]) << shadow.shift, int(lanes[0]), ins,
                int(who[first]), int(when[first]),
            )  # fmt: skip


def race_of(d: Decoder) -> Race | None:
    """The race finder of a launch; None where races are not looked for."""
    return d.part(_make)


def _make(d: Decoder) -> Race | None:
    return Race(d.machine, d.function) if d.machine.checks.race else None
