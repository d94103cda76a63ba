"""How the kernels that carry rows are checked: problems, arrays, references in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from fkjit.ops.moe.rows import problem_of
from fkjit.runtime.interop import ITEMSIZE, numpy_dtype
from fkjit.spec import Arrays, Params, Problem, Verification


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


_VERIFICATION = partial(Verification, problems=problems, tolerance=_tolerance)
PERMUTE = _VERIFICATION(
    inputs=inputs(("x",)),
    outputs=lambda params, p: {"out": _poisoned(p, p["places"])},
    reference=permuted,
)
COMBINE = _VERIFICATION(
    inputs=inputs(("y",)),
    outputs=lambda params, p: {"out": _poisoned(p, p["tokens"])},
    reference=combined,
)
COMBINE_BACKWARD = _VERIFICATION(
    inputs=inputs(("y", "dout")),
    outputs=lambda params, p: {
        "dy": _poisoned(p, p["places"]),
        "dweights": np.full((p["tokens"], p["top_k"]), np.nan, np.float32),
    },
    reference=combined_backward,
)
