"""The rotary embedding."""

from __future__ import annotations

from typing import Any

from fkjit.gallery.ladder import Ladder, Picture, Sizes, Step

_BF16 = {"dtype": "bf16", "interleaved": False}


def problem(step: Step, sizes: Sizes, multiprocessors: int) -> dict[str, Any]:
    """q and k as [batch, length, heads, head_dim], positions from 0."""
    return {
        "dtype": "bf16", "interleaved": False, "theta": 10_000.0, "layout": "bshd",
        "batch": sizes["batch"], "length": sizes["length"],
        "heads_q": sizes["heads"], "heads_k": sizes["heads"],
        "head_dim": sizes["head_dim"], "rotary_dim": sizes["head_dim"],
        "positions": "none", "start": 0, "scaling": None, "inverse": False,
    }  # fmt: skip


LADDER = Ladder(
    name="rope",
    title="RoPE",
    about="q and k of 4 x 4096 tokens, 32 heads of 128 each, in bf16: 537 MB read and written. "
    "Angles cost nothing to store if they cost little to compute.",
    sizes={"batch": 4, "length": 4096, "heads": 32, "head_dim": 128},
    small={"batch": 2, "length": 5, "heads": 4, "head_dim": 128},
    problem=problem,
    free={"batch": 1, "length": 1, "heads": 1},
    steps=(
        Step(
            "a table, one element a load",
            "rope.table",
            {**_BF16, "vector": False, "threads": 256, "unroll": 1},
            "Cosines and sines come from a table, as most models keep them. Rows that start on no "
            "16-byte boundary go this way.",
        ),
        Step(
            "16 bytes a load",
            "rope.table",
            {**_BF16, "vector": True, "threads": 128, "unroll": 2},
            "A thread has eight columns and their partners, for several heads: the table is read "
            "once for all of them. Its loads still wait for the position.",
            pictures=(Picture("tiling", "out_q"),),
        ),
        Step(
            "angles computed, one head under way",
            "rope.fused",
            {**_BF16, "vector": True, "threads": 128, "unroll": 1},
            "No table: a thread computes its angles once, for all of its heads, while their loads "
            "are under way.",
        ),
        Step(
            "two heads under way",
            "rope.fused",
            {**_BF16, "vector": True, "threads": 128, "unroll": 2},
            "Loads of two heads at a time: more bytes under way for the same angles.",
            pictures=(Picture("tiling", "out_q"),),
        ),
    ),
)
