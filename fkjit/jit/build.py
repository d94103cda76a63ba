"""Spec and parameters -> compiled image: render, key, cache, compile. Needs no GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from queue import SimpleQueue
from typing import Any

from fkjit.arch import Capability, Target, choose_target, target
from fkjit.cache.lookup import Cache, Entry, default_cache
from fkjit.cache.toolchains import Toolchain
from fkjit.errors import ToolchainError
from fkjit.jit.keys import installed, key_fields
from fkjit.jit.render import Rendered, load
from fkjit.jit.toolchain import nvrtc_info
from fkjit.messages import running
from fkjit.settings import settings
from fkjit.spec import KernelSpec, Params

INTERPRETER_TARGET = "compute_80"  # whose PTX the CPU interpreter runs unless one is forced

# What is looked for where nothing may be compiled and nothing is cached: any would do.
_UNKNOWN = Toolchain("13.0", "", (75, 80, 86, 89, 90, 100, 120))

_quiet = threading.local()


def build(
    spec: KernelSpec,
    params: Params,
    to: Target,
    cache: Cache | None = None,
    guard: int = 0,
    load: Callable[[KernelSpec, Params, int], Rendered] = load,
) -> Entry:
    """The compiled kernel for one target, from the cache or from NVRTC.

    `Entry.meta` has: kernel, entry, label, params, target, kind, arguments (name, struct code,
    const of each), resources (None for PTX), compile_seconds, nvrtc, problems (spills and the
    like). `guard`: see `KernelSpec.shared_layout`. `load`: where the source comes from.
    Raises CompileError, RenderError, ToolchainError, or NotCachedError.
    """
    what = {"kernel": spec.id, "label": spec.label(params), "params": dict(params)}
    return build_source(load(spec, params, guard), spec.entry, to, what, cache)


def build_all(wanted: Sequence[tuple[KernelSpec, Params]], to: Target) -> None:
    """Have several kernels in the cache: those that are not are compiled at the same time.

    Raises what `build` raises, of the first that fails, and ParameterError for parameters that the
    architecture does not take; an interrupt is raised at once.
    """
    ended: SimpleQueue[BaseException | None] = SimpleQueue()
    silent = getattr(_quiet, "on", False)

    def work(spec: KernelSpec, params: Params) -> None:
        try:
            spec.check(params, to.arch)
            with quiet() if silent else nullcontext():
                build(spec, params, to)
            ended.put(None)
        except BaseException as error:
            ended.put(error)

    for each in wanted:
        threading.Thread(target=work, args=each, daemon=True).start()
    for _ in wanted:
        error = ended.get()
        if error is not None:
            raise error


def build_source(
    rendered: Rendered, entry: str, to: Target, what: dict[str, Any], cache: Cache | None = None
) -> Entry:
    """The same of any source; `what` has kernel, label and params for `Entry.meta`.

    entry "": a text with any entry points, whose arguments are not looked at; to PTX only.
    """
    cache = cache or default_cache()
    describe = " ".join(part for part in (what["kernel"], what["label"], to.name) if part)
    for by in _made_by(cache):
        fields = key_fields(what["kernel"], rendered, entry, to, by)
        found = cache.find(fields, lambda meta, by=by: cache.require_cached or _usable(meta, by))
        if found is not None:
            return found
    by = (*cache.toolchains(), _UNKNOWN)[0] if cache.require_cached else installed()
    return cache.get_or_build(
        key_fields(what["kernel"], rendered, entry, to, by),
        lambda: _compile(rendered, entry, to, what, describe),
        describe=describe,
        usable=lambda meta: _usable(meta, by),
    )


def _made_by(cache: Cache) -> Iterator[Toolchain]:
    """What may have made a cached entry, so that NVRTC need not be loaded: what made the bundles,
    and where nothing may be compiled all that is cached, perhaps a moment ago."""
    known = cache.toolchains()
    yield from known
    if cache.require_cached:
        yield from (by for by in cache.toolchains(anew=True) if by not in known)


def _usable(meta: Mapping[str, Any], by: Toolchain) -> bool:
    """Whether the files that an entry was made of are as they were, where this is their toolkit.

    Those few that are not in the key: see `includes.py`.
    """
    if not meta.get("toolkit"):
        return True
    from fkjit.jit.includes import unchanged

    with suppress(ToolchainError):
        return installed()[:2] != by[:2] or unchanged(meta["toolkit"])
    return True  # no toolkit is here


def _compile(
    rendered: Rendered, entry: str, to: Target, what: dict[str, Any], describe: str
) -> tuple[bytes, dict[str, Any]]:
    """The image and what the cache keeps beside it."""
    from fkjit.jit.compiler import compilers  # not at the top: a warm start compiles nothing

    compilers.start(nvrtc_info().library)
    from fkjit.jit.compile import compile_source
    from fkjit.jit.signature import signature

    with _status(describe) as done:
        compiled = compile_source(rendered, entry, to, describe=describe)
        done.append(f"{compiled.seconds * 1e3:.0f} ms")
    arguments = signature(rendered, entry) if entry else ()
    return compiled.image, {
        "kernel": what["kernel"],
        "entry": entry,
        "label": what["label"],
        "params": what["params"],
        "target": compiled.target,
        "kind": compiled.kind,
        "arguments": [(a.name, a.code, a.const) for a in arguments],
        "resources": compiled.resources.to_dict() if compiled.resources else None,
        "compile_seconds": compiled.seconds,
        "nvrtc": compiled.nvrtc_version,
        "problems": list(compiled.problems),
        "archs": list(nvrtc_info().supported),
        **({"toolkit": dict(compiled.read)} if compiled.read else {}),
    }


def gpu_target(capability: Capability) -> Target:
    """What to compile for a GPU of this compute capability (FKJIT_TARGET overrules).

    Where a bundle has kernels for it, or nothing may be compiled: what is in there.
    """
    cache, forced = default_cache(), settings().target
    for by in _made_by(cache):
        with suppress(ToolchainError):
            found = choose_target(capability, by.archs, by.version, forced)
            if found.name in by.targets:
                return found
    by = (*cache.toolchains(), _UNKNOWN)[0] if cache.require_cached else installed()
    return choose_target(capability, by.archs, by.version, forced)


def interpreter_target() -> Target:
    """The PTX target that the CPU interpreter runs: FKJIT_TARGET's, else compute_80."""
    chosen = target(settings().target or INTERPRETER_TARGET)  # any spelling
    return target("compute_" + chosen.name.rpartition("_")[2])


@contextmanager
def quiet() -> Iterator[None]:
    """No status lines from this thread: the caller shows progress of its own."""
    before = getattr(_quiet, "on", False)
    _quiet.on = True
    try:
        yield
    finally:
        _quiet.on = before


@contextmanager
def _status(describe: str) -> Iterator[list[str]]:
    """One line a compile on stderr: what, and when it is done how long it took."""
    if settings().log == "quiet" or getattr(_quiet, "on", False):
        yield []
        return
    with running(f"compiling {describe}") as done:
        yield done
