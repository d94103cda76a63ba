"""bar.sync, bar.arrive, bar.red and their barrier.* spellings: threads of a block meet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fkjit.interp.core.lanes import WARP, Group, distinct
from fkjit.interp.core.ptx import Instruction
from fkjit.interp.machine.converge import converge_warp
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.machine.guards import guard_mask
from fkjit.interp.machine.opcodes import CONTROL, Step, control
from fkjit.interp.race.clocks import Clock
from fkjit.interp.race.finder import Race, race_of

_REDUCE = {
    "popc": lambda votes, all_: votes,
    "and": lambda votes, all_: votes == all_,
    "or": lambda votes, all_: votes > 0,
}


@dataclass
class _Place:
    """One barrier instruction: who waits there, and what to do with the result of a bar.red."""

    ins: Instruction
    waiting: np.ndarray
    result: np.ndarray | None = None
    reduce: str = ""


@dataclass
class _Barrier:
    """One of a block's sixteen barriers, for all blocks of the batch."""

    arrived: np.ndarray  # threads by block
    expected: np.ndarray  # the count given, by block; 0: all that live
    votes: np.ndarray  # true predicates of bar.red, by block
    early: dict[int, Clock]  # by block: what threads knew that have arrived and do not wait
    places: dict[int, _Place]


class Barriers:
    """All barriers of the batch."""

    def __init__(self, d: Decoder) -> None:
        self.machine, self.race = d.machine, race_of(d)
        self.layout = d.machine.layout
        self.table: dict[int, _Barrier] = {}
        d.machine.on_start.append(self.table.clear)
        d.machine.on_exit.append(self.release)
        d.machine.waiting.append(self.who)

    def _barrier(self, number: int) -> _Barrier:
        if number not in self.table:
            self.table[number] = _Barrier(
                *(np.zeros(self.layout.ctas, np.int64) for _ in range(3)), early={}, places={}
            )
        return self.table[number]

    def arrive(
        self, number: int, lanes: np.ndarray, count: np.ndarray | None, place: _Place | None
    ) -> None:
        """Lanes (a mask) reach a barrier; they wait unless `place` is None."""
        barrier, cta = self._barrier(number), self.layout.cta
        barrier.arrived += np.bincount(cta[lanes], minlength=self.layout.ctas)
        if count is not None:
            barrier.expected[cta[lanes]] = count if count.size == 1 else count[lanes]
        if place is not None:
            known = barrier.places.setdefault(place.ins.pc, place)
            known.waiting = known.waiting | lanes
        elif self.race is not None:
            self._release(barrier, self.race, np.flatnonzero(lanes))

    def _release(self, barrier: _Barrier, race: Race, lanes: np.ndarray) -> None:
        for block in distinct(self.layout.cta[lanes]).tolist():
            clock = race.release(lanes[self.layout.cta[lanes] == block])
            barrier.early[block] = clock.joined(barrier.early.get(block))

    def _order(self, barrier: _Barrier, race: Race, inside: np.ndarray) -> None:
        """Those who wait learn what everybody knew who has come."""
        waiting = np.zeros_like(inside)
        for place in barrier.places.values():
            waiting |= place.waiting & inside
        race.meet(waiting, self.layout.cta)
        for block in [block for block in barrier.early if inside[block * self.layout.padded]]:
            lanes = np.flatnonzero(waiting & (self.layout.cta == block))
            race.acquire(lanes, barrier.early.pop(block))

    def release(self) -> None:
        """Let go the blocks whose barriers are complete."""
        cta, blocks = self.layout.cta, self.layout.ctas
        for barrier in self.table.values():
            if not barrier.arrived.any():
                continue
            living = np.bincount(cta[self.machine.alive], minlength=blocks)
            need = np.where(barrier.expected > 0, barrier.expected, living)
            done = (barrier.arrived >= need) & (barrier.arrived > 0)
            if done.any():
                self._complete(barrier, done)

    def _complete(self, barrier: _Barrier, done: np.ndarray) -> None:
        inside = done[self.layout.cta]
        if self.machine.checked:
            self._check_together(barrier, inside)
        if self.race is not None:
            self._order(barrier, self.race, inside)
        votes, arrived = barrier.votes[self.layout.cta], barrier.arrived[self.layout.cta]
        for place in barrier.places.values():
            free = place.waiting & inside
            if free.any():
                if place.result is not None:
                    value = _REDUCE[place.reduce](votes, arrived)
                    np.copyto(place.result, value, where=free, casting="unsafe")
                place.waiting = place.waiting & ~inside
                self.machine.push(place.ins.pc + 1, free)
        for counts in (barrier.arrived, barrier.expected, barrier.votes):
            counts[done] = 0

    def _check_together(self, barrier: _Barrier, inside: np.ndarray) -> None:
        """A barrier for the whole block must be one instruction for all of its threads."""
        everyone = (barrier.expected == 0)[self.layout.cta] & inside
        busy = [p for p in barrier.places.values() if (p.waiting & inside).any()]
        if len(busy) < 2:
            return
        for at, place in enumerate(busy):
            for other in busy[at + 1 :]:
                one, two = place.waiting & inside, other.waiting & inside
                both = self._blocks(one & everyone) & self._blocks(two & everyone)
                both |= np.isin(np.arange(both.size), self._split_warps(one, two))
                if both.any():
                    mine = both[self.layout.cta]
                    who = [(p.ins, np.flatnonzero(p.waiting & mine)) for p in busy]
                    raise self.machine.reporter.waiting(
                        "barrier divergence",
                        "threads of one block wait at different barrier instructions",
                        [entry for entry in who if entry[1].size],
                    )

    def _blocks(self, mask: np.ndarray) -> np.ndarray:
        return np.bincount(self.layout.cta[mask], minlength=self.layout.ctas) > 0

    def _split_warps(self, one: np.ndarray, two: np.ndarray) -> np.ndarray:
        """Blocks with a warp whose threads wait in both places."""
        warps = one.reshape(-1, WARP).any(1) & two.reshape(-1, WARP).any(1)
        return self.layout.cta[np.flatnonzero(warps) * WARP]

    def who(self) -> list[tuple[Instruction, np.ndarray]]:
        """Who waits at which instruction."""
        places = [p for barrier in self.table.values() for p in barrier.places.values()]
        return [(p.ins, np.flatnonzero(p.waiting)) for p in places if p.waiting.any()]


