"""The warm path of a simple op: a geometry checked once is a plan; what is left of a call is to
allocate outputs, pack the arguments and launch."""

from __future__ import annotations

import operator
import struct
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fkjit import interop
from fkjit.device import LoadedKernel, flatten
from fkjit.ops import workspace
from fkjit.ops.simple_checks import Pair, extent

if TYPE_CHECKING:
    from fkjit.ops.simple import Output, Request

MAX_PLANS = 4096
_ALIGNMENT = 31  # bits of an address that a plan depends on

Key = tuple[Any, ...]
Geometry = tuple[Key, list[int]]  # all that a plan depends on, and the pointers


def torch_geometry(arrays: Sequence[Any]) -> Geometry:
    """Of tensors. A subclass has a type of its own in its key, and no plan."""
    pointers = [0 if x is None else x.data_ptr() for x in arrays]
    key = [
        None if x is None else
        (type(x), x.shape, x.stride(), x.dtype, x.get_device(), x.is_neg(), x.requires_grad)
        for x in arrays
    ]  # fmt: skip
    return (*key, *[p & _ALIGNMENT for p in pointers]), pointers


def cupy_geometry(arrays: Sequence[Any]) -> Geometry:
    """The same of CuPy arrays."""
    memory = [None if x is None else x.data for x in arrays]
    pointers = [0 if m is None else m.ptr for m in memory]
    key = [
        None if x is None else (type(x), x.shape, x.strides, x.dtype, x.data.device_id)
        for x in arrays
    ]
    return (*key, *[p & _ALIGNMENT for p in pointers]), pointers


def _is_planned(kind: str, arrays: Sequence[Any]) -> bool:
    """Whether these are plain arrays and parameters; what a subclass means, nobody knows."""
    plain = _torch_types if kind == "torch" else (_cupy_type,)
    return all(x is None or type(x) in plain for x in arrays)


_geometries: dict[type, Callable[[Sequence[Any]], Geometry]] = {}  # of array types seen
_torch: Any = None
_torch_types: tuple[type, ...] = ()
_cupy_type: type | None = None


def _learn(kind: str) -> None:
    """Take arrays of this framework from now on; it is imported, since one was seen."""
    global _torch, _torch_types, _cupy_type
    if kind == "torch":
        _torch = sys.modules["torch"]
        _torch_types = (_torch.Tensor, _torch.nn.Parameter)
        _geometries.update(dict.fromkeys(_torch_types, torch_geometry))
    else:
        _cupy_type = sys.modules["cupy"].ndarray
        _geometries[_cupy_type] = cupy_geometry  # type: ignore[index]


def _is_plain(option: Any) -> bool:
    """Whether equal keys mean equal options: a tensor is hashed by identity and may change."""
    if type(option) is tuple:
        return all(map(_is_plain, option))
    return type(option) in (bool, int, float, str, type(None))


class Plans:
    """The plans of one op, by geometry and options."""

    def __init__(self, call: str, names: tuple[str, ...]) -> None:
        self.call, self.names = call, names
        self.known: dict[Key, Plan] = {}

    def find(
        self, arrays: Sequence[Any], options: tuple[Any, ...]
    ) -> tuple[Plan, list[int]] | None:
        """The plan for these arrays and where they are, or None: then the call is checked."""
        geometry = _geometries.get(type(arrays[0]))
        if geometry is None:
            return None
        try:
            key, pointers = geometry(arrays)
            plan = self.known.get((key, options))
        except (AttributeError, TypeError, RuntimeError):  # whatever it is, the check explains it
            return None
        if (
            plan is None
            or (plan.guards and plan.overlaps(pointers))
            or (plan.wants_grad and _torch.is_grad_enabled())
        ):
            return None
        return plan, pointers

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
        _learn(request.like.kind)
        if not _is_planned(request.like.kind, arrays):
            return
        key = (_geometries[type(arrays[0])](arrays)[0], options)
        if len(self.known) >= MAX_PLANS:
            self.known.clear()
        plan = self.known.get(key)
        if plan is None:
            make = TorchPlan if request.like.kind == "torch" else CupyPlan
            plan = self.known[key] = make(self.names, request, kernels)
            plan.wants_grad = any(getattr(x, "requires_grad", False) for x in arrays)
        plan.allow(self.names, pairs)


