"""The rotary embedding's kernels: parameters, and how a call becomes a launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fkjit.ops.op.shapes import log2_ceil
from fkjit.ops.rope.frequencies import (
    fixed_point,
)
from fkjit.runtime.interop import ITEMSIZE
from fkjit.spec import (
    Dim3,
    KernelSpec,
    Param,
    Params,
    Problem,
    Work,
    register,
    size_class,
)
from fkjit.symbolic import cached

Arguments = Callable[[Params, Problem, Mapping[str, Any]], dict[str, Any]]
VECTOR_BYTES = 16
_HEADS = 4  # of a place, where there is enough work
_ENOUGH = 1 << 18  # threads that fill a large GPU
# [batch, head, row] of an array, by the layout; None is a dimension that it has not.
ORDER: dict[str, tuple[int | None, int, int]] = {
    "bhsd": (0, 1, 2),
    "bshd": (0, 2, 1),
    "thd": (None, 1, 0),
}


_ABSENT = dict.fromkeys(("q", "k", "out_q", "out_k", "positions"))


def dimensions(layout: str, shape: Sequence[int]) -> tuple[int, int, int]:
    """(batch, heads, rows) of q or k."""
    batch, head, row = ORDER[layout]
    return 1 if batch is None else shape[batch], shape[head], shape[row]


def width(params: Params) -> int:
    """Elements of an access."""
    return VECTOR_BYTES // ITEMSIZE[params["dtype"]] if params["vector"] else 1


def tiling(params: Params, problem: Problem) -> Mapping[str, Any]:
    """Arguments that say which thread does what: rope/rows.cuh. And the grid."""
    return _tiling(
        params["threads"],
        problem["rotary_dim"] // 2 // width(params),
        problem["batch"] * problem["length"],
        problem["heads_q"] + problem["heads_k"],
        problem["layout"] != "bhsd" or problem["length"] == 1,
    )


@cached(256)
def _tiling(
    threads: int, lanes: int, tokens: int, heads: int, heads_first: bool
) -> Mapping[str, Any]:
    """The same of what it depends on; a launch asks three times."""
    lanes_log2 = log2_ceil(lanes)
    slots = threads >> lanes_log2
    several = min(max(tokens * heads * lanes // _ENOUGH, 1), _HEADS)
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
    order = ORDER[problem["layout"]]
    return tuple([0 if at is None else array.strides[at] // array.itemsize for at in order])


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
    seen = {**_ABSENT, **arrays}
    ids: Any = seen["positions"]
    return {
        **seen,
        "q_strides": _strides(problem, seen["q"]),
        "k_strides": _strides(problem, seen["k"]),
        "out_q_strides": _strides(problem, seen["out_q"]),
        "out_k_strides": _strides(problem, seen["out_k"]),
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


def flops(problem: Problem) -> float:
    """Four products and two sums a pair."""
    heads = problem["heads_q"] + problem["heads_k"]
    return 3.0 * problem["batch"] * problem["length"] * heads * problem["rotary_dim"]


def _spec(name: str, doc: str, arguments: Arguments) -> KernelSpec:
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
            arguments=arguments,
            work=Work(flops=flops, bytes=traffic),
            verification=f"fkjit.ops.rope.cases:{name.upper()}",
        )
    )


FUSED = _spec("fused", "sines and cosines computed where they are used", fused_arguments)
TABLE = _spec("table", "sines and cosines read from a table", table_arguments)