@control("bar", "barrier")
def bar(d: Decoder, ins: Instruction) -> Step:
    """bar{rier}{.cta}.sync/.arrive/.red id[, count]; bar.warp.sync."""
    parts = [part for part in ins.op[1:] if part not in ("cta", "aligned")]
    if parts[0] == "cluster":
        return CONTROL["barrier.cluster"](d, ins)
    if parts[:2] == ["warp", "sync"]:
        return converge_warp(d, ins, ins.args[0], _warp_order(d, ins))
    if parts[0] not in ("sync", "arrive", "red"):
        raise ValueError(f"modifier .{parts[0]}")
    if parts[0] == "red":
        return _reduce(d, ins, parts)
    barriers = d.part(Barriers)
    number = d.src(ins.args[0], "u32")
    count = d.src(ins.args[1], "u32") if len(ins.args) > 1 else None
    waits = parts[0] == "sync"

    def run(group: Group) -> int | None:
        lanes = guard_mask(d, ins, group)
        place = _Place(ins, np.zeros(lanes.size, bool)) if waits else None
        _arrive_all(barriers, number, lanes, count, place)
        rest = group.mask & ~lanes if waits else group.mask
        if rest.any():
            d.machine.push(ins.pc + 1, rest)
        barriers.release()
        return None

    return run


def _warp_order(d: Decoder, ins: Instruction) -> Callable[[Group], None]:
    """bar.warp.sync orders the memory accesses of the warp's threads that its mask names."""
    race, members = race_of(d), d.src(ins.args[0], "u32")
    if race is None:
        return lambda group: None
    warp = np.arange(d.machine.layout.lanes) // WARP << 32
    return lambda group: race.meet(group.mask, warp | members.astype(np.int64))


def _arrive_all(
    barriers: Barriers, number: np.ndarray, lanes: np.ndarray, count: np.ndarray | None,
    place: _Place | None,
) -> None:  # fmt: skip
    if number.size == 1:
        if lanes.any():
            barriers.arrive(int(number[0]), lanes, count, place)
        return
    for value in distinct(number[lanes]).tolist():
        own = None if place is None else _Place(place.ins, place.waiting)
        barriers.arrive(value, lanes & (number == value), count, own)


def _reduce(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    """bar.red.popc/and/or d, id[, count], predicate."""
    barriers, operation = d.part(Barriers), parts[1]
    out = d.dst(ins.args[0], "u32" if operation == "popc" else "pred")
    number = d.immediate(ins.args[1])
    predicate, negated = d.registers.predicate(ins.args[-1])
    count = d.src(ins.args[2], "u32") if len(ins.args) > 3 else None

    def run(group: Group) -> None:
        lanes = guard_mask(d, ins, group)
        barriers.arrive(number, lanes, count, _Place(ins, np.zeros_like(lanes), out, operation))
        true = lanes & (~predicate if negated else predicate)
        votes = np.bincount(d.machine.layout.cta[true], minlength=d.machine.layout.ctas)
        barriers.table[number].votes += votes
        rest = group.mask & ~lanes
        if rest.any():
            d.machine.push(ins.pc + 1, rest)
        barriers.release()

    return run
