"""Running a kernel on the CPU: the same template, compiled by the same NVRTC, to PTX that
`fkjit.interp` executes in NumPy with memory checks."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fkjit.arch import Target
from fkjit.errors import InterpreterError, ParameterError
from fkjit.jit.build import build, interpreter_target
from fkjit.jit.render import Rendered, load
from fkjit.messages import to_terminal, write
from fkjit.runtime.tensor_map import MapTable, TensorMap
from fkjit.sanitizer import in_force
from fkjit.settings import Settings, settings
from fkjit.spec import KernelSpec, Params, Problem, SharedLayout

if TYPE_CHECKING:
    from fkjit.interp.launch import Watch
    from fkjit.interp.spaces.shared import CarveOut

GUARD = 1024  # bytes between carve-outs where memory is checked: alignment and banks stay
_FEW_THREADS = 4000  # with so many the interpreter is half as fast as with very many
_OVERHEAD = 0.06  # seconds of a kernel's first launch: parsing, decoding


def estimate(spec: KernelSpec, params: Params, problem: Problem) -> float:
    """About how many seconds the interpreter will take: within a factor of three or so.

    From the spec's flops and its rate for large launches; with few threads NumPy's own cost a step
    counts for more than the work in it.
    """
    padded = spec.work.interpreter_work
    flops = spec.work.flops(problem) if padded is None else padded(params, problem)
    threads = math.prod(spec.grid(params, problem)) * math.prod(spec.block(params))
    return _OVERHEAD + flops / spec.work.interpreter_flops * (1 + _FEW_THREADS / max(threads, 1))


def interpret(
    spec: KernelSpec,
    params: Params,
    problem: Problem,
    arrays: Mapping[str, Any],
    to: Target | None = None,
    watch: Watch | None = None,
    load: Callable[[KernelSpec, Params, int], Rendered] = load,
) -> None:
    """Run one problem; output arrays are written in place. What is checked: see `sanitizer`.

    `arrays` are NumPy arrays (or None for a null pointer) by the names `spec.arguments` wants. `to`
    is a PTX target (default: `interpreter_target`). `watch`: see `interp.run`. `load`: where the
    source comes from, if not from the kernel's file.
    InterpreterError when the work would take longer than FKJIT_INTERPRETER_LIMIT; SanitizerError,
    with nothing written, when the kernel misuses memory or barriers.
    """
    to = to or interpreter_target()
    spec.check(params, to.arch)
    seconds = estimate(spec, params, problem)
    _refuse_hours(spec, problem, seconds)
    chosen = in_force()
    guard = GUARD if chosen.mem else 0
    entry = build(spec, params, to, guard=guard, load=load)
    named = spec.arguments(params, problem, arrays)
    layout = () if spec.shared_layout is None else spec.shared_layout(params)
    parts, guarded = carve_outs(layout, guard)
    from fkjit import interp

    stats = interp.run(
        entry.image.decode().rstrip("\0"),
        spec.entry,
        spec.grid(params, problem),
        spec.block(params),
        [_argument(named, *argument) for argument in entry.meta["arguments"]],
        dynamic_shared=guarded or spec.shared_bytes(params),
        checks=chosen.checks,
        title=f"{spec.id} {spec.label(params)}",
        progress=_progress(spec.id, seconds),
        carve_outs=parts,
        resident=spec.cooperative,
        watch=watch,
    )
    chosen.note(stats.banks)


def carve_outs(layout: SharedLayout, guard: int) -> tuple[list[CarveOut], int]:
    """The arrays of dynamic shared memory with `guard` bytes between them, and bytes in all."""
    from fkjit.interp.spaces.shared import CarveOut

    parts, top = [], 0
    for name, size in layout:
        top += guard if parts else 0
        parts.append(CarveOut(name, top, size))
        top += size
    return parts, top


def _refuse_hours(spec: KernelSpec, problem: Problem, seconds: float) -> None:
    limit = settings().interpreter_limit
    if seconds > limit:
        raise InterpreterError(
            f"{spec.op}: CPU arrays run in fkjit's interpreter, where this would take about "
            f"{seconds:,.0f} s ({spec.work.flops(problem):.2g} flops; limit {limit:g} s); pass "
            f"CUDA arrays, a smaller problem, or set {Settings.variable('interpreter_limit')}=inf"
        )


def _argument(named: Mapping[str, Any], name: str, code: str, const: bool) -> Any:
    from fkjit.interp import Arg

    if name not in named:
        raise ParameterError(f"launch: the kernel has an argument {name!r} and got none")
    value = named[name]
    if isinstance(value, TensorMap):
        return Arg(name.partition("_map")[0], _numpy_map(value), writable=value.writable)
    if isinstance(value, MapTable):
        return Arg(name, tuple(map(_numpy_map, value.maps)), writable=False)
    if code != "P":
        values = value if isinstance(value, tuple) else (value,)
        try:
            return Arg(name, struct.pack("@" + code, *values), writable=False)
        except struct.error as error:
            raise ParameterError(f"launch: argument {name}={value!r}: {error}") from error
    if value is None:
        return Arg(name, np.uint64(0), writable=False)
    if not const and not value.flags.writeable:
        raise ParameterError(f"launch: {name} is read-only, but the kernel writes it")
    return Arg(name, value, writable=not const)


def _numpy_map(value: TensorMap) -> Any:
    """What the interpreter's TMA reads."""
    from fkjit.interp.spaces.tensor_map import TensorMap as Map

    strides = value.legal_strides()
    return Map(
        value.array, value.dims, strides, value.box, swizzle=value.swizzle, origin=value.origin
    )


def _progress(name: str, seconds: float) -> Callable[[float], None] | None:
    """For work of over a second: a line on stderr, rewritten there as blocks finish."""
    if settings().log == "quiet" or seconds < 1:
        return None
    if not to_terminal():
        write(f"fkjit: {name} on the CPU: about {seconds:.0f} s")
        return None
    begin = time.perf_counter()

    def show(fraction: float) -> None:
        end = "\n" if fraction >= 1 else ""
        text = f"\rfkjit: {name} on the CPU: {fraction:4.0%} {time.perf_counter() - begin:.1f} s"
        write(text, end)

    return show
