"""Few queries of many keys on Hopper: how many heads share a tile of queries, and in how many parts
their keys are seen, where that is faster than a block for each tile.

The model is of times in us, of one head dimension's rate, waves of work, and what launches cost;
measured on an H200 (bench/notes/attention.md), and good to some 15 %.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any, NamedTuple

from fkjit import tuning
from fkjit.arch import Arch
from fkjit.ops.attention import select_sm90
from fkjit.ops.attention.kernels_few import FEW, HEADS, MOST_PARTS, TILE
from fkjit.ops.attention.kernels_sm90 import padded_dims, ways
from fkjit.ops.attention.problem import split_block
from fkjit.runtime.interop import ITEMSIZE, View
from fkjit.spec import Problem
from fkjit.symbolic import decision

# Keys that a tile of 128 queries goes through in a us, by padded head_dim; and one of 64 queries,
# which has no other warpgroup to take turns with.
_PACE = {64: 134.0, 96: 100.0, 128: 85.0, 192: 59.0, 256: 44.0}
_PACE_OF_64 = 1.48
_LAUNCH, _BLOCK = 2.5, 0.032  # us, of a kernel, and of each block that begins with the others
_COMBINE, _PART = 4.0, 0.15  # us, of the kernel behind it, and of each part there
_BYTES = 4.1e6  # of memory in a us
_PARTS_BYTES = 2.5e6  # of what parts found, written and read again
_GAIN = 1.05  # that is looked for
_STEPS = 8  # keys are looked at in eighths of a power of two
_FEW, _LEAST_KEYS = 4096, 256  # queries of a head at most; keys, below which a call is all start
_MANY_KEYS = 1536  # of a part, from which on optimistic tiles are faster


class Choice(NamedTuple):
    """What a problem gets."""

    heads: int  # of a group in a tile
    parts: int  # of the keys
    optimistic: bool


def choice(
    problem: Problem, views: Mapping[str, View], impl: str, block: Any, aligned: bool, arch: Arch
) -> tuple[dict[str, Any], int] | None:
    """Parameters of the kernel, free ones as `fkjit tune` found them, and the number of parts;
    None: the usual kernels are faster, or these arrays are not for TMA. Calls without score
    features ask, on a GPU."""
    if impl not in ("auto", "flash") or block is not None or not aligned:
        return None
    if "multiprocessors" not in problem or not select_sm90.suits(arch):
        return None
    if not 0 < problem["seqlen_q"] <= _FEW or problem["seqlen_k"] < _LEAST_KEYS:
        return None
    if not select_sm90.readable(problem, views, None):
        return None
    dims = padded_dims(problem["head_dim"], problem["head_dim_v"])
    found = _fastest(
        problem["seqlen_q"], _rounded(problem["seqlen_k"]), problem["heads_q"],
        problem["heads_q"] // problem["heads_kv"], problem["batch"], problem["multiprocessors"],
        bool(problem["causal"]), dims,
    )  # fmt: skip
    if found is None:
        return None
    made = parameters(found, problem["dtype"], dims)
    return tuning.tuned(FEW, made, problem, arch), found.parts


def parameters(found: Choice, dtype: str, dims: tuple[int, int]) -> dict[str, Any]:
    """Of the kernel."""
    return {
        "dtype": dtype, "head_dim": dims[0], "head_dim_v": dims[1], "block": TILE[dims[0]],
        "optimistic": found.optimistic, "heads": found.heads, "parts": found.parts > 1,
    }  # fmt: skip


@decision(4096)
def _rounded(keys: int) -> int:
    """Up, to eighths of a power of two."""
    step = max((1 << keys.bit_length()) // (2 * _STEPS), 1)
    return -(-keys // step) * step


@decision(4096)
def _fastest(
    queries: int, keys: int, heads_q: int, group: int, batch: int, multiprocessors: int,
    causal: bool, dims: tuple[int, int],
) -> Choice | None:  # fmt: skip
    """The fastest, unless the usual kernel is about as fast."""
    rows, block_k = split_block(TILE[dims[0]])
    heads_of_all, pace = heads_q * batch, _PACE[dims[0]]
    read = heads_of_all // group * keys * sum(dims) * ITEMSIZE["fp16"] / _BYTES
    found = []
    for heads in (n for n in HEADS if group % n == 0 and (n == 1 or n * queries <= rows)):
        tiles = -(-queries // (rows // heads)) * (heads_of_all // heads)
        most = min(MOST_PARTS, -(-keys // block_k))
        wanted = {1, *(min(waves * multiprocessors // tiles, most) for waves in (0.5, 1, 2))}
        for parts in map(int, wanted):
            if parts < 1 or (parts == 1 and heads == 1):
                continue
            busy = ceil(tiles * parts / multiprocessors) * keys / parts / pace
            time = _start(tiles * parts, multiprocessors) + max(busy, read)
            if parts > 1:
                moved = heads_of_all * queries * parts * dims[1] * 8
                time += _COMBINE + _PART * parts + moved / _PARTS_BYTES
            found.append((time, Choice(heads, parts, _is_optimistic(dims[0], keys // parts))))
    usual = _usual(queries, keys, heads_of_all, multiprocessors, causal, dims[0])
    best = min(found, default=None)
    if best is None or best[0] * _GAIN > usual:
        return None
    return best[1]


def _usual(
    queries: int, keys: int, heads: int, multiprocessors: int, causal: bool, head_dim: int
) -> float:
    """The time of flash_sm90; below its least queries of a portable kernel, which splits nothing
    and has half the pace at best."""

    def time(rows: int, pace: float) -> float:
        busy = _busiest(queries, keys, heads, multiprocessors, causal, rows) / pace
        return _start(-(-queries // rows) * heads, multiprocessors) + busy

    pace = _PACE[head_dim]
    best = time(128, pace)
    if head_dim == 128:
        best = min(best, time(64, pace * _PACE_OF_64))
    return best if queries >= select_sm90.LEAST_QUERIES else 2 * best


def _start(works: int, multiprocessors: int) -> float:
    return _LAUNCH + _BLOCK * min(works, multiprocessors)


def _busiest(
    queries: int, keys: int, heads: int, multiprocessors: int, causal: bool, rows: int
) -> float:
    """Keys that the busiest SM goes through, in tiles of `rows` queries."""
    works = -(-queries // rows) * heads
    if not causal:
        return ceil(works / multiprocessors) * keys
    longest = min(keys, max(keys - queries, 0) + queries)
    mean = max(keys - max(queries - rows, 0) / 2, keys / 2)
    return max(longest, works * mean / multiprocessors)


def _is_optimistic(head_dim: int, keys: int) -> bool:
    either = ways(head_dim, TILE[head_dim])
    return either[-1] if len(either) == 1 else keys >= _MANY_KEYS
