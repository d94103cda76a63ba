"""What the kernels that route tokens to experts share: tiles and arguments.

A routing problem: `tokens` rows of `experts` logits, `row_stride` elements from one to the next,
and how `top_k` of them are chosen (`Routing` in templates/moe/route.cuh).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fkjit.ops.op.shapes import log2_ceil
from fkjit.runtime.interop import ITEMSIZE
from fkjit.spec import Params, Problem
from fkjit.symbolic import decision

# Lanes of a warp on one token, logits of each; the first one that holds a token is taken.
Tile = tuple[int, int]
# Those for few experts, and QUICK ones for few tokens (a whole warp has a token), are for plain
# problems.
_SMALL: tuple[Tile, ...] = ((2, 4), (2, 8), (8, 4))
_MORE: tuple[Tile, ...] = ((4, 16), (8, 8), (8, 16), (16, 16), (32, 16), (32, 32))
_WIDE: tuple[Tile, ...] = ((8, 32),)
_PLAIN = (*_SMALL, *_MORE[:3], *_WIDE, *_MORE[3:])
QUICK: tuple[Tile, ...] = ((32, 4), (32, 8))
_NARROW = tuple(tile for tile in _PLAIN if tile not in _WIDE)
_FOR_FEW_TOKENS = (*QUICK, *_MORE[-2:])
STAGED: Tile = (2, 32)  # whose rows come through shared memory
TILES = (*QUICK, *_PLAIN)
FEW_TOKENS = 1024
# Tokens of a block, up to which other tiles have shorter rounds; by the bytes of a logit.
FEW_FOR_WIDE, FEW_FOR_STAGED = 96, {2: 192, 4: 600}
MAX_EXPERTS = 1024
MAX_TOP_K = 32
SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus")  # in the order of `Routing.scoring`
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
    tokens, sizes = p["tokens"], (p["dtype"], p["experts"], p["top_k"], p["num_groups"])
    plain = is_plain(p)
    staged &= plain and tokens > FEW_FOR_STAGED[ITEMSIZE[p["dtype"]]] * blocks
    if staged and p["experts"] > STAGED[1] and holds(STAGED, *sizes):
        return STAGED
    worth = p["experts"] > 16 or p["top_k"] > 2
    if quick and worth and plain and tokens <= FEW_TOKENS:
        return _first(_FOR_FEW_TOKENS, *sizes)
    narrow = blocks > 0 and tokens <= FEW_FOR_WIDE * blocks
    return _first((_NARROW if narrow else _PLAIN) if plain else _MORE, *sizes)


@decision(256)
def _first(
    tiles: tuple[Tile, ...], dtype: str, experts: int, top_k: int, num_groups: int
) -> Tile | None:
    """The first of the tiles with room for a token; None where there is none."""
    sizes = (dtype, experts, top_k, num_groups)
    return next((tile for tile in tiles if holds(tile, *sizes)), None)


def variant(p: Problem) -> dict[str, Any]:
    """The parameters that a routing problem with a `tile` fixes."""
    return {"dtype": p["dtype"], "tile": p["tile"], "plain": is_plain(p)}


def routing(params: Params, p: Problem) -> tuple[Any, ...]:
    """The kernels' argument `how`."""
    groups = p["num_groups"]
    return (
        p["top_k"], SCORINGS.index(p["scoring"]), p["renormalize"], p["experts"] // groups, groups,
        p["topk_groups"], p["group_topk"], log2_ceil(params["tile"][0]) - log2_ceil(groups),
        p["vector"], p["scale"],
    )  # fmt: skip


def is_vector(dtype: str, experts: int, num_groups: int, row_stride: int, pointer: int) -> bool:
    """Whether rows and groups of experts are whole 16-byte chunks on 16-byte boundaries."""
    size = 16 // ITEMSIZE[dtype]
    return pointer % 16 == 0 and row_stride % size == 0 and experts // num_groups % size == 0


def route_traffic(p: Problem) -> float:
    """Bytes of the logits read, and of weights and ids written."""
    return float(p["tokens"] * (p["experts"] * ITEMSIZE[p["dtype"]] + 8 * p["top_k"]))
