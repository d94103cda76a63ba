"""Running a kernel on the CPU: the same template, compiled by the same NVRTC, to PTX that
`fkjit.interp` executes in NumPy with memory checks."""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fkjit.build import build, interpreter_target
from fkjit.errors import InterpreterError
from fkjit.settings import Settings, settings
from fkjit.spec import KernelSpec, Params, Problem

_OVERHEAD = 0.06  # seconds of a kernel's first launch: parsing, decoding


def estimate(spec: KernelSpec, problem: Problem) -> float:
    """About how many seconds the interpreter will take, from the spec's flops."""
    return _OVERHEAD + spec.flops(problem) / spec.interpreter_flops


def interpret(
    spec: KernelSpec, params: Params, problem: Problem, arrays: Mapping[str, Any]
) -> None:
    """Run one problem; output arrays are written in place.

    `arrays` are NumPy arrays (or None for a null pointer) by the names `spec.arguments` wants.
    InterpreterError when the work would take longer than FKJIT_INTERPRETER_LIMIT; SanitizerError,
    with nothing written, when the kernel misuses memory or barriers.
    """
    to = interpreter_target()
    spec.check(params, to.arch)
    seconds = estimate(spec, problem)
    if seconds > settings().interpreter_limit:
        raise InterpreterError(
            f"{spec.op}: CPU arrays run in fkjit's interpreter, where this would take about "
            f"{seconds:,.0f} s ({spec.flops(problem):.2g} flops; limit "
            f"{settings().interpreter_limit:g} s); pass CUDA arrays, a smaller problem, or set "
            f"{Settings.variable('interpreter_limit')}=inf"
        )
    entry = build(spec, params, to)
    named = spec.arguments(params, problem, arrays)
    from fkjit import interp

    interp.run(
        entry.image.decode().rstrip("\0"),
        spec.entry,
        spec.grid(params, problem),
        spec.block(params),
        [_argument(interp.Arg, *argument, named) for argument in entry.meta["arguments"]],
        dynamic_shared=spec.shared_bytes(params),
        title=f"{spec.id} {spec.label(params)}",
        progress=_progress(spec.id) if seconds > 1 else None,
    )


def _argument(make: Any, name: str, code: str, const: bool, named: Mapping[str, Any]) -> Any:
    value = named[name]
    if code != "P":
        values = value if isinstance(value, tuple) else (value,)
        return make(name, struct.pack("@" + code, *values), writable=False)
    if value is None:
        return make(name, np.uint64(0), writable=False)
    return make(name, value, writable=not const)


def _progress(name: str) -> Callable[[float], None] | None:
    """A line on stderr that is rewritten while blocks finish; None when it should be quiet."""
    if settings().log == "quiet" or not sys.stderr.isatty():
        return None
    begin = time.perf_counter()

    def show(fraction: float) -> None:
        end = "\n" if fraction >= 1 else ""
        text = f"\rfkjit: {name} on the CPU: {fraction:4.0%} {time.perf_counter() - begin:.1f} s"
        print(text, end=end, file=sys.stderr, flush=True)

    return show
