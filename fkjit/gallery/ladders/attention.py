"""Attention forward, from the formula to Hopper's tensor cores."""

from __future__ import annotations

from typing import Any

from fkjit.gallery.ladder import Ladder, Picture, Sizes, Step

_D128 = {"dtype": "bf16", "head_dim": 128, "head_dim_v": 128}
_MORE = {"seqlen": 4096}
_LONG = {"seqlen": 16_384, "batch": 1}


def problem(step: Step, sizes: Sizes, multiprocessors: int) -> dict[str, Any]:
    """q, k and v of one length and as many heads each."""
    made = {
        "dtype": step.params["dtype"], "batch": sizes["batch"], "causal": sizes["causal"],
        "heads_q": sizes["heads"], "heads_kv": sizes["heads"],
        "seqlen_q": sizes["seqlen"], "seqlen_k": sizes["seqlen"],
        "head_dim": sizes["head_dim"], "head_dim_v": sizes["head_dim"],
        "softmax_scale": sizes["head_dim"] ** -0.5,
    }  # fmt: skip
    return {**made, "multiprocessors": multiprocessors} if "sm90" in step.kernel else made


LADDER = Ladder(
    name="attention",
    title="Attention",
    about="Softmax(Q Kᵀ) V of 4 x 16 heads, 1024 queries and keys, head dimension 128. The formula "
    "reads every key once for every query; each step reads less often, then waits less often.",
    sizes={"batch": 4, "heads": 16, "seqlen": 1024, "head_dim": 128, "causal": False},
    small={"batch": 1, "heads": 1, "seqlen": 150, "head_dim": 128, "causal": False},
    problem=problem,
    free={"batch": 1, "heads": 1, "seqlen": 1, "causal": 1},
    unit="TFLOP/s",
    steps=(
        Step(
            "the formula",
            "attention.naive",
            {"dtype": "bf16"},
            "A warp computes one row of the output: it goes over the keys for the maximum, then "
            "once more for exponentials and the sum over V. Nothing is reused: 63 times the "
            "necessary bytes pass through L2, and warps wait for them.",
            pictures=(Picture("tiling", "o"),),
        ),
        Step(
            "tiles in shared memory",
            "attention.tiled",
            {**_D128, "block": 64},
            "A block keeps 64 queries, and a tile of K or V that is read serves all of them. There "
            "are still two passes over the keys, since a probability needs the maximum and the sum "
            "of the whole row. Warps no longer wait for memory, but execute 63 times the "
            "instructions of the next step.",
            pictures=(Picture("tiling", "o"), Picture("memory")),
        ),
        Step(
            "tensor cores (FlashAttention)",
            "attention.flash",
            {**_D128, "block": (128, 64), "aligned": True},
            "One pass: what was added is rescaled where the maximum grows (online softmax). "
            "Both products go to the tensor cores (`mma.sync`); scores stay in registers, in the "
            "layout in which the second product takes them. `cp.async` fetches the next tile "
            "meanwhile, into rows swizzled so that `ldmatrix` meets no bank conflict.",
            pictures=(
                Picture("tiling", "o"),
                Picture("memory"),
                Picture("pipeline", sizes={"seqlen": 320}),
                Picture("fragments", "mma"),
                Picture("banks", "ldmatrix"),
            ),
        ),
        Step(
            "Hopper: wgmma and TMA",
            "attention.flash_sm90",
            {**_D128, "block": 128, "optimistic": False},
            "One warp asks TMA for whole tiles, two warpgroups multiply them asynchronously "
            "(`wgmma`). Blocks stay and draw their next tile from a counter; one warpgroup takes "
            "exponentials while the other's products run.",
            pictures=(
                Picture("grid", "seqlen,seqlen"),
                Picture("memory"),
                Picture("pipeline", sizes={"seqlen": 512}),
                Picture("fragments", "wgmma"),
            ),
        ),
        Step(
            "longer rows",
            "attention.flash_sm90",
            {**_D128, "block": 128, "optimistic": False},
            "The same kernel for 4096 queries and keys: sixteen times the work. The ends of a "
            "tile of queries, where products or exponentials are alone, count for less: they are "
            "a third of all work at 512 keys, one part in a hundred at 16,384.",
            sizes=_MORE,
        ),
        Step(
            "speculative softmax",
            "attention.flash_sm90",
            {**_D128, "block": 128, "optimistic": True},
            "Exponentials begin with the maximum of the tile before, and their sum tells whether "
            "that was good enough; if not, which is rare, the tile is computed again. A third "
            "stage of K keeps its keys until that is known.",
            sizes=_MORE,
            pictures=(Picture("memory"), Picture("pipeline", sizes={"seqlen": 512})),
        ),
        Step(
            "three consumers, long rows",
            "attention.flash_sm90",
            {**_D128, "block": (192, 80), "optimistic": False},
            "For 16,384 keys a third warpgroup of consumers on tiles of 192 x 80: more warps hide "
            "more of a consumer's own work. Its tiles leave no room for a third stage of K, and "
            "shorter rows lose more by rounding up to 192.",
            sizes=_LONG,
            pictures=(Picture("memory"),),
        ),
    ),
)
