"""Arguments of a launch: arrays get places in the arena, tensor maps handles; results come back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fkjit.interp.spaces.arena import Allocation, BoundMap, GlobalMemory
from fkjit.interp.spaces.strides import extent, misaligned, own_bytes
from fkjit.interp.spaces.tensor_map import TensorMap, handle


@dataclass(frozen=True)
class Arg:
    """One kernel argument.

    `value`: an array (passed as a pointer to its first element; any strides, only its own bytes
    are valid memory), a typed NumPy scalar, raw bytes in the parameter's layout (a struct), a
    TensorMap (for a `const __grid_constant__ CUtensorMap`), or several (`const CUtensorMap*`).
    `writable`: whether the kernel may write the array; if so the caller's array is changed.
    """

    name: str
    value: np.ndarray | np.generic | bytes | TensorMap | tuple[TensorMap, ...]
    writable: bool = False


@dataclass(frozen=True)
class _Placed:
    """A caller's array and where it stands."""

    array: np.ndarray
    writable: bool
    place: Allocation
    first: int  # byte of the place that is the array's first element

    @property
    def whole(self) -> bool:
        """Whether the place has all the bytes that the array spans."""
        return self.array.flags.c_contiguous


class Placing:
    """Puts the arguments of one launch into its arena."""

    def __init__(self, arena: GlobalMemory) -> None:
        self.arena = arena
        self.placed: list[_Placed] = []

    def value(self, argument: Arg) -> bytes:
        """The bytes a parameter holds. Maps come last: their arrays may be arguments as well."""
        value = argument.value
        if isinstance(value, bytes):
            return value
        if isinstance(value, TensorMap):
            return self._bind(argument, value)
        if isinstance(value, tuple):
            handles = b"".join(self._bind(argument, one) for one in value)
            raw = np.frombuffer(handles, np.uint8)
            return np.uint64(self.arena.add(argument.name, raw, writable=False).address).tobytes()
        if not isinstance(value, np.ndarray):
            return value.tobytes()
        one = self._place(argument, value)
        return np.uint64(one.place.address + one.first).tobytes()

    def _place(self, argument: Arg, array: np.ndarray) -> _Placed:
        low, size = extent(array)
        raw = _bytes_of(array, low, size)
        place = self.arena.add(argument.name, raw, argument.writable, misaligned(array, low))
        place.shape = f", shape {array.shape} {array.dtype}"
        if array.flags.c_contiguous and array.size:
            place.strides = np.empty(array.shape, array.dtype).strides  # of extents 1 too
        self.placed.append(_Placed(array, argument.writable, place, -low))
        return self.placed[-1]

    def _bind(self, argument: Arg, over: TensorMap) -> bytes:
        """A tensor map's handle. Where its array is (part of) an argument, both share a place; of
        an input that is the output as well, the output's."""
        found = [one for one in self.placed if _within(over.array, one)]
        one = max(found, key=lambda one: one.writable, default=None)
        if one is None:
            one = self._place(argument, over.array)
        else:
            one.place.writable |= argument.writable
            first = one.first + _start(over.array) - _start(one.array)
            one = _Placed(over.array, argument.writable, one.place, first)
            self.placed.append(one)
        self.arena.tensor_maps.append(BoundMap(over, one.place, one.place.start + one.first))
        return handle(len(self.arena.tensor_maps) - 1)

    def find_holes(self) -> None:
        """Bytes between a view's elements are nobody's."""
        for one in self.placed:
            array = one.array
            mine = one.place.size == extent(array)[1]
            if array.size and not array.flags.c_contiguous and mine:
                one.place.holes = own_bytes(array.shape, array.strides, array.itemsize)

    def copy_back(self) -> None:
        """Write the results into the caller's arrays."""
        for one in self.placed:
            if one.writable and one.place.size:
                array, raw = one.array, self.arena.contents(one.place)
                array[...] = np.ndarray(array.shape, array.dtype, raw, one.first, array.strides)


def _start(array: np.ndarray) -> int:
    """Where the first element lies in the caller's memory."""
    return array.__array_interface__["data"][0]


def _within(array: np.ndarray, one: _Placed) -> bool:
    """Whether all bytes of an array are in the place of another."""
    low, size = extent(array)
    other_low, other_size = extent(one.array)
    first, other = _start(array) + low, _start(one.array) + other_low
    same = (first, size, array.strides) == (other, other_size, one.array.strides)
    return same or (one.whole and other <= first and first + size <= other + other_size)


def _bytes_of(array: np.ndarray, low: int, size: int) -> np.ndarray:
    """All bytes that a view spans, those between its elements too."""
    if size == 0:
        return np.zeros(0, np.uint8)
    if array.flags.c_contiguous:
        return array.reshape(-1).view(np.uint8)
    out = np.zeros(size, np.uint8)
    np.ndarray(array.shape, array.dtype, out, -low, array.strides)[...] = array
    return out
