"""What mma.sync adds to and stores: accumulators in registers, or kept out of them.

          column 2t   2t+1          (lane 4g+t of the warp)
row g         d0       d1
row g+8       d2       d3           f16: (d0, d1) and (d2, d3) are one register each
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from fkjit.interp.core.lanes import WARP
from fkjit.interp.core.ptx import Function, Instruction, Operand, reads_and_writes
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.mma.forms import COLUMNS, Form, forms_of, names

_DTYPE = {name: np.dtype(code) for name, code in (
    ("f16", "f2"), ("f32", "f4"), ("f64", "f8"), ("s32", "i4"),
)}  # fmt: skip
_S32 = np.iinfo(np.int32)


@lru_cache(maxsize=64)
def resident_accumulators(function: Function) -> set[tuple[str, ...]]:
    """Groups of four registers that are only ever written and read whole, by mma instructions.

    Only those of float32 with 16 rows; they never become registers at all.
    """
    groups: set[tuple[str, ...]] = set()
    others: set[str] = set()
    forms = forms_of(function)
    for ins in function.instructions:
        form = forms.get(ins.pc)
        if form and form.accumulator == "f32":
            groups |= {names(ins, 0), names(ins, 3)}
            others |= set(names(ins, 1) + names(ins, 2))
        else:
            reads, writes = reads_and_writes(ins)
            others |= set(reads) | set(writes)
    owners: dict[str, int] = {}
    for group in groups:
        for name in group:
            owners[name] = owners.get(name, 0) + 1
    return {
        group for group in groups
        if len(set(group)) == 4 and all(n not in others and owners[n] == 1 for n in group)
    }  # fmt: skip


def elements_of(matrix: np.ndarray) -> list[np.ndarray]:
    """d0, d1, … of accumulators [warps, 8 columns, m rows], each as [warps, 8 g, 4 t]."""
    warps, _, m = matrix.shape
    parts = matrix.reshape(warps, 4, 2, m // 8, 8)  # column 2t+e, row 8h+g
    return [parts[:, :, e, h].swapaxes(1, 2) for h in range(m // 8) for e in range(2)]


class Accumulator:
    """Adds c to one instruction's product and stores d."""

    def __init__(
        self, d: Decoder, ins: Instruction, form: Form, kept: dict[tuple[str, ...], np.ndarray]
    ) -> None:
        to, of = names(ins, 0), names(ins, 3)
        self.form = form
        self.target, self.addend = kept.get(to), kept.get(of)
        self.outs: list[np.ndarray] = []
        self.adds: list[np.ndarray] = []
        if self.target is None:
            self.outs = self._split([d.dst(x, self._kind) for x in d.items(ins.args[0])])
        if self.addend is None:
            self.adds = self._addends(d, d.items(ins.args[3]))
        self.copy_first = any(x in to and to.index(x) != i for i, x in enumerate(of))

    @property
    def _kind(self) -> str:
        """The type of one register."""
        return "b32" if self.form.accumulator == "f16" else self.form.accumulator

    def _split(self, registers: list[np.ndarray]) -> list[np.ndarray]:
        """Registers as d0, d1, …, each [warps, 8 g, 4 t]."""
        found = []
        for register in registers:
            each = register.view(_DTYPE[self.form.accumulator]).reshape(-1, 8, 4, 1)
            if self.form.accumulator == "f16":
                each = each.reshape(register.size // WARP, 8, 4, 2)
            found += [each[..., place] for place in range(each.shape[3])]
        return found

    def _addends(self, d: Decoder, operands: tuple[Operand, ...]) -> list[np.ndarray]:
        if len(operands) != self.form.counts[0]:
            raise ValueError("number of registers")
        values = [d.src(operand, self._kind) for operand in operands]
        if all(value.size == 1 and value[0] == 0 for value in values):
            return []
        lanes = d.machine.layout.lanes
        return self._split([v if v.size > 1 else np.full(lanes, v[0]) for v in values])

    def store(self, product: np.ndarray, parts: list[np.ndarray], warps: np.ndarray | None) -> None:
        """`product`: that of all warps, or of those in `warps`; changed. `parts`: its elements."""
        every: Any = slice(None) if warps is None else warps
        if self.target is not None:
            self._keep(product, self.target, warps)
            return
        if self.addend is not None:
            product += self.addend[every]
        adds = self.adds
        if adds and (self.copy_first or warps is not None):
            adds = [value[every].copy() for value in adds]
        for number, (out, value) in enumerate(zip(self.outs, parts, strict=True)):
            if self.form.accumulator == "s32":
                out[every] = self._integers(value, adds[number] if adds else 0)
            elif adds and warps is None:
                np.add(value, adds[number], out=out)
            else:
                out[every] = value + adds[number] if adds else value

    def _integers(self, product: np.ndarray, addend: Any) -> np.ndarray:
        """The sum in s32: clamped with .satfinite, else without the upper bits."""
        total = product.astype(np.int64) + addend
        return total.clip(_S32.min, _S32.max) if self.form.saturate else total

    def _keep(self, product: np.ndarray, target: np.ndarray, warps: np.ndarray | None) -> None:
        """Store where no registers are."""
        if self.addend is not None and warps is None:
            np.add(product, self.addend, out=target)
            return
        if not self.adds:
            every: Any = slice(None) if warps is None else warps
            target[every] = product if self.addend is None else product + self.addend[every]
            return
        into = target if warps is None else np.empty_like(product)
        for out, value in zip(elements_of(into), self.adds, strict=True):
            out[...] = value if warps is None else value[warps]
        into += product  # in one piece: adding to elements here and there takes twice as long
        if warps is not None:
            target[warps] = into


def empty_accumulators(form: Form, warps: int) -> np.ndarray:
    """Room for an accumulator that never becomes registers."""
    return np.zeros((warps, COLUMNS, form.m), np.float32)
