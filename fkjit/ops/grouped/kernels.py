"""Grouped products: the kernels of `linear` with a weight, or an output, for each expert.

    ROWS    out[rows of e] = act(x[rows of e] weight[e]^T + bias[e])   x sorted by expert, in tiles
    MASKED  the same                                                   x [experts, capacity, k]
    DEPTH   out[e] = x[rows of e]^T weight[rows of e]                  gradients of the weights

A problem has what linear's have (fkjit/ops/gemm/problem.py), with m (DEPTH: k) the places that
there is room for; `groups`, one of these; `experts`; and `block_size`, of which each expert's
places are a multiple. The weight is [experts, n, k] or [experts, k, n]; of DEPTH out is [experts,
m, n].

Arrays: those of linear; offsets, int32 [experts + 1]: experts' first places, and where the last
ones end; of MASKED [experts], how many rows of each expert there are. With `gather` x is
[tokens, k], and sorted_token_ids [m] says token * top_k + choice of each place, or tokens * top_k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fkjit.ops.gemm import kernels_sm90 as sm90
from fkjit.ops.gemm import problem as gemm
from fkjit.ops.gemm.kernels_mma import FMA_ALL, MMA_ALL, blocks_of
from fkjit.ops.gemm.problem import outputs_of
from fkjit.runtime.interop import ITEMSIZE
from fkjit.runtime.tensor_map import TensorMap
from fkjit.spec import Dim3, KernelSpec, Param, Params, Problem, Work, register

GROUPS = ("ROWS", "MASKED", "DEPTH")
LEAST_BLOCK = 64  # rows of the smallest tile: of it experts' places have to be a multiple
_GROUP_ROWS = 512  # rows of an expert whose tiles are taken together
_FIXED: Mapping[str, Any] = {
    "residual": False, "cluster": 1, "split": 1, "shares": False, "long_k": False,
}  # fmt: skip
# The tiles for Hopper, by schedule.
TILES: dict[tuple[int, int], str] = {
    (64, 64): "pingpong", (64, 128): "pingpong", (64, 256): "pingpong",
    (128, 64): "pingpong", (128, 128): "pingpong", (128, 256): "cooperative",
}  # fmt: skip


def of_k(params: Params) -> bool:
    """Whether experts share k, and each has an output."""
    return params["groups"] == "DEPTH"


def _whole(params: Params) -> dict[str, Any]:
    """The parameters that linear's kernel has."""
    schedule = {"schedule": TILES[params["block"]]} if params["block"] in TILES else {}
    return {**params, **_FIXED, **schedule}


def _derive(spec: KernelSpec) -> Any:
    def derived(params: Params) -> dict[str, Any]:
        whole = _whole(params)
        own = {"groups": params["groups"], "gather": params.get("gather", False)}
        return {**_FIXED, **spec.derive(whole), **own}

    return derived


def _illegal(spec: KernelSpec) -> Any:
    def reason(params: Params) -> str | None:
        layouts = params["x_layout"], params["weight_layout"]
        if of_k(params):
            if layouts != ("km", "kn"):
                return "has no DEPTH of operands that do not lie [k, …]"
            if (params["activation"], params["gate"], params["pre"]) != ("none", False, False):
                return "has no epilogue beside DEPTH"
        elif layouts[0] != "mk":
            return "has no rows of experts in an x whose rows are not contiguous"
        return spec.illegal(_whole(params))

    return reason


# ------------------------------------------------------------------ what all have


def flops(problem: Problem) -> float:
    """Of all places."""
    return gemm.flops(problem)


def traffic(problem: Problem) -> float:
    """Bytes of every expert's weight, of x and of out, once."""
    m, n, k, wide = problem["m"], problem["n"], problem["k"], outputs_of(problem)
    deep = problem["groups"] == "DEPTH"
    item, out = ITEMSIZE[problem["dtype"]], ITEMSIZE[problem["out_dtype"]]
    weights = 1 if deep else problem["experts"]
    outputs = problem["experts"] if deep else 1
    return float(item * (m * k + weights * wide * k) + out * outputs * m * n)


