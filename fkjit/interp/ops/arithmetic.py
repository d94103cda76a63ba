"""add, sub, mul, mad, div, rem, min, max, neg, abs …: integers here, floats in `floating`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fkjit.interp.core.ptx import DTYPE, Instruction, words
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.machine.opcodes import Compute, Step, only, opcode
from fkjit.interp.numbers import halves
from fkjit.interp.ops import carry, extrema, floating
from fkjit.interp.ops.floating import is_float

WIDER = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
_SIMPLE: dict[str, Any] = {"add": np.add, "sub": np.subtract}
_INTEGERS = words("u16 s16 u32 s32 u64 s64")
_PAIRS = {"u16x2": np.dtype("u2"), "s16x2": np.dtype("i2")}


@opcode("add", "sub")
def add_sub(d: Decoder, ins: Instruction) -> Step:
    """Integers wrap around; .sat on s32 clamps; .cc keeps the carry; add of pairs of 16 bits."""
    function = _SIMPLE[ins.op[0]]
    if is_float(ins.type):
        return floating.arithmetic(d, ins)
    if ins.has("cc"):
        return carry.carry(d, ins)
    if ins.type in _PAIRS and ins.op == ("add", ins.type):
        return _pairs(d, ins, function)
    if ins.op[1:] != ("sat", "s32"):
        return _integers(d, ins, function)
    a, b = d.src(ins.args[1], "s32"), d.src(ins.args[2], "s32")
    wide = lambda: function(a, b, dtype=np.int64)  # noqa: E731
    low, high = -(1 << 31), (1 << 31) - 1
    return d.step(
        ins, ins.args[0], "s32", lambda out: np.copyto(out, np.clip(wide(), low, high), "unsafe")
    )


def _integers(d: Decoder, ins: Instruction, function: Any) -> Step:
    """A ufunc of two integers of one type."""
    _integer(ins)
    only(ins, (ins.type,))
    return d.binary(ins, ins.type, function)


def _integer(ins: Instruction, *types: str) -> str:
    """The instruction's type, which has to be an integer one."""
    if ins.type not in (types or _INTEGERS):
        raise ValueError(f"type .{ins.type}")
    return ins.type


def _pairs(d: Decoder, ins: Instruction, function: Any) -> Step:
    """A function of two 16-bit integers in each register; .relu clamps negative results to 0."""
    only(ins, (ins.type, "relu") if ins.type == "s16x2" else (ins.type,))
    dtype, (a, b) = _PAIRS[ins.type], (d.src(arg, "u32") for arg in ins.args[1:3])
    lanes = d.machine.layout.lanes

    def compute(out: np.ndarray) -> None:
        x, y = (np.ascontiguousarray(np.broadcast_to(v, (lanes,))).view(dtype) for v in (a, b))
        result = function(x, y)
        if ins.has("relu"):
            result = np.maximum(result, dtype.type(0))
        out[...] = result.view(np.uint32)

    return d.step(ins, ins.args[0], "u32", compute)


@opcode("mul")
def mul(d: Decoder, ins: Instruction) -> Step:
    """mul.lo, mul.hi, mul.wide of integers; floats."""
    if is_float(ins.type):
        return floating.arithmetic(d, ins)
    kind, mode = _integer(ins), ins.op[1]
    only(ins, (mode, kind))
    a, b = d.src(ins.args[1], kind), d.src(ins.args[2], kind)
    if mode == "lo":
        return d.binary(ins, kind, np.multiply)
    if mode == "wide":
        wide = DTYPE[WIDER[kind]]
        return d.step(ins, ins.args[0], WIDER[kind], lambda out: np.multiply(a, b, out, dtype=wide))
    if mode == "hi":
        return d.step(ins, ins.args[0], kind, lambda out: np.copyto(out, carry.high_product(a, b)))
    raise ValueError(f"modifier .{mode}")


