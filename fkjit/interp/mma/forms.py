"""Which forms of mma.sync there are: shapes, element types, registers of each operand."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from fkjit.interp.core.lanes import WARP
from fkjit.interp.core.ptx import Function, Instruction, registers_in, words
from fkjit.interp.numbers.elements import BITS

COLUMNS = 8  # n of every shape

# (element types of a and b, accumulator types, shapes)
_FAMILIES = (
    (("f16",), ("f32", "f16"), words("m16n8k8 m16n8k16")),
    (("bf16",), ("f32",), words("m16n8k8 m16n8k16")),
    (("tf32",), ("f32",), words("m16n8k4 m16n8k8")),
    (("e4m3", "e5m2"), ("f32", "f16"), words("m16n8k16 m16n8k32")),
    (("s8", "u8"), ("s32",), words("m8n8k16 m16n8k16 m16n8k32")),
    (("s4", "u4"), ("s32",), words("m8n8k32 m16n8k32 m16n8k64")),
    (("b1",), ("s32",), words("m8n8k128 m16n8k128 m16n8k256")),
    (("f64",), ("f64",), words("m8n8k4 m16n8k4 m16n8k8 m16n8k16")),
)


@dataclass(frozen=True)
class Form:
    """d[m, 8] = a[m, k] b[k, 8] + c[m, 8]; b1 and b1.xor count the bits set in a & b and a ^ b."""

    m: int
    k: int
    a: str  # element types
    b: str
    accumulator: str  # the type of c and d
    saturate: bool

    @property
    def counts(self) -> tuple[int, int, int]:
        """Registers of d (and c), a and b."""
        in_register = max(32 // BITS[self.a], 1)
        of_a, of_b = (rows * self.k // WARP // in_register for rows in (self.m, COLUMNS))
        halves = 2 if self.accumulator == "f16" else 1
        return self.m * COLUMNS // WARP // halves, of_a, of_b


def form_of(ins: Instruction) -> Form:
    """The form of an mma; ValueError for those that are not implemented."""
    if ins.op[1] != "sync":
        raise ValueError("sparse mma" if ins.op[1].startswith("sp") else f"mma.{ins.op[1]}")
    if "block_scale" in ins.op:
        raise ValueError("mma with block scales")
    shape, layouts, types = ins.op[3], ins.op[4:6], ins.op[6:]
    saturate = types[:1] == ("satfinite",)
    to, a, b, of, *more = types[saturate:]
    counted = a == b == "b1" and more in (["and", "popc"], ["xor", "popc"])
    families = [one for one in _FAMILIES if a in one[0] and b in one[0] and shape in one[2]]
    legal = (
        families
        and counted == (a == "b1")
        and counted == bool(more)
        and to == of
        and to in families[0][1]
        and not (saturate and (to != "s32" or counted))
    )
    if ins.op[2] != "aligned" or layouts != ("row", "col") or not legal:
        raise ValueError("this combination of shape and types of mma")
    m, _, k = (int(extent) for extent in re.findall(r"\d+", shape))
    if counted and more[0] == "xor":
        a = b = "b1.xor"
    form = Form(m, k, a, b, to, saturate)
    if tuple(len(names(ins, operand)) for operand in range(3)) != form.counts:
        raise ValueError("number of registers")
    return form


@lru_cache(maxsize=64)
def forms_of(function: Function) -> dict[int, Form]:
    """The form of every mma that is implemented, by program counter."""
    found: dict[int, Form] = {}
    for ins in function.instructions:
        if ins.op[0] == "mma":
            try:
                found[ins.pc] = form_of(ins)
            except ValueError:
                continue  # its decoder says so
    return found


def names(ins: Instruction, operand: int) -> tuple[str, ...]:
    """The registers of one operand of an mma."""
    return tuple(registers_in(ins.args[operand]))
