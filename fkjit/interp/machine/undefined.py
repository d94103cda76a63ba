"""Reads of registers that a thread has never written.

A data-flow pass finds the registers that may be read before any write; only these, and what is
computed from them, get a flag for each lane, so other kernels pay nothing. Compilers move and
select undefined values that nobody looks at: the flag travels with the value, and a fault is its
use as an address, a value stored to memory, a predicate, or an operand of a control instruction.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, reduce

import numpy as np

from fkjit.interp.core.lanes import Group
from fkjit.interp.core.ptx import (
    DTYPE,
    NO_DESTINATION,
    Function,
    Instruction,
    Mem,
    Not,
    Operand,
    Reg,
    Sym,
    reads_and_writes,
    registers_in,
)
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.machine.flow import segment_starts
from fkjit.interp.machine.opcodes import Step, is_control

_ENDS = ("ret", "exit", "trap", "%return")


def _successors(function: Function, ins: Instruction) -> list[int]:
    following = [ins.pc + 1] if ins.pc + 1 < len(function.instructions) else []
    targets: list[int] = []
    if ins.op[0] in ("bra", "brx"):
        name = next(arg.name for arg in ins.args if isinstance(arg, Sym))
        labels = function.tables.get(name, (name,))
        targets = [function.labels[label] for label in labels if label in function.labels]
    if (targets or ins.op[0] in _ENDS) and ins.guard is None:
        return targets
    return targets + following


def _blocks(function: Function) -> dict[int, list[Instruction]]:
    """Straight-line runs by their first program counter."""
    starts, blocks, current = segment_starts(function), {}, []
    for ins in function.instructions:
        if ins.pc in starts:
            current = blocks[ins.pc] = []
        current.append(ins)
    return blocks


@lru_cache(maxsize=64)
def early_reads(function: Function) -> frozenset[str]:
    """Registers that some path through the function reads before it writes them."""
    blocks = _blocks(function)
    open_reads = {pc: _open_reads(block) for pc, block in blocks.items()}
    crossing = sorted(set().union(*(early for early, _ in open_reads.values())) - {"%frame"})
    bit = {name: 1 << at for at, name in enumerate(crossing) if name in function.registers}
    own = {pc: _bits(bit, written) for pc, (_, written) in open_reads.items()}
    known = _written_on_every_path(function, blocks, own)
    return frozenset(
        name
        for pc, (early, _) in open_reads.items()
        for name in early
        if bit.get(name, 0) & ~known.get(pc, -1)
    )


def _open_reads(block: list[Instruction]) -> tuple[set[str], set[str]]:
    """What a straight-line run reads before it has written it, and what it writes for certain."""
    early: set[str] = set()
    written: set[str] = set()
    for ins in block:
        reads, writes = reads_and_writes(ins)
        if not written.issuperset(reads):
            early.update(name for name in reads if name not in written)
        if not ins.guard:
            written.update(writes)
    return early, written


def _bits(bit: dict[str, int], names: set[str]) -> int:
    return sum(map(bit.__getitem__, bit.keys() & names))


def _written_on_every_path(
    function: Function, blocks: dict[int, list[Instruction]], own: dict[int, int]
) -> dict[int, int]:
    """By first program counter of a run that can be reached: what is written before it."""
    roots = [0, *(function.labels[frame.entry] for frame in function.frames.values())]
    known = dict.fromkeys(roots, 0)
    rest = list(roots)
    while rest:
        pc = rest.pop()
        after = known[pc] | own[pc]
        for target in _successors(function, blocks[pc][-1]):
            before = known.get(target)
            if before is None or before & after != before:
                known[target] = after if before is None else before & after
                rest.append(target)
    return known


@lru_cache(maxsize=64)
def affected(function: Function) -> frozenset[str]:
    """Those registers and all that are computed from them."""
    found = set(early_reads(function))
    rest = list(found)
    results = _results(function) if found else {}
    while rest:
        for writes in results.get(rest.pop(), ()):
            rest += [name for name in writes if name not in found]
            found.update(writes)
    return frozenset(found)


def _results(function: Function) -> dict[str, list[list[str]]]:
    """By register, what is computed from it."""
    found: dict[str, list[list[str]]] = {}
    for ins in function.instructions:
        if _passes_on(ins):
            for name in _values(ins):
                found.setdefault(name, []).append(reads_and_writes(ins)[1])
    return found


def _passes_on(ins: Instruction) -> bool:
    """Whether an undefined operand makes the result undefined, rather than being a fault."""
    return not is_control(ins) and not any(isinstance(arg, Mem) for arg in ins.args)


def _values(ins: Instruction) -> list[str]:
    """The registers whose values the instruction computes with."""
    return [name for arg in ins.args[1:] for name in registers_in(arg)]


def _used(ins: Instruction) -> list[str]:
    """The registers whose values have to be defined, the guard aside."""
    if ins.op[0] == "shfl":  # what a lane offers need not interest any other
        return [name for arg in ins.args[2:] for name in registers_in(arg)]
    if ins.op[0] == "mma":  # rows and columns that nobody stores may hold anything
        return []
    if ins.op[:2] == ("wgmma", "mma_async"):  # nor is D read where the product is not added to it
        return [name for arg in ins.args[2:] for name in registers_in(arg)]
    if ins.op[0] == "st" and {"local", "param"} & set(ins.op):
        return registers_in(ins.args[0])
    if is_control(ins) or ins.op[0] in NO_DESTINATION or isinstance(ins.args[0], Mem):
        return [name for name in reads_and_writes(ins)[0] if not ins.guard or name != ins.guard[0]]
    memory = [arg for arg in ins.args if isinstance(arg, Mem)]
    if ins.op[0] == "atom":
        return _values(ins)
    return [name for arg in memory for name in registers_in(arg)]


class _Flag:
    """Which lanes hold a defined value; `complete`: all that live do."""

    __slots__ = ("complete", "lanes")

    def __init__(self, lanes: int) -> None:
        self.lanes = np.zeros(lanes, bool)
        self.complete = False


class Undefined:
    """The flags of a machine's affected registers, and the steps that look after them."""

    def __init__(self, d: Decoder) -> None:
        self.d = d
        wanted = affected(d.function) if d.machine.checked else frozenset()
        self.flags = {name: _Flag(d.machine.layout.lanes) for name in wanted}
        self.early = early_reads(d.function) if wanted else frozenset()
        d.machine.on_start.append(self._start_batch)

    def _start_batch(self) -> None:
        for name, flag in self.flags.items():
            flag.complete = name not in self.early
            flag.lanes[:] = flag.complete

    def watch(self, ins: Instruction, step: Step) -> Step:
        """The step, with a look at the flags before and new flags after."""
        reads, writes = reads_and_writes(ins)
        flagged = self.flags.keys()
        if flagged.isdisjoint(reads) and flagged.isdisjoint(writes):
            return step
        targets = [self.flags[name] for name in writes if name in self.flags]
        involved = [self.flags[name] for name in {*reads, *writes} if name in self.flags]
        used = sorted({name for name in _used(ins) if name in self.flags})
        defined, guard, machine = self._defined(ins), ins.guard, self.d.machine

        def run(group: Group) -> object:
            for flag in involved:
                if not flag.complete:
                    break
            else:
                return step(group)
            mask = group.mask
            if guard is not None:
                self._check([guard[0]], mask, ins)
                predicate = self.d.registers.view(guard[0], DTYPE["pred"])
                mask = mask & (~predicate if guard[1] else predicate)
            self._check(used, mask, ins)
            after = defined()
            result = step(group)
            for target in targets:
                np.copyto(target.lanes, after, where=mask)
                target.complete = bool((target.lanes | ~machine.alive).all())
            return result

        return run

    def _check(self, names: list[str], mask: np.ndarray, ins: Instruction) -> None:
        for name in names:
            if name not in self.flags:
                continue
            bad = np.flatnonzero(mask & ~self.flags[name].lanes)
            if bad.size:
                detail = f"{name} is used, and the thread has not written it"
                raise self.d.machine.reporter.fault("uninitialised register", detail, ins, bad)

    def _defined(self, ins: Instruction) -> Callable[[], np.ndarray | bool]:
        """Whether the results are defined, from the operands before the instruction."""
        if not _passes_on(ins):
            return lambda: True
        if ins.op[0] == "selp":
            return self._selected(ins)
        if ins.op[0] in ("and", "or") and ins.type == "pred":
            return self._decided(ins)
        sources = [self.flags[name].lanes for name in _values(ins) if name in self.flags]
        return lambda: reduce(np.logical_and, sources, True)

    def _of(self, operand: Operand) -> np.ndarray | bool:
        inner = operand.reg if isinstance(operand, Not) else operand
        flag = self.flags.get(inner.name) if isinstance(inner, Reg) else None
        return True if flag is None else flag.lanes

    def _selected(self, ins: Instruction) -> Callable[[], np.ndarray]:
        a, b, chosen = (self._of(arg) for arg in ins.args[1:4])
        p, negated = self.d.registers.predicate(ins.args[3])
        if negated:
            a, b = b, a
        return lambda: np.where(p, a, b) & chosen

    def _decided(self, ins: Instruction) -> Callable[[], np.ndarray]:
        """false and anything is false; true or anything is true."""
        sides = []
        for arg in ins.args[1:3]:
            value, negated = self.d.registers.predicate(arg)
            sides.append((self._of(arg), value, negated ^ (ins.op[0] == "and")))
        (one, x, not_x), (two, y, not_y) = sides
        return lambda: (
            (np.asarray(one) & two) | (one & (~x if not_x else x)) | (two & (~y if not_y else y))
        )
