"""The warm path of `fkjit.attention`: a geometry checked once is a plan; what is left of a call is
to allocate the output, pack the arguments and launch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from fkjit.device import LoadedKernel, flatten
from fkjit.interop import Pointer
from fkjit.ops import workspace
from fkjit.ops.attention_checks import Request
from fkjit.ops.attention_hopper import COUNTERS
from fkjit.ops.attention_problem import grid
from fkjit.tensor_map import TensorMap

MAX_PLANS = 4096
MAX_PACKED = 64  # calls of a geometry, by their addresses, whose arguments are kept
_GRAD = 13  # where a geometry says that an input requires grad

plans: dict[Any, Any] = {}
geometries: dict[type, Callable[[Any, Any, Any], tuple[Any, ...]]] = {}  # of array types seen
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=plans.clear)  # GPUs may not work there: check calls again


def torch_geometry(q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    """All that a plan depends on, of three tensors: also why there may be none."""
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.get_device(), k.get_device(), v.get_device(),
        (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15,
        q.requires_grad or k.requires_grad or v.requires_grad,
        q.is_neg() or k.is_neg() or v.is_neg(),
    )  # fmt: skip


def cupy_geometry(q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    """The same of three CuPy arrays."""
    return (
        q.shape, k.shape, v.shape, q.strides, k.strides, v.strides, q.dtype, k.dtype, v.dtype,
        q.data.device_id, k.data.device_id, v.data.device_id,
        (q.data.ptr | k.data.ptr | v.data.ptr) & 15, False,
    )  # fmt: skip


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
        "counters", "device", "dtype", "grid", "index", "kernel", "lse_shape", "maps", "packed",
        "shape", "tail",
    )  # fmt: skip

    def __init__(self, request: Request, kernel: LoadedKernel) -> None:
        self.kernel = kernel
        self.index = request.device
        self.device = request.q.array.device
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
        self.packed: dict[tuple[int, ...], bytes] = {}

    def launch(self, like: Any, stream: int, *pointers: int) -> None:
        """Of q, k, v, o and lse at these addresses. Arguments are kept for when they come again:
        to encode tensor maps and to pack everything takes longer than the launch."""
        if self.counters:
            pointers = (*pointers, workspace.find(like, self.index, stream, 0, self.counters)[1])
        elif self.counters is not None:
            pointers = (*pointers, 0)
        packed = self.packed.get(pointers)
        if packed is None:
            packed = self._pack(*pointers)
        self.kernel.launch_packed(self.grid, packed, stream)

    def _pack(self, *pointers: int) -> bytes:
        tensors: Any = pointers[:4]
        if self.maps is not None:
            tensors = [one.encode(at) for one, at in zip(self.maps, pointers[:4], strict=True)]
        if len(self.packed) >= MAX_PACKED:
            self.packed.clear()
        made = self.kernel.packing.pack(*tensors, *pointers[4:], *self.tail)
        self.packed[pointers] = made
        return made


class TorchPlan(_Plan):
    """A plan for torch tensors."""

    __slots__ = ("like_q", "torch")

    def __init__(self, request: Request, kernel: LoadedKernel) -> None:
        super().__init__(request, kernel)
        self.torch = sys.modules["torch"]
        self.like_q = self.shape == tuple(request.q.shape) and request.q.array.is_contiguous()

    def run(self, q: Any, k: Any, v: Any) -> Any:
        """Launch; o, or (o, lse)."""
        torch = self.torch
        if self.like_q:  # half the host time of torch.empty
            o = torch.empty_like(q)
        else:
            o = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        lse, lse_pointer = None, 0
        if self.lse_shape is not None:
            lse = torch.empty(self.lse_shape, dtype=torch.float32, device=self.device)
            lse_pointer = lse.data_ptr()
        pointers = q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr(), lse_pointer
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        if torch._C._cuda_getDevice() == self.index:
            self.launch(q, stream, *pointers)
        else:
            with torch.cuda.device(self.index):
                self.launch(q, stream, *pointers)
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
        self.launch(q, stream, q.data.ptr, k.data.ptr, v.data.ptr, o.data.ptr, lse_pointer)
        return o if lse is None else (o, lse)
