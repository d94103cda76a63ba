"""Lanes of a warp that execute an instruction together, and wait for one another until they can."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fkjit.interp.core.lanes import WARP, Group
from fkjit.interp.core.ptx import Instruction, Operand
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.machine.guards import guard_mask
from fkjit.interp.machine.opcodes import Step

ALL = 0xFFFFFFFF


def ballot(mask: np.ndarray) -> np.ndarray:
    """For every lane, the bits of its warp's lanes in `mask` (u32)."""
    bits = np.packbits(mask.reshape(-1, WARP), axis=1, bitorder="little").view(np.uint32)
    return np.repeat(bits.reshape(-1), WARP)


class _Convergence:
    """Lanes wait here until all that their member masks name have come (or have ended)."""

    def __init__(
        self, d: Decoder, ins: Instruction, act: Callable[[Group], None], following: int
    ) -> None:
        self.d, self.ins, self.act, self.following = d, ins, act, following
        self.parked = np.zeros(d.machine.layout.lanes, bool)
        self.members = np.zeros(d.machine.layout.lanes, np.uint32)
        d.machine.on_start.append(self._clear)
        d.machine.on_exit.append(self._retry)
        d.machine.waiting.append(self._who)

    def _clear(self) -> None:
        self.parked[:] = False

    def _who(self) -> list[tuple[Instruction, np.ndarray]]:
        lanes = np.flatnonzero(self.parked)
        return [(self.ins, lanes)] if lanes.size else []

    def arrive(self, lanes: np.ndarray, members: np.ndarray) -> np.ndarray:
        """More lanes arrive; returns those that may go on, having acted."""
        self.parked |= lanes
        np.copyto(self.members, members, where=lanes)
        present = ballot(self.parked | ~self.d.machine.alive)
        ready = self.parked & ((self.members & ~present) == 0)
        if ready.any():
            self.parked &= ~ready
            self.act(Group(ready, self.d.machine.alive_count))
        return ready

    def _retry(self) -> None:
        """Lanes have ended: they no longer have to come."""
        if self.parked.any():
            none = np.zeros_like(self.parked)
            ready = self.arrive(none, self.members)
            if ready.any():
                self.d.machine.push(self.following, ready)


def converge_warp(
    d: Decoder, ins: Instruction, members: Operand | None, act: Callable[[Group], None],
    skip: int = 1,
) -> Step:  # fmt: skip
    """A control step: the named lanes of each warp converge, `act`, and go on `skip` further."""
    act = d.notify(ins, act)
    following = ins.pc + skip
    convergence: _Convergence | None = None  # made when a warp first comes in parts: few ever do
    mask = np.array([ALL], np.uint32) if members is None else d.src(members, "u32")
    simple = mask.size == 1 and int(mask[0]) == ALL and ins.guard is None

    def run(group: Group) -> int | None:
        nonlocal convergence
        if simple and (group.full or _whole_warps(group, d)):
            act(group)
            return following
        lanes = guard_mask(d, ins, group)
        if d.machine.checked:
            _check_member(d, ins, lanes, mask)
        if convergence is None:
            convergence = _Convergence(d, ins, act, following)
        ready = convergence.arrive(lanes, mask)
        unguarded = group.mask & ~lanes
        if unguarded.any():
            d.machine.push(ins.pc + 1, unguarded)
        if ready.any():
            d.machine.push(following, ready)
        return None

    return run


def _whole_warps(group: Group, d: Decoder) -> bool:
    """Whether every warp of the group is there with all its living lanes."""
    if group.write is None:
        return True
    here = group.mask.reshape(-1, WARP)
    missing = (~here & d.machine.alive.reshape(-1, WARP)).any(1)
    return not (missing & here.any(1)).any()


def _check_member(d: Decoder, ins: Instruction, lanes: np.ndarray, mask: np.ndarray) -> None:
    own = (mask >> (np.arange(lanes.size) % WARP).astype(np.uint32)) & np.uint32(1)
    bad = np.flatnonzero(lanes & (own == 0))
    if bad.size:
        named = int(np.broadcast_to(mask, lanes.shape)[bad[0]])
        detail = f"the member mask {named:#010x} does not name the executing lane"
        raise d.machine.reporter.fault("bad member mask", detail, ins, bad)


def whole_warps(d: Decoder, ins: Instruction, group: Group) -> np.ndarray | None:
    """Numbers of the group's warps, None for all; every one must be complete."""
    if group.full:
        return None
    here = group.mask.reshape(-1, WARP)
    some, every = here.any(1), here.all(1)
    if (some & ~every).any():
        lanes = np.flatnonzero(group.mask & np.repeat(~every, WARP))
        raise d.machine.reporter.fault(
            "incomplete warp", "a warp-wide instruction without all 32 threads", ins, lanes
        )
    return np.flatnonzero(some)


def converge_aligned(
    d: Decoder, ins: Instruction, act: Callable[[Group], None], skip: int = 1
) -> Step:
    """The control step of an `.aligned` instruction: a guard has to agree within a warp."""
    step = converge_warp(d, ins, None, act, skip)
    if ins.guard is None:
        return step

    def run(group: Group) -> int | None:
        held = guard_mask(d, ins, group).reshape(-1, WARP)
        here = group.mask.reshape(-1, WARP)
        split = (held != here).any(1) & held.any(1)
        if split.any():
            detail = "the guard of an instruction for whole warps differs between threads"
            lanes = np.flatnonzero(held & split[:, None])
            raise d.machine.reporter.fault("incomplete warp", detail, ins, lanes)
        return step(group)

    return run
