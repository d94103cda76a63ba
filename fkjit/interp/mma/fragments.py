"""What mma.sync multiplies: register fragments unpacked to float matrices, and kept unpacked.

A register of a warp, read lane after lane (lane 4g+t), is a matrix of 8 rows (g) and 4e columns,
where a register has e elements: 1 of tf32 and f64, 2 halves, 4 bytes, 8 four-bit integers.

                 k: 0 … 4e-1   4e … 8e-1                 k: 0 … 4e-1   4e … 8e-1
    a  rows 0-7        a0          a2       b  columns 0-7     b0          b1
       rows 8-15       a1          a3          (one column of b in one row here)

and so on along k; with m = 8 there are a0, a1, … only.
"""

from __future__ import annotations

import math

import numpy as np

from fkjit.interp.core.lanes import WARP
from fkjit.interp.numbers.elements import BITS, matrix_type, raw_type, spread, unpack
from fkjit.interp.spaces.views import WIDE


class Fragment:
    """The matrix of an operand's registers, for all warps of the batch.

    Operand a: [warps, k, m] (transposed: so both factors of the product lie as BLAS likes them);
    operand b of one or more mma: [warps, 8 columns each, k]. `staging` and `shared` are bytes that
    others use too. Most of the time of an mma would go into unpacking, so a matrix that is used
    often is kept in memory of its own (`shared` is None) until one of its registers is written:
    attention uses one of Q, or of P, with many of K or V.
    """

    def __init__(
        self, kind: str, registers: list[np.ndarray], blocks: int, transposed: bool,
        staging: np.ndarray, shared: np.ndarray | None,
    ) -> None:  # fmt: skip
        self.kind, self.blocks, self.transposed = kind, blocks, transposed
        self.kept = shared is None
        wide = registers[0].itemsize * WARP // 8 // WIDE.itemsize  # of one row of 4e elements
        self.rows = [register.view(WIDE).reshape(-1, 8, wide) for register in registers]
        warps, across = self.rows[0].shape[0], len(registers) // blocks
        size = registers[0].nbytes * len(registers)
        self._staged = staging[:size].view(WIDE).reshape(warps, blocks, 8, across, wide)
        self._bits = self._staged.reshape(warps, 8 * blocks, across * wide).view(raw_type(kind))
        k = across * wide * WIDE.itemsize * 8 // BITS[kind]
        shape = (warps, k, 8 * blocks) if transposed else (warps, 8 * blocks, k)
        dtype, count = matrix_type(kind), math.prod(shape)
        room = np.empty(count, dtype) if shared is None else shared.view(dtype)[:count]
        self._matrix = room.reshape(shape)
        self.stale = True

    def touch(self) -> None:
        """One of the registers has been written."""
        self.stale = True

    def matrix(self) -> np.ndarray:
        """The matrix of the registers as they are now."""
        if self.stale or not self.kept:
            across = self._staged.shape[3]
            for number, rows in enumerate(self.rows):
                if self.transposed:  # operand a: registers go down first, then along k
                    self._staged[:, number % self.blocks, :, number // self.blocks] = rows
                else:
                    self._staged[:, number // across, :, number % across] = rows
            bits = spread(self.kind, self._bits)
            unpack(self.kind, bits.swapaxes(1, 2) if self.transposed else bits, self._matrix)
            self.stale = False
        return self._matrix
