"""What a measurement needs of a device: a small interface, and CUDA through torch behind it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from fkjit.errors import ToolchainError

from .clocks import Clocks

_FLUSH = 2  # times the L2 cache is what a flush writes
_CALIBRATE = 1_000_000  # cycles
_TRIES = 5


class Device(Protocol):
    """Tests have one with a clock of their own; all times are of this device's clocks."""

    name: str
    flush_seconds: float  # what a flush takes

    def now(self) -> float: ...  # host seconds
    def mark(self) -> Any: ...  # something with record()
    def between(self, begin: Any, end: Any) -> float: ...  # milliseconds
    def synchronize(self) -> None: ...
    def flush(self) -> None: ...  # the L2 cache holds nothing of the inputs
    def delay(self, seconds: float) -> None: ...  # keep the device busy, caches untouched
    def capture(self, call: Callable[[], Any], copies: int) -> tuple[Callable[[], Any], Any]: ...
    def free_bytes(self) -> int: ...  # of device memory, as the driver sees it
    def peak_bytes(self, call: Callable[[], Any]) -> int: ...  # allocated during a call
    def release(self) -> None: ...  # give unused memory back to the driver
    def spoil(self, output: Any) -> None: ...  # overwrite with NaN, integers with -1
    def array(self, values: np.ndarray) -> Any: ...  # a copy on the device
    def state(self) -> dict[str, Any]: ...  # clocks, power, temperature, throttling
    def span(self, name: str) -> contextlib.AbstractContextManager[Any]: ...  # for profilers
    def variant(self, spec: Any, params: Any) -> dict[str, Any]: ...  # how it was built


class TorchDevice:
    """One CUDA GPU. ToolchainError where torch or the GPU is missing."""

    def __init__(self, nvtx: bool = False) -> None:
        try:
            torch = self.torch = import_module("torch")
        except ImportError as error:
            raise ToolchainError(
                "measuring needs torch with CUDA, for events, graphs and most peers: "
                "pip install torch"
            ) from error
        if not torch.cuda.is_available():
            raise ToolchainError(
                "measuring: torch sees no CUDA device here (`fkjit doctor` says more); "
                "`fkjit bench --dry-run` lists what would run"
            )
        self.index = torch.cuda.current_device()
        found = torch.cuda.get_device_properties(self.index)
        self.name = found.name
        self.nvtx = nvtx
        self.clocks = Clocks(self.index)
        self._buffer = torch.empty(
            max(_FLUSH * found.L2_cache_size, 1 << 27) // 4, dtype=torch.int32, device="cuda"
        )
        self._cycles_a_second = 0.0
        self._calibrate()

    def _calibrate(self) -> None:
        """How long a flush and a cycle of delay take at full clocks: the shortest of some tries."""
        self.flush_seconds = min(self._once(self.flush) for _ in range(_TRIES))
        sleep = min(self._once(lambda: self.torch.cuda._sleep(_CALIBRATE)) for _ in range(_TRIES))
        self._cycles_a_second = _CALIBRATE / sleep

    def _once(self, call: Callable[[], Any]) -> float:
        begin, end = self.mark(), self.mark()
        self.synchronize()
        begin.record()
        call()
        end.record()
        self.synchronize()
        return self.between(begin, end) * 1e-3

    def now(self) -> float:
        return time.perf_counter()

    def mark(self) -> Any:
        return self.torch.cuda.Event(enable_timing=True)

    def between(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end)

    def synchronize(self) -> None:
        self.torch.cuda.synchronize()

    def flush(self) -> None:
        self._buffer.fill_(1)

    def delay(self, seconds: float) -> None:
        if seconds > 0:
            self.torch.cuda._sleep(int(seconds * self._cycles_a_second))

    def capture(self, call: Callable[[], Any], copies: int) -> tuple[Callable[[], Any], Any]:
        """A graph of `copies` calls, and what the last of them returned."""
        graph = self.torch.cuda.CUDAGraph()
        out = None
        with self.torch.cuda.graph(graph):
            for _ in range(copies):
                out = call()
        return graph.replay, out

    def free_bytes(self) -> int:
        return self.torch.cuda.mem_get_info(self.index)[0]

    def peak_bytes(self, call: Callable[[], Any]) -> int:
        cuda = self.torch.cuda
        self.synchronize()
        cuda.reset_peak_memory_stats()
        before = cuda.memory_allocated()
        call()
        self.synchronize()
        return cuda.max_memory_allocated() - before

    def release(self) -> None:
        self.synchronize()
        with contextlib.suppress(RuntimeError):  # torch refuses after a capture that failed
            self.torch.cuda.empty_cache()

    def spoil(self, output: Any) -> None:
        output.fill_(float("nan") if output.is_floating_point() else -1)

    def array(self, values: np.ndarray) -> Any:
        torch = self.torch
        if values.dtype.name == "bfloat16":  # NumPy's bfloat16 is a stranger to torch
            return torch.from_numpy(values.view(np.int16).copy()).cuda().view(torch.bfloat16)
        return torch.from_numpy(values.copy()).cuda()

    def state(self) -> dict[str, Any]:
        return self.clocks.read()

    def span(self, name: str) -> contextlib.AbstractContextManager[Any]:
        return self.torch.cuda.nvtx.range(name) if self.nvtx else contextlib.nullcontext()

    def variant(self, spec: Any, params: Any) -> dict[str, Any]:
        from .kernels import built

        return built(spec, params, self.index)
