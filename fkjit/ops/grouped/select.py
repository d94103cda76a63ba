"""Which kernel and tile a grouped product gets.

What experts have is known on the device alone: the estimate spreads rows evenly over as many
experts as there may be rows for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from fkjit import tuning
from fkjit.arch import Arch
from fkjit.errors import ParameterError
from fkjit.ops.gemm.cost import SMS, machine
from fkjit.ops.gemm.epilogue import kernel_for
from fkjit.ops.gemm.kernels_sm90 import VARIANTS
from fkjit.ops.gemm.problem import outputs_of
from fkjit.ops.grouped import kernels, kernels_ragged
from fkjit.ops.grouped.kernels import LEAST_BLOCK, TILES
from fkjit.spec import KernelSpec, Params, Problem

IMPLEMENTATIONS = ("auto", "wgmma", "ragged", "mma", "fma")
_KN = 1.06  # a step takes longer where the weight's rows are contiguous in n
_TOGETHER = 1.25  # more where consumers share tiles of rows: seen at 250 and 1000 rows an expert
_PORTABLE = 0.62  # of the flops that mma.sync, or FMAs, give


def least_block(impl: str) -> int:
    """What experts' places have to be a multiple of."""
    return kernels_ragged.EVEN if impl in ("auto", "ragged") else LEAST_BLOCK


class Chosen(NamedTuple):
    """A kernel and its parameters."""

    spec: KernelSpec
    params: Params


def choose(problem: Problem, impl: str, block: Any, arch: Arch) -> Chosen:
    """ParameterError where the kernel, or the tile, asked for does not take the problem."""
    found = list(_legal(problem, impl, arch))
    if not found and problem["block_size"] % LEAST_BLOCK and impl == "auto":
        raise ParameterError(
            f"grouped_linear: groups have a block_size of {problem['block_size']}, which does not "
            f"go with this {problem['dtype']} product on {arch.name}; allowed: a multiple of "
            f"{LEAST_BLOCK}"
        )
    if not found:
        raise ParameterError(
            f"grouped_linear: impl={impl!r} does not take this {problem['dtype']} product on "
            f"{arch.name}; allowed: impl='auto'"
        )
    if block is not None:
        found = _with_tile(found, block)
    best = min(found, key=lambda one: _estimate(one, problem, arch))
    spec = kernel_for(best.spec, problem["activation"])
    params = tuning.tuned(spec, best.params, problem, arch) if block is None else best.params
    return Chosen(spec, params)


def _legal(problem: Problem, impl: str, arch: Arch) -> Iterator[Chosen]:
    """All tiles that divide experts' places, of kernels that the GPU and the arrays are for."""
    for name, (spec, fixed, takes) in _KERNELS.items():
        if impl not in ("auto", name) or not takes(problem):
            continue
        if name == "ragged" and impl == "auto" and problem["block_size"] % LEAST_BLOCK == 0:
            continue  # what was laid out for whole tiles
        own = kernel_for(spec, problem["activation"])
        for tile in next(p.values for p in spec.params if p.name == "block"):
            given = {**problem, **fixed(problem, arch), "block": tile}
            params = {p.name: given[p.name] for p in spec.params}
            if (
                _fits(problem, name, tile)
                and own.features(params) <= arch.features
                and own.why_not(params, arch) is None
            ):
                yield Chosen(spec, params)


def _fits(problem: Problem, name: str, tile: tuple[int, ...]) -> bool:
    """Whether experts' rows are whole tiles; for Hopper the last one of an expert may be half."""
    rows = problem["block_size"] * (2 if name == "wgmma" else 1)
    return problem["groups"] == "DEPTH" or name == "ragged" or rows % tile[0] == 0


def _with_tile(found: list[Chosen], block: Any) -> list[Chosen]:
    tile = tuple(block) if isinstance(block, (list, tuple)) else (block, block)
    kept = [one for one in found if one.params["block"] == tile]
    if not kept:
        legal = ", ".join(dict.fromkeys(str(one.params["block"]) for one in found))
        raise ParameterError(f"grouped_linear: block={block!r} is not one of [{legal}]")
    return kept


