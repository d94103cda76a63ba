"""Floats of 8, 6 and 4 bits (e4m3, e5m2, e2m3, e3m2, e2m1) and ue8m0 scales: their cvt forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from fkjit.interp.core.ptx import Instruction
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.machine.opcodes import Step, only
from fkjit.interp.numbers import halves
from fkjit.interp.numbers.rounding import FORMATS, quantise
from fkjit.interp.ops.floating import clamp, floats


@dataclass(frozen=True)
class _Code:
    """How a format is encoded: fraction bits, exponent bits, and the code of NaN."""

    fraction: int
    exponent: int
    nan: int  # the largest number where the format has no NaN

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.fraction


_CODES = {
    "e4m3x2": _Code(3, 4, 0x7F), "e5m2x2": _Code(2, 5, 0x7F), "e2m3x2": _Code(3, 2, 0x1F),
    "e3m2x2": _Code(2, 3, 0x1F), "e2m1x2": _Code(1, 2, 0x7),
}  # fmt: skip
_SCALE = "ue8m0x2"


def is_narrow(kind: str) -> bool:
    """Whether a type of cvt is one of two narrow floats."""
    return kind in _CODES or kind == _SCALE


@cache
def values_of(kind: str) -> np.ndarray:
    """The number that every code stands for (float64; NaN where there is none)."""
    code = _CODES[f"{kind}x2"]
    number = np.arange(1 << code.bits)
    exponent = number >> code.fraction & ((1 << code.exponent) - 1)
    fraction = number & ((1 << code.fraction) - 1)
    lowest = 1 - (1 << code.exponent - 1) + 1
    significand = fraction + np.where(exponent > 0, 1 << code.fraction, 0)
    value = np.ldexp(
        significand.astype(float), np.maximum(exponent, 1) + lowest - 1 - code.fraction
    )
    value = np.where(value > FORMATS[kind].largest, np.nan, value)
    if kind == "e5m2":
        value = np.where((exponent == 31) & (fraction == 0), np.inf, value)
    return np.where(number >> (code.bits - 1), -value, value)


def encode(kind: str, values: np.ndarray) -> np.ndarray:
    """Numbers -> codes (u8), to nearest even, beyond the largest number that number."""
    code, largest = _CODES[f"{kind}x2"], FORMATS[kind].largest
    wide = values.astype(np.float64)
    rounded = np.clip(quantise(wide, kind, "rn"), -largest, largest)
    positive = values_of(kind)[: 1 << (code.bits - 1)]
    table = positive[np.isfinite(positive)]
    found = np.searchsorted(table, np.abs(rounded)).astype(np.uint8)
    found |= np.where(np.signbit(wide), 1 << (code.bits - 1), 0).astype(np.uint8)
    return np.where(np.isnan(wide), np.uint8(code.nan), found)


def cvt(d: Decoder, ins: Instruction) -> Step:
    """Two numbers f32, f16x2 or bf16x2 to two narrow ones of 8 bits each (4 for e2m1), and back."""
    to, of = ins.op[-2], ins.op[-1]
    if _SCALE in (to, of):
        return _scales(d, ins)
    if is_narrow(of):
        return _widen(d, ins, to, of)
    only(ins, ("rn", "satfinite", "relu", to, of))
    if not ins.has("rn") or not ins.has("satfinite"):
        raise ValueError("narrow floats need .rn.satfinite")
    kind, packed = to.removesuffix("x2"), to == "e2m1x2"
    halves_of = _pairs(d, ins, of)
    out = d.dst(ins.args[0], None)

    def compute(into: np.ndarray) -> None:
        low, high = (encode(kind, clamp(ins, v)).astype(into.dtype) for v in halves_of())
        into[...] = low | high << into.dtype.type(4 if packed else 8)

    if out.dtype.itemsize < (1 if packed else 2):
        raise ValueError("the destination is too narrow")
    return d.step(ins, ins.args[0], None, compute)


def _pairs(d: Decoder, ins: Instruction, of: str) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
    """A getter of the lower and the upper number of every lane."""
    if of == "f32":
        high, low = (floats(d, arg, "f32", False) for arg in ins.args[1:3])
        return lambda: (low(), high())
    if of not in ("f16x2", "bf16x2") or len(ins.args) != 2:
        raise ValueError(f"type .{of}")
    get = floats(d, ins.args[1], of, False)

    def split() -> tuple[np.ndarray, np.ndarray]:
        both = get()
        return both[0::2], both[1::2]

    return split


def _widen(d: Decoder, ins: Instruction, to: str, of: str) -> Step:
    """cvt.rn{.relu}.f16x2.e4m3x2 d, a: exact."""
    only(ins, ("rn", "relu", to, of))
    if to != "f16x2":
        raise ValueError(f"type .{to}")
    raw = d.src(ins.args[1], "b8" if of == "e2m1x2" else "b16")
    table, kind = values_of(of.removesuffix("x2")), of
    step, mask = (4, 15) if kind == "e2m1x2" else (8, (1 << _CODES[kind].bits) - 1)

    def compute(out: np.ndarray) -> None:
        low, high = (
            halves.from_double("f16", clamp(ins, table[raw >> raw.dtype.type(by) & mask]))
            for by in (0, step)
        )
        out[...] = low | high.astype(np.uint32) << np.uint32(16)

    return d.step(ins, ins.args[0], "b32", compute)


def _scales(d: Decoder, ins: Instruction) -> Step:
    """cvt.rz/.rp{.satfinite}.ue8m0x2.f32/.bf16x2 and cvt.rn.bf16x2.ue8m0x2: powers of two."""
    of = ins.type
    if of == _SCALE:
        only(ins, ("rn", "bf16x2", _SCALE))
        raw = d.src(ins.args[1], "b16")

        def widen(out: np.ndarray) -> None:
            low, high = (_power(raw >> np.uint16(by) & np.uint16(255)) for by in (0, 8))
            out[...] = low | high.astype(np.uint32) << np.uint32(16)

        return d.step(ins, ins.args[0], "b32", widen)
    only(ins, ("rz", "rp", "satfinite", _SCALE, of))
    get, up = _pairs(d, ins, of), ins.has("rp")

    def compute(out: np.ndarray) -> None:
        low, high = (_exponent(v, up, ins.has("satfinite")) for v in get())
        out[...] = low | high << np.uint16(8)

    return d.step(ins, ins.args[0], "b16", compute)


def _power(code: np.ndarray) -> np.ndarray:
    """ue8m0 codes -> bf16 bits: 2^(code - 127), NaN for 255, a subnormal for 0."""
    bits = np.where(code == 0, np.uint16(0x0040), code << np.uint16(7))
    return np.where(code == 255, halves.NAN_BITS, bits).astype(np.uint16)


def _exponent(value: np.ndarray, up: bool, finite: bool) -> np.ndarray:
    """Magnitudes -> ue8m0 codes, rounded up or toward zero."""
    fraction, exponent = np.frexp(np.abs(value.astype(np.float64)))
    power = np.where(fraction == 0.5, exponent - 1, exponent if up else exponent - 1)
    code = np.clip(np.where(value == 0, -127, power) + 127, 0, 255)
    code = np.where(np.isinf(value), 255, code)
    code = np.minimum(code, 254) if finite else code
    return np.where(np.isnan(value), 255, code).astype(np.uint16)
