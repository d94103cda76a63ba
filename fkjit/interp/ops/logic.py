"""Bits: and, or, xor, not, shifts, lop3, prmt, counts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from fkjit.interp.core.lanes import Group
from fkjit.interp.core.ptx import DTYPE, SIZE, UNSIGNED, Instruction, Not, Pair, words
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.machine.opcodes import Compute, Step, only, opcode

_BINARY: dict[str, tuple[Any, Any]] = {
    "and": (np.bitwise_and, np.logical_and),
    "or": (np.bitwise_or, np.logical_or),
    "xor": (np.bitwise_xor, np.logical_xor),
}
_BITS = words("b16 b32 b64")
_WORDS = ("b32", "b64")


def _typed(ins: Instruction, types: Iterable[str], modifiers: str = "") -> None:
    """Refuse a type or a modifier that the instruction does not have."""
    if ins.type not in types:
        raise ValueError(f"type .{ins.type}")
    only(ins, (*words(modifiers), ins.type))


@opcode(*_BINARY)
def binary(d: Decoder, ins: Instruction) -> Step:
    """and, or, xor of bits or predicates."""
    _typed(ins, (*_BITS, "pred"))
    bits, logical = _BINARY[ins.op[0]]
    if ins.type != "pred":
        return d.binary(ins, ins.type, bits)
    if not any(isinstance(arg, Not) for arg in ins.args):
        return d.binary(ins, "pred", logical)
    (a, not_a), (b, not_b) = (d.registers.predicate(arg) for arg in ins.args[1:3])
    return d.step(
        ins, ins.args[0], "pred", lambda out: logical(~a if not_a else a, ~b if not_b else b, out)
    )


@opcode("not")
def invert(d: Decoder, ins: Instruction) -> Step:
    """not of bits or a predicate."""
    _typed(ins, (*_BITS, "pred"))
    return d.unary(ins, ins.type, np.logical_not if ins.type == "pred" else np.invert)


@opcode("cnot")
def cnot(d: Decoder, ins: Instruction) -> Step:
    """cnot d, a: 1 where a is 0."""
    _typed(ins, _BITS)
    a = d.src(ins.args[1], ins.type)
    return d.step(ins, ins.args[0], ins.type, lambda out: np.copyto(out, a == 0, "unsafe"))


@opcode("shl", "shr")
def shift(d: Decoder, ins: Instruction) -> Step:
    """Amounts of the width and above give 0, or the sign for shr.s."""
    _typed(ins, _BITS if ins.op[0] == "shl" else words("b16 b32 b64 u16 u32 u64 s16 s32 s64"))
    kind = f"u{ins.type[1:]}" if ins.op[0] == "shl" or ins.type[0] == "b" else ins.type
    a, amount = d.src(ins.args[1], kind), d.src(ins.args[2], "u32")
    function: Any = np.left_shift if ins.op[0] == "shl" else np.right_shift
    bits, dtype, target = 8 * SIZE[kind], DTYPE[kind], ins.args[0]
    if amount.size == 1 and int(amount[0]) < bits:
        by = amount.astype(dtype)
        return d.step(ins, target, kind, lambda out: function(a, by, out))

    def compute(out: np.ndarray) -> None:
        shifted = function(a, np.minimum(amount, bits - 1).astype(dtype))
        if dtype.kind == "i":
            out[...] = shifted
        else:
            out[...] = np.where(amount >= bits, dtype.type(0), shifted)

    return d.step(ins, target, kind, compute)


@opcode("shf")
def funnel(d: Decoder, ins: Instruction) -> Step:
    """shf.l/.r.wrap/.clamp.b32 d, a, b, c: 32 bits of the shifted pair b:a."""
    a, b, c = (d.src(arg, "u32") for arg in ins.args[1:4])
    left, wrap = ins.op[1] == "l", ins.op[2] == "wrap"
    if ins.op[1] not in ("l", "r") or ins.op[2:] not in (("wrap", "b32"), ("clamp", "b32")):
        raise ValueError("only shf.l, shf.r, of .b32")
    half = np.uint64(32)

    def compute(out: np.ndarray) -> None:
        amount = (c & np.uint32(31) if wrap else np.minimum(c, np.uint32(32))).astype(np.uint64)
        pair = (b.astype(np.uint64) << half) | a
        result = (pair << amount) >> half if left else pair >> amount
        np.copyto(out, result, "unsafe")

    return d.step(ins, ins.args[0], "u32", compute)


@opcode("lop3")
def lop3(d: Decoder, ins: Instruction) -> Step:
    """lop3.b32 d, a, b, c, table: any function of three bits.

    lop3.and/or.b32 d|p, a, b, c, table, {!}q: p tells whether d is not 0, combined with q.
    """
    a, b, c = (d.src(arg, "u32") for arg in ins.args[1:4])
    table = d.immediate(ins.args[4])
    compute = _lop3_known(table, a, b, c) or _lop3_rows(table, a, b, c)
    pair = ins.args[0]
    if ins.op[1:] == ("b32",):
        return d.step(ins, pair, "u32", compute)
    _typed(ins, ("b32",), "and or")
    assert isinstance(pair, Pair)
    combine = np.logical_and if ins.op[1] == "and" else np.logical_or
    predicate, negated = d.registers.predicate(ins.args[5])
    value = d.scratch(np.uint32, "lop3")

    def test(out: np.ndarray) -> None:
        compute(value)
        combine(value != 0, ~predicate if negated else predicate, out)

    set_predicate = d.step(ins, pair.second, "pred", test)
    set_value = d.step(ins, pair.first, "u32", lambda out: np.copyto(out, value))

    def run(group: Group) -> None:
        set_predicate(group)
        set_value(group)

    return run


def _lop3_rows(table: int, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> Compute:
    def compute(out: np.ndarray) -> None:
        result = np.uint32(0)
        for row in range(8):
            if table >> row & 1:
                term = (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
                result = result | term
        out[...] = result

    return compute


def _lop3_known(table: int, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> Compute | None:
    """The usual tables in two operations."""
    forms: dict[int, Compute] = {
        0x80: lambda out: np.bitwise_and(a & b, c, out),
        0xFE: lambda out: np.bitwise_or(a | b, c, out),
        0x96: lambda out: np.bitwise_xor(a ^ b, c, out),
        0xEA: lambda out: np.bitwise_or(a & b, c, out),
        0xF8: lambda out: np.bitwise_or(b & c, a, out),
        0xA8: lambda out: np.bitwise_and(a | b, c, out),
        0x6A: lambda out: np.bitwise_xor(a & b, c, out),
        0x78: lambda out: np.bitwise_xor(b & c, a, out),
    }
    return forms.get(table)


_PRMT_MODES = {  # byte selectors by mode, for the control values 0-3
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
    "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
    "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
    "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}


def _prmt_known(control: int, a: np.ndarray, b: np.ndarray) -> Compute:
    """Bytes in places that a literal names, none of them a sign."""
    places = [control >> 4 * byte & 7 for byte in range(4)]

    def compute(out: np.ndarray) -> None:
        pair = (b.astype(np.uint64) << np.uint64(32)) | a
        out[...] = pair.view(np.uint8).reshape(-1, 8).take(places, 1).view(np.uint32)[:, 0]

    return compute


@opcode("prmt")
def prmt(d: Decoder, ins: Instruction) -> Step:
    """prmt.b32{.mode} d, a, b, c: bytes of the pair b:a, or copies of their signs."""
    mode = ins.op[2] if len(ins.op) > 2 else ""
    only(ins, ("b32", mode))
    a, b, c = (d.src(arg, "u32") for arg in ins.args[1:4])
    table = np.array(_PRMT_MODES[mode], np.uint32) if mode else None
    if table is None and c.size == 1 and not int(c[0]) & 0x8888:
        return d.step(ins, ins.args[0], "u32", _prmt_known(int(c[0]), a, b))

    def compute(out: np.ndarray) -> None:
        control = table[c & np.uint32(3)] if table is not None else c
        pair = (b.astype(np.uint64) << np.uint64(32)) | a
        result = np.zeros(np.broadcast_shapes(pair.shape, control.shape), np.uint32)
        for byte in range(4):
            select = (control >> np.uint32(4 * byte)) & np.uint32(15)
            value = pair >> ((select & np.uint32(7)).astype(np.uint64) * np.uint64(8))
            value = (value & np.uint64(255)).astype(np.uint32)
            sign = np.where(value & np.uint32(128), np.uint32(255), np.uint32(0))
            value = np.where(select & np.uint32(8), sign, value)
            result |= value << np.uint32(8 * byte)
        out[...] = result

    return d.step(ins, ins.args[0], "u32", compute)


@opcode("popc")
def popc(d: Decoder, ins: Instruction) -> Step:
    """popc d, a: the number of ones."""
    _typed(ins, _WORDS)
    a = d.src(ins.args[1], f"u{ins.type[1:]}")
    return d.step(
        ins, ins.args[0], "u32", lambda out: np.copyto(out, np.bitwise_count(a), "unsafe")
    )


def highest_bit(value: np.ndarray) -> np.ndarray:
    """The position of the highest one (int64), -1 for zero; unsigned input."""
    rest, position = value.copy(), np.zeros(value.shape, np.int64)
    for step in (32, 16, 8, 4, 2, 1):
        if step < 8 * value.dtype.itemsize:
            upper = rest >> value.dtype.type(step)
            big = upper != 0
            rest = np.where(big, upper, rest)
            position += np.where(big, step, 0)
    return np.where(value == 0, -1, position)


@opcode("clz")
def clz(d: Decoder, ins: Instruction) -> Step:
    """clz d, a: leading zeros; the width for 0."""
    _typed(ins, _WORDS)
    a, bits = d.src(ins.args[1], f"u{ins.type[1:]}"), 8 * SIZE[ins.type]
    return d.step(
        ins, ins.args[0], "u32", lambda out: np.copyto(out, bits - 1 - highest_bit(a), "unsafe")
    )


@opcode("bfind")
def bfind(d: Decoder, ins: Instruction) -> Step:
    """bfind{.shiftamt} d, a: the highest bit that is not the sign; 0xffffffff if there is none."""
    _typed(ins, words("u32 s32 u64 s64"), "shiftamt")
    a, bits = d.src(ins.args[1], ins.type), 8 * SIZE[ins.type]
    unsigned = UNSIGNED[SIZE[ins.type]]

    def compute(out: np.ndarray) -> None:
        value = np.where(a < 0, ~a, a).view(unsigned) if ins.type[0] == "s" else a
        found = highest_bit(value)
        if ins.has("shiftamt"):
            found = np.where(found < 0, -1, bits - 1 - found)
        np.copyto(out, found & 0xFFFFFFFF, "unsafe")

    return d.step(ins, ins.args[0], "u32", compute)


@opcode("brev")
def brev(d: Decoder, ins: Instruction) -> Step:
    """brev d, a: bits in reverse order."""
    _typed(ins, _WORDS)
    kind = f"u{ins.type[1:]}"
    a, size = d.src(ins.args[1], kind), SIZE[kind]
    table = np.array([int(f"{value:08b}"[::-1], 2) for value in range(256)], np.uint8)

    def compute(out: np.ndarray) -> None:
        each = table[np.ascontiguousarray(a).view(np.uint8).reshape(-1, size)][:, ::-1]
        out[...] = np.ascontiguousarray(each).view(DTYPE[kind]).reshape(-1)

    return d.step(ins, ins.args[0], kind, compute)
