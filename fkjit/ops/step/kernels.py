"""Launches of a decode step of up to eight tokens: a norm and the product behind it in one, with an
activation, or with RoPE and the append to a paged KV cache.

A problem has m, n, k (of the product; with a gate the weight has 2 n rows), dtype, x_stride,
weight_stride (elements), norm ("rms" or "layer"), eps, bias; of `normed_linear` also activation,
gate and out_stride; of `normed_append` heads_q, heads_kv, head_dim, rope, position_words,
table_rows, and of the cache num_pages, page_size, k_pages, v_pages (steps from page to page, head
to head, token to token).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fkjit.ops.gemm import epilogue
from fkjit.runtime.interop import ITEMSIZE
from fkjit.spec import Dim3, KernelSpec, Param, Params, Problem, Work, register, size_class

ROWS = 8  # of x, at most
VECTOR = 8  # elements of 16 bytes
_ROW_GAP = 32  # elements between normalised rows, as templates/step/normed_rows.cuh has it
_ROOMS = (8, 16, 32, 64, 88)  # KB of shared memory for these rows; sums take up to 8 more of 99
_TILES = ((16, 8, 4), (32, 8, 2))  # rows of the weight, warps, spans of a warp under way

_NONE = dict.fromkeys(("bias", "norm_bias", "positions", "table"))  # arrays that may be missing
_PARAMS = (
    Param("dtype", ("bf16", "fp16"), "element type of all arrays"),
    Param("norm", ("rms", "layer"), "RMSNorm or LayerNorm"),
)
_FREE = (
    Param("room", _ROOMS, "KB of shared memory for the normalised rows"),
    Param("tile", _TILES, "rows of the weight, warps, spans of a warp under way", tunable=True),
)


def room_for(m: int, k: int) -> int | None:
    """KB for so many rows; None where there is no room."""
    needed = m * (k + _ROW_GAP) * 2
    return next((room for room in _ROOMS if room << 10 >= needed), None)


def _outputs(params: Params) -> int:
    """Columns of out that a block has; with two halves, of either."""
    halved = "rope" in params or params["gate"]
    return params["tile"][0] // (2 if halved else 1)


def _derive(params: Params) -> dict[str, Any]:
    (rows, warps, unroll), append = params["tile"], "rope" in params
    return {
        **epilogue.values("none" if append else params["activation"]),
        "centered": params["norm"] == "layer",
        **{"append": append, "rope": params.get("rope", False), "gate": params.get("gate", False)},
        **{"tile_rows": rows, "warps": warps, "unroll": unroll, "resident": 16 // warps},
    }


def _arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    names = ("m", "n", "k", "x_stride", "weight_stride", "eps")
    return {**_NONE, **arrays, **{name: problem[name] for name in names}}


def _linear_arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> Any:
    return {**_arguments(params, problem, arrays), "out_stride": problem["out_stride"]}


def append_arguments(problem: Problem) -> dict[str, Any]:
    """What QkvAppend (templates/step/qkv_append.cuh) is told of a problem."""
    steps = {
        f"{side}_{name}_step": step
        for side in "kv"
        for name, step in zip(("page", "head", "token"), problem[f"{side}_pages"], strict=True)
    }
    names = ("position_words", "table_rows", "heads_q", "heads_kv", "head_dim")
    return {
        **steps,
        **{name: problem[name] for name in names},
        "num_slots": problem["num_pages"] * problem["page_size"],
        "page_log2": problem["page_size"].bit_length() - 1,
    }


def _append_arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> Any:
    return {**_arguments(params, problem, arrays), **append_arguments(problem)}


def _grid(params: Params, problem: Problem) -> Dim3:
    tile = params["tile"][0] if "rope" in params else _outputs(params)
    return (-(-problem["n"] // tile), 1, 1)


def flops(problem: Problem) -> float:
    """Of a product, with a gate of two."""
    return 2.0 * problem["m"] * problem["n"] * problem["k"] * (2 if problem.get("gate") else 1)


def moved(problem: Problem) -> float:
    """Of the weight, x and what comes out."""
    wide = problem["n"] * (2 if problem.get("gate") else 1)
    elements = wide * problem["k"] + problem["m"] * (problem["k"] + problem["n"])
    return float(ITEMSIZE[problem["dtype"]] * elements)


_COMMON: Mapping[str, Any] = {
    "name": "gemv",
    "source": "step/normed_gemv.cu",
    "entry": "step_normed_gemv",
    "pdl": True,
    "derive": _derive,
    "features": lambda params: frozenset({"bf16_mma"}),
    "shared_bytes": lambda params: params["room"] << 10,
    "block": lambda params: (32 * params["tile"][1], 1, 1),
    "grid": _grid,
    "shape_class": lambda p: {"m": size_class(p["m"], ROWS), "n": p["n"], "k": p["k"]},
    "work": Work(flops=flops, bytes=moved, interpreter_flops=2e8),
}


def _linear_illegal(params: Params) -> str | None:
    if (params["activation"], params["gate"]) not in epilogue.SHIPPED:
        return "has no such epilogue"
    return None


def _few(illegal: Any) -> Any:
    """What is compiled ahead: the first tile, type and room with every feature, and each of the
    others with none."""

    def refused(params: Params) -> str | None:
        special = params["dtype"] != "bf16", params["tile"] != _TILES[0], params["room"] != 8
        plain = params["norm"] == "rms" and not params.get("gate") and params.get("rope", True)
        plain = plain and params.get("activation", "none") == "none"
        if sum(special) > (1 if plain else 0):
            return "is compiled when called"
        return illegal(params)

    return refused


def _spec(op: str, **fields: Any) -> KernelSpec:
    return KernelSpec(**{**_COMMON, "op": op, **fields})


# Every variant that a call may take; what is registered is fewer.
LINEAR_FIELDS: dict[str, Any] = {
    "doc": "up to eight rows: norm, product and activation",
    "params": (*_PARAMS, *epilogue.PARAMS, *_FREE),
    "arguments": _linear_arguments,
    "verification": "fkjit.ops.step.cases:LINEAR",
}
APPEND_FIELDS: dict[str, Any] = {
    "doc": "up to eight rows: norm, the product for q, k and v, RoPE, k and v to a paged KV cache",
    "params": (
        *_PARAMS, Param("rope", (True, False), "whether q and k turn by their positions"), *_FREE,
    ),
    "arguments": _append_arguments,
    "verification": "fkjit.ops.step.cases:APPEND",
}  # fmt: skip
LINEAR = _spec("normed_linear", illegal=_linear_illegal, **LINEAR_FIELDS)
APPEND = _spec("normed_append", **APPEND_FIELDS)
register(_spec("normed_linear", illegal=_few(_linear_illegal), **LINEAR_FIELDS))
register(_spec("normed_append", illegal=_few(lambda params: None), **APPEND_FIELDS))
