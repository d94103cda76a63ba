"""Launches of kernels whose first arguments are tensor maps, when only addresses are new."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fkjit.runtime.device import KeptLaunch, LoadedKernel, flatten
from fkjit.runtime.tensor_map import TensorMap
from fkjit.spec import Dim3

MAX_MAPS = 1024  # of an argument, by address
MAX_LAUNCHES = 64  # whole, by all addresses


def has_maps(named: Mapping[str, Any]) -> bool:
    """Whether any argument is a tensor map."""
    return any(isinstance(value, TensorMap) for value in named.values())


class MappedLaunch:
    """A kernel with its grid and arguments: maps of arrays (argument `q_map` of array `q`), then
    pointers, then what stays the same.

    A map is kept by the address it was encoded for, and a whole launch by all of them: memory of
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
        self.launches: dict[tuple[int, ...], KeptLaunch] = {}

    def __call__(self, pointers: Sequence[int], stream: int) -> None:
        """Enqueue on `stream`; the device must be current."""
        key = tuple(pointers)
        start = self.launches.get(key)
        if start is None:
            start = self._keep(key)
        start(stream)

    def _keep(self, pointers: tuple[int, ...]) -> KeptLaunch:
        maps = [
            encoded.get(pointers[at]) or _encode(one, encoded, pointers[at])
            for one, at, encoded in self.maps
        ]
        if len(self.launches) >= MAX_LAUNCHES:
            self.launches.clear()
        packed = self.kernel.packing.pack(*maps, *[pointers[at] for at in self.places], *self.tail)
        made = self.launches[pointers] = KeptLaunch(self.kernel, self.grid, packed)
        return made


def _encode(one: TensorMap, encoded: dict[int, bytes], pointer: int) -> bytes:
    if len(encoded) >= MAX_MAPS:
        encoded.clear()
    made = encoded[pointer] = one.encode(pointer)
    return made
