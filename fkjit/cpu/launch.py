"""`fkjit.launch_cpu`: any CUDA C++ kernel, compiled by NVRTC, run and checked on the CPU."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fkjit.arch import Target, target
from fkjit.arguments import shown
from fkjit.cpu.arguments import argument
from fkjit.cpu.run import GUARD, carve_outs
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.jit.build import build_source, interpreter_target
from fkjit.jit.render import Rendered, guarded, load_file, load_text
from fkjit.jit.signature import Argument, loose_signature
from fkjit.sanitizer import Sanitizer, current
from fkjit.spec import Dim3, SharedLayout

if TYPE_CHECKING:
    from fkjit.interp import Stats
    from fkjit.interp.core.ptx import Function

_TEXT = "<source>"  # what reports call a source that is no file
_CALL = "launch_cpu"


def launch_cpu(
    source: str | Path,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    args: Sequence[Any],
    *,
    entry: str | None = None,
    smem: int | SharedLayout = 0,
    arch: str | None = None,
    cluster: int | Sequence[int] = 1,
    params: Mapping[str, Any] | None = None,
    mem: bool | None = None,
    race: bool | None = None,
    banks: bool | float | None = None,
) -> Stats:
    """Run one kernel of a CUDA source on the CPU, with memory and race checks. Needs no GPU.

    Args:
        source: CUDA C++ as text, or the path of a file; may be a template with `${x}` and
            `//% if x`. `#include "…"` finds fkjit's templates/ and files beside the source.
        grid, block, cluster: blocks, threads of one, blocks of a cluster (else what the kernel's
            __cluster_dims__ say): up to three extents.
        args: the kernel's arguments in order. CPU arrays for pointers (NumPy, torch, …; written in
            place, unless the pointer is to const), None for a null pointer, numbers, and for
            structs bytes or a tuple of NumPy scalars in the struct's layout; for a tensor map by
            value an `fkjit.interp.TensorMap`.
        entry: the `__global__` function; not needed where there is only one.
        smem: bytes of dynamic shared memory; or (name, bytes) of the arrays in it, one after the
            other: reports name them, and where the source leaves `${guard}` bytes between them,
            running out of one is found.
        arch: what to compile for, e.g. "sm_90a"; default compute_80, or FKJIT_TARGET.
        params: values of the template.
        mem, race, banks: see `fkjit.sanitize`; default: the surrounding block's, else mem and race.

    Returns:
        Stats: seconds, blocks, threads, and with banks the figures of each line in `.banks`.

    Raises SanitizerError at a fault, with every array as it was; its report names lines of the
    file, or of "<source>". CompileError, RenderError, ParameterError, ArgumentTypeError;
    DeviceError for arrays on a GPU; InterpreterError for PTX that is not supported.
    """
    for name, value, kinds in (("arch", arch, str), ("params", params, Mapping)):
        if value is not None and not isinstance(value, kinds):
            raise ArgumentTypeError(f"{_CALL}: {name}={shown(value)} is not a {kinds.__name__}")
    for name, value in (("mem", mem), ("race", race)):
        if value is not None and not isinstance(value, bool):
            raise ParameterError(f"{_CALL}: {name}={shown(value)} is not True or False")
    chosen = _chosen(mem, race, banks)
    to = interpreter_target() if arch is None else _ptx_target(arch)
    extents = {"grid": grid, "block": block, "cluster": cluster}
    shape = {name: _extents(name, value) for name, value in extents.items()}
    layout = _layout(smem)
    rendered = _rendered(source, dict(params or {}))
    guard = GUARD if layout and chosen.mem and guarded(rendered.template) else 0
    if layout or guarded(rendered.template):
        rendered = replace(rendered, values={"guard": guard, **rendered.values})
    what = {"kernel": _CALL, "label": rendered.name, "params": {}}
    ptx = build_source(rendered, "", to, what).image.decode().rstrip("\0")
    from fkjit import interp
    from fkjit.interp.core.parse import parse

    functions = parse(ptx).functions.values() if ".entry" in ptx else ()
    name, kernel = _entry(rendered.name, functions, entry)
    given = _arguments(name, kernel, loose_signature(rendered, name), args)
    parts, total = carve_outs(layout, guard)
    dynamic = total if isinstance(smem, Sequence) else int(smem)
    stats = interp.run(
        ptx, kernel.name, shape["grid"], shape["block"], given, dynamic, chosen.checks, name,
        cluster=shape["cluster"], carve_outs=parts,
    )  # fmt: skip
    chosen.note(stats.banks)
    return stats


def _chosen(mem: bool | None, race: bool | None, banks: bool | float | None) -> Sanitizer:
    """The surrounding block's checks, or memory and races, with what the call overrules."""
    around = current() or Sanitizer()
    if mem is race is banks is None:
        return around
    mem = around.mem if mem is None else mem
    race = (around.race and mem) if race is None else race
    banks = around.banks if banks is None else banks
    return Sanitizer(mem or (race and around.mem), race, banks, around._lines)


