"""Registered kernels as candidates, launched by name, and what building a variant cost."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np

import fkjit
from fkjit.arch import Arch
from fkjit.errors import FkjitError, ParameterError
from fkjit.spec import KernelSpec, Param, Params, Problem

from .op import Arrays, Candidate, Op, Prepared, Refused
from .words import Values, is_tile


def launcher(
    spec: KernelSpec, params: Params, problem: Problem, arrays: Arrays, device: Any
) -> Prepared:
    """`fkjit.launch` of one variant into outputs of its own; returns the first of these.

    Refused where arrays are missing that other kernels of a call hand it: it would read null.
    """
    outputs = {
        name: device.array(made)
        for name, made in spec.verification.outputs(params, problem).items()
    }
    named = {**arrays, **outputs}
    missing = sorted(_needed(spec, params) - named.keys())
    if missing:
        raise Refused(f"does not run alone: other kernels make its {', '.join(missing)}")
    first = next(iter(outputs.values()))

    def call() -> Any:
        fkjit.launch(spec, params, problem, named)
        return first

    return Prepared(call, variant=(spec, params))


def _needed(spec: KernelSpec, params: Params) -> set[str]:
    """Arrays that it is given whatever the problem, as it is checked."""
    rng = np.random.default_rng(0)
    found = [
        {name for name, array in made.items() if array is not None}
        for one in spec.verification.problems(params, "small")
        for made in [spec.verification.inputs(params, one, rng)]
    ]
    return set.intersection(*found) if found else set()


def arch_of(array: Any) -> Arch:
    """What kernels on this CUDA tensor are compiled for; it knows the GPU's name."""
    from fkjit.runtime.device import device_target

    return device_target(array.get_device()).arch


def launched(
    op: Op, spec: KernelSpec, params: Params, problem: Problem, arrays: Arrays, device: Any
) -> Prepared:
    """A variant, launched as the operation says."""
    return (op.launch or launcher)(spec, params, problem, arrays, device)


def ours(
    op: Op, impl: str, variants: bool, device: Any, arch: Arch, tiles: Values | None = None
) -> list[Candidate]:
    """Our candidates: "auto" the public call; "all" and names the registered kernels too.

    With `variants` every legal tile of each kernel; `tiles`: those with these values, as they are
    written, of every kernel that has them. ParameterError for an unknown name.
    """
    specs = op.specs
    names = [name.strip() for name in impl.split(",") if name.strip()]
    known = {spec.name for spec in specs}
    for name in names:
        if name not in {"auto", "all", *known}:
            allowed = ", ".join(["auto", "all", *sorted(known)])
            raise ParameterError(f"bench: --impl {name!r} of {op.name} is not one of {allowed}")
    if tiles:
        chosen = [spec for spec in specs if impl in ("auto", "all") or spec.name in names]
        return [made for spec in chosen for made in _tiles(op, spec, device, arch, tiles)]
    made = []
    if op.ours is not None and {"auto", "all"} & {*names}:
        made.append(_call(op, op.ours, arch))
    every = "all" in names or (op.ours is None and "auto" in names)
    chosen = [spec for spec in specs if every or spec.name in names]
    if variants and not chosen:
        chosen = specs
    for spec in chosen:
        made += _tiles(op, spec, device, arch) if variants else [_kernel(op, spec, device, arch)]
    return made


def _call(op: Op, prepare: Callable[[Problem, Arrays], Prepared], arch: Arch) -> Candidate:
    chosen = op.chosen
    variant = None if chosen is None else lambda problem: chosen(problem, arch)
    return Candidate(name="fkjit", kind="ours", prepare=prepare, variant=variant)


def _kernel(
    op: Op,
    spec: KernelSpec,
    device: Any,
    arch: Arch,
    given: Mapping[str, Any] | None = None,
) -> Candidate:
    """A kernel with what the call takes of it, but for the parameters that are `given`."""

    def variant(problem: Problem) -> tuple[KernelSpec, Params]:
        params = _choose(op, spec, problem, arch)
        if given is None:
            return spec, params
        params = {**params, **given}
        reason = spec.why_not(params, arch)
        if reason:
            raise Refused(reason)
        return spec, params

    def prepare(problem: Problem, arrays: Arrays) -> Prepared:
        return launched(op, *variant(problem), problem, arrays, device)

    shown = "".join(f" {name}={_value(value)}" for name, value in (given or {}).items())
    return Candidate(
        name=f"fkjit {spec.name}{shown}", kind="ours", prepare=prepare, variant=variant
    )


def _tiles(
    op: Op, spec: KernelSpec, device: Any, arch: Arch, wanted: Values | None = None
) -> Sequence[Candidate]:
    """A candidate for each combination of the free parameters."""
    free = [param for param in spec.params if param.tunable]
    seen = [
        values
        for values in itertools.product(*(param.values for param in free))
        if is_tile(free, values, wanted or {}) and any(spec.variants(arch, _named(free, values)))
    ]
    ordered = sorted(seen, key=str)
    return [_kernel(op, spec, device, arch, _named(free, values)) for values in ordered]


def _named(free: Sequence[Param], values: tuple[Any, ...]) -> dict[str, Any]:
    return {param.name: value for param, value in zip(free, values, strict=True)}


def _value(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _choose(op: Op, spec: KernelSpec, problem: Problem, arch: Arch) -> Params:
    try:
        params = op.choose(spec, problem, arch)
    except FkjitError as error:
        raise Refused(str(error)) from error
    reason = spec.why_not(params, arch)
    if reason:
        raise Refused(reason)
    return params


def built(spec: KernelSpec, params: Params, device: int) -> dict[str, Any]:
    """Registers and the like of a variant, and two times in milliseconds.

    `compile_ms` is what NVRTC took when it was compiled, in this run or before it was cached;
    `load_ms` is measured now: from the disk cache, verified, to a function on the device.
    """
    from fkjit.cache.lookup import Cache, default_cache, materialise
    from fkjit.jit.build import build
    from fkjit.runtime.device import device_target, loaded

    meta = loaded(spec, params, device).entry.meta
    cache = default_cache()
    params = spec.canonical(params)
    fresh = Cache(cache.directory, [bundle.path for bundle in cache.bundles], cache.max_bytes)
    begin = time.perf_counter()
    entry = build(spec, params, device_target(device), fresh)
    with materialise(entry) as path:
        module = import_module("cupy").RawModule(path=str(path))
        module.get_function(spec.entry).kernel  # noqa: B018 (looked up when asked for)
    load = time.perf_counter() - begin
    return {
        "kernel": spec.id,
        "label": meta["label"],
        "target": meta["target"],
        "resources": meta["resources"],
        "compile_ms": 1e3 * meta["compile_seconds"],
        "load_ms": 1e3 * load if entry.origin == "disk" else None,
    }
