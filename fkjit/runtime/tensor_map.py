"""Tensor maps: what TMA has to know of a strided array, for kernels with `TensorMap` arguments."""

from __future__ import annotations

import ctypes
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


@dataclass(frozen=True)
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
        pairs = zip(self.strides, self.dims[1:], strict=True)
        return tuple(stride if extent > 1 else 16 for stride, extent in pairs)

    def encode(self, pointer: int) -> bytes:
        """The 128 bytes for an array that begins at this device address (a multiple of 16)."""
        buffer = (ctypes.c_char * (BYTES + ALIGN))()
        at = -ctypes.addressof(buffer) % ALIGN
        rank = len(self.dims)
        values = (
            ctypes.addressof(buffer) + at, _TYPES[self.dtype], rank, pointer + self.origin,
            (ctypes.c_uint64 * rank)(*self.dims),
            (ctypes.c_uint64 * (rank - 1))(*self.legal_strides()),
            (ctypes.c_uint32 * rank)(*self.box), (ctypes.c_uint32 * rank)(*(1,) * rank),
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
                f"strides={self.legal_strides()}, box={self.box}, address={pointer:#x}"
            )
        return buffer.raw[at : at + BYTES]


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
