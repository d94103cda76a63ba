"""Where a strided array's bytes lie: its extent, and which bytes of it are its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def extent(array: np.ndarray) -> tuple[int, int]:
    """Lowest byte of a view relative to its first element, and the number of bytes it spans."""
    low = sum(min(0, (n - 1) * s) for n, s in zip(array.shape, array.strides, strict=True))
    high = sum(max(0, (n - 1) * s) for n, s in zip(array.shape, array.strides, strict=True))
    return low, (high - low + array.itemsize if array.size else 0)


def own_bytes(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> np.ndarray | None:
    """Which bytes of its extent a view addresses: None if all of them."""
    fake = np.lib.stride_tricks.as_strided(np.zeros(1, f"V{itemsize}"), shape, strides)
    low, size = extent(fake)
    valid = np.zeros(size, bool)
    view = np.lib.stride_tricks.as_strided(
        valid[-low:], (*shape, itemsize), (*strides, 1), writeable=True
    )
    view[...] = True
    return None if valid.all() else valid


def misaligned(array: np.ndarray, low: int) -> int:
    """Bytes of a view's start after a multiple of 256, were its owner's first byte on one."""
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    start = array.__array_interface__["data"][0] + low
    return (start - owner.__array_interface__["data"][0]) % 256
