"""Warpgroups: 128 threads of a block that execute an instruction together."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fkjit.interp.core.lanes import Group
from fkjit.interp.core.ptx import Instruction
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.machine.guards import guard_mask
from fkjit.interp.machine.opcodes import Step

WARPGROUP = 128


class Warpgroups:
    """All complete warpgroups of the batch, numbered block by block."""

    def __init__(self, d: Decoder) -> None:
        self.machine, layout = d.machine, d.machine.layout
        self.per_block = layout.padded // WARPGROUP
        self.count = layout.ctas * self.per_block
        self._blocks = (layout.ctas, layout.padded)
        places = -(-layout.padded // WARPGROUP)  # with the incomplete last one of each block
        self._place = layout.cta * places + layout.thread // WARPGROUP
        self.lanes = self.all(np.arange(layout.lanes)).reshape(self.count, WARPGROUP).copy()
        self.convergences: list[_Convergence] = []
        self._group: Group | None = None  # the last one looked at, and what was found
        self._found = np.zeros(0, np.int64)

    def all(self, register: np.ndarray) -> np.ndarray:
        """A register (one element a lane) as a view [blocks, warpgroups of a block, 128]."""
        blocks, used = self._blocks, self.per_block * WARPGROUP
        return register.reshape(blocks)[:, :used].reshape(blocks[0], self.per_block, WARPGROUP)

    def pick(self, register: np.ndarray, which: np.ndarray) -> np.ndarray:
        """The lanes of warpgroups `which`: [which, 128]; a constant is repeated."""
        if register.size == 1:
            return np.broadcast_to(register, (which.size, WARPGROUP))
        if which.size == self.count:
            return self.all(register).reshape(self.count, WARPGROUP)
        return self.all(register)[which // self.per_block, which % self.per_block]

    def put(self, register: np.ndarray, which: np.ndarray, values: np.ndarray) -> None:
        """Store [which, 128] into a register."""
        if which.size == self.count:
            view = self.all(register)
            view[...] = values.reshape(view.shape)
        else:
            self.all(register)[which // self.per_block, which % self.per_block] = values

    def mask(self, which: np.ndarray) -> np.ndarray:
        """The lanes of warpgroups as a mask."""
        mask = np.zeros(self.machine.layout.lanes, bool)
        mask[self.lanes[which]] = True
        return mask

    def whole(self, group: Group, ins: Instruction) -> np.ndarray:
        """The numbers of the group's warpgroups, ascending; each has to be complete."""
        if group is self._group:
            return self._found
        here = self.all(group.mask).reshape(self.count, WARPGROUP)
        which = np.flatnonzero(here.all(1))
        if which.size * WARPGROUP != group.lanes.size:
            lanes = np.flatnonzero(group.mask & ~self.mask(which))
            raise self.machine.reporter.fault(
                "incomplete warpgroup",
                "a warpgroup-wide instruction without all 128 threads of an aligned warpgroup",
                ins, lanes,
            )  # fmt: skip
        self._group, self._found = group, which
        return which

    def complete(self, lanes: np.ndarray) -> np.ndarray:
        """Those of `lanes` (a mask) whose warpgroup has no living lane outside of it."""
        missing = self.machine.alive & ~lanes
        if not missing.any():
            return lanes
        late = np.zeros(int(self._place[-1]) + 1, bool)
        late[self._place[missing]] = True
        return lanes & ~late[self._place]

    def check_together(self, convergence: _Convergence) -> None:
        """Threads of one warpgroup may not wait at different instructions."""
        theirs = np.zeros(int(self._place[-1]) + 1, bool)
        theirs[self._place[convergence.parked]] = True
        for other in self.convergences:
            split = other.parked & theirs[self._place]
            if other is not convergence and split.any():
                who = [(one.ins, np.flatnonzero(one.parked)) for one in (convergence, other)]
                raise self.machine.reporter.waiting(
                    "incomplete warpgroup",
                    "threads of one warpgroup wait at different instructions",
                    who,
                )

    def all_there(self, group: Group) -> bool:
        """Whether no living lane of the group's warpgroups is elsewhere."""
        complete = self.complete(group.mask)
        return complete is group.mask or bool((complete == group.mask).all())


class _Convergence:
    """Lanes wait here until their warpgroup is there, or what is left of it."""

    def __init__(self, d: Decoder, ins: Instruction, act: Callable[[Group], None]) -> None:
        self.machine, self.ins, self.act = d.machine, ins, act
        self.warpgroups = d.part(Warpgroups)
        self.parked = np.zeros(d.machine.layout.lanes, bool)
        self.warpgroups.convergences.append(self)
        d.machine.on_start.append(self._clear)
        d.machine.on_exit.append(self._retry)
        d.machine.waiting.append(self._who)

    def _clear(self) -> None:
        self.parked[:] = False

    def _who(self) -> list[tuple[Instruction, np.ndarray]]:
        lanes = np.flatnonzero(self.parked)
        return [(self.ins, lanes)] if lanes.size else []

    def arrive(self, lanes: np.ndarray) -> None:
        """More lanes arrive; those of complete warpgroups act and go on."""
        self.parked |= lanes
        ready = self.warpgroups.complete(self.parked)
        if ready.any():
            self.parked = self.parked & ~ready
            self.act(Group(ready, self.machine.alive_count))
            self.machine.push(self.ins.pc + 1, ready)
        if self.parked.any():
            self.warpgroups.check_together(self)

    def _retry(self) -> None:
        if self.parked.any():
            self.arrive(np.zeros_like(self.parked))


def converge_warpgroup(
    d: Decoder, ins: Instruction, act: Callable[[Group, np.ndarray], None]
) -> Step:
    """A control step: the threads of each warpgroup converge, then `act(group, warpgroups)`.

    Faults where a warpgroup has fewer than 128 living threads.
    """
    warpgroups = d.part(Warpgroups)

    def together(group: Group) -> None:
        act(group, warpgroups.whole(group, ins))

    convergence = _Convergence(d, ins, together)
    last: Group | None = None  # that was seen to be complete

    def run(group: Group) -> int | None:
        nonlocal last
        if ins.guard is None and (group is last or warpgroups.all_there(group)):
            last = group
            together(group)
            return ins.pc + 1
        lanes = guard_mask(d, ins, group)
        rest = group.mask & ~lanes
        if rest.any():
            d.machine.push(ins.pc + 1, rest)
        convergence.arrive(lanes)
        return None

    return run
