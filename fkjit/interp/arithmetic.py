"""add, sub, mul, mad, div, rem, min, max, neg, abs …: integers here, floats in `arith_float`."""

from __future__ import annotations

from typing import Any

import numpy as np

from fkjit.interp import arith_float
from fkjit.interp.arith_float import is_float
from fkjit.interp.decode import Compute, Decoder, Step, opcode
from fkjit.interp.ptx import DTYPE, Instruction

_WIDER = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
_SIMPLE: dict[str, Any] = {"add": np.add, "sub": np.subtract}


@opcode("add", "sub")
def add_sub(d: Decoder, ins: Instruction) -> Step:
    """Integers wrap around; .sat on s32 clamps; .cc keeps the carry."""
    function = _SIMPLE[ins.op[0]]
    if is_float(ins.type):
        return arith_float.arithmetic(d, ins, function)
    if ins.has("cc"):
        return _carry(d, ins, reads=False, writes=True)
    if not ins.has("sat"):
        return d.binary(ins, ins.type, function)
    a, b = d.src(ins.args[1], "s32"), d.src(ins.args[2], "s32")
    wide = lambda: function(a, b, dtype=np.int64)  # noqa: E731
    low, high = -(1 << 31), (1 << 31) - 1
    return d.step(
        ins, ins.args[0], "s32", lambda out: np.copyto(out, np.clip(wide(), low, high), "unsafe")
    )


@opcode("addc", "subc")
def add_sub_carry(d: Decoder, ins: Instruction) -> Step:
    """add/sub with the carry of the instruction before."""
    return _carry(d, ins, reads=True, writes=ins.has("cc"))


def _carry(d: Decoder, ins: Instruction, *, reads: bool, writes: bool) -> Step:
    """Carry arithmetic; the flag is a register of one element a lane."""
    kind = {"s32": "u32", "b32": "u32", "s64": "u64", "b64": "u64"}.get(ins.type, ins.type)
    a, b = d.src(ins.args[1], kind), d.src(ins.args[2], kind)
    flag, one = carry_flag(d), DTYPE[kind].type(1)
    subtract = ins.op[0].startswith("sub")
    target = d.dst(ins.args[0], kind)

    def run(group: Any) -> None:
        extra = flag.astype(DTYPE[kind]) if reads else DTYPE[kind].type(0)
        if subtract:
            result = a - b - extra
            carry = (a < b) | ((a == b) & (extra == one))
        else:
            result = a + b + extra
            carry = (result < a) | ((result == a) & (extra == one) & (b != 0))
        np.copyto(target, result, where=group.mask)
        if writes:
            np.copyto(flag, carry, where=group.mask)

    return run


def carry_flag(d: Decoder) -> np.ndarray:
    """The condition-code register CC.CF, one bool a lane."""
    return d.scratch(bool, "carry flag")


@opcode("mul", "mul24")
def mul(d: Decoder, ins: Instruction) -> Step:
    """mul.lo, mul.hi, mul.wide of integers; floats."""
    if is_float(ins.type):
        return arith_float.arithmetic(d, ins, np.multiply)
    kind, mode = ins.type, ins.op[1]
    a, b = d.src(ins.args[1], kind), d.src(ins.args[2], kind)
    if mode == "lo" and ins.op[0] == "mul":
        return d.binary(ins, kind, np.multiply)
    if mode == "wide":
        wide = DTYPE[_WIDER[kind]]
        return d.step(
            ins, ins.args[0], _WIDER[kind], lambda out: np.multiply(a, b, out, dtype=wide)
        )
    if mode == "hi" and ins.op[0] == "mul":
        return d.step(ins, ins.args[0], kind, lambda out: np.copyto(out, high_product(a, b)))
    raise ValueError(f"modifier .{mode}")


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


@opcode("mad", "fma", "mad24")
def mad(d: Decoder, ins: Instruction) -> Step:
    """mad.lo, mad.hi, mad.wide of integers; fma and mad of floats."""
    if is_float(ins.type):
        return arith_float.fma(d, ins)
    kind, mode, result = ins.type, ins.op[1], ins.type
    a, b = d.src(ins.args[1], kind), d.src(ins.args[2], kind)
    if ins.has("cc") or ins.has("sat") or ins.op[0] == "mad24":
        raise ValueError("modifier .cc, .sat or mad24")
    if mode == "wide":
        result = _WIDER[kind]
    c, spare = d.src(ins.args[3], result), d.scratch(DTYPE[result], "mad")

    def compute(out: np.ndarray) -> None:
        if mode == "hi":
            np.add(high_product(a, b), c, out)
        else:
            np.multiply(a, b, spare, dtype=spare.dtype)
            np.add(spare, c, out)

    if mode not in ("lo", "hi", "wide"):
        raise ValueError(f"modifier .{mode}")
    return d.step(ins, ins.args[0], result, compute)


@opcode("madc")
def madc(d: Decoder, ins: Instruction) -> Step:
    """mad with carry is not emitted for the kernels of this library."""
    raise ValueError("madc")


@opcode("div")
def div(d: Decoder, ins: Instruction) -> Step:
    """Floats: IEEE for .rn, accurate for .approx/.full. Integers round toward zero.

    Integer division by zero gives all ones, as the hardware does.
    """
    kind = ins.type
    if is_float(kind):
        return arith_float.arithmetic(d, ins, np.divide)
    a, b = d.src(ins.args[1], kind), d.src(ins.args[2], kind)
    return d.step(ins, ins.args[0], kind, _division(a, b, remainder=False))


