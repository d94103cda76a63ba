"""setp, set, selp, slct: comparisons and choices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fkjit.interp.core.lanes import Group
from fkjit.interp.core.ptx import DTYPE, Instruction, Pair, words
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.machine.opcodes import Step, only, opcode
from fkjit.interp.ops.floating import HALF, floats, is_float

_COMPARE: dict[str, Any] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater,
    "hs": np.greater_equal,
}  # fmt: skip
_COMBINE: dict[str, Any] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
_ORDERED = words("eq ne lt le gt ge")
_BY_SIGN = {"b": words("eq ne"), "u": _ORDERED | words("lo ls hi hs"), "s": _ORDERED}
_UNORDERED = words("equ neu ltu leu gtu geu")
_INTEGERS = words("b16 b32 b64 u16 u32 u64 s16 s32 s64")
_CHOSEN = _INTEGERS | {"f32", "f64"}


def comparison(name: str, kind: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """The test: ordered ones are false with NaN, unordered ones (equ, …) are true."""
    if not is_float(kind) or kind == "f32x2":
        if kind not in _INTEGERS or name not in _BY_SIGN[kind[0]]:
            raise ValueError(f"comparison .{name} of .{kind}")
        return _COMPARE[name]
    if name == "num":
        return lambda a, b: ~(np.isnan(a) | np.isnan(b))
    if name == "nan":
        return lambda a, b: np.isnan(a) | np.isnan(b)
    if name in _UNORDERED:
        test = _COMPARE[name[:2]]
        return lambda a, b: test(a, b) | np.isnan(a) | np.isnan(b)
    if name not in _ORDERED:
        raise ValueError(f"comparison .{name} of .{kind}")
    if name == "ne":
        return lambda a, b: (a != b) & ~(np.isnan(a) | np.isnan(b))
    return _COMPARE[name]


def _operands(d: Decoder, ins: Instruction) -> Callable[[], list[np.ndarray]]:
    kind = ins.type
    if ins.has("ftz") and kind not in ("f32", "f16", "f16x2"):
        raise ValueError("modifier .ftz")
    if kind not in HALF and not ins.has("ftz"):
        values = [d.src(arg, kind) for arg in ins.args[1:3]]
        return lambda: values
    gets = [floats(d, arg, kind, ins.has("ftz")) for arg in ins.args[1:3]]
    return lambda: [get() for get in gets]


def _combination(ins: Instruction) -> Any:
    """The .and, .or or .xor with a third operand, or None."""
    found = next((_COMBINE[part] for part in ins.op if part in _COMBINE), None)
    if len(ins.args) != (3 if found is None else 4):
        raise ValueError(f"{len(ins.args)} operands")
    return found


@opcode("setp")
def setp(d: Decoder, ins: Instruction) -> Step:
    """setp.cmp{.bool}{.ftz}.type p{|q}, a, b{, {!}c}; with x2 types p and q are the two halves."""
    kind, target = ins.type, ins.args[0]
    only(ins, (ins.op[1], "ftz", *_COMBINE, kind))
    test, combine, get = comparison(ins.op[1], kind), _combination(ins), _operands(d, ins)
    if kind.endswith("x2") and not isinstance(target, Pair):
        raise ValueError("one destination of a pair of halves")
    if not isinstance(target, Pair) and combine is None:
        if isinstance(test, np.ufunc) and kind not in HALF and not ins.has("ftz"):
            a, b = get()
            return d.step(ins, target, "pred", lambda out: test(a, b, out))
        return d.step(ins, target, "pred", lambda out: np.copyto(out, test(*get())))
    return _general(d, ins, test, combine, get)


def _general(d: Decoder, ins: Instruction, test: Any, combine: Any, get: Any) -> Step:
    """Two destinations, or a predicate to combine with."""
    pair = ins.args[0]
    both = (pair.first, pair.second) if isinstance(pair, Pair) else (pair,)
    outs = [d.dst(target, "pred") for target in both]
    with_predicate = d.registers.predicate(ins.args[3]) if combine else None
    packed = ins.type.endswith("x2")

    def run(group: Group) -> None:
        result = test(*get())
        results = [result[0::2], result[1::2]] if packed else [result, ~result]
        if with_predicate is not None:
            register, negated = with_predicate
            other = ~register if negated else register
            results = [combine(value, other) for value in results]
        for out, value in zip(outs, results, strict=False):
            if group.write is None:
                out[...] = value
            else:
                np.copyto(out, value, where=group.write)

    return run


_TRUE = {"f32": 0x3F800000, "f16": 0x3C00, "f16x2": 0x3C00, "bf16": 0x3F80, "bf16x2": 0x3F80}
_RESULTS = words("u16 s16 u32 s32") | set(_TRUE)


@opcode("set")
def set_(d: Decoder, ins: Instruction) -> Step:
    """set.cmp{.bool}{.ftz}.dtype.stype d, a, b{, {!}c}: 1.0 or all ones where the test holds."""
    result, kind = ins.op[-2], ins.type
    only(ins, (ins.op[1], "ftz", *_COMBINE, result, kind))
    test, get, combine = comparison(ins.op[1], kind), _operands(d, ins), _combination(ins)
    packed = kind.endswith("x2")
    if result not in _RESULTS or (packed and combine) or (result.endswith("x2") and not packed):
        raise ValueError(f"type .{result}")
    other, negated = d.registers.predicate(ins.args[3]) if combine else (np.zeros(1, bool), False)
    width = 2 if packed or result in ("f16", "bf16", "u16", "s16") else 4
    ones = np.array([_TRUE.get(result, (1 << 8 * width) - 1)]).astype(f"u{width}")

    def compute(out: np.ndarray) -> None:
        truth = test(*get())
        if combine:
            truth = combine(truth, ~other if negated else other)
        value = np.where(truth, ones, ones.dtype.type(0))
        out[...] = np.ascontiguousarray(value).view(out.dtype)

    return d.step(ins, ins.args[0], f"u{32 if packed else 8 * width}", compute)


@opcode("selp")
def selp(d: Decoder, ins: Instruction) -> Step:
    """selp d, a, b, p: a where p."""
    only(ins, (ins.type,) if ins.type in _CHOSEN else ())
    a, b = d.src(ins.args[1], ins.type), d.src(ins.args[2], ins.type)
    p, negated = d.registers.predicate(ins.args[3])
    if negated:
        a, b = b, a
    return d.step(ins, ins.args[0], ins.type, lambda out: np.copyto(out, np.where(p, a, b)))


@opcode("slct")
def slct(d: Decoder, ins: Instruction) -> Step:
    """slct{.ftz}.dtype.s32/f32 d, a, b, c: a where c >= 0 (NaN is not)."""
    result, kind = ins.op[-2], ins.type
    if result not in _CHOSEN or kind not in ("s32", "f32"):
        raise ValueError(f"type .{result}.{kind}")
    only(ins, ("ftz", result, kind) if kind == "f32" else (result, kind))
    a, b = d.src(ins.args[1], result), d.src(ins.args[2], result)
    c, zero = d.src(ins.args[3], kind), DTYPE[kind].type(0)
    # .ftz makes subnormal negative numbers -0, which is not below 0
    least = np.float32(-(2.0**-126)) if ins.has("ftz") else zero
    test = np.greater if ins.has("ftz") else np.greater_equal
    return d.step(
        ins, ins.args[0], result, lambda out: np.copyto(out, np.where(test(c, least), a, b))
    )
