"""One wgmma in flight: what it will multiply, and the matrix once it is known."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fkjit.interp.core.ptx import Instruction
from fkjit.interp.numbers.halves import from_float, to_float
from fkjit.interp.wgmma.form import ROWS, Form
from fkjit.interp.wgmma.short_sums import add_products
from fkjit.interp.wgmma.warpgroup import Warpgroups


@dataclass
class Addend:
    """The accumulator that is added: a matrix, or a product that will be known by then."""

    matrix: np.ndarray | None
    product: Product | None = None
    rows: np.ndarray | None = None  # of the product's warpgroups; None: all, in order
    keep: np.ndarray | None = None  # scale-d by warpgroup; None: true for all

    def values(self, due: np.ndarray) -> np.ndarray:
        """[due, 64, n] for some of the warpgroups (indices)."""
        if self.product is not None:
            matrix, rows = self.product.matrix, due if self.rows is None else self.rows[due]
            assert matrix is not None
            chosen = matrix if rows.size == matrix.shape[0] else matrix[rows]
        else:
            assert self.matrix is not None
            chosen = self.matrix if due.size == self.matrix.shape[0] else self.matrix[due]
        if self.keep is None:
            return chosen
        return np.where(self.keep[due][:, None, None], chosen, chosen.dtype.type(0))


@dataclass(eq=False)
class Product:
    """A wgmma.mma_async of warpgroups `which`, computed when they wait for it."""

    ins: Instruction
    form: Form
    which: np.ndarray  # warpgroups' numbers, ascending
    lanes: np.ndarray  # the same as a mask
    a: np.ndarray  # positions of chunks in shared memory, or float32 [which, 64, k]
    b: np.ndarray  # positions of chunks
    addend: Addend | None
    group: np.ndarray = field(init=False)  # commit group by warpgroup; -1: not committed
    done: np.ndarray = field(init=False)
    matrix: np.ndarray | None = None  # [which, 64, n]: float32 or int32
    holders: list[int] = field(init=False)  # registers that stand for each part of D
    consumed: bool = False  # a later wgmma accumulates on the result
    races: list[list[Any]] = field(default_factory=list)  # the warps' reads, by warpgroup
    _rows: np.ndarray | None = None

    def __post_init__(self) -> None:
        self.group = np.full(self.which.size, -1, np.int64)
        self.done = np.zeros(self.which.size, bool)
        self.holders = [0] * self.form.registers
        self.finished = False

    def land(self, due: np.ndarray, a: np.ndarray, b: np.ndarray, short: bool = False) -> None:
        """Compute for warpgroups `due` (indices into `which`) from float32 a, b [due, rows, k].
        `short`: e4m3 adds with few bits."""
        added = None if self.addend is None else self.addend.values(due)
        if short and self.form.is_short:
            value = add_products(a, b, added)
        else:
            value = _multiplied(self.form, a, b, added)
        if due.size == self.which.size:
            self.matrix = value
        else:
            if self.matrix is None:
                self.matrix = np.zeros((self.which.size, ROWS, self.form.n), value.dtype)
            self.matrix[due] = value
        self.done[due] = True
        self._rows = None
        if self.done.all():
            self.finished, self.addend = True, None
            self.a = self.b = np.zeros(0, np.int64)

    def flying(self, lanes: np.ndarray, warpgroups: Warpgroups) -> np.ndarray:
        """Those of `lanes` (a mask) whose result is not known yet."""
        if self.finished:
            return np.zeros_like(lanes)
        return lanes & warpgroups.mask(self.which[~self.done])

    def rows(self) -> np.ndarray:
        """The matrix as registers: [registers, which, 128], u32.

        Register i of lane 4g+t of warp w: row 16w + 8(i//2 % 2) + g, columns 8(i//4) + 2t + i%2
        (f16: both columns in one register).
        """
        if self._rows is None:
            assert self.matrix is not None
            self._rows = to_registers(self.form, self.matrix)
        return self._rows


def _multiplied(form: Form, a: np.ndarray, b: np.ndarray, added: np.ndarray | None) -> np.ndarray:
    value = np.matmul(a, b.swapaxes(1, 2))
    if form.to == "s32":  # sums below 2**24: exact in float32
        exact = value.astype(np.int64)
        if added is not None:
            exact += added
        if form.saturated:
            exact = exact.clip(-(1 << 31), (1 << 31) - 1)
        return exact.astype(np.int32)
    if form.negated:
        np.negative(value, out=value)
    if added is not None:
        value += added
    if form.to == "f16":
        return to_float("f16", from_float("f16", value))
    return value


def to_registers(form: Form, matrix: np.ndarray) -> np.ndarray:
    """[which, 64, n] -> [registers, which, 128] of u32."""
    count, halves = matrix.shape[0], form.to == "f16"
    values = from_float("f16", matrix) if halves else matrix
    parts = values.reshape(count, 4, 2, 8, form.n // 8, 4, 2)  # warp, half, g, n/8, t, pair
    order = (4, 2, 0, 1, 3, 5, 6) if halves else (4, 2, 6, 0, 1, 3, 5)
    return np.ascontiguousarray(parts.transpose(order)).view(np.uint32).reshape(-1, count, 128)


def from_registers(form: Form, rows: np.ndarray) -> np.ndarray:
    """[registers, which, 128] of u32 -> [which, 64, n]."""
    count, n = rows.shape[1], form.n
    if form.to == "f16":
        parts = to_float("f16", rows.view(np.uint16)).reshape(n // 8, 2, count, 4, 8, 4, 2)
        order = (2, 3, 1, 4, 0, 5, 6)
    else:
        kind = np.int32 if form.to == "s32" else np.float32
        parts = rows.view(kind).reshape(n // 8, 2, 2, count, 4, 8, 4)
        order = (3, 4, 1, 5, 0, 6, 2)
    return np.ascontiguousarray(parts.transpose(order)).reshape(count, ROWS, n)
