"""Memory that kernels of one launch meet in: bytes to scribble on, and counters that are 0 before
and after each launch, so that the last block of a grid can tell that it is the last.

Two launches may run at the same time on two streams, or one of them from a CUDA graph, whenever
that is replayed. So each stream has memory of its own, and each captured call gets counters that
nothing else will ever use, and its bytes from the framework's allocator, which keeps what a graph
uses. Many counters are shared by the calls of one capture on one stream, which come one after the
other at each replay.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from fkjit.errors import CaptureError
from fkjit.runtime.device import capture_number, is_capturing
from fkjit.runtime.interop import fast_empty

ARGUMENTS = ("workspace", "counters")  # of a kernel
_KEPT_BYTES = 1 << 16  # of a stream, always there; for more the framework is asked at each call
_COUNTERS = 1 << 15  # allocated at a time
_RESERVE = 1 << 13  # so many are there when a capture begins, wherever a call was made before
_MANY = 256  # so many are shared by the calls of a capture
_CAPTURES = 8  # there is room for so many captures of what was called last
_PER_THREAD = 2  # the handle that means another stream in each thread


@dataclass
class _Device:
    """The counters of one device that nobody has yet, and what its streams have."""

    chunk: Any = None  # cupy memory
    base: int = 0
    left: int = 0
    keep: list[Any] = field(default_factory=list)
    # bytes, counters, number of counters
    streams: dict[Any, tuple[int, int, int]] = field(default_factory=dict)
    capture: int = 0  # the last one, and what its streams have: counters, number of counters
    captured: dict[int, tuple[int, int]] = field(default_factory=dict)


_devices: dict[int, _Device] = {}
_lock = threading.Lock()


def find(like: Any, device: int, stream: int, size: int, counters: int) -> tuple[int, int, Any]:
    """Pointers to `size` bytes and to `counters` zeros for one call on `stream`, and their owner.

    `like` is an array of the framework whose allocator is asked. Keep the owner until the kernels
    are enqueued. The device must be current.
    """
    if not (size or counters):
        return 0, 0, None
    if is_capturing(stream):
        pointer, owner = _fresh(like, size)
        return pointer, _captured(device, stream, counters), owner
    name = stream if stream != _PER_THREAD else (stream, threading.get_ident())
    mine = _device(device).streams.get(name)
    if mine is None or mine[2] < counters:
        mine = _enrol(device, name, counters)
    if counters >= _MANY:
        reserve(device, counters)
    if size <= _KEPT_BYTES:
        return mine[0], mine[1], None
    pointer, owner = _fresh(like, size)
    return pointer, mine[1], owner


def reserve(device: int, counters: int = 0) -> None:
    """Have counters for calls that will be captured, with so many each."""
    here, needed = _device(device), max(_RESERVE, _CAPTURES * counters)
    if here.left < needed:
        with _lock:
            _stock(here, device, needed)


def _device(device: int) -> _Device:
    return _devices.get(device) or _devices.setdefault(device, _Device())


def _enrol(device: int, name: Any, counters: int) -> tuple[int, int, int]:
    """Give a stream its memory; what it had before stays, for work that is under way."""
    count = 1 << max(counters, 32).bit_length()
    with _lock:
        here = _device(device)
        _stock(here, device, count + _RESERVE)
        memory = _zeros(device, _KEPT_BYTES)
        here.keep.append(memory)
        mine = here.streams[name] = (memory.ptr, here.base, count)
        here.base, here.left = here.base + 4 * count, here.left - count
    return mine


def _captured(device: int, stream: int, counters: int) -> int:
    """Counters for a call in a graph."""
    if counters < _MANY:
        return _take(device, counters)
    here, number = _device(device), capture_number(stream)
    if here.capture != number:
        here.capture, here.captured = number, {}
    mine = here.captured.get(stream)
    if mine is None or mine[1] < counters:
        mine = here.captured[stream] = (_take(device, counters), counters)
    return mine[0]


def _take(device: int, counters: int) -> int:
    with _lock:
        here = _device(device)
        if here.left < counters:
            raise CaptureError(
                "this op needs counters on the device, and none are left while the stream is being "
                "captured into a CUDA graph: call fkjit.prepare(...) before the capture"
            )
        pointer = here.base
        here.base, here.left = pointer + 4 * counters, here.left - counters
    return pointer


def _stock(here: _Device, device: int, count: int) -> None:
    if here.left < count:
        size = max(count, _COUNTERS)
        memory = _zeros(device, 4 * size)
        here.keep.append(memory)
        here.base, here.left = memory.ptr, size


def _zeros(device: int, size: int) -> Any:
    cuda = import_module("cupy.cuda")
    with cuda.Device(device), cuda.Stream(non_blocking=True) as stream:
        memory = cuda.alloc(size)
        memory.memset_async(0, size, stream)
        stream.synchronize()
    return memory


def _fresh(like: Any, size: int) -> tuple[int, Any]:
    """Memory of the framework and its owner; whoever gets it next on this stream comes after us."""
    if not size:
        return 0, None
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        empty = fast_empty()
        if empty is not None and like.is_cuda:
            owner = empty((size,), (1,), torch.uint8)
        else:
            owner = torch.empty(size, dtype=torch.uint8, device=like.device)
        return owner.data_ptr(), owner
    owner = import_module("cupy.cuda").alloc(size)
    return owner.ptr, owner
