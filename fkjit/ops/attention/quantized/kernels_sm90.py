"""The kernel of `fkjit.quantized_attention` for Hopper (sm_90a): TMA and wgmma on codes.

Problems and arrays are those of `kernels.py`, and counters [1]. V of e4m3 is V^T, so its map's rows
are columns of V.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fkjit.ops.attention.kernels_sm90 import COUNTERS, MAX_SHARED, SMS
from fkjit.ops.attention.problem import (
    axes,
    flops,
    grid,
    padded_flops,
    row_strides,
    scalars,
    shape_class,
    window,
)
from fkjit.ops.attention.quantized.kernels import VALUES, packed_arguments, traffic
from fkjit.ops.attention.quantized.quantize_kernels import HEAD_DIMS, PACKED, ROWS, is_packed
from fkjit.runtime.tensor_map import TensorMap
from fkjit.spec import Dim3, KernelSpec, Param, Params, Problem, SharedLayout, Work, register

PROMOTE = (256, 512, 1024)  # keys whose sum leaves the tensor core, where any does
# Tiles of each head_dim: query rows and keys.
TILES: dict[int, tuple[tuple[int, int], ...]] = {
    64: ((192, 128), (192, 64)),
    128: ((192, 96), (128, 128), (128, 192)),
    256: ((128, 64),),
}
_REGISTERS = {2: (40, 232), 3: (32, 160)}  # of the producer and of consumers
_L2_BYTES = 32 << 20  # of 50 MiB
_FEW_BLOCKS = 2  # tiles of a head's queries
_V_SCALES = 1024  # bytes behind a tile of V^T
_PANEL, _WARP_ROWS = 64, 16  # columns of o that TMA stores at once; rows that a warp stores


def _illegal(params: Params) -> str | None:
    block_k, dim, promote = params["block"][1], params["head_dim"], params["promote"]
    half, fp8 = params["values"] == "half", params["code"] == "fp8"
    if params["values"] == "e5m2" and params["code"] == "int8":
        return "has values of e4m3 beside q and k of int8"
    if params["block"] == (192, 128) and half:
        return "has no registers for 16 bits of v beside those of 192 rows and 128 keys"
    if params["packed"] and (
        params["block"] == (128, 192) or (params["block"] == (192, 128) and not fp8 and not promote)
    ):
        return "has no registers for packed sequences in such tiles"
    if params["block"] == (192, 96) and (promote or not fp8):
        return "has registers for q and k of e4m3, and none for sums of their own"
    if half and params["code"] == "fp8":
        return "has values of e4m3 where anything is e4m3"
    if params["block"] not in TILES[dim]:
        return f"is not a tile for head_dim={dim}"
    if promote and half:
        return "adds up products of 16 bits in the tensor core"
    if 0 < promote < block_k:
        return f"makes sums of whole tiles, of {block_k} keys"
    if half and (block_k % 64 or block_k > 128):
        return "has values of e4m3 with such tiles"
    if _stages(params) is None:
        return "has no room in shared memory"
    return None


def _bytes(params: Params) -> dict[str, int]:
    """Of a tile."""
    (block_q, block_k), dim = params["block"], params["head_dim"]
    v = 2 * block_k * dim if params["values"] == "half" else block_k * dim + _V_SCALES
    o = block_q * dim * (4 if params["promote"] else 2)
    return {"Q": block_q * dim, "K": block_k * dim, "V": v, "O": o}


def _stages(params: Params) -> dict[str, int] | None:
    """Tiles of Q, K and V in shared memory; None where not even two of K and V have room."""
    size = _bytes(params)
    for q, kv in ((2, 4), (2, 2), (1, 2)):
        made = {"Q": q, "K": kv, "V": kv, "O": 1}
        barriers = _barriers(kv)
        if sum(size[name] * count for name, count in made.items()) + barriers <= MAX_SHARED:
            return made
    return None


def _barriers(stages: int) -> int:
    """Bytes; two are of packed tiles that are cut."""
    return 96 + 32 * stages + 16


def _derive(params: Params) -> dict[str, Any]:
    block_q, block_k = params["block"]
    consumers, found = block_q // 64, _stages(params) or dict.fromkeys("QKVO", 1)
    producer, consumer = _REGISTERS[consumers]
    return {
        "sum": "int" if params["code"] == "int8" else "float",
        "int8": params["code"] == "int8",
        "v_codes": params["values"] != "half", "e5m2": params["values"] == "e5m2",
        "block_k": block_k, "consumers": consumers, "scale_keys": ROWS,
        "q_stages": found["Q"], "stages": found["K"],
        "producer_registers": producer, "consumer_registers": consumer,
    }  # fmt: skip


def _shared(params: Params) -> SharedLayout:
    """Rings of Q, K and V, the staged output, the mbarriers."""
    size, found = _bytes(params), _stages(params) or dict.fromkeys("QKVO", 1)
    tiles = [(f"{name} stage {i}", size[name]) for name in "QKVO" for i in range(found[name])]
    return [*tiles, ("mbarriers", _barriers(max(found["K"], found["V"])))]


def _arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    (block_q, block_k), dim = params["block"], params["head_dim"]
    left, right = window(problem)
    o, v, dtype = arrays["o"], arrays["v"], problem["dtype"]
    places = axes(problem)
    named = ("q_scales", "k_scales", "v_scales", "shift", "lse", "counters")
    return {
        **{name: arrays.get(name) for name in named},
        **scalars(problem), **packed_arguments(problem, arrays),
        "o": o, "o_strides": row_strides(places, o),
        "q_map": _codes_map(arrays["q"], block_q, dim),
        "k_map": _codes_map(arrays["k"], block_k, dim),
        "v_map": _codes_map(v, dim, block_k) if problem["v_codes"]
        else _half_map(dtype, places, v, block_k),
        "o_map": _half_map(dtype, places, o, _WARP_ROWS, writable=True),
        "batch": problem["batch"], "section_heads": section_heads(params, problem),
        "window_left": left, "window_right": right,
        "softmax_scale": problem["softmax_scale"],
    }  # fmt: skip


def _codes_map(array: Any, rows: int, columns: int) -> TensorMap:
    """[batch, head, row, column] of bytes, in boxes as wide as a swizzle."""
    if isinstance(array, np.ndarray):
        array = array.view(np.uint8)
    width = 128 if columns % 128 == 0 else 64 if columns % 64 == 0 else 32
    (batch, heads, count, length), steps = array.shape, array.strides
    return TensorMap(
        array, "u8", (length, count, heads, batch), (steps[2], steps[1], steps[0]),
        (width, rows, 1, 1), swizzle=f"{width}B",
    )  # fmt: skip


def _half_map(dtype: str, places: Any, array: Any, rows: int, writable: bool = False) -> TensorMap:
    """[batch, head, row, column]; packed arrays are one batch."""
    batch, head, row = places
    sizes, steps = array.shape, array.strides
    return TensorMap(
        array, dtype, (sizes[-1], sizes[row], sizes[head], 1 if batch is None else sizes[batch]),
        (steps[row], steps[head], 0 if batch is None else steps[batch]), (_PANEL, rows, 1, 1),
        writable=writable,
    )  # fmt: skip


def section_heads(params: Params, problem: Problem) -> int:
    """Query heads whose tiles are taken together: those that share K and V, or as many as have
    theirs in L2 (attention/kernels_sm90.py)."""
    group = problem["heads_q"] // problem["heads_kv"]
    blocks_q = -(-problem["seqlen_q"] // params["block"][0])
    alike = window(problem)[1] >= problem["seqlen_k"] and not is_packed(problem)
    if alike or blocks_q <= _FEW_BLOCKS:
        return group
    v = problem["head_dim_v"] * (1 if problem["v_codes"] else 2)
    pair = max(problem["seqlen_k"] * (problem["head_dim"] + v), 1)
    return max(_L2_BYTES // pair, 1) * group


def _grid(params: Params, problem: Problem) -> Dim3:
    """One block an SM, or fewer where there is less to do."""
    return (min(grid(params, problem)[0], problem.get("multiprocessors", SMS)), 1, 1)


def counters(params: Params, problem: Problem) -> int:
    """How many a launch needs: none where each tile has a block of its own."""
    tiles = grid(params, problem)[0]
    return COUNTERS if tiles > problem.get("multiprocessors", SMS) else 0


FLASH_CODES_SM90 = register(
    KernelSpec(
        op="quantized_attention",
        name="flash_sm90",
        source="attention/flash_codes_sm90.cu",
        entry="attention_flash_codes_sm90",
        doc="attention.flash_sm90 on codes: TMA and wgmma of int8 and e4m3",
        params=(
            Param("dtype", ("fp16", "bf16"), "element type of o, and of v that is no codes"),
            Param("code", ("int8", "fp8"), "codes of q and k: int8 or e4m3"),
            Param("values", VALUES, "v: 16 bits, e4m3 or e5m2; probabilities: 16 bits or e4m3"),
            Param(
                "promote",
                (0, *PROMOTE),
                "keys whose sum is added up in fp32; 0: all in the tensor core",
            ),
            Param("head_dim", HEAD_DIMS, "of q, k, v and o, padded to this in shared memory"),
            PACKED,
            Param(
                "block",
                tuple(dict.fromkeys(tile for tiles in TILES.values() for tile in tiles)),
                "query rows and keys of a tile",
                tunable=True,
            ),
        ),
        derive=_derive,
        illegal=_illegal,
        features=lambda params: frozenset({"wgmma"}),
        shared_layout=_shared,
        block=lambda params: (128 * (1 + params["block"][0] // 64), 1, 1),
        grid=_grid,
        arguments=_arguments,
        shape_class=shape_class,
        work=Work(
            flops=flops, bytes=traffic, interpreter_work=padded_flops, interpreter_flops=1.5e9
        ),
        pdl=True,
        verification="fkjit.ops.attention.quantized.cases:FLASH_CODES_SM90",
    )
)