def _owned(problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments beside those of linear."""
    return {"offsets": arrays["offsets"], "experts": problem["experts"]}


def _outputs(params: Params, problem: Problem) -> int:
    return problem["experts"] if of_k(params) else 1


def _portable_arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> Any:
    return {**gemm.arguments(params, problem, arrays), **_owned(problem, arrays)}


def _portable_grid(params: Params, problem: Problem) -> Dim3:
    tiles = blocks_of(params["block"], params["gate"], problem["m"], problem["n"])
    return (tiles * _outputs(params, problem), 1, 1)


def _params(spec: KernelSpec, without: Sequence[str] = ()) -> tuple[Param, ...]:
    kept = [p for p in spec.params if p.name not in {*_FIXED, "schedule", *without}]
    how = Param("groups", GROUPS, "what is sorted by expert: rows of x, or k")
    return (*kept[:2], how, *kept[2:])


def _grouped(spec: KernelSpec, **fields: Any) -> KernelSpec:
    """linear's kernel as a grouped one."""
    made = {
        "op": "grouped_linear",
        "doc": f"{spec.name} of linear with a weight, or an output, for each expert",
        "params": _params(spec),
        "derive": _derive(spec),
        "illegal": _illegal(spec),
        "features": lambda params: spec.features(_whole(params)),
        "superseded": lambda params: spec.superseded(_whole(params)),
        "shared_layout": lambda params: (spec.shared_layout or (lambda p: []))(_whole(params)),
        "shared_bytes": lambda params: spec.shared_bytes(_whole(params)),
        "block": lambda params: spec.block(_whole(params)),
        "arguments": _portable_arguments,
        "grid": _portable_grid,
        "shape_class": lambda p: {
            **gemm.shape_class(p), **{n: p[n] for n in ("groups", "experts", "block_size")}
        },
        "work": Work(flops=flops, bytes=traffic, interpreter_flops=2e8),
        "verification": "fkjit.ops.grouped.cases:GROUPED",
        **fields,
    }  # fmt: skip
    return replace(spec, **made)


# ------------------------------------------------------------------ Hopper


def _tiles(params: Params, problem: Problem) -> int:
    """At most: as many as if each were half."""
    return 2 * sm90.tiles_of(_whole(params), problem) * _outputs(params, problem)


def _wgmma_arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> Any:
    """Those of linear; maps of the weights, or of the outputs, of all experts."""
    named = dict(sm90.WGMMA_ALL.arguments(_whole(params), problem, arrays))
    named |= _owned(problem, arrays)
    rows = params["block"][0]
    named["group_rows"] = max(_GROUP_ROWS // rows, 1)
    if params["gather"]:
        del named["x_map"], named["x_map_last"]
        named |= {name: problem[name] for name in ("tokens", "top_k")}
        named["sorted_token_ids"] = arrays["sorted_token_ids"]
    if of_k(params):
        if "out_map" in named:
            rows = problem["experts"] * problem["m"]
            named["out_map"] = replace(named["out_map"], dims=(problem["n"], rows, 1, 1))
        return named
    if not params["gather"]:
        box = named["x_map"].box  # the last tile of an expert may be half
        half = (problem["block_size"] - 1) % rows + 1
        named["x_map_last"] = replace(named["x_map"], box=(box[0], half, *box[2:]))
    for name in ("weight_map", "weight_map_last"):
        named[name] = of_experts(named[name], problem["experts"])
    return named


def of_experts(one: TensorMap, experts: int) -> TensorMap:
    """The map of a matrix as that of so many, one behind the other."""
    apart = one.strides[0] * one.dims[1]
    return replace(one, dims=(*one.dims[:2], experts, 1), strides=(one.strides[0], apart, 0))


def _wgmma_illegal(params: Params) -> str | None:
    if params["gather"] and (params["groups"] != "ROWS" or params["pre"]):
        return "gathers rows by expert, without anything kept for gradients"
    return None if params["block"] in TILES else "is no tile of experts"


def _wgmma_reason(params: Params) -> str | None:
    return _wgmma_illegal(params) or _illegal(sm90.WGMMA_ALL)(params)


def _sizes(params: tuple[Param, ...], tiles: Sequence[Any]) -> tuple[Param, ...]:
    return tuple(replace(p, values=tuple(tiles)) if p.name == "block" else p for p in params)


WGMMA_ALL = _grouped(
    sm90.WGMMA_ALL,
    params=(
        *_sizes(_params(sm90.WGMMA_ALL), tuple(TILES)),
        Param("gather", (False, True), "x has rows of tokens, which places name"),
    ),
    illegal=_wgmma_reason,
    arguments=_wgmma_arguments,
    grid=lambda params, problem: (
        max(min(_tiles(params, problem), problem.get("multiprocessors", sm90.SMS)), 1), 1, 1,
    ),
)  # fmt: skip
MMA_ALL_GROUPED = _grouped(MMA_ALL)
FMA_ALL_GROUPED = _grouped(FMA_ALL)

# ------------------------------------------------------------------ what is compiled ahead

_PLAIN = {
    "x_layout": "mk",
    "weight_layout": "nk",
    "activation": "none",
    "gate": False,
    "pre": False,
}
_ROWS = {**_PLAIN, "groups": "ROWS"}
_MASKED = {**_PLAIN, "groups": "MASKED"}
_DEPTH = {**_PLAIN, "groups": "DEPTH", "x_layout": "km", "weight_layout": "kn"}
_BF16 = {"dtype": "bf16", "out_dtype": "bf16"}
_SWIGLU = {"activation": "silu", "gate": True}

_SM90 = {**_BF16, "tma_store": True, "gather": False}
WGMMA = register(
    replace(
        WGMMA_ALL,
        ahead=[
            *({**_SM90, **_ROWS, "block": block} for block in TILES),
            {**_SM90, **_ROWS, **_SWIGLU, "block": (64, 256)},
            {**_SM90, **_ROWS, **_SWIGLU, "block": (128, 256), "pre": True},
            {**_SM90, **_ROWS, "block": (128, 128), "weight_layout": "kn"},
            {**_SM90, **_ROWS, "tma_store": False, "block": (64, 64), "activation": "gelu"},
            {**_SM90, **_MASKED, **_SWIGLU, "block": (128, 128)},
            *({**_SM90, **_ROWS, **_SWIGLU, "block": block, "gather": True}
              for block in ((64, 256), (128, 128), (128, 256))),
            *({**_SM90, **_DEPTH, "block": block} for block in ((128, 256), (128, 128))),
        ],
    )
)  # fmt: skip
_MMA = {**_BF16, "aligned": True, "mma_k": 16, "block": (64, 128, 64)}
MMA = register(
    replace(
        MMA_ALL_GROUPED,
        ahead=[
            {**_MMA, **_ROWS, **_SWIGLU, "pre": True},
            {**_MMA, **_ROWS, "weight_layout": "kn", "block": (64, 64, 64)},
            {**_MMA, **_MASKED},
            {**_MMA, **_DEPTH},
            {**_MMA, **_ROWS, "aligned": False, "block": (64, 64, 32), "activation": "gelu_tanh"},
            {**_MMA, **_ROWS, **_SWIGLU, "aligned": False, "block": (64, 128, 32)},
            {**_MMA, **_DEPTH, "aligned": False, "block": (64, 64, 32)},
            {**_MMA, **_ROWS, "dtype": "fp16", "out_dtype": "fp16", "mma_k": 8,
             "block": (64, 64, 32)},
        ],
    )
)  # fmt: skip
_FMA = {"dtype": "fp32", "aligned": True, "block": (64, 64, 16)}
FMA = register(
    replace(
        FMA_ALL_GROUPED,
        ahead=[
            {**_FMA, **_ROWS, **_SWIGLU, "pre": True},
            {**_FMA, **_ROWS, "weight_layout": "kn"},
            {**_FMA, **_DEPTH, "aligned": False},
        ],
    )
)
