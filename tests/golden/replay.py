"""Runs a case in the interpreter.

NVRTC takes as long to start as for dozens of kernels of a few lines, so cases that declare nothing
but their kernel are compiled many at a time.
"""

from __future__ import annotations

import re
from functools import cache

import numpy as np

from fkjit.interp import Arg, Checks, TensorMap, run
from tests.golden.case import ENTRY, PREAMBLE, Case, Map
from tests.golden.compile import compile_kernel
from tests.golden.groups import GROUPS, cases_of

_TOGETHER = 32  # kernels of one program
_HEAD = f"K {ENTRY}("


@cache
def _ptx(source: str, arch: str) -> str:
    return compile_kernel(source, arch).decode()


def _alone(source: str) -> bool:
    """Whether a source declares more than its kernel: another might have the same."""
    body = source.removeprefix(PREAMBLE)
    return bool(re.search("#|__shared__|__device__|__constant__", body)) or _HEAD not in body


@cache
def _companions() -> dict[tuple[str, str], tuple[str, ...]]:
    """By source and target, the sources that are compiled with it."""
    together: dict[tuple[str, str], list[str]] = {}
    for group in GROUPS:
        for case in cases_of(group).values():
            sources = together.setdefault((group, case.arch), [])
            if not _alone(case.source) and case.source not in sources:
                sources.append(case.source)
    parts = [
        (arch, tuple(sources[first : first + _TOGETHER]))
        for (_, arch), sources in together.items()
        for first in range(0, len(sources), _TOGETHER)
    ]
    return {(source, arch): part for arch, part in parts for source in part}


def _kernel(source: str, arch: str) -> tuple[str, str]:
    """PTX, and the kernel's name in it."""
    sources = _companions().get((source, arch))
    if sources is None:
        return _ptx(source, arch), ENTRY
    bodies = (
        one.removeprefix(PREAMBLE).replace(_HEAD, f"K {ENTRY}{number}(")
        for number, one in enumerate(sources)
    )
    return _ptx(PREAMBLE + "".join(bodies), arch), f"{ENTRY}{sources.index(source)}"


def _tensor_map(spec: Map, array: np.ndarray) -> TensorMap:
    return TensorMap(
        array, spec.dims, spec.strides, spec.box, spec.element_strides,
        f"{spec.swizzle}B" if spec.swizzle else "none", spec.fill, spec.dtype,
    )  # fmt: skip


def replay(case: Case, checks: Checks = Checks()) -> dict[str, np.ndarray]:
    """The case's outputs by name. Raises what the interpreter raises."""
    arrays = case.make_arrays()
    arguments = [Arg(name, array, name in case.outputs) for name, array in arrays.items()]
    for number, spec in enumerate(case.maps):
        arguments.append(Arg(f"map{number}", _tensor_map(spec, arrays[spec.array])))
    ptx, entry = _kernel(case.source, case.arch)
    run(
        ptx, entry, case.grid, case.block, arguments, case.shared,
        checks, case.name, cluster=case.cluster,
    )  # fmt: skip
    return {name: arrays[name] for name in case.outputs}
