"""Decoding: what a problem is, and what it costs.

A problem: new tokens `seqlen_q` of `batch` sequences, `longest` keys at most, in pages of
`page_size` tokens, or 0: a page a sequence, without a table. `axes` and `page_axes` say where batch
(page), head and token stand in q and o, and in k and v. `storage` is "same" where k and v have q's
dtype, else what they are quantized to. `split` is the number of keys of a split, or 0: splits as
even as the batch allows. `blocks` is the grid. `window`, (left, right), is there where score
features are: causal is folded into it, and a side without a bound is as wide as the scores.
"""

from __future__ import annotations

from typing import Any

from fkjit.runtime.interop import ITEMSIZE
from fkjit.spec import Problem, size_class

ROW_AXES = {"bhsd": (0, 1, 2), "bshd": (0, 2, 1)}  # where batch, head, token stand
MAX_TOKENS = 16  # new ones of a sequence
LEAST_SPLIT = 128  # keys of a split of fixed size
ROUND = 32  # keys: a window's first work unit begins at a multiple (attention/decode/schedule.cuh)
_MOST_KEYS = 1 << 22  # of all heads; more of them make no difference to a tile


def has_many(q: Any) -> bool:
    """Whether q has more tokens of each sequence than the kernel takes."""
    shape = getattr(q, "shape", ())
    return len(shape) == 4 and shape[1] > MAX_TOKENS and 0 not in shape


def rows(problem: Problem) -> int:
    """Query rows of a KV head: query heads times new tokens."""
    return problem["heads_q"] // problem["heads_kv"] * problem["seqlen_q"]


def keys_read(problem: Problem, length: int) -> int:
    """Of a sequence, at most: a window's, from ROUND on."""
    window = problem.get("window")
    return length if window is None else min(length, window[0] + problem["seqlen_q"] + ROUND - 1)


def keys_seen(problem: Problem) -> float:
    """Of all sequences: those that `lengths` of a problem say, or all there may be; in a window."""
    given = problem.get("lengths")
    lengths = [problem["longest"]] * problem["batch"] if given is None else given
    return float(sum(keys_read(problem, length) for length in lengths))


def flops(problem: Problem) -> float:
    """Multiplications and additions of the two products; the few masked keys are counted."""
    pairs = keys_seen(problem) * problem["heads_q"] * problem["seqlen_q"]
    return 2.0 * pairs * (problem["head_dim"] + problem["head_dim_v"])


def traffic(problem: Problem) -> float:
    """Bytes of keys and values, each read once; of queries and output; of a bias or mask."""
    dims = problem["head_dim"] + problem["head_dim_v"]
    quantized = problem["storage"] != "same"
    keys = keys_seen(problem) * problem["heads_kv"]
    queries = problem["batch"] * problem["heads_q"] * problem["seqlen_q"]
    size = 1 if quantized else ITEMSIZE[problem["dtype"]]
    return dims * (keys * size + queries * ITEMSIZE["fp16"]) + problem.get("form_bytes", 0)


def shape_class(problem: Problem) -> dict[str, Any]:
    """What decides which tile is best, coarsely."""
    keys = problem["batch"] * problem["heads_kv"] * keys_read(problem, problem["longest"])
    return {"keys": size_class(keys, _MOST_KEYS), "page_size": problem["page_size"]}
