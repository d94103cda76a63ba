"""Keys and values read out of their owners' memory by copy engines (torch's symmetric memory).

All ranks put theirs into a buffer that the others can see. In step s a rank copies those of rank
r - s, on a stream of its own: no SM is taken from attention, and nothing is handed on. One barrier
before the first copy says that all buffers are full, one after the last that all have been read.

Only GPUs of one host that reach each other; no multicast.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from math import prod
from typing import Any

from fkjit.distributed.groups import Group
from fkjit.errors import DeviceError
from fkjit.runtime.stream_values import wait_word, write_word

_MODULE = "torch.distributed._symmetric_memory"
_MOST = 8  # buffers that are kept
_kept: OrderedDict[Any, Any] = OrderedDict()


def available(x: Any) -> bool:
    """Whether x lies where symmetric memory could; all ranks of a host say the same."""
    if not x.is_cuda:
        return False
    try:
        memory = import_module(_MODULE)
    except ImportError:
        return False
    return hasattr(memory, "empty") and hasattr(memory, "rendezvous")


def shared(group: Group, count: int, like: Any, use: str) -> tuple[Any, Any]:
    """(buffer of `count` elements, its handle): the same one for the same size and use again."""
    name = group.process_group.group_name
    key = (name, use, count, like.dtype, like.device)
    found = _kept.get(key)
    if found is None:
        memory = import_module(_MODULE)
        try:
            buffer = memory.empty(count, dtype=like.dtype, device=like.device)
            found = buffer, memory.rendezvous(buffer, name)
        except RuntimeError as error:
            raise DeviceError(
                f"{group.call}: no symmetric memory between these GPUs: {error}; pass "
                "transport='nccl'"
            ) from error
        _kept[key] = found
        while len(_kept) > _MOST:
            _kept.popitem(last=False)
    _kept.move_to_end(key)
    return found


def pulling(group: Group, k: Any, v: Any) -> Pulled:
    return Pulled(group, k, v)


class Pulled:
    """Keys and values, step by step, out of their owners' buffers."""

    def __init__(self, group: Group, k: Any, v: Any) -> None:
        self.torch, self.group = sys.modules["torch"], group
        self.shapes = k.shape, v.shape
        self.present: Any = (k, v)
        count = k.numel() + v.numel()
        own, self.handle = shared(group, count, k, "ring")
        own[: k.numel()].copy_(k.reshape(-1))
        own[k.numel() :].copy_(v.reshape(-1))
        self.handle.barrier(channel=0)
        self.stream = _stream(self.torch, k.device)
        self.room = [k.new_empty(count) for _ in range(2)]
        self.read = [None, None]  # when attention was done with a buffer
        self.coming: Any = None

    def ask(self, step: int) -> None:
        """Copy what step `step` wants, behind what this stream has to do up to now."""
        cuda, place = self.torch.cuda, step % 2
        owner, into = (self.group.rank - step) % self.group.size, self.room[place]
        self.stream.wait_event(self.read[place] or cuda.current_stream().record_event())
        with cuda.stream(self.stream):
            theirs = self.handle.get_buffer(owner, into.shape, into.dtype)
            into.copy_(theirs, non_blocking=True)
            self.coming = self.stream.record_event(), into, place

    def take(self) -> None:
        cuda = self.torch.cuda
        if self.coming is None:
            return
        arrived, into, place = self.coming
        cuda.current_stream().wait_event(arrived)
        self.read[1 - place] = cuda.current_stream().record_event()
        k, v = into.split([shape.numel() for shape in self.shapes])
        self.present = k.view(self.shapes[0]), v.view(self.shapes[1])
        self.coming = None

    def end(self) -> None:
        self.handle.barrier(channel=0)


def arriving(group: Group, x: Any) -> Iterator[tuple[int, Any]]:
    """(rank, its x), this rank's own first; the others are copied meanwhile, one by one."""
    torch = sys.modules["torch"]
    own, handle = shared(group, x.numel(), x, "rows")
    own.copy_(x.reshape(-1))
    handle.barrier(channel=0)
    stream, coming = _stream(torch, x.device), []
    room = x.new_empty(group.size - 1, *x.shape)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for by in range(1, group.size):
            rank = (group.rank - by) % group.size
            room[by - 1].copy_(handle.get_buffer(rank, x.shape, x.dtype), non_blocking=True)
            coming.append((rank, room[by - 1], stream.record_event()))
    yield group.rank, x
    for rank, rows, arrived in coming:
        torch.cuda.current_stream().wait_event(arrived)
        yield rank, rows
    handle.barrier(channel=0)  # nobody reads this rank's rows any more


