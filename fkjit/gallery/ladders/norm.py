"""LayerNorm and RMSNorm."""

from __future__ import annotations

from typing import Any

from fkjit.gallery.ladder import Ladder, Picture, Sizes, Step
from fkjit.ops.norm import cases

_BF16 = {"dtype": "bf16", "weight_dtype": "bf16"}
_ROWS = {**_BF16, "vector": True}


def problem(step: Step, sizes: Sizes, multiprocessors: int) -> dict[str, Any]:
    """Contiguous rows, weights, no residual."""
    affine = "weight" if step.kernel.startswith("rms") else "both"
    made = cases.problem(step.params, sizes["rows"], sizes["columns"], affine=affine)
    return {**made, "most": multiprocessors * 16}


LADDER = Ladder(
    name="norm",
    title="LayerNorm and RMSNorm",
    about="16,384 rows of 4096 in bf16, read once and written once. A row has to be known whole "
    "before its first element can be written; the question is where it waits.",
    sizes={"rows": 16_384, "columns": 4096},
    small={"rows": 5, "columns": 4096},
    problem=problem,
    free={"rows": 1},
    steps=(
        Step(
            "two looks at memory",
            "layer_norm.wide",
            {**_BF16, "vector": False, "threads": 512},
            "A block goes over its row for mean and variance, and once more to write it. Any "
            "width, any alignment, one element a load; the second look hopes for the caches.",
            pictures=(Picture("tiling", "out"),),
        ),
        Step(
            "16 bytes a load",
            "layer_norm.wide",
            {**_BF16, "vector": True, "threads": 512},
            "Eight numbers a load, an eighth of the instructions.",
            pictures=(Picture("tiling", "out"),),
        ),
        Step(
            "the row in registers",
            "layer_norm.rows",
            {**_ROWS, "tile": (128, 4, 1)},
            "128 threads keep the row, four 16-byte vectors each, and look once: distances from a "
            "pilot element make mean and squares safe in one pass. Several small blocks an SM "
            "cover for each other's barriers.",
            pictures=(Picture("tiling", "out"),),
        ),
        Step(
            "RMSNorm",
            "rms_norm.rows",
            {**_ROWS, "tile": (128, 4, 1)},
            "The same kernel without a mean.",
        ),
        Step(
            "fewer rows: the next row's loads early",
            "layer_norm.rows",
            {**_ROWS, "tile": (256, 2, 1)},
            "2048 rows: more threads a row, and the next row's loads are under way while this one "
            "is reduced.",
            sizes={"rows": 2048},
        ),
        Step(
            "one row: a cluster",
            "layer_norm.rows",
            {**_ROWS, "tile": (512, 1, 4)},
            "One row of 16,384: four blocks share it, and meet through distributed shared memory.",
            sizes={"rows": 1, "columns": 16_384},
            small={"rows": 1, "columns": 16_384},
            pictures=(Picture("tiling", "out"),),
        ),
    ),
)
