"""mma.sync of f16 and bf16 with float32 accumulators, one matrix product for all warps.

Neighbouring instructions with one operand a become a single wider product. Products are exact in
float32; sums are float32 in whatever order BLAS takes, which a GPU's need not equal either.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from fkjit.interp.arena import WIDE
from fkjit.interp.decode import Decoder, Step, control
from fkjit.interp.fragments import (
    Fragment,
    as_fragment,
    element,
    names,
    resident_accumulators,
)
from fkjit.interp.lanes import WARP, Group
from fkjit.interp.ptx import Function, Instruction, reads_and_writes
from fkjit.interp.tensor import whole_warps
from fkjit.interp.warp import warp_meeting

MAX_RUN = 8  # instructions in one product
_SHAPES = {"m16n8k16": 2, "m16n8k8": 1}


class Plan:
    """What all mma instructions of a kernel share."""

    def __init__(self, d: Decoder) -> None:
        function, warps = d.function, d.machine.layout.lanes // WARP
        self.runs = _runs(function)  # by the first instruction's program counter
        self.accumulators = {  # of resident groups
            group: np.zeros((warps, 8, 16), np.float32) for group in resident_accumulators(function)
        }
        self.fragments: dict[tuple[object, ...], Fragment] = {}
        uses: dict[tuple[object, ...], int] = {}
        for run in self.runs.values():
            for key in _keys(run):
                uses[key] = uses.get(key, 0) + 1
        silent = _silently_written(function)
        for run in self.runs.values():
            for key, transposed in zip(_keys(run), (True, False), strict=True):
                if key not in self.fragments and _known(run[0]):
                    kept = uses[key] > 1 and not silent.intersection(key)
                    self.fragments[key] = _fragment(d, key, transposed, len(run), kept)


@lru_cache(maxsize=64)
def _runs(function: Function) -> dict[int, list[Instruction]]:
    """Neighbouring mma with the same operand a, none of which needs another's result."""
    labels = set(function.labels.values())
    runs: dict[int, list[Instruction]] = {}
    current: list[Instruction] = []
    for ins in function.instructions:
        if ins.op[0] != "mma" or ins.guard is not None:
            current = []
            continue
        if not (current and ins.pc not in labels and _fits(current, ins)):
            current = []
        current.append(ins)
        runs[current[0].pc] = current
        if len(current) > 1:  # its place in a run is taken; alone it is never reached
            runs[ins.pc] = [ins]
    return runs


def _fits(run: list[Instruction], ins: Instruction) -> bool:
    written = {name for other in run for name in reads_and_writes(other)[1]}
    reads, writes = reads_and_writes(ins)
    same = run[0].op == ins.op and names(run[0], 1) == names(ins, 1)
    return same and len(run) < MAX_RUN and not written & (set(reads) | set(writes))


def _keys(run: list[Instruction]) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """What identifies the fragments of operands a and b."""
    kind = run[0].op[-3]
    b = tuple(name for ins in run for name in names(ins, 2))
    return ("a", kind, *names(run[0], 1)), ("b", kind, len(run), *b)