def _ptx_target(arch: str) -> Target:
    try:
        return target("compute_" + target(arch).name.rpartition("_")[2])
    except ParameterError as error:
        raise ParameterError(f"{_CALL}: arch={shown(arch)}: {error}") from None


def _extents(name: str, value: int | Sequence[int]) -> Dim3:
    parts = (value,) if isinstance(value, int | np.integer) else value
    good = isinstance(parts, Sequence) and not isinstance(parts, str) and 1 <= len(parts) <= 3
    if not good or any(not isinstance(p, int | np.integer) or p < 1 for p in parts):
        raise ParameterError(
            f"{_CALL}: {name}={shown(value)} is not one to three whole numbers above 0"
        )
    x, y, z = (*(int(part) for part in parts), 1, 1)[:3]
    if name == "block" and x * y * z > 1024:
        raise ParameterError(f"{_CALL}: block={value!r} has {x * y * z} threads; 1024 is the most")
    return x, y, z


def _layout(smem: int | SharedLayout) -> SharedLayout:
    """The arrays of dynamic shared memory, if they were named."""
    if isinstance(smem, int | np.integer) and smem >= 0:
        return ()
    pairs = smem if isinstance(smem, Sequence) and not isinstance(smem, str) else None
    if not pairs or not all(_is_carve_out(pair) for pair in pairs):
        raise ParameterError(
            f"{_CALL}: smem={shown(smem)} is not a number of bytes, nor (name, bytes) of each array"
        )
    return pairs


def _is_carve_out(pair: Any) -> bool:
    return (
        isinstance(pair, Sequence)
        and len(pair) == 2
        and isinstance(pair[0], str)
        and isinstance(pair[1], int)
        and pair[1] > 0
    )


def _rendered(source: str | Path, values: dict[str, Any]) -> Rendered:
    """The source, with the file's own name or "<source>"."""
    if isinstance(source, str) and re.search(r"\n|__global__", source):
        return load_text(_TEXT, source, Path(_TEXT), values)
    if not isinstance(source, str | Path):
        raise ArgumentTypeError(
            f"{_CALL}: source is a {type(source).__name__}; allowed: CUDA C++ as text, or a path"
        )
    path = Path(source)
    if not os.path.isfile(path):
        given = shown(str(source))
        raise ParameterError(
            f"{_CALL}: source={given} is no file, and no CUDA C++ with a __global__"
        )
    return load_file(path.name, path, values, _CALL)


def _entry(source: str, functions: Any, wanted: str | None) -> tuple[str, Function]:
    """The kernel asked for, or the only one, and its name in the source."""
    from fkjit.interp.core.names import source_name

    kernels = {f.name: f for f in functions if f.entry}
    known = ", ".join(sorted(map(source_name, kernels))) or "none"
    found = [k for n, k in kernels.items() if wanted in (None, n, source_name(n))]
    if len(found) == 1:
        return source_name(found[0].name), found[0]
    if not found:
        raise ParameterError(
            f"{_CALL}: {source} has no kernel {wanted!r} (it has: {known})"
            if kernels
            else f"{_CALL}: {source} has no __global__ function"
        )
    symbols = f" ({', '.join(k.name for k in found)})" if wanted else ""
    raise ParameterError(
        f"{_CALL}: {source} has several kernels{symbols or f' ({known})'}; say which: entry="
    )


def _arguments(
    name: str, kernel: Function, declared: Sequence[Argument], args: Sequence[Any]
) -> list[Any]:
    """The arguments as the interpreter takes them; by PTX alone where the source is not plain."""
    if not isinstance(args, list | tuple):
        raise ArgumentTypeError(
            f"{_CALL}: args is a {type(args).__name__}; allowed: a list of {name}'s arguments"
        )
    sizes = [variable.size for variable in kernel.params]
    if len(declared) != len(sizes):
        declared = [Argument(f"argument {i}", "", "", False, False) for i in range(len(sizes))]
    if len(args) != len(sizes):
        names = ", ".join(one.name for one in declared) or "none"
        raise ParameterError(f"{_CALL}: {name} takes {len(sizes)} arguments ({names}) and got "
                             f"{len(args)}")  # fmt: skip
    return [
        argument(_CALL, one, size, value)
        for one, size, value in zip(declared, sizes, args, strict=True)
    ]
