"""What the kernels that route tokens to experts share: tiles, arguments, inputs and references.

A routing problem: `tokens` rows of `experts` logits, `row_stride` elements from one to the next,
and how `top_k` of them are chosen (`Routing` in templates/moe/route.cuh).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fkjit.ops.op.shapes import log2_ceil
from fkjit.runtime.interop import ITEMSIZE, numpy_dtype
from fkjit.spec import Arrays, Params, Problem

# Lanes of a warp on one token, logits of each; the first one that holds a token is taken.
Tile = tuple[int, int]
# Those for few experts, and QUICK ones for few tokens (a whole warp has a token), are for plain
# problems.
_SMALL: tuple[Tile, ...] = ((2, 4), (2, 8), (8, 4))
_MORE: tuple[Tile, ...] = ((4, 16), (8, 8), (8, 16), (16, 16), (32, 16), (32, 32))
_WIDE: tuple[Tile, ...] = ((8, 32),)
_PLAIN = (*_SMALL, *_MORE[:3], *_WIDE, *_MORE[3:])
QUICK: tuple[Tile, ...] = ((32, 4), (32, 8))
STAGED: Tile = (2, 32)  # whose rows come through shared memory
TILES = (*QUICK, *_PLAIN)
FEW_TOKENS = 1024
# Tokens of a block, up to which other tiles have shorter rounds; by the bytes of a logit.
FEW_FOR_WIDE, FEW_FOR_STAGED = 96, {2: 192, 4: 600}
MAX_EXPERTS = 1024
MAX_TOP_K = 32
SCORINGS = ("softmax", "sigmoid")
LEAST = float(np.finfo(np.float32).min)  # what NaN and -inf count as


def group_lanes(tile: Tile, num_groups: int) -> int:
    """Lanes of each group of experts; 0 where there are too few."""
    return tile[0] >> log2_ceil(num_groups)


def illegal(params: Params) -> str | None:
    """Why no kernel has this tile."""
    if params["tile"][1] % (16 // ITEMSIZE[params["dtype"]]):
        return "has lanes with a part of 16 bytes"
    special = params["tile"] not in _MORE and not params["plain"]
    return "is for plain problems" if special else None


def is_plain(p: Problem) -> bool:
    """Softmax of one group of experts, in whole chunks."""
    groups = p["num_groups"] == 1 and not p["biased"]
    return p["scoring"] == "softmax" and groups and p["vector"]


def holds(tile: Tile, dtype: str, experts: int, top_k: int, num_groups: int) -> bool:
    """Whether a tile has room for a token's experts and choices."""
    lanes, size = group_lanes(tile, num_groups), 16 // ITEMSIZE[dtype]
    if not lanes or tile[0] < top_k:
        return False
    chunks = -(-(experts // num_groups) // size)
    return -(-chunks // lanes) * size <= tile[1]


def choose_tile(
    p: Problem, quick: bool = False, blocks: int = 0, staged: bool = False
) -> Tile | None:
    """The tile that a routing problem takes; None where no tile holds it.

    `quick`: if there are few tokens, one of whole warps. `blocks`: at most so many have all tokens
    in rounds, 0: as many as there are tokens for. `staged`: also STAGED.
    """
    sizes = (p["dtype"], p["experts"], p["top_k"], p["num_groups"])
    tiles = _PLAIN if is_plain(p) else _MORE
    if blocks and p["tokens"] <= FEW_FOR_WIDE * blocks:
        tiles = tuple(tile for tile in tiles if tile not in _WIDE)
    staged &= is_plain(p) and p["tokens"] > FEW_FOR_STAGED[ITEMSIZE[p["dtype"]]] * blocks
    if staged and p["experts"] > STAGED[1] and holds(STAGED, *sizes):
        return STAGED
    worth = p["experts"] > 16 or p["top_k"] > 2
    if quick and worth and is_plain(p) and p["tokens"] <= FEW_TOKENS:
        tiles = (*QUICK, *_MORE[-2:])
    return next((tile for tile in tiles if holds(tile, *sizes)), None)


def variant(p: Problem) -> dict[str, Any]:
    """The parameters that a routing problem with a `tile` fixes."""
    return {"dtype": p["dtype"], "tile": p["tile"], "plain": is_plain(p)}


def routing(params: Params, p: Problem) -> tuple[Any, ...]:
    """The kernels' argument `how`."""
    groups = p["num_groups"]
    return (
        p["top_k"], p["scoring"] == "sigmoid", p["renormalize"], p["experts"] // groups, groups,
        p["topk_groups"], log2_ceil(params["tile"][0]) - log2_ceil(groups), p["vector"], p["scale"],
    )  # fmt: skip


def is_vector(dtype: str, experts: int, num_groups: int, row_stride: int, pointer: int) -> bool:
    """Whether rows and groups of experts are whole 16-byte chunks on 16-byte boundaries."""
    size = 16 // ITEMSIZE[dtype]
    return pointer % 16 == 0 and row_stride % size == 0 and experts // num_groups % size == 0


# -- tests ---------------------------------------------------------------------------------------


def random_logits(p: Problem, rng: np.random.Generator) -> np.ndarray:
    """Rows with many ties, exact in every dtype; some with NaN, infinities, or all alike."""
    x = np.round(rng.standard_normal((p["tokens"], p["experts"])) * 16) / 8
    x[3::7] = 0.5
    for i, odd in enumerate((np.nan, np.inf, -np.inf)):
        x[i + 1 :: 11, rng.integers(p["experts"])] = odd
    x[5::17] = -np.inf
    made = np.full((p["tokens"], p["row_stride"]), np.nan)
    made[:, : p["experts"]] = x
    return made.astype(numpy_dtype(p["dtype"])).reshape(-1)


def random_routing(p: Problem, rng: np.random.Generator) -> Arrays:
    """Logits, and a bias where there is one."""
    made: Arrays = {"logits": random_logits(p, rng)}
    if p["biased"]:
        made["bias"] = (rng.integers(-2, 3, p["experts"]) / 4).astype(np.float32)
    return made


def scores_of(x: np.ndarray, scoring: str) -> np.ndarray:
    """Softmax or sigmoid of float64 rows; of several +inf each has the same share."""
    if scoring == "sigmoid":
        return 1 / (1 + np.exp(-x))
    peak = x.max(-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        terms = np.where(x == peak, 1.0, np.exp(x - peak))
    return terms / terms.sum(-1, keepdims=True)


def routed(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """Weights and ids of all tokens, in float64."""
    logits = np.asarray(arrays["logits"]).astype(np.float64).reshape(-1, p["row_stride"])
    x = np.nan_to_num(logits[: p["tokens"], : p["experts"]], nan=LEAST, posinf=np.inf, neginf=LEAST)
    with np.errstate(over="ignore"):
        scores = scores_of(x, p["scoring"])
    keys = x
    if arrays.get("bias") is not None:
        keys = scores.astype(np.float32) + np.asarray(arrays["bias"])
        keys = np.maximum(np.nan_to_num(keys, nan=LEAST, posinf=np.inf, neginf=LEAST), LEAST)
    keys = _limited(keys, p, arrays.get("bias") is not None)
    ids = np.argsort(-keys, axis=-1, kind="stable")[:, : p["top_k"]]
    weights = np.take_along_axis(scores, ids, -1)
    if p["renormalize"]:
        total = weights.sum(-1, keepdims=True)
        weights = weights / np.where(total > 0, total, 1)
    return {"topk_weights": weights * p["scale"], "topk_ids": ids.astype(np.float64)}


def _limited(keys: np.ndarray, p: Problem, two: bool) -> np.ndarray:
    """-inf for the experts of groups that are not among the best."""
    groups = p["num_groups"]
    if groups == 1:
        return keys
    grouped = np.sort(keys.reshape(len(keys), groups, -1), -1)
    best = grouped[..., -1]
    if two and grouped.shape[-1] > 1:
        best = np.maximum(best + grouped[..., -2], LEAST)
    kept = np.argsort(-best, axis=-1, kind="stable")[:, : p["topk_groups"]]
    mask = np.zeros(best.shape, bool)
    np.put_along_axis(mask, kept, True, -1)
    return np.where(np.repeat(mask, keys.shape[1] // groups, 1), keys, -np.inf)


def route_outputs(params: Params, p: Problem) -> Arrays:
    """Poisoned."""
    shape = (p["tokens"], p["top_k"])
    return {
        "topk_weights": np.full(shape, np.nan, np.float32),
        "topk_ids": np.full(shape, -9, np.int32),
    }


def route_traffic(p: Problem) -> float:
    """Bytes of the logits read, and of weights and ids written."""
    return float(p["tokens"] * (p["experts"] * ITEMSIZE[p["dtype"]] + 8 * p["top_k"]))


def route_problem(
    dtype: str, tokens: int, experts: int, top_k: int, **other: Any
) -> dict[str, Any]:
    """A problem as tests and benchmarks want it: rows without gaps, softmax."""
    made = {
        **{"dtype": dtype, "tokens": tokens, "experts": experts, "top_k": top_k},
        **{"scoring": "softmax", "renormalize": False, "biased": False, "scale": 1.0},
        **{"num_groups": 1, "topk_groups": 1, "row_stride": experts},
        **other,
    }
    made["vector"] = is_vector(dtype, experts, made["num_groups"], made["row_stride"], 0)
    return made


def route_problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """A full tile; a ragged one with gaps; groups with a bias, where lanes are left for them."""
    (lanes, values), dtype = params["tile"], params["dtype"]
    size, full = 16 // ITEMSIZE[params["dtype"]], lanes * values
    tokens = 37 if scale == "small" else 3001
    top_k = min(lanes, 8 if scale == "full" else 3)
    found = [route_problem(dtype, tokens, full, top_k)]
    if params["plain"]:
        odd = {"renormalize": True, "scale": 2.5, "row_stride": full}
        return [*found, route_problem(dtype, tokens, full - size, 2, **odd)]
    found = [] if scale == "small" else found
    found.append(
        route_problem(
            dtype, tokens, full - size - 3, 2, scoring="sigmoid", renormalize=True, biased=True,
            scale=2.5, row_stride=full,
        )
    )  # fmt: skip
    groups = {"num_groups": 4, "topk_groups": 2, "biased": True, "renormalize": True}
    found.append(route_problem(dtype, tokens, full, 3, scoring="sigmoid", **groups))
    if scale == "full":
        found.append(route_problem(dtype, tokens, full // 2, 1, num_groups=2, topk_groups=1))
        found.append(route_problem(dtype, tokens, full, 3, **groups))
    return found
