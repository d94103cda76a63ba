"""Operands of wgmma: matrices in shared memory by descriptor, and A in registers.

    descriptor  13-0 start address, 29-16 leading, 45-32 stride byte offset (each >> 4),
                51-49 base offset, 63-62 swizzle (0 none, 1 128 bytes, 2 64 bytes, 3 32 bytes)

A tile is read in chunks of 16 bytes. Offsets of a chunk before the swizzle of span 32, 64 or 128
bytes (none: 16):

    K-major     row r, half h of 32 bytes:  r//8 * stride + r%8 * span + h * 16
                                            (none: h * leading)
    MN-major    8 rows j, column k:         j // (span/16) * leading + j % (span/16) * 16
                                            + k//8 * stride + k%8 * span
                                            (none: leading and stride change places)

The swizzle then exchanges chunks: address bits 4-6 ^= bits 7-9 (64 bytes: two bits, 32: one).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from fkjit.interp.numbers.elements import raw_type, unpack
from fkjit.interp.wgmma.form import ROWS, STEP

_SPAN = (16, 128, 64, 32)  # bytes, by swizzle mode
_REPEAT = 1024  # bytes after which every swizzle repeats


def field(descriptor: np.ndarray, low: int, bits: int) -> np.ndarray:
    """Bits of descriptors (u64) as int64."""
    return ((descriptor >> np.uint64(low)) & np.uint64((1 << bits) - 1)).astype(np.int64)


def chunk_addresses(descriptors: np.ndarray, rows: int, transposed: bool) -> np.ndarray:
    """Shared addresses of the chunks that descriptors [n] name: [n, chunks], int64."""
    start = field(descriptors, 0, 14) << 4
    phase = start % _REPEAT
    layout = descriptors & ~np.uint64(0x3FFF)
    first = (int(layout[0]), int(phase[0]))
    if (layout == layout[0]).all() and (phase == phase[0]).all():
        return (start - phase)[:, None] + _table(*first, rows, transposed)
    tables = [_table(int(a), int(p), rows, transposed) for a, p in zip(layout, phase, strict=True)]
    return (start - phase)[:, None] + np.stack(tables)


@lru_cache(maxsize=1024)
def _table(layout: int, phase: int, rows: int, transposed: bool) -> np.ndarray:
    """Addresses of all chunks, for a start address of `phase`."""
    leading, stride = (layout >> 16 & 0x3FFF) << 4, (layout >> 32 & 0x3FFF) << 4
    base, mode = layout >> 49 & 7, layout >> 62
    span = _SPAN[mode]
    if transposed:
        at = _mn_major(rows, leading, stride, span)
    else:
        r, half = np.arange(rows)[:, None], np.arange(2)
        at = r // 8 * stride + r % 8 * span + half * (leading if span == 16 else 16)
    address = phase + at.reshape(-1)
    turn = ((address >> 7) - base) & (span // 16 - 1)
    return address ^ (turn << 4)


def _mn_major(rows: int, leading: int, stride: int, span: int) -> np.ndarray:
    j, k = np.arange(rows // 8)[:, None], np.arange(16)
    if span == 16:
        return j * stride + k // 8 * leading + k % 8 * 16
    across = span // 16
    return j // across * leading + j % across * 16 + k // 8 * stride + k % 8 * span


def tile(kind: str, chunks: np.ndarray, transposed: bool) -> np.ndarray:
    """Chunks [n, chunks] of 16 bytes -> float32 [n, rows, k]."""
    raw = np.ascontiguousarray(chunks).view(np.uint8)
    if not transposed:
        return decoded(kind, raw.reshape(raw.shape[0], -1, STEP))
    values = decoded(kind, raw.reshape(raw.shape[0], -1, 16, 16))  # [n, 8 rows, k, row]
    return np.ascontiguousarray(values.swapaxes(2, 3)).reshape(raw.shape[0], -1, 16)


def fragment(kind: str, registers: list[np.ndarray]) -> np.ndarray:
    """A of four registers [n, 128] (u32) -> float32 [n, 64, k].

    Register i of lane 4g+t of warp w: row 16w + 8(i%2) + g, bytes 16(i//2) + 4t … +3.
    """
    count = registers[0].shape[0]
    words = np.empty((count, 4, 2, 8, 2, 4), np.uint32)  # warp, i%2, g, i//2, t
    for i, register in enumerate(registers):
        words[:, :, i % 2, :, i // 2] = register.reshape(count, 4, 8, 4)
    return decoded(kind, words.view(np.uint8).reshape(count, ROWS, STEP))


def decoded(kind: str, raw: np.ndarray) -> np.ndarray:
    """Bytes [..., n] -> float32 [..., elements], exactly."""
    if kind == "b1":
        return np.unpackbits(raw, axis=-1).astype(np.float32)
    bits = raw.view(raw_type(kind))
    out = np.empty(bits.shape, np.float32)
    unpack(kind, bits, out)
    return out
