"""Launches of kernels whose first arguments are tensor maps, when only addresses are new."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fkjit.device import LoadedKernel, flatten
from fkjit.spec import Dim3
from fkjit.tensor_map import TensorMap

MAX_MAPS = 1024  # of an argument, by address
MAX_PACKED = 64  # whole argument lists, by all addresses


def has_maps(named: Mapping[str, Any]) -> bool:
    """Whether any argument is a tensor map."""
    return any(isinstance(value, TensorMap) for value in named.values())


class MappedLaunch:
    """A kernel with its grid and arguments: maps of arrays (argument `q_map` of array `q`), then
    pointers, then what stays the same.

    A map is kept by the address it was encoded for, and a packed list by all of them: memory of
    arrays comes again.
    """

    def __init__(
        self, kernel: LoadedKernel, grid: Dim3, named: Mapping[str, Any], pointers: Sequence[str]
    ) -> None:
        """`pointers`: the names of a call's arrays, in the order in which it gives addresses."""
        maps = [name for name in kernel.names if isinstance(named.get(name), TensorMap)]
        own = [name for name in kernel.names if name in pointers]
        head = [*maps, *own]
        if list(kernel.names[: len(head)]) != head:
            raise AssertionError(f"{kernel.spec.id}: maps and pointers are not its first arguments")
        self.kernel, self.grid = kernel, grid
        self.maps: list[tuple[TensorMap, int, dict[int, bytes]]] = [
            (named[name], pointers.index(name.removesuffix("_map")), {}) for name in maps
        ]
        self.places = [pointers.index(name) for name in own]
        self.tail = flatten(kernel.names[len(head) :], named)
        self.packed: dict[tuple[int, ...], bytes] = {}

    def __call__(self, pointers: Sequence[int], stream: int) -> None:
        """Enqueue on `stream`; the device must be current."""
        key = tuple(pointers)
        packed = self.packed.get(key)
        if packed is None:
            packed = self._pack(key)
        self.kernel.launch_packed(self.grid, packed, stream)

    def _pack(self, pointers: tuple[int, ...]) -> bytes:
        maps = [
            encoded.get(pointers[at]) or _encode(one, encoded, pointers[at])
            for one, at, encoded in self.maps
        ]
        if len(self.packed) >= MAX_PACKED:
            self.packed.clear()
        made = self.kernel.packing.pack(*maps, *[pointers[at] for at in self.places], *self.tail)
        self.packed[pointers] = made
        return made


def _encode(one: TensorMap, encoded: dict[int, bytes], pointer: int) -> bytes:
    if len(encoded) >= MAX_MAPS:
        encoded.clear()
    made = encoded[pointer] = one.encode(pointer)
    return made
