"""Loaded kernels and their launch. With `interop` the only module that touches a device.

A kernel is loaded once a device (`cupy.RawModule(path=…)`) and launched through the driver with its
arguments packed into one buffer, on the caller's own stream, so it is right under CUDA graph
capture. (The driver gets a pointer to each argument rather than the buffer as a whole, which it
lays out otherwise where an argument is a tensor map.)
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from typing import Any

from fkjit.arch import Target
from fkjit.cache.lookup import Entry, materialise
from fkjit.errors import CaptureError, DeviceError, LaunchError, ParameterError, ToolchainError
from fkjit.jit.build import build, build_all, gpu_target
from fkjit.jit.toolchain import cupy_cuda, explain_load_failure
from fkjit.runtime import abstract, pdl
from fkjit.runtime.interop import CPU, Pointer
from fkjit.runtime.tensor_map import MapTable, TensorMap
from fkjit.sanitizer import refuse_gpu
from fkjit.spec import Dim3, KernelSpec, Params, Problem

_STATIC_SHARED = 48 * 1024  # a block may have this much, static and dynamic, without opting in
_CAPTURE_ERRORS = (900, 907)  # cudaErrorStreamCapture*
_BUFFER_BYTES = 4096  # the driver's limit on a kernel's arguments


@dataclass(frozen=True)
class LoadedKernel:
    """One variant on one device, ready to launch."""

    spec: KernelSpec
    params: Params
    entry: Entry  # where the image came from, what it uses
    device: int
    function: int  # CUfunction
    threads: Dim3
    shared_bytes: int
    packing: struct.Struct  # the argument list in native alignment
    offsets: tuple[int, ...]  # of each argument
    names: tuple[str, ...]
    dependent: bool  # whether it waits for the kernel before it by itself
    keep: Any  # the module: unloading it would invalidate `function`

    def launch(self, grid: Dim3, values: tuple[Any, ...], stream: int) -> None:
        """Enqueue on `stream` (a CUstream handle). `values` are flat, in the signature's order.

        The device must be current. LaunchError if the driver refuses.
        """
        frame = _frame
        try:
            self.packing.pack_into(frame.memory, 0, *values)
        except struct.error as error:
            raise ParameterError(f"{self.spec.id}: {error} (arguments {self.names})") from error
        pointers = frame.pointers.get(self.function) or frame.point(self.function, self.offsets)
        try:
            start, extra = _start(self)
            given = (self.function, *grid, *self.threads, self.shared_bytes, stream, pointers)
            start(*given, *extra)
        except Exception as error:
            raise LaunchError(self.explain(error, grid)) from error

    def explain(self, error: Exception, grid: Dim3) -> str:
        return (
            f"{self.spec.id} [{self.spec.label(self.params)}] grid={grid} block={self.threads} "
            f"shared={self.shared_bytes} on device {self.device}: the driver refused the launch: "
            f"{error} (perhaps an earlier kernel's fault: rerun with CUDA_LAUNCH_BLOCKING=1)"
        )


class _Frame(threading.local):
    """This thread's argument buffer, and by kernel the addresses of its arguments in there."""

    def __init__(self) -> None:
        cuda = import_module("cupy.cuda")
        self.launch = cuda.driver.launchKernel
        self.launch_together = cuda.driver.launchCooperativeKernel
        self.is_capturing = cuda.runtime.streamIsCapturing
        cuda.runtime.setDevice(cuda.runtime.getDevice())  # makes a context current in this thread
        self.buffer = ctypes.create_string_buffer(_BUFFER_BYTES)
        self.memory = memoryview(self.buffer).cast("B")
        self.pointers: dict[int, int] = {}  # CUfunction -> kernelParams
        self.arrays: list[Any] = []  # what they point to

    def launch_dependent(self, *arguments: int) -> None:
        """As `launch`; in a CUDA graph the kernel's blocks need not wait to come in."""
        if self.is_capturing(arguments[-3]):
            pdl.launch(*arguments[:-1])
        else:
            self.launch(*arguments)

    def launch_together_dependent(self, *arguments: int) -> None:
        """The same of a kernel whose blocks wait for one another."""
        if self.is_capturing(arguments[-2]):
            pdl.launch(*arguments, together=True)
        else:
            self.launch_together(*arguments)

    def point(self, function: int, offsets: tuple[int, ...]) -> int:
        """kernelParams for a kernel whose arguments stand at these offsets of the buffer."""
        base = ctypes.addressof(self.buffer)
        array = _pointers(base + at for at in offsets)
        self.arrays.append(array)
        self.pointers[function] = ctypes.addressof(array)
        return self.pointers[function]


