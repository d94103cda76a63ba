"""mma.sync: one matrix product for all warps.

Neighbouring instructions with one operand a become a single wider product. Products of elements
are exact. Sums are float32 in whatever order BLAS takes, which a GPU's need not equal either;
f16 accumulators are rounded once, when all is summed; integers (below 2^24 before c) and f64 are
what they are on a GPU, but for the order of f64.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from fkjit.interp.core.lanes import WARP, Group
from fkjit.interp.core.ptx import Function, Instruction, reads_and_writes, words
from fkjit.interp.machine.converge import converge_aligned, whole_warps
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.machine.opcodes import Step, control, is_control
from fkjit.interp.mma.accumulators import (
    Accumulator,
    elements_of,
    empty_accumulators,
    resident_accumulators,
)
from fkjit.interp.mma.forms import COLUMNS, Form, form_of, forms_of, names
from fkjit.interp.mma.fragments import Fragment
from fkjit.interp.numbers.elements import matrix_type

MAX_RUN = 8  # instructions in one product
_ROOM = 512  # bytes a lane: 8 operands b of m16n8k64, or 2 of m16n8k256, unpacked to float32
Key = tuple[Any, ...]  # of a fragment: operand, type, and shape; then its registers
_NOTIFYING = words("mma ldmatrix movmatrix shfl vote match redux elect wmma")


class Plan:
    """What all mma instructions of a kernel share."""

    def __init__(self, d: Decoder) -> None:
        function, self.d = d.function, d
        self.warps = d.machine.layout.lanes // WARP
        self.forms, self.runs = forms_of(function), _runs(function)
        self.accumulators: dict[tuple[str, ...], np.ndarray] = {}
        for pc, form in self.forms.items():
            for operand in (0, 3):
                group = names(function.instructions[pc], operand)
                if group in resident_accumulators(function) and group not in self.accumulators:
                    self.accumulators[group] = empty_accumulators(form, self.warps)
        self.kept = self._used_often()
        self._fragments: dict[Key, Fragment] = {}

    def keys(self, run: list[Instruction]) -> tuple[Key, Key]:
        """What identifies the fragments of operands a and b."""
        form = self.forms[run[0].pc]
        b = tuple(name for ins in run for name in names(ins, 2))
        return ("a", form.a, form.m // 8, *names(run[0], 1)), ("b", form.b, len(run), *b)

    def room(self, name: str) -> np.ndarray:
        """Bytes for use inside one step."""
        return self.d.scratch_of(self.d.machine.layout.lanes * _ROOM, np.uint8, name)

    def _used_often(self) -> set[Key]:
        """The fragments that are worth keeping unpacked."""
        uses = Counter(key for run in self.runs.values() for key in self.keys(run))
        silent = _silently_written(self.d.function)
        return {key for key, count in uses.items() if count > 1 and not silent.intersection(key)}

    def fragment(self, key: Key) -> Fragment:
        """The fragment of that key, which products share."""
        if key not in self._fragments:
            self._fragments[key] = self._made(key)
        return self._fragments[key]

    def _made(self, key: Key) -> Fragment:
        kept = key in self.kept
        operand, kind, blocks, *registers = key
        wide = np.dtype("u8" if kind == "f64" else "u4")
        arrays = [self.d.registers.view(name, wide) for name in registers]
        room = None if kept else self.room(f"operand {operand}")
        fragment = Fragment(kind, arrays, blocks, operand == "a", self.room("staging"), room)
        for name in registers if kept else ():
            self.d.watchers.setdefault(name, []).append(fragment.touch)
        return fragment


@lru_cache(maxsize=64)
def _runs(function: Function) -> dict[int, list[Instruction]]:
    """Neighbouring mma with the same operand a, none of which needs another's result.

    By the first one's program counter. Each of the others is there alone too, for a jump to it.
    """
    forms = forms_of(function)
    runs: dict[int, list[Instruction]] = {}
    current: list[Instruction] = []
    for ins in function.instructions:
        if ins.pc not in forms:
            current = []
            continue
        if current and _fits(current, ins):
            current.append(ins)
            runs[ins.pc] = [ins]
            continue
        current = runs[ins.pc] = [ins]
    return runs


@lru_cache(maxsize=64)
def _inner(function: Function) -> set[int]:
    """Where mma stand that are a part of the product of one before them."""
    return {ins.pc for run in _runs(function).values() for ins in run[1:]}


def _fits(run: list[Instruction], ins: Instruction) -> bool:
    written = {name for other in run for name in reads_and_writes(other)[1]}
    reads, writes = reads_and_writes(ins)
    guarded = ins.guard is not None or run[0].guard is not None
    same = run[0].op == ins.op and names(run[0], 1) == names(ins, 1) and not guarded
    most = MAX_RUN // 4 if "b1" in ins.op else MAX_RUN
    return same and len(run) < most and not written & (set(reads) | set(writes))


@lru_cache(maxsize=64)
def _silently_written(function: Function) -> set[str]:
    """Registers written by an instruction that calls no watcher."""
    return {
        name
        for ins in function.instructions
        if is_control(ins) and ins.op[0] not in _NOTIFYING
        for name in reads_and_writes(ins)[1]
    }


def _count_unequal(form: Form, product: np.ndarray) -> None:
    """Sums of k numbers 1 (equal bits) and -1 -> how many of them are -1, in place."""
    if form.a == "b1.xor":
        np.subtract(form.k, product, out=product)
        product *= 0.5


@control("mma")
def mma(d: Decoder, ins: Instruction) -> Step:
    """mma.sync.aligned.shape.row.col{.satfinite}.dtype.atype.btype.ctype d, a, b, c."""
    form_of(ins)  # refuses what is not implemented
    if ins.pc in _inner(d.function):
        return _when_needed(lambda: _product(d, ins))
    return _product(d, ins)


def _when_needed(build: Callable[[], Step]) -> Step:
    """A step that is built when it first runs: few lanes ever jump into the middle of a product."""
    built: list[Step] = []

    def run(group: Group) -> Any:
        if not built:
            built.append(build())
        return built[0](group)

    return run


def _product(d: Decoder, ins: Instruction) -> Step:
    """The step of the mma that are one product from `ins` on."""
    plan = d.part(Plan)
    form, run = plan.forms[ins.pc], plan.runs[ins.pc]
    a, b = (plan.fragment(key) for key in plan.keys(run))
    members = [Accumulator(d, one, form, plan.accumulators) for one in run]
    shape = (plan.warps, COLUMNS * len(run), form.m)
    room = plan.room("product").view(matrix_type(form.a))
    product = room[: math.prod(shape)].reshape(shape)
    places = [slice(COLUMNS * n, COLUMNS * (n + 1)) for n in range(len(run))]
    own = [(product[:, place], elements_of(product[:, place])) for place in places]

    def act(group: Group) -> None:
        warps = whole_warps(d, ins, group)
        left, right = a.matrix(), b.matrix()
        if warps is None:
            np.matmul(right, left, out=product)
            _count_unequal(form, product)
            for member, (one, parts) in zip(members, own, strict=True):
                member.store(one, parts, None)
            return
        result = np.matmul(right[warps], left[warps])
        _count_unequal(form, result)
        for member, place in zip(members, places, strict=True):
            member.store(result[:, place], elements_of(result[:, place]), warps)

    step: Step = act
    for other in run[1:]:
        step = d.notify(other, step)
    return converge_aligned(d, ins, step, skip=len(run))
