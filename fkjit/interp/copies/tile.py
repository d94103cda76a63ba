"""Where the bytes of a tensor copy's box lie: in the tensor, and swizzled in shared memory.

A box is packed row after row, dimension 0 innermost; with a swizzle, rows shorter than its span lie
a span apart. Swizzles exchange the 16-byte chunks of a row by address bits, so that a column of
chunks meets all banks:

    32B:  bit 4    ^= bit 7          64B:  bits 4-5 ^= bits 7-8          128B: bits 4-6 ^= bits 7-9
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fkjit.interp.copies.transfers import CHUNK
from fkjit.interp.spaces.tensor_map import SWIZZLES, TensorMap
from fkjit.interp.spaces.views import WIDE

_SWIZZLE_MASK = {"none": 0, "32B": 1, "64B": 3, "128B": 7}
ALIGNMENT = {"none": 128, "32B": 256, "64B": 512, "128B": 1024}  # of a box in shared memory
_NAN = 0x7FF7  # every half of what "nan" fills in: so on an H200 for f16 and bf16, assumed for more


def swizzled(address: np.ndarray, mode: str) -> np.ndarray:
    """Shared addresses where a swizzle puts what belongs at `address`."""
    mask = _SWIZZLE_MASK[mode]
    return address ^ (((address >> 7) & mask) << 4) if mask else address


@dataclass(frozen=True)
class Tile:
    """One box at one place: its bytes, and the chunks of `width` bytes inside the tensor."""

    size: int  # bytes of the whole box, without what lies between its rows
    width: int
    box: np.ndarray  # byte in the (unswizzled) box of every chunk
    tensor: np.ndarray  # byte from the tensor's first element of every chunk
    chunks: np.ndarray  # byte in the box of every chunk, also of those outside the tensor

    @property
    def whole(self) -> bool:
        """Whether no element of the box is outside the tensor."""
        return self.box.size * self.width == self.size


def tile(
    tensor: TensorMap, coordinates: Sequence[int], width: int | None = None, stores: bool = False
) -> Tile:
    """The box at these coordinates; `width` 1 to 16 (default: as wide as alignment allows).

    Stores and reductions write whole chunks of a row: the one in which a row of the tensor ends
    goes on behind it (seen on an H200; the manuals do not say so).
    """
    assert tensor.element_strides is not None
    counts, itemsize = tensor.counts, tensor.itemsize
    row = counts[0] * itemsize
    inside, box, place = np.ones(1, bool), np.zeros(1, np.int64), np.full(1, tensor.origin)
    pitch = max(row, SWIZZLES[tensor.swizzle])
    for axis in range(1, len(counts)):
        at = coordinates[axis] + np.arange(counts[axis]) * tensor.element_strides[axis]
        here = (at >= 0) & (at < tensor.dims[axis])
        offset = np.where(here, at, 0) * tensor.steps[axis]
        inside = (here[:, None] & inside).reshape(-1)
        place = (offset[:, None] + place).reshape(-1)
        box = (np.arange(counts[axis])[:, None] * pitch + box).reshape(-1)
        pitch *= counts[axis]
    first = max(coordinates[0], 0)
    length = max(0, min(coordinates[0] + counts[0], tensor.dims[0]) - first) * itemsize
    if stores:
        length = -(-length // CHUNK) * CHUNK
    skipped, first = (first - coordinates[0]) * itemsize, first * itemsize
    if width is None:
        mixed = CHUNK | skipped | first | length
        width = mixed & -mixed
    steps = np.arange(0, length, width)
    chunks = (box[:, None] + np.arange(0, row, CHUNK)).reshape(-1)
    size = row * box.size
    box = (box[inside, None] + (skipped + steps)).reshape(-1)
    place = (place[inside, None] + (first + steps)).reshape(-1)
    return Tile(size, width, box, place, chunks)


def fill_of(tensor: TensorMap) -> np.ndarray:
    """What one chunk outside the tensor becomes (one element of 16 bytes)."""
    return np.full(CHUNK // 2, 0 if tensor.fill == "zero" else _NAN, np.uint16).view(WIDE)


def rounded_to_tf32(values: np.ndarray) -> np.ndarray:
    """float32 in chunks of any width -> the nearest tf32, ties away from zero."""
    bits = values.view(np.uint32)
    finite = (bits & np.uint32(0x7F800000)) != 0x7F800000
    near = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(finite, near, bits).view(values.dtype)
