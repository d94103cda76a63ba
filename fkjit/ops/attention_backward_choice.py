"""Which kernels a call of `fkjit.attention_backward` takes, in which order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from fkjit.arch import Arch
from fkjit.ops import attention_backward_problem as shared
from fkjit.ops.attention_backward_kernels import KEY_TILES, KEYS, PAIRS, QUERIES, QUERY_TILES, ROWS
from fkjit.ops.simple import Launch
from fkjit.spec import KernelSpec, Problem
from fkjit.tuning import tuned

IMPLEMENTATIONS = ("auto", "portable")


@dataclass(frozen=True)
class Chosen:
    """The launches of a call, and shapes of the fp32 arrays that they hand on to one another."""

    launches: tuple[Launch, ...]
    scratch: Mapping[str, tuple[int, ...]]


def choose(
    problem: dict[str, Any], aligned: bool, arch: Arch, impl: str, deterministic: bool
) -> Chosen:
    """First what each row brings along (`rows`), then what makes dk, dv and dq of it.

    A kernel for one architecture takes the place of `keys` and `queries` here. Its own scratch
    goes beside lse_log2 and delta, under the name of its argument.
    """
    rows = shared.rows_shape(problem)
    scratch: dict[str, tuple[int, ...]] = {"lse_log2": rows, "delta": rows}
    launches = [Launch(ROWS, {"dtype": problem["dtype"], "aligned": aligned}, problem)]
    launches += portable(problem, aligned, arch)
    return Chosen(tuple(launch for launch in launches if _blocks(launch)), scratch)


def portable(problem: Problem, aligned: bool, arch: Arch) -> list[Launch]:
    """dk and dv, and dq in a kernel of its own: the same bits at every call."""
    return [
        Launch(spec, parameters(spec, tiles, problem, aligned, arch), problem)
        for spec, tiles in ((KEYS, KEY_TILES), (QUERIES, QUERY_TILES))
    ]


def padded_dims(problem: Problem) -> tuple[int, int]:
    """The cheapest compiled pair that holds these head dimensions."""
    d, dv = problem["head_dim"], problem["head_dim_v"]
    return min((pair for pair in PAIRS if pair[0] >= d and pair[1] >= dv), key=sum)


def parameters(
    spec: KernelSpec,
    tiles: Mapping[int, tuple[Any, ...]],
    problem: Problem,
    aligned: bool,
    arch: Arch,
) -> dict[str, Any]:
    """The variant of a kernel: the tile found by `fkjit tune`, else the first that is legal."""
    dims = padded_dims(problem)
    if not aligned and dims == (192, 128):
        dims = (256, 256)
    fixed = {"dtype": problem["dtype"], "head_dim": dims[0], "head_dim_v": dims[1]}
    made = [{**fixed, "tile": tile, "aligned": aligned} for tile in tiles[dims[0]]]
    made = [{param.name: one[param.name] for param in spec.params} for one in made]
    legal = [params for params in made if spec.why_not(params, arch) is None]
    if not legal:  # say why
        spec.check(made[-1], arch)
    return tuned(spec, legal[0], problem, arch)


def _blocks(launch: Launch) -> bool:
    """Whether there is anything to do."""
    return prod(launch.spec.grid(launch.params, launch.problem)) > 0
