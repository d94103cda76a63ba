"""Appending to the paged KV cache."""

from __future__ import annotations

from typing import Any

from fkjit.gallery.ladder import Ladder, Picture, Sizes, Step
from fkjit.ops.kv import cases

_BF16 = {"dtype": "bf16", "storage": "same"}
_PAGE = 16


def problem(step: Step, sizes: Sizes, multiprocessors: int) -> dict[str, Any]:
    """Tokens in whole pages that lie in any order in a pool twice as large."""
    tokens, heads, dim = sizes["tokens"], sizes["heads"], sizes["head_dim"]
    pages = 2 * -(-tokens // _PAGE)
    made = cases.problem_of(step.params, tokens, heads, dim, _PAGE, pages, skipped=0.0)
    if step.kernel == "kv_append.tokens":
        return made
    more = {"rotary_dim": dim, "theta": 10_000.0, "interleaved": False, "scaling": None}
    return {**made, "heads_q": 4 * heads, **more}


LADDER = Ladder(
    name="paged_append",
    title="Paged append",
    about="Keys and values of 16,384 tokens, 8 heads of 128 in bf16, written to the slots of a "
    "paged cache: 134 MB read and written, and an address to look up for every token.",
    sizes={"tokens": 16_384, "heads": 8, "head_dim": 128},
    small={"tokens": 9, "heads": 2, "head_dim": 128},
    problem=problem,
    free={"tokens": 1, "heads": 1},
    steps=(
        Step(
            "one element a load",
            "kv_append.tokens",
            {**_BF16, "vector": False, "threads": 128, "unroll": 1},
            "A thread for each element of a token. Any alignment.",
        ),
        Step(
            "16 bytes a load, two tokens a thread",
            "kv_append.tokens",
            {**_BF16, "vector": True, "threads": 128, "unroll": 2},
            "Eight numbers a load, and a thread has two tokens under way.",
        ),
        Step(
            "one token a thread",
            "kv_append.tokens",
            {**_BF16, "vector": True, "threads": 128, "unroll": 1},
            "Keys in even blocks and values in odd ones, so that each block has one stream in and "
            "one out; many small blocks keep as much under way as tokens in turn.",
            pictures=(Picture("tiling", "k_pages"),),
        ),
        Step(
            "codes of 8 bits",
            "kv_append.tokens",
            {**_BF16, "storage": "fp8", "vector": True, "threads": 128, "unroll": 4},
            "e4m3 with a scale a head, converted two at a time: half of what is written, and four "
            "tokens a thread pay again.",
        ),
        Step(
            "rotated on the way",
            "rope_kv_append.computed",
            {**_BF16, "vector": True, "interleaved": False, "threads": 128},
            "RoPE of q and of k in the same launch: k goes from its array into the cache and "
            "nowhere else. The time is that of 32 query heads as well.",
            pictures=(Picture("tiling", "k_pages"),),
        ),
    ),
)
