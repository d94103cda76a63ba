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
        return _legal(self.dims, self.strides)

    def packed(self) -> bytes:
        """As an argument of a launch, of an array that has an address."""
        return self.encode(self.array.pointer)

    def encode(self, pointer: int) -> bytes:
        """The 128 bytes for an array that begins at this device address (a multiple of 16)."""
        address = pointer + self.origin
        return encode(self.dtype, self.box, self.swizzle, self.dims, self.strides, address)


@dataclass(frozen=True, slots=True)
class MapTable:
    """Maps side by side in global memory, for a kernel that takes `const TensorMap*`."""

    maps: tuple[TensorMap, ...]

    def encode(self) -> bytes:
        """All of them."""
        return b"".join(one.packed() for one in self.maps)

    def packed(self) -> int:
        """As an argument of a launch: where they are on the current device. They stay there."""
        cupy, numpy, raw = import_module("cupy"), import_module("numpy"), self.encode()
        key = cupy.cuda.runtime.getDevice(), raw
        if key not in _tables:
            _tables[key] = cupy.asarray(numpy.frombuffer(raw, "uint8"))
        return _tables[key].data.ptr


_tables: dict[tuple[int, bytes], Any] = {}


def encode(
    dtype: str,
    box: tuple[int, ...],
    swizzle: str,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    address: int,
) -> bytes:
    """The 128 bytes of a `TensorMap` that begins at this device address (a multiple of 16)."""
    here, rank = _room, len(dims)
    strides = _legal(dims, strides)
    zeros = _ZEROS[rank:]
    _NUMBERS.pack_into(
        here.memory, here.start, *dims, *zeros, *strides, *zeros, *box, *zeros, *_ONES
    )
    kind = _kind(dtype, rank, swizzle)
    status = _encoder()(here.map, *kind[:2], address, *here.numbers, *kind[2:])
    if status == _NO_CONTEXT:  # nothing has used CUDA in this thread yet
        runtime = import_module("cupy.cuda").runtime
        runtime.setDevice(runtime.getDevice())
        status = _encoder()(here.map, *kind[:2], address, *here.numbers, *kind[2:])
    if status != _SUCCESS:
        raise LaunchError(
            f"tensor map: the driver refused it (error {status}): dims={dims}, "
            f"strides={strides}, box={box}, address={address:#x}"
        )
    return bytes(here.memory[here.start - BYTES : here.start])


def _legal(dims: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    if 1 not in dims:
        return strides
    pairs = zip(strides, dims[1:], strict=True)
    return tuple([stride if extent > 1 else 16 for stride, extent in pairs])


@lru_cache(maxsize=64)
def _kind(dtype: str, rank: int, swizzle: str) -> tuple[int, ...]:
    """The driver's numbers for these, and for what no map of ours has otherwise."""
    return _TYPES[dtype], rank, 0, _SWIZZLES[swizzle], _L2_PROMOTION, 0


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
