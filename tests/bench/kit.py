"""A device whose clock only moves when work is done on it, and an operation to measure on it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from bench.core.accuracy import Expected
from bench.core.cases import Case
from bench.core.generic import operation
from bench.core.method import Effort
from bench.core.op import Candidate, Op, Prepared

GIB = 1 << 30
EFFORT = Effort(warmup=5, iterations=40, turns=4, seconds=10.0)


class Mark:
    """An event."""

    def __init__(self, device: FakeDevice) -> None:
        self.device, self.at = device, -1.0

    def record(self) -> None:
        self.at = self.device.clock


class FakeDevice:
    """Runs NumPy; `work` is what takes time on it. Host and device share one clock."""

    name = "Fake 9000"
    flush_seconds = 30e-6

    def __init__(self) -> None:
        self.clock = 0.0
        self.cold = False  # since the last flush, nothing ran
        self.used = 0
        self.peak = 0
        self.spans: list[str] = []
        self.flushes = self.captures = 0
        self.broken: str | None = None
        self.states: Callable[[], dict[str, Any]] = lambda: {"sm_mhz": 1980, "throttle": []}

    def work(self, seconds: float, cold_extra: float = 0.0) -> None:
        """A kernel: longer when the cache is cold."""
        self.clock += seconds + (cold_extra if self.cold else 0.0)
        self.cold = False

    def now(self) -> float:
        return self.clock

    def mark(self) -> Mark:
        return Mark(self)

    def between(self, begin: Mark, end: Mark) -> float:
        return (end.at - begin.at) * 1e3

    def synchronize(self) -> None:
        if self.broken:
            raise RuntimeError(self.broken)

    def flush(self) -> None:
        self.flushes += 1
        self.clock += self.flush_seconds
        self.cold = True

    def delay(self, seconds: float) -> None:
        self.clock += seconds

    def capture(self, call: Callable[[], Any], copies: int) -> tuple[Callable[[], Any], Any]:
        self.captures += 1
        out = call()

        def replay() -> None:
            for _ in range(copies):
                call()

        return replay, out

    def free_bytes(self) -> int:
        return 8 * GIB - self.used

    def peak_bytes(self, call: Callable[[], Any]) -> int:
        self.peak = 0
        call()
        return self.peak

    def release(self) -> None:
        pass

    def spoil(self, output: np.ndarray) -> None:
        output.fill(np.nan)

    def array(self, values: np.ndarray) -> np.ndarray:
        return values.copy()

    def state(self) -> dict[str, Any]:
        return self.states()

    def span(self, name: str) -> contextlib.AbstractContextManager[Any]:
        self.spans.append(name)
        return contextlib.nullcontext()

    def variant(self, spec: Any, params: Any) -> dict[str, Any]:
        return {"kernel": spec.id, "compile_ms": 12.0, "load_ms": 3.0}


class Doubler:
    """y = 2x in `seconds`: right, or wrong in one of several ways."""

    def __init__(self, device: FakeDevice, seconds: float = 1e-3, fault: str = "") -> None:
        self.device, self.seconds, self.fault, self.calls = device, seconds, fault, 0
        self.kept: np.ndarray | None = None

    def prepare(self, problem: Any, arrays: Any) -> Prepared:
        self.x = arrays["x"]
        self.device.used += 1000
        return Prepared(self.call, capturable=self.fault != "no graph")

    def call(self) -> np.ndarray:
        self.calls += 1
        self.device.work(self.seconds, cold_extra=self.seconds / 2)
        self.device.peak = max(self.device.peak, self.x.nbytes)
        if self.fault == "raises later" and self.calls > 20:
            raise RuntimeError("out of luck\nand a second line")
        if self.fault == "unwritten" and self.kept is not None:
            return self.kept  # writes nothing: what was there before is what is returned
        made = 2.0 * self.x
        if self.fault == "wrong" or (self.fault == "wrong later" and self.calls > 50):
            made[3] += 1.0
        self.kept = made
        return made


def candidate(name: str, doubler: Doubler, kind: str = "ours", **more: Any) -> Candidate:
    return Candidate(name=name, kind=kind, prepare=doubler.prepare, **more)


def doubling(**more: Any) -> Op:
    """An operation with ten problems; nothing of it is registered."""
    problems = [{"n": 100 * n, "dtype": "fp32"} for n in range(1, 11)]

    def expected(problem: Any, arrays: Any) -> Expected:
        half = problem["n"] // 2
        want = 2.0 * arrays["x"]
        return Expected([(slice(0, half), want[:half]), (slice(half, None), want[half:])], 1e-6)

    class Doubling(Op):
        def flops(self, problem: Any) -> float:
            return 1e9 * problem["n"]

        def bytes(self, problem: Any) -> float:
            return 1e6 * problem["n"]

    made = Doubling(
        name="doubling",
        sets={"default": problems[:3], "long": problems},
        label=lambda problem: f"{problem['dtype']} N{problem['n']}",
        inputs=lambda problem, device: {"x": np.random.default_rng().standard_normal(problem["n"])},
        expected=expected,
        choose=lambda spec, problem, arch: {},
    )
    return replace(made, **more)


def cases(op: Op, count: int = 1) -> list[Case]:
    return [Case(op, problem) for problem in op.sets["long"][:count]]


__all__ = ["EFFORT", "Doubler", "FakeDevice", "candidate", "cases", "doubling", "operation"]
