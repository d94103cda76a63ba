"""The warm path of a simple op: a geometry checked once is a plan; what is left of a call is to
allocate outputs, pack the arguments and launch."""

from __future__ import annotations

import operator
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fkjit.ops.op.checks import Pair, extent
from fkjit.ops.op.mapped_launch import MappedLaunch, has_maps
from fkjit.runtime import interop, workspace
from fkjit.runtime.device import LoadedKernel, ReadyLaunch, flatten

if TYPE_CHECKING:
    from fkjit.ops.op.op import Output, Request

MAX_PLANS = 4096
_ALIGNMENT = 31  # bits of an address that a plan depends on

Key = tuple[Any, ...]
Geometry = tuple[list[int], Key]  # the pointers, and all else that a plan depends on


# Of an array: where it is, and what a plan depends on. A subclass of torch's or CuPy's class has a
# type of its own, and no plan.
_ADDRESS = {"torch": "{x}.data_ptr()", "cupy": "{x}.data.ptr"}
_TRAITS = {
    "torch": "type({x}), {x}.shape, {x}.stride(), {x}.dtype, {x}.get_device(), {x}.is_neg(), "
    "{x}.requires_grad",
    "cupy": "type({x}), {x}.shape, {x}.strides, {x}.dtype, {x}.data.device_id",
}


@lru_cache(maxsize=64)
def geometry(kind: str, count: int) -> Callable[..., Geometry]:
    """What makes a geometry of `count` arrays, some of them None.

    Each call goes through it, so it is written out array by array: a loop takes half as long again.
    """
    names, pointers, keys = [f"x{i}" for i in range(count)], [], []
    for i, x in enumerate(names):
        pointers.append(f"p{i} := 0 if {x} is None else {_ADDRESS[kind].format(x=x)}")
        traits = _TRAITS[kind].format(x=x)
        keys.append(f"None if {x} is None else ({traits}, p{i} & {_ALIGNMENT})")
    made = f"[{', '.join(pointers)}], ({', '.join(keys)},)"
    return eval(f"lambda {', '.join(names)}: ({made})")


_torch: Any = None


def _types(kind: str) -> tuple[type, ...]:
    """The types that have plans; what a subclass means, nobody knows. One of them was seen, so the
    framework is imported."""
    global _torch
    if kind == "torch":
        _torch = sys.modules["torch"]
        return _torch.Tensor, _torch.nn.Parameter
    return (sys.modules["cupy"].ndarray,)


def _is_plain(option: Any) -> bool:
    """Whether equal keys mean equal options: a tensor is hashed by identity and may change."""
    if type(option) is tuple:
        return all(map(_is_plain, option))
    return type(option) in (bool, int, float, str, type(None))


_all: weakref.WeakSet[Plans] = weakref.WeakSet()


def _after_fork() -> None:
    """In a child process GPUs may not work: calls are to be checked again."""
    for plans in _all:
        plans.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Plans:
    """The plans of one op, by geometry and options."""

    def __init__(self, call: str, names: tuple[str, ...]) -> None:
        self.call, self.names = call, names
        self.known: dict[Key, Plan] = {}
        self.geometries: dict[type, Callable[..., Geometry]] = {}  # by the type of the first array
        _all.add(self)

    def find(
        self, arrays: Sequence[Any], options: tuple[Any, ...]
    ) -> tuple[Plan, list[int]] | None:
        """The plan for these arrays and where they are, or None: then the call is checked."""
        geometry = self.geometries.get(type(arrays[0]))
        if geometry is None:
            return None
        try:
            pointers, key = geometry(*arrays)
            plan = self.known.get((key, options))
        except (AttributeError, TypeError, RuntimeError):  # whatever it is, the check explains it
            return None
        if plan is None or (plan.guarded and plan.refuses(pointers)):
            return None
        return plan, pointers

    def forget(self) -> None:
        """Drop every plan (for tests): the next call is checked."""
        self.known.clear()
        self.geometries.clear()

    def remember(
        self,
        arrays: Sequence[Any],
        options: tuple[Any, ...],
        request: Request,
        kernels: Sequence[LoadedKernel],
        pairs: Sequence[Pair],
    ) -> None:
        """The next call with arrays of this geometry takes the warm path."""
        if request.like.kind not in ("torch", "cupy") or not all(map(_is_plain, options)):
            return
        types = _types(request.like.kind)
        if not all(x is None or type(x) in types for x in arrays):
            return
        apart = geometry(request.like.kind, len(arrays))
        self.geometries.update(dict.fromkeys(types, apart))
        key = (apart(*arrays)[1], options)
        if len(self.known) >= MAX_PLANS:
            self.known.clear()
        plan = self.known.get(key)
        if plan is None:
            make = TorchPlan if request.like.kind == "torch" else CupyPlan
            plan = make(self.names, request, kernels)
            plan.wants_grad = any(getattr(x, "requires_grad", False) for x in arrays)
        plan.allow(self.names, pairs)
        plan.guarded = bool(plan.guards) or plan.wants_grad
        self.known[key] = plan  # last: other threads take it from here


