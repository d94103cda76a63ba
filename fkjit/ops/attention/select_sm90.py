"""flash for Hopper: which calls it takes, and which of its tiles."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from fkjit.arch import Arch
from fkjit.ops.attention.features import ScoreFeatures, parse
from fkjit.ops.attention.kernels_sm90 import (
    FLASH_SM90,
    LEAST_PAGE,
    MAX_SHARED,
    SMS,
    padded_dims,
    plain_tiles,
    tiles,
    ways,
)  # fmt: skip
from fkjit.ops.attention.problem import axes, key_axes, split_block
from fkjit.ops.attention.shapes import MAX_HEAD_DIM
from fkjit.runtime.interop import ITEMSIZE, View
from fkjit.spec import Params, Problem
from fkjit.symbolic import decision

_ALIKE = 0.85  # of a mean tile of queries and the longest: blocks end together, round by round
_FEW_KEYS, _MORE_KEYS = 80, 128  # up to so many are one tile, and others are fastest
_THREE_TILES, _WHOLE_TILES = 240, 192  # up to so many are three of 80; more, a class of two of 128
_ALONE = 0.04  # how much faster optimistic tiles are where each has an SM to itself
# How fast others are than the first tile of a head_dim, per row and where every SM is busy alike
# (bench/NOTES.md): (tile, optimistic), from so many keys on (a power of two, or 0; 64: 65 to 80
# keys, 128: 81 to 240, 192: 241 to 255), of full rows and of causal ones.
_PACE: dict[int, dict[tuple[Any, bool], tuple[tuple[int, float, float], ...]]] = {
    64: {
        ((192, 128), True): ((0, 0.66, 0.66), (64, 0.79, 0.79), (128, 1.01, 1.0)),
        (128, True): ((0, 0.66, 0.66), (64, 0.74, 0.74), (128, 0.86, 1.02), (2048, 0.84, 0.93)),
        ((192, 80), True): ((0, 0.75, 0.75), (64, 0.92, 0.92), (128, 0.9, 0.9)),
        ((128, 80), True): ((0, 0.75, 0.75), (64, 0.84, 0.84), (128, 0.7, 0.7)),
        ((64, 128), True): ((0, 0.56, 0.56), (128, 0.6, 0.6)),
        (64, True): ((0, 0.62, 0.62), (64, 0.52, 0.52), (128, 0.62, 0.62), (256, 0.55, 0.55)),
    },
    96: {
        ((192, 96), True): (
            (128, 1.3, 1.0), (256, 0.9, 0.9), (1024, 1.05, 0.985), (4096, 1.065, 1.045),
            (16384, 1.09, 1.043),
        ),
    },
    128: {
        (128, True): (
            (0, 0.98, 0.99), (1024, 0.97, 1.013), (2048, 1.015, 1.02), (4096, 1.04, 1.03),
            (8192, 1.05, 1.04),
        ),
        ((192, 80), False): (
            (128, 1.12, 0.93), (192, 0.92, 0.93), (256, 1.03, 0.93), (2048, 1.02, 0.93),
            (4096, 1.05, 0.98), (8192, 1.075, 1.006), (16384, 1.085, 1.036),
        ),
        ((128, 64), False): ((0, 1.05, 1.05), (192, 0.86, 1.05), (256, 0.93, 0.93)),
        ((64, 128), False): ((0, 0.75, 0.75),),
        ((64, 128), True): ((0, 0.78, 0.78),),
        (64, False): ((0, 0.85, 0.85), (256, 0.72, 0.72)),
    },
    256: {
        ((128, 64), False): (
            (0, 1.01, 1.03), (512, 1.013, 1.065), (1024, 1.0, 1.013), (2048, 0.997, 1.019),
            (4096, 0.993, 1.01), (8192, 0.987, 1.0), (16384, 0.997, 0.984),
        ),
        ((64, 80), False): ((0, 0.7, 0.7),),
    },
}  # fmt: skip
LEAST_QUERIES = 33  # for a tile of one head
_STEP = 64  # queries: every tile has a multiple of them, every SM is as busy within a step
_MAX_STEP = 2**40  # bytes
_LEAST_SCALE = 1e-9  # sinks are divided by it, and a sign could not go into q


@lru_cache(maxsize=64)
def suits(arch: Arch) -> bool:
    """Whether a GPU runs every tile."""
    needs = FLASH_SM90.features({})
    return arch.features >= needs and arch.shared_per_block >= MAX_SHARED


def takes(
    problem: Problem, views: Mapping[str, View], features: ScoreFeatures | None, block: Any
) -> bool:
    """Whether TMA can read these arrays and the kernel wants the problem.

    Every row of q, k, v, o starts on a 16-byte boundary (the caller has looked), rows of a bias and
    a mask as well; no dimension is repeated by a stride of 0 nor empty; the scale is positive
    (signs could not go into Q); there are queries enough for a tile; and if a tile was asked for,
    it is one of this kernel's.
    """
    return (
        problem["seqlen_q"] >= LEAST_QUERIES
        and readable(problem, views, features)
        and _has_tile(problem, features, block)
    )


def readable(problem: Problem, views: Mapping[str, View], features: ScoreFeatures | None) -> bool:
    """Whether TMA can read these arrays, and there is anything to read."""
    if problem["dtype"] == "fp32" or problem["seqlen_k"] < 1 or problem["batch"] < 1:
        return False
    if max(problem["head_dim"], problem["head_dim_v"]) > MAX_HEAD_DIM:
        return False
    if features is not None and features.codes and _has_rules(features):
        return False
    if not problem["softmax_scale"] > (0.0 if features is None else _LEAST_SCALE):
        return False
    return _mappable_rows(problem, views) and (features is None or _mappable_features(views))


def _has_rules(features: ScoreFeatures) -> bool:
    """Beside which nothing is there for scales of codes."""
    ruled = features.softcap or features.alibi or features.bias or features.mask
    return bool(ruled or features.score_mod)


def _mappable_rows(problem: Problem, views: Mapping[str, View]) -> bool:
    own, keys, most = axes(problem), key_axes(problem), _MAX_STEP // ITEMSIZE[problem["dtype"]]
    if problem.get("page_size", LEAST_PAGE) < LEAST_PAGE:
        return False
    for name, places in (("q", own), ("k", keys), ("v", keys)):
        view = views[name]
        for at in places:
            if at is not None and view.shape[at] > 1 and not 0 < view.strides[at] < most:
                return False
    return True


def _mappable_features(views: Mapping[str, View]) -> bool:
    for view in views.values():
        if 0 in view.shape:
            return False
    for name in ("bias", "mask"):
        if name in views and not _mappable_scores(views[name]):
            return False
    return True


def _mappable_scores(view: View) -> bool:
    size, bits = ITEMSIZE.get(view.dtype, 1), view.pointer
    for step, n in zip(view.strides[:3], view.shape[:3], strict=True):
        if n > 1:
            bits |= step * size
            if not 0 <= step * size < _MAX_STEP:
                return False
    return bits % 16 == 0


def _has_tile(problem: Problem, features: ScoreFeatures | None, block: Any) -> bool:
    """Whether this one is compiled, or any."""
    dims = padded_dims(problem["head_dim"], problem["head_dim_v"])
    if features is None:
        return block is None or block in plain_tiles(*dims)
    legal = _legal(features, problem["dtype"], *dims)
    return bool(legal) if block is None else block in legal


@decision(1024)
def _legal(features: ScoreFeatures, dtype: str, head_dim: int, head_dim_v: int) -> tuple[Any, ...]:
    """The tiles with score features that are compiled, fastest first."""
    fixed = {"dtype": dtype, "head_dim": head_dim, "head_dim_v": head_dim_v}
    fixed["form"] = features.text
    order = tiles(features, head_dim)
    return tuple(tile for tile in order if FLASH_SM90.illegal({**fixed, "block": tile}) is None)


def plain_tile(
    problem: Problem, head_dim: int, head_dim_v: int, block: Any = None
) -> dict[str, Any]:
    """The tile of a problem, and whether it is optimistic (of a given tile, only that)."""
    sizes = _size_class(problem, problem["seqlen_k"])
    chosen, optimistic = _fastest(*sizes, problem["causal"], head_dim, head_dim_v, block)
    return {"block": chosen, "optimistic": optimistic}


def _size_class(problem: Problem, keys: int) -> tuple[int, int, int, int]:
    """What `_fastest` depends on: queries, heads, SMs, keys."""
    queries = -(-problem["seqlen_q"] // _STEP) * _STEP
    heads = problem["heads_q"] * problem["batch"]
    power = 1 << keys.bit_length() >> 1 if keys != 64 else 32
    power = max(power, _MORE_KEYS if keys > _FEW_KEYS else 0)
    power = _WHOLE_TILES if _THREE_TILES < keys < 2 * _MORE_KEYS else power
    return queries, heads, problem.get("multiprocessors", SMS), power


@decision(4096)
def _fastest(
    queries: int, heads: int, multiprocessors: int, keys: int, causal: bool, head_dim: int,
    head_dim_v: int, block: Any,
) -> tuple[Any, bool]:  # fmt: skip
    """The fastest by how many rows the busiest SM would have. `queries`: a multiple of _STEP;
    `keys`: a power of two, or 0."""
    seen = 1 - queries / (2 * max(keys, queries)) if causal else 1.0

    def busiest(rows: int) -> float:
        works = -(-queries // rows) * heads
        if seen > _ALIKE:
            return -(-works // multiprocessors) * rows
        return max(rows, works * rows * seen / multiprocessors)  # drawn, the longest ones first

    def time(choice: tuple[Any, bool]) -> float:
        rows = split_block(choice[0])[0]
        alone = choice[1] and -(-queries // rows) * heads <= multiprocessors
        return busiest(rows) / (_pace(head_dim, choice, keys, causal) + _ALONE * alone)

    if block is not None:
        return min(((block, way) for way in ways(head_dim, block)), key=time)
    first = plain_tiles(head_dim, head_dim_v)[0]
    return min([(first, ways(head_dim, first)[0]), *_PACE.get(head_dim, {})], key=time)


def _pace(head_dim: int, choice: tuple[Any, bool], keys: int, causal: bool) -> float:
    """1 for the first tile of a head_dim."""
    steps = _PACE.get(head_dim, {}).get(choice, ((0, 1.0, 1.0),))
    known = [step for step in steps if step[0] <= keys]
    return known[-1][1 + causal] if known else 0.8


def feature_tile(problem: Problem, fixed: Params) -> Any:
    """The tile with score features: the one without, of rows as long as the window lets them be."""
    left, right = problem["window"]
    keys = min(problem["seqlen_k"], left + right + 1)
    sizes, dims = _size_class(problem, keys), (fixed["head_dim"], fixed["head_dim_v"])
    usual, _ = _fastest(*sizes, right == 0, *dims, None)
    legal = _legal(parse(fixed["form"]), fixed["dtype"], *dims)
    return usual if usual in legal else legal[0]
