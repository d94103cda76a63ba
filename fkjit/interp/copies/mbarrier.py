"""mbarrier objects: arrivals and transactions of a phase, who waits for it, and what goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from fkjit.interp.core.accesses import WRITE
from fkjit.interp.core.ptx import Instruction
from fkjit.interp.core.report import Waiting
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.memory.cluster import Cluster
from fkjit.interp.race.clocks import Clock
from fkjit.interp.race.finder import race_of
from fkjit.interp.spaces.shared import MBARRIER

MAX_COUNT = (1 << 20) - 1  # of arrivals, and of bytes of transactions either way
PENDING_BITS = 20  # of a state, from bit 0 on: arrivals pending; above: the phase


@dataclass
class Mbarrier:
    """One mbarrier; tx counts bytes that are expected and have not come."""

    count: int  # arrivals of a phase
    pending: int
    tx: int = 0
    phase: int = 0
    expected: int = 0  # bytes announced in this phase, for reports
    clock: Clock | None = None  # what has been released to it
    complete: Clock | None = None  # the same when the last phase completed
    waiting: list[Parked] = field(default_factory=list)

    @property
    def state(self) -> int:
        """What arrive returns and what plain loads see: not zero, and another one each time."""
        return self.phase << PENDING_BITS | self.pending


@dataclass
class Parked:
    """Lanes of a try_wait that wait for a phase to complete."""

    ins: Instruction
    lanes: np.ndarray
    result: np.ndarray  # predicate register


class Mbarriers:
    """All mbarriers of the batch, by position in shared memory."""

    def __init__(self, d: Decoder) -> None:
        self.machine, self.race = d.machine, race_of(d)
        self.shared, self.cluster = d.machine.memory.shared, d.part(Cluster)
        self.table: dict[int, Mbarrier] = {}
        self.events = 0  # grows with every change of any mbarrier
        self.incoming: list[Callable[[int], int]] = []  # bytes in flight that an mbarrier hears of
        self._retried: object = None
        d.machine.on_start.append(self._clear)
        d.machine.waiting.append(self._who)
        d.machine.retries.append(self._time_out)
        if d.machine.checked:
            d.machine.observers.append(self._forbid_plain_writes)

    def _clear(self) -> None:
        self.table.clear()
        self._retried = None

    # -- life ----------------------------------------------------------------------------------

    def init(self, position: int, count: int, lane: np.ndarray, ins: Instruction) -> None:
        """mbarrier.init."""
        if not 1 <= count <= MAX_COUNT:
            detail = f"a count of {count:,}; 1 to {MAX_COUNT:,} are possible"
            raise self.fault("bad mbarrier count", detail, position, ins, lane)
        self._check_idle(position, "is initialised again", ins, lane)
        self.table[position] = Mbarrier(count, count)
        self.events += 1
        self.shared.init[position : position + 8] = MBARRIER
        self._store(position)

    def invalidate(self, position: int, lane: np.ndarray, ins: Instruction) -> None:
        """mbarrier.inval."""
        self.get(position, lane, ins)
        self._check_idle(position, "is invalidated", ins, lane)
        del self.table[position]
        self.shared.init[position : position + 8] = 0

    def get(self, position: int, lane: np.ndarray, ins: Instruction) -> Mbarrier:
        """The mbarrier at a position; a fault if there is none."""
        if position not in self.table:
            detail = "no mbarrier.init was executed for it, or it was invalidated since"
            raise self.fault("uninitialised mbarrier", detail, position, ins, lane)
        return self.table[position]

    def _check_idle(self, position: int, what: str, ins: Instruction, lane: np.ndarray) -> None:
        old = self.table.get(position)
        if old is not None and (old.pending != old.count or old.tx or old.waiting):
            detail = f"it {what} while {self._status(old)}"
            raise self.fault("mbarrier in use", detail, position, ins, lane)

    def _store(self, position: int) -> None:
        """Keep the eight bytes in memory different from phase to phase."""
        self.shared.views[8][position >> 3] = np.uint64(self.table[position].state)

    # -- arrivals and transactions -------------------------------------------------------------

    def arrive(
        self, position: int, counts: np.ndarray, lanes: np.ndarray, ins: Instruction,
        drop: bool = False,
    ) -> np.ndarray:  # fmt: skip
        """Arrivals of one block's lanes, one after the other; returns the state before each."""
        barrier = self.get(position, lanes, ins)
        total = int(counts.sum())
        if counts.min() < 1 or total > barrier.pending or ins.has("noComplete"):
            each = zip(counts.tolist(), lanes, strict=True)
            states = [self._arrive(position, barrier, n, lane, ins, drop) for n, lane in each]
            return np.array(states, np.uint64)
        before = barrier.state - (np.cumsum(counts) - counts)
        self._release(barrier, lanes[:-1], ins)
        self._arrive(position, barrier, total, lanes[-1], ins, drop)
        return before.astype(np.uint64)

    def _arrive(
        self, position: int, barrier: Mbarrier, count: int, lane: int, ins: Instruction, drop: bool
    ) -> int:
        state, who = barrier.state, np.array([lane])
        kind = "mbarrier over-arrival"
        if not 1 <= count <= barrier.pending:
            detail = f"{count:,} arrivals where {self._status(barrier)}"
            raise self.fault(kind, detail, position, ins, who)
        if ins.has("noComplete") and count == barrier.pending:
            detail = f"a .noComplete arrival would be the last where {self._status(barrier)}"
            raise self.fault(kind, detail, position, ins, who)
        self._release(barrier, who, ins)
        barrier.pending -= count
        if drop:
            barrier.count -= count
        self._advance(position, barrier, who, ins)
        return state

    def _release(self, barrier: Mbarrier, lanes: np.ndarray, ins: Instruction) -> None:
        """What arriving lanes know goes to those who wait; relaxed, of those after a fence."""
        if self.race is not None and ins.has("relaxed"):
            lanes = lanes[self.race.flags.fenced[lanes] >= 0]
        if self.race is not None and lanes.size:
            barrier.clock = self.race.join(barrier.clock, self.race.release(lanes))

    def expect(self, position: int, size: int, lane: np.ndarray, ins: Instruction) -> None:
        """expect_tx: `size` more bytes belong to the phase."""
        barrier = self.get(position, lane, ins)
        barrier.expected += size
        self._transact(position, barrier, size, lane, ins)

    def transfer(
        self, position: int, size: int, clock: Clock | None, lane: np.ndarray, ins: Instruction
    ) -> None:
        """complete_tx: `size` bytes have come; the clock is that of the engine."""
        barrier = self.get(position, lane, ins)
        if self.race is not None:
            barrier.clock = self.race.join(barrier.clock, clock)
        self._transact(position, barrier, -size, lane, ins)

    def _transact(
        self, position: int, barrier: Mbarrier, size: int, lane: np.ndarray, ins: Instruction
    ) -> None:
        barrier.tx += size
        if abs(barrier.tx) > MAX_COUNT:
            detail = f"{barrier.tx:,} bytes outstanding; {MAX_COUNT:,} are the most"
            raise self.fault("mbarrier transaction overflow", detail, position, ins, lane)
        self._advance(position, barrier, lane, ins)

    def _advance(
        self, position: int, barrier: Mbarrier, lane: np.ndarray, ins: Instruction
    ) -> None:
        """Complete the phase if all has come; wake those who wait for it."""
        self.events += 1
        if barrier.pending:
            return
        if barrier.tx < 0:
            detail = (
                f"phase {barrier.phase} has all its arrivals; {barrier.expected:,} bytes were "
                f"expected and {barrier.expected - barrier.tx:,} have come"
            )
            raise self.fault("mbarrier transaction underflow", detail, position, ins, lane)
        if barrier.tx == 0:
            self._check_complete(position, barrier, lane, ins)
            barrier.phase, barrier.pending, barrier.expected = barrier.phase + 1, barrier.count, 0
            barrier.complete = barrier.clock
            self._store(position)
            parked, barrier.waiting = barrier.waiting, []
            for one in parked:
                self._free(one, barrier, True)

    def _check_complete(
        self, position: int, barrier: Mbarrier, lane: np.ndarray, ins: Instruction
    ) -> None:
        """No copy that will tell this mbarrier may outlast the phase it was issued in."""
        late = sum(incoming(position) for incoming in self.incoming)
        if late:
            detail = (
                f"phase {barrier.phase} completes with the {barrier.expected:,} bytes that were "
                f"expected; copies of {late:,} more bytes to it are in flight"
            )
            raise self.fault("mbarrier transaction underflow", detail, position, ins, lane)

    # -- waiting -------------------------------------------------------------------------------

    def pass_on(self, barrier: Mbarrier, lanes: np.ndarray) -> None:
        """Lanes have seen that the last phase is complete."""
        if self.race is not None:
            self.race.acquire(lanes, barrier.complete)

    def _free(self, parked: Parked, barrier: Mbarrier, passed: bool) -> None:
        if passed and not parked.ins.has("relaxed"):
            self.pass_on(barrier, parked.lanes)
        parked.result[parked.lanes] = passed
        mask = np.zeros(self.machine.layout.lanes, bool)
        mask[parked.lanes] = True
        self.machine.push(parked.ins.pc + 1, mask)

    def _time_out(self) -> bool:
        """Nothing moves: a try_wait may give up, once for what has happened since the last time."""
        parked = [(p, b) for b in self.table.values() for p in b.waiting]
        now = (self.events, sorted((p.ins.pc, p.lanes.tolist()) for p, _ in parked))
        if not parked or now == self._retried:
            return False
        self._retried = now
        for barrier in self.table.values():
            barrier.waiting = []
        for one, barrier in parked:
            self._free(one, barrier, False)
        return True

    def _who(self) -> list[Waiting]:
        return [
            (one.ins, one.lanes, f"for {self.describe(position)}: {self._status(barrier)}")
            for position, barrier in self.table.items()
            for one in barrier.waiting
        ]

    # -- reports -------------------------------------------------------------------------------

    def _status(self, barrier: Mbarrier) -> str:
        outstanding = f" and {barrier.tx:,} bytes outstanding" if barrier.tx else ""
        came = barrier.count - barrier.pending
        return f"phase {barrier.phase} has {came:,} of {barrier.count:,} arrivals{outstanding}"

    def describe(self, position: int) -> str:
        """An mbarrier in words."""
        block = position // self.shared.size % self.cluster.size
        where = f" of the cluster's block {block}" if self.cluster.size > 1 else ""
        return f"the mbarrier at {self.shared.describe(position % self.shared.size)}{where}"

    def fault(
        self, kind: str, detail: str, position: int, ins: Instruction, lane: np.ndarray
    ) -> Exception:
        """The error of an mbarrier; raise it."""
        detail = f"{self.describe(position)}: {detail}"
        return self.machine.reporter.fault(kind, detail, ins, lane)

    def _forbid_plain_writes(
        self, kind: str, shared: bool, positions: np.ndarray, width: int, lanes: np.ndarray,
        ins: Instruction,
    ) -> None:  # fmt: skip
        """Observer: threads store nothing over an mbarrier."""
        if not shared or kind != WRITE or ins.op[0] == "mbarrier" or not self.table:
            return
        for part in range(0, width, 8):
            bad = np.flatnonzero(self.shared.init.take(positions + part) == MBARRIER)
            if bad.size:
                position = int(positions[bad[0]]) + part
                detail = f"a {width}-byte write over it (no mbarrier.inval stands before)"
                raise self.fault(
                    "plain access to an mbarrier", detail, position & ~7, ins, lanes[bad]
                )
