"""The machine: batches of blocks, groups of lanes, and who runs next.

All lanes of a group stand at one instruction. The group with the lowest program counter runs until
it parts, waits, or another group is behind it; so structured code meets again where it should.
Barriers and warp-wide instructions park lanes until all that are named have come.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fkjit.errors import InterpreterError
from fkjit.interp.arena import GlobalMemory
from fkjit.interp.banks import Banks
from fkjit.interp.checks import Checks
from fkjit.interp.decode import (
    CONTROL,
    REFUSALS,
    Decoder,
    Step,
    is_control,
    segment_starts,
    unsupported,
)
from fkjit.interp.lanes import Group, Layout
from fkjit.interp.ptx import Function, Instruction
from fkjit.interp.race import Race
from fkjit.interp.registers import Registers
from fkjit.interp.report import Reporter, Waiting
from fkjit.interp.shared import LocalMemory, SharedMemory
from fkjit.interp.undefined import Undefined

SPIN_LIMIT = 2000  # backward branches in a row before another group gets its turn
STEP_LIMIT = 20_000_000  # straight-line runs of one batch: more is an endless loop


# (kind, shared?, positions, bytes of each, lanes, instruction): threads access memory. `kind` is
# READ, WRITE or ATOMIC of `race`; positions are those of SharedMemory or of the arena.
Observer = Callable[[str, bool, np.ndarray, int, np.ndarray, Instruction], None]


@dataclass
class Memory:
    """The state spaces of a launch."""

    globals: GlobalMemory
    shared: SharedMemory
    local: LocalMemory
    symbols: dict[str, int]  # generic address or offset of every variable and parameter


class Machine:
    """One kernel, decoded for one launch."""

    def __init__(
        self, function: Function, layout: Layout, memory: Memory, reporter: Reporter, checks: Checks
    ) -> None:
        self.function, self.layout, self.memory = function, layout, memory
        self.reporter, self.checks, self.checked = reporter, checks, checks.mem
        self.race: Race | None = None
        self.observers: list[Observer] = []  # told of every access by threads; before decoding
        self.banks = Banks() if checks.banks else None
        if self.banks is not None:
            self.observers.append(self.banks.see)
        self.registers = Registers(function.registers, layout)
        self.listeners: list[Callable[[], None]] = []  # called when a batch starts
        self.on_exit: list[Callable[[], None]] = []  # called when lanes have ended
        self.waiting: list[Callable[[], Sequence[Waiting]]] = []
        self.engines: list[
            Callable[[], bool]
        ] = []  # act when no lane can run; False: nothing to do
        self.retries: list[Callable[[], bool]] = []  # asked to free lanes when no engine can act
        self.spun: int | None = None  # where a group has gone round in circles for long
        self.alive = np.zeros(layout.lanes, bool)
        self.alive_count = 0
        self.groups: dict[int, np.ndarray] = {}
        self.executed = 0
        self.limit = STEP_LIMIT
        if checks.race:
            self.race = Race(self, function)
        self.decoder = Decoder(self, function)
        self._decode()

    def address(self, name: str) -> int:
        """The address of a variable or parameter."""
        if name not in self.memory.symbols:
            raise InterpreterError(f"interpreter: the PTX symbol {name!r} is not defined")
        return self.memory.symbols[name]

    def _decode(self) -> None:
        """Turn the function into runs of steps and control steps, by program counter."""
        code: list[Step | None] = []
        undefined = Undefined(self.decoder)
        self.control: dict[int, Step] = {}
        for ins in self.function.instructions:
            if is_control(ins):
                try:
                    step = CONTROL[ins.op[0]](self.decoder, ins)
                    self.control[ins.pc] = self.decoder.intercepted(ins, step)
                except REFUSALS as error:
                    raise unsupported(ins, f"{type(error).__name__}: {error}") from error
                self.control[ins.pc] = undefined.watch(ins, step)
                code.append(None)
            else:
                code.append(undefined.watch(ins, self.decoder.decode(ins)))
        self.runs: dict[int, tuple[tuple[Step, ...], int]] = {}
        ends = sorted(segment_starts(self.function) | {len(code)})
        for start, end in itertools.pairwise(ends):
            if start not in self.control:
                self.runs[start] = (tuple(s for s in code[start:end] if s is not None), end)

    # -- running -------------------------------------------------------------------------------

    def run_batch(self, first_cta: int) -> None:
        """Run the blocks from `first_cta` to their end; raises SanitizerError at a fault."""
        self.layout.first_cta = first_cta
        self.registers.start_batch()
        self.memory.shared.start_batch()
        self.memory.local.start_batch()
        self.alive = self.layout.live()
        self.alive_count = int(np.count_nonzero(self.alive))
        for listener in self.listeners:
            listener()
        self.groups = {0: self.alive.copy()}
        self.limit = self.executed + STEP_LIMIT
        turn = 0
        while self.groups or self._engines_act() or any(retry() for retry in self.retries):
            if self.spun is not None and self.groups:
                self.run_group(self._after(self.spun), patient=False)
            elif self.groups:
                turn += 1
                pick = max if turn % SPIN_LIMIT == 0 else min
                self.run_group(pick(self.groups))
        if self.alive_count:
            self.deadlock()

    def _engines_act(self) -> bool:
        """Let an asynchronous engine do a piece of its work; False if none has any."""
        return any(engine() for engine in self.engines)

    def _after(self, pc: int) -> int:
        """The group after a spinning one, so that none is starved by it."""
        self.spun = None
        return min((other for other in self.groups if other > pc), default=min(self.groups))

    def run_group(self, pc: int, patient: bool = True) -> None:
        """Run the group at `pc` until it dissolves or, if `patient`, another is behind it.

        A control step returns the next program counter when the whole group goes on together, or
        None when it has pushed or parked the lanes itself.
        """
        group = Group(self.groups.pop(pc), self.alive_count)
        control, runs, groups = self.control, self.runs, self.groups
        backward = 0
        while True:
            if pc in control:
                following = control[pc](group)
                if following is None:
                    return
                backward += following <= pc
                pc = following
            else:
                steps, pc = runs[pc]
                for step in steps:
                    step(group)
            self.executed += 1
            if self.executed > self.limit:
                self._endless()
            if groups:
                if pc in groups:
                    group = Group(group.mask | groups.pop(pc), self.alive_count)
                if groups and ((patient and min(groups) < pc) or backward > SPIN_LIMIT):
                    self.push(pc, group.mask)
                    if backward > SPIN_LIMIT:
                        self.spun = pc
                        self._engines_act()
                    return
            elif backward > SPIN_LIMIT:
                self._engines_act()
                backward = 0

    def _endless(self) -> None:
        raise InterpreterError(
            f"{self.reporter.title}: the kernel does not end ({STEP_LIMIT:,} runs of instructions "
            "in one batch of blocks): an endless loop, or blocks that wait for other blocks"
        )

    def push(self, pc: int, mask: np.ndarray) -> None:
        """Lanes to go on at `pc`."""
        self.groups[pc] = self.groups[pc] | mask if pc in self.groups else mask

    def target(self, label: str) -> int:
        """The program counter of a label."""
        if label not in self.function.labels:
            raise ValueError(f"label {label} is not defined")
        return self.function.labels[label]

    def end_lanes(self, mask: np.ndarray) -> None:
        """Lanes that have returned or exited."""
        self.alive &= ~mask
        self.alive_count = int(np.count_nonzero(self.alive))
        for listener in self.on_exit:
            listener()

    def deadlock(self) -> None:
        """Threads are left and none can run: report who waits where."""
        who = [entry for source in self.waiting for entry in source()]
        raise self.reporter.waiting("deadlock", "every thread that is left waits for others", who)