class ReadyLaunch(threading.local):
    """A kernel with its grid and its arguments, the first of which are pointers that change.

    Each thread has one of its own: the driver reads a call's arguments while other threads run.
    A plan's function does itself what a call of this does (`room`, `write`, `given`).
    """

    def __init__(self, kernel: LoadedKernel, grid: Dim3, packed: bytes, pointers: int) -> None:
        """`packed`: all arguments, of which the first `pointers` are to be written over."""
        buffer = ctypes.create_string_buffer(packed, len(packed))
        base = ctypes.addressof(buffer)
        array = _pointers(base + offset for offset in kernel.offsets)
        self.kernel, self.grid, self.keep = kernel, grid, array
        self.room = buffer, ctypes.addressof(array)  # where the pointers go, and kernelParams
        self.write = struct.Struct(f"={pointers}Q").pack_into
        self.given = (kernel.function, *grid, *kernel.threads, kernel.shared_bytes)
        self.start, self.extra = _start(kernel)

    def __call__(self, pointers: Sequence[int], stream: int) -> None:
        """Enqueue on `stream`; the device must be current. LaunchError if the driver refuses."""
        buffer, at = self.room
        self.write(buffer, 0, *pointers)
        try:
            self.start(*self.given, stream, at, *self.extra)
        except Exception as error:
            raise self.refused(error) from error

    def refused(self, error: Exception) -> LaunchError:
        return LaunchError(self.kernel.explain(error, self.grid))


def outside_graphs(kernel: LoadedKernel) -> tuple[Callable[..., None], Callable[[int], bool]]:
    """What launches a kernel on a stream that is not captured (`ReadyLaunch.given`, stream,
    kernelParams, and but for cooperative kernels 0), and what tells whether one is."""
    launch = _frame.launch_together if kernel.spec.cooperative else _frame.launch
    return launch, _frame.is_capturing


class KeptLaunch:
    """A kernel with its grid and all its arguments, for any thread, as often as it comes up."""

    __slots__ = ("array", "at", "buffer", "given", "grid", "kernel", "plain")

    def __init__(self, kernel: LoadedKernel, grid: Dim3, packed: bytes) -> None:
        self.kernel, self.grid = kernel, grid
        self.buffer = ctypes.create_string_buffer(packed, len(packed))
        base = ctypes.addressof(self.buffer)
        self.array = _pointers(base + offset for offset in kernel.offsets)
        self.at = ctypes.addressof(self.array)
        self.given = (kernel.function, *grid, *kernel.threads, kernel.shared_bytes)
        self.plain = not (kernel.spec.cooperative or kernel.dependent)

    def __call__(self, stream: int) -> None:
        """Enqueue on `stream`; the device must be current. LaunchError if the driver refuses."""
        try:
            if self.plain:
                _frame.launch(*self.given, stream, self.at, 0)
            else:
                start, extra = _start(self.kernel)
                start(*self.given, stream, self.at, *extra)
        except Exception as error:
            raise LaunchError(self.kernel.explain(error, self.grid)) from error


def _pointers(addresses: Iterable[int]) -> Any:
    found = tuple(addresses)
    return (ctypes.c_void_p * max(len(found), 1))(*found)


def _start(kernel: LoadedKernel) -> tuple[Callable[..., None], tuple[int, ...]]:
    """How this thread launches a kernel, and what that takes at the end."""
    if kernel.spec.cooperative:
        together = _frame.launch_together
        return (_frame.launch_together_dependent if kernel.dependent else together), ()
    return (_frame.launch_dependent if kernel.dependent else _frame.launch), (0,)