@opcode("mad", "fma")
def mad(d: Decoder, ins: Instruction) -> Step:
    """mad.lo, mad.hi (.sat too), mad.wide of integers; fma and mad of floats."""
    if is_float(ins.type):
        return floating.arithmetic(d, ins, 3)
    kind, mode, result = _integer(ins), ins.op[1], ins.type
    if ins.has("cc"):
        return carry.carry_mad(d, ins)
    a, b = d.src(ins.args[1], kind), d.src(ins.args[2], kind)
    saturate = ins.op[1:] == ("hi", "sat", "s32")
    if ins.op[0] != "mad" or mode not in ("lo", "hi", "wide"):
        raise ValueError(f"modifier .{mode}")
    only(ins, (mode, kind, "sat") if saturate else (mode, kind))
    if mode == "wide":
        result = WIDER[kind]
    c, spare = d.src(ins.args[3], result), d.scratch(DTYPE[result], "mad")

    def compute(out: np.ndarray) -> None:
        if saturate:
            total = carry.high_product(a, b).astype(np.int64) + c
            out[...] = np.clip(total, -(1 << 31), (1 << 31) - 1)
        elif mode == "hi":
            np.add(carry.high_product(a, b), c, out)
        else:
            np.multiply(a, b, spare, dtype=spare.dtype)
            np.add(spare, c, out)

    return d.step(ins, ins.args[0], result, compute)


@opcode("mul24", "mad24")
def product24(d: Decoder, ins: Instruction) -> Step:
    """mul24.lo/.hi, mad24.lo/.hi of 32-bit integers: bits 31-0 or 47-16 of a product of 24 bits."""
    kind, mode = _integer(ins, "u32", "s32"), ins.op[1]
    clamps = ins.op == ("mad24", "hi", "sat", "s32")
    only(ins, (mode, kind, *(("sat",) if clamps else ())))
    a, b, *c = (d.src(arg, kind) for arg in ins.args[1:])
    wide, eight, shift = np.dtype(f"{DTYPE[kind].kind}8"), DTYPE[kind].type(8), {"lo": 0, "hi": 16}
    by = wide.type(shift[mode])

    def compute(out: np.ndarray) -> None:
        x, y = ((v << eight >> eight).astype(wide) for v in (a, b))
        product = (x * y >> by).astype(out.dtype)
        if clamps:
            total = product.astype(np.int64) + c[0]
            product = np.clip(total, -(1 << 31), (1 << 31) - 1).astype(out.dtype)
        out[...] = product + c[0] if c and not clamps else product

    return d.step(ins, ins.args[0], kind, compute)


@opcode("div", "rem")
def div(d: Decoder, ins: Instruction) -> Step:
    """Floats: IEEE in every mode, accurate for .approx and .full. Integers round toward zero.

    Integer division by zero gives all ones, as the hardware does; a remainder has the dividend's
    sign, and is the dividend when the divisor is zero.
    """
    if is_float(ins.type):
        return floating.arithmetic(d, ins)
    kind, remainder = _integer(ins), ins.op[0] == "rem"
    only(ins, (kind,))
    a, b = d.src(ins.args[1], kind), d.src(ins.args[2], kind)
    return d.step(ins, ins.args[0], kind, _division(a, b, remainder=remainder))


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
    """min/max of integers, of pairs of 16 bits (.relu for signed ones) and of floats."""
    largest = ins.op[0] == "max"
    if ins.type == "relu":  # NVRTC writes the type before it
        ins = replace(ins, op=(ins.op[0], "relu", *ins.op[1:-1]))
    if is_float(ins.type):
        return extrema.extremum(d, ins, largest)
    function = np.maximum if largest else np.minimum
    if ins.type in _PAIRS:
        return _pairs(d, ins, function)
    if ins.op[1:] != ("relu", "s32"):
        return _integers(d, ins, function)
    a, b = d.src(ins.args[1], "s32"), d.src(ins.args[2], "s32")
    zero = np.int32(0)
    return d.step(ins, ins.args[0], "s32", lambda out: np.maximum(function(a, b), zero, out=out))


@opcode("neg")
def neg(d: Decoder, ins: Instruction) -> Step:
    """Floats flip the sign bit (NaN too); integers wrap."""
    if is_float(ins.type):
        return _sign_bits(d, ins, np.bitwise_xor, 0x8000800080008000)
    only(ins, (_integer(ins, "s16", "s32", "s64"),))
    return d.unary(ins, ins.type, np.negative)


@opcode("abs")
def absolute(d: Decoder, ins: Instruction) -> Step:
    """Floats clear the sign bit; |INT_MIN| is INT_MIN."""
    if is_float(ins.type):
        return _sign_bits(d, ins, np.bitwise_and, 0x7FFF7FFF7FFF7FFF)
    only(ins, (_integer(ins, "s16", "s32", "s64"),))
    return d.unary(ins, ins.type, np.absolute)