def pushing(
    group: Group, shape: Sequence[int], like: Any, make: Callable[[int], Any]
) -> tuple[Any, Callable[[], None]]:
    """[ranks, *shape], into which the other ranks write, and what waits for that. make: this rank's
    part of another's rows, which a copy engine writes there while the next is made."""
    torch, count = sys.modules["torch"], prod(shape)
    own, handle = shared(group, group.size * count, like, "sums")
    handle.barrier(channel=0)  # what an earlier call left has been read
    stream, held = _stream(torch, like.device), []
    for by in range(1, group.size):
        rank = (group.rank + by) % group.size
        held.append(make(rank))
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            theirs = handle.get_buffer(rank, (group.size, count), like.dtype)
            theirs[group.rank].copy_(held[-1].reshape(-1), non_blocking=True)

    def wait() -> None:
        torch.cuda.current_stream().wait_stream(stream)
        handle.barrier(channel=0)
        held.clear()

    return own.view(group.size, *shape), wait


# ------------------------------------------------------------------ in step with a product's tiles


def filling(group: Group, x: Any, chunks: int) -> tuple[Any, Any, Callable[[], None]]:
    """(rows of all ranks, flags [ranks * chunks], what ends it): own rows are there, those of the
    others come, rank + 1's first, and the flag of each chunk becomes 1 behind it."""
    torch, rank = sys.modules["torch"], group.rank
    own, handle = shared(group, group.size * x.numel(), x, "tiles")
    whole = own.view(group.size * x.shape[0], x.shape[1])
    flags = torch.zeros(group.size * chunks, dtype=torch.int32, device=x.device)
    flags[rank * chunks : (rank + 1) * chunks] = 1
    each = x.shape[0] // chunks
    whole[rank * x.shape[0] : (rank + 1) * x.shape[0]].copy_(x)
    handle.barrier(channel=0)
    stream = _stream(torch, x.device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for by in range(1, group.size):
            owner = (rank + by) % group.size
            theirs = handle.get_buffer(owner, whole.shape, x.dtype)
            for chunk in range(owner * chunks, (owner + 1) * chunks):
                rows = slice(chunk * each, (chunk + 1) * each)
                whole[rows].copy_(theirs[rows], non_blocking=True)
                write_flag(stream, flags, chunk)

    def end() -> None:
        torch.cuda.current_stream().wait_stream(stream)
        handle.barrier(channel=0)  # nobody reads this rank's rows any more

    return whole, flags, end


def taking(
    group: Group, shape: Sequence[int], like: Any, chunks: int
) -> tuple[Any, Any, Any, Callable[[int], None]]:
    """(parts [ranks, *shape], rows of all ranks, flags [ranks * chunks], what takes them away).

    A product is to be launched that writes the rows, rank + 1's first and own ones last, and counts
    them; then the last, with what a flag comes to. Chunk by chunk copy engines write rows to their
    owners, and those of the others are in `parts` when it has returned and the stream goes on.
    """
    torch, rank, count = sys.modules["torch"], group.rank, prod(shape)
    own, handle = shared(group, group.size * count, like, "sums")
    parts = own.view(group.size, *shape)
    made = like.new_empty(group.size * shape[0], *shape[1:])
    flags = torch.zeros(group.size * chunks, dtype=torch.int32, device=like.device)
    handle.barrier(channel=0)  # what an earlier call left has been read
    stream, each = _stream(torch, like.device), shape[0] // chunks
    stream.wait_stream(torch.cuda.current_stream())

    def take(full: int) -> None:
        with torch.cuda.stream(stream):
            for by in range(1, group.size):
                owner = (rank + by) % group.size
                theirs = handle.get_buffer(owner, (group.size, count), like.dtype)
                into = theirs[rank].view(shape)
                for chunk in range(chunks):
                    wait_flag(stream, flags, owner * chunks + chunk, full)
                    first = owner * shape[0] + chunk * each
                    rows = slice(chunk * each, (chunk + 1) * each)
                    into[rows].copy_(made[first : first + each], non_blocking=True)
        parts[rank].copy_(made[rank * shape[0] : (rank + 1) * shape[0]])
        torch.cuda.current_stream().wait_stream(stream)
        handle.barrier(channel=0)

    return parts, made, flags, take


def write_flag(stream: Any, flags: Any, index: int) -> None:
    write_word(stream.cuda_stream, flags.data_ptr(), index, 1)


def wait_flag(stream: Any, flags: Any, index: int, value: int) -> None:
    wait_word(stream.cuda_stream, flags.data_ptr(), index, value)


_streams: dict[Any, Any] = {}


def _stream(torch: Any, device: Any) -> Any:
    found = _streams.get(device)
    if found is None:
        found = _streams[device] = torch.cuda.Stream(device)
    return found
