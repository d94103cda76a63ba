"""The kernels that carry rows between tokens and the places of their choices.

A problem: `tokens` rows of `columns` elements, `top_k` choices of each, `places` rows in order of
experts; `stride` elements from a row that is read to the next one (of x, of y).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fkjit.errors import ParameterError
from fkjit.ops.moe.problem import MAX_TOP_K
from fkjit.ops.op.checks import FLOATS, check_dtype
from fkjit.ops.op.shapes import rows_of
from fkjit.runtime.interop import ITEMSIZE, View, numpy_dtype
from fkjit.spec import Arrays, Dim3, KernelSpec, Param, Params, Problem, register

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
    if rows_of(call, "inverse", view)[2] != shape[1] and shape[0] > 1:
        raise ParameterError(f"{call}: inverse has gaps between its rows; pass a contiguous copy")
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


def problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """Rows with gaps; choices that have no place and places that nobody has; one token."""
    size = 16 // ITEMSIZE[params["dtype"]] if params["vector"] else 1
    tokens, pieces = (11, 35) if scale == "small" else (1001, 517)
    columns, dtype = size * pieces, params["dtype"]
    return [
        problem_of(dtype, tokens, 3, columns, 4, tokens * 3 + 9, stride=columns + 3 * size),
        problem_of(dtype, tokens, 9, columns, 2, tokens * 9, weighted=False),
        problem_of(dtype, 1, 1, size),
    ]


def inputs(names: Sequence[str]) -> Any:
    """The spec's `inputs`: places in any order with some choices dropped, and rows of `names`."""

    def made(params: Params, p: Problem, rng: np.random.Generator) -> Arrays:
        found = _random_places(p, rng)
        dtype = numpy_dtype(p["dtype"])
        for name, rows in (("x", p["tokens"]), ("y", p["places"]), ("dout", p["tokens"])):
            if name in names:
                stride = p["columns"] if name == "dout" else p["stride"]
                x = rng.standard_normal((rows, stride), dtype=np.float32)
                x[:, p["columns"] :] = np.nan
                found[name] = x.astype(dtype)
        if p["weighted"] and "y" in names:
            found["weights"] = rng.random((p["tokens"], p["top_k"]), dtype=np.float32)
        return found

    return made


