"""What mma.sync works on: register fragments unpacked to float32 matrices, and kept unpacked.

Most of the time of an mma would go into unpacking. So an operand's matrix is kept until one of its
registers is written (attention uses a fragment of Q, or of P, with many of K or V), and
accumulators that only other mma instructions read never become registers at all.

    m16n8k16: a0 = rows 0-7,  k 0-7   a2 = rows 0-7,  k 8-15     d0,d1 = row g,   cols 2t, 2t+1
              a1 = rows 8-15, k 0-7   a3 = rows 8-15, k 8-15     d2,d3 = row g+8, cols 2t, 2t+1
              b0 = k 0-7 (by column), b1 = k 8-15                (lane 4g+t of the warp)
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from fkjit.interp.arena import WIDE
from fkjit.interp.lanes import WARP
from fkjit.interp.ptx import Function, Instruction, reads_and_writes, registers_in

_SCALE = np.array([2.0**112], np.float32)  # from the exponent bias of f16 to that of float32
_F16_BITS = np.array([0x8FFFE000], np.uint32).view(np.int32)


def unpack(kind: str, bits: np.ndarray, out: np.ndarray) -> None:
    """Halves (u16) -> float32 into `out` (contiguous, of the same shape), exactly."""
    whole = out.view(np.int32)
    if kind == "bf16":
        np.copyto(out.view(np.uint32), bits)
        np.left_shift(whole, 16, out=whole)
        return
    np.copyto(whole, bits.view(np.int16))  # sign-extended: the sign is on top after the shift
    np.left_shift(whole, 13, out=whole)
    np.bitwise_and(whole, _F16_BITS, out=whole)
    np.multiply(out, _SCALE, out=out)
    if out.max() >= 65536 or out.min() <= -65536:  # infinities and NaN
        out[...] = bits.view(np.float16)


class Fragment:
    """The matrix of an operand's registers, for all warps of the batch.

    Operand a: [warps, k, 16 rows] (transposed: so both factors of the product lie as BLAS likes
    them); operand b of one or more mma: [warps, 8 columns each, k].
    """

    def __init__(
        self, kind: str, registers: list[np.ndarray], blocks: int, transposed: bool,
        staging: np.ndarray, buffer: np.ndarray,
    ) -> None:  # fmt: skip
        self.kind, self.blocks, self.transposed = kind, blocks, transposed
        self.rows = [register.view(WIDE).reshape(-1, 8) for register in registers]
        warps, across = self.rows[0].shape[0], len(registers) // blocks
        size = warps * blocks * 8 * across  # in rows of an 8x8 matrix, 16 bytes each
        self._staged = staging[:size].reshape(warps, blocks, 8, across)
        self._bits = self._staged.view(np.uint16).reshape(warps, 8 * blocks, 8 * across)
        shape = (warps, 8 * across, 8 * blocks) if transposed else self._bits.shape
        self._matrix = buffer[: size * 8].reshape(shape)
        self.stale = True
        self.kept = True  # False: the buffer is shared, so unpack anew every time

    def touch(self) -> None:
        """One of the registers has been written."""
        self.stale = True

    def matrix(self) -> np.ndarray:
        """The float32 matrix of the registers as they are now."""
        if self.stale or not self.kept:
            across = self._staged.shape[3]
            for number, rows in enumerate(self.rows):
                if self.transposed:  # operand a: registers go down first, then along k
                    self._staged[:, number % self.blocks, :, number // self.blocks] = rows
                else:
                    self._staged[:, number // across, :, number % across] = rows
            bits = self._bits.swapaxes(1, 2) if self.transposed else self._bits
            unpack(self.kind, bits, self._matrix)
            self.stale = False
        return self._matrix


def names(ins: Instruction, operand: int) -> tuple[str, ...]:
    """The registers of one operand of an mma."""
    return tuple(registers_in(ins.args[operand]))


@lru_cache(maxsize=64)
def resident_accumulators(function: Function) -> set[tuple[str, ...]]:
    """Groups of four registers that are only ever written and read whole, by mma instructions."""
    groups: set[tuple[str, ...]] = set()
    others: set[str] = set()
    for ins in function.instructions:
        reads, writes = reads_and_writes(ins)
        if ins.op[0] == "mma" and ins.guard is None:
            groups |= {names(ins, 0), names(ins, 3)}
            others |= set(names(ins, 1) + names(ins, 2))
        else:
            others |= set(reads) | set(writes)
    owners: dict[str, int] = {}
    for group in groups:
        for name in group:
            owners[name] = owners.get(name, 0) + 1
    return {
        group for group in groups
        if len(set(group)) == 4 and all(n not in others and owners[n] == 1 for n in group)
    }  # fmt: skip


def element(matrix: np.ndarray, number: int) -> np.ndarray:
    """Register `number` of an accumulator [warps, 8 columns, 16 rows] as [warps, 8 g, 4 t]."""
    parts = matrix.reshape(matrix.shape[0], 4, 2, 2, 8)  # column 2t+e, row 8h+g
    return parts[:, :, number & 1, number >> 1].swapaxes(1, 2)


def as_fragment(register: np.ndarray) -> np.ndarray:
    """A register as [warps, 8 g, 4 t]."""
    return register.reshape(register.size // WARP, 8, 4)
