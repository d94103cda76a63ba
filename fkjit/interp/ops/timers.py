"""Time, as far as kernels can see it: %clock, %globaltimer and nanosleep.

It depends on what has been executed alone, so that a run repeats itself; every look at a clock
takes a microsecond, so that loops with a time limit end.
"""

from __future__ import annotations

import numpy as np

from fkjit.interp.core.lanes import Group
from fkjit.interp.core.ptx import DTYPE, SIZE, Instruction
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.machine.opcodes import Step, opcode

NS_PER_LOOK = 1000
NS_PER_RUN = 20  # of each straight-line run
CYCLES_PER_NS = 1.5
_EPOCH = 1 << 60  # nanoseconds of %globaltimer when the launch begins

# register -> (cycles rather than nanoseconds, bits to shift down, bytes)
CLOCKS = {
    "%clock": (True, 0, 4), "%clock_hi": (True, 32, 4), "%clock64": (True, 0, 8),
    "%globaltimer": (False, 0, 8), "%globaltimer_lo": (False, 0, 4),
    "%globaltimer_hi": (False, 32, 4),
}  # fmt: skip


class Timer:
    """The time of one machine, in nanoseconds."""

    def __init__(self, d: Decoder) -> None:
        self.machine = d.machine
        self.extra = 0

    def pass_by(self, nanoseconds: int) -> None:
        """Time goes by in which nothing is executed."""
        self.extra += nanoseconds

    def now(self) -> int:
        """Nanoseconds since the machine was made."""
        return self.extra + NS_PER_RUN * self.machine.executed


def read_clock(d: Decoder, ins: Instruction, name: str) -> Step:
    """mov.u32 d, %clock and its like."""
    timer, (cycles, shift, size) = d.part(Timer), CLOCKS[name]
    if SIZE[ins.type] != size:
        raise ValueError(f"type .{ins.type} for {name}")
    kind = f"u{8 * size}"

    def compute(out: np.ndarray) -> None:
        timer.pass_by(NS_PER_LOOK)
        now = int(timer.now() * CYCLES_PER_NS) if cycles else _EPOCH + timer.now()
        out[...] = DTYPE[kind].type((now >> shift) & ((1 << 8 * size) - 1))

    return d.step(ins, ins.args[0], kind, compute)


@opcode("nanosleep")
def nanosleep(d: Decoder, ins: Instruction) -> Step:
    """nanosleep.u32 t: time goes by."""
    if ins.op != ("nanosleep", "u32"):
        raise ValueError("only nanosleep.u32")
    timer, duration = d.part(Timer), d.src(ins.args[0], "u32")
    return lambda group: timer.pass_by(_longest(group, duration))


def _longest(group: Group, duration: np.ndarray) -> int:
    return int(group.pick(duration).max())
