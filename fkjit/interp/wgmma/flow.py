"""What the program's text says of the registers of wgmma: where values go, and missing fences.

Compilers copy accumulators between instructions while a wgmma is still to write them, and move
computations past a fence. Neither is a fault: a value is followed through its copies, and only
what is computed after a wait needs a fence that comes after it as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from fkjit.interp.core.ptx import Function, Instruction, Reg, Sym, reads_and_writes, registers_in


def is_mma_async(ins: Instruction) -> bool:
    """Whether it is the wgmma that multiplies."""
    return ins.op[:2] == ("wgmma", "mma_async")


def copied(ins: Instruction) -> tuple[str, str] | None:
    """(destination, source) of a mov from register to register."""
    if ins.op[0] != "mov" or ins.guard or len(ins.args) != 2:
        return None
    target, source = ins.args
    if isinstance(target, Reg) and isinstance(source, Reg) and not target.sink:
        return target.name, source.name
    return None


@lru_cache(maxsize=64)
def carriers(function: Function) -> frozenset[str]:
    """Registers that may hold what a wgmma writes or reads: D, its copies, and A."""
    found: set[str] = set()
    moves: dict[str, list[str]] = {}
    for ins in function.instructions:
        if is_mma_async(ins):
            found.update(registers_in(ins.args[0]))
        pair = copied(ins)
        if pair:
            moves.setdefault(pair[1], []).append(pair[0])
    work = list(found)
    while work:
        for target in moves.get(work.pop(), []):
            if target not in found:
                found.add(target)
                work.append(target)
    return frozenset(found | _inputs(function))


def _inputs(function: Function) -> set[str]:
    multiplying = [ins for ins in function.instructions if is_mma_async(ins)]
    return {name for ins in multiplying for name in registers_in(ins.args[1])}


@lru_cache(maxsize=64)
def unfenced(function: Function) -> dict[int, dict[str, int]]:
    """By wgmma.mma_async: its registers that may have been computed since the last wait without
    a fence after it, and the program counter that wrote each.
    """
    watched = _sources(function)
    found: dict[int, dict[str, int]] = {}
    if not watched:
        return found
    blocks = _blocks(function)
    entering: dict[int, _State] = {0: _State(False, {})}
    work = [0]
    while work:
        start = work.pop()
        state = entering[start].copy()
        end, following = blocks[start]
        for ins in function.instructions[start:end]:
            _step(state, ins, watched, found)
        for at in following:
            if at not in entering:
                entering[at] = state.copy()
                work.append(at)
            elif entering[at].join(state):
                work.append(at)
    return found


class _State:
    """Whether a wait stands after the last fence; who wrote which register since."""

    def __init__(self, waited: bool, written: dict[str, int]) -> None:
        self.waited, self.written = waited, written

    def copy(self) -> _State:
        return _State(self.waited, dict(self.written))

    def join(self, other: _State) -> bool:
        """Take in another way to the same place; whether that is new."""
        new = other.written.keys() - self.written.keys()
        self.written.update({name: other.written[name] for name in new})
        grown = bool(new) or (other.waited and not self.waited)
        self.waited = self.waited or other.waited
        return grown


def _step(
    state: _State, ins: Instruction, watched: set[str], found: dict[int, dict[str, int]]
) -> None:
    written = state.written
    if ins.op[0] == "wgmma":
        if ins.op[1] == "fence":
            state.waited = False
            written.clear()
        elif ins.op[1] == "wait_group":
            state.waited = True
            written.clear()
        elif is_mma_async(ins):
            used = registers_in(ins.args[0]) + registers_in(ins.args[1])
            bad = {name: written[name] for name in used if name in written}
            if bad:
                found[ins.pc] = bad
        return
    reads, writes = reads_and_writes(ins)
    source = None
    if ins.op[0] == "mov":  # copies and constants: where a compiler puts them means nothing
        source = next((written[name] for name in reads if name in written), None)
    elif state.waited:
        source = ins.pc
    for name in watched.intersection(writes):
        if source is None:
            written.pop(name, None)
        else:
            written[name] = source


def _sources(function: Function) -> set[str]:
    """Registers whose values reach an operand of wgmma through movs."""
    found = _inputs(function)
    origins: dict[str, set[str]] = {}
    for ins in function.instructions:
        if is_mma_async(ins):
            found.update(registers_in(ins.args[0]))
        elif ins.op[0] == "mov":
            reads, writes = reads_and_writes(ins)
            for name in writes:
                origins.setdefault(name, set()).update(reads)
    work = list(found)
    while work:
        new = origins.get(work.pop(), set()) - found
        found |= new
        work += new
    return found


def _blocks(function: Function) -> dict[int, tuple[int, list[int]]]:
    """Basic blocks by their start: (end, starts of those that follow)."""
    code = function.instructions
    ends = {ins.pc + 1 for ins in code if ins.op[0] in ("bra", "brx", "ret", "exit", "trap")}
    starts = sorted(({0} | set(function.labels.values()) | ends) & set(range(len(code))))
    bounds = zip(starts, [*starts[1:], len(code)], strict=True)
    return {
        start: (end, [at for at in _following(function, code[end - 1]) if at < len(code)])
        for start, end in bounds
    }


def _following(function: Function, last: Instruction) -> Iterator[int]:
    if last.op[0] == "bra":
        yield from (function.labels[a.name] for a in last.args if isinstance(a, Sym))
    elif last.op[0] == "brx":
        table = last.args[1]
        assert isinstance(table, Sym)
        yield from (function.labels[name] for name in function.tables[table.name])
    if last.guard or last.op[0] not in ("bra", "brx", "ret", "exit", "trap"):
        yield last.pc + 1