_frame: Any = None  # made by the first load, so that importing needs no CuPy
_loaded: dict[tuple[str, tuple[Any, ...], int], LoadedKernel] = {}
_loading = threading.RLock()


@lru_cache(maxsize=64)
def device_target(device: int) -> Target:
    """What to compile for this CUDA device; its `arch.gpu` is the device's name."""
    if device < CPU:
        return abstract.target_of(device)
    runtime = cupy_cuda().runtime
    try:
        major = runtime.deviceGetAttribute(75, device)  # cudaDevAttrComputeCapabilityMajor
        minor = runtime.deviceGetAttribute(76, device)
        name = runtime.getDeviceProperties(device)["name"]
    except Exception as error:
        raise DeviceError(f"CUDA device {device} cannot be used: {error}") from error
    found = gpu_target((major, minor))
    gpu = name.decode() if isinstance(name, bytes) else str(name)
    return replace(found, arch=replace(found.arch, gpu=gpu))


@lru_cache(maxsize=64)
def multiprocessors(device: int) -> int:
    """SMs of this CUDA device."""
    if device < CPU:
        return abstract.multiprocessors_of(device)
    return cupy_cuda().runtime.deviceGetAttribute(16, device)


def loaded(
    spec: KernelSpec, params: Params, device: int, stream: int = 0, call: str | None = None
) -> LoadedKernel:
    """The kernel on `device`, compiled and loaded if it was not yet, for a public call.

    `call`: its name, where it is not the spec's op. CaptureError when compiling or loading would be
    needed while `stream` is being captured into a CUDA graph.
    """
    asked = (spec.id, tuple(params.items()), device)
    try:
        found = _loaded.get(asked)
    except TypeError:  # a value that is no key: perhaps it equals one
        found = None
    if found is not None and found.spec is spec:
        return found
    params = spec.canonical(params)
    found = _find(spec, params, device)
    if found is None:
        _refuse_while_capturing(spec, params, stream, call or spec.op)
        to = device_target(device)
        spec.check(params, to.arch)
        entry = build(spec, params, to)  # not under the lock: other threads compile theirs
        with _loading:
            found = _find(spec, params, device) or _load(spec, dict(params), device, entry)
            _loaded[spec.id, tuple(params.items()), device] = found
    return found


def _find(spec: KernelSpec, params: Params, device: int) -> LoadedKernel | None:
    """A loaded kernel; `params` in canonical order."""
    found = _loaded.get((spec.id, tuple(params.items()), device))
    return found if found is not None and found.spec is spec else None


def load_all(launches: Sequence[Any], device: int, stream: int, call: str) -> list[LoadedKernel]:
    """`loaded` of a call's kernels; those to be compiled are compiled at the same time."""
    each = [(spec, spec.canonical(params)) for spec, params, _ in launches]
    missing = [one for one in each if _find(*one, device) is None]
    if len(missing) > 1 and not is_capturing(stream):  # then `loaded` says what to do
        build_all(missing, device_target(device))
    return [loaded(*one, device, stream, call) for one in each]


def forget() -> None:
    """Drop every loaded kernel (for tests): the next call looks in the cache again."""
    _loaded.clear()


@lru_cache(maxsize=1)
def _runtime() -> Any:
    return cupy_cuda().runtime


def is_capturing(stream: int) -> bool:
    """Whether work on `stream` would land in a CUDA graph under construction."""
    runtime = _runtime()
    try:
        return bool(runtime.streamIsCapturing(stream))
    except runtime.CUDARuntimeError as error:
        if _CAPTURE_ERRORS[0] <= error.status <= _CAPTURE_ERRORS[1]:
            return True  # the legacy stream, while another one captures
        raise DeviceError(f"the CUDA device is in an error state: {error}") from error


