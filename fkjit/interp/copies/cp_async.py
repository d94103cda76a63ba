"""cp.async: copies from global to shared memory that land when the issuing thread waits.

The data move as late as the rules allow, and until then the target counts as uninitialised: a
missing wait shows as a read of bytes that a cp.async is still to write.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fkjit.interp.copies.mbarrier import Mbarriers
from fkjit.interp.core.accesses import READ
from fkjit.interp.core.lanes import Group, distinct
from fkjit.interp.core.ptx import Instruction
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.machine.opcodes import OPCODES, Step, only, opcode
from fkjit.interp.memory.locate import Locator
from fkjit.interp.race.finder import race_of


@dataclass
class _Copy:
    """One cp.async of some lanes, in flight."""

    lanes: np.ndarray
    target: np.ndarray  # positions in shared memory
    source: np.ndarray  # offsets in the arena
    sizes: np.ndarray | None  # bytes to read by lane; None: all of them
    width: int
    ins: Instruction
    group: np.ndarray | None = None  # commit group by lane, once committed


class _Queue:
    """All copies in flight. Commit groups are counted for each thread on its own."""

    def __init__(self, d: Decoder) -> None:
        self.memory, self.race = d.machine.memory, race_of(d)
        self.commits = np.zeros(d.machine.layout.lanes, np.int64)
        self.open: list[_Copy] = []
        self.committed: list[_Copy] = []
        d.machine.on_start.append(self._clear)

    def _clear(self) -> None:
        self.commits[:] = 0
        self.open.clear()
        self.committed.clear()

    def commit(self, group: Group) -> None:
        """cp.async.commit_group."""
        still: list[_Copy] = []
        for copy in self.open:
            mine = group.mask[copy.lanes]
            if not mine.all():
                still.append(_part(copy, ~mine))
                copy = _part(copy, mine)
            if copy.lanes.size:
                copy.group = self.commits[copy.lanes]
                self.committed.append(copy)
        self.open = [copy for copy in still if copy.lanes.size]
        if group.full:
            self.commits += 1
        else:
            self.commits[group.lanes] += 1

    def wait(self, group: Group, pending: int) -> None:
        """cp.async.wait_group: all but the newest `pending` groups of each thread land."""
        still: list[_Copy] = []
        for copy in self.committed:
            assert copy.group is not None
            done = copy.group < self.commits[copy.lanes] - pending
            if not group.full:
                done &= group.mask[copy.lanes]
            if done.all():
                self._land(copy)
            else:
                if done.any():
                    self._land(_part(copy, done))
                still.append(_part(copy, ~done))
        self.committed = still

    def _land(self, copy: _Copy) -> None:
        width, shared = copy.width, self.memory.shared
        if self.race is not None:
            self.race.copy_lands(copy.target, width, copy.lanes, copy.ins)
        values = self.memory.globals.views[width].take(copy.source // width)
        if copy.sizes is not None:
            keep = np.arange(width) < copy.sizes[:, None]
            raw = values.view(np.uint8).reshape(-1, width)
            values = np.where(keep, raw, np.uint8(0)).reshape(-1).view(values.dtype)
        shared.views[width][copy.target // width] = values
        shared.written(copy.target, width)

    def land_all(self, lane: int) -> None:
        """All copies of one thread land, committed or not."""
        self.open, self.committed = (
            [rest for copy in copies if (rest := self._land_lane(copy, lane)) is not None]
            for copies in (self.open, self.committed)
        )

    def _land_lane(self, copy: _Copy, lane: int) -> _Copy | None:
        """Land one thread's part; returns what is left."""
        mine = copy.lanes == lane
        if not mine.any():
            return copy
        self._land(_part(copy, mine))
        return None if mine.all() else _part(copy, ~mine)


class _Arrivals:
    """cp.async.mbarrier.arrive: arrivals that come once the thread's earlier copies have landed."""

    def __init__(self, d: Decoder) -> None:
        self.queue, self.barriers = d.part(_Queue), d.part(Mbarriers)
        self.due: list[tuple[int, int, Instruction]] = []  # lane, mbarrier, instruction
        d.machine.on_start.append(self.due.clear)
        d.machine.engines.append(self._act)

    def _act(self) -> bool:
        """No thread can run: the arrivals that are due come, as late as that."""
        if not self.due:
            return False
        due, self.due = self.due, []
        for lane, position, ins in due:
            self.queue.land_all(lane)
            self.barriers.arrive(position, np.ones(1, np.int64), np.array([lane]), ins)
        return True


def _arrive(d: Decoder, ins: Instruction, queue: _Queue) -> Step:
    """cp.async.mbarrier.arrive{.noinc}{.shared}.b64 [a]: without noinc one more is expected."""
    only(ins, ("async", "mbarrier", "arrive", "noinc", "shared", "shared::cta", "b64"))
    arrivals, barriers = d.part(_Arrivals), d.part(Mbarriers)
    locator = Locator(d, ins, ins.args[0], 8, True)

    def run(group: Group) -> None:
        positions = locator.locate(group).position.tolist()
        for lane, position in zip(group.lanes.tolist(), positions, strict=True):
            barrier = barriers.get(position, np.array([lane]), ins)
            if not ins.has("noinc"):
                barrier.pending += 1
            arrivals.due.append((lane, position, ins))

    return run


