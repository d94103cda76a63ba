"""Products, from tiles in shared memory to Hopper's tensor cores, and of few rows."""

from __future__ import annotations

from typing import Any

from fkjit.gallery.ladder import Ladder, Picture, Sizes, Step
from fkjit.ops.gemm import cases

_PLAIN = {"activation": "none", "gate": False}
_BF16 = {"dtype": "bf16", "out_dtype": "bf16", "weight_layout": "nk", **_PLAIN}
_WHOLE = {**_BF16, "x_layout": "mk", "residual": False, "pre": False}
_WGMMA = {**_WHOLE, "tma_store": True, "split": 1, "shares": False}
_FMA = {
    **_WHOLE, "dtype": "fp32", "aligned": True, "long_k": False, "block": (128, 256, 16),
    "split": 1,
}  # fmt: skip
_FMA.pop("out_dtype")
_SMALL_K = {"m": 130, "n": 136, "k": 128}


def problem(step: Step, sizes: Sizes, multiprocessors: int) -> dict[str, Any]:
    """out = x weightᵀ of contiguous arrays, without a bias."""
    own: dict[str, Any] = {"bias": False, "residual": False, "pre": False}
    if step.kernel == "linear.skinny":
        own["split"] = 1
    made = cases.problem(step.params, sizes["m"], sizes["n"], sizes["k"], **own)
    if step.kernel == "linear.wgmma":
        made["multiprocessors"] = multiprocessors
    return made


def _wgmma(title: str, why: str, *pictures: Picture, **free: Any) -> Step:
    """A step of wgmma.cu, by its free parameters."""
    chosen = {"schedule": "cooperative", "cluster": 1, "split": 1, "shares": False, **free}
    return Step(title, "linear.wgmma", {**_WGMMA, **chosen}, why, pictures=pictures)


LADDER = Ladder(
    name="gemm",
    title="Products",
    about="out = x weightᵀ, 8192³ in bf16 unless a step says otherwise. First memory is the limit, "
    "then shared memory, then L2, then power; with few rows it is memory again.",
    sizes={"m": 8192, "n": 8192, "k": 8192},
    small={"m": 70, "n": 72, "k": 40},
    problem=problem,
    free={"m": 1, "n": 8, "k": 8},
    unit="TFLOP/s",
    steps=(
        Step(
            "tiles in shared memory",
            "linear.tiled",
            {**_BF16, "x_layout": "mk", "block": 64},
            "A block brings a tile of each operand into shared memory and uses each number 64 "
            "times; a thread has 4 x 4 sums. Shared memory is the limit: 8 reads for 16 FMAs.",
            pictures=(Picture("tiling", "out"),),
        ),
        Step(
            "more sums a thread",
            "linear.fma",
            _FMA,
            "In fp32, 4096³: 8 x 8 sums a thread take four 16-byte reads for 64 FMAs, and a ring "
            "of stages is filled by `cp.async` meanwhile. Registers of both parities feed the "
            "FMAs.",
            sizes={"m": 4096, "n": 4096, "k": 4096},
            pictures=(
                Picture("tiling", "out"),
                Picture("memory"),
                Picture("pipeline", sizes={"k": 128}),
            ),
        ),
        Step(
            "tensor cores, warp by warp",
            "linear.mma",
            {**_WHOLE, "aligned": True, "mma_k": 16, "block": (256, 128, 64)},
            "A warp multiplies 16 x 16 by 16 x 8 in one instruction (`mma.sync`); `ldmatrix` "
            "brings fragments out of swizzled rows. Shared memory is nearly as busy as the tensor "
            "cores, which give this instruction some 62 % of what they can do on Hopper.",
            small=_SMALL_K,
            pictures=(
                Picture("tiling", "out"),
                Picture("memory"),
                Picture("pipeline", sizes={"k": 512}),
                Picture("fragments", "mma"),
                Picture("banks", "ldmatrix"),
            ),
        ),
        _wgmma(
            "wgmma and TMA",
            "Four warps multiply together, asynchronously, with both operands in shared memory; "
            "TMA brings whole boxes, so a producer warpgroup does nothing but ask for them. "
            "Blocks are persistent. L2 is the next limit.",
            Picture("grid", "m,n"),
            Picture("memory"),
            Picture("pipeline", sizes={"k": 512}),
            Picture("fragments", "wgmma"),
            block=(128, 256),
        ),
        _wgmma(
            "clusters of two",
            "Two blocks whose tiles lie below each other share the weight: each brings half of "
            "its tile, and TMA writes each half into both (multicast). L2 is asked for a third "
            "less.",
            block=(128, 256),
            cluster=2,
        ),
        _wgmma(
            "ping-pong",
            "Each consumer has a tile of its own, and one multiplies while the other is at its "
            "epilogue. It wins where k is short or the epilogue long; here, with k = 8192, the "
            "larger tile of the step before asks L2 for less.",
            Picture("grid", "m,n"),
            Picture("memory"),
            Picture("pipeline", sizes={"n": 264, "k": 640}),
            block=(128, 128),
            schedule="pingpong",
        ),
        _wgmma(
            "ping-pong in clusters, the last tiles shared",
            "Clusters again; blocks share the tiles of the last wave along k, and the last one to "
            "finish adds up the partial sums in the order of k, so that bits do not depend on who "
            "that is.",
            block=(128, 128),
            schedule="pingpong",
            cluster=2,
            shares=True,
        ),
        Step(
            "few rows: operands swapped",
            "linear.skinny",
            {**_BF16, "aligned": True, "tokens": 16, "tile": (32, 256, 4), "cluster": 1},
            "16 rows of x: the weight is the side of 16 rows of the tensor cores and the tokens "
            "the side that may be 8 wide. All SMs stream the weight, which is all the time there "
            "is.",
            sizes={"m": 16},
            small={"m": 13, "n": 88, "k": 904},
            pictures=(Picture("tiling", "out"),),
        ),
        Step(
            "one row",
            "linear.gemv",
            {**_BF16, "tile": (16, 8, 4)},
            "Up to 8 rows: warps share k, each with many reads of the weight under way, the first "
            "of them asked for before the previous kernel has ended.",
            sizes={"m": 1, "k": 2048, "n": 3072},
            small={"m": 1, "n": 35, "k": 1064},
            pictures=(Picture("tiling", "out"),),
        ),
    ),
)
