"""What a function's text says of its registers and of its straight-line runs."""

from __future__ import annotations

from functools import lru_cache

from fkjit.interp.core.ptx import SIZE, Float, Function, Imm, Mem, Operand, Reg, reads_and_writes
from fkjit.interp.machine.opcodes import is_control


@lru_cache(maxsize=64)
def segment_starts(function: Function) -> set[int]:
    """Where straight-line runs begin: labels, and before and after control instructions."""
    starts = set(function.labels.values()) | {0}
    for ins in function.instructions:
        if is_control(ins):
            starts |= {ins.pc, ins.pc + 1}
    return starts


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
