"""setp, set, selp, slct: comparisons and choices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fkjit.interp import halves
from fkjit.interp.arith_float import HALF, flush, is_float
from fkjit.interp.decode import Decoder, Step, opcode
from fkjit.interp.ptx import DTYPE, Instruction, Pair

_COMPARE: dict[str, Any] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater,
    "hs": np.greater_equal,
}  # fmt: skip
_COMBINE: dict[str, Any] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
_UNORDERED = ("equ", "neu", "ltu", "leu", "gtu", "geu")
_FLAGS = frozenset(("ftz", *_COMBINE))


def comparison(name: str, floating: bool) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """The test: ordered ones are false with NaN, unordered ones (equ, …) are true."""
    if name == "num":
        return lambda a, b: ~(np.isnan(a) | np.isnan(b))
    if name == "nan":
        return lambda a, b: np.isnan(a) | np.isnan(b)
    if floating and name in _UNORDERED:
        test = _COMPARE[name[:2]]
        return lambda a, b: test(a, b) | np.isnan(a) | np.isnan(b)
    if floating and name == "ne":
        return lambda a, b: (a != b) & ~(np.isnan(a) | np.isnan(b))
    return _COMPARE[name]


def _operands(d: Decoder, ins: Instruction, kind: str) -> Callable[[], list[np.ndarray]]:
    values = [d.src(arg, kind) for arg in ins.args[1:3]]
    if kind in HALF:
        size = max(value.size for value in values)
        return lambda: [halves.split(kind, np.broadcast_to(v, (size,))) for v in values]
    if ins.has("ftz") and kind == "f32":
        return lambda: [flush(value) for value in values]
    return lambda: values


@opcode("setp")
def setp(d: Decoder, ins: Instruction) -> Step:
    """setp.cmp{.bool}{.ftz}.type p{|q}, a, b{, {!}c}; with x2 types p and q are the two halves."""
    if any(part not in _FLAGS for part in ins.op[2:-1]):
        raise ValueError(f"modifier .{ins.op[2]}")
    kind, target = ins.type, ins.args[0]
    test = comparison(ins.op[1], is_float(kind))
    combine = next((_COMBINE[part] for part in ins.op if part in _COMBINE), None)
    get = _operands(d, ins, kind)
    if not isinstance(target, Pair) and combine is None:
        if isinstance(test, np.ufunc) and kind not in HALF and not ins.has("ftz"):
            return _plain(d, ins, test, get())
        return d.step(ins, target, "pred", lambda out: np.copyto(out, test(*get())))
    return _general(d, ins, test, combine, get)


def _plain(d: Decoder, ins: Instruction, test: Any, values: list[np.ndarray]) -> Step:
    a, b = values
    return d.step(ins, ins.args[0], "pred", lambda out: test(a, b, out))


def _general(d: Decoder, ins: Instruction, test: Any, combine: Any, get: Any) -> Step:
    """Two destinations, or a predicate to combine with."""
    pair = ins.args[0]
    both = (pair.first, pair.second) if isinstance(pair, Pair) else (pair,)
    outs = [d.dst(target, "pred") for target in both]
    with_predicate = d.registers.predicate(ins.args[3]) if combine else None
    packed = ins.type.endswith("x2")

    def run(group: Any) -> None:
        result = test(*get())
        results = [result[0::2], result[1::2]] if packed else [result, ~result]
        for out, value in zip(outs, results, strict=False):
            if with_predicate is not None:
                register, negated = with_predicate
                value = combine(value, ~register if negated else register)
            if group.write is None:
                out[...] = value
            else:
                np.copyto(out, value, where=group.write)

    return run


@opcode("set")
def set_(d: Decoder, ins: Instruction) -> Step:
    """set.cmp{.ftz}.dtype.stype d, a, b: 1.0 or all ones where the test holds."""
    if any(part != "ftz" for part in ins.op[2:-2]):
        raise ValueError(f"modifier .{ins.op[2]}")
    result, kind = ins.op[-2], ins.type
    test, get = comparison(ins.op[1], is_float(kind)), _operands(d, ins, kind)
    true = {"f32": 0x3F800000, "f16": 0x3C00, "f16x2": 0x3C00, "bf16": 0x3F80, "bf16x2": 0x3F80}
    packed = kind.endswith("x2")
    width = 2 if packed or result in ("f16", "bf16", "u16", "s16") else 4
    ones = np.array([true.get(result, (1 << 8 * width) - 1)]).astype(f"u{width}")
    target = ins.args[0]

    def compute(out: np.ndarray) -> None:
        value = np.where(test(*get()), ones, ones.dtype.type(0))
        out[...] = np.ascontiguousarray(value).view(out.dtype)

    return d.step(ins, target, f"u{32 if packed else 8 * width}", compute)


@opcode("selp")
def selp(d: Decoder, ins: Instruction) -> Step:
    """selp d, a, b, p: a where p."""
    a, b = d.src(ins.args[1], ins.type), d.src(ins.args[2], ins.type)
    p, negated = d.registers.predicate(ins.args[3])
    if negated:
        a, b = b, a
    return d.step(ins, ins.args[0], ins.type, lambda out: np.copyto(out, np.where(p, a, b)))


@opcode("slct")
def slct(d: Decoder, ins: Instruction) -> Step:
    """slct.dtype.s32/f32 d, a, b, c: a where c >= 0 (NaN is not)."""
    result, kind = ins.op[-2], ins.type
    a, b = d.src(ins.args[1], result), d.src(ins.args[2], result)
    c = d.src(ins.args[3], kind)
    zero = DTYPE[kind].type(0)
    return d.step(ins, ins.args[0], result, lambda out: np.copyto(out, np.where(c >= zero, a, b)))