def _estimate(one: Chosen, problem: Problem, arch: Arch) -> float:
    """Nanoseconds of all steps of k on the SM that has the most."""
    rows, columns = one.params["block"][:2]
    active, each = _spread(problem)
    across = -(-outputs_of(problem) // columns)
    if one.spec.name == "ragged_wgmma":
        return _ragged(rows, each, active * across, problem)
    in_turns = TILES.get(one.params["block"]) == "pingpong"  # one consumer's way out under products
    if problem["groups"] == "DEPTH":
        below, active, deep, full = -(-problem["m"] // rows), problem["experts"], each, 1.0
    else:
        least = rows if in_turns else min(64, rows)  # a half without rows is not multiplied
        below, deep = -(-each // rows), problem["k"]
        full = -(-each // least) * least / (rows * below)
    rounds = math.ceil(active * below * across / problem.get("multiprocessors", SMS))
    streamed = 0.0 if problem["groups"] == "DEPTH" else columns * _STREAMED / below
    steps = deep / 64 * max(_step(one, problem, arch) * full, streamed)
    out = _EPILOGUE * rows * columns
    return rounds * (_START + (max(steps, out) if in_turns else steps + out))


def _ragged(most: int, each: float, runs: int, problem: Problem) -> float:
    """The same where tiles have as many rows as there are; `runs`: of an expert and columns."""
    step, out = _RAGGED[most]
    tiles = math.ceil(each / most)
    rounds = math.ceil(runs * tiles / problem.get("multiprocessors", SMS))
    return rounds * (problem["k"] / 64 * each / tiles * step + out)


def _spread(problem: Problem) -> tuple[int, float]:
    """Experts that have rows, and how many each: places are those of the worst case."""
    places = problem["k" if problem["groups"] == "DEPTH" else "m"]
    experts, block = problem["experts"], problem["block_size"]
    choices = max(places - experts * (block - 1), places // block)
    active = min(experts, choices)
    return active, max(choices / active, 1.0) + block / 2


# By the most rows of a tile: ns of 64 k of a row, and of the way out, which one consumer hides.
_RAGGED = {160: (3.25, 0.0), 304: (3.1, 2500.0)}
_DEEP_IN_TURNS = 1.7  # more for tiles in turns whose k is an expert's rows: seen at 256 and 1,024
_START, _EPILOGUE = 400, 0.035  # ns of a tile beside its steps; of each of its elements
_STREAMED = 4.1  # ns of 64 k of a weight's row, an SM's part of memory's bandwidth


def _step(one: Chosen, problem: Problem, arch: Arch) -> float:
    """64 of k."""
    rows, columns = one.params["block"][:2]
    if one.spec.name == "wgmma":
        step = VARIANTS[TILES[one.params["block"]], one.params["block"], 1, 1, False]
        if problem["groups"] != "DEPTH" and TILES[one.params["block"]] == "cooperative":
            step *= _TOGETHER
        if problem["groups"] == "DEPTH" and TILES[one.params["block"]] == "pingpong":
            step *= _DEEP_IN_TURNS
        return step * (_KN if problem["weight_layout"] == "kn" else 1.0)
    gpu = machine(arch)
    rate = gpu.fma if one.spec.name == "fma" else gpu.mma
    small = (128 * 128 / (rows * columns)) ** 0.25  # operands are loaded again more often
    return 2.0 * rows * columns * 64 / (rate * _PORTABLE) * max(small, 1.0)


# ------------------------------------------------------------------ the kernels

_Takes = Callable[[Problem], bool]
_Fixed = Callable[[Problem, Arch], Mapping[str, Any]]


def _takes_wgmma(problem: Problem) -> bool:
    """TMA copies rows that begin on 16-byte boundaries; wgmma adds 16 of k up."""
    deep = problem["groups"] == "DEPTH"
    whole = problem["block_size"] % 16 == 0 and problem["m"] % 16 == 0 if deep else True
    return problem["dtype"] != "fp32" and problem["aligned"] and whole


def _portable(problem: Problem, arch: Arch) -> dict[str, Any]:
    """Copies are 16 bytes if rows begin with them, and so does up in rows of a [k, 2 n] weight."""
    up = not problem["gate"] or problem["weight_layout"] == "nk" or problem["n"] % 8 == 0
    return {
        "aligned": problem["aligned"] and up,
        "mma_k": 16 if "cp_async" in arch.features else 8,
    }


_KERNELS: Mapping[str, tuple[KernelSpec, _Fixed, _Takes]] = {
    "wgmma": (
        kernels.WGMMA_ALL,
        lambda p, arch: {"tma_store": p["aligned_out"] and p["out_dtype"] != "fp32"},
        _takes_wgmma,
    ),
    "ragged": (
        kernels_ragged.RAGGED_ALL,
        lambda p, arch: {"codes": False},
        lambda p: p["dtype"] != "fp32" and kernels_ragged.takes(p),
    ),
    "mma": (kernels.MMA_ALL_GROUPED, _portable, lambda p: p["dtype"] != "fp32"),
    "fma": (kernels.FMA_ALL_GROUPED, _portable, lambda p: p["dtype"] == "fp32"),
}
