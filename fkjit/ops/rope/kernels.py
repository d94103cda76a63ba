"""The rotary embedding's kernels: parameters, how a call becomes a launch, references."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fkjit.ops.op.shapes import log2_ceil
from fkjit.ops.rope.frequencies import (
    THETA,
    Llama3Scaling,
    YarnScaling,
    fixed_point,
    frequencies,
    rope_table,
)
from fkjit.runtime.interop import ITEMSIZE, numpy_dtype
from fkjit.spec import (
    Arrays,
    Dim3,
    KernelSpec,
    Param,
    Params,
    Problem,
    register,
    size_class,
)

VECTOR_BYTES = 16
_HEADS = 4  # of a place, where there is enough work
_ENOUGH = 1 << 18  # threads that fill a large GPU
# [batch, head, row] of an array, by the layout; None is a dimension that it has not.
_ORDER: dict[str, tuple[int | None, int, int]] = {
    "bhsd": (0, 1, 2),
    "bshd": (0, 2, 1),
    "thd": (None, 1, 0),
}


def dimensions(layout: str, shape: Sequence[int]) -> tuple[int, int, int]:
    """(batch, heads, rows) of q or k."""
    batch, head, row = _ORDER[layout]
    return 1 if batch is None else shape[batch], shape[head], shape[row]


def width(params: Params) -> int:
    """Elements of an access."""
    return VECTOR_BYTES // ITEMSIZE[params["dtype"]] if params["vector"] else 1


def tiling(params: Params, problem: Problem) -> dict[str, Any]:
    """Arguments that say which thread does what: rope/rows.cuh. And the grid."""
    heads = problem["heads_q"] + problem["heads_k"]
    tokens = problem["batch"] * problem["length"]
    lanes = problem["rotary_dim"] // 2 // width(params)
    lanes_log2 = log2_ceil(lanes)
    slots = params["threads"] >> lanes_log2
    several = min(max(tokens * heads * lanes // _ENOUGH, 1), _HEADS)
    heads_first = problem["layout"] != "bhsd" or problem["length"] == 1
    if heads_first:
        inner_log2 = min(max(heads // several, 1).bit_length(), slots.bit_length()) - 1
        head_slots, token_slots = 1 << inner_log2, slots >> inner_log2
    else:
        inner_log2 = min(log2_ceil(tokens), slots.bit_length() - 1)
        head_slots, token_slots = slots >> inner_log2, 1 << inner_log2
    pieces = -(-heads // (head_slots * (2 * several - 1)))
    per_place = -(-heads // (head_slots * pieces))
    return {
        "lanes_log2": lanes_log2,
        "inner_log2": inner_log2,
        "per_place": per_place,
        "heads_first": heads_first,
        "grid": (-(-tokens // token_slots), -(-heads // (head_slots * per_place)), 1),
    }


def default(fixed: Params, problem: Problem) -> dict[str, Any]:
    """A vector kernel's second head under way costs the first one 0.1 us, where it is alone."""
    params = {**fixed, "threads": 128 if fixed["vector"] else 256, "unroll": 1}
    several = fixed["vector"] and tiling(params, problem)["per_place"] > 1
    return {**params, "unroll": 2 if several else 1}


def shape_class(problem: Problem) -> dict[str, Any]:
    """Problems that share their tuned values."""
    return {
        "tokens": size_class(problem["batch"] * problem["length"], _MOST_TOKENS),
        "heads": size_class(problem["heads_q"] + problem["heads_k"], _MOST_HEADS),
        "rotary_dim": problem["rotary_dim"],
        "heads_first": problem["layout"] != "bhsd" or problem["length"] == 1,
    }


_MOST_TOKENS, _MOST_HEADS = 1 << 14, 256  # beyond these it makes no difference


def illegal(params: Params) -> str | None:
    """Why these parameters are no variant, or None."""
    if (params["threads"] == 256) == params["vector"]:
        return "is for single elements" if params["vector"] else "is for 16-byte accesses"
    if params["unroll"] > 1 and not params["vector"]:
        return "is for 16-byte accesses"
    return None


def grid(params: Params, problem: Problem) -> Dim3:
    """Tiles of tokens by pieces of the heads."""
    return tiling(params, problem)["grid"]


