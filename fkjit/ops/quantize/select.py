"""Which kernel a product with a quantized weight gets, and which variant of it."""

from __future__ import annotations

from typing import Any, NamedTuple

from fkjit.arch import Arch
from fkjit.errors import ParameterError
from fkjit.ops.quantize import kernels_few
from fkjit.ops.quantize.product import is_quantized
from fkjit.spec import KernelSpec, Problem
from fkjit.tuning import tuned

CALL = "linear"


class Choice(NamedTuple):
    """A kernel, its parameters, and the scratch memory that it wants (bytes, counters)."""

    spec: KernelSpec
    params: dict[str, Any]
    scratch: tuple[int, int]


def choose(problem: Problem, impl: str, arch: Arch) -> Choice:
    """ParameterError where the kernel asked for does not take the problem, or the GPU has none."""
    chosen = None if is_quantized(problem) else _few(problem)
    if chosen is None:
        raise ParameterError(f"{CALL}: impl={impl!r} takes no x of {problem['m']} rows")
    if impl not in ("auto", chosen.spec.name):
        raise ParameterError(
            f"{CALL}: impl={impl!r} with this weight and {problem['m']} rows of x; allowed: "
            f"'auto' or {chosen.spec.name!r}"
        )
    missing = sorted(chosen.spec.features(chosen.params) - arch.features)
    if missing:
        raise ParameterError(
            f"{CALL}: a weight of {problem['code']} needs {', '.join(missing)}, which {arch.name} "
            "has not; allowed: fkjit.dequantize(weight) in its place"
        )
    params = tuned(chosen.spec, chosen.params, problem, arch)
    return chosen._replace(params=params)


def _few(problem: Problem) -> Choice | None:
    found = kernels_few.choose(problem)
    return None if found is None else Choice(*found)