class Plan:
    """What is left to do for one geometry."""

    def __init__(
        self, names: tuple[str, ...], request: Request, kernels: Sequence[LoadedKernel]
    ) -> None:
        self.device = request.like.device
        self.wants_grad = False  # an input requires grad: only where autograd is off
        self.workspace, self.counters = request.workspace, request.counters
        outputs = {name: output for name, output in request.outputs.items() if output is not None}
        self.allocations = [
            (names.index(name), self.allocation(names, request, output))
            for name, output in outputs.items()
            if output.given is None
        ]
        self.returned = [names.index(name) for name, o in outputs.items() if o.returned]
        known = set(request.inputs) | set(outputs)
        self.pointers = (*names, *workspace.ARGUMENTS)
        views = {name: _stand_in(request, name) for name in names if name in known}
        views |= dict.fromkeys((name for name in names if name not in known), interop.Pointer(None))
        self.launches = [
            (
                kernel,
                launch.spec.grid(launch.params, launch.problem),
                *self._arguments(kernel, launch, views),
            )
            for kernel, launch in zip(kernels, request.launches, strict=True)
        ]
        self.guards: dict[tuple[int, int], tuple[int, int, set[int]]] = {}

    def _arguments(
        self, kernel: LoadedKernel, launch: Any, views: dict[str, Any]
    ) -> tuple[Any, ...]:
        """What packs a kernel's pointers, where it finds them, and its other arguments packed."""
        named = dict(launch.spec.arguments(launch.params, launch.problem, views))
        own = [name for name in kernel.names if name in self.pointers]
        if list(kernel.names[: len(own)]) != own:
            raise AssertionError(f"{kernel.spec.id}: pointers are not its first arguments")
        packed = kernel.packing.pack(*flatten(kernel.names, named | dict.fromkeys(own, 0)))
        pack = struct.Struct(f"={len(own)}Q")
        places = [self.pointers.index(name) for name in own]
        neighbours = places == list(range(places[0], places[0] + len(own)))
        pick = [slice(places[0], places[0] + len(own))] if neighbours else places
        return pack.pack, operator.itemgetter(*pick), packed[pack.size :]

    def allow(self, names: tuple[str, ...], pairs: Sequence[Pair]) -> None:
        """Arrays as far apart as these do not overlap in a harmful way: that was checked."""
        for name, view, other, beside in pairs:
            one, two = names.index(name), names.index(other)
            (low, high), (low2, high2) = extent(view), extent(beside)
            guard = self.guards.setdefault((one, two), (low2 - high, high2 - low, set()))
            if len(guard[2]) < MAX_PLANS:
                guard[2].add(view.pointer - beside.pointer)

    def overlaps(self, pointers: Sequence[int]) -> bool:
        """Whether arrays that the caller gave may overlap in a way that was not checked yet."""
        for (one, two), (low, high, harmless) in self.guards.items():
            apart = pointers[one] - pointers[two]
            if low < apart < high and apart not in harmless:
                return True
        return False

    def allocation(self, names: tuple[str, ...], request: Request, output: Output) -> Any:
        """What makes a new array for an output, given the call's arrays."""
        raise NotImplementedError

    def launch(self, pointers: list[int], stream: int, like: Any) -> None:
        """Launch every kernel on `stream`; the device is current."""
        scratch: tuple[int, int, Any] = (0, 0, None)
        if self.workspace or self.counters:
            scratch = workspace.find(like, self.device, stream, self.workspace, self.counters)
        pointers += scratch[:2]
        for kernel, grid, pack, pick, constants in self.launches:
            kernel.launch_packed(grid, pack(*pick(pointers)) + constants, stream)
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

    def allocation(self, names: tuple[str, ...], request: Request, output: Output) -> Any:
        for name, view in request.inputs.items():
            if (
                view is not None
                and tuple(view.shape) == tuple(output.shape)
                and view.dtype == output.dtype
                and view.array.is_contiguous()
            ):  # half the host time of torch.empty
                at, alike = names.index(name), _torch.empty_like
                return lambda arrays: alike(arrays[at])
        shape, device = output.shape, request.like.array.device
        dtype, empty = interop.torch_dtype(output.dtype), _torch.empty
        return lambda arrays: empty(shape, dtype=dtype, device=device)

    def run(self, arrays: list[Any], pointers: list[int]) -> Any:
        current = _torch._C
        for at, allocate in self.allocations:
            arrays[at] = made = allocate(arrays)
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

    def allocation(self, names: tuple[str, ...], request: Request, output: Output) -> Any:
        shape, dtype = output.shape, interop.numpy_dtype(output.dtype)
        empty = import_module("cupy").empty
        return lambda arrays: empty(shape, dtype)

    def run(self, arrays: list[Any], pointers: list[int]) -> Any:
        cuda = import_module("cupy.cuda")
        if cuda.runtime.getDevice() != self.device:
            with cuda.Device(self.device):
                return self.run(arrays, pointers)
        for at, allocate in self.allocations:
            arrays[at] = made = allocate(arrays)
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