def _random_places(p: Problem, rng: np.random.Generator) -> Arrays:
    items, groups = p["tokens"] * p["top_k"], p["groups"]
    kept = np.sort(rng.permutation(items)[: items - items // 7])
    room = p["places"] // groups
    counts = np.bincount(np.arange(kept.size) % groups, minlength=groups).clip(0, room)
    offsets = np.append(np.arange(groups) * room, p["places"] - p["places"] % 2)
    offsets[-1] = max(offsets[-1], offsets[-2] + counts[-1])
    places = np.concatenate([np.arange(o, o + c) for o, c in zip(offsets, counts, strict=False)])
    inverse = np.full(items, -1, np.int32)
    inverse[kept[: places.size]] = rng.permutation(places)
    return {
        "inverse": inverse.reshape(p["tokens"], -1),
        "offsets": offsets.astype(np.int32),
        "counts": counts.astype(np.int32),
    }


def seen(p: Problem, arrays: Mapping[str, Any], name: str) -> np.ndarray:
    """Rows without their gaps, in float64."""
    x = np.asarray(arrays[name])
    return x.reshape(x.shape[0], -1)[:, : p["columns"]].astype(np.float64)


def scattered(p: Problem, inverse: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Rows [tokens, top_k, columns] at their places, zeros elsewhere."""
    out = np.zeros((p["places"], p["columns"]))
    out[inverse[inverse >= 0]] = rows[inverse >= 0]
    return out


def gathered(p: Problem, arrays: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(y's rows [tokens, top_k, columns], weights, inverse); zeros where there is no place."""
    inverse = np.asarray(arrays["inverse"])
    weights = np.asarray(arrays.get("weights", np.ones(inverse.shape))).astype(np.float64)
    rows = seen(p, arrays, "y")[inverse] * (inverse >= 0)[..., None]
    return rows, weights, inverse


def permuted(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """Of permute.cu."""
    inverse = np.asarray(arrays["inverse"])
    x = seen(p, arrays, "x")[:, None].repeat(p["top_k"], 1)
    return {"out": scattered(p, inverse, x)}


def combined(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """Of combine.cu."""
    rows, weights, _ = gathered(p, arrays)
    return {"out": (rows * weights[..., None]).sum(1)}


def combined_backward(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """Of combine_backward.cu."""
    rows, weights, inverse = gathered(p, arrays)
    dout = seen(p, arrays, "dout")[:, None]
    return {
        "dy": scattered(p, inverse, dout * weights[..., None]),
        "dweights": (rows * dout).sum(-1),
    }


def _poisoned(p: Problem, rows: int) -> np.ndarray:
    return np.full((rows, p["columns"]), np.nan, numpy_dtype(p["dtype"]))


def _tolerance(params: Params) -> float:
    return {"fp16": 5e-4, "bf16": 4e-3, "fp32": 2e-6}[params["dtype"]]


def _threads(params: Params) -> Dim3:
    return (params["threads"], 1, 1)


def _never_taken(params: Params) -> str | None:
    if params["pieces"] == 2 and params["underway"] > 2:
        return "has too much under way"
    return None if params["vector"] or params["underway"] == 4 else "is never the fastest"


_SHARED: dict[str, Any] = dict(
    problems=problems,
    tolerance=_tolerance,
    pdl=True,
)

PERMUTE = register(
    KernelSpec(
        op="moe_permute",
        name="rows",
        source="moe/permute.cu",
        entry="moe_permute",
        doc="rows of tokens to the places of their choices",
        params=(*PARAMS, Param("threads", (128,), "threads of a block", tunable=True)),
        block=_threads,
        grid=lambda params, p: (_blocks(params, p) + p["groups"], 1, 1),
        bytes=lambda p: (p["tokens"] + p["places"]) * _rows(p),
        arguments=lambda params, p, arrays: {
            **{name: arrays.get(name) for name in ("x", "inverse", "offsets", "counts", "out")},
            **{"x_stride": p["stride"], **_values(p, _NAMES)},
        },
        inputs=inputs(("x",)),
        outputs=lambda params, p: {"out": _poisoned(p, p["places"])},
        reference=permuted,
        **_SHARED,
    )
)

COMBINE = register(
    KernelSpec(
        op="moe_combine",
        name="rows",
        source="moe/combine.cu",
        entry="moe_combine",
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
        flops=lambda p: 2.0 * p["tokens"] * p["top_k"] * p["columns"],
        bytes=lambda p: p["tokens"] * (p["top_k"] + 1) * _rows(p),
        arguments=lambda params, p, arrays: {
            **{name: arrays.get(name) for name in ("y", "inverse", "weights", "out")},
            **{"y_stride": p["stride"], **_values(p, ("top_k", "columns"))},
        },
        inputs=inputs(("y",)),
        outputs=lambda params, p: {"out": _poisoned(p, p["tokens"])},
        reference=combined,
        **_SHARED,
    )
)

COMBINE_BACKWARD = register(
    KernelSpec(
        op="moe_combine",
        name="backward",
        source="moe/combine_backward.cu",
        entry="moe_combine_backward",
        doc="gradients of the weighted sums: of rows and of weights",
        params=(*PARAMS, Param("threads", (256,), "threads of a block", tunable=True)),
        block=_threads,
        grid=_tokens_and_groups,
        flops=lambda p: 3.0 * p["tokens"] * p["top_k"] * p["columns"],
        bytes=lambda p: (p["tokens"] * (p["top_k"] + 1) + p["places"]) * _rows(p),
        arguments=lambda params, p, arrays: {
            **{name: arrays.get(name) for name in _BACKWARD},
            **{"y_stride": p["stride"], **_values(p, _NAMES)},
        },
        inputs=inputs(("y", "dout")),
        outputs=lambda params, p: {
            "dy": _poisoned(p, p["places"]),
            "dweights": np.full((p["tokens"], p["top_k"]), np.nan, np.float32),
        },
        reference=combined_backward,
        **_SHARED,
    )
)
