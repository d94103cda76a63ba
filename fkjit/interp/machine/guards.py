"""Guards: for which lanes of a group an instruction is executed."""

from __future__ import annotations

import numpy as np

from fkjit.interp.core.lanes import Group
from fkjit.interp.core.ptx import DTYPE, Instruction
from fkjit.interp.machine.decode import Decoder


def guard_of(d: Decoder, ins: Instruction) -> tuple[np.ndarray, bool] | None:
    """The guard's register and whether it is negated; None without a guard."""
    if ins.guard is None:
        return None
    return d.registers.view(ins.guard[0], DTYPE["pred"]), ins.guard[1]


def guard_mask(d: Decoder, ins: Instruction, group: Group) -> np.ndarray:
    """The lanes of the group whose guard holds."""
    guard = guard_of(d, ins)
    if guard is None:
        return group.mask
    return group.mask & (~guard[0] if guard[1] else guard[0])
