"""Programmatic dependent launches: where a kernel is captured into a CUDA graph, its blocks may
come in while the kernel before it runs out, and wait there until what that one wrote is to be seen
(templates/ptx/pdl.cuh). CuPy's launch has no such attribute, so this is the driver's.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

from fkjit.errors import DeviceError

_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
_DIMENSIONS = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_bytes")


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute; its value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("unused", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Configuration(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in _DIMENSIONS),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


_ATTRIBUTES, _LATE = (
    (_Attribute * 2)((_SERIALIZATION, 0, (early,)), (_COOPERATIVE, 0, (1,))) for early in (1, 0)
)
_here = threading.local()


@contextmanager
def starting(early: bool) -> Iterator[None]:
    """Within it, kernels that this thread launches into a CUDA graph start early, or do not."""
    before = getattr(_here, "late", False)
    _here.late = not early
    try:
        yield
    finally:
        _here.late = before


def launch(function: int, *rest: int, together: bool = False) -> None:
    """Enqueue a kernel that waits for the one before it by itself.

    `rest`: grid, block, bytes of shared memory, stream, and where the arguments' addresses are, as
    CuPy's `launchKernel` takes them. `together`: all blocks run at the same time, or none does.
    RuntimeError if the driver refuses.
    """
    *dimensions, stream, arguments = rest
    attributes = _LATE if getattr(_here, "late", False) else _ATTRIBUTES
    configuration = _Configuration(*dimensions, stream, attributes, 1 + together)
    status = _driver()(ctypes.addressof(configuration), function, arguments, None)
    if status:
        raise RuntimeError(f"cuLaunchKernelEx: error {status}")


@lru_cache(maxsize=1)
def _driver() -> Callable[..., int]:
    """cuLaunchKernelEx."""
    try:
        function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    except (OSError, AttributeError) as error:
        raise DeviceError(f"the driver has no cuLaunchKernelEx: {error}") from error
    function.argtypes = (ctypes.c_void_p,) * 4
    return function