def _fragment(
    d: Decoder, key: tuple[Any, ...], transposed: bool, members: int, kept: bool
) -> Fragment:
    registers = [d.registers.view(name, np.dtype("u4")) for name in key if str(name)[0] == "%"]
    lanes = d.machine.layout.lanes
    size = len(registers) * lanes * 2  # halves of all warps
    staging = d.scratch_of(lanes // 4 * 2 * MAX_RUN, WIDE, "staging")
    buffer = np.empty(size, np.float32) if kept else d.scratch_of(
        lanes * 4 * MAX_RUN, np.float32, f"operand {key[0]}"
    )  # fmt: skip
    fragment = Fragment(
        key[1], registers, 2 if transposed else members, transposed, staging, buffer
    )
    fragment.kept = kept
    for name in (name for name in key if kept and str(name)[0] == "%"):
        d.watchers.setdefault(name, []).append(fragment.touch)
    return fragment


@lru_cache(maxsize=64)
def _silently_written(function: Function) -> set[str]:
    """Registers written by an instruction that calls no watcher."""
    silent = ("bar", "barrier", "activemask", "mma")
    return {
        name
        for ins in function.instructions
        if ins.op[0] in silent
        for name in reads_and_writes(ins)[1]
    }


def _known(ins: Instruction) -> bool:
    """Whether this form of mma is implemented."""
    if ins.op[1:3] != ("sync", "aligned") or ins.op[4:6] != ("row", "col") or len(ins.op) != 10:
        return False
    shape, (to, kind, other, of) = ins.op[3], ins.op[6:]
    if (
        shape not in _SHAPES
        or kind not in ("f16", "bf16")
        or (to, other, of) != ("f32", kind, "f32")
    ):
        return False
    steps = _SHAPES[shape]
    counts = tuple(len(names(ins, operand)) for operand in range(3))
    return ins.guard is None and counts == (4, 2 * steps, steps)


@control("mma")
def mma(d: Decoder, ins: Instruction) -> Step:
    """mma.sync.aligned.m16n8k{8,16}.row.col.f32.{f16,bf16}.{f16,bf16}.f32 d, a, b, c."""
    if not _known(ins):
        raise ValueError("this shape or type of mma")
    plan = d.part(Plan)
    run = plan.runs[ins.pc]
    a, b = (plan.fragments[key] for key in _keys(run))
    members = [_Member(d, plan, one) for one in run]
    size = d.machine.layout.lanes // WARP * 128 * len(run)
    buffer = d.scratch_of(d.machine.layout.lanes * 4 * MAX_RUN, np.float32, "product")
    product = buffer[:size].reshape(-1, 8 * len(run), 16)

    def act(group: Group) -> None:
        warps = whole_warps(d, ins, group)
        left, right = a.matrix(), b.matrix()
        if warps is None:
            np.matmul(right, left, out=product)
            result = product
        else:
            result = np.matmul(right[warps], left[warps])
        for number, member in enumerate(members):
            member.store(result[:, 8 * number : 8 * number + 8], warps)

    return warp_meeting(d, ins, None, act, skip=len(run))


class _Member:
    """Adds c to one instruction's product and stores d."""

    def __init__(self, d: Decoder, plan: Plan, ins: Instruction) -> None:
        to, of = names(ins, 0), names(ins, 3)
        self.target = plan.accumulators.get(to)
        self.addend = plan.accumulators.get(of)
        self.outs = [] if self.target is not None else [
            as_fragment(d.dst(item, "f32")) for item in d.items(ins.args[0])
        ]  # fmt: skip
        self.adds: list[np.ndarray] = []
        if self.addend is None:
            self.adds = self._values(d, ins)
        crossed = any(x in to and to.index(x) != i for i, x in enumerate(of))
        self.copy_first = crossed

    @staticmethod
    def _values(d: Decoder, ins: Instruction) -> list[np.ndarray]:
        lanes = d.machine.layout.lanes
        values = [d.src(item, "f32") for item in d.items(ins.args[3])]
        if len(values) != 4:
            raise ValueError("operands of mma")
        if all(value.size == 1 and value[0] == 0 for value in values):
            return []
        return [as_fragment(v if v.size > 1 else np.full(lanes, v[0], v.dtype)) for v in values]

    def store(self, product: np.ndarray, warps: np.ndarray | None) -> None:
        """`product`: [warps, 8 columns, 16 rows] of all warps, or of those in `warps`."""
        every: Any = slice(None) if warps is None else warps
        if self.addend is not None:
            product = product + self.addend[every]
        adds = [value[every].copy() if self.copy_first else value[every] for value in self.adds]
        if self.target is not None:
            self._keep(product, adds, every)
            return
        for number, out in enumerate(self.outs):
            value = element(product, number)
            if adds and warps is None:
                np.add(value, adds[number], out=out)
            else:
                out[every] = value + adds[number] if adds else value

    def _keep(self, product: np.ndarray, adds: list[np.ndarray], every: Any) -> None:
        assert self.target is not None
        if adds:
            product = np.ascontiguousarray(product)
            for number, value in enumerate(adds):
                part = element(product, number)
                part += value
        self.target[every] = product
