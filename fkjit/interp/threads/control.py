"""Branches, jump tables, the end of threads, traps."""

from __future__ import annotations

import numpy as np

from fkjit.interp.core.lanes import Group
from fkjit.interp.core.ptx import Instruction, Sym
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.machine.guards import guard_mask, guard_of
from fkjit.interp.machine.opcodes import Step, control, only


@control("bra")
def bra(d: Decoder, ins: Instruction) -> Step:
    """bra label: the lanes part if the guard differs between them."""
    only(ins, ("uni",))
    machine, following = d.machine, ins.pc + 1
    (label,) = ins.args
    assert isinstance(label, Sym)
    target = machine.target(label.name)
    guard = guard_of(d, ins)
    if guard is None:
        return lambda group: target
    predicate, negated = guard

    def run(group: Group) -> int | None:
        yes = group.mask & predicate
        count, of = int(np.count_nonzero(yes)), int(np.count_nonzero(group.mask))
        if count == of:
            return following if negated else target
        if count == 0:
            return target if negated else following
        no = group.mask & ~predicate
        machine.push(target, no if negated else yes)
        machine.push(following, yes if negated else no)
        return None

    return run


@control("brx")
def brx(d: Decoder, ins: Instruction) -> Step:
    """brx.idx index, table: a jump table."""
    only(ins, ("idx", "uni"))
    machine = d.machine
    table = ins.args[1]
    assert isinstance(table, Sym)
    targets = [machine.target(label) for label in d.function.tables[table.name]]
    index = d.src(ins.args[0], "u32")

    def run(group: Group) -> None:
        chosen = guard_mask(d, ins, group)
        for number, target in enumerate(targets):
            lanes = chosen & (index == number)
            if lanes.any():
                machine.push(target, lanes)
                chosen = chosen & ~lanes
        if chosen.any():
            detail = f"index {int(index[chosen][0])} of a jump table of {len(targets)}"
            raise machine.reporter.fault("bad jump", detail, ins, np.flatnonzero(chosen))
        rest = group.mask & ~guard_mask(d, ins, group)
        if rest.any():
            machine.push(ins.pc + 1, rest)

    return run


@control("ret", "exit")
def ret(d: Decoder, ins: Instruction) -> Step:
    """The thread ends (calls have been inlined, so a ret is the kernel's)."""
    only(ins, ("uni",) if ins.op[0] == "ret" else ())
    machine = d.machine

    def run(group: Group) -> None:
        ending = guard_mask(d, ins, group)
        rest = group.mask & ~ending
        if rest.any():
            machine.push(ins.pc + 1, rest)
        machine.end_lanes(ending)

    return run


@control("trap", "brkpt")
def trap(d: Decoder, ins: Instruction) -> Step:
    """A trap is a fault."""
    only(ins, ())
    machine = d.machine

    def run(group: Group) -> int:
        lanes = np.flatnonzero(guard_mask(d, ins, group))
        if lanes.size:
            raise machine.reporter.fault("trap", "the kernel executed a trap", ins, lanes)
        return ins.pc + 1

    return run
