"""Decoding: every instruction becomes, once a launch, a closure over register arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from fkjit.errors import InterpreterError
from fkjit.interp.core.lanes import Group
from fkjit.interp.core.ptx import DTYPE, Imm, Instruction, Operand, Reg, Vec, reads_and_writes
from fkjit.interp.core.report import unsupported
from fkjit.interp.machine.flow import constant_registers, private_registers, watched_registers
from fkjit.interp.machine.machine import Machine
from fkjit.interp.machine.opcodes import (
    CONTROL,
    INTERCEPTORS,
    OPCODES,
    REFUSALS,
    Builder,
    Compute,
    Step,
)
from fkjit.interp.spaces.registers import constant

T = TypeVar("T")


class Decoder:
    """What decoders build steps from: typed operands and the masked writing of results."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.function = function = machine.function
        self.registers = machine.registers
        self.private = private_registers(function)
        self.constants = constant_registers(function)
        self._parts: dict[Any, Any] = {}
        self.bases: dict[tuple[str, str], Any] = {}  # address registers, see `locate.Base`
        self.watchers: dict[str, list[Callable[[], None]]] = {}  # by register, see `notify`
        self.watched = watched_registers(function)
        self._scratch: dict[tuple[np.dtype, str], np.ndarray] = {}

    def decode(self, ins: Instruction) -> Step:
        """The step of a plain instruction; raises InterpreterError for an unknown one."""
        step = self._built(OPCODES, ins)
        step = self.notify(ins, self._guarded(ins, step) if ins.guard else step)
        return self._intercepted(ins, step)

    def decode_control(self, ins: Instruction) -> Step:
        """The step of an instruction that steers lanes; its guard is its decoder's affair."""
        return self._intercepted(ins, self._built(CONTROL, ins))

    def _built(self, table: dict[str, Builder], ins: Instruction) -> Step:
        build = table.get(ins.op[0])
        if build is None:
            raise unsupported(ins)
        try:
            return build(self, ins)
        except InterpreterError as error:
            if "\n" in str(error):
                raise
            raise unsupported(ins, str(error).removeprefix("interpreter: ")) from error
        except REFUSALS as error:
            raise unsupported(ins, f"{type(error).__name__}: {error}") from error

    def _intercepted(self, ins: Instruction, step: Step) -> Step:
        """The step with whatever others put around it."""
        for wrap in INTERCEPTORS:
            step = wrap(self, ins, step)
        return step

    def notify(self, ins: Instruction, step: Step) -> Step:
        """A step that afterwards calls the watchers of the registers that it writes."""
        _, writes = reads_and_writes(ins)
        if self.watched.isdisjoint(writes):
            return step
        calls = [self.watchers.setdefault(name, []) for name in self.watched.intersection(writes)]

        def run(group: Group) -> Any:
            result = step(group)
            for watchers in calls:
                for watcher in watchers:
                    watcher()
            return result

        return run

    def _guarded(self, ins: Instruction, step: Step) -> Step:
        assert ins.guard is not None
        name, negated = ins.guard
        predicate = self.registers.view(name, DTYPE["pred"])

        def run(group: Group) -> None:
            inner = group.guarded(~predicate if negated else predicate)
            if inner is not None:
                step(inner)

        return run

    def part(self, kind: Callable[[Decoder], T]) -> T:
        """The one object of a class that several instructions share, made from the decoder."""
        if kind not in self._parts:
            self._parts[kind] = kind(self)
        return self._parts[kind]

    def src(self, operand: Operand, kind: str) -> np.ndarray:
        """An operand's values: one a lane, or a single element for a constant."""
        if not isinstance(operand, Reg):
            return self.registers.read(operand, kind, self.machine.address)
        if operand.name in self.constants:
            return constant(self.constants[operand.name], DTYPE[kind])
        return self.registers.typed(operand.name, kind)

    def dst(self, operand: Operand, kind: str | None) -> np.ndarray:
        """The lanes of a destination register; kind None: in the register's own width."""
        if not isinstance(operand, Reg):
            raise ValueError(f"{operand} is no destination")
        if operand.sink:
            return self.scratch(DTYPE[kind or "b32"], "sink")
        if kind is None:
            return self.registers.raw(operand.name)
        return self.registers.typed(operand.name, kind)

    def scratch(self, dtype: Any, name: str) -> np.ndarray:
        """An array of one element a lane for use inside one step."""
        key = (np.dtype(dtype), name)
        if key not in self._scratch:
            self._scratch[key] = np.empty(self.machine.layout.lanes, key[0])
        return self._scratch[key]

    def scratch_of(self, size: int, dtype: Any, name: str) -> np.ndarray:
        """A shared array of a size of its own, for use inside one step."""
        key = (np.dtype(dtype), name)
        if key not in self._scratch:
            self._scratch[key] = np.empty(size, key[0])
        return self._scratch[key]

    def immediate(self, operand: Operand) -> int:
        """The value of an operand that has to be a literal."""
        if not isinstance(operand, Imm):
            raise ValueError(f"{operand} is no literal")
        return operand.value

    def items(self, operand: Operand) -> tuple[Operand, ...]:
        """The parts of a vector operand; a plain operand is its only part."""
        return operand.items if isinstance(operand, Vec) else (operand,)

    def step(self, ins: Instruction, target: Operand, kind: str | None, compute: Compute) -> Step:
        """`compute(out)` into the destination, for the lanes of the group only."""
        out = self.dst(target, kind)
        if isinstance(target, Reg) and not ins.guard and target.name in self.private:
            return lambda group: compute(out)
        spare = self.scratch(out.dtype, "result")

        def run(group: Group) -> None:
            if group.write is None:
                compute(out)
            else:
                compute(spare)
                np.copyto(out, spare, where=group.write)

        return run

    def unary(self, ins: Instruction, kind: str, function: Any) -> Step:
        """A ufunc of one operand."""
        a = self.src(ins.args[1], kind)
        return self.step(ins, ins.args[0], kind, lambda out: function(a, out))

    def binary(self, ins: Instruction, kind: str, function: Any) -> Step:
        """A ufunc of two operands of the destination's type."""
        a, b = self.src(ins.args[1], kind), self.src(ins.args[2], kind)
        return self.step(ins, ins.args[0], kind, lambda out: function(a, b, out=out))
