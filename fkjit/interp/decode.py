"""Decoding: every instruction becomes, once a launch, a closure over register arrays.

An opcode's file registers its decoder with `@opcode("add", "sub")`. A decoder returns a `Step`,
called with the group of lanes that execute it. Control and warp-wide instructions register with
`@control(...)`: their steps decide where the lanes go next (see `machine`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from fkjit.errors import InterpreterError
from fkjit.interp import report
from fkjit.interp.lanes import Group
from fkjit.interp.ptx import (
    DTYPE,
    SIZE,
    Float,
    Function,
    Imm,
    Instruction,
    Mem,
    Operand,
    Reg,
    Vec,
    reads_and_writes,
)
from fkjit.interp.registers import constant

if TYPE_CHECKING:
    from fkjit.interp.machine import Machine

T = TypeVar("T")
Step = Callable[[Group], Any]
Compute = Callable[[np.ndarray], Any]  # fills its argument, writing it last: inputs may alias it

# What a decoder raises at operands or modifiers that it does not know.
REFUSALS = (
    IndexError, KeyError, ValueError, AttributeError, TypeError, AssertionError, StopIteration,
)  # fmt: skip

OPCODES: dict[str, Callable[[Decoder, Instruction], Step]] = {}
CONTROL: dict[str, Callable[[Decoder, Instruction], Step]] = {}
INTERCEPTORS: list[Callable[[Decoder, Instruction, Step], Step]] = []


def opcode(*names: str) -> Callable[[Any], Any]:
    """Register the decoder of plain instructions."""

    def add(function: Any) -> Any:
        for name in names:
            OPCODES[name] = function
        return function

    return add


def control(*names: str) -> Callable[[Any], Any]:
    """Register the decoder of instructions that steer lanes (see `Machine.run_group`)."""

    def add(function: Any) -> Any:
        for name in names:
            CONTROL[name] = function
        return function

    return add


def intercept(function: Any) -> Any:
    """Register a function that may put a step around that of any instruction."""
    INTERCEPTORS.append(function)
    return function


def unsupported(ins: Instruction, why: str = "") -> InterpreterError:
    """The error of an instruction or a modifier that is not implemented."""
    reason = f" ({why})" if why else ""
    return InterpreterError(
        f"interpreter: this PTX instruction is not supported{reason}: {ins.text}\n"
        f"    at {report.where(ins)}"
    )


class Decoder:
    """What decoders build steps from: typed operands and the masked writing of results."""

    def __init__(self, machine: Machine, function: Function) -> None:
        self.machine = machine
        self.function = function
        self.registers = machine.registers
        self.private = private_registers(function)
        self.constants = constant_registers(function)
        self._parts: dict[Any, Any] = {}
        self.bases: dict[tuple[str, str], Any] = {}  # address registers, see `loadstore.Base`
        self.watchers: dict[str, list[Callable[[], None]]] = {}  # by register, see `notify`
        self.watched = watched_registers(function)
        self._scratch: dict[tuple[np.dtype, str], np.ndarray] = {}

    def decode(self, ins: Instruction) -> Step:
        """The step of a plain instruction; raises InterpreterError for an unknown one."""
        build = OPCODES.get(ins.op[0])
        if build is None:
            raise unsupported(ins)
        try:
            step = build(self, ins)
        except InterpreterError as error:
            if "\n" in str(error):
                raise
            raise unsupported(ins, str(error).removeprefix("interpreter: ")) from error
        except REFUSALS as error:
            raise unsupported(ins, f"{type(error).__name__}: {error}") from error
        step = self.notify(ins, self._guarded(ins, step) if ins.guard else step)
        return self.intercepted(ins, step)

    def intercepted(self, ins: Instruction, step: Step) -> Step:
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


def only(ins: Instruction, allowed: Collection[str]) -> None:
    """Refuse an instruction with a modifier that its decoder does not know."""
    for part in ins.op[1:]:
        if part not in allowed:
            raise ValueError(f"modifier .{part}")


@lru_cache(maxsize=64)
def segment_starts(function: Function) -> set[int]:
    """Where straight-line runs begin: labels, and before and after control instructions."""
    starts = set(function.labels.values()) | {0}
    for ins in function.instructions:
        if is_control(ins):
            starts |= {ins.pc, ins.pc + 1}
    return starts


def is_control(ins: Instruction) -> bool:
    """Whether lanes may part, meet or wait at this instruction."""
    return ins.op[0] in CONTROL


@lru_cache(maxsize=64)
def private_registers(function: Function) -> set[str]:
    """Registers that live within one straight-line run, so that nobody minds what other lanes hold.

    All uses stand in one run, and the first is a definition without a guard.
    """
    starts = segment_starts(function)
    home: dict[str, int] = {}
    shared: set[str] = set()
    run = -1
    for ins in function.instructions:
        if ins.pc in starts:
            run = ins.pc
        reads, writes = reads_and_writes(ins)
        for name in reads:
            if home.get(name) != run:
                shared.add(name)
        for name in writes:
            if ins.guard or is_control(ins) or home.setdefault(name, run) != run:
                shared.add(name)
    return set(home) - shared


@lru_cache(maxsize=64)
def constant_registers(function: Function) -> dict[str, int]:
    """Registers whose only definition is a mov of a literal, and the literal's bits.

    NVRTC passes the operands of shuffles, masks above all, in such registers.
    """
    writes: dict[str, int] = {}
    found: dict[str, int] = {}
    for ins in function.instructions:
        for name in reads_and_writes(ins)[1]:
            writes[name] = writes.get(name, 0) + 1
        if ins.op[0] == "mov" and ins.guard is None and isinstance(ins.args[0], Reg):
            bits = _literal_bits(ins.args[1], ins.type)
            if bits is not None:
                found[ins.args[0].name] = bits
    return {name: bits for name, bits in found.items() if writes[name] == 1}


def _literal_bits(operand: Operand, kind: str) -> int | None:
    if isinstance(operand, Float) and operand.width == SIZE[kind]:
        return operand.bits
    if isinstance(operand, Imm) and kind[0] in "bus" and kind != "pred":
        return operand.value
    return None


@lru_cache(maxsize=64)
def watched_registers(function: Function) -> frozenset[str]:
    """Registers whose writing somebody may want to know: addresses and operands of mma."""
    found: set[str] = set()
    for ins in function.instructions:
        for arg in ins.args:
            if isinstance(arg, Mem) and isinstance(arg.base, Reg):
                found.add(arg.base.name)
        if ins.op[0] == "mma":
            found.update(reads_and_writes(ins)[0])
    return frozenset(found)