def capture_number(stream: int) -> int:
    """What tells the capture that `stream` is in from every other one of this process."""
    state, number = ctypes.c_int(), ctypes.c_uint64()
    driver = ctypes.CDLL("libcuda.so.1")
    status = driver.cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(state), ctypes.byref(number), None, None, None
    )
    if status:
        raise DeviceError(f"cuStreamGetCaptureInfo: error {status}")
    return number.value


def _refuse_while_capturing(spec: KernelSpec, params: Params, stream: int, call: str) -> None:
    if is_capturing(stream):
        raise CaptureError(
            f"{call}: {spec.name} [{spec.label(params)}] is not loaded yet and the stream is "
            "being captured into a CUDA graph, where nothing can be compiled or loaded: call "
            f"fkjit.prepare({call!r}, ...) with the same arguments before the capture"
        )


def _load(spec: KernelSpec, params: dict[str, Any], device: int, entry: Entry) -> LoadedKernel:
    global _frame
    to = device_target(device)
    cupy = import_module("cupy")
    _frame = _frame or _Frame()
    shared = spec.shared_bytes(params)
    with cupy.cuda.Device(device), materialise(entry) as path:
        try:
            module = cupy.RawModule(path=str(path))
            function = module.get_function(spec.entry)
            if shared + function.shared_size_bytes > _STATIC_SHARED:
                function.max_dynamic_shared_size_bytes = shared
            handle = function.kernel.ptr
        except cupy.cuda.driver.CUDADriverError as error:
            raise _load_failure(error, entry, to) from error
    codes = [code for _, code, _ in entry.meta["arguments"]]
    return LoadedKernel(
        spec=spec,
        params=params,
        entry=entry,
        device=device,
        function=handle,
        threads=spec.block(params),
        shared_bytes=shared,
        packing=struct.Struct("@" + "".join(codes)),
        offsets=offsets(codes),
        names=tuple(name for name, _, _ in entry.meta["arguments"]),
        dependent=spec.pdl and to.arch.capability >= (9, 0),
        keep=(module, function),
    )


def _load_failure(error: Exception, entry: Entry, to: Target) -> ToolchainError:
    explained = explain_load_failure(error, to, entry.meta["nvrtc"])
    return explained or ToolchainError(
        f"{entry.meta['describe']}: the driver could not load it: {error}"
    )


def offsets(codes: Sequence[str]) -> tuple[int, ...]:
    """Where each argument stands among arguments of these struct letters."""
    ends = [struct.calcsize("@" + "".join(codes[: at + 1])) for at in range(len(codes))]
    return tuple(end - struct.calcsize(code) for end, code in zip(ends, codes, strict=True))


def flatten(names: tuple[str, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """Named argument values in the signature's order, as a launch packs them: addresses of arrays
    (`Pointer`; None: null), tensor maps encoded, tuples (structs) laid flat."""
    flat: list[Any] = []
    for name in names:
        if name not in named:
            raise ParameterError(f"launch: the kernel has an argument {name!r} and got none")
        value = named[name]
        kind = type(value)
        if kind is int or kind is float:
            flat.append(value)
        elif kind is Pointer:
            flat.append(value.pointer)
        elif value is None:
            flat.append(0)
        elif kind is TensorMap or kind is MapTable:
            flat.append(value.packed())
        elif isinstance(value, tuple):
            flat.extend(value)
        else:
            flat.append(value)
    return tuple(flat)


def launch_on_device(
    spec: KernelSpec,
    params: Params,
    problem: Problem,
    named: Mapping[str, Any],
    device: int,
    stream: int,
    call: str | None = None,
) -> LoadedKernel:
    """Launch one problem. `named` has every kernel argument; pointers are integers. `call`: see
    `loaded`."""
    refuse_gpu(call or spec.op)
    kernel = loaded(spec, params, device, stream, call)
    runtime = _runtime()
    before = runtime.getDevice()
    if before != device:
        runtime.setDevice(device)
    try:
        kernel.launch(spec.grid(params, problem), flatten(kernel.names, named), stream)
    finally:
        if before != device:
            runtime.setDevice(before)
    return kernel
