"""min and max of floating types."""

from __future__ import annotations

import numpy as np

from fkjit.interp.core.ptx import Instruction, words
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.machine.opcodes import Step, only
from fkjit.interp.numbers import halves
from fkjit.interp.ops.floating import HALF, all_of, floats


def extremum(d: Decoder, ins: Instruction, largest: bool) -> Step:
    """min/max{.ftz}{.NaN}{.xorsign}{.abs}.type d, a, b{, c}.

    Without .NaN a number wins over NaN, two NaN give the canonical one; -0 is below +0.
    """
    kind, count, f64 = ins.type, len(ins.args) - 1, ins.type == "f64"
    only(ins, (kind,) if f64 else (*words("ftz NaN xorsign abs"), kind))
    if kind == "f32x2":
        raise ValueError(f"type .{kind}")
    if ins.has("xorsign") and not ins.has("abs"):
        raise ValueError(".xorsign without .abs")
    if count > 2 + (kind == "f32") or (ins.has("xorsign") and count == 3):
        raise ValueError(f"{count} operands")
    simple = ins.op[1:] == (kind,) and count == 2 and kind not in HALF
    if simple:
        function = np.fmax if largest else np.fmin
        a, b = (d.src(arg, kind) for arg in ins.args[1:])
        return d.step(ins, ins.args[0], kind, lambda out: function(a, b, out))
    gets = [floats(d, arg, kind, ins.has("ftz")) for arg in ins.args[1:]]

    def compute(out: np.ndarray) -> None:
        first, *rest = all_of(gets)
        for value in rest:
            first = ordered(first, value, largest, ins)
        if kind in HALF:
            first = halves.from_float(halves.base_type(kind), first).view(out.dtype)
        out[...] = first

    return d.step(ins, ins.args[0], kind, compute)


def ordered(a: np.ndarray, b: np.ndarray, largest: bool, ins: Instruction) -> np.ndarray:
    """The greater or lesser of two floats under the PTX rules of NaN and signs."""
    sign = np.signbit(a) ^ np.signbit(b)
    if ins.has("abs"):
        a, b = np.abs(a), np.abs(b)
    if ins.has("NaN"):
        result = np.maximum(a, b) if largest else np.minimum(a, b)
    else:
        result = np.fmax(a, b) if largest else np.fmin(a, b)
    if ins.has("xorsign"):
        return np.where(sign, -result, result)
    zeros = (a == 0) & (b == 0) & (np.signbit(a) ^ np.signbit(b))
    if zeros.any():
        zero = result.dtype.type(0.0 if largest else -0.0)
        result = np.where(zeros, zero, result)
    return result
