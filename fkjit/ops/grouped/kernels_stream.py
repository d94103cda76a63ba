"""The kernel of grouped products with few rows of each expert: what it is compiled for.

A problem has m (places), n, k, experts, block_size, top_k, x_stride, dtype, activation, gate,
weight_layout and gather: whether x has the rows of tokens. Arrays: x, weight [experts, n, k] or
[experts, k, n] (with gate 2 n for n), bias, and the lists of `MoeGroups` -> out [m, n].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fkjit.ops.gemm import epilogue
from fkjit.ops.gemm.problem import outputs_of
from fkjit.ops.grouped.kernels import flops
from fkjit.runtime.interop import ITEMSIZE
from fkjit.spec import Dim3, KernelSpec, Param, Params, Problem, Work, register, size_class

LISTS = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded", "offsets", "counts")
ROWS = (8, 32)  # of an expert that are multiplied together
StreamTile = tuple[int, int, int]  # rows of the weight, warps, spans of a warp under way
# By layout of the weight: what loads its lines, and its tiles, the first one being the default.
_WEIGHTS: Mapping[str, tuple[str, tuple[StreamTile, ...]]] = {
    "nk": ("RowsWeight", ((32, 8, 2), (16, 8, 4), (16, 4, 4), (8, 16, 4))),
    "kn": ("ColumnsWeight", ((64, 16, 1),)),
}
_TILES = tuple(tile for _, tiles in _WEIGHTS.values() for tile in tiles)
_WARPS_OF_SM = 16
_SMS = 132  # where there is no GPU to ask
_MOST_SHARED = 48 * 1024  # bytes of sums
_LARGEST_CLASS = 1 << 14


def tiles_of(layout: str) -> tuple[StreamTile, ...]:
    """The tiles for a layout of the weight, the default first."""
    return _WEIGHTS[layout][1]


def _derive(params: Params) -> dict[str, Any]:
    rows, warps, unroll = params["tile"]
    return {
        **epilogue.values(params["activation"]),
        **{"weight_lines": _WEIGHTS[params["weight_layout"]][0], "tile_rows": rows},
        **{"warps": warps, "unroll": unroll, "resident": _resident(params)},
        "rows_of_k": params["weight_layout"] == "nk",
    }


def _resident(params: Params) -> int:
    return max(_WARPS_OF_SM // params["tile"][1], 1)


def _illegal(params: Params) -> str | None:
    rows, warps, _ = params["tile"]
    if params["tile"] not in tiles_of(params["weight_layout"]):
        return "is no tile for this layout"
    if rows * warps * params["rows"] * 4 > _MOST_SHARED:
        return "has no room for sums of so many rows"
    return None


def _columns(params: Params, problem: Problem) -> int:
    outputs = params["tile"][0] // (2 if params["gate"] else 1)
    return -(-problem["n"] // outputs)


def _grid(params: Params, problem: Problem) -> Dim3:
    """As many blocks as run at the same time, or as there may be tiles."""
    tiles = problem["m"] // problem["block_size"] * _columns(params, problem)
    slots = problem.get("multiprocessors", _SMS) * _resident(params)
    return (max(min(tiles, slots), 1), 1, 1)


def _arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    named = ("n", "k", "experts", "block_size", "top_k", "x_stride")
    return {
        **{name: arrays.get(name) for name in ("x", "weight", "bias", "out", *LISTS)},
        **{name: problem[name] for name in named},
        "places": problem["m"],
    }


def _traffic(problem: Problem) -> float:
    """Bytes of the weights of experts that have rows, once; rows are few beside them."""
    active = min(problem["experts"], problem["m"] // problem["block_size"])
    return float(ITEMSIZE[problem["dtype"]] * active * outputs_of(problem) * problem["k"])


# All that a call may take.
STREAM_ALL = KernelSpec(
    op="grouped_linear",
    name="stream",
    source="gemm/expert_stream.cu",
    entry="grouped_linear_stream",
    doc="few rows of each expert: weights of those that have rows, streamed once",
    params=(
        Param("dtype", ("bf16", "fp16"), "element type of all arrays"),
        Param("weight_layout", ("nk", "kn"), "nk: as nn.Linear's"),
        *epilogue.PARAMS,
        Param("gather", (False, True), "x has rows of tokens, not of places"),
        Param("rows", ROWS, "of an expert that are multiplied together"),
        Param("tile", _TILES, "rows of the weight, warps, spans of a warp under way", tunable=True),
    ),
    derive=_derive,
    illegal=_illegal,
    features=lambda params: frozenset({"bf16_mma"}),
    pdl=True,
    block=lambda params: (32 * params["tile"][1], 1, 1),
    grid=_grid,
    arguments=_arguments,
    shape_class=lambda p: {
        "m": size_class(p["m"], _LARGEST_CLASS),
        **{name: p[name] for name in ("n", "k", "experts", "block_size")},
    },
    work=Work(flops=flops, bytes=_traffic, interpreter_flops=2e8),
    verification="fkjit.ops.grouped.cases_stream:STREAM",
)


def _shown(params: Params) -> str | None:
    """What types, epilogues and tiles add does not depend on one another."""
    plain = (params["activation"], params["gate"]) == ("silu", True)
    first = params["tile"] == tiles_of(params["weight_layout"])[0]
    special = (params["dtype"] != "bf16") + (not plain) + (not first)
    if special > 1 or (special and (params["rows"] != ROWS[0] or params["gather"] != plain)):
        return "is compiled when called"
    return _illegal(params)


STREAM = register(epilogue.shipped(STREAM_ALL, _shown))
