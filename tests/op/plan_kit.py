"""Kernels that only note what they are launched with, behind the real way to the driver: what tests
of warm paths need on a machine without a GPU."""

from __future__ import annotations

import ctypes
import itertools
import struct

import pytest

from fkjit.jit.build import build, interpreter_target, quiet
from fkjit.runtime import device

STREAM = 77
_numbers = itertools.count(1)
_kernels: dict[int, Kernel] = {}


class Kernel:
    """Stands for a loaded kernel. `launches`: (grid, values of all arguments, stream) of each."""

    threads, shared_bytes, dependent = (128, 1, 1), 0, False

    def __init__(self, spec, params):
        with quiet():
            arguments = build(spec, params, interpreter_target()).meta["arguments"]
        self.spec, self.function, self.launches = spec, next(_numbers), []
        self.names = tuple(name for name, _, _ in arguments)
        self.codes = [code for _, code, _ in arguments]
        self.packing = struct.Struct("@" + "".join(self.codes))
        self.offsets = device.offsets(self.codes)
        _kernels[self.function] = self

    def explain(self, error, grid):
        return f"{self.spec.id} grid={grid}: {error}"


class Frame:
    """Stands for a thread's launch functions; reads arguments from where the driver would.

    captures: whether the stream is in a graph. dependent: whether anything was launched so.
    """

    captures = dependent = False

    def launch(self, function, *rest):
        kernel, (*grid_and_threads, shared, stream, params, extra) = _kernels[function], rest
        assert tuple(grid_and_threads[3:]) == kernel.threads and (shared, extra) == (0, 0)
        addresses = (ctypes.c_void_p * len(kernel.codes)).from_address(params)
        values = []
        for code, address in zip(kernel.codes, addresses, strict=True):
            size = struct.calcsize("@" + code)
            values += struct.unpack("@" + code, ctypes.string_at(address, size))
        kernel.launches.append((tuple(grid_and_threads[:3]), tuple(values), stream))

    def launch_together(self, *arguments):
        self.launch(*arguments, 0)

    def launch_dependent(self, *arguments):
        self.launch(*arguments)
        self.dependent = True

    def is_capturing(self, stream):
        return self.captures


@pytest.fixture
def driver(monkeypatch):
    """Launches on CPU tensors go to their `Kernel`, on stream 77."""
    torch = pytest.importorskip("torch", reason="needs torch")
    monkeypatch.setattr(device, "_frame", Frame())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    yield
    _kernels.clear()
