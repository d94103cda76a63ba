"""The kernels that carry rows between tokens and the places of their choices.

A problem: `tokens` rows of `columns` elements, `top_k` choices of each, `places` rows in order of
experts; `stride` elements from a row that is read to the next one (of x, of y).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fkjit.errors import ParameterError
from fkjit.ops.moe.checks import check_dense
from fkjit.ops.moe.problem import MAX_TOP_K
from fkjit.ops.op.checks import FLOATS, check_dtype
from fkjit.ops.op.shapes import rows_of
from fkjit.runtime.interop import ITEMSIZE, View
from fkjit.spec import Dim3, KernelSpec, Param, Params, Problem, Work, register

PARAMS = (
    Param("dtype", FLOATS, "element type of the rows"),
    Param("vector", (True, False), "16-byte accesses: rows that allow them"),
)
THREADS = {"permute": 128, "combine": 128, "combine_backward": 256}
UNDERWAY = (2, 4, 8)
_MANY_BLOCKS = 2048
_BACKWARD = ("dout", "y", "inverse", "weights", "offsets", "counts", "dy", "dweights")
_NAMES = ("tokens", "top_k", "groups", "places", "columns")


def check_inverse(call: str, view: View | None, tokens: int | None = None) -> tuple[int, int]:
    """(tokens, top_k) of the places of choices."""
    assert view is not None
    check_dtype(call, "inverse", view, ("int32",))
    shape = tuple(view.shape)
    if len(shape) != 2 or not 1 <= shape[1] <= MAX_TOP_K or shape[0] != (tokens or shape[0]):
        here = "" if tokens is None else f", with {tokens} tokens"
        raise ParameterError(
            f"{call}: inverse has shape {shape}; allowed: [tokens, top_k] with 1 to {MAX_TOP_K} "
            f"choices{here}"
        )
    check_dense(call, "inverse", view)
    return shape[0], shape[1]


def check_rows(call: str, name: str, view: View | None) -> tuple[int, int, int]:
    """(rows, columns, elements from one to the next)."""
    assert view is not None
    check_dtype(call, name, view)
    if len(view.shape) != 2 or not view.shape[1]:
        raise ParameterError(
            f"{call}: {name} has shape {tuple(view.shape)}; allowed: [rows, columns]"
        )
    return rows_of(call, name, view)


def is_vector(dtype: str, columns: int, stride: int, views: Sequence[View | None]) -> bool:
    """Whether all rows are whole 16-byte vectors on 16-byte boundaries."""
    size = 16 // ITEMSIZE[dtype]
    aligned = all(view.pointer % 16 == 0 for view in views if view is not None)
    return aligned and columns % size == 0 and stride % size == 0


def _values(p: Problem, names: Sequence[str]) -> dict[str, int]:
    return {name: p[name] for name in names}


def _blocks(params: Params, p: Problem) -> int:
    """Blocks of all rows, where a thread has some pieces of one."""
    size = 16 // ITEMSIZE[p["dtype"]] if params["vector"] else 1
    return p["tokens"] * -(-p["columns"] // (params["threads"] * params.get("pieces", 1) * size))


def permute_variant(p: Problem) -> dict[str, Any]:
    """Parameters of the kernel that carries rows to their places."""
    return {"dtype": p["dtype"], "vector": p["vector"], "threads": THREADS["permute"]}


def combine_variant(p: Problem) -> dict[str, Any]:
    """Parameters of the kernel that adds rows up: no more under way than there are choices."""
    params = {"dtype": p["dtype"], "vector": p["vector"], "threads": THREADS["combine"]}
    if not p["vector"]:
        return {**params, "underway": 4, "pieces": 1}
    params["underway"] = next((u for u in UNDERWAY if u >= p["top_k"]), UNDERWAY[-1])
    params["pieces"] = 1
    twice = params["underway"] == 2 and _blocks(params, p) >= _MANY_BLOCKS
    return {**params, "pieces": 2 if twice else 1}


def _tokens_and_groups(params: Params, p: Problem) -> Dim3:
    return (p["tokens"] + p["groups"], 1, 1)


def _rows(p: Problem) -> float:
    """Bytes of a row."""
    return float(p["columns"] * ITEMSIZE[p["dtype"]])


def problem_of(
    dtype: str, tokens: int, top_k: int, columns: int, groups: int = 1, places: int | None = None,
    **other: Any,
) -> dict[str, Any]:  # fmt: skip
    """A problem as tests and benchmarks want it: a place for each choice, rows without gaps."""
    made = {
        **{"dtype": dtype, "tokens": tokens, "top_k": top_k, "columns": columns},
        **{"groups": groups, "places": tokens * top_k if places is None else places},
        **{"stride": columns, "weighted": True, "cleared": True},
        **other,
    }
    made["vector"] = is_vector(dtype, columns, made["stride"], ())
    return made


def _threads(params: Params) -> Dim3:
    return (params["threads"], 1, 1)


def _never_taken(params: Params) -> str | None:
    if params["pieces"] == 2 and params["underway"] > 2:
        return "has too much under way"
    return None if params["vector"] or params["underway"] == 4 else "is never the fastest"


PERMUTE = register(
    KernelSpec(
        op="moe_permute",
        name="rows",
        source="moe/permute.cu",
        entry="moe_permute",
        pdl=True,
        doc="rows of tokens to the places of their choices",
        params=(*PARAMS, Param("threads", (128,), "threads of a block", tunable=True)),
        block=_threads,
        grid=lambda params, p: (_blocks(params, p) + p["groups"], 1, 1),
        arguments=lambda params, p, arrays: {
            **{name: arrays.get(name) for name in ("x", "inverse", "offsets", "counts", "out")},
            **{"x_stride": p["stride"], **_values(p, _NAMES)},
        },
        work=Work(bytes=lambda p: (p["tokens"] + p["places"]) * _rows(p)),
        verification="fkjit.ops.moe.cases_rows:PERMUTE",
    )
)

COMBINE = register(
    KernelSpec(
        op="moe_combine",
        name="rows",
        source="moe/combine.cu",
        entry="moe_combine",
        pdl=True,
        doc="weighted sums of the rows of each token's choices",
        params=(
            *PARAMS,
            Param("threads", (128,), "threads of a block", tunable=True),
            Param("underway", UNDERWAY, "rows that a thread has under way", tunable=True),
            Param("pieces", (1, 2), "of a row that a thread has", tunable=True),
        ),
        illegal=_never_taken,
        block=_threads,
        grid=lambda params, p: (_blocks(params, p), 1, 1),
        arguments=lambda params, p, arrays: {
            **{name: arrays.get(name) for name in ("y", "inverse", "weights", "out")},
            **{"y_stride": p["stride"], **_values(p, ("top_k", "columns"))},
        },
        work=Work(
            flops=lambda p: 2.0 * p["tokens"] * p["top_k"] * p["columns"],
            bytes=lambda p: p["tokens"] * (p["top_k"] + 1) * _rows(p),
        ),
        verification="fkjit.ops.moe.cases_rows:COMBINE",
    )
)

COMBINE_BACKWARD = register(
    KernelSpec(
        op="moe_combine",
        name="backward",
        source="moe/combine_backward.cu",
        entry="moe_combine_backward",
        pdl=True,
        doc="gradients of the weighted sums: of rows and of weights",
        params=(*PARAMS, Param("threads", (256,), "threads of a block", tunable=True)),
        block=_threads,
        grid=_tokens_and_groups,
        arguments=lambda params, p, arrays: {
            **{name: arrays.get(name) for name in _BACKWARD},
            **{"y_stride": p["stride"], **_values(p, _NAMES)},
        },
        work=Work(
            flops=lambda p: 3.0 * p["tokens"] * p["top_k"] * p["columns"],
            bytes=lambda p: (p["tokens"] * (p["top_k"] + 1) + p["places"]) * _rows(p),
        ),
        verification="fkjit.ops.moe.cases_rows:COMBINE_BACKWARD",
    )
)
