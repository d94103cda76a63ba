"""cvt: between integers, floats and halves, with PTX's rounding, saturation and NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fkjit.interp.core.ptx import DTYPE, SIZE, Instruction, words
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.machine.opcodes import Step, only, opcode
from fkjit.interp.numbers import halves
from fkjit.interp.numbers.flush import flush_rounded
from fkjit.interp.numbers.rounding import FORMATS, directed64, quantise, sum_to_odd
from fkjit.interp.ops import narrow
from fkjit.interp.ops.floating import clamp, floats

Convert = Callable[[np.ndarray], np.ndarray]
_TO_INTEGRAL: dict[str, Any] = {
    "rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil,
}  # fmt: skip
_MODES = ("rn", "rz", "rm", "rp", "rna")
_TF32_BITS, _TF32_NAN = np.uint32(0xFFFFE000), np.uint32(0x7FFFE000)
_INTEGERS = words("u8 s8 u16 s16 u32 s32 u64 s64")
_FLOATS = ("f16", "bf16", "f32", "f64")


@opcode("cvt")
def cvt(d: Decoder, ins: Instruction) -> Step:
    """cvt{.rnd}{.ftz}{.sat}{.satfinite}{.relu}.dtype.atype d, a (two sources for some x2 types)."""
    to, of = ins.op[-2], ins.op[-1]
    if ins.op[1] == "pack":
        return _pack_integers(d, ins)
    only(ins, (to, of, *_MODES, *_TO_INTEGRAL, *words("ftz sat satfinite relu")))
    if narrow.is_narrow(to) or narrow.is_narrow(of):
        return narrow.cvt(d, ins)
    if to in ("f16x2", "bf16x2") and of == "f32":
        return _pack(d, ins, to)
    if to == "tf32" and of == "f32":
        return _tf32(d, ins)
    for kind in (to, of):
        if kind not in _FLOATS and kind not in _INTEGERS:
            raise ValueError(f"type .{kind}")
    if "rna" in ins.op or (ins.has("ftz") and "f32" not in (to, of)):
        raise ValueError("modifier")
    flushed = of == "f32" and to != "f16" and ins.has("ftz")  # as an H200 does; f16 keeps all
    get: Any = floats(d, ins.args[1], of, flushed) if of in _FLOATS else None
    if get is None:
        values = d.src(ins.args[1], of)
        get = lambda: values  # noqa: E731
    convert = _to_integer(ins, to, of) if to in _INTEGERS else _to_float(ins, to, of)
    return _store(d, ins, to, lambda: convert(get()))


def _store(d: Decoder, ins: Instruction, to: str, values: Callable[[], np.ndarray]) -> Step:
    """Into a register at least as wide: signed results are sign-extended."""
    out = d.dst(ins.args[0], None)
    width, size = out.dtype.itemsize, SIZE[to]
    if width == size:
        return d.step(ins, ins.args[0], to, lambda into: np.copyto(into, values()))
    wide = np.dtype(f"{'i' if to[0] == 's' else 'u'}{width}")

    def compute(into: np.ndarray) -> None:
        result = values()
        bits = result if result.dtype.kind in "iu" else result.view(f"u{size}")
        into[...] = bits.astype(wide).view(into.dtype)

    return d.step(ins, ins.args[0], None, compute)


def _as_double(values: np.ndarray) -> np.ndarray:
    """Any numbers as float64, rounded to odd where they have more bits."""
    if values.dtype.kind in "iu" and values.dtype.itemsize == 8:
        return sum_to_odd(*_halves_of(values))
    return values.astype(np.float64)


def _halves_of(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """64-bit integers as the exact sum of two float64."""
    low = values & values.dtype.type(0xFFFFFFFF)
    return (values - low).astype(np.float64), low.astype(np.float64)


def _to_float(ins: Instruction, to: str, of: str) -> Convert:
    """To f16, bf16, f32 or f64, from anything."""
    integral = next((_TO_INTEGRAL[part] for part in ins.op if part in _TO_INTEGRAL), None)
    mode = next((part for part in ("rz", "rm", "rp") if ins.has(part)), "rn")
    if (ins.has("satfinite") or ins.has("relu")) and (of != "f32" or to not in ("f16", "bf16")):
        raise ValueError("modifier")
    rounded, flushes = _rounder(ins, to, mode), ins.has("ftz") and to == "f32"

    def convert(values: np.ndarray) -> np.ndarray:
        if integral is not None:
            values = integral(values)
        if of in _FLOATS:
            values = clamp(ins, values)
        result = rounded(values)
        if flushes:
            result = flush_rounded(result, lambda: values.astype(np.float64), mode)
        return clamp(ins, result) if of in _INTEGERS and ins.has("sat") else result

    return convert


def _rounder(ins: Instruction, to: str, mode: str) -> Convert:
    """Rounds numbers of any type to a floating one."""
    if to == "f64":
        if mode == "rn":
            return lambda values: values.astype(np.float64)
        return lambda values: _directed64(values, mode)
    if to == "f32":
        if mode == "rn":
            return lambda values: values.astype(np.float32)
        return lambda values: quantise(_as_double(values), "f32", mode).astype(np.float32)
    plain = mode == "rn" and not ins.has("satfinite")

    def half(values: np.ndarray) -> np.ndarray:
        if plain and values.dtype == np.float32:
            return halves.from_float(to, values)
        if plain:
            return halves.from_double(to, _as_double(values))
        return halves.from_double(to, _limited(ins, quantise(_as_double(values), to, mode), to))

    return half


def _directed64(values: np.ndarray, mode: str) -> np.ndarray:
    if values.dtype.kind == "f" or values.dtype.itemsize < 8:
        return values.astype(np.float64)
    return directed64("add", np.add, mode, _halves_of(values))


def _limited(ins: Instruction, values: np.ndarray, kind: str) -> np.ndarray:
    """.satfinite: infinities become the largest number; NaN stays."""
    largest = FORMATS[kind].largest
    return np.clip(values, -largest, largest) if ins.has("satfinite") else values


def _to_integer(ins: Instruction, to: str, of: str) -> Convert:
    dtype = DTYPE[to]
    limits = np.iinfo(dtype)
    if of in _INTEGERS:
        only(ins, ("sat", to, of))
        if not ins.has("sat"):
            return lambda values: values.astype(dtype)
        return lambda values: clamp_integers(values, limits).astype(dtype)
    only(ins, ("sat", "ftz", *_TO_INTEGRAL, to, of))
    rounding = next((_TO_INTEGRAL[part] for part in ins.op if part in _TO_INTEGRAL), None)
    if rounding is None:
        raise ValueError("a float to an integer needs .rni, .rzi, .rmi or .rpi")

    nan = dtype.type(0)
    if of == "f64" or SIZE[to] == 8:  # 0x80…0, also as an unsigned number
        nan = np.array([1 << 8 * SIZE[to] - 1], f"u{SIZE[to]}").view(dtype)[0]

    def convert(values: np.ndarray) -> np.ndarray:
        whole = rounding(values.astype(np.float64))
        missing = np.isnan(whole)
        whole = np.where(missing, 0.0, whole)
        high, low = whole >= float(limits.max), whole <= float(limits.min)
        result = np.where(high | low, 0.0, whole).astype(dtype)
        result = np.where(high, dtype.type(limits.max), result)
        result = np.where(low, dtype.type(limits.min), result)
        return np.where(missing, nan, result)

    return convert


def clamp_integers(values: np.ndarray, limits: Any) -> np.ndarray:
    """Integers into the range of another integer type."""
    own = np.iinfo(values.dtype)
    return np.clip(values, max(own.min, limits.min), min(own.max, limits.max))


def _pack(d: Decoder, ins: Instruction, to: str) -> Step:
    """cvt.f16x2.f32 d, a, b: a becomes the upper half, b the lower."""
    only(ins, ("rn", "rz", "relu", "satfinite", to, "f32"))
    if len(ins.args) != 3:
        raise ValueError(f"{len(ins.args)} operands")
    round_to = _rounder(ins, halves.base_type(to), "rz" if ins.has("rz") else "rn")
    high, low = d.src(ins.args[1], "f32"), d.src(ins.args[2], "f32")
    pair = d.scratch(np.uint32, "cvt pair")
    parts = pair.view(np.uint16)

    def compute(out: np.ndarray) -> None:
        parts[1::2] = round_to(clamp(ins, high))
        parts[0::2] = round_to(clamp(ins, low))
        out[...] = pair

    return d.step(ins, ins.args[0], "b32", compute)


def _tf32(d: Decoder, ins: Instruction) -> Step:
    """cvt.rna.tf32.f32 (ties away from zero), .rn, .rz: a float32 with ten fraction bits.

    On an H200 .rna cuts NaN to its upper bits (which may leave an infinity), the others give one.
    """
    only(ins, ("rna", "rn", "rz", "relu", "satfinite", "tf32", "f32"))
    a = d.src(ins.args[1], "f32")
    mode = next(part for part in ins.op if part in _MODES)

    def compute(out: np.ndarray) -> None:
        value = quantise(clamp(ins, a).astype(np.float64), "tf32", mode)
        out[...] = _limited(ins, value, "tf32").astype(np.float32).view(np.uint32)
        cut = a.view(np.uint32) & _TF32_BITS
        np.copyto(out, cut if mode == "rna" else _TF32_NAN, where=np.isnan(value))

    return d.step(ins, ins.args[0], "b32", compute)


_PACKED_BITS = {"u16": 16, "s16": 16, "u8": 8, "s8": 8, "u4": 4, "s4": 4, "u2": 2, "s2": 2}


def _pack_integers(d: Decoder, ins: Instruction) -> Step:
    """cvt.pack.sat.dtype.s32{.b32} d, a, b{, c}: saturated a and b below the low bits of c."""
    _, _, sat, to, of, *more = ins.op
    if sat != "sat" or of not in ("s32", "u32") or more not in ([], ["b32"]):
        raise ValueError("modifier")
    bits, signed = _PACKED_BITS[to], to[0] == "s"
    a, b = d.src(ins.args[1], of), d.src(ins.args[2], of)
    c = d.src(ins.args[3], "u32") if more else np.zeros(1, np.uint32)
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    shift, mask = np.uint32(bits), np.uint32((1 << bits) - 1)

    def compute(out: np.ndarray) -> None:
        x, y = (np.clip(v.astype(np.int64), low, high).astype(np.uint32) & mask for v in (a, b))
        above = c << (shift + shift) if more else c
        out[...] = above | x << shift | y

    return d.step(ins, ins.args[0], "b32", compute)
