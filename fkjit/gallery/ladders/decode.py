"""Decoding: one new token against many keys."""

from __future__ import annotations

from typing import Any

from fkjit.gallery.ladder import Ladder, Picture, Sizes, Step
from fkjit.ops.attention.decode import cases

_SPLIT = {"dtype": "bf16", "storage": "same", "head_dim": 128, "rows": 16}


def problem(step: Step, sizes: Sizes, multiprocessors: int) -> dict[str, Any]:
    """One query a sequence; `pages` 0: keys in one piece."""
    if step.kernel == "attention.flash":
        return {
            "dtype": "bf16", "batch": sizes["batch"], "causal": False,
            "heads_q": sizes["heads"], "heads_kv": sizes["heads_kv"],
            "seqlen_q": 1, "seqlen_k": sizes["keys"],
            "head_dim": 128, "head_dim_v": 128, "softmax_scale": 128**-0.5,
        }  # fmt: skip
    return cases.problem_of(
        step.params, [sizes["keys"]] * sizes["batch"], heads_q=sizes["heads"],
        heads_kv=sizes["heads_kv"], page_size=sizes["pages"],
        layout="nhd" if sizes["pages"] else "hnd", blocks=multiprocessors, causal=False,
    )  # fmt: skip


LADDER = Ladder(
    name="decode",
    title="Decoding",
    about="One new token against 4096 keys, 32 query and 8 key/value heads of 128: 16.8 MB to "
    "read, and a tile of queries that is nearly empty. The keys have to be shared out, not the "
    "queries.",
    sizes={"batch": 1, "heads": 32, "heads_kv": 8, "keys": 4096, "pages": 0},
    small={"batch": 1, "heads": 4, "heads_kv": 2, "keys": 150, "pages": 0},
    problem=problem,
    free={"batch": 1, "keys": 1},
    steps=(
        Step(
            "the kernel for many queries",
            "attention.flash",
            {"dtype": "bf16", "head_dim": 128, "head_dim_v": 128, "block": 64, "aligned": True},
            "A block for each query head: 32 of 132 SMs are busy, each row of a tile but one is "
            "padding, and keys are read once for each of the four query heads that share them.",
            pictures=(Picture("tiling", "o"),),
        ),
        Step(
            "keys shared out over the GPU",
            "attention_decode.split",
            {**_SPLIT, "tile": (4, 16, 2, 2)},
            "Four query heads become rows of one tile, so keys are read once. All keys of all "
            "heads are shared out evenly over a grid that fills the GPU once; the last block of a "
            "head adds up its parts.",
            pictures=(Picture("memory"),),
        ),
        Step(
            "one block an SM",
            "attention_decode.split",
            {**_SPLIT, "tile": (8, 16, 2, 1)},
            "Eight warps in one block where two blocks had four each: as many bytes under way, and "
            "half as many parts to add up.",
            pictures=(Picture("memory"), Picture("fragments", "mma")),
        ),
        Step(
            "keys in pages",
            "attention_decode.split",
            {**_SPLIT, "tile": (8, 16, 2, 1)},
            "The same kernel by a page table, 16 tokens a page: one look-up for every 16 rows of "
            "a step.",
            sizes={"pages": 16},
            small={"pages": 16},
        ),
    ),
)
