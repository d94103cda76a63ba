"""Reductions, of everything and of rows."""

from __future__ import annotations

from typing import Any

from fkjit.gallery.ladder import Ladder, Picture, Sizes, Step

_SUM = {"dtype": "fp32", "out_dtype": "fp32", "operation": "sum"}
_BLOCKS = {**_SUM, "gaps": False, "unroll": 4}
_SHORT = {"rows": 1 << 20, "columns": 128}
_FEW = {"rows": 37, "columns": 128}


def problem(step: Step, sizes: Sizes, multiprocessors: int) -> dict[str, Any]:
    """Sums of contiguous rows."""
    columns = sizes["columns"]
    return {
        "dtype": "fp32", "out_dtype": "fp32", "operation": "sum", "vector": step.params["vector"],
        "rows": sizes["rows"], "columns": columns, "segments": 1, "shift": 0,
        "row_stride": columns, "column_stride": 1, "divisor": 1.0,
    }  # fmt: skip


LADDER = Ladder(
    name="reduction",
    title="Reductions",
    about="Sums of 2²⁸ fp32 numbers, then of short rows. Memory is the limit from the second step "
    "on; what is left is to keep enough bytes under way, and not to launch twice.",
    sizes={"rows": 1, "columns": 1 << 28},
    small={"rows": 1, "columns": 66_000},
    problem=problem,
    free={"rows": 1, "columns": 4},
    steps=(
        Step(
            "one element a load",
            "reduce.blocks",
            {**_BLOCKS, "vector": False, "threads": 512},
            "A grid of blocks, each with a contiguous piece. Partial sums meet in memory, and the "
            "last block to finish, found by one `atom.acq_rel`, adds them up: one launch, and "
            "always the same bits.",
        ),
        Step(
            "16 bytes a load",
            "reduce.blocks",
            {**_BLOCKS, "vector": True, "threads": 512},
            "Each load takes four numbers, and four loads of a thread are under way at once, so a "
            "quarter of the instructions keeps as many bytes under way.",
            pictures=(Picture("tiling", "x"),),
        ),
        Step(
            "short rows, a block each",
            "reduce.blocks",
            {**_BLOCKS, "vector": True, "threads": 256},
            "2²⁰ rows of 128 numbers: a block for each row leaves most of its threads idle.",
            sizes=_SHORT,
            small=_FEW,
            pictures=(Picture("tiling", "x"),),
        ),
        Step(
            "short rows, lanes",
            "reduce.lanes",
            {**_SUM, "vector": True, "threads": 256, "unroll": 2},
            "A few lanes of a warp for each row, so that no lane is idle and rows meet by "
            "shuffles alone.",
            sizes=_SHORT,
            small=_FEW,
            pictures=(Picture("tiling", "x"),),
        ),
        Step(
            "longer rows, lanes",
            "reduce.lanes",
            {**_SUM, "vector": True, "threads": 256, "unroll": 8},
            "Rows of 1024 numbers: a whole warp each, eight loads of a lane under way.",
            sizes={"rows": 131_072, "columns": 1024},
            small={"rows": 9, "columns": 1024},
        ),
    ),
)
