"""add, sub, mul, fma, div, min, max, neg, abs and the approximate functions of floating types.

f32 and f64 results of +, -, *, / and sqrt are IEEE round-to-nearest. fma.rn.f32 is computed in
float64 (the product is exact there) and rounded to float32: a second rounding that can differ from
the true result by one unit in the last place about once in 2^29 operations. fma.f64 rounds the
product too. Functions called .approx are computed accurately, so they need not match a GPU's bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fkjit.interp import halves
from fkjit.interp.decode import Compute, Decoder, Step
from fkjit.interp.ptx import Instruction

HALF = frozenset(("f16", "bf16", "f16x2", "bf16x2"))
_ROUNDINGS = {"rz", "rm", "rp"}
_TINY = np.float32(2.0**-126)


def is_float(kind: str) -> bool:
    """Whether a PTX type is a floating one."""
    return kind in HALF or kind in ("f32", "f64")


def flush(values: np.ndarray) -> np.ndarray:
    """Subnormal float32 values -> zero of the same sign (.ftz)."""
    return np.where(np.abs(values) < _TINY, np.copysign(np.float32(0), values), values)


def _finish(ins: Instruction, compute: Compute) -> Compute:
    """Apply .ftz, .sat and .relu to a float32 result."""
    if not ({"ftz", "sat", "relu"} & set(ins.op)):
        return compute

    def finished(out: np.ndarray) -> None:
        compute(out)
        if ins.has("ftz"):
            out[...] = flush(out)
        if ins.has("sat"):  # NaN becomes 0
            np.fmin(np.fmax(out, 0), 1, out)
        if ins.has("relu"):
            np.fmax(out, 0, out)

    return finished


def _inputs(d: Decoder, ins: Instruction, count: int) -> list[Callable[[], np.ndarray]]:
    """Getters of the float operands, flushed under .ftz."""
    values = [d.src(arg, ins.type) for arg in ins.args[1 : 1 + count]]
    if ins.has("ftz") and ins.type == "f32":
        return [lambda value=value: flush(value) for value in values]
    return [lambda value=value: value for value in values]


def _directed(ins: Instruction, exact: Callable[..., Any], inputs: list[Any]) -> Compute:
    """A float32 operation rounded toward zero, down or up, through float64."""
    mode = next(part for part in ins.op if part in _ROUNDINGS)
    if ins.type != "f32":
        raise ValueError(f"modifier .{mode}")

    def compute(out: np.ndarray) -> None:
        value = np.asarray(exact(*[get().astype(np.float64) for get in inputs]))
        out[...] = round_directed(value, mode)

    return compute


def round_directed(value: np.ndarray, mode: str) -> np.ndarray:
    """float64 -> float32, toward zero (rz), down (rm) or up (rp)."""
    near = value.astype(np.float32)
    back = near.astype(np.float64)
    down, up = back > value, back < value
    if mode == "rz":
        down, up = down & (value > 0), up & (value < 0)
    lower = np.nextafter(near, np.float32(-np.inf))
    upper = np.nextafter(near, np.float32(np.inf))
    near = np.where(down, lower, near) if mode in ("rz", "rm") else near
    return np.where(up, upper, near) if mode in ("rz", "rp") else near


def arithmetic(d: Decoder, ins: Instruction, function: Any, count: int = 2) -> Step:
    """A ufunc of one or two floating operands, with every modifier."""
    kind = ins.type
    if kind in HALF:
        return _half(d, ins, function, count)
    inputs = _inputs(d, ins, count)
    target = ins.args[0]
    if _ROUNDINGS & set(ins.op):
        return d.step(ins, target, kind, _finish(ins, _directed(ins, function, inputs)))
    if not ins.has("ftz"):
        values = [get() for get in inputs]
        if count == 2:
            a, b = values
            return d.step(ins, target, kind, _finish(ins, lambda out: function(a, b, out)))
    return d.step(
        ins, target, kind, _finish(ins, lambda out: function(*[get() for get in inputs], out))
    )


def _half(d: Decoder, ins: Instruction, function: Any, count: int) -> Step:
    kind = ins.type
    values = [d.src(arg, kind) for arg in ins.args[1 : 1 + count]]

    def applied(*wide: np.ndarray) -> np.ndarray:
        result = function(*wide)
        if ins.has("sat"):
            result = np.fmin(np.fmax(result, np.float32(0)), np.float32(1))
        return np.fmax(result, np.float32(0)) if ins.has("relu") else result

    def compute(out: np.ndarray) -> None:
        out[...] = halves.through_float(kind, applied, *values)

    return d.step(ins, ins.args[0], kind, compute)


def fma(d: Decoder, ins: Instruction) -> Step:
    """fma{.rnd}{.ftz}{.sat}{.relu}.type d, a, b, c (mad.f32 is the same)."""
    kind, target = ins.type, ins.args[0]
    if kind in HALF:
        return _fma_half(d, ins)
    a, b, c = _inputs(d, ins, 3)
    if _ROUNDINGS & set(ins.op):
        exact = _directed(ins, lambda x, y, z: x * y + z, [a, b, c])
        return d.step(ins, target, kind, _finish(ins, exact))
    wide = d.scratch(np.float64, "fma")

    def compute(out: np.ndarray) -> None:
        np.multiply(a(), b(), wide, dtype=np.float64)
        np.add(wide, c(), wide)
        out[...] = wide

    return d.step(ins, target, kind, _finish(ins, compute))


def _fma_half(d: Decoder, ins: Instruction) -> Step:
    a, b, c = (d.src(arg, ins.type) for arg in ins.args[1:4])
    kind, base = ins.type, halves.base_type(ins.type)

    def compute(out: np.ndarray) -> None:
        result = halves.fma(kind, a, b, c)
        if ins.has("relu") or ins.has("sat"):
            value = np.fmax(halves.split(kind, result), np.float32(0))
            value = np.fmin(value, np.float32(1)) if ins.has("sat") else value
            result = halves.from_float(base, value).view(out.dtype)
        out[...] = result

    return d.step(ins, ins.args[0], kind, compute)


def extremum(d: Decoder, ins: Instruction, largest: bool) -> Step:
    """min/max{.ftz}{.NaN}{.xorsign.abs}.type d, a, b{, c}.

    Without .NaN a number wins over NaN, two NaN give the canonical one; -0 is below +0.
    """
    kind, count = ins.type, len(ins.args) - 1
    xorsign = ins.has("xorsign")
    propagate = ins.has("NaN")

    def pick(a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        return ordered(a, b, largest, propagate, xorsign)

    if kind in HALF:
        return _half(d, ins, pick, 2)
    inputs = _inputs(d, ins, count)

    def compute(out: np.ndarray) -> None:
        first, *rest = [get() for get in inputs]
        for value in rest:
            first = pick(first, value)
        out[...] = first

    simple = not (propagate or xorsign or ins.has("ftz")) and count == 2
    if simple:
        function = np.fmax if largest else np.fmin
        a, b = (get() for get in inputs)
        return d.step(ins, ins.args[0], kind, lambda out: function(a, b, out))
    return d.step(ins, ins.args[0], kind, _finish(ins, compute))


def ordered(
    a: np.ndarray, b: np.ndarray, largest: bool, propagate: bool, xorsign: bool
) -> np.ndarray:
    """The greater or lesser of two floats under the PTX rules of NaN and signs."""
    sign = np.signbit(a) ^ np.signbit(b)
    if xorsign:
        a, b = np.abs(a), np.abs(b)
    if propagate:
        result = np.maximum(a, b) if largest else np.minimum(a, b)
    else:
        result = np.fmax(a, b) if largest else np.fmin(a, b)
    if xorsign:
        return np.where(sign, -result, result)
    zeros = (a == 0) & (b == 0) & sign
    if zeros.any():
        zero = result.dtype.type(0.0 if largest else -0.0)
        result = np.where(zeros, zero, result)
    return result


def approximate(d: Decoder, ins: Instruction, function: Callable[[np.ndarray], np.ndarray]) -> Step:
    """A function of one operand, computed in float64 for f32 so that every machine agrees."""
    kind = ins.type
    if kind in HALF:
        a = d.src(ins.args[1], kind)

        def half(out: np.ndarray) -> None:
            wide = function(halves.split(kind, a).astype(np.float64))
            out[...] = halves.from_double(halves.base_type(kind), wide).view(out.dtype)

        return d.step(ins, ins.args[0], kind, half)
    (get,) = _inputs(d, ins, 1)

    def compute(out: np.ndarray) -> None:
        out[...] = function(get().astype(np.float64))

    return d.step(ins, ins.args[0], kind, _finish(ins, compute))
