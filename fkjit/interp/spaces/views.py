"""Bytes of a memory, seen as elements of 1 to 16 bytes."""

from __future__ import annotations

import numpy as np

WIDE = np.dtype("c16")  # moves 16 bytes as one element
VIEWS = {1: np.dtype("u1"), 2: np.dtype("u2"), 4: np.dtype("u4"), 8: np.dtype("u8"), 16: WIDE}


def typed_views(raw: np.ndarray) -> dict[int, np.ndarray]:
    """Bytes seen as elements of 1, 2, 4, 8 and 16 bytes."""
    return {width: raw.view(dtype) for width, dtype in VIEWS.items()}


def aligned_bytes(count: int, fill: int = 0) -> np.ndarray:
    """`count` bytes (rounded up to 64) that begin at a multiple of 64."""
    count = -(-count // 64) * 64
    raw = np.full(count + 64, fill, np.uint8) if fill else np.zeros(count + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + count]