def _sign_bits(d: Decoder, ins: Instruction, function: Any, mask: int) -> Step:
    """neg and abs of floats: `mask` for four halves; f32 and f64 have one sign bit on top."""
    kind = ins.type
    only(ins, (kind, "ftz"))
    if kind == "f32x2":
        raise ValueError(f"type .{kind}")
    if ins.has("ftz"):
        return _flushed_sign(d, ins, function)
    if kind in ("f32", "f64"):
        top = 1 << (8 * DTYPE[kind].itemsize - 1)
        mask = top if function is np.bitwise_xor else top - 1
    unsigned = f"u{8 * DTYPE[kind].itemsize}"
    a, dtype = d.src(ins.args[1], unsigned), DTYPE[unsigned]
    bits = np.array([mask & ((1 << 8 * dtype.itemsize) - 1)], dtype)
    return d.step(ins, ins.args[0], unsigned, lambda out: function(a, bits, out))


def _flushed_sign(d: Decoder, ins: Instruction, function: Any) -> Step:
    kind = ins.type
    if kind not in ("f32", "f16", "f16x2"):
        raise ValueError("modifier .ftz")
    get = floating.floats(d, ins.args[1], kind, True)
    apply: Any = np.negative if function is np.bitwise_xor else np.absolute

    def compute(out: np.ndarray) -> None:
        value = apply(get())
        out[...] = value if kind == "f32" else halves.from_float("f16", value).view(out.dtype)

    return d.step(ins, ins.args[0], kind, compute)


@opcode("sad")
def sad(d: Decoder, ins: Instruction) -> Step:
    """sad d, a, b, c: |a-b| + c."""
    only(ins, (_integer(ins),))
    a, b, c = (d.src(arg, ins.type) for arg in ins.args[1:4])
    return d.step(
        ins, ins.args[0], ins.type, lambda out: np.add(np.where(a > b, a - b, b - a), c, out)
    )


@opcode("copysign")
def copysign(d: Decoder, ins: Instruction) -> Step:
    """copysign d, a, b: b with the sign of a."""
    only(ins, (_integer(ins, "f32", "f64"),))
    a, b = d.src(ins.args[1], ins.type), d.src(ins.args[2], ins.type)
    return d.step(ins, ins.args[0], ins.type, lambda out: np.copysign(b, a, out))


@opcode("testp")
def testp(d: Decoder, ins: Instruction) -> Step:
    """testp.{finite,infinite,number,notanumber,normal,subnormal} p, a."""
    only(ins, (ins.op[1], _integer(ins, "f32", "f64")))
    a = d.src(ins.args[1], ins.type)
    tiny = np.finfo(a.dtype).tiny
    tests: dict[str, Any] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda x: ~np.isnan(x),
        "notanumber": np.isnan,
        "normal": lambda x: np.isfinite(x) & ((np.abs(x) >= tiny) | (x == 0)),
        "subnormal": lambda x: (np.abs(x) < tiny) & (x != 0),
    }
    test = tests[ins.op[1]]
    return d.step(ins, ins.args[0], "pred", lambda out: np.copyto(out, test(a)))


@opcode("ex2", "lg2", "rcp", "rsqrt", "sin", "cos", "tanh", "sqrt")
def function(d: Decoder, ins: Instruction) -> Step:
    """ex2, lg2, rcp, rsqrt, sin, cos, tanh, sqrt of floats."""
    return floating.arithmetic(d, ins, 1)


@opcode("dp4a", "dp2a")
def dot_product(d: Decoder, ins: Instruction) -> Step:
    """dp4a.atype.btype d, a, b, c: four products of bytes added to c.

    dp2a.lo/.hi: the two 16-bit numbers of a times the two lower or upper bytes of b.
    """
    four = ins.op[0] == "dp4a"
    kinds = ins.op[1:] if four else ins.op[2:]
    if len(kinds) != 2 or not {*kinds} <= {"u32", "s32"} or ins.op[1] not in (*kinds, "lo", "hi"):
        raise ValueError("modifier")
    of_a, of_b = (f"{'i' if kind[0] == 's' else 'u'}" for kind in kinds)
    a, b, c = (d.src(arg, "u32") for arg in ins.args[1:4])
    first = 2 if ins.op[1] == "hi" else 0

    def compute(out: np.ndarray) -> None:
        x, y = (np.ascontiguousarray(v) for v in np.broadcast_arrays(a, b))
        left = x.view(f"{of_a}1" if four else f"{of_a}2").reshape(x.size, -1)
        right = y.view(f"{of_b}1").reshape(-1, 4)[:, first : first + left.shape[1]]
        products = left.astype(np.int64) * right.astype(np.int64)
        np.add(products.sum(1).astype(np.uint32), c, out)

    return d.step(ins, ins.args[0], "u32", compute)
