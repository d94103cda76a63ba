"""Calls that work for every registered kernel, ours and the user's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import fkjit
from fkjit import ops
from fkjit.arch import arch as arch_of
from fkjit.arguments import one_of, shown
from fkjit.cpu.run import interpret
from fkjit.errors import ArgumentTypeError, DeviceError, ParameterError
from fkjit.runtime import interop
from fkjit.runtime.device import launch_on_device
from fkjit.runtime.interop import CPU
from fkjit.spec import KernelSpec, Params, Problem, find


def prepare(op: str, *args: Any, **options: Any) -> None:
    """Compile and load what the public call `fkjit.<op>(*args, **options)` will need.

    Nothing is launched. Use it before a CUDA graph capture, or to pay the first call early.
    ParameterError for an op without such a call.
    """
    calls = {name: getattr(fkjit, name) for name in fkjit.__all__}
    able = sorted(name for name, call in calls.items() if hasattr(call, "prepare"))
    one_of("prepare", "op", op, able)
    calls[op].prepare(*args, **options)


def variants(kernel: str, arch: str | None = None) -> Iterator[dict[str, Any]]:
    """Every legal parameter combination of "op.name", on one architecture if given."""
    spec = _found("variants", "kernel", kernel)
    if arch is not None and not isinstance(arch, str):
        raise ArgumentTypeError(f"variants: arch={shown(arch)} is not a name such as sm_90a")
    try:
        return spec.variants(None if arch is None else arch_of(arch))
    except ParameterError as error:
        raise ParameterError(f"variants: {error}") from None


def _found(call: str, name: str, kernel: Any) -> KernelSpec:
    """The registered kernel of a name."""
    if not isinstance(kernel, str):
        raise ArgumentTypeError(f"{call}: {name}={shown(kernel)} is not a kernel's name")
    ops.load()
    try:
        return find(kernel)
    except ParameterError as error:
        raise ParameterError(f"{call}: {name}: {error}") from None


def launch(
    spec: KernelSpec | str, params: Params, problem: Problem, arrays: Mapping[str, Any]
) -> None:
    """Run one variant of one kernel on arrays of any framework, in place.

    Args:
        spec: the kernel, or its name "op.name".
        params: a value for each declared parameter; checked for the architecture.
        problem: sizes, as the spec's grid and arguments functions want them.
        arrays: by the names the spec's `arguments` wants; all on one device. CPU arrays run in the
            interpreter, CUDA arrays on their GPU and the caller's current stream. None is a null
            pointer. Outputs are written in place.

    Raises ParameterError, ArgumentTypeError, DeviceError, CompileError, CaptureError.
    """
    if not isinstance(spec, KernelSpec):
        spec = _found("launch", "spec", spec)
    for name, value in (("params", params), ("problem", problem), ("arrays", arrays)):
        if not isinstance(value, Mapping):
            raise ArgumentTypeError(f"launch: {name}={shown(value)} is not a mapping of names")
    views = {
        name: interop.view(array, spec.op, name)
        for name, array in arrays.items()
        if array is not None
    }
    params = spec.canonical(params)
    device = _one_device(spec, views)
    if device == CPU:
        numpy_arrays = {n: interop.as_numpy(views[n]) if n in views else None for n in arrays}
        return interpret(spec, params, problem, numpy_arrays)
    named = spec.arguments(params, problem, {n: interop.Pointer(views.get(n)) for n in arrays})
    stream = interop.current_stream(next(iter(views.values())))
    launch_on_device(spec, params, problem, named, device, stream)
    return None


def _one_device(spec: KernelSpec, views: Mapping[str, interop.View]) -> int:
    kinds = {view.kind: name for name, view in views.items()}
    if len(kinds) > 1:
        found = ", ".join(f"{name} of {kind}" for kind, name in kinds.items())
        raise ArgumentTypeError(f"{spec.op}: arrays of several frameworks ({found}); pass one kind")
    devices = {view.device: name for name, view in views.items()}
    if len(devices) != 1:
        places = ", ".join(
            f"{name} on {'the CPU' if d == CPU else f'cuda:{d}'}" for d, name in devices.items()
        )
        raise DeviceError(
            f"{spec.op}: arrays on several devices or none ({places}); move them to one"
        )
    return next(iter(devices))