class Plan:
    """What is left to do for one geometry."""

    def __init__(
        self, names: tuple[str, ...], request: Request, kernels: Sequence[LoadedKernel]
    ) -> None:
        self.device = request.like.device
        self.wants_grad = False  # an input requires grad: only where autograd is off
        self.guarded = False  # whether it may refuse anything
        self.workspace, self.counters = request.workspace, request.counters
        self.meets = bool(self.workspace or self.counters)
        outputs = {name: output for name, output in request.outputs.items() if output is not None}
        self.allocations = [
            (names.index(name), self.allocation(request, output))
            for name, output in outputs.items()
            if output.given is None
        ]
        self.returned = [names.index(name) for name, o in outputs.items() if o.returned]
        known = set(request.inputs) | set(outputs)
        self.pointers = (*names, *workspace.ARGUMENTS)
        views = {name: _stand_in(request, name) for name in names if name in known}
        views |= dict.fromkeys((name for name in names if name not in known), interop.Pointer(None))
        self.launches = [
            self._ready(kernel, launch, views)
            for kernel, launch in zip(kernels, request.launches, strict=True)
        ]
        self.guards: dict[tuple[int, int], tuple[int, int, set[int]]] = {}

    def _ready(self, kernel: LoadedKernel, launch: Any, views: dict[str, Any]) -> tuple[Any, Any]:
        """A kernel that waits for its pointers, and what picks them out of all pointers."""
        named = dict(launch.spec.arguments(launch.params, launch.problem, views))
        grid = launch.spec.grid(launch.params, launch.problem)
        if has_maps(named):
            return MappedLaunch(kernel, grid, named, self.pointers), tuple
        own = [name for name in kernel.names if name in self.pointers]
        if list(kernel.names[: len(own)]) != own:
            raise AssertionError(f"{kernel.spec.id}: pointers are not its first arguments")
        packed = kernel.packing.pack(*flatten(kernel.names, named | dict.fromkeys(own, 0)))
        places = [self.pointers.index(name) for name in own]
        neighbours = places == list(range(places[0], places[0] + len(own)))
        pick = [slice(places[0], places[0] + len(own))] if neighbours else places
        return ReadyLaunch(kernel, grid, packed, len(own)), operator.itemgetter(*pick)

    def allow(self, names: tuple[str, ...], pairs: Sequence[Pair]) -> None:
        """Arrays as far apart as these do not overlap in a harmful way: that was checked."""
        for name, view, other, beside in pairs:
            one, two = names.index(name), names.index(other)
            (low, high), (low2, high2) = extent(view), extent(beside)
            guard = self.guards.setdefault((one, two), (low2 - high, high2 - low, set()))
            if len(guard[2]) < MAX_PLANS:
                guard[2].add(view.pointer - beside.pointer)

    def refuses(self, pointers: Sequence[int]) -> bool:
        """Whether autograd has to see the call, or arrays that the caller gave may overlap in a way
        that was not checked yet."""
        if self.wants_grad and _torch.is_grad_enabled():
            return True
        for (one, two), (low, high, harmless) in self.guards.items():
            apart = pointers[one] - pointers[two]
            if low < apart < high and apart not in harmless:
                return True
        return False

    def allocation(self, request: Request, output: Output) -> Callable[[], Any]:
        """What makes a new array for an output."""
        raise NotImplementedError

    def launch(self, pointers: list[int], stream: int, like: Any) -> None:
        """Launch every kernel on `stream`; the device is current."""
        scratch: tuple[int, int, Any] = (0, 0, None)
        if self.meets:
            scratch = workspace.find(like, self.device, stream, self.workspace, self.counters)
        pointers += scratch[:2]
        for start, pick in self.launches:
            start(pick(pointers), stream)
        del scratch  # whoever gets that memory next on this stream comes after us

    def run(self, arrays: list[Any], pointers: list[int]) -> Any:
        """Launch on these arrays, None for what is to be allocated; what the call returns."""
        raise NotImplementedError

    def result(self, arrays: Sequence[Any]) -> Any:
        """Of the arrays that are given back: one, several as a tuple, or None."""
        returned = self.returned
        if len(returned) == 1:
            return arrays[returned[0]]
        return tuple([arrays[i] for i in returned]) or None


class TorchPlan(Plan):
    """A plan for torch tensors."""

    def allocation(self, request: Request, output: Output) -> Callable[[], Any]:
        like = interop.outline(output.shape, output.dtype, request.like.array.device)
        return partial(_torch.empty_like, like)

    def run(self, arrays: list[Any], pointers: list[int]) -> Any:
        current = _torch._C
        for at, allocate in self.allocations:
            arrays[at] = made = allocate()
            pointers[at] = made.data_ptr()
        stream = current._cuda_getCurrentRawStream(self.device)
        if current._cuda_getDevice() == self.device:
            self.launch(pointers, stream, arrays[0])
        else:
            with _torch.cuda.device(self.device):
                self.launch(pointers, stream, arrays[0])
        return self.result(arrays)


class CupyPlan(Plan):
    """A plan for CuPy arrays."""

    def allocation(self, request: Request, output: Output) -> Callable[[], Any]:
        dtype = interop.numpy_dtype(output.dtype)
        return partial(import_module("cupy").empty, output.shape, dtype)

    def run(self, arrays: list[Any], pointers: list[int]) -> Any:
        cuda = import_module("cupy.cuda")
        if cuda.runtime.getDevice() != self.device:
            with cuda.Device(self.device):
                return self.run(arrays, pointers)
        for at, allocate in self.allocations:
            arrays[at] = made = allocate()
            pointers[at] = made.data.ptr
        self.launch(pointers, cuda.get_current_stream().ptr, arrays[0])
        return self.result(arrays)


def _stand_in(request: Request, name: str) -> interop.Pointer:
    """Shape and strides of an array, for the spec's `arguments`."""
    if name in request.inputs:
        return interop.Pointer(request.inputs[name])
    output = request.outputs[name]
    assert output is not None
    return interop.Pointer(output.given, output.shape, output.dtype)
