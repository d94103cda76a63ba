"""add, sub, mul, fma, div, sqrt, rcp and the approximate functions of floating types.

Results are correctly rounded in the mode the instruction asks for, with one exception: fma.rn.f32
is computed in float64 (the product is exact there) and rounded to float32, a second rounding that
can differ from the true result by one unit in the last place about once in 2^29 operations.
Functions called .approx are computed accurately, so they need not match a GPU's bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fkjit.interp import halves
from fkjit.interp.decode import Compute, Decoder, Step, only
from fkjit.interp.ptx import Instruction, Operand, words
from fkjit.interp.rounding import directed64, fma64, quantise, sum_to_odd

HALF = frozenset(("f16", "bf16", "f16x2", "bf16x2"))
DIRECTED = ("rz", "rm", "rp")
_ROUND = "rn rz rm rp"
_TINY = np.float32(2.0**-126)
_TINY_HALF = {"f16": np.float32(2.0**-14), "bf16": _TINY}
_MIXED = ("f16", "bf16")  # narrow operands of an f32 add, sub or fma

# Modifiers by opcode and type; a (opcode, type) that is not here does not exist.
_ALLOWED = {
    **{(name, "f32"): words(f"{_ROUND} ftz sat") for name in ("add", "sub", "mul", "fma", "mad")},
    **{(name, "f32x2"): words(f"{_ROUND} ftz") for name in ("add", "sub", "mul", "fma")},
    **{(name, "f64"): words(_ROUND) for name in ("add", "sub", "mul", "fma", "mad", "div")},
    **{(name, kind): words("rn ftz sat") for name in ("add", "sub", "mul")
       for kind in ("f16", "f16x2")},
    **{(name, kind): words("rn") for name in ("add", "sub", "mul") for kind in ("bf16", "bf16x2")},
    **{("fma", kind): words("rn ftz sat relu") for kind in ("f16", "f16x2")},
    **{("fma", kind): words("rn relu") for kind in ("bf16", "bf16x2")},
    ("div", "f32"): words(f"{_ROUND} approx full ftz"),
    **{(name, "f32"): words(f"{_ROUND} approx ftz") for name in ("sqrt", "rcp")},
    ("sqrt", "f64"): words(_ROUND), ("rcp", "f64"): words(f"{_ROUND} approx ftz"),
    ("rsqrt", "f64"): words("approx ftz"),
    **{(name, "f32"): words("approx ftz") for name in ("rsqrt", "sin", "cos", "lg2", "ex2")},
    **{("ex2", kind): words("approx ftz") for kind in HALF},
    **{("tanh", kind): words("approx") for kind in (*HALF, "f32")},
}  # fmt: skip
_FUNCTIONS: dict[str, Any] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "sqrt": np.sqrt,
    "rcp": lambda x: 1 / x, "rsqrt": lambda x: 1 / np.sqrt(x), "ex2": np.exp2, "lg2": np.log2,
    "sin": np.sin, "cos": np.cos, "tanh": np.tanh,
}  # fmt: skip


def is_float(kind: str) -> bool:
    """Whether a PTX type is a floating one."""
    return kind in HALF or kind in ("f32", "f64", "f32x2")


def flush(values: np.ndarray, tiny: np.float32 = _TINY) -> np.ndarray:
    """Subnormal float32 values -> zero of the same sign (.ftz)."""
    return np.where(np.abs(values) < tiny, np.copysign(np.float32(0), values), values)


def clamp(ins: Instruction, values: np.ndarray) -> np.ndarray:
    """.sat (NaN becomes 0) and .relu (NaN stays)."""
    zero, one = values.dtype.type(0), values.dtype.type(1)
    if ins.has("sat"):
        values = np.fmin(np.fmax(values, zero), one)
    return np.where(values <= 0, zero, values) if ins.has("relu") else values


def floats(d: Decoder, operand: Operand, kind: str, ftz: bool) -> Callable[[], np.ndarray]:
    """A getter of an operand's values: halves as float32, two of them a lane for x2."""
    raw = d.src(operand, kind)
    if kind not in HALF:
        return (lambda: flush(raw)) if ftz and kind == "f32" else lambda: raw
    base, lanes = halves.base_type(kind), d.machine.layout.lanes
    tiny = _TINY_HALF[base]

    def get() -> np.ndarray:
        whole = raw if raw.size > 1 else np.broadcast_to(raw, (lanes,))
        wide = halves.split(kind, whole)
        return flush(wide, tiny) if ftz else wide

    return get


