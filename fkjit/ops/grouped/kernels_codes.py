"""Grouped products of e4m3 codes with scales of 128 columns (of x) and of 128 by 128 (of weights),
or of rows of both: the kernel of `linear` for such codes, with a weight for each expert.

A problem has what those of grouped products have (kernels.py), and the spans of its codes. Arrays:
x [m, k] and weight [experts, n, k] of codes; x_scales [m, k / 128]; scales [experts, n / 128, k /
128], each rounded up, with gate 2 n for n (of rows [m] and [experts, n]); bias, offsets -> out, and
of `coded` results out_scales [m, n / 128].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fkjit.ops.gemm.problem import flops, outputs_of, shape_class
from fkjit.ops.grouped.kernels import of_experts
from fkjit.ops.quantize import kernels_blocks, kernels_bytes
from fkjit.runtime.interop import ITEMSIZE
from fkjit.spec import Dim3, KernelSpec, Param, Params, Problem, Work, register

_OF_LINEAR, _OF_BLOCKS = kernels_bytes.WGMMA, kernels_blocks.WGMMA_BLOCKS
_FIXED: Mapping[str, Any] = {
    "code": "fp8", "scales": "rows", "interval": 4, "residual": False, "cluster": 1,
    "schedule": "cooperative", "coded": False,
}  # fmt: skip
_SPANS = {"blocks": ("block", "group"), "rows": ("row", "row")}
_ROW_TILES = ((128, 128), (192, 128))
_GROUP_ROWS = 512  # rows of an expert whose tiles are taken together
_SMS = 132  # where there is no GPU to ask


def _whole(params: Params) -> dict[str, Any]:
    """The parameters that linear's kernels have."""
    return {**_FIXED, **params}


def _grid(params: Params, problem: Problem) -> Dim3:
    """As many blocks as run at the same time, or as there may be tiles: experts' last ones are
    not full."""
    rows, outputs = params["block"]
    below = problem["m"] // rows + problem["experts"]
    tiles = below * -(-problem["n"] // (outputs // (2 if params["gate"] else 1)))
    return (max(min(tiles, problem.get("multiprocessors", _SMS)), 1), 1, 1)


def _arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Those of linear; the map of the weights of all experts."""
    span, of_x = _SPANS[problem["scales"]]
    spans = {"span": span, "x_span": of_x, "code": "fp8"}
    named = dict(_OF_LINEAR.arguments(_whole(params), {**problem, **spans}, arrays))
    named["weight_map"] = of_experts(named["weight_map"], problem["experts"])
    named["out_scales"] = arrays.get("out_scales")
    named["group_rows"] = max(_GROUP_ROWS // params["block"][0], 1)
    return {**named, "offsets": arrays["offsets"], "experts": problem["experts"]}


def _traffic(problem: Problem) -> float:
    """Bytes of every expert's codes, of those of x, and of out, once."""
    m, n, k = problem["m"], problem["n"], problem["k"]
    codes = problem["experts"] * outputs_of(problem) * k + m * k
    return float(codes + ITEMSIZE[problem["out_dtype"]] * m * n)


# ------------------------------------------------------------------ scales of rows

# All that a call may take.
CODES_ALL = replace(
    _OF_LINEAR,
    op="grouped_linear",
    name="fp8_wgmma",
    doc="e4m3 codes with scales of rows on Hopper, a weight for each expert",
    params=(
        *(p for p in _OF_LINEAR.params if p.name not in (*_FIXED, "block")),
        Param("block", _ROW_TILES, "rows of x and of weight in a tile", tunable=True),
    ),
    derive=lambda params: {**_FIXED, **_OF_LINEAR.derive(_whole(params)), "groups": "ROWS"},
    illegal=lambda params: _OF_LINEAR.illegal(_whole(params)),
    shared_layout=lambda params: (_OF_LINEAR.shared_layout or (lambda p: []))(_whole(params)),
    block=lambda params: _OF_LINEAR.block(_whole(params)),
    grid=_grid,
    arguments=_arguments,
    shape_class=lambda p: {
        **shape_class(p), **{name: p[name] for name in ("experts", "block_size")}
    },
    work=Work(flops=flops, bytes=_traffic, interpreter_flops=1e8),
    verification="fkjit.ops.grouped.cases_codes:CODES",
)  # fmt: skip
_PLAIN = {
    "dtype": "bf16", "out_dtype": "bf16", "activation": "none", "gate": False, "block": (128, 128),
}  # fmt: skip
_SWIGLU = {**_PLAIN, "activation": "silu", "gate": True}
CODES: KernelSpec = register(
    replace(
        CODES_ALL,
        ahead=[
            _SWIGLU,
            {**_PLAIN, "block": (192, 128)},
            {**_PLAIN, "dtype": "fp16", "out_dtype": "fp32"},
            {**_SWIGLU, "dtype": "fp16", "out_dtype": "fp16"},
        ],
    )
)

# ------------------------------------------------------------------ scales of blocks

# All that a call may take.
BLOCKS_ALL = replace(
    CODES_ALL,
    name="fp8_wgmma_blocks",
    source=_OF_BLOCKS.source,
    entry=_OF_BLOCKS.entry,
    doc="e4m3 codes with scales of blocks on Hopper, a weight for each expert",
    params=tuple(p for p in _OF_BLOCKS.params if p.name != "residual"),
    derive=lambda params: {
        **_OF_BLOCKS.derive(_whole(params)), "residual": False, "groups": "ROWS",
    },
    illegal=lambda params: _OF_BLOCKS.illegal(_whole(params)),
    shared_layout=lambda params: (_OF_BLOCKS.shared_layout or (lambda p: []))(_whole(params)),
    shared_bytes=lambda params: _OF_BLOCKS.shared_bytes(_whole(params)),
    block=lambda params: _OF_BLOCKS.block(_whole(params)),
    verification="fkjit.ops.grouped.cases_codes:BLOCKS",
)  # fmt: skip
_WIDE = {**_PLAIN, "coded": False, "block": (128, 256)}
_WIDE_SWIGLU = {**_WIDE, "activation": "silu", "gate": True}
BLOCKS: KernelSpec = register(
    replace(
        BLOCKS_ALL,
        ahead=[
            _WIDE,
            {**_WIDE_SWIGLU, "coded": True},
            {**_WIDE_SWIGLU, "block": (128, 128)},
            {**_WIDE, "block": (128, 128), "dtype": "fp16", "out_dtype": "fp32"},
        ],
    )
)
