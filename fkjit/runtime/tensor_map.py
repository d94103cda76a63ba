"""Tensor maps: what TMA has to know of a strided array, for kernels with `TensorMap` arguments."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

from fkjit.errors import DeviceError, LaunchError
from fkjit.jit.signature import TENSOR_MAP_BYTES

BYTES, ALIGN = TENSOR_MAP_BYTES, 64
_TYPES = {"u8": 0, "fp16": 6, "bf16": 9, "fp32": 7}  # CU_TENSOR_MAP_DATA_TYPE_*
_SWIZZLES = {"none": 0, "32B": 1, "64B": 2, "128B": 3}
_L2_PROMOTION = 3  # 256 bytes: neighbouring boxes are wanted next
_SUCCESS, _NO_CONTEXT = 0, 201


@dataclass(eq=False, slots=True)
class TensorMap:
    """A tiled map over `array`, the innermost dimension first; elements outside read as zeros.

    array: what a spec's `arguments` was given. strides: bytes, of dimensions 1, 2, …: multiples of
    16 (a dimension of one element may have any). box: elements one copy brings, in each dimension.
    origin: bytes from the array to where the map begins, which may be before it: then only what
    copies come to has to be the array's.
    """

    array: Any
    dtype: str  # u8, fp16, bf16, fp32
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: str = "128B"
    writable: bool = False  # whether the kernel stores through it
    origin: int = 0

    def legal_strides(self) -> tuple[int, ...]:
        """The strides, with some legal one where a dimension has one element."""
        if 1 not in self.dims:
            return self.strides
        pairs = zip(self.strides, self.dims[1:], strict=True)
        return tuple([stride if extent > 1 else 16 for stride, extent in pairs])

    def encode(self, pointer: int) -> bytes:
        """The 128 bytes for an array that begins at this device address (a multiple of 16)."""
        here, rank = _room, len(self.dims)
        strides = self.legal_strides()
        _NUMBERS.pack_into(
            here.memory, here.start,
            *self.dims, *_ZEROS[rank:], *strides, *_ZEROS[rank:], *self.box, *_ZEROS[rank:], *_ONES,
        )  # fmt: skip
        values = (
            here.map, _TYPES[self.dtype], rank, pointer + self.origin, *here.numbers,
            0, _SWIZZLES[self.swizzle], _L2_PROMOTION, 0,
        )  # fmt: skip
        status = _encoder()(*values)
        if status == _NO_CONTEXT:  # nothing has used CUDA in this thread yet
            runtime = import_module("cupy.cuda").runtime
            runtime.setDevice(runtime.getDevice())
            status = _encoder()(*values)
        if status != _SUCCESS:
            raise LaunchError(
                f"tensor map: the driver refused it (error {status}): dims={self.dims}, "
                f"strides={strides}, box={self.box}, address={pointer:#x}"
            )
        return bytes(here.memory[here.start - BYTES : here.start])


class _Room(threading.local):
    """This thread's memory for one encoding: the map, and behind it the numbers it is made of."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(ALIGN + BYTES + _NUMBERS.size)
        self.memory = memoryview(self.buffer).cast("B")
        base = ctypes.addressof(self.buffer)
        self.start = -base % ALIGN + BYTES  # of the numbers
        self.map = base + self.start - BYTES
        self.numbers = [base + self.start + at for at in (0, 40, 72, 92)]


_MAX_RANK = 5
_ZEROS, _ONES = (0,) * _MAX_RANK, (1,) * _MAX_RANK
_NUMBERS = struct.Struct("=5Q4Q5I5I")  # extents, strides, box, and a step of 1 in each dimension
_room = _Room()


@lru_cache(maxsize=1)
def _encoder() -> Callable[..., int]:
    """cuTensorMapEncodeTiled of the driver."""
    try:
        function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    except (OSError, AttributeError) as error:
        raise DeviceError(f"the driver has no cuTensorMapEncodeTiled: {error}") from error
    function.argtypes = (
        ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p,
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int,
        ctypes.c_int, ctypes.c_int,
    )  # fmt: skip
    return function