def _check(ins: Instruction) -> None:
    allowed = _ALLOWED.get((ins.op[0], ins.type))
    if allowed is None:
        raise ValueError(f"type .{ins.type}")
    only(ins, (*allowed, ins.type))
    if ins.op[0] == "rcp" and ins.type == "f64" and ins.has("approx") != ins.has("ftz"):
        raise ValueError("rcp.approx.f64 is .ftz")


def arithmetic(d: Decoder, ins: Instruction, count: int = 2) -> Step:
    """add, sub, mul, div (count 2), sqrt, rcp and other functions (1), fma and mad (3)."""
    if ins.type in _MIXED and ins.op[-2] == "f32":
        return _mixed(d, ins, count)
    _check(ins)
    kind, name, target = ins.type, ins.op[0], ins.args[0]
    if kind in HALF:
        return _half(d, ins, count)
    if kind == "f32x2":
        return _two(d, ins, count)
    plain = not (ins.has("ftz") or ins.has("sat") or _mode(ins) or name not in _UFUNC)
    if plain:
        function = _FUNCTIONS[name]
        a, *rest = (d.src(arg, kind) for arg in ins.args[1 : 1 + count])
        if rest:
            (b,) = rest
            return d.step(ins, target, kind, lambda out: function(a, b, out))
        return d.step(ins, target, kind, lambda out: function(a, out))
    gets = [floats(d, arg, kind, ins.has("ftz")) for arg in ins.args[1 : 1 + count]]
    if count == 3 and kind == "f32" and not _mode(ins):
        return d.step(ins, target, kind, finish(ins, _fma32(d, gets)))
    return d.step(ins, target, kind, finish(ins, _general(ins, gets)))


_UFUNC = ("add", "sub", "mul", "div", "sqrt")


def _mode(ins: Instruction) -> str:
    """The rounding mode if it is not to the nearest."""
    return next((part for part in ins.op if part in DIRECTED), "")


def finish(ins: Instruction, compute: Compute) -> Compute:
    """Apply .ftz, .sat and .relu to a float32 result."""
    if not ({"ftz", "sat", "relu"} & set(ins.op)):
        return compute

    def finished(out: np.ndarray) -> None:
        compute(out)
        if ins.has("ftz") and out.dtype == np.float32:
            out[...] = flush(out)
        if ins.has("sat") or ins.has("relu"):
            out[...] = clamp(ins, out)

    return finished


def _fma32(d: Decoder, gets: list[Callable[[], np.ndarray]]) -> Compute:
    a, b, c = gets
    wide = d.scratch(np.float64, "fma")

    def compute(out: np.ndarray) -> None:
        np.multiply(a(), b(), wide, dtype=np.float64)
        np.add(wide, c(), wide)
        out[...] = wide

    return compute


def _general(ins: Instruction, gets: list[Callable[[], np.ndarray]]) -> Compute:
    """Any operation of f32 through float64, or of f64, in any mode."""
    name, mode = "fma" if ins.op[0] == "mad" else ins.op[0], _mode(ins)
    if ins.type == "f64":
        function = fma64 if name == "fma" else _FUNCTIONS[name]
        if mode:
            plain = (lambda a, b, c: a * b + c) if name == "fma" else function
            return lambda out: np.copyto(out, directed64(name, plain, mode, _all(gets)))
        if ins.has("ftz"):
            return lambda out: np.copyto(out, _upper_word(function, *_all(gets)))
        return lambda out: np.copyto(out, function(*_all(gets)))
    if not mode and name in _UFUNC:
        return lambda out: np.copyto(out, _FUNCTIONS[name](*_all(gets)))
    if not mode:
        return lambda out: np.copyto(out, _wide(name, "rn", gets), "unsafe")
    return lambda out: np.copyto(out, quantise(_wide(name, mode, gets), "f32", mode), "unsafe")


