"""Words of GPU memory that a stream writes, or waits for, without an SM: whoever has all SMs can be
told by copies that are done, and can tell them when to begin.

Source: CUDA driver API, stream memory operations.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

from fkjit.errors import DeviceError

_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ
_WITH_BARRIER = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: behind everything that the stream wrote
_WORD = 4


def write_word(stream: int, words: int, index: int, value: int) -> None:
    """words[index] = value when the stream comes to it; what it wrote before is seen by who sees
    that. stream: a handle; words: an address of 32-bit words."""
    _call("cuStreamWriteValue32", stream, words, index, value, _WITH_BARRIER)


def wait_word(stream: int, words: int, index: int, value: int) -> None:
    """The stream goes on when words[index] >= value. The kernel that counts must have been launched
    before, or the two may wait for each other."""
    _call("cuStreamWaitValue32", stream, words, index, value, _AT_LEAST)


def _call(name: str, stream: int, words: int, index: int, value: int, flags: int) -> None:
    status = _function(name)(stream, words + _WORD * index, value, flags)
    if status:
        raise DeviceError(
            f"{name}: CUDA error {status}: no stream memory operations on this GPU; pass "
            "transport='symmetric'"
        )


@lru_cache(maxsize=2)
def _function(name: str) -> Any:
    try:
        found = getattr(ctypes.CDLL("libcuda.so.1"), f"{name}_v2")
    except (OSError, AttributeError) as error:
        raise DeviceError(f"{name}: not in this driver: {error}") from error
    found.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    found.restype = ctypes.c_int
    return found
