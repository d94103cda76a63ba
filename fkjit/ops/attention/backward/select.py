"""Which kernels a call of `fkjit.attention_backward` takes, in which order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from fkjit.arch import Arch
from fkjit.errors import ParameterError
from fkjit.ops.attention.backward import kernels_fp32 as fp32
from fkjit.ops.attention.backward import kernels_sm90 as hopper
from fkjit.ops.attention.backward import problem as shared
from fkjit.ops.attention.backward.kernels import (
    DQ,
    KEY_TILES,
    KEYS,
    PAIRS,
    QUERIES,
    QUERY_TILES,
    ROWS,
    SUM_TILES,
    SUMS,
)
from fkjit.ops.op.op import Launch
from fkjit.spec import KernelSpec, Problem
from fkjit.tuning import tuned

IMPLEMENTATIONS = ("auto", "portable", "flash_sm90")


@dataclass(frozen=True)
class Chosen:
    """The launches of a call, and shapes of the fp32 arrays that they hand on to one another."""

    launches: tuple[Launch, ...]
    scratch: Mapping[str, tuple[int, ...]]
    counters: int = 0


def choose(
    problem: dict[str, Any], aligned: bool, arch: Arch, impl: str, deterministic: bool
) -> Chosen:
    """First what each row brings along (`rows`), then what makes dk, dv and dq of it.

    A kernel for one architecture takes the place of `keys` and `queries` here. Its own scratch
    goes beside lse_log2 and delta, under the name of its argument.
    """
    rows = shared.rows_shape(problem)
    scratch: dict[str, tuple[int, ...]] = {"lse_log2": rows, "delta": rows}
    takes = impl != "portable" and hopper.takes(problem, aligned, arch)
    if impl == "flash_sm90" and not takes:
        raise ParameterError(
            f"attention_backward: impl='flash_sm90' does not take this call on {arch.name}; pass "
            "impl='auto' (it is for sm_90a, fp16 and bf16, head dimensions up to 128, more than 32 "
            "queries, rows on 16-byte boundaries, a positive softmax_scale)"
        )
    if takes:
        made, more = hopper.launches(problem, deterministic)
        return Chosen(made, scratch | more, hopper.COUNTERS)
    launches = [Launch(ROWS, {"dtype": problem["dtype"], "aligned": aligned}, problem)]
    if not deterministic and aligned and _half(problem, arch) and _square(problem):
        launches += _by_sums(problem, arch)
        scratch["dq_sum"] = (*rows, problem["sum_columns"])
    else:
        launches += portable(problem, aligned, arch)
    return Chosen(tuple(launch for launch in launches if _blocks(launch)), scratch)


def _half(problem: Problem, arch: Arch) -> bool:
    """Whether tensor cores take it."""
    return problem["dtype"] != "fp32" and arch.features >= KEYS.features({})


def _square(problem: Problem) -> bool:
    """Whether it is padded to one head dimension: others have no registers left for sums of dq."""
    dims = padded_dims(problem, PAIRS)
    return dims[0] == dims[1]


def _by_sums(problem: dict[str, Any], arch: Arch) -> list[Launch]:
    """dk, dv and sums of dq in one kernel, which blocks add to in any order."""
    dims = padded_dims(problem, PAIRS)
    problem["sum_columns"] = dims[0]
    params = parameters(SUMS, SUM_TILES[dims[0]], dims, problem, True, arch)
    return [Launch(SUMS, params, problem), Launch(DQ, {"dtype": problem["dtype"]}, problem)]


def portable(problem: Problem, aligned: bool, arch: Arch) -> list[Launch]:
    """dk and dv, and dq in a kernel of its own: the same bits at every call."""
    if _half(problem, arch):
        pairs, kernels = PAIRS, ((KEYS, KEY_TILES), (QUERIES, QUERY_TILES))
    else:
        aligned &= problem["dtype"] == "fp32"  # of 16 bits there is one variant for both
        pairs, kernels = fp32.PAIRS, ((fp32.KEYS_FP32, fp32.TILES), (fp32.QUERIES_FP32, fp32.TILES))
    if not aligned:
        pairs = tuple(pair for pair in pairs if pair[0] == pair[1])
    dims = padded_dims(problem, pairs)
    return [
        Launch(spec, parameters(spec, tiles[dims[0]], dims, problem, aligned, arch), problem)
        for spec, tiles in kernels
    ]


def padded_dims(problem: Problem, pairs: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """The cheapest compiled pair that holds these head dimensions."""
    d, dv = problem["head_dim"], problem["head_dim_v"]
    return min((pair for pair in pairs if pair[0] >= d and pair[1] >= dv), key=sum)


def parameters(
    spec: KernelSpec, tiles: Iterable[Any], dims: tuple[int, int],
    problem: Problem, aligned: bool, arch: Arch, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """The variant of a kernel: the tile found by `fkjit tune`, else the first that is legal."""
    fixed = {"head_dim": dims[0], "head_dim_v": dims[1], "aligned": aligned, **more}
    made = [{"dtype": problem["dtype"], **fixed, "tile": tile} for tile in tiles]
    made = [{param.name: one[param.name] for param in spec.params} for one in made]
    legal = [params for params in made if spec.why_not(params, arch) is None]
    if not legal:  # say why
        spec.check(made[-1], arch)
    return tuned(spec, legal[0], problem, arch)


def _blocks(launch: Launch) -> bool:
    """Whether there is anything to do."""
    return prod(launch.spec.grid(launch.params, launch.problem)) > 0
