"""Which kernel of a product a problem gets, and which variant of it: the least `cost`; what was
measured for its class of shapes (`fkjit tune`) overrules the tile."""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from fkjit import tuning
from fkjit.arch import Arch
from fkjit.errors import ParameterError
from fkjit.ops.gemm.candidates import CANDIDATES
from fkjit.ops.gemm.cost import SMS, Shape, beside, cost
from fkjit.ops.gemm.epilogue import kernel_for
from fkjit.spec import KernelSpec, Params, Problem
from fkjit.symbolic import decision

CALL = "linear"
IMPLEMENTATIONS = ("auto", *CANDIDATES)
_KEPT = 4096  # choices, of as many shapes
_STEPS = ((8, 1), (64, 8), (1024, 16), (1 << 30, 64))  # up to so many rows, rounded to these

Fixed = tuple[tuple[str, Any], ...]


class Choice(NamedTuple):
    """A kernel, its parameters, and the scratch memory that it wants."""

    spec: KernelSpec
    params: Params
    workspace: int  # bytes
    counters: int


def choose(problem: Problem, impl: str, block: Any, arch: Arch) -> Choice:
    """ParameterError where the kernel, or the tile, asked for does not take the problem."""
    sizes, others = _shape(problem)
    name, chosen = _chosen(*sizes, others, impl, _tile(block), arch)
    candidate, params = CANDIDATES[name], dict(chosen)
    spec = kernel_for(candidate.spec, problem["activation"])
    if block is None:
        params = tuning.tuned(spec, params, problem, arch)
    return Choice(spec, params, *candidate.scratch(params, problem))


def _shape(problem: Problem) -> tuple[tuple[int, int, int], tuple[Any, ...]]:
    """The fields of a `Shape`: m, n, k, and the others."""
    sms = problem.get("multiprocessors", SMS)
    known = {**Shape._field_defaults, **problem, "sms": sms}
    given = [known[name] for name in Shape._fields]
    return (given[0], given[1], given[2]), tuple(given[3:])


@decision(_KEPT)
def _chosen(
    m: int, n: int, k: int, others: tuple[Any, ...], impl: str, block: Any, arch: Arch
) -> tuple[str, Fixed]:
    """What `best` says of a shape with so many rows or a few more: lengths that are new at every
    step are not all estimated."""
    name, params = best(Shape(_rounded(m), n, k, *others), impl, block, arch)
    return name, tuple(params.items())


def _rounded(m: int) -> int:
    """Up to a number of rows that makes no other tiles."""
    step = next((step for most, step in _STEPS if m <= most), _STEPS[-1][1])
    return -(-m // step) * step


@lru_cache(maxsize=_KEPT)
def best(shape: Shape, impl: str, block: Any, arch: Arch) -> tuple[str, dict[str, Any]]:
    """The kernel's name and parameters of the least cost."""
    found = variants(shape, impl, arch)
    if block is not None:
        found = _with_tile(found, block, impl)
    costs = [estimate(name, shape, params, arch) for name, params in found]
    return found[costs.index(min(costs))]


def estimate(name: str, shape: Shape, params: Params, arch: Arch) -> float:
    """Nanoseconds of a variant."""
    candidate = CANDIDATES[name]
    rates = beside(candidate.rates(params, shape), candidate.spec.shared_bytes(params), arch)
    return cost(shape, candidate.tile(params, shape), rates, arch)


def variants(shape: Shape, impl: str, arch: Arch) -> list[tuple[str, dict[str, Any]]]:
    """All that take a shape: (kernel's name, parameters). ParameterError if there are none."""
    found, reasons = [], []
    for name in CANDIDATES if impl == "auto" else (impl,):
        candidate = CANDIDATES[name]
        reason = candidate.refuses(shape)
        if reason is None:
            fixed = {**_common(candidate.spec, shape), **candidate.fixed(shape, arch)}
            legal, reason = _legal(name, tuple(fixed.items()), arch)
            found += [(name, params) for params in legal]
        reasons.append(reason)
    if not found:
        raise ParameterError(f"{CALL}: impl={impl!r} {reasons[0]}; allowed: impl='auto'")
    return found


def _common(spec: KernelSpec, shape: Shape) -> dict[str, Any]:
    """The parameters that have the names of a shape's fields."""
    named = shape._asdict()
    return {param.name: named[param.name] for param in spec.params if param.name in named}


@lru_cache(maxsize=_KEPT)
def _legal(name: str, fixed: Fixed, arch: Arch) -> tuple[list[dict[str, Any]], str | None]:
    """The variants with these fixed parameters, and why the last other one is none."""
    spec = kernel_for(CANDIDATES[name].spec, dict(fixed)["activation"])
    free = [param for param in spec.params if param.tunable]
    found, reason = [], None
    for values in itertools.product(*(param.values for param in free)):
        given = {**dict(fixed), **dict(zip([p.name for p in free], values, strict=True))}
        params = {param.name: given[param.name] for param in spec.params}
        refused = _why_not(spec, params, arch)
        reason = refused or reason
        found += [] if refused else [params]
    return found, reason


def _why_not(spec: KernelSpec, params: Params, arch: Arch) -> str | None:
    for param in spec.params:
        if params[param.name] not in param.values:
            return f"takes {param.name} of {', '.join(map(str, param.values))}"
    missing = sorted(spec.features(params) - arch.features)
    if missing:
        return f"needs {', '.join(missing)}, which {arch.name} has not"
    return spec.why_not(params, arch)


# ------------------------------------------------------------------ tiles asked for


def _tile(block: Any) -> Any:
    """A list as a tuple; anything else is looked for as it is."""
    if isinstance(block, np.generic):
        return block.item()
    return tuple(block) if isinstance(block, list) else block


def _with_tile(
    found: list[tuple[str, dict[str, Any]]], block: Any, impl: str
) -> list[tuple[str, dict[str, Any]]]:
    """The variants of a tile; one number means a square."""
    whole = (block, block) if isinstance(block, int) else block
    tiles = [params[CANDIDATES[name].tile_name] for name, params in found]
    kept = [one for one, tile in zip(found, tiles, strict=True) if tile in (block, whole)]
    if not kept:
        legal = ", ".join(map(str, dict.fromkeys(tiles)))
        raise ParameterError(f"{CALL}: block={block!r} is not one of [{legal}] (impl={impl!r})")
    return kept
