"""The warm path of `fkjit.attention`: a geometry checked once is a plan; what is left of a call is
to allocate the output, pack the arguments and launch.

Most calls are like the last one with the same options: `again` asks that plan whether the tensors
are like those it had, by PyTorch's own test, which takes a third of the time of making a geometry
and looking it up (`find`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any

from fkjit.ops.attention.checks import Request
from fkjit.ops.attention.kernels_sm90 import COUNTERS
from fkjit.ops.attention.problem import grid
from fkjit.ops.op import torch_ops
from fkjit.runtime import workspace
from fkjit.runtime.device import KeptLaunch, LoadedKernel, flatten
from fkjit.runtime.interop import Pointer, outline
from fkjit.runtime.tensor_map import TensorMap
from fkjit.sanitizer import refuse_gpu

MAX_PLANS = 4096
MAX_LAUNCHES = 64  # of a geometry that are kept, by their addresses
_GRAD = 13  # where a geometry says that an input requires grad
_ALIGNMENT = 15  # bits of addresses that a geometry has

plans: dict[Any, Any] = {}  # by geometry and options; by options alone what they had last
geometries: dict[type, Callable[[Any, Any, Any], tuple[Any, ...]]] = {}  # of array types seen
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=plans.clear)  # GPUs may not work there: check calls again


def torch_geometry(q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    """All that a plan depends on, of three tensors: also why there may be none."""
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.get_device(), k.get_device(), v.get_device(),
        (q.data_ptr() | k.data_ptr() | v.data_ptr()) & _ALIGNMENT,
        q.requires_grad or k.requires_grad or v.requires_grad,
        q.is_neg() or k.is_neg() or v.is_neg(),
    )  # fmt: skip


def cupy_geometry(q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    """The same of three CuPy arrays."""
    return (
        q.shape, k.shape, v.shape, q.strides, k.strides, v.strides, q.dtype, k.dtype, v.dtype,
        q.data.device_id, k.data.device_id, v.data.device_id,
        (q.data.ptr | k.data.ptr | v.data.ptr) & _ALIGNMENT, False,
    )  # fmt: skip


def again(q: Any, k: Any, v: Any, options: tuple[Any, ...]) -> Any:
    """What the plan makes that these options had last; None where it does not fit these arrays."""
    try:
        plan = plans.get(options)
    except TypeError:  # no key at all: it is explained below
        return None
    return None if plan is None else plan.again(q, k, v)


def find(q: Any, k: Any, v: Any, options: tuple[Any, ...]) -> Any:
    """The plan for these arrays, or None: then the call is checked."""
    geometry = geometries.get(type(q))
    if geometry is None or not type(q) is type(k) is type(v):
        return None
    try:
        plan = plans.get((*geometry(q, k, v), *options))
    except (AttributeError, TypeError, RuntimeError):  # whatever it is, the check explains it
        return None
    if isinstance(plan, TorchPlan):
        plan.expect(q, k, v, options)
    return plan


@lru_cache(maxsize=1)
def _guards() -> Callable[..., Any] | None:
    """PyTorch's test whether a tensor is like another one as far as graphs of it are concerned: its
    type, dispatch keys, dtype, device, shape, strides, and whether gradients are wanted. None where
    this PyTorch has another test."""
    torch = sys.modules["torch"]

    def guard(x: Any) -> Callable[[Any], bool]:
        exact = {"dynamic_dims_sizes": [list(x.shape)], "dynamic_dims_strides": [list(x.stride())]}
        return torch._C._dynamo.guards.TensorGuards(x, **exact).check

    x = torch.zeros(2, 3, device="cpu")
    others = (x[:1], x.t(), x.t().contiguous().t(), x.double(), torch._neg_view(x), x.to("meta"), 0)
    try:
        fits = guard(x)
        return guard if fits(x.clone()) and not any(map(fits, others)) else None
    except Exception:
        return None


def _is_plain(option: Any) -> bool:
    """Whether equal keys mean equal options: a tensor is hashed by identity and may change."""
    if type(option) is tuple:
        return all(map(_is_plain, option))
    return type(option) in (bool, int, float, str, type(None))


def remember(
    request: Request, kernel: LoadedKernel | None, options: tuple[Any, ...], made: Any = None
) -> None:
    """The next call with arrays of this geometry takes the warm path: a plan with this kernel, or
    the one that is `made`."""
    q, k, v = request.q.array, request.k.array, request.v.array
    make = {"torch": (torch_geometry, TorchPlan), "cupy": (cupy_geometry, CupyPlan)}.get(
        request.q.kind
    )
    if make is None or not all(map(_is_plain, options)):
        return
    plain = (
        sys.modules["torch"].Tensor if request.q.kind == "torch" else sys.modules["cupy"].ndarray
    )
    if not plain is type(q) is type(k) is type(v):  # subclasses go the long way
        return
    geometry, plan = make
    key = (*geometry(q, k, v), *options)
    if key[_GRAD]:  # whether that is allowed may change between calls
        return
    if len(plans) >= MAX_PLANS:
        plans.clear()
    plans[key] = made or plan(request, kernel)
    geometries[type(q)] = geometry


class _Plan:
    __slots__ = (
        "counters", "dtype", "grid", "index", "kernel", "launches", "lse_shape", "maps",
        "shape", "tail",
    )  # fmt: skip

    def __init__(self, request: Request, kernel: LoadedKernel) -> None:
        self.kernel = kernel
        self.index = request.device
        self.dtype = request.q.array.dtype
        self.grid = request.spec.grid(request.params, request.problem)
        self.shape = request.output_shape
        self.lse_shape = request.lse_shape if request.return_lse else None
        o = Pointer(None, self.shape, request.problem["dtype"])
        named = request.spec.arguments(
            request.params,
            request.problem,
            {**request.pointers(o, Pointer(None)), "counters": 0},
        )
        names = tuple(name.removesuffix("_map") for name in kernel.names[:5])
        if names != ("q", "k", "v", "o", "lse"):
            raise AssertionError(f"{kernel.spec.id}: arguments begin {kernel.names[:5]}")
        self.tail = flatten(kernel.names, named)[5 + ("counters" in kernel.names) :]
        self.counters = None  # how many a launch needs; None: the kernel has no such argument
        if "counters" in kernel.names:  # what has a block of its own is not drawn
            tiles = grid(request.params, request.problem)[0]
            self.counters = COUNTERS if tiles > self.grid[0] else 0
        maps = [named[name] for name in kernel.names[:4]]
        self.maps: list[TensorMap] | None = maps if isinstance(maps[0], TensorMap) else None
        self.launches: dict[tuple[int, ...], KeptLaunch] = {}

    def launch(self, like: Any, stream: int, pointers: tuple[int, ...]) -> None:
        """Of q, k, v, o and lse at these addresses. A launch is kept for when they come again: to
        encode tensor maps and to pack everything takes longer than the launch."""
        if self.counters:
            pointers = (*pointers, workspace.find(like, self.index, stream, 0, self.counters)[1])
        start = self.launches.get(pointers)
        if start is None:
            start = self._keep(pointers)
        start(stream)

    def _keep(self, pointers: tuple[int, ...]) -> KeptLaunch:
        tensors: Any = pointers[:4]
        if self.maps is not None:
            tensors = [one.encode(at) for one, at in zip(self.maps, pointers[:4], strict=True)]
        none = (0,) if self.counters == 0 else ()
        packed = self.kernel.packing.pack(*tensors, *pointers[4:], *none, *self.tail)
        if len(self.launches) >= MAX_LAUNCHES:
            self.launches.clear()
        made = self.launches[pointers] = KeptLaunch(self.kernel, self.grid, packed)
        return made


class TorchPlan(_Plan):
    """A plan for torch tensors."""

    __slots__ = ("alignment", "guards", "like_lse", "like_o", "one_gpu", "torch")

    def __init__(self, request: Request, kernel: LoadedKernel) -> None:
        super().__init__(request, kernel)
        self.torch = torch = sys.modules["torch"]
        device = request.q.array.device
        self.like_o = outline(self.shape, request.problem["dtype"], device)
        self.like_lse = self.lse_shape and outline(self.lse_shape, "fp32", device)
        self.one_gpu = torch.cuda.device_count() == 1  # then it is the current one
        q_at, k_at, v_at = (view.array.data_ptr() for view in (request.q, request.k, request.v))
        self.alignment = (q_at | k_at | v_at) & _ALIGNMENT
        self.guards: tuple[Callable[[Any], bool], ...] | None = None

    def expect(self, q: Any, k: Any, v: Any, options: tuple[Any, ...]) -> None:
        """The next call with these options may well have tensors like these. (Not where autocast
        has made them: the next ones would be like those that it was given.)"""
        guard = _guards()
        if guard is None or torch_ops.autocasting():
            return
        if self.guards is None or not all(
            fits(x) for fits, x in zip(self.guards, (q, k, v), strict=True)
        ):
            self.guards = guard(q), guard(k), guard(v)
        plans[options] = self

    def again(self, q: Any, k: Any, v: Any) -> Any:
        """As `run`, if these are tensors as expected, else None."""
        q_fits, k_fits, v_fits = self.guards  # type: ignore[misc]
        if not (q_fits(q) and k_fits(k) and v_fits(v)):
            return None
        inputs = q_at, k_at, v_at = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (q_at | k_at | v_at) & _ALIGNMENT != self.alignment:
            return None
        refuse_gpu("attention")
        return self._run(q, inputs)

    def run(self, q: Any, k: Any, v: Any) -> Any:
        """Launch; o, or (o, lse)."""
        return self._run(q, (q.data_ptr(), k.data_ptr(), v.data_ptr()))

    def _run(self, q: Any, inputs: tuple[int, int, int]) -> Any:
        torch = self.torch
        o, lse, lse_pointer = torch.empty_like(self.like_o), None, 0
        if self.like_lse is not None:
            lse = torch.empty_like(self.like_lse)
            lse_pointer = lse.data_ptr()
        pointers = (*inputs, o.data_ptr(), lse_pointer)
        current = torch._C
        stream = current._cuda_getCurrentRawStream(self.index)
        if self.one_gpu or current._cuda_getDevice() == self.index:
            self.launch(q, stream, pointers)
        else:
            with torch.cuda.device(self.index):
                self.launch(q, stream, pointers)
        return o if lse is None else (o, lse)


class CupyPlan(_Plan):
    """A plan for CuPy arrays."""

    __slots__ = ("cupy",)

    def __init__(self, request: Request, kernel: LoadedKernel) -> None:
        super().__init__(request, kernel)
        self.cupy = import_module("cupy")

    def run(self, q: Any, k: Any, v: Any) -> Any:
        """Launch; o, or (o, lse)."""
        cupy = self.cupy
        if cupy.cuda.runtime.getDevice() != self.index:
            with cupy.cuda.Device(self.index):
                return self.run(q, k, v)
        o = cupy.empty(self.shape, self.dtype)
        lse, lse_pointer = None, 0
        if self.lse_shape is not None:
            lse = cupy.empty(self.lse_shape, "f4")
            lse_pointer = lse.data.ptr
        stream = cupy.cuda.get_current_stream().ptr
        pointers = (q.data.ptr, k.data.ptr, v.data.ptr, o.data.ptr, lse_pointer)
        self.launch(q, stream, pointers)
        return o if lse is None else (o, lse)
