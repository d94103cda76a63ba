"""Arithmetic of several words: add.cc, addc, sub.cc, subc, mad.cc, madc; high products."""

from __future__ import annotations

from typing import Any

import numpy as np

from fkjit.interp.core.lanes import Group
from fkjit.interp.core.ptx import DTYPE, Instruction
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.machine.opcodes import Step, only, opcode

_UNSIGNED = {"u32": "u32", "s32": "u32", "b32": "u32", "u64": "u64", "s64": "u64", "b64": "u64"}


def flag_register(d: Decoder) -> np.ndarray:
    """The condition-code register CC.CF, one bool a lane."""
    return d.scratch(bool, "carry flag")


@opcode("addc", "subc")
def carry(d: Decoder, ins: Instruction) -> Step:
    """add.cc, sub.cc write the carry; addc, subc read it and, with .cc, write it too.

    A difference is a + ~b + 1: its carry is 1 where nothing was borrowed, which addc may read.
    """
    only(ins, ("cc", ins.type))
    kind = _UNSIGNED[ins.type]
    a, b = d.src(ins.args[1], kind), d.src(ins.args[2], kind)
    subtract = ins.op[0].startswith("sub")

    def compute(extra: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return _sum(a, ~b, extra) if subtract else _sum(a, b, extra)

    return _step(d, ins, kind, compute)


@opcode("madc")
def carry_mad(d: Decoder, ins: Instruction) -> Step:
    """mad.lo/.hi.cc and madc: the carry is that of the addition."""
    mode, unsigned = ins.op[1], _UNSIGNED[ins.type]
    only(ins, ("lo", "hi", "cc", ins.type))
    a, b, c = *(d.src(arg, ins.type) for arg in ins.args[1:3]), d.src(ins.args[3], unsigned)

    def compute(extra: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        product = np.multiply(a, b) if mode == "lo" else high_product(a, b)
        return _sum(product.view(DTYPE[unsigned]), c, extra)

    return _step(d, ins, unsigned, compute)


def high_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The upper half of a product of integers."""
    bits = 8 * a.dtype.itemsize
    if bits < 64:
        wide = np.dtype(f"{a.dtype.kind}{a.dtype.itemsize * 2}")
        return (np.multiply(a, b, dtype=wide) >> wide.type(bits)).astype(a.dtype)
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    x, y = a.view(np.uint64), b.view(np.uint64)
    cross = (x >> half) * (y & low) + ((x & low) * (y & low) >> half)
    other = (x & low) * (y >> half) + (cross & low)
    high = (x >> half) * (y >> half) + (cross >> half) + (other >> half)
    if a.dtype.kind == "i":
        zero = np.uint64(0)
        high = high - np.where(a < 0, y, zero) - np.where(b < 0, x, zero)
    return high.view(a.dtype)


def _sum(a: np.ndarray, b: np.ndarray, extra: Any) -> tuple[np.ndarray, np.ndarray]:
    result = a + b + extra
    return result, (result < a) | ((result == a) & (extra != 0) & (b != 0))


def _step(d: Decoder, ins: Instruction, kind: str, compute: Any) -> Step:
    flag, target, dtype = flag_register(d), d.dst(ins.args[0], kind), DTYPE[kind]
    reads, writes = ins.op[0] in ("addc", "subc", "madc"), ins.has("cc")
    first = dtype.type(ins.op[0] == "sub")

    def run(group: Group) -> None:
        result, out = compute(flag.astype(dtype) if reads else first)
        np.copyto(target, result, where=group.mask)
        if writes:
            np.copyto(flag, out, where=group.mask)

    return run
