"""Calls that work for every registered kernel, ours and the user's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from threading import TIMEOUT_MAX
from typing import Any

import numpy as np

import fkjit
from fkjit import ops
from fkjit.arch import arch as arch_of
from fkjit.arch import target
from fkjit.arguments import shown
from fkjit.cpu.run import interpret
from fkjit.errors import ArgumentTypeError, DeviceError, ParameterError, did_you_mean
from fkjit.jit.compiler import compilers
from fkjit.runtime import abstract, interop
from fkjit.runtime.device import launch_on_device
from fkjit.runtime.interop import CPU
from fkjit.settings import settings
from fkjit.spec import KernelSpec, Params, Problem, find


def prepare(op: str, *args: Any, arch: str | None = None, **options: Any) -> None:
    """Compile and load what the public call `fkjit.<op>(*args, **options)` will need.

    Nothing is launched. Use it before a CUDA graph capture, or to pay the first call early.

    arch: a target such as "sm_90a": compile for it into the cache, without a GPU and without
    memory. Only shapes, strides and dtypes of arrays count then; they may be NumPy arrays, torch
    tensors (also on "meta"), jax.ShapeDtypeStruct, or texts such as "bf16[2, 16, 4096, 128]". Tiles
    are chosen for the architecture's usual number of SMs. CPU arrays take FKJIT_TARGET for `arch`
    where it is a GPU's; else there is nothing to compile for them.

    ParameterError for an op without such a call.

    Example:
        >>> fkjit.prepare("rms_norm", "bf16[64, 4096]", "bf16[4096]", arch="sm_90a")
    """
    calls = {name: getattr(fkjit, name) for name in fkjit.__all__}
    able = sorted(name for name, call in calls.items() if hasattr(call, "prepare"))
    if not isinstance(op, str) or op not in able:
        near = did_you_mean(op, able) if isinstance(op, str) else ""
        raise ParameterError(f"prepare: op={shown(op)} is not one of {', '.join(able)}{near}")
    if arch is None and _on_cpu((*args, *options.values())):
        forced = settings().target
        arch = forced if forced and target(forced).kind == "cubin" else None
    if arch is not None:
        device = abstract.device_for(arch)
        args = abstract.described(args, device)
        options = {name: abstract.described(value, device) for name, value in options.items()}
    calls[op].prepare(*args, **options)


def _on_cpu(values: Iterable[Any]) -> bool:
    """Whether there are arrays among these, all of them on the CPU."""
    arrays = [value for value in values if hasattr(value, "shape") and hasattr(value, "dtype")]
    on_cpu = [isinstance(a, np.ndarray) or getattr(a, "is_cpu", False) is True for a in arrays]
    return bool(arrays) and all(on_cpu)


def compile_timeout(seconds: float | None) -> float | None:
    """Set how long NVRTC may take for one kernel, in this process and in those that `fkjit.warm`
    starts from it. Returns what it was: 600 s at first.

    seconds: above 0; None sets no limit. A compile that takes longer is ended, and the call that
    wanted it raises CompilerStoppedError. Where no process can be started for NVRTC there is no
    limit. ParameterError and ArgumentTypeError for anything else.

    Example:
        >>> before = fkjit.compile_timeout(60)
        >>> fkjit.compile_timeout(before)
        60.0
    """
    before, compilers.timeout = compilers.timeout, _limit(seconds)
    return before


def _limit(seconds: Any) -> float | None:
    if seconds is None:
        return None
    try:
        limit = None if isinstance(seconds, bool | str) else float(seconds)
    except Exception:  # an array, 10**400
        limit = None
    if limit is None:
        raise ArgumentTypeError(f"compile_timeout: seconds={shown(seconds)} is not a number")
    if not 0 < limit <= TIMEOUT_MAX:
        raise ParameterError(
            f"compile_timeout: seconds={shown(seconds)}; allowed: above 0, to {TIMEOUT_MAX:g} "
            "(None: no limit)"
        )
    return limit


def variants(kernel: str, arch: str | None = None) -> Iterator[dict[str, Any]]:
    """Every legal parameter combination of "op.name", on one architecture if given.

    Example:
        >>> sorted({variant["dtype"] for variant in fkjit.variants("attention.flash", "sm_90a")})
        ['bf16', 'fp16']
    """
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
