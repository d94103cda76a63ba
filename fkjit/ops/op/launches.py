"""A kernel of a plan, ready but for the addresses of a call's arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fkjit.ops.op.request import Launch
from fkjit.runtime.device import KeptLaunch, LoadedKernel, ReadyLaunch, flatten
from fkjit.runtime.tensor_map import TensorMap
from fkjit.spec import Dim3

MAX_MAPS = 1024  # of an argument, by address
MAX_LAUNCHES = 64  # whole, by all addresses

Start = Callable[[tuple[int, ...], int], None]  # (addresses, stream): enqueue


class Form(NamedTuple):
    """What the lines of a plan's function that launch a kernel depend on."""

    places: tuple[int, ...]  # of the addresses that it wants, among a call's
    ready: bool = False  # a `ReadyLaunch`
    together: bool = False  # cooperative
    dependent: bool = False


def form_of(start: Start, places: Sequence[int]) -> Form:
    """The form of what `ready` returned."""
    if not isinstance(start, ReadyLaunch):
        return Form(tuple(places))
    kernel = start.kernel
    return Form(tuple(places), True, kernel.spec.cooperative, kernel.dependent)


def bound_for(at: int, form: Form) -> list[str]:
    """Names that the lines of launch number `at` find beside them."""
    lines = [f"start{at} = steps.starts[{at}]"]
    if form.ready:
        lines += [
            f"{', '.join(_given(at))} = start{at}.given",
            f"write{at}, start{at}_in_graph = start{at}.write, start{at}.start",
            f"launch{at}, is_capturing = outside_graphs(start{at}.kernel)",
        ]
    return lines


def lines_for(at: int, form: Form, pointers: str) -> list[str]:
    """Launch number `at`, on `stream`, with these addresses."""
    if not form.ready:
        return [f"start{at}(({pointers},), stream)"]
    given = f"({', '.join(_given(at))}, stream, params{'' if form.together else ', 0'})"
    launch = [f"launch{at}{given}"]
    if form.dependent:
        launch = [f"if is_capturing(stream): start{at}_in_graph{given}", f"else: {launch[0]}"]
    return [
        "try:",
        f" room, params = start{at}.room; write{at}(room, 0, {pointers})",
        *(f" {line}" for line in launch),
        f"except Exception as error: raise start{at}.refused(error) from error",
    ]


def _given(at: int) -> list[str]:
    return [f"given{at}_{i}" for i in range(8)]


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
        of_maps = {name: _array_of(name, named[name], views) for name in maps}
        places = list(dict.fromkeys(map(pointers.index, [*of_maps.values(), *own])))
        arrays = [pointers[at] for at in places]
        return MappedLaunch(kernel, grid, named, of_maps, arrays), places
    packed = kernel.packing.pack(*flatten(kernel.names, named | dict.fromkeys(own, 0)))
    return ReadyLaunch(kernel, grid, packed, len(own)), [pointers.index(name) for name in own]


def _array_of(argument: str, given: TensorMap, views: Mapping[str, Any]) -> str:
    """The array that a map is of. Its argument's name does not tell: where a product has its
    operands swapped, `x_map` is a map of the weight."""
    for name, view in views.items():
        if view is given.array:
            return name
    raise AssertionError(f"{argument}: a map of no array of the call")


class MappedLaunch:
    """A kernel with its grid and arguments: maps of arrays, then pointers, then what stays the
    same.

    A map is kept by the address it was encoded for, and a whole launch by all of them: memory of
    arrays comes again, and encoding and packing take longer than the launch.
    """

    def __init__(
        self, kernel: LoadedKernel, grid: Dim3, named: Mapping[str, Any],
        of_maps: Mapping[str, str], pointers: Sequence[str],
    ) -> None:  # fmt: skip
        """`of_maps`: arguments that are maps, and the names of their arrays. `pointers`: those of
        the arrays whose addresses it is called with, in order."""
        own = [name for name in kernel.names if name in pointers]
        self.kernel, self.grid = kernel, grid
        self.maps: list[tuple[TensorMap, int, dict[int, bytes]]] = [
            (named[name], pointers.index(array), {}) for name, array in of_maps.items()
        ]
        self.places = [pointers.index(name) for name in own]
        self.tail = flatten(kernel.names[len(of_maps) + len(own) :], named)
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