@opcode("rem")
def rem(d: Decoder, ins: Instruction) -> Step:
    """The sign is the dividend's; the remainder by zero is the dividend."""
    kind = ins.type
    a, b = d.src(ins.args[1], kind), d.src(ins.args[2], kind)
    return d.step(ins, ins.args[0], kind, _division(a, b, remainder=True))


def _division(a: np.ndarray, b: np.ndarray, *, remainder: bool) -> Compute:
    dtype = b.dtype
    one, ones = dtype.type(1), np.array([-1]).astype(dtype)

    def compute(out: np.ndarray) -> None:
        zero = b == 0
        safe = np.where(zero, one, b)
        rest = np.fmod(a, safe)
        if remainder:
            out[...] = np.where(zero, a, rest)
        elif dtype.kind == "u":
            out[...] = np.where(zero, ones, a // safe)
        else:  # the quotient of a - rest is exact, so that no rounding direction matters
            out[...] = np.where(zero, ones, (a - rest) // safe)

    return compute


@opcode("min", "max")
def extremum(d: Decoder, ins: Instruction) -> Step:
    """min/max of integers (.relu too) and floats."""
    largest = ins.op[0] == "max"
    if is_float(ins.type):
        return arith_float.extremum(d, ins, largest)
    function = np.maximum if largest else np.minimum
    if ins.type in ("s16x2", "u16x2") or ins.has("relu"):
        raise ValueError(f"modifier .{ins.type}")
    return d.binary(ins, ins.type, function)


@opcode("neg")
def neg(d: Decoder, ins: Instruction) -> Step:
    """Floats flip the sign bit (NaN too); integers wrap."""
    if ins.type in arith_float.HALF:
        return _sign_bits(d, ins, np.bitwise_xor, 0x80008000)
    if is_float(ins.type):
        return arith_float.arithmetic(d, ins, np.negative, 1)
    return d.unary(ins, ins.type, np.negative)


@opcode("abs")
def absolute(d: Decoder, ins: Instruction) -> Step:
    """Floats clear the sign bit; |INT_MIN| is INT_MIN."""
    if ins.type in arith_float.HALF:
        return _sign_bits(d, ins, np.bitwise_and, 0x7FFF7FFF)
    if is_float(ins.type):
        return arith_float.arithmetic(d, ins, np.abs, 1)
    return d.unary(ins, ins.type, np.absolute)


def _sign_bits(d: Decoder, ins: Instruction, function: Any, mask: int) -> Step:
    a = d.src(ins.args[1], ins.type)
    bits = np.array([mask & ((1 << 8 * a.dtype.itemsize) - 1)], a.dtype)
    return d.step(ins, ins.args[0], ins.type, lambda out: function(a, bits, out))


@opcode("sad")
def sad(d: Decoder, ins: Instruction) -> Step:
    """sad d, a, b, c: |a-b| + c."""
    a, b, c = (d.src(arg, ins.type) for arg in ins.args[1:4])
    return d.step(
        ins, ins.args[0], ins.type, lambda out: np.add(np.where(a > b, a - b, b - a), c, out)
    )


@opcode("copysign")
def copysign(d: Decoder, ins: Instruction) -> Step:
    """copysign d, a, b: b with the sign of a."""
    a, b = d.src(ins.args[1], ins.type), d.src(ins.args[2], ins.type)
    return d.step(ins, ins.args[0], ins.type, lambda out: np.copysign(b, a, out))


@opcode("testp")
def testp(d: Decoder, ins: Instruction) -> Step:
    """testp.{finite,infinite,number,notanumber,normal,subnormal} p, a."""
    a = d.src(ins.args[1], ins.type)
    tiny = np.finfo(a.dtype).tiny
    tests: dict[str, Any] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda x: ~np.isnan(x),
        "notanumber": np.isnan,
        "normal": lambda x: np.isfinite(x) & (np.abs(x) >= tiny),
        "subnormal": lambda x: (np.abs(x) < tiny) & (x != 0),
    }
    test = tests[ins.op[1]]
    return d.step(ins, ins.args[0], "pred", lambda out: np.copyto(out, test(a)))


_FUNCTIONS: dict[str, Any] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda x: 1 / x,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


@opcode(*_FUNCTIONS)
def function(d: Decoder, ins: Instruction) -> Step:
    """ex2, lg2, rcp, rsqrt, sin, cos, tanh, accurate; rcp.rn is correctly rounded."""
    if {"rz", "rm", "rp"} & set(ins.op):
        raise ValueError("rounding modes other than .rn")
    return arith_float.approximate(d, ins, _FUNCTIONS[ins.op[0]])


@opcode("sqrt")
def sqrt(d: Decoder, ins: Instruction) -> Step:
    """sqrt, correctly rounded (.approx as well)."""
    return arith_float.arithmetic(d, ins, np.sqrt, 1)


@opcode("dp4a")
def dp4a(d: Decoder, ins: Instruction) -> Step:
    """dp4a.atype.btype d, a, b, c: four products of bytes added to c."""
    a, b = d.src(ins.args[1], "u32"), d.src(ins.args[2], "u32")
    c = d.src(ins.args[3], "u32")
    of_a, of_b = (np.dtype("i1" if part[0] == "s" else "u1") for part in ins.op[1:3])

    def compute(out: np.ndarray) -> None:
        x, y = np.broadcast_arrays(a, b)
        x, y = np.ascontiguousarray(x).view(of_a), np.ascontiguousarray(y).view(of_b)
        products = x.astype(np.int32) * y.astype(np.int32)
        np.add(products.reshape(-1, 4).sum(1, dtype=np.int32).view(np.uint32), c, out)

    return d.step(ins, ins.args[0], "u32", compute)
