"""A kernel of a plan, ready but for the addresses of a call's arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fkjit.ops.op.request import Launch
from fkjit.runtime.device import KeptLaunch, LoadedKernel, ReadyLaunch, flatten
from fkjit.runtime.tensor_map import TensorMap
from fkjit.spec import Dim3

MAX_MAPS = 1024  # of an argument, by address
MAX_LAUNCHES = 64  # whole, by all addresses

Start = Callable[[tuple[int, ...], int], None]  # (addresses, stream): enqueue


def ready(
    kernel: LoadedKernel, launch: Launch, views: Mapping[str, Any], pointers: Sequence[str]
) -> tuple[Start, list[int]]:
    """What launches the kernel, and which of a call's addresses it wants, as places in `pointers`.

    views: the arrays' outlines, for the spec's `arguments`. pointers: names of a call's arrays.
    """
    named = dict(launch.spec.arguments(launch.params, launch.problem, views))
    grid = launch.spec.grid(launch.params, launch.problem)
    maps = [name for name in kernel.names if isinstance(named.get(name), TensorMap)]
    own = [name for name in kernel.names if name in pointers]
    head = [*maps, *own]
    if list(kernel.names[: len(head)]) != head:
        raise AssertionError(f"{kernel.spec.id}: maps and pointers are not its first arguments")
    if maps:
        of_maps = [pointers.index(name.removesuffix("_map")) for name in maps]
        places = list(dict.fromkeys([*of_maps, *map(pointers.index, own)]))
        return MappedLaunch(kernel, grid, named, [pointers[at] for at in places]), places
    packed = kernel.packing.pack(*flatten(kernel.names, named | dict.fromkeys(own, 0)))
    return ReadyLaunch(kernel, grid, packed, len(own)), [pointers.index(name) for name in own]


class MappedLaunch:
    """A kernel with its grid and arguments: maps of arrays (argument `q_map` of array `q`), then
    pointers, then what stays the same.

    A map is kept by the address it was encoded for, and a whole launch by all of them: memory of
    arrays comes again, and encoding and packing take longer than the launch.
    """

    def __init__(
        self, kernel: LoadedKernel, grid: Dim3, named: Mapping[str, Any], pointers: Sequence[str]
    ) -> None:
        """`pointers`: the names of the arrays whose addresses it is called with, in order."""
        maps = [name for name in kernel.names if isinstance(named.get(name), TensorMap)]
        own = [name for name in kernel.names if name in pointers]
        self.kernel, self.grid = kernel, grid
        self.maps: list[tuple[TensorMap, int, dict[int, bytes]]] = [
            (named[name], pointers.index(name.removesuffix("_map")), {}) for name in maps
        ]
        self.places = [pointers.index(name) for name in own]
        self.tail = flatten(kernel.names[len(maps) + len(own) :], named)
        self.launches: dict[tuple[int, ...], KeptLaunch] = {}

    def __call__(self, pointers: tuple[int, ...], stream: int) -> None:
        """Enqueue on `stream`; the device must be current."""
        start = self.launches.get(pointers)
        if start is None:
            start = self._keep(pointers)
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
