"""Times of a kernel on the GPU: a CUDA graph of its launches, replayed between two events."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from fkjit.api import launch
from fkjit.spec import Arrays, KernelSpec, Params, Problem


class Replay:
    """Launches of one kernel on the same arrays, captured. `found`: what the first launch wrote, as
    NumPy arrays by name. `arrays`: NumPy arrays, or None for a null pointer."""

    def __init__(
        self, spec: KernelSpec, params: Params, problem: Problem, arrays: Arrays, launches: int = 20
    ) -> None:
        self._cupy, self._launches = import_module("cupy"), launches
        cupy = self._cupy
        self._arrays = {n: None if a is None else cupy.asarray(a) for n, a in arrays.items()}
        cupy.cuda.runtime.deviceSynchronize()
        self._stream = cupy.cuda.Stream(non_blocking=True)
        with self._stream:
            launch(spec, params, problem, self._arrays)
            self._stream.synchronize()
            self.found: Mapping[str, Any] = {
                n: None if a is None else cupy.asnumpy(a) for n, a in self._arrays.items()
            }
            self._stream.begin_capture()
            for _ in range(launches):
                launch(spec, params, problem, self._arrays)
            self._graph = self._stream.end_capture()

    def seconds(self) -> float:
        """Of a launch on the device, in one replay; caches are as the launch before left them."""
        cupy, stream = self._cupy, self._stream
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record(stream)
        self._graph.launch(stream)
        end.record(stream)
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(begin, end)) * 1e-3 / self._launches
