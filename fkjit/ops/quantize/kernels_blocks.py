"""The kernel of products of e4m3 codes with scales of blocks on Hopper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fkjit.ops.gemm import epilogue
from fkjit.ops.quantize import kernels_bytes
from fkjit.ops.quantize.kernels_bytes import BLOCK_K
from fkjit.ops.quantize.product import DTYPES, SMS, illegal_dtypes
from fkjit.spec import KernelSpec, Param, Params, Problem, SharedLayout, register

_OF_BYTES = kernels_bytes.WGMMA
_MAX_SHARED = 232_448  # bytes a block may have on sm_90
_MAX_STAGES = 8
_CODED_TILE = (128, 256)  # 128 columns of gate and of up
# Rows of x and of weight in a tile, and its rate beside the other's, measured on an H200
# (bench/notes/quantize.md).
_RATES = {(128, 128): 0.91, (128, 256): 1.0}


def _whole(params: Params) -> dict[str, Any]:
    """The parameters that the kernel of other scales has."""
    fixed = {"code": "fp8", "scales": "blocks", "interval": 1, "schedule": "cooperative"}
    return {**params, **fixed, "cluster": 1}


def _illegal(params: Params) -> str | None:
    if params["coded"] and not (params["gate"] and params["block"] == _CODED_TILE):
        return "has codes of gated results alone, of 128 columns"
    if params["coded"] and (params["residual"] or params["out_dtype"] != params["dtype"]):
        return "has codes of what the gate gives, without a residual"
    return illegal_dtypes(params)


def _each(params: Params) -> list[tuple[str, int]]:
    rows, outputs = params["block"]
    return [("x", rows * BLOCK_K), ("weight", outputs * BLOCK_K), ("scales", rows * 4 + 16)]


def _stages(params: Params) -> int:
    each = sum(size for _, size in _each(params)) + 16
    return min(_MAX_SHARED // each, _MAX_STAGES)


def _shared(params: Params) -> SharedLayout:
    count = _stages(params)
    arrays = [(f"{name} stage {i}", size) for name, size in _each(params) for i in range(count)]
    return [*arrays, ("mbarriers", 16 * count)]


def _values(params: Params) -> dict[str, Any]:
    rows, outputs = params["block"]
    return {
        **epilogue.values(params["activation"]), "block_m": rows, "block_n": outputs,
        "stages": _stages(params), "groups": "NONE",
    }  # fmt: skip


# All that a call may take.
WGMMA_BLOCKS = replace(
    _OF_BYTES,
    name="wgmma_blocks",
    source="quantize/wgmma_blocks.cu",
    entry="quantized_wgmma_blocks",
    doc="e4m3 codes on Hopper with scales of blocks, promoted under the other consumer's products",
    params=(
        *DTYPES,
        *epilogue.PARAMS,
        Param("residual", (False, True), "a residual is added to what the activation gives"),
        Param("coded", (False, True), "out is e4m3, with a scale for 128 columns of a row"),
        Param("block", tuple(_RATES), "rows of x and of weight in a tile", tunable=True),
    ),
    derive=_values,
    illegal=_illegal,
    shared_layout=_shared,
    shared_bytes=lambda params: sum(size for _, size in _shared(params)),
    block=lambda params: (384, 1, 1),
    grid=lambda params, problem: _OF_BYTES.grid(_whole(params), problem),
    arguments=lambda params, problem, arrays: _OF_BYTES.arguments(_whole(params), problem, arrays),
    verification="fkjit.ops.quantize.cases_bytes:BLOCKS",
)
_PLAIN: Mapping[str, Any] = {
    "dtype": "bf16", "out_dtype": "bf16", "activation": "none", "gate": False, "residual": False,
    "coded": False, "block": (128, 256),
}  # fmt: skip
_SWIGLU = {**_PLAIN, "activation": "silu", "gate": True}
WGMMA_BLOCKS_AHEAD = register(
    replace(
        WGMMA_BLOCKS,
        ahead=[
            {**_PLAIN, "dtype": "fp16", "out_dtype": "fp32"},
            {**_SWIGLU, "block": (128, 128), "residual": True},
            {**_SWIGLU, "coded": True},
        ],
    )
)


def choose(problem: Problem) -> tuple[KernelSpec, dict[str, Any], tuple[int, int]]:
    """The kernel, its parameters and scratch memory: the tile whose rounds take least time."""
    names = ("dtype", "out_dtype", "activation", "gate", "residual")
    fixed = {**{name: problem[name] for name in names}, "coded": problem.get("coded", False)}
    wide, slots = problem["n"] * (2 if problem["gate"] else 1), problem.get("multiprocessors", SMS)

    def cost(tile: tuple[int, int]) -> float:
        tiles = -(-problem["m"] // tile[0]) * -(-wide // tile[1])
        return -(-tiles // slots) * tile[0] * tile[1] / _RATES[tile]

    tile = _CODED_TILE if fixed["coded"] else min(_RATES, key=cost)
    spec = epilogue.kernel_for(WGMMA_BLOCKS, problem["activation"])
    return spec, {**fixed, "block": tile}, (0, 0)
