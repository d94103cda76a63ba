"""Grouped products whose tiles have as many rows as experts have: rows of x are wgmma's columns.

A problem has what those of grouped products have (kernels.py), ROWS of x by expert, a block_size
that is a multiple of 16, and a weight [experts, n, k]. Arrays: x [m, k], weight, bias, offsets ->
out [m, n]; of `codes` x and weight are e4m3, and x_scales [m] and scales [experts, n] (with gate
2 n) are those of their rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fkjit.ops.gemm import epilogue
from fkjit.ops.gemm.problem import outputs_of, shape_class
from fkjit.ops.grouped.kernels import flops, of_experts
from fkjit.runtime.interop import ITEMSIZE
from fkjit.runtime.tensor_map import TensorMap
from fkjit.spec import Dim3, KernelSpec, Param, Params, Problem, SharedLayout, Work, register

EVEN = 16  # what experts' places are a multiple of
_STEP = 128  # bytes of k, of a row in a stage
_OUTPUTS, _IN_TURNS = 128, 160  # rows of the weight in a tile; of x in one consumer's, at most
_CONSUMERS, _STAGED = 2, 4096  # bytes of out that each stages
_BOXES = (64, 16)  # rows of x
_EIGHT, _PANEL = 8, 64
_KEPT = ("none", "gelu_tanh", "silu", "relu")  # activations whose arguments may be kept
_MAX_SHARED = 232_448  # bytes a block may have on sm_90
_GROUP_ROWS = 4096  # rows of an expert whose tiles are taken together
_SMS = 132  # where there is no GPU to ask
# Rows of x at most, and of the weight: a tile is one consumer's, or both share it.
TILES = ((160, 128), (304, 128))


def takes(problem: Problem) -> bool:
    """Rows of x, of the weight and of out begin on 16-byte boundaries."""
    return (
        problem["groups"] == "ROWS" and problem["block_size"] % EVEN == 0
        and problem["n"] % _EIGHT == 0 and problem["aligned"] and not problem["gather"]
    )  # fmt: skip


def _illegal(params: Params) -> str | None:
    if params["weight_layout"] == "kn" and (params["gate"] or params["codes"]):
        return "has neither gate nor codes of a weight whose outputs are contiguous"
    if params["activation"] == "gelu" and not params["gate"]:
        return "has no registers for two columns' erf"
    if params["pre"] and (params["codes"] or params["activation"] not in _KEPT):
        return "keeps nothing of codes, and has no registers for it beside erf or a mod="
    return None


def _most_rows(params: Params) -> int:
    """Of x in a tile."""
    return int(params["block"][0])


def _pingpong(params: Params) -> bool:
    return _most_rows(params) == _IN_TURNS


def _stages(params: Params) -> int:
    rest = _CONSUMERS * _STAGED + _scales(params) + 128
    return (_MAX_SHARED - rest) // ((_OUTPUTS + _most_rows(params)) * _STEP)


def _scales(params: Params) -> int:
    """Bytes of those of consumers' rows of x, and of as many behind them as are staged at once."""
    return _CONSUMERS * (_most_rows(params) + _STAGED // 128) * 4 if params["codes"] else 0


def _columns(params: Params, problem: Problem) -> int:
    """Tiles beside each other."""
    return -(-problem["n"] // (_OUTPUTS // (2 if params["gate"] else 1)))


def _derive(params: Params) -> dict[str, Any]:
    return {
        **epilogue.values(params["activation"]), "stages": _stages(params),
        "pingpong": _pingpong(params),
        "kn": params["weight_layout"] == "kn", "code": "u8" if params["codes"] else params["dtype"],
    }  # fmt: skip


def _shared(params: Params) -> SharedLayout:
    count = _stages(params)
    sides = (("weight", _OUTPUTS), ("x", _most_rows(params)))
    tiles = [(f"{side} stage {i}", rows * _STEP) for side, rows in sides for i in range(count)]
    tiles += [(f"output of consumer {i}", _STAGED) for i in range(_CONSUMERS)]
    scales = [("scales of x", _scales(params))] if params["codes"] else []
    return [*tiles, *scales, ("mbarriers", 16 * count)]


def _grid(params: Params, problem: Problem) -> Dim3:
    """As many blocks as run at the same time, or as there may be tiles."""
    below = problem["m"] // _most_rows(params) + problem["experts"]
    tiles = below * _columns(params, problem)
    return (max(min(tiles, problem.get("multiprocessors", _SMS)), 1), 1, 1)


def _arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    m, k, dtype = problem["m"], problem["k"], "u8" if params["codes"] else params["dtype"]
    size = 1 if params["codes"] else ITEMSIZE[params["dtype"]]
    maps = {
        name: TensorMap(
            arrays["x"], dtype, (k, m, 1, 1), (problem["x_stride"] * size, 0, 0),
            (_STEP // size, rows, 1, 1),
        )
        for name, rows in zip(("x_map", "x_map_last"), _BOXES, strict=True)
    }  # fmt: skip
    named = ("x_scales", "scales", "bias", "out", "pre", "offsets")
    return {
        **maps, "weight_map": _weight_map(params, problem, arrays["weight"], dtype, size),
        **{name: arrays.get(name) for name in named},
        **{name: problem[name] for name in ("experts", "m", "n", "k")},
        "group_rows": max(_GROUP_ROWS // _most_rows(params), 1),
    }  # fmt: skip


def _weight_map(params: Params, problem: Problem, weight: Any, dtype: str, size: int) -> TensorMap:
    """With gate eight rows of gate and eight of up, and so on: rows are at a distance of n."""
    n, k, row = problem["n"], problem["k"], problem["k"] * size
    if params["weight_layout"] == "kn":
        own = TensorMap(weight, dtype, (n, k, 1, 1), (n * size, 0, 0), (_PANEL, _PANEL, 1, 1))
        return of_experts(own, problem["experts"])
    if not params["gate"]:
        own = TensorMap(weight, dtype, (k, n, 1, 1), (row, 0, 0), (_STEP // size, _OUTPUTS, 1, 1))
        return of_experts(own, problem["experts"])
    eights = (problem["experts"] * 2 * n - n) // _EIGHT
    return TensorMap(
        weight, dtype, (k, _EIGHT, 2, eights), (row, n * row, _EIGHT * row),
        (_STEP // size, _EIGHT, 2, _OUTPUTS // 2 // _EIGHT),
    )  # fmt: skip


def _traffic(problem: Problem) -> float:
    """Bytes of every expert's weight, of x and of out, once."""
    m, n, k = problem["m"], problem["n"], problem["k"]
    size = 1 if problem["codes"] else ITEMSIZE[problem["dtype"]]
    read = problem["experts"] * outputs_of(problem) * k + m * k
    return float(size * read + ITEMSIZE[problem["dtype"]] * m * n)


# All that a call may take.
RAGGED_ALL = KernelSpec(
    op="grouped_linear",
    name="ragged_wgmma",
    source="gemm/ragged.cu",
    entry="grouped_linear_ragged",
    doc="tiles of as many rows as experts have, on Hopper: the product transposed",
    params=(
        Param("dtype", ("bf16", "fp16"), "element type of bias and out, and of x that is no codes"),
        Param("codes", (False, True), "x and weight are e4m3, with a scale for each row"),
        Param("weight_layout", ("nk", "kn"), "nk: as nn.Linear's"),
        *epilogue.PARAMS,
        Param("pre", (False, True), "what the activation is of is kept for a backward"),
        Param("block", TILES, "rows of x, at most, and of the weight in a tile", tunable=True),
    ),
    derive=_derive,
    illegal=_illegal,
    features=lambda params: frozenset({"wgmma"}),
    pdl=True,
    shared_layout=_shared,
    block=lambda params: (384, 1, 1),
    grid=_grid,
    arguments=_arguments,
    shape_class=lambda p: {
        **shape_class(p), **{name: p[name] for name in ("experts", "block_size")}
    },
    work=Work(flops=flops, bytes=_traffic, interpreter_flops=2e8),
    verification="fkjit.ops.grouped.cases_ragged:RAGGED",
)  # fmt: skip

_PLAIN = {
    "dtype": "bf16", "codes": False, "weight_layout": "nk", "activation": "none", "gate": False,
    "pre": False, "block": TILES[0],
}  # fmt: skip
_SWIGLU = {**_PLAIN, "activation": "silu", "gate": True, "block": TILES[1]}
RAGGED = register(
    replace(
        RAGGED_ALL,
        ahead=[
            _PLAIN,
            {**_PLAIN, "block": TILES[1], "dtype": "fp16"},
            {**_PLAIN, "weight_layout": "kn"},
            {**_PLAIN, "weight_layout": "kn", "block": TILES[1]},
            {**_PLAIN, "codes": True},
            {**_PLAIN, "activation": "gelu_tanh", "pre": True},
            _SWIGLU,
            {**_SWIGLU, "block": TILES[0], "pre": True},
            {**_SWIGLU, "codes": True},
        ],
    )
)
