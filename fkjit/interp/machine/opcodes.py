"""Which function decodes which opcode.

An opcode's file registers its decoder with `@opcode("add", "sub")`. A decoder returns a `Step`,
called with the group of lanes that execute it. Control and warp-wide instructions register with
`@control(...)`: their steps decide where the lanes go next (see `Scheduler`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from fkjit.interp.core.lanes import Group
from fkjit.interp.core.ptx import Instruction

Step = Callable[[Group], Any]
Compute = Callable[[np.ndarray], Any]  # fills its argument, writing it last: inputs may alias it
Builder = Callable[[Any, Instruction], Step]  # of a Decoder, which is made of these

# What a decoder raises at operands or modifiers that it does not know.
REFUSALS = (
    IndexError, KeyError, ValueError, AttributeError, TypeError, AssertionError, StopIteration,
)  # fmt: skip

OPCODES: dict[str, Builder] = {}
CONTROL: dict[str, Builder] = {}
INTERCEPTORS: list[Callable[[Any, Instruction, Step], Step]] = []


def opcode(*names: str) -> Callable[[Any], Any]:
    """Register the decoder of plain instructions."""

    def add(function: Any) -> Any:
        for name in names:
            OPCODES[name] = function
        return function

    return add


def control(*names: str) -> Callable[[Any], Any]:
    """Register the decoder of instructions that steer lanes (see `Scheduler`)."""

    def add(function: Any) -> Any:
        for name in names:
            CONTROL[name] = function
        return function

    return add


def intercept(function: Any) -> Any:
    """Register a function that may put a step around that of any instruction."""
    INTERCEPTORS.append(function)
    return function


def only(ins: Instruction, allowed: Collection[str]) -> None:
    """Refuse an instruction with a modifier that its decoder does not know."""
    for part in ins.op[1:]:
        if part not in allowed:
            raise ValueError(f"modifier .{part}")


def is_control(ins: Instruction) -> bool:
    """Whether lanes may part, meet or wait at this instruction."""
    return ins.op[0] in CONTROL
