"""Which kernel a product with a quantized weight gets, and which variant of it."""

from __future__ import annotations

from typing import Any, NamedTuple

from fkjit.arch import Arch
from fkjit.errors import ParameterError
from fkjit.ops.quantize import kernels_blocks, kernels_bytes, kernels_few
from fkjit.ops.quantize.product import is_quantized
from fkjit.ops.quantize.schemes import WIDTH
from fkjit.spec import KernelSpec, Problem
from fkjit.tuning import tuned

CALL = "linear"
_MOST_EXACT = 1 << 17  # of k: products of int8 codes are up to 127 * 127


class Choice(NamedTuple):
    """A kernel, its parameters, and the scratch memory that it wants (bytes, counters)."""

    spec: KernelSpec
    params: dict[str, Any]
    scratch: tuple[int, int]


def choose(problem: Problem, impl: str, arch: Arch) -> Choice:
    """ParameterError where the kernel asked for does not take the problem, or the GPU has none."""
    chosen = _bytes(problem, impl, arch) if is_quantized(problem) else _few(problem, impl, arch)
    if chosen is None:
        raise ParameterError(
            f"{CALL}: impl={impl!r} with this weight and {problem['m']} rows of x; allowed: 'auto'"
        )
    if impl not in ("auto", chosen.spec.name):
        raise ParameterError(
            f"{CALL}: impl={impl!r} with this weight and {problem['m']} rows of x; allowed: "
            f"'auto' or {chosen.spec.name!r}"
        )
    missing = sorted(chosen.spec.features(chosen.params) - arch.features)
    if missing:
        raise ParameterError(
            f"{CALL}: a weight of {problem['code']} needs {', '.join(missing)}, which {arch.name} "
            "has not; allowed: fkjit.dequantize(weight) in its place, or with CPU arrays "
            "FKJIT_TARGET=compute_90a"
        )
    params = tuned(chosen.spec, chosen.params, problem, arch)
    return chosen._replace(params=params)


def _bytes(problem: Problem, impl: str, arch: Arch) -> Choice:
    """Of codes with codes."""
    if problem["code"] == "int8" and problem["k"] > _MOST_EXACT:
        raise ParameterError(
            f"{CALL}: k={problem['k']} with int8 codes; allowed: up to {_MOST_EXACT}, whose sums "
            "are whole numbers of 32 bits"
        )
    if problem.get("coded") and ("wgmma" not in arch.features or impl in ("wgmma", "mma")):
        why = "not what was asked for" if "wgmma" in arch.features else f"not there on {arch.name}"
        raise ParameterError(
            f"{CALL}: out_scheme='fp8_block' is made by impl='wgmma_blocks', which is {why}; "
            "allowed: fkjit.quantize(y, 'fp8_block') of what the call returns without it"
        )
    blocks, gate = problem["span"] == "block", problem["gate"]
    if blocks and gate and problem["n"] % WIDTH:
        raise ParameterError(
            f"{CALL}: gate=True with fp8_block and {problem['n']} columns; allowed: a multiple of "
            f"{WIDTH}, so that gate and up have scales of their own"
        )
    wgmma = "wgmma" in arch.features and impl != "mma"
    if blocks and wgmma and impl != kernels_bytes.WGMMA.name:
        return Choice(*kernels_blocks.choose(problem))
    return Choice(*kernels_bytes.choose(problem, wgmma))


def _few(problem: Problem, impl: str, arch: Arch) -> Choice | None:
    found = kernels_few.choose(problem, "wgmma" in arch.features, impl)
    return None if found is None else Choice(*found)
