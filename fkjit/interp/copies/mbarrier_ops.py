"""mbarrier.*: decoders. A try_wait that fails parks its lanes until the phase completes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from fkjit.interp.copies.mbarrier import MAX_COUNT, PENDING_BITS, Mbarrier, Mbarriers, Parked
from fkjit.interp.core.accesses import ATOMIC, WRITE
from fkjit.interp.core.lanes import Group
from fkjit.interp.core.ptx import Instruction, Mem
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.machine.guards import guard_mask
from fkjit.interp.machine.opcodes import Step, control, only
from fkjit.interp.memory.locate import Locator

_COMMON = ("shared", "shared::cta", "b64")
_REMOTE = (*_COMMON, "shared::cluster", "relaxed", "cta", "cluster")
_ARRIVE = (*_REMOTE, "release", "expect_tx", "noComplete")
_WAIT = (*_COMMON, "parity", "acquire", "relaxed", "cta", "cluster")
_KNOWN = {
    "init": _COMMON, "inval": _COMMON, "expect_tx": _REMOTE, "complete_tx": _REMOTE,
    "arrive": _ARRIVE, "arrive_drop": _ARRIVE, "test_wait": _WAIT, "try_wait": _WAIT,
}  # fmt: skip
ByBlock = Iterator[tuple[int, np.ndarray]]


class Operands:
    """An mbarrier instruction's operands for the lanes that execute it."""

    def __init__(self, d: Decoder, ins: Instruction) -> None:
        self.d, self.ins, self.barriers = d, ins, d.part(Mbarriers)
        place = next(at for at, arg in enumerate(ins.args) if isinstance(arg, Mem))
        self.locator = Locator(d, ins, ins.args[place], 8, True)
        self.values = ins.args[place + 1 :]
        self.target = ins.args[0] if place else None

    def group(self, group: Group) -> Group | None:
        """The lanes whose guard holds."""
        lanes = guard_mask(self.d, self.ins, group)
        if lanes is group.mask:
            return group
        return Group(lanes, -1) if lanes.any() else None

    def positions(self, group: Group, own: bool) -> np.ndarray:
        """Where the mbarriers lie; `own`: none may be of another block."""
        found, ins = self.locator.locate(group), self.ins
        fault = self.d.machine.reporter.fault
        if not found.shared:
            raise fault("bad mbarrier", "the address is not in shared memory", ins, group.lanes)
        if own:
            shared = self.d.machine.memory.shared
            bad = found.position // shared.size != self.d.machine.layout.cta[group.lanes]
            if bad.any():
                detail = f"mbarrier.{ins.op[1]} of another block's mbarrier"
                raise fault("bad mbarrier", detail, ins, group.lanes[bad])
        return found.position

    def see(self, kind: str, positions: np.ndarray, group: Group) -> None:
        """Tell the observers."""
        for see in self.d.machine.observers:
            see(kind, True, positions, 8, group.lanes, self.ins)


def blocks(group: Group, positions: np.ndarray, cta: np.ndarray) -> ByBlock:
    """For every mbarrier and every block that uses it: its position, indices into the lanes."""
    lanes = group.lanes
    if cta[lanes[0]] == cta[lanes[-1]] and (positions == positions[0]).all():
        yield int(positions[0]), np.arange(lanes.size)
        return
    keys = np.stack([positions, cta[lanes]])
    unique, inverse = np.unique(keys, axis=1, return_inverse=True)
    for number, position in enumerate(unique[0].tolist()):
        yield position, np.flatnonzero(inverse.reshape(-1) == number)


@control("mbarrier")
def mbarrier(d: Decoder, ins: Instruction) -> Step:
    """mbarrier.op{.sem}{.scope}{.space}.b64; all of them."""
    kind = ins.op[1]
    if kind == "pending_count":
        return _pending_count(d, ins)
    only(ins, (kind, *_KNOWN[kind]))
    operands = Operands(d, ins)
    if kind in ("test_wait", "try_wait"):
        return _wait(operands)
    if kind in ("arrive", "arrive_drop"):
        return _plain(operands, _arrive(operands))
    acts = {"init": _init, "inval": _inval, "expect_tx": _transact, "complete_tx": _transact}
    return _plain(operands, acts[kind](operands))


def _plain(operands: Operands, act: Callable[[Group], None]) -> Step:
    """A control step that goes on with all its lanes."""
    following = operands.ins.pc + 1

    def run(group: Group) -> int:
        mine = operands.group(group)
        if mine is not None:
            act(mine)
        return following

    return run


def _pending_count(d: Decoder, ins: Instruction) -> Step:
    """mbarrier.pending_count.b64 count, state."""
    only(ins, ("pending_count", "b64"))
    out, state = d.dst(ins.args[0], "u32"), d.src(ins.args[1], "u64")

    def run(group: Group) -> int:
        mask = guard_mask(d, ins, group)
        count = (state & np.uint64(MAX_COUNT)).astype(np.uint32)
        np.copyto(out, count, where=mask)
        return ins.pc + 1

    return run