def _all(gets: list[Callable[[], np.ndarray]]) -> tuple[np.ndarray, ...]:
    return tuple(get() for get in gets)


def _upper_word(function: Callable[..., np.ndarray], value: np.ndarray) -> np.ndarray:
    """rcp and rsqrt.approx.ftz.f64: subnormals are zeros, the lower 32 bits of the result too."""
    tiny = np.abs(value) < 2.0**-1022
    exact = function(np.where(tiny, np.copysign(0.0, value), value))
    exact = np.where(np.abs(exact) < 2.0**-1022, np.copysign(0.0, exact), exact)
    return (exact.view(np.uint64) & np.uint64(0xFFFFFFFF00000000)).view(np.float64)


def _wide(name: str, mode: str, gets: list[Callable[[], np.ndarray]]) -> np.ndarray:
    """The float64 result, which rounds to fewer bits as the exact one does."""
    values = [np.asarray(get(), np.float64) for get in gets]
    if name == "fma":
        a, b, c = values
        return sum_to_odd(a * b, c, mode)
    if name in ("add", "sub"):
        a, b = values
        return sum_to_odd(a, -b if name == "sub" else b, mode)
    return np.asarray(_FUNCTIONS[name](*values))


def _half(d: Decoder, ins: Instruction, count: int) -> Step:
    kind, base = ins.type, halves.base_type(ins.type)
    gets = [floats(d, arg, kind, ins.has("ftz")) for arg in ins.args[1 : 1 + count]]
    direct = ins.op[0] in ("add", "sub") or (ins.op[0] == "mul" and base == "f16")
    name = ins.op[0]

    def compute(out: np.ndarray) -> None:
        if direct:  # one rounding in effect: 24 bits are at least twice 11 plus 2
            bits = halves.from_float(base, clamp(ins, _FUNCTIONS[name](*_all(gets))))
        else:
            bits = halves.from_double(base, clamp(ins, _wide(name, "rn", gets)))
        if ins.has("ftz"):
            bits = halves.flush(base, bits)
        out[...] = bits.view(out.dtype)

    return d.step(ins, ins.args[0], kind, compute)


def _two(d: Decoder, ins: Instruction, count: int) -> Step:
    """Two f32 in each register."""
    lanes, mode = d.machine.layout.lanes, _mode(ins) or "rn"

    def both(operand: Operand) -> Callable[[], np.ndarray]:
        raw = d.src(operand, "f32x2")

        def get() -> np.ndarray:
            wide = np.ascontiguousarray(np.broadcast_to(raw, (lanes,))).view(np.float32)
            return flush(wide) if ins.has("ftz") else wide

        return get

    gets = [both(arg) for arg in ins.args[1 : 1 + count]]

    def compute(out: np.ndarray) -> None:
        result = quantise(_wide(ins.op[0], mode, gets), "f32", mode).astype(np.float32)
        out[...] = (flush(result) if ins.has("ftz") else result).view(np.uint64)

    return d.step(ins, ins.args[0], "f32x2", compute)


def _mixed(d: Decoder, ins: Instruction, count: int) -> Step:
    """add, sub, fma.f32.f16: the last operand and the result are f32, the others halves."""
    if ins.op[0] not in ("add", "sub", "fma"):
        raise ValueError(f"type .{ins.type}")
    only(ins, (*words(f"{_ROUND} sat f32"), ins.type))
    mode = _mode(ins) or "rn"
    kinds = [ins.type] * (count - 1) + ["f32"]
    gets = [floats(d, arg, kind, False) for arg, kind in zip(ins.args[1:], kinds, strict=True)]

    def compute(out: np.ndarray) -> None:
        out[...] = clamp(ins, quantise(_wide(ins.op[0], mode, gets), "f32", mode))

    return d.step(ins, ins.args[0], "f32", compute)


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
        first, *rest = _all(gets)
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
