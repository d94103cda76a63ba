"""The machine as its instructions see it: memories, registers, who lives, where lanes stand.

Instructions move lanes with `push` and `end_lanes`; whatever waits, watches or works on its own
(barriers, checkers, engines of copies) hangs itself into one of the lists of callbacks. Who runs
next is the scheduler's affair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fkjit.errors import InterpreterError
from fkjit.interp.core.accesses import EngineObserver, Observer
from fkjit.interp.core.checks import Checks
from fkjit.interp.core.lanes import Layout
from fkjit.interp.core.ptx import Function
from fkjit.interp.core.report import Reporter, Waiting
from fkjit.interp.spaces.arena import GlobalMemory
from fkjit.interp.spaces.local import LocalMemory
from fkjit.interp.spaces.registers import Registers
from fkjit.interp.spaces.shared import SharedMemory


@dataclass
class Memory:
    """The state spaces of a launch."""

    globals: GlobalMemory
    shared: SharedMemory
    local: LocalMemory
    symbols: dict[str, int]  # generic address or offset of every variable and parameter


class Machine:
    """The state of one kernel's launch: batches of blocks run on it one after another."""

    def __init__(
        self, function: Function, layout: Layout, memory: Memory, reporter: Reporter, checks: Checks
    ) -> None:
        self.function, self.layout, self.memory = function, layout, memory
        self.reporter, self.checks, self.checked = reporter, checks, checks.mem
        self.registers = Registers(function.registers, layout)
        self.alive = np.zeros(layout.lanes, bool)
        self.alive_count = 0
        self.groups: dict[int, np.ndarray] = {}  # lanes that can run, by program counter
        self.executed = 0  # straight-line runs and control instructions
        self.observers: list[Observer] = []  # told of every access by threads; before decoding
        self.engine_observers: list[EngineObserver] = []
        self.on_start: list[Callable[[], None]] = []  # called when a batch starts
        self.on_exit: list[Callable[[], None]] = []  # called when lanes have ended
        self.waiting: list[Callable[[], Sequence[Waiting]]] = []  # who waits, for reports
        # Act when no lane can run; False: there is nothing to do.
        self.engines: list[Callable[[], bool]] = []
        self.retries: list[Callable[[], bool]] = []  # asked to free lanes when no engine can act

    @property
    def nbytes(self) -> int:
        """What registers and memories of blocks and threads take: most of a decoded kernel."""
        shared, local = self.memory.shared, self.memory.local
        return self.registers.nbytes + shared.raw.nbytes + shared.init.nbytes + local.raw.nbytes

    def start_batch(self, first_cta: int) -> None:
        """The blocks from `first_cta` on stand at the first instruction."""
        self.layout.first_cta = first_cta
        self.registers.start_batch()
        self.memory.shared.start_batch()
        self.memory.local.start_batch()
        self.alive = self.layout.live()
        self.alive_count = int(np.count_nonzero(self.alive))
        for listener in self.on_start:
            listener()
        self.groups = {0: self.alive.copy()}

    def address(self, name: str) -> int:
        """The address of a variable or parameter."""
        if name not in self.memory.symbols:
            raise InterpreterError(f"interpreter: the PTX symbol {name!r} is not defined")
        return self.memory.symbols[name]

    def target(self, label: str) -> int:
        """The program counter of a label."""
        if label not in self.function.labels:
            raise ValueError(f"label {label} is not defined")
        return self.function.labels[label]

    def push(self, pc: int, mask: np.ndarray) -> None:
        """Lanes to go on at `pc`."""
        self.groups[pc] = self.groups[pc] | mask if pc in self.groups else mask

    def end_lanes(self, mask: np.ndarray) -> None:
        """Lanes that have returned or exited."""
        self.alive &= ~mask
        self.alive_count = int(np.count_nonzero(self.alive))
        for listener in self.on_exit:
            listener()

    def deadlock(self) -> None:
        """Threads are left and none can run: report who waits where."""
        who = [entry for source in self.waiting for entry in source()]
        who.sort(key=lambda entry: entry[0].pc)
        raise self.reporter.waiting("deadlock", "every thread that is left waits for others", who)
