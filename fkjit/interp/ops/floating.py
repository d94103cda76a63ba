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

from fkjit.interp.core.ptx import Instruction, Operand, words
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.machine.opcodes import Compute, Step, only
from fkjit.interp.numbers import halves
from fkjit.interp.numbers.flush import flush, flush_rounded
from fkjit.interp.numbers.rounding import directed64, fma64, quantise, sum_to_odd

HALF = frozenset(("f16", "bf16", "f16x2", "bf16x2"))
DIRECTED = ("rz", "rm", "rp")
_ROUND = "rn rz rm rp"
OUTSIDE = np.uint16(0x7FF7)
_TINY_HALF = {"f16": np.float32(2.0**-14), "bf16": np.float32(2.0**-126)}
_MIXED = ("f16", "bf16")  # narrow operands of an f32 add, sub or fma

# Modifiers by opcode and type; a (opcode, type) that is not here does not exist.
_ALLOWED = {
    **{(name, "f32"): words(f"{_ROUND} ftz sat") for name in ("add", "sub", "mul", "fma", "mad")},
    **{(name, "f32x2"): words(f"{_ROUND} ftz") for name in ("add", "sub", "mul", "fma")},
    **{(name, "f64"): words(_ROUND) for name in ("add", "sub", "mul", "fma", "mad", "div")},
    **{(name, kind): words("rn ftz sat") for name in ("add", "sub", "mul")
       for kind in ("f16", "f16x2")},
    **{(name, kind): words("rn") for name in ("add", "sub", "mul") for kind in ("bf16", "bf16x2")},
    **{("fma", kind): words("rn ftz sat relu oob") for kind in ("f16", "f16x2")},
    **{("fma", kind): words("rn relu oob") for kind in ("bf16", "bf16x2")},
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
    if ins.has("oob") and (ins.has("ftz") or ins.has("sat")):
        raise ValueError("modifier .oob with .ftz or .sat")


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
    plain = not (
        ins.has("ftz")
        or (name == "div" and ins.has("approx"))
        or ins.has("sat")
        or _mode(ins)
        or name not in _UFUNC
    )
    if plain:
        function = _FUNCTIONS[name]
        a, *rest = (d.src(arg, kind) for arg in ins.args[1 : 1 + count])
        if rest:
            (b,) = rest
            return d.step(ins, target, kind, lambda out: function(a, b, out))
        return d.step(ins, target, kind, lambda out: function(a, out))
    gets = [floats(d, arg, kind, ins.has("ftz")) for arg in ins.args[1 : 1 + count]]
    exact = lambda: _wide("fma" if name == "mad" else name, _mode(ins) or "rn", gets)  # noqa: E731
    if count == 3 and kind == "f32" and not _mode(ins):
        return d.step(ins, target, kind, finish(ins, _fma32(d, gets), exact))
    return d.step(ins, target, kind, finish(ins, _general(ins, gets), exact))


_UFUNC = ("add", "sub", "mul", "div", "sqrt")


def _mode(ins: Instruction) -> str:
    """The rounding mode if it is not to the nearest."""
    return next((part for part in ins.op if part in DIRECTED), "")


def finish(ins: Instruction, compute: Compute, exact: Callable[[], np.ndarray]) -> Compute:
    """Apply .ftz, .sat and .relu to a float32 result; `exact` gives it in float64."""
    if not ({"ftz", "sat", "relu"} & set(ins.op)):
        return compute

    def finished(out: np.ndarray) -> None:
        compute(out)
        if ins.has("ftz") and out.dtype == np.float32:
            out[...] = flush_rounded(out, exact, _mode(ins) or "rn")
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
            return lambda out: np.copyto(out, directed64(name, plain, mode, all_of(gets)))
        if ins.has("ftz"):
            return lambda out: np.copyto(out, _upper_word(function, *all_of(gets)))
        return lambda out: np.copyto(out, function(*all_of(gets)))
    if name == "div" and ins.has("approx"):
        return lambda out: np.copyto(out, _quotient(*all_of(gets)))
    if not mode and name in _UFUNC:
        return lambda out: np.copyto(out, _FUNCTIONS[name](*all_of(gets)))
    if not mode:
        return lambda out: np.copyto(out, _wide(name, "rn", gets), "unsafe")
    return lambda out: np.copyto(out, quantise(_wide(name, mode, gets), "f32", mode), "unsafe")


def all_of(gets: list[Callable[[], np.ndarray]]) -> tuple[np.ndarray, ...]:
    return tuple(get() for get in gets)


def _upper_word(function: Callable[..., np.ndarray], value: np.ndarray) -> np.ndarray:
    """rcp and rsqrt.approx.ftz.f64: subnormals are zeros, lower words neither read nor made."""
    upper = np.uint64(0xFFFFFFFF00000000)
    value = (np.ascontiguousarray(value).view(np.uint64) & upper).view(np.float64)
    tiny = np.abs(value) < 2.0**-1022
    exact = function(np.where(tiny, np.copysign(0.0, value), value))
    exact = np.where(np.abs(exact) < 2.0**-1022, np.copysign(0.0, exact), exact)
    return (exact.view(np.uint64) & upper).view(np.float64)


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """div.approx.f32: beyond 2^126 the reciprocal of the divisor is zero."""
    result = np.asarray(a / b)
    large = (np.abs(b) > np.float32(2.0**126)) & np.isfinite(b)
    return np.where(large, a * np.copysign(np.float32(0), b), result) if large.any() else result


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
    outside = _outside(d, ins) if ins.has("oob") else None
    direct = ins.op[0] in ("add", "sub") or (ins.op[0] == "mul" and base == "f16")
    name = ins.op[0]

    def compute(out: np.ndarray) -> None:
        # directly there is one rounding in effect: 24 bits are at least twice 11 plus 2
        value = _FUNCTIONS[name](*all_of(gets)) if direct else _wide(name, "rn", gets)
        value = clamp(ins, value)
        bits = (halves.from_float if direct else halves.from_double)(base, value)
        if ins.has("ftz"):
            near = flush_rounded(halves.to_float(base, bits), lambda: value.astype("f8"), kind=base)
            bits = np.where(near == 0, bits & np.uint16(0x8000), bits)
        if outside is not None:
            bits = np.where(outside(), np.uint16(0), bits)
        out[...] = bits.view(out.dtype)

    return d.step(ins, ins.args[0], kind, compute)


def _outside(d: Decoder, ins: Instruction) -> Callable[[], np.ndarray]:
    """Which halves of a and b are the NaN that tensor copies fill in (fma.oob makes them +0)."""
    raws, lanes = [d.src(arg, ins.type) for arg in ins.args[1:3]], d.machine.layout.lanes

    def found() -> np.ndarray:
        wide = [np.ascontiguousarray(np.broadcast_to(raw, (lanes,))) for raw in raws]
        return np.logical_or(*(raw.view(np.uint16) == OUTSIDE for raw in wide))

    return found


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
