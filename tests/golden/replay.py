"""Runs a case in the interpreter.

NVRTC takes as long to start as for dozens of kernels of a few lines, so cases that differ in their
kernel alone are compiled many at a time.
"""

from __future__ import annotations

import re
from functools import cache

import numpy as np

from fkjit.interp import Arg, Checks, TensorMap, run
from tests.golden.case import ENTRY, Case, Map
from tests.golden.compile import compile_kernel
from tests.golden.groups import GROUPS, cases_of

_TOGETHER = 32  # kernels of one program
_KERNEL = re.compile(rf'^(K|extern "C" __global__ void)(.*) {ENTRY}\(', re.MULTILINE)


@cache
def _ptx(source: str, arch: str) -> str:
    return compile_kernel(source, arch).decode()


def _cut(source: str) -> tuple[str, str]:
    """What stands before the kernel, and the kernel."""
    (kernel,) = _KERNEL.finditer(source)
    return source[: kernel.start()], source[kernel.start() :]


@cache
def _companions() -> dict[tuple[str, str], tuple[str, ...]]:
    """By source and target, the sources that are compiled with it."""
    together: dict[tuple[str, str, str], list[str]] = {}
    for group in GROUPS:
        for case in cases_of(group).values():
            sources = together.setdefault((group, case.arch, _cut(case.source)[0]), [])
            if case.source not in sources:
                sources.append(case.source)
    parts = [
        (arch, tuple(sources[first : first + _TOGETHER]))
        for (_, arch, _), sources in together.items()
        for first in range(0, len(sources), _TOGETHER)
    ]
    return {(source, arch): part for arch, part in parts for source in part}


@cache
def _kernel(source: str, arch: str) -> tuple[str, str]:
    """PTX, and the kernel's name in it."""
    sources = _companions().get((source, arch), (source,))
    kernels = (
        _KERNEL.sub(rf"\1\2 {ENTRY}{number}(", _cut(one)[1]) for number, one in enumerate(sources)
    )
    program = _cut(source)[0] + "".join(kernels)
    return _ptx(program, arch), f"{ENTRY}{sources.index(source)}"


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
