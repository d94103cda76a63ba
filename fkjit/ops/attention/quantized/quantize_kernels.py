"""The kernels of `fkjit.quantize_attention`.

A problem has what attention's has (batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim,
head_dim_v, axes), dtype, v_codes, and smooth, rotate, code and values as the kernels are compiled
for. Arrays: q, k, v, k_means, v_scales, span_scales -> q_codes, k_codes, v_codes, q_scales,
k_scales, shift. `scales`: how many rows of q and keys share one: SCALES.

Packed sequences have total_q and total_k, and arrays cu_seqlens_q and cu_seqlens_k; seqlen_q and
seqlen_k are those of the longest then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fkjit.ops.attention.problem import axes, row_strides
from fkjit.runtime.interop import ITEMSIZE
from fkjit.spec import Dim3, KernelSpec, Param, Params, Problem, Work, register

ROWS = 64  # of a block; keys that have a place for a scale, and what keys of V^T are padded to
KEY_ROOM = 256  # places that a packed sequence has beside its keys (attention/packed_codes.cuh)
_LAST_BLOCKS = 3  # of ROWS places behind the last key of a packed sequence
CHUNK = 128  # keys of a block that looks for means and scales of columns
HEAD_DIMS = (64, 128, 256)  # columns, padded
_THREADS = 256
# Who shares a scale: a row of q and ROWS keys; so many rows of q and as many keys; all of a head;
# all there are. The first three are found as rows become codes, the others in a pass before.
BLOCKS = {"block": 1, "block64": 64, "block128": 128}
SCALES = (*BLOCKS, "head", "tensor")
_CODES = {"int8": "Int8Codes", "fp8": "Fp8Codes"}
_ENDS = ("cu_seqlens_q", "cu_seqlens_k")
_POINTERS = (*_ENDS, "q", "k", "v", "k_means", "v_scales", "span_scales", "q_codes", "k_codes",
             "v_codes", "q_scales", "k_scales", "shift", "workspace", "counters")  # fmt: skip
PACKED = Param("packed", (False, True), "sequences lie one behind the other")
_DTYPE = Param("dtype", ("bf16", "fp16"), "element type of q, k and v")
_HEAD_DIM = Param("head_dim", HEAD_DIMS, "columns of q, k and v, at most")


def padded(problem: Problem) -> int:
    """The head dimension that is compiled."""
    most = max(problem["head_dim"], problem["head_dim_v"])
    return next(dim for dim in HEAD_DIMS if dim >= most)


def is_packed(problem: Problem) -> bool:
    """Whether sequences lie one behind the other."""
    return "total_q" in problem


def key_places(problem: Problem) -> int:
    """Of a head's keys in V^T, and times ROWS in the scales of K."""
    if is_packed(problem):
        return (problem["total_k"] + KEY_ROOM * problem["batch"]) // ROWS * ROWS
    return -(-problem["seqlen_k"] // ROWS) * ROWS


def chunks_of(problem: Problem) -> int:
    """Blocks of a head that look for means and scales of columns."""
    return -(-problem["seqlen_k"] // CHUNK)


def planes(params: Params) -> int:
    """Of K and V those that are looked through."""
    return params["means"] + params["mosts"]


def scratch(params: Params, problem: Problem) -> tuple[int, int]:
    """Bytes and counters of the first of both kernels."""
    heads = planes(params) * problem["batch"] * problem["heads_kv"]
    return 4 * heads * chunks_of(problem) * params["head_dim"], heads


def spans(problem: Problem) -> dict[str, int]:
    """Scales of q and of k that blocks share; 0 where there are no rows."""
    heads = {"q": problem["heads_q"] * bool(problem["seqlen_q"]),
             "k": problem["heads_kv"] * bool(problem["seqlen_k"])}  # fmt: skip
    whole = problem["scales"] == "tensor"
    return {name: min(problem["batch"] * n, 1) if whole else problem["batch"] * n
            for name, n in heads.items()}  # fmt: skip


def spans_scratch(problem: Problem) -> tuple[int, int]:
    """Bytes and counters of the kernel that looks for them."""
    return 4 * sum(_blocks(problem, name) for name in "qk"), sum(spans(problem).values())


def _blocks(problem: Problem, name: str, of: int = ROWS) -> int:
    """`of`: rows of a block."""
    rows = problem["seqlen_q" if name == "q" else "seqlen_k"]
    heads = problem["heads_q" if name == "q" else "heads_kv"]
    return problem["batch"] * heads * -(-rows // of)


def _rows(params: Params) -> int:
    """Of a block of q or k, which share a scale."""
    return max(ROWS, params.get("shared", 1))


def _arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{name: arrays.get(name) for name in _POINTERS},
        **{f"{name}_strides": row_strides(axes(problem), arrays[name]) for name in "qkv"},
        **{f"{name}_blocks": _blocks(problem, name, _rows(params)) for name in "qk"},
        **{f"{name}_spans": count for name, count in spans(problem).items()},
        **{name: problem[name] for name in ("heads_q", "heads_kv", "seqlen_q", "seqlen_k")},
        **{name: problem[name] for name in ("head_dim", "head_dim_v")},
        **{name: problem.get(name, 0) for name in ("total_q", "total_k")},
        "group_size": problem["heads_q"] // problem["heads_kv"], "chunks": chunks_of(problem),
        "v_keys": key_places(problem),
    }  # fmt: skip


def _numbers(problem: Problem) -> float:
    """Of q, k and v."""
    of_q, of_k = (problem["batch"] * problem[f"seqlen_{name}"] for name in "qk")
    if is_packed(problem):
        of_q, of_k = problem["total_q"], problem["total_k"]
    queries = problem["heads_q"] * of_q * problem["head_dim"]
    return float(
        queries + problem["heads_kv"] * of_k * (problem["head_dim"] + problem["head_dim_v"])
    )


_WORK: Mapping[str, Any] = {
    "op": "quantize_attention",
    "arguments": _arguments,
    "block": lambda params: (_THREADS, 1, 1),
    "pdl": True,
    # Whose tensor cores multiply codes; older ones have no use for them.
    "features": lambda params: frozenset({"bf16_mma"}),
    "work": Work(
        flops=lambda problem: 4 * _numbers(problem),
        bytes=lambda problem: _numbers(problem) * (ITEMSIZE[problem["dtype"]] + 1),
        interpreter_flops=2e7,
    ),
}


def _channels_grid(params: Params, problem: Problem) -> Dim3:
    heads = problem["batch"] * problem["heads_kv"]
    return (heads * chunks_of(problem), planes(params), 1)


CHANNELS = register(
    KernelSpec(
        **_WORK,
        name="channels",
        source="attention/quantize_channels.cu",
        entry="attention_quantize_channels",
        doc="means of K's columns and scales of V's, over all keys of a head",
        params=(
            _DTYPE,
            _HEAD_DIM,
            Param("means", (True, False), "K is looked through"),
            Param("mosts", (True, False), "V is looked through"),
            PACKED,
        ),
        derive=lambda params: {"chunk": CHUNK, "threads": _THREADS},
        illegal=lambda params: None if planes(params) else "has nothing to look for",
        grid=_channels_grid,
        verification="fkjit.ops.attention.quantized.quantize_cases:CHANNELS",
    )
)


_CODE = Param("code", tuple(_CODES), "what numbers of q and k become")
_SMOOTH = Param("smooth", (True, False), "K loses its mean")
_ROTATE = Param("rotate", (False, True), "rows of q and k are rotated")


def _threads(params: Params) -> int:
    """Of a block of q or k: sixteen rows a warp."""
    return 2 * _rows(params)


def _derive(params: Params) -> dict[str, Any]:
    values = params.get("values", "half")
    return {"codes": _CODES[params["code"]], "rows": _rows(params), "value_rows": ROWS,
            "threads": _threads(params), "v_codes": values != "half",
            "value_codes": "E5m2Codes" if values == "e5m2" else "Fp8Codes"}  # fmt: skip


SPANS = register(
    KernelSpec(
        **{**_WORK, "block": lambda params: (_threads(params), 1, 1)},
        name="spans",
        source="attention/quantize_spans.cu",
        entry="attention_quantize_spans",
        doc="scales that all rows of a head share, or all rows there are",
        params=(_DTYPE, _HEAD_DIM, _CODE, _SMOOTH, _ROTATE, PACKED),
        derive=_derive,
        grid=lambda params, problem: (sum(_blocks(problem, name) for name in "qk"), 1, 1),
        verification="fkjit.ops.attention.quantized.quantize_cases:SPANS",
    )
)


def _codes_illegal(params: Params) -> str | None:
    allowed = ("half", "fp8") if params["code"] == "int8" else ("fp8", "e5m2")
    if params["values"] not in allowed:
        return "has fp8 for v beside fp8, and e5m2 there alone"
    both = params["given"] and params["shared"] > 1
    return "has scales that are given, or shared" if both else None


def _codes_grid(params: Params, problem: Problem) -> Dim3:
    values = _blocks(problem, "k")
    if is_packed(problem) and values:
        values += _LAST_BLOCKS * problem["batch"] * problem["heads_kv"]
    rows = sum(_blocks(problem, name, _rows(params)) for name in "qk")
    return (rows + (params["values"] != "half") * values, 1, 1)


CODES = register(
    KernelSpec(
        **{**_WORK, "block": lambda params: (_threads(params), 1, 1)},
        name="codes",
        source="attention/quantize_codes.cu",
        entry="attention_quantize_codes",
        doc="codes of q, k and v, K less its mean, rows rotated, V transposed: each read once",
        params=(
            _DTYPE,
            _HEAD_DIM,
            _CODE,
            Param("values", ("half", "fp8", "e5m2"), "v stays, or becomes e4m3 or e5m2"),
            _SMOOTH,
            _ROTATE,
            Param("given", (False, True), "scales of q and k are not their own rows'"),
            Param(
                "shared", tuple(BLOCKS.values()), "rows of q that share a scale; of k, at least 64"
            ),
            PACKED,
        ),
        derive=_derive,
        illegal=_codes_illegal,
        grid=_codes_grid,
        verification="fkjit.ops.attention.quantized.quantize_cases:CODES",
    )
)
