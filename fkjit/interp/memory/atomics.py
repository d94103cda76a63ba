"""atom and red: read-modify-write, in lane order when lanes meet at one address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fkjit.interp.core.accesses import ATOMIC
from fkjit.interp.core.lanes import Group
from fkjit.interp.core.ptx import DTYPE, SIZE, Instruction, Operand, Reg, words
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.machine.opcodes import OPCODES, Step, only, opcode
from fkjit.interp.memory.locate import Locator, by_space
from fkjit.interp.numbers import halves
from fkjit.interp.numbers.flush import flush

_KNOWN = words(
    "relaxed acquire release acq_rel gpu cta sys cluster global shared shared::cta "
    "shared::cluster noftz volatile L2::cache_hint"
)
_UFUNCS: dict[str, Any] = {
    "add": np.add, "min": np.minimum, "max": np.maximum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip
_OF_HALVES = {"min": np.fmin, "max": np.fmax}  # a number wins over NaN
_HALF = ("f16", "bf16", "f16x2", "bf16x2")
_TYPES = {
    "add": words("u32 s32 u64 f32 f64") | set(_HALF),
    **dict.fromkeys(("min", "max"), words("u32 s32 u64 s64") | set(_HALF)),
    **dict.fromkeys(("and", "or", "xor"), words("b32 b64")),
    "exch": words("b32 b64 b128"), "cas": words("b16 b32 b64 b128"),
    **dict.fromkeys(("inc", "dec"), words("u32")),
}  # fmt: skip
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}


def combine(operation: str, kind: str) -> Callable[[Any, Any, Any], Any]:
    """The new value from (old, operand, second operand), as arrays."""
    if operation in _UFUNCS:
        function = _UFUNCS[operation]
        if kind in _HALF:
            function = _OF_HALVES.get(operation, function)
            return lambda old, a, b: halves.through_float(kind, function, old, a)
        return lambda old, a, b: function(old, a)
    rules: dict[str, Callable[[Any, Any, Any], Any]] = {
        "exch": lambda old, a, b: a,
        "cas": lambda old, a, b: np.where(_same(old, a), b, old),
        "inc": lambda old, a, b: np.where(old >= a, 0, old + np.uint32(1)).astype(np.uint32),
        "dec": lambda old, a, b: np.where((old == 0) | (old > a), a, old - np.uint32(1)).astype(
            np.uint32
        ),
    }
    return rules[operation]


def _same(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Equal bit for bit; 128-bit values are pairs of words."""
    if one.dtype.itemsize < 16:
        return one == other
    words_of = (np.ascontiguousarray(v).view(np.uint64).reshape(-1, 2) for v in (one, other))
    return np.asarray(np.equal(*words_of).all(1))


def _rank(position: np.ndarray) -> np.ndarray:
    """How many earlier lanes go to the same position."""
    order = np.argsort(position, kind="stable")
    ordered = position[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    first = np.repeat(starts, np.diff(np.append(starts, ordered.size)))
    rank = np.empty(position.size, np.int64)
    rank[order] = np.arange(position.size) - first
    return rank


def one_by_one(
    memory: np.ndarray,
    at: np.ndarray,
    x: np.ndarray,
    y: np.ndarray,
    combine: Callable[[Any, Any, Any], Any],
) -> np.ndarray:
    """Update memory in lane order; returns what every lane found there."""
    old = np.empty(at.size, memory.dtype)
    rank = _rank(at)
    for turn in range(int(rank.max()) + 1):
        now = rank == turn
        place = at[now]
        old[now] = memory[place]
        memory[place] = combine(memory[place], x[now], y[now])
    return old


def _operands(ins: Instruction) -> tuple[Operand | None, Operand, tuple[Operand, ...]]:
    """Destination (None for red), address, values (without a cache policy)."""
    args = ins.args[:-1] if ins.has("L2::cache_hint") else ins.args
    if ins.op[0] == "red":
        return None, args[0], args[1:]
    target = args[0]
    if isinstance(target, Reg) and target.sink:
        target = None
    return target, args[1], args[2:]


def _form(ins: Instruction) -> tuple[str, int, str]:
    """The operation, the number of elements and their type; refuses what does not exist.

    The type is the last part of the name, or follows the vector: atom.global.v2.f32.add.
    """
    kind = next((part for part in reversed(ins.op) if part in SIZE), "")
    operation = next((part for part in ins.op[1:] if part in _TYPES), ins.op[-2])
    count = next((_VECTORS[part] for part in ins.op if part in _VECTORS), 1)
    only(ins, (*_KNOWN, operation, kind, *_VECTORS))
    if kind not in _TYPES.get(operation, ()):
        raise ValueError(f".{operation} of .{kind}")
    vectors = operation == "add" if kind == "f32" else kind in _HALF
    if count * SIZE[kind] > 16 or (count > 1 and not vectors):
        raise ValueError(f"{count} elements of .{kind}")
    if operation in ("min", "max") and kind in _HALF and count == 1:
        raise ValueError(f".{operation} of one .{kind}")
    return operation, count, kind


@opcode("atom", "red")
def atom(d: Decoder, ins: Instruction) -> Step:
    """atom{.sem}{.scope}{.space}.op{.vec}.type d, [a], b{, c}; red is the same without d."""
    if ins.has("async"):
        return OPCODES["red.async"](d, ins)
    operation, count, kind = _form(ins)
    size = SIZE[kind]
    target, address, values = _operands(ins)
    if len(values) != (2 if operation == "cas" else 1):
        raise ValueError(f"{len(values)} values")
    locator = Locator(d, ins, address, size * count, True)
    updates = [
        _Update(d, operation, kind, target and d.items(target)[at], a, values[-1])
        for at, a in enumerate(d.items(values[0]))
    ]
    shared, observers = d.machine.memory.shared, d.machine.observers

    def run(group: Group) -> None:
        found = locator.locate(group)
        for see in observers:
            see(ATOMIC, found.shared, found.position, size * count, group.lanes, ins)
        if found.shared:
            shared.check_initialised(found.position, size * count, group, ins)
        memory = found.views[size].view(DTYPE[kind])
        for at, update in enumerate(updates):
            update(group, memory, (found.position + at * size) // size, found.shared)

    if len(updates) != count:
        raise ValueError(f"{len(updates)} values for .v{count}")
    return by_space(run, locator, locator.base)


class _Update:
    """Reads, combines and writes one element a lane."""

    def __init__(
        self, d: Decoder, operation: str, kind: str, target: Operand | None, a: Operand, b: Operand
    ) -> None:
        self.a = d.src(a, kind)
        self.b = d.src(b, kind) if operation == "cas" else self.a
        self.out = None if target is None else d.dst(target, kind)
        self.combine = combine(operation, kind)
        self.ufunc = _UFUNCS.get(operation) if kind not in _HALF else None
        self.flushes = operation == "add" and kind == "f32"

    def __call__(self, group: Group, memory: np.ndarray, at: np.ndarray, shared: bool) -> None:
        x, y = group.pick(self.a), group.pick(self.b)
        flushes = self.flushes and not shared  # f32 in global memory knows no subnormals
        if flushes:
            x = flush(x)
        if self.out is None and self.ufunc is not None:
            self.ufunc.at(memory, at, x)
        else:
            old = one_by_one(memory, at, x, y, self.combine)
            if self.out is not None:
                group.put(self.out, old)
        if flushes:
            memory[at] = flush(memory[at])
