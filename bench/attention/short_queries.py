"""Few queries and many keys, or few keys: problems drawn at random."""

from __future__ import annotations

import random
from typing import Any

from fkjit.ops.attention.problem import flops, traffic
from fkjit.spec import Problem

CELLS = 60
HEADS = (1, 2, 4, 8, 16, 32, 64)
_MOST_FLOPS, _MOST_BYTES = 4e13, 4e9  # of a cell: 60 ms, and room for its peers
_FULL = 0.4  # of the cells where a causal mask makes sense


def drawn(rng: random.Random) -> list[Problem]:
    """1 to 4,096 queries of 64 to 128k keys, 1 to 64 heads, in groups or not, batches of 1 to 64:
    each size as likely as its double."""
    found: list[Problem] = []
    while len(found) < CELLS:
        cell = _cell(rng)
        if flops(cell) <= _MOST_FLOPS and traffic(cell) <= _MOST_BYTES:
            found.append(cell)
    return found


def _size(rng: random.Random, least: int, most: int) -> int:
    return min(int(least * (most / least) ** rng.random() + 0.5), most)


def _cell(rng: random.Random) -> dict[str, Any]:
    queries, keys = _size(rng, 1, 4096), _size(rng, 64, 131_072)
    heads, dim = rng.choice(HEADS), rng.choice((64, 128, 128))
    if rng.random() < 0.5:  # lengths as programs have them
        queries, keys = 1 << queries.bit_length() - 1, 1 << keys.bit_length() - 1
    causal = queries <= keys and rng.random() > _FULL
    return {
        "dtype": "bf16",
        "batch": _size(rng, 1, 64),
        "heads_q": heads,
        "heads_kv": rng.choice([h for h in (heads, heads // 4, heads // 8) if h]),
        "seqlen_q": queries,
        "seqlen_k": keys,
        "head_dim": dim,
        "head_dim_v": dim,
        "softmax_scale": dim**-0.5,
        "causal": causal,
    }