def _part(copy: _Copy, chosen: np.ndarray) -> _Copy:
    return _Copy(
        copy.lanes[chosen], copy.target[chosen], copy.source[chosen],
        None if copy.sizes is None else copy.sizes[chosen], copy.width, copy.ins,
        None if copy.group is None else copy.group[chosen],
    )  # fmt: skip


@opcode("cp")
def cp(d: Decoder, ins: Instruction) -> Step:
    """cp.async.ca/.cg, commit_group, wait_group n, wait_all, mbarrier.arrive; bulk copies."""
    if "bulk" in ins.op[2:4]:
        return OPCODES["cp.async.bulk"](d, ins)
    if ins.op[1] != "async":
        raise ValueError(f"modifier .{ins.op[1]}")
    queue = d.part(_Queue)
    if ins.op[2] == "mbarrier":
        return _arrive(d, ins, queue)
    if ins.op[2] == "commit_group":
        return queue.commit
    if ins.op[2] == "wait_group":
        pending = d.immediate(ins.args[0])
        return lambda group: queue.wait(group, pending)
    if ins.op[2] == "wait_all":

        def wait_all(group: Group) -> None:
            queue.commit(group)
            queue.wait(group, 0)

        return wait_all
    if ins.op[2] not in ("ca", "cg"):
        raise ValueError(f"modifier .{ins.op[2]}")
    return _copy(d, ins, queue)


def _copy(d: Decoder, ins: Instruction, queue: _Queue) -> Step:
    """cp.async.ca/cg.shared.global [dst], [src], cp-size{, src-size | ignore-src}{, policy}."""
    allowed = (
        "L2::64B", "L2::128B", "L2::256B", "L2::cache_hint", "shared", "shared::cta", "global",
    )  # fmt: skip
    if any(part not in allowed for part in ins.op[3:]):
        raise ValueError("modifier")
    width = d.immediate(ins.args[2])
    if width not in (4, 8, 16) or (ins.op[2] == "cg" and width != 16):
        raise ValueError(f"cp-size {width}")
    limit = _limit(d, ins, width)
    from_op, to_op = _Half(ins, "global"), _Half(ins, "shared")
    source = Locator(d, from_op, ins.args[1], width, False)  # type: ignore[arg-type]
    target = Locator(d, to_op, ins.args[0], width, True)  # type: ignore[arg-type]
    shared, race = d.machine.memory.shared, race_of(d)

    def run(group: Group) -> None:
        to = target.locate(group).position
        if limit is None:
            offsets, count = source.locate(group).position, None
        else:
            count = limit(group)
            offsets, count = _source_offsets(d, source, group, count, width)
        if race is not None:
            race.copy_begins(to, width, group.lanes, ins)
            race.access(READ, False, offsets, width, group.lanes, ins)
        shared.in_flight(to, width)
        queue.open.append(_Copy(group.lanes, to, offsets, count, width, ins))

    return run


def _limit(d: Decoder, ins: Instruction, width: int) -> Callable[[Group], np.ndarray] | None:
    """src-size, or the predicate ignore-src: how many bytes every lane reads; None: all."""
    given = ins.args[3 : len(ins.args) - ins.has("L2::cache_hint")]
    if not given:
        return None
    (operand,) = given
    if d.registers.is_predicate(operand):
        predicate, negated = d.registers.predicate(operand)
        return lambda group: np.where(group.pick(predicate) != negated, 0, width)
    sizes = d.src(operand, "u32")
    if sizes.size == 1 and int(sizes[0]) == width:
        return None
    return lambda group: group.pick(sizes).astype(np.int64)


def _source_offsets(
    d: Decoder, source: Locator, group: Group, count: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """Arena offsets: who reads nothing needs no valid address, who reads less only those bytes."""
    if (count > width).any():
        bad = group.lanes[count > width]
        detail = f"src-size {int(count[count > width][0])} is above cp-size {width}"
        raise d.machine.reporter.fault("bad cp.async", detail, source.ins, bad)
    if (count == width).all():
        return source.locate(group).position, None
    offsets = np.zeros(count.size, np.int64)
    for size in distinct(count[count > 0]).tolist():
        mine = count == size
        mask = np.zeros(group.mask.size, bool)
        mask[group.lanes[mine]] = True
        offsets[mine] = source.locate_bytes(Group(mask, -1), size)
    return offsets, count


class _Half:
    """One side of a cp.async seen as an instruction with a single state space."""

    def __init__(self, ins: Instruction, space: str) -> None:
        self.op = ("cp", space)
        self.args, self.location, self.text = ins.args, ins.location, ins.text
        self.line = ins.line
