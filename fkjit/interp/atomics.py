"""atom and red: read-modify-write, in lane order when lanes meet at one address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fkjit.interp import halves
from fkjit.interp.decode import Decoder, Step, opcode
from fkjit.interp.lanes import Group
from fkjit.interp.loadstore import Locator, by_space
from fkjit.interp.ptx import DTYPE, SIZE, Instruction, Operand, Reg, words
from fkjit.interp.race import ATOMIC

_OPERATIONS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
_KNOWN = words(
    "atom red relaxed acquire release acq_rel gpu cta sys cluster global shared shared::cta "
    "noftz volatile"
)
_UFUNCS: dict[str, Any] = {
    "add": np.add, "min": np.minimum, "max": np.maximum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip
_HALF = ("f16", "bf16", "f16x2", "bf16x2")


def _combine(operation: str, kind: str) -> Callable[[Any, Any, Any], Any]:
    """The new value from (old, operand, second operand), as arrays."""
    if operation in _UFUNCS:
        function = _UFUNCS[operation]
        if kind in _HALF:
            return lambda old, a, b: halves.through_float(kind, function, old, a)
        return lambda old, a, b: function(old, a)
    rules: dict[str, Callable[[Any, Any, Any], Any]] = {
        "exch": lambda old, a, b: a,
        "cas": lambda old, a, b: np.where(old == a, b, old),
        "inc": lambda old, a, b: np.where(old >= a, 0, old + np.uint32(1)).astype(np.uint32),
        "dec": lambda old, a, b: np.where((old == 0) | (old > a), a, old - np.uint32(1)).astype(
            np.uint32
        ),
    }
    return rules[operation]


def _rank(position: np.ndarray) -> np.ndarray:
    """How many earlier lanes go to the same position."""
    order = np.argsort(position, kind="stable")
    ordered = position[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    first = np.repeat(starts, np.diff(np.append(starts, ordered.size)))
    rank = np.empty(position.size, np.int64)
    rank[order] = np.arange(position.size) - first
    return rank


def _one_by_one(
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
    """Destination (None for red), address, values."""
    if ins.op[0] == "red":
        return None, ins.args[0], ins.args[1:]
    target = ins.args[0]
    if isinstance(target, Reg) and target.sink:
        target = None
    return target, ins.args[1], ins.args[2:]


@opcode("atom", "red")
def atom(d: Decoder, ins: Instruction) -> Step:
    """atom{.sem}{.scope}{.space}.op.type d, [a], b{, c}; red is the same without d."""
    operation = next(part for part in ins.op[1:] if part in _OPERATIONS)
    for part in ins.op[1:-1]:
        if part not in _KNOWN and part != operation:
            raise ValueError(f"modifier .{part}")
    kind, size = ins.type, SIZE[ins.type]
    target, address, values = _operands(ins)
    locator = Locator(d, ins, address, size, True)
    a = d.src(values[0], kind)
    b = d.src(values[1], kind) if operation == "cas" else a
    out = None if target is None else d.dst(target, kind)
    combine, shared = _combine(operation, kind), d.machine.memory.shared
    ufunc = _UFUNCS.get(operation) if kind not in _HALF else None
    observers = d.machine.observers

    def run(group: Group) -> None:
        found = locator.locate(group)
        for see in observers:
            see(ATOMIC, found.shared, found.position, size, group.lanes, ins)
        if found.shared:
            shared.check_initialised(found.position, size, group, ins)
        memory, at = found.views[size].view(DTYPE[kind]), found.position >> (size.bit_length() - 1)
        x, y = group.pick(a), group.pick(b)
        if out is None and ufunc is not None:
            ufunc.at(memory, at, x)
            return
        old = _one_by_one(memory, at, x, y, combine)
        if out is not None:
            group.put(out, old)

    return by_space(run, locator, locator.base)