def _init(operands: Operands) -> Callable[[Group], None]:
    count, ins = operands.d.src(operands.values[0], "u32"), operands.ins

    def act(group: Group) -> None:
        positions = operands.positions(group, own=True)
        operands.see(WRITE, positions, group)
        for at, (position, number) in enumerate(
            zip(positions.tolist(), group.pick(count).tolist(), strict=True)
        ):
            operands.barriers.init(position, number, group.lanes[at : at + 1], ins)

    return act


def _inval(operands: Operands) -> Callable[[Group], None]:
    def act(group: Group) -> None:
        positions = operands.positions(group, own=True)
        operands.see(WRITE, positions, group)
        for at, position in enumerate(positions.tolist()):
            operands.barriers.invalidate(position, group.lanes[at : at + 1], operands.ins)

    return act


def _transact(operands: Operands) -> Callable[[Group], None]:
    """expect_tx, complete_tx."""
    size, ins, barriers = operands.d.src(operands.values[0], "u32"), operands.ins, operands.barriers

    def act(group: Group) -> None:
        positions = operands.positions(group, own=False)
        operands.see(ATOMIC, positions, group)
        for at, (position, number) in enumerate(
            zip(positions.tolist(), group.pick(size).tolist(), strict=True)
        ):
            lane = group.lanes[at : at + 1]
            if ins.op[1] == "expect_tx":
                barriers.expect(position, number, lane, ins)
            else:
                barriers.transfer(position, number, None, lane, ins)

    return act


def _arrive(operands: Operands) -> Callable[[Group], None]:
    """arrive, arrive_drop: {state | _}, [a]{, count}; with .expect_tx the operand is bytes."""
    d, ins, barriers = operands.d, operands.ins, operands.barriers
    expects, drop = ins.has("expect_tx"), ins.op[1] == "arrive_drop"
    value = d.src(operands.values[0], "u32") if operands.values else np.ones(1, np.uint32)
    out = None if operands.target is None else d.dst(operands.target, "u64")
    cta = d.machine.layout.cta

    def act(group: Group) -> None:
        positions = operands.positions(group, own=False)
        operands.see(ATOMIC, positions, group)
        values = group.pick(value).astype(np.int64)
        states = np.empty(values.size, np.uint64)
        for position, at in blocks(group, positions, cta):
            lanes, counts = group.lanes[at], values[at]
            if expects:
                for lane, size in zip(lanes, counts.tolist(), strict=True):
                    barriers.expect(position, size, np.array([lane]), ins)
                counts = np.ones_like(counts)
            states[at] = barriers.arrive(position, counts, lanes, ins, drop)
        if out is not None:
            group.put(out, states)

    return act


def _wait(operands: Operands) -> Step:
    """test_wait, try_wait{.parity} p, [a], state or parity{, time}."""
    d, ins, barriers = operands.d, operands.ins, operands.barriers
    parity, parks = ins.has("parity"), ins.op[1] == "try_wait"
    wanted = d.src(operands.values[0], "u32" if parity else "u64")
    assert operands.target is not None
    out, cta = d.dst(operands.target, "pred"), d.machine.layout.cta

    def complete(barrier: Mbarrier, position: int, want: np.ndarray, who: np.ndarray) -> np.ndarray:
        if parity:
            return (want.astype(np.int64) & 1) != (barrier.phase & 1)
        age = barrier.phase - (want >> np.uint64(PENDING_BITS)).astype(np.int64)
        bad = (age < 0) | (age > 1)
        if bad.any():
            detail = f"the state is not of its current or preceding phase ({barrier.phase} now)"
            raise barriers.fault("stale mbarrier state", detail, position, ins, who[bad])
        return age == 1

    def run(group: Group) -> int | None:
        mine = operands.group(group)
        if mine is None:
            return ins.pc + 1
        positions, want = operands.positions(mine, own=True), mine.pick(wanted)
        failed = np.zeros(group.mask.size, bool)
        for position, at in blocks(mine, positions, cta):
            lanes = mine.lanes[at]
            barrier = barriers.get(position, lanes, ins)
            done = complete(barrier, position, want[at], lanes)
            if done.any() and not ins.has("relaxed"):
                barriers.pass_on(barrier, lanes[done])
            out[lanes] = done
            if parks and not done.all():
                barrier.waiting.append(Parked(ins, lanes[~done], out))
                failed[lanes[~done]] = True
        if not failed.any():
            return ins.pc + 1
        rest = group.mask & ~failed
        if rest.any():
            d.machine.push(ins.pc + 1, rest)
        return None

    return run
