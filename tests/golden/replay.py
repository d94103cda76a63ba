"""Runs a case in the interpreter."""

from __future__ import annotations

from functools import cache

import numpy as np

from fkjit.interp import Arg, Checks, TensorMap, run
from tests.golden.case import ENTRY, Case, Map
from tests.golden.compile import compile_kernel


@cache
def _ptx(source: str, arch: str) -> str:
    return compile_kernel(source, arch).decode()


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
    run(
        _ptx(case.source, case.arch), ENTRY, case.grid, case.block, arguments, case.shared,
        checks, case.name, cluster=case.cluster,
    )  # fmt: skip
    return {name: arrays[name] for name in case.outputs}
