"""The scheduler: a kernel decoded for one machine, and which of its lanes run next.

All lanes of a group stand at one instruction. The group with the lowest program counter runs until
it parts, waits, or another group is behind it; so structured code meets again where it should.
Barriers and warp-wide instructions park lanes until all that are named have come.
"""

from __future__ import annotations

import itertools

from fkjit.errors import InterpreterError
from fkjit.interp import opcode_files  # noqa: F401  (decoders register themselves)
from fkjit.interp.core.lanes import Group
from fkjit.interp.core.ptx import Sym
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.machine.flow import segment_starts
from fkjit.interp.machine.machine import Machine
from fkjit.interp.machine.opcodes import Step, is_control
from fkjit.interp.machine.undefined import Undefined
from fkjit.interp.race.finder import race_of
from fkjit.interp.spaces.banks import Banks

SPIN_LIMIT = 2000  # backward branches in a row before another group gets its turn
POLLS = 4  # the same of a short loop that reads what other threads write: it is time for them
_SHORT = 256  # instructions
STEP_LIMIT = 20_000_000  # straight-line runs of one batch: more is an endless loop


class Scheduler:
    """One kernel, decoded for one launch, whose batches it runs."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.banks = Banks() if machine.checks.banks else None
        if self.banks is not None:
            machine.observers.append(self.banks.see)
        self.spun: int | None = None  # where a group has gone round in circles for long
        self.limit = STEP_LIMIT
        self._decoder = decoder = Decoder(machine)
        self.race = race_of(decoder)
        self._decode(decoder)

    def _decode(self, decoder: Decoder) -> None:
        """Turn the function into runs of steps and control steps, by program counter."""
        function, undefined = self.machine.function, Undefined(decoder)
        self.weights = _weights(self.machine)
        code: list[Step] = []
        self.control: dict[int, Step] = {}
        for ins in function.instructions:
            decode = decoder.decode_control if is_control(ins) else decoder.decode
            code.append(undefined.watch(ins, decode(ins)))
            if is_control(ins):
                self.control[ins.pc] = code[-1]
        self.runs: dict[int, tuple[tuple[Step, ...], int]] = {}
        ends = sorted(segment_starts(function) | {len(code)})
        for start, end in itertools.pairwise(ends):
            if start not in self.control:
                self.runs[start] = (tuple(code[start:end]), end)

    def release(self) -> None:
        """Give the memory back: nothing runs this any more.

        Steps, callbacks and the machine refer to each other in circles. The garbage collector
        counts objects, not the arrays of registers and shadows that these hold, and comes late.
        """
        for hub in (self.machine, self._decoder):
            vars(hub).clear()
        self.runs.clear()
        self.control.clear()

    def run_batch(self, first_cta: int) -> None:
        """Run the blocks from `first_cta` to their end; raises SanitizerError at a fault."""
        machine = self.machine
        machine.start_batch(first_cta)
        self.limit = machine.executed + STEP_LIMIT
        turn = 0
        while machine.groups or self._engines_act() or any(retry() for retry in machine.retries):
            if self.spun is not None and machine.groups:
                self._run_group(self._after(self.spun), patient=False)
            elif machine.groups:
                turn += 1
                pick = max if turn % SPIN_LIMIT == 0 else min
                self._run_group(pick(machine.groups))
        if machine.alive_count:
            machine.deadlock()

    def _engines_act(self) -> bool:
        """Let an asynchronous engine do a part of its work; False if none has any."""
        return any(engine() for engine in self.machine.engines)

    def _after(self, pc: int) -> int:
        """The group after a spinning one, so that none is starved by it."""
        self.spun = None
        groups = self.machine.groups
        return min((other for other in groups if other > pc), default=min(groups))

    def _run_group(self, pc: int, patient: bool = True) -> None:
        """Run the group at `pc` until it dissolves or, if `patient`, another is behind it.

        A control step returns the next program counter when the whole group goes on together, or
        None when it has pushed or parked the lanes itself.
        """
        machine, groups = self.machine, self.machine.groups
        group = Group(groups.pop(pc), machine.alive_count)
        control, runs = self.control, self.runs
        backward = 0
        while True:
            if pc in control:
                following = control[pc](group)
                if following is None:
                    return
                if following <= pc:
                    backward += self.weights.get(pc, 1)
                pc = following
            else:
                steps, pc = runs[pc]
                for step in steps:
                    step(group)
            machine.executed += 1
            if machine.executed > self.limit:
                self._endless()
            if groups:
                if pc in groups:
                    group = Group(group.mask | groups.pop(pc), machine.alive_count)
                if groups and ((patient and min(groups) < pc) or backward > SPIN_LIMIT):
                    machine.push(pc, group.mask)
                    if backward > SPIN_LIMIT:
                        self.spun = pc
                        self._engines_act()
                    return
            elif backward > SPIN_LIMIT:
                self._engines_act()
                backward = 0

    def _endless(self) -> None:
        raise InterpreterError(
            f"{self.machine.reporter.title}: the kernel does not end ({STEP_LIMIT:,} runs of "
            "instructions in one batch of blocks): an endless loop, or blocks that wait for other "
            "blocks"
        )


def _weights(machine: Machine) -> dict[int, int]:
    """Of branches back that close a loop in which a thread waits for others' numbers: for how many
    branches each counts."""
    instructions = machine.function.instructions
    reads = [
        ins.pc for ins in instructions
        if ins.op[0] == "ld" and {"relaxed", "acquire", "volatile"} & set(ins.op[1:])
    ]  # fmt: skip
    found = {}
    for ins in instructions:
        if ins.op[0] == "bra" and isinstance(ins.args[0], Sym):
            first = machine.target(ins.args[0].name)
            if first <= ins.pc < first + _SHORT and any(first <= pc < ins.pc for pc in reads):
                found[ins.pc] = SPIN_LIMIT // POLLS
    return found
