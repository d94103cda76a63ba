"""cvt: between integers, floats and halves, with PTX's rounding, saturation and NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fkjit.interp import halves
from fkjit.interp.arith_float import flush, round_directed
from fkjit.interp.decode import Decoder, Step, opcode
from fkjit.interp.ptx import DTYPE, SIZE, Instruction

Values = Callable[[], np.ndarray]
_TO_INTEGRAL: dict[str, Any] = {
    "rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil,
}  # fmt: skip
_KNOWN = frozenset(("rn", "rz", "rm", "rp", "rna", "ftz", "sat", "relu", *_TO_INTEGRAL))


@opcode("cvt")
def cvt(d: Decoder, ins: Instruction) -> Step:
    """cvt{.rnd}{.ftz}{.sat}{.relu}.dtype.atype d, a (two sources for the packed types)."""
    to, of = ins.op[-2], ins.op[-1]
    if any(part not in _KNOWN for part in ins.op[1:-2]):
        raise ValueError("modifier")
    if to in ("f16x2", "bf16x2") and of == "f32":
        return _pack(d, ins, to)
    if to == "tf32":
        return _tf32(d, ins)
    for kind in (to, of):
        if kind not in DTYPE or kind.endswith("x2"):
            raise ValueError(f"type .{kind}")
    get = _source(d, ins, of)
    if to in ("f16", "bf16"):
        convert = _to_half(ins, to, of)
    elif to in ("f32", "f64"):
        convert = _to_float(ins, to, of)
    else:
        convert = _to_integer(ins, to, of)
    return _store(d, ins, to, lambda: convert(get()))


def _source(d: Decoder, ins: Instruction, of: str) -> Values:
    """The operand's values: halves as float32."""
    raw = d.src(ins.args[1], of)
    if of in ("f16", "bf16"):
        return lambda: halves.to_float(of, np.ascontiguousarray(raw))
    if of == "f32" and ins.has("ftz"):
        return lambda: flush(raw)
    return lambda: raw


def _store(d: Decoder, ins: Instruction, to: str, values: Values) -> Step:
    """Into a register at least as wide: signed results are sign-extended."""
    out = d.dst(ins.args[0], None)
    width, size = out.dtype.itemsize, SIZE[to]
    if width == size:
        return d.step(ins, ins.args[0], to, lambda into: np.copyto(into, values()))
    wide = np.dtype(f"{'i' if to[0] == 's' else 'u'}{width}")

    def compute(into: np.ndarray) -> None:
        result = values()
        narrow = result if result.dtype.kind in "iu" else result.view(f"u{size}")
        into[...] = narrow.astype(wide).view(into.dtype)

    return d.step(ins, ins.args[0], None, compute)


def _limit(ins: Instruction, values: np.ndarray) -> np.ndarray:
    """.sat (NaN becomes 0) and .relu."""
    if ins.has("sat"):
        values = np.fmin(np.fmax(values, values.dtype.type(0)), values.dtype.type(1))
    return np.where(values < 0, values.dtype.type(0), values) if ins.has("relu") else values


def _to_half(ins: Instruction, to: str, of: str) -> Callable[[np.ndarray], np.ndarray]:
    integral = _integral(ins)
    if ins.has("rm") or ins.has("rp") or ins.has("rna"):
        raise ValueError("rounding of halves other than .rn, .rz")

    def convert(values: np.ndarray) -> np.ndarray:
        if integral is not None:
            values = integral(values)
        if values.dtype == np.float32:
            limited = _limit(ins, values)
            return halves.truncate(to, limited) if ins.has("rz") else halves.from_float(to, limited)
        wide = _limit(ins, values.astype(np.float64))
        if ins.has("rz"):
            raise ValueError(f".rz from .{of}")
        return halves.from_double(to, wide)

    return convert


def _to_float(ins: Instruction, to: str, of: str) -> Callable[[np.ndarray], np.ndarray]:
    dtype, integral = DTYPE[to], _integral(ins)
    mode = next((part for part in ("rz", "rm", "rp") if ins.has(part)), None)
    if mode and (to == "f64" or of in ("u64", "s64")):
        raise ValueError(f"modifier .{mode}")

    def convert(values: np.ndarray) -> np.ndarray:
        if integral is not None:
            values = integral(values)
        if mode:
            result = round_directed(values.astype(np.float64), mode)
        else:
            result = values.astype(dtype)
        if ins.has("ftz") and to == "f32":
            result = flush(result)
        return _limit(ins, result)

    return convert


def _to_integer(ins: Instruction, to: str, of: str) -> Callable[[np.ndarray], np.ndarray]:
    dtype = DTYPE[to]
    limits = np.iinfo(dtype)
    if of[0] not in "fb" or (of[0] == "b" and of != "bf16"):
        if not ins.has("sat"):
            return lambda values: values.astype(dtype)
        return lambda values: clamp_integers(values, limits).astype(dtype)
    rounding = _integral(ins)
    if rounding is None:
        raise ValueError("a float to an integer needs .rni, .rzi, .rmi or .rpi")

    def convert(values: np.ndarray) -> np.ndarray:
        whole = rounding(values.astype(np.float64))
        whole = np.where(np.isnan(whole), 0.0, whole)
        high, low = whole >= float(limits.max), whole <= float(limits.min)
        result = np.where(high | low, 0.0, whole).astype(dtype)
        result = np.where(high, dtype.type(limits.max), result)
        return np.where(low, dtype.type(limits.min), result)

    return convert


def clamp_integers(values: np.ndarray, limits: Any) -> np.ndarray:
    """Integers into the range of another integer type."""
    own = np.iinfo(values.dtype)
    return np.clip(values, max(own.min, limits.min), min(own.max, limits.max))


def _integral(ins: Instruction) -> Any:
    return next((_TO_INTEGRAL[part] for part in ins.op if part in _TO_INTEGRAL), None)


def _pack(d: Decoder, ins: Instruction, to: str) -> Step:
    """cvt.f16x2.f32 d, a, b: a becomes the upper half, b the lower."""
    kind = halves.base_type(to)
    if ins.has("sat") or ins.has("rm") or ins.has("rp"):
        raise ValueError("modifier")
    high, low = d.src(ins.args[1], "f32"), d.src(ins.args[2], "f32")
    narrow = halves.truncate if ins.has("rz") else halves.from_float
    pair = d.scratch(np.uint32, "cvt pair")
    parts = pair.view(np.uint16)

    def compute(out: np.ndarray) -> None:
        parts[1::2] = narrow(kind, _limit(ins, high))
        parts[0::2] = narrow(kind, _limit(ins, low))
        out[...] = pair

    return d.step(ins, ins.args[0], "b32", compute)


def _tf32(d: Decoder, ins: Instruction) -> Step:
    """cvt.rna.tf32.f32: ten fraction bits, ties away from zero; .rn ties to even."""
    a = d.src(ins.args[1], "f32").view(np.uint32)

    def compute(out: np.ndarray) -> None:
        odd = (a >> np.uint32(13)) & np.uint32(1)
        half = np.uint32(0x1000) if ins.has("rna") else np.uint32(0xFFF) + odd
        special = (a & np.uint32(0x7F800000)) == np.uint32(0x7F800000)
        out[...] = np.where(special, a, (a + half) & np.uint32(0xFFFFE000))

    return d.step(ins, ins.args[0], "b32", compute)