def _strides(problem: Problem, array: Any) -> tuple[int, ...]:
    """(batch, head, row) in elements; 0 where there is no array or no such dimension."""
    if array is None or len(array.shape) < 3:
        return 0, 0, 0
    order = _ORDER[problem["layout"]]
    return tuple(0 if at is None else array.strides[at] // array.itemsize for at in order)


def _position_strides(problem: Problem, ids: Any) -> tuple[int, int, int]:
    """Of the ids, in words of 32 bits; one row of ids serves every batch."""
    if problem["positions"] == "none":
        return 0, 0, 0
    steps = [step // 4 for step in ids.strides]
    if problem["positions"] == "starts":
        return steps[0], 0, 0
    batch = steps[0] if len(steps) == 2 and ids.shape[0] > 1 else 0
    return batch, 0, steps[-1]


def _arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Of both kernels."""
    names = ("q", "k", "out_q", "out_k")
    ids: Any = arrays.get("positions")
    return {
        **{name: arrays.get(name) for name in names},
        **{f"{name}_strides": _strides(problem, arrays.get(name)) for name in names},
        "positions": ids,
        "position_strides": _position_strides(problem, ids),
        "position_words": 1 if problem["positions"] == "none" else ids.itemsize // 4,
        "start": problem["start"],
        "step": int(problem["positions"] != "ids"),
        "tokens": problem["batch"] * problem["length"],
        "length": problem["length"],
        "heads_q": problem["heads_q"],
        "heads": problem["heads_q"] + problem["heads_k"],
        "head_dim": problem["head_dim"],
        "rotary_dim": problem["rotary_dim"],
        "direction": -1.0 if problem["inverse"] else 1.0,
        **tiling(params, problem),
    }


def fused_arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Kernel arguments by name."""
    of = (problem["rotary_dim"], problem["theta"], problem["scaling"])
    return {**_arguments(params, problem, arrays), "frequencies": fixed_point(*of)}


def table_arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Kernel arguments by name."""
    table = arrays["table"]
    return {
        **_arguments(params, problem, arrays),
        "table": table,
        "table_rows": table.shape[0],
        "table_stride": table.strides[0] // table.itemsize,
    }


def traffic(problem: Problem) -> float:
    """Bytes of q and k, read and written."""
    heads = problem["heads_q"] + problem["heads_k"]
    elements = problem["batch"] * problem["length"] * heads * problem["head_dim"]
    return 2.0 * ITEMSIZE[problem["dtype"]] * elements


def work(problem: Problem) -> float:
    """Four products and two sums a pair."""
    heads = problem["heads_q"] + problem["heads_k"]
    return 3.0 * problem["batch"] * problem["length"] * heads * problem["rotary_dim"]


# ------------------------------------------------------------------ for tests


def positions_of(problem: Problem, ids: Any) -> np.ndarray:
    """[batch, length] int64."""
    rows = np.arange(problem["length"], dtype=np.int64) + problem["start"]
    shape = (problem["batch"], problem["length"])
    if problem["positions"] == "none":
        return np.broadcast_to(rows, shape)
    ids = np.asarray(ids).astype(np.int64)
    return ids[:, None] + rows if problem["positions"] == "starts" else np.broadcast_to(ids, shape)


def rotated(problem: Problem, x: np.ndarray, cosine: np.ndarray, sine: np.ndarray) -> np.ndarray:
    """x in float64, turned by angles [batch, length, pairs], in x's layout."""
    order = [1 if axis is None else axis for axis in _ORDER[problem["layout"]]]
    batched = x[None] if problem["layout"] == "thd" else x
    order = order if problem["layout"] != "thd" else [0, 2, 1]
    seen = np.transpose(batched, [*order, 3]).astype(np.float64)  # [B, H, S, D], a copy
    rotary, half = problem["rotary_dim"], problem["rotary_dim"] // 2
    one = slice(0, rotary, 2) if problem["interleaved"] else slice(0, half)
    two = slice(1, rotary, 2) if problem["interleaved"] else slice(half, rotary)
    u, v = seen[..., one].copy(), seen[..., two].copy()
    cosine, sine = cosine[:, None], sine[:, None] * (-1 if problem["inverse"] else 1)
    seen[..., one], seen[..., two] = u * cosine - v * sine, v * cosine + u * sine
    back = np.transpose(seen, [*np.argsort(order), 3])
    return back[0] if problem["layout"] == "thd" else back


def reference(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """out_q and out_k in float64, by the table if there is one."""
    at = positions_of(problem, arrays.get("positions"))
    if arrays.get("table") is not None:
        entry = np.asarray(arrays["table"]).astype(np.float64)[at]
        cosine, sine = np.split(entry, 2, -1)
    else:
        turning = frequencies(problem["rotary_dim"], problem["theta"], problem["scaling"])
        angle = at[..., None].astype(np.longdouble) * turning
        cosine, sine = (f(angle).astype(np.float64) for f in (np.cos, np.sin))
    return {
        f"out_{name}": rotated(problem, np.asarray(arrays[name]), cosine, sine)
        for name in ("q", "k")
        if arrays.get(name) is not None
    }


def problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """Each layout and kind of positions; whole and partial rotation; k of fewer heads, or none."""
    many = 1 if scale == "small" else 40
    whole, part = (64, 32) if params["vector"] else (14, 6)
    shared = {"dtype": params["dtype"], "interleaved": params["interleaved"], "theta": THETA}
    cases = (
        # layout, B, S, Hq, Hkv, rotary_dim, positions, scaling, inverse
        ("bhsd", 2, 5 * many, 3, 1, whole, "none", None, False),
        ("bshd", 2, 7 * many, 4, 2, part, "ids", Llama3Scaling(), True),
        ("bshd", 3, 1, 9, 0, whole, "starts", None, False),
        ("thd", 1, 9 * many, 5, 5, part, "ids", Llama3Scaling(32.0, 1.0, 4.0, 64), False),
    )
    return [
        {
            **shared,
            "layout": layout,
            "batch": batch,
            "length": length,
            "heads_q": heads_q,
            "heads_k": heads_k,
            "head_dim": whole,
            "rotary_dim": rotary,
            "positions": positions,
            "start": 3 if positions == "none" else 0,
            "scaling": scaling,
            "inverse": inverse,
        }
        for layout, batch, length, heads_q, heads_k, rotary, positions, scaling, inverse in cases
    ]


def shape_of(problem: Problem, heads: int) -> tuple[int, ...]:
    """Of q or k."""
    batch, length, dim = problem["batch"], problem["length"], problem["head_dim"]
    return {
        "bhsd": (batch, heads, length, dim),
        "bshd": (batch, length, heads, dim),
        "thd": (length, heads, dim),
    }[problem["layout"]]


_TABLE_ROWS = 400  # of a test's table


def inputs(params: Params, problem: Problem, rng: np.random.Generator) -> Arrays:
    """Fresh N(0, 1) q and k, positions up to a million."""
    return _inputs(problem, rng, 1_000_001)


def table_inputs(params: Params, problem: Problem, rng: np.random.Generator) -> Arrays:
    """The same with a table, of YaRN's frequencies in every second problem."""
    scaling = YarnScaling(4.0, 100) if problem["heads_q"] % 2 else None
    table = rope_table(_TABLE_ROWS, problem["rotary_dim"], scaling=scaling)
    return {**_inputs(problem, rng, _TABLE_ROWS), "table": table}


def _inputs(problem: Problem, rng: np.random.Generator, limit: int) -> Arrays:
    made: dict[str, Any] = {}
    for name, heads in (("q", problem["heads_q"]), ("k", problem["heads_k"])):
        values = rng.standard_normal(shape_of(problem, heads), dtype=np.float32)
        made |= {name: values.astype(numpy_dtype(problem["dtype"]))} if heads else {}
    shape: tuple[int, ...] = (problem["batch"], problem["length"])
    if problem["positions"] == "starts":
        made["positions"] = rng.integers(0, limit - problem["length"], shape[:1], np.int64)
    elif problem["positions"] == "ids":
        shape = shape[1:] if problem["layout"] == "thd" else shape
        made["positions"] = rng.integers(0, limit, shape, np.int32)
    return made


def outputs(params: Params, problem: Problem) -> Arrays:
    """out_q and out_k, poisoned with NaN."""
    made: dict[str, Any] = {}
    for name, heads in (("out_q", problem["heads_q"]), ("out_k", problem["heads_k"])):
        shape, dtype = shape_of(problem, heads), numpy_dtype(problem["dtype"])
        made |= {name: np.full(shape, np.nan, dtype)} if heads else {}
    return made


def _spec(name: str, doc: str, **rest: Any) -> KernelSpec:
    return register(
        KernelSpec(
            op="rope",
            name=name,
            source=f"rope/{name}.cu",
            entry=f"rope_{name}",
            pdl=True,
            doc=doc,
            params=(
                Param("dtype", ("fp16", "bf16", "fp32"), "element type of q and k"),
                Param("vector", (True, False), "16-byte accesses"),
                Param("interleaved", (False, True), "pairs are neighbours, not in two halves"),
                Param("threads", (128, 256), "threads of a block: 256 for single elements"),
                Param("unroll", (1, 2), "heads under way in a thread", tunable=True),
            ),
            illegal=illegal,
            block=lambda params: (params["threads"], 1, 1),
            grid=grid,
            shape_class=shape_class,
            flops=work,
            bytes=traffic,
            problems=problems,
            outputs=outputs,
            reference=reference,
            tolerance=lambda params: {"fp16": 6e-4, "bf16": 4.5e-3, "fp32": 4e-7}[params["dtype"]],
            **rest,
        )
    )


FUSED = _spec(
    "fused", "sines and cosines computed where they are used", arguments=fused_arguments,
    inputs=inputs,
)  # fmt: skip
TABLE = _spec(
    "table", "sines and cosines read from a table", arguments=table_arguments, inputs=table_inputs
)
