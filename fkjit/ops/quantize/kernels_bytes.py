"""The kernels of products of codes with codes: e4m3 with e4m3, int8 with int8.

`interval`: after how many steps of 128 of k e4m3 sums leave the tensor core, which adds with fewer
bits than fp32 has, and are added up in fp32; 0: when all is summed. Of blocks each step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fkjit.ops.gemm import epilogue
from fkjit.ops.quantize import product
from fkjit.ops.quantize.product import CONTRACT, DTYPES, SMS, illegal_dtypes
from fkjit.runtime.tensor_map import TensorMap
from fkjit.spec import Dim3, KernelSpec, Param, Params, Problem, SharedLayout, register

BLOCK_K = 128  # of a step, in codes and bytes
INTERVALS = (0, 1, 2, 4, 8)
_INTERVAL = 4  # of a call: 512 of k, between DeepSeek's 128 and no promotion at all
_MAX_SHARED = 232_448  # bytes a block may have on sm_90
_MAX_STAGES = 8
_GROUP_ROWS = 2048  # rows of x whose tiles are taken together
_PARAMS = (
    *DTYPES,
    Param("code", ("fp8", "int8"), "codes of x and weight: e4m3 or int8"),
    Param("scales", ("rows", "blocks"), "of rows or a tensor; of 128 columns, 128 by 128"),
    *epilogue.PARAMS,
    Param("residual", (False, True), "a residual is added to what the activation gives"),
    Param("interval", INTERVALS, "steps of 128 of k that tensor cores sum; 0: all"),
)


def _illegal(params: Params) -> str | None:
    if params["code"] == "int8" and (params["scales"], params["interval"]) != ("rows", 0):
        return "has exact sums of int8, with scales of rows"
    if params["scales"] == "blocks" and params["interval"] != 1:
        return "has scales of 128 of k, so sums of as many"
    return illegal_dtypes(params)


def _columns(params: Params) -> int:
    """Of out, in a tile."""
    return params["block"][1] // (2 if params["gate"] else 1)


def _values(params: Params) -> dict[str, Any]:
    return {
        **epilogue.values(params["activation"]),
        "block_m": params["block"][0], "block_n": params["block"][1],
        "blocks": params["scales"] == "blocks", "exact": params["code"] == "int8",
    }  # fmt: skip


def _arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    rows = params["block"][0] * params.get("cluster", 1)
    return {
        **product.arguments(params, problem, arrays),
        "out_scales": arrays.get("out_scales"),
        "x_scale_step": int(problem["x_span"] != "tensor"),
        "scale_step": int(problem["span"] != "tensor"),
        "group_rows": max(_GROUP_ROWS // rows, 1),
    }


def _ahead(spec: KernelSpec, shown: list[Mapping[str, Any]]) -> KernelSpec:
    names = [param.name for param in spec.params]
    ahead = [{**_PLAIN, **more} for more in shown]
    return register(replace(spec, ahead=[{n: made[n] for n in names} for made in ahead]))


_PLAIN: Mapping[str, Any] = {
    "dtype": "bf16", "out_dtype": "bf16", "code": "fp8", "scales": "rows", "activation": "none",
    "gate": False, "residual": False, "interval": _INTERVAL, "block": (128, 128), "cluster": 1,
    "schedule": "cooperative",
}  # fmt: skip
_INT8 = {"code": "int8", "interval": 0}
_BLOCKS = {"scales": "blocks", "interval": 1}
_SWIGLU = {"activation": "silu", "gate": True, "residual": True}
_FINE = {"dtype": "fp16", "out_dtype": "fp32"}

# ------------------------------------------------------------------ wgmma

Variant = tuple[int, int]
_SCHEDULES = ("cooperative", "pingpong")
_TILES: tuple[Variant, ...] = ((128, 128), (192, 128), (128, 256), (256, 128))


def _stages(params: Params) -> int:
    each = sum(params["block"]) * BLOCK_K
    return min((_MAX_SHARED - 16 * _MAX_STAGES) // each, _MAX_STAGES)


def _consumers(params: Params) -> int:
    """Warpgroups that multiply."""
    if params["schedule"] == "pingpong" or params["block"][0] == 256:
        return 2
    return int(params["block"][0] // 64)


def _wgmma_illegal(params: Params) -> str | None:
    if params["schedule"] == "pingpong" and (params["interval"] or params["block"] != (128, 128)):
        return "has consumers in turns for tiles of 128 x 128 without promotion"
    if params["block"][0] == 256 and (params["scales"] != "blocks" or params["cluster"] > 1):
        return "has two blocks of 64 rows a consumer for scales of blocks, in single blocks"
    if params["block"][0] == 256 and params["gate"] and params["residual"]:
        return "has no registers for a gate and a residual beside so many sums"
    if params["block"][1] > 128 and params["interval"] > 0:
        return "has no registers for the sums of tensor cores and all others"
    return _illegal(params)


def _wgmma_shared(params: Params) -> SharedLayout:
    sides, count = dict(zip(("x", "weight"), params["block"], strict=True)), _stages(params)
    tiles = [(f"{side} stage {stage}", sides[side] * BLOCK_K) for side in sides
             for stage in range(count)]  # fmt: skip
    return [*tiles, ("mbarriers", 16 * count)]


def _wgmma_grid(params: Params, problem: Problem) -> Dim3:
    cluster = params["cluster"]
    rows = -(-problem["m"] // (params["block"][0] * cluster))
    tiles = rows * -(-problem["n"] // _columns(params))
    slots = max(problem.get("multiprocessors", SMS) // cluster, 1)
    return (cluster * min(tiles, slots), 1, 1)


def _maps(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    (rows, outputs), k = params["block"], problem["k"]
    halves = params["gate"] or params["cluster"] > 1
    wide = problem["n"] * (2 if params["gate"] else 1)
    boxes = {"x": (problem["m"], rows), "weight": (wide, outputs // (2 if halves else 1))}
    maps = {
        f"{name}_map": TensorMap(
            arrays[name], "u8", (k, count, 1, 1), (k, 0, 0), (BLOCK_K, box, 1, 1)
        )
        for name, (count, box) in boxes.items()
    }
    return {**_arguments(params, problem, arrays), **maps}


# All that a call may take.
WGMMA = KernelSpec(
    **{
        **CONTRACT,
        "name": "wgmma",
        "source": "quantize/wgmma.cu",
        "entry": "quantized_wgmma",
        "doc": "codes with codes on Hopper: TMA, wgmma of bytes, sums promoted to fp32",
        "params": (
            *_PARAMS,
            Param("block", _TILES, "rows of x and of weight in a tile", tunable=True),
            Param("cluster", (1, 2), "blocks that share a tile of the weight", tunable=True),
            Param("schedule", _SCHEDULES, "how consumers share tiles", tunable=True),
        ),
        "derive": lambda params: {
            **_values(params), "stages": _stages(params),
            "pingpong": params["schedule"] == "pingpong",
            "sum": "int" if params["code"] == "int8" else "float", "groups": "NONE",
        },
        "illegal": _wgmma_illegal,
        "features": lambda params: frozenset({"wgmma"}),
        "shared_layout": _wgmma_shared,
        "block": lambda params: (128 * (1 + _consumers(params)), 1, 1),
        "grid": _wgmma_grid,
        "arguments": _maps,
        "verification": "fkjit.ops.quantize.cases_bytes:BYTES",
    }
)  # fmt: skip
WGMMA_AHEAD = _ahead(
    WGMMA,
    [
        {"cluster": 2},
        {"block": (192, 128)},
        {**_BLOCKS, **_SWIGLU, "cluster": 2},
        {**_BLOCKS, "block": (256, 128)},
        {**_INT8, **_FINE, "block": (128, 256), "activation": "gelu_tanh"},
        {"interval": 0, "cluster": 2, "schedule": "pingpong"},
        {**_INT8, **_SWIGLU, "schedule": "pingpong"},
    ],
)

# ------------------------------------------------------------------ mma

_MMA_TILES: tuple[Variant, ...] = ((128, 128), (64, 128))
# Rows and outputs of a warp: fewer where scales stand beside both kinds of sums.
_WARP = {"rows": (32, 64), "blocks": (16, 64)}
_MMA_STAGES = 3


def _mma_shared(params: Params) -> SharedLayout:
    sides = zip(("x", "weight"), params["block"], strict=True)
    each = [(name, size * BLOCK_K) for name, size in sides]
    return [(f"{name} stage {i}", size) for i in range(_MMA_STAGES) for name, size in each]


def _mma_grid(params: Params, problem: Problem) -> Dim3:
    rows = -(-problem["m"] // params["block"][0])
    return (rows * -(-problem["n"] // _columns(params)), 1, 1)


def _mma_threads(params: Params) -> Dim3:
    (rows, outputs), (warp_m, warp_n) = params["block"], _WARP[params["scales"]]
    return (32 * (rows // warp_m) * (outputs // warp_n), 1, 1)


MMA = KernelSpec(
    **{
        **CONTRACT,
        "name": "mma",
        "source": "quantize/mma.cu",
        "entry": "quantized_mma",
        "doc": "codes with codes by mma.sync: e4m3 from sm_89, int8 from sm_80 on",
        "params": (
            *_PARAMS,
            Param("block", _MMA_TILES, "rows of x and of weight in a tile", tunable=True),
        ),
        "derive": lambda params: {
            **_values(params), "stages": _MMA_STAGES,
            **dict(zip(("warp_m", "warp_n"), _WARP[params["scales"]], strict=True)),
            "pair": "i8_pair" if params["code"] == "int8" else "e4m3_pair",
        },
        "illegal": _illegal,
        "features": lambda params: frozenset(
            {"cp_async", "ldmatrix", "fp8_mma" if params["code"] == "fp8" else "bf16_mma"}
        ),
        # Hopper's mma.sync has no e4m3: it is made of products of fp16.
        "superseded": lambda params: frozenset({"wgmma"} if params["code"] == "fp8" else ()),
        "shared_layout": _mma_shared,
        "block": _mma_threads,
        "grid": _mma_grid,
        "arguments": _arguments,
        "verification": "fkjit.ops.quantize.cases_bytes:BYTES",
    }
)  # fmt: skip
MMA_AHEAD = _ahead(
    MMA,
    [
        {},
        {**_BLOCKS, **_SWIGLU, "block": (64, 128)},
        {**_INT8},
        {**_INT8, **_SWIGLU, **_FINE, "block": (64, 128)},
    ],
)


# Measured on an H200 (bench/notes/quantize.md): 192 x 128 was the fastest at 8192^3, and as fast as
# 128 x 128 at 4096^3; with block scales 256 x 128 at 4096 x 7168 x 16384.
_MANY_ROWS = 1024
# Where sums need no promotion, consumers in turns are faster by 7 % (e4m3) and 2 % (int8).
_TURNS = 2  # tiles for each multiprocessor, at least


def _tiles(problem: Problem) -> int:
    """Of 128 by 128."""
    wide = problem["n"] * (2 if problem["gate"] else 1)
    return -(-problem["m"] // 128) * -(-wide // 128)


def choose(problem: Problem, wgmma: bool) -> tuple[KernelSpec, dict[str, Any], tuple[int, int]]:
    """The kernel, its parameters and scratch memory."""
    spec = WGMMA if wgmma else MMA
    blocks = problem["span"] == "block"
    exact = problem["code"] == "int8" or problem.get("short", False)  # or as good as that
    fixed = {
        **{name: problem[name] for name in ("dtype", "out_dtype", "code", "activation", "gate")},
        "scales": "blocks" if blocks else "rows", "residual": problem["residual"],
        "interval": 0 if exact else 1 if blocks else _INTERVAL,
    }  # fmt: skip
    cluster = 2 if problem["m"] > 128 else 1
    tile = {"block": (128, 128), "cluster": cluster, "schedule": "cooperative"}
    if exact and _tiles(problem) >= _TURNS * problem.get("multiprocessors", SMS):
        tile["schedule"] = "pingpong"
    elif problem["m"] >= _MANY_ROWS:
        tall = blocks and not (problem["gate"] and problem["residual"])
        cluster = 2 if blocks and not tall else 1
        tile = {**tile, "block": (256 if tall else 192, 128), "cluster": cluster}
    if not wgmma:
        tile = {"block": (128 if problem["m"] > 64 else 64, 128)}
    return epilogue.kernel_for(spec, problem["activation"]), {**fixed, **tile}, (0, 0)
