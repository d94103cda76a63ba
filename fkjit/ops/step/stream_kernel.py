"""Products of a decode step of up to 64 sequences on Hopper, whose weight comes before the previous
kernel is over.

A problem has m, n, k (with a gate the weight has 2 n rows), dtype, x_stride, weight_stride
(elements), bias, activation, gate, and of `streamed_linear` residual, residual_stride, out_stride,
parts, eps; of `streamed_append` what `normed_append` has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fkjit.ops.gemm import epilogue
from fkjit.ops.step.kernels import append_arguments, flops, moved
from fkjit.runtime.tensor_map import TensorMap
from fkjit.spec import (
    KernelSpec,
    Param,
    Params,
    Problem,
    SharedLayout,
    Work,
    register,
    size_class,
)

TOKENS = (16, 32, 48, 64, 80)  # there is room for; with LayerNorm 16 of them are its own
BLOCK_K = 64  # of a stage
_WARPS = 6  # four that multiply, two that fetch; one more for a norm's factors
_NARROW, _WIDE = 64, 128  # rows of the weight in a tile
CLUSTERS = (1, 2, 4, 8)
# KB of shared memory for the weight, and for x beside it: two blocks of an SM, or one.
_ROOMS = {80: 32, 64: 48, 176: 32}
HALF, EVEN, WHOLE = _ROOMS
_X_STAGES = 4  # of x at least, where there is room
Tile = tuple[int, int, int]
TILES: tuple[Tile, ...] = tuple(
    (rows, cluster, room)
    for room in _ROOMS for rows in (_NARROW, _WIDE) for cluster in CLUSTERS
)  # fmt: skip

NORMS = ("none", "rms", "layer")
_FREE = (
    Param("tokens", TOKENS, "what rows of x are padded to"),
    Param("norm", NORMS, "of x, which is times the norm's weight"),
    Param("tile", TILES, "rows of the weight, blocks that share its k, KB for it", tunable=True),
)
_DTYPE = Param("dtype", ("bf16", "fp16"), "element type of all arrays")


def parts_bytes(params: Params) -> int:
    """Of shared memory for sums of the blocks that share k."""
    (rows, cluster, _), tokens = params["tile"], params["tokens"]
    if cluster == 1:
        return 0
    behind = 2 if params["norm"] == "layer" else 0
    return 4 * rows * cluster * ((tokens - 8 * behind) // cluster + behind)


def stages(params: Params) -> tuple[int, int]:
    """Of the weight, and of x. What comes from other blocks takes its room from x as long as that
    has some stages left, then from the weight."""
    rows, _, room = params["tile"]
    of_weight, of_x = (BLOCK_K * 2 * count for count in (rows, params["tokens"]))  # bytes
    weight, x = (room << 10) // of_weight, (_ROOMS[room] << 10) // of_x
    left = (room + _ROOMS[room] << 10) - parts_bytes(params)
    weight = min(weight, (left - min(x, _X_STAGES) * of_x) // of_weight)
    return weight, min(x, (left - weight * of_weight) // of_x)


def _outputs(params: Params) -> int:
    """Columns of out that a tile has."""
    return params["tile"][0] // (2 if params.get("gate") else 1)


def tiles(params: Params, problem: Problem) -> int:
    """Tiles of a problem."""
    return -(-problem["n"] // _outputs(params))


def _shared(params: Params) -> SharedLayout:
    of_weight, of_x = stages(params)
    rows, tokens = params["tile"][0], params["tokens"]
    parts = [
        ("weight", of_weight * rows * BLOCK_K * 2), ("x", of_x * tokens * BLOCK_K * 2),
        ("parts", parts_bytes(params)), ("mbarriers", 16 * (of_weight + of_x + 1)),
        ("factors", 8 * tokens),
    ]  # fmt: skip
    return [part for part in parts if part[1]]


def _derive(params: Params) -> dict[str, Any]:
    append = "rope" in params
    of_weight, of_x = stages(params)
    return {
        **epilogue.values(params.get("activation", "none")),
        **{"append": append, "rope": params.get("rope", False), "gate": params.get("gate", False)},
        "leaves": params.get("leaves", "none"), "head": params.get("head", False),
        "rows": params["tile"][0],
        "cluster": params["tile"][1], "weight_stages": of_weight, "x_stages": of_x,
    }  # fmt: skip


def _maps(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    m, k, part = problem["m"], problem["k"], _outputs(params)
    wide, rows = problem["n"] * (2 if params.get("gate") else 1), -(-m // 8) * 8

    def made(name: str, count: int, box: int) -> TensorMap:
        step = 2 * problem[f"{name}_stride"]
        return TensorMap(
            arrays[name], params["dtype"], (k, count, 1, 1), (step, 0, 0), (BLOCK_K, box, 1, 1)
        )

    found = {"weight_map": made("weight", wide, part), "x_map": made("x", m, rows)}
    if params["norm"] == "layer":
        for name, array in (("norm_map", "x_weight"), ("norm_bias_map", "x_bias")):
            found[name] = TensorMap(
                arrays[array], params["dtype"], (k, 1, 1, 1), (2 * k, 0, 0), (BLOCK_K, 1, 1, 1)
            )
    return {**found, "x_rows": rows}


def _arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    names = ("m", "n", "k", "parts", "eps", "residual_stride", "out_stride")
    none = dict.fromkeys(("bias", "residual", "positions", "table"))
    said = {name: problem[name] for name in names if name in problem}
    return {**none, **arrays, **said, **_maps(params, problem, arrays)}


def _append_arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> Any:
    return {**_arguments(params, problem, arrays), **append_arguments(problem)}


def _illegal(params: Params) -> str | None:
    rows, tokens = params["tile"][0], params["tokens"]
    if (params["activation"], params["gate"]) not in epilogue.SHIPPED:
        return "has no such epilogue"
    if params["leaves"] != "none" and (params["gate"] or params["activation"] != "none"):
        return "has no norm behind an activation"
    return _no_room(rows, tokens)


def _no_room(rows: int, tokens: int) -> str | None:
    return "has more sums than there is room for" if rows * tokens > _WIDE * TOKENS[-1] else None


_COMMON: Mapping[str, Any] = {
    "name": "stream",
    "source": "step/stream.cu",
    "entry": "step_stream",
    "pdl": True,
    "derive": _derive,
    "features": lambda params: frozenset({"wgmma"}),
    "shared_layout": _shared,
    "block": lambda params: (32 * (_WARPS + (params["norm"] != "none")), 1, 1),
    "grid": lambda params, problem: (params["tile"][1] * tiles(params, problem), 1, 1),
    "shape_class": lambda p: {"m": size_class(p["m"], TOKENS[-1]), "n": p["n"], "k": p["k"]},
    "work": Work(flops=flops, bytes=moved, interpreter_flops=2e8),
}
_PLAIN: Mapping[str, Any] = {"dtype": "bf16", "tokens": 16, "norm": "none", "tile": (64, 4, HALF)}
_LINEAR_PLAIN = {**_PLAIN, "activation": "none", "gate": False, "leaves": "none"}
# What is compiled ahead: each feature, each kind of tile.
_LINEAR_AHEAD = tuple(
    {**_LINEAR_PLAIN, **more}
    for more in (
        {}, {"leaves": "rms", "tile": (64, 8, HALF)}, {"leaves": "rms", "tokens": 64},
        {"activation": "silu", "gate": True, "norm": "rms", "tile": (128, 1, HALF)},
        {"activation": "silu", "gate": True, "norm": "rms", "tile": (128, 1, WHOLE), "tokens": 64},
        {"activation": "gelu_tanh", "dtype": "fp16", "tokens": 32, "tile": (64, 2, HALF)},
        {"tokens": 48, "tile": (128, 2, HALF), "leaves": "layer"},
        {"tokens": 80, "norm": "layer", "activation": "gelu_tanh", "tile": (64, 2, HALF)},
    )
)  # fmt: skip
_APPEND_AHEAD = tuple(
    {**_PLAIN, "rope": True, **more}
    for more in (
        {"norm": "rms", "tile": (64, 2, HALF)}, {"rope": False, "tokens": 32, "norm": "layer"},
        {"dtype": "fp16", "tile": (128, 1, HALF)},
    )
)  # fmt: skip
_HEAD_AHEAD = (
    {**_PLAIN, "head": True, "norm": "rms", "tile": (128, 1, HALF)},
    {**_PLAIN, "head": True, "norm": "layer", "tokens": 32, "tile": (64, 1, HALF)},
)
LINEAR_FIELDS: dict[str, Any] = {
    **_COMMON,
    "op": "streamed_linear",
    "doc": "up to 64 rows: a product whose weight comes before the previous kernel is over",
    "params": (
        _DTYPE, *epilogue.PARAMS,
        Param("leaves", NORMS, "of out: moments of it, and the norm's weight times out, come too"),
        *_FREE,
    ),
    "arguments": _arguments,
    "illegal": _illegal,
    "verification": "fkjit.ops.step.stream_cases:LINEAR",
}  # fmt: skip
HEAD_FIELDS: dict[str, Any] = {
    **_COMMON,
    "op": "streamed_logits",
    "doc": "up to 64 rows: such a product with fp32 results, and the largest of each tile's",
    "params": (_DTYPE, Param("head", (True,), "results are logits"), *_FREE),
    "arguments": _arguments,
    "illegal": lambda params: _no_room(params["tile"][0], params["tokens"]),
    "verification": "fkjit.ops.step.stream_cases:HEAD",
}  # fmt: skip
APPEND_FIELDS: dict[str, Any] = {
    **_COMMON,
    "op": "streamed_append",
    "doc": "up to 64 rows: such a product for q, k and v, RoPE, k and v to a paged KV cache",
    "params": (
        _DTYPE, Param("rope", (True, False), "whether q and k turn by their positions"), *_FREE,
    ),
    "arguments": _append_arguments,
    "illegal": lambda params: _no_room(params["tile"][0], params["tokens"]),
    "verification": "fkjit.ops.step.stream_cases:APPEND",
}  # fmt: skip
LINEAR, HEAD, APPEND = (
    KernelSpec(**fields) for fields in (LINEAR_FIELDS, HEAD_FIELDS, APPEND_FIELDS)
)
register(KernelSpec(**LINEAR_FIELDS, ahead=_LINEAR_AHEAD))
register(KernelSpec(**HEAD_FIELDS, ahead=_HEAD_AHEAD))
register(KernelSpec(**APPEND_FIELDS, ahead=_APPEND_AHEAD))
