"""How grouped products are checked: experts with some rows, with none, with all of them; room for
more than there is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fkjit.ops.gemm.cases import TOLERANCE, activated
from fkjit.ops.gemm.problem import outputs_of
from fkjit.ops.grouped.kernels import LEAST_BLOCK
from fkjit.runtime.interop import numpy_dtype
from fkjit.spec import Arrays, Params, Problem, Verification


def problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """Tiles that are cut in n and k; few blocks, so that each takes several tiles."""
    rows = params["block"][0]
    block = rows // 2 if "tma_store" in params and rows > 64 else rows  # tiles that are half full
    if "tma_store" in params and params["groups"] == "DEPTH":
        block = 48  # three of four slices that wgmma takes
    columns = params["block"][1] // (2 if params["gate"] else 1)
    step = 8 if params.get("aligned", True) else 1
    odd = 0 if params.get("tma_store", True) else 1  # rows of out on no boundaries
    counts = ((1, 0, 2), (0, 3)) if scale == "small" else ((3, 0, 1, 7, 2), (0, 0, 9, 0), (1,) * 33)
    deep, wide = (1, 1) if scale == "small" else (9, 5)
    found = []
    for blocks in counts:
        n, k = wide * columns + 16 + (step % 8 or odd), 64 * deep + 24 + step % 8
        found.append(problem(params, blocks, n, k, block))
    return found


def problem(
    params: Params, blocks: Sequence[int], n: int, k: int, block: int, **given: Any
) -> dict[str, Any]:
    """`blocks` of places of each expert; of DEPTH n and k are sides of the outputs."""
    deep = params["groups"] == "DEPTH"
    places = (sum(blocks) + 2) * block  # there is room for two more
    if params["groups"] == "MASKED":
        places = len(blocks) * (max(blocks) + 1) * block
    m, n, k = (-(-n // 16) * 16, k, places) if deep else (places, n, k)
    wide = 2 * n if params["gate"] else n
    sizes = {"tokens": -(-places // _TOP_K), "top_k": _TOP_K}
    by_k = params["weight_layout"] == "nk"
    return {
        **sizes, "m": m, "n": n, "k": k, "dtype": params["dtype"],
        "out_dtype": params.get("out_dtype", params["dtype"]), "groups": params["groups"],
        "experts": len(blocks), "block_size": block, "blocks": tuple(blocks),
        **{name: params[name] for name in ("x_layout", "weight_layout", "activation", "gate")},
        "x_stride": m if deep else k, "weight_stride": k if by_k else wide, "out_stride": n,
        "gather": params.get("gather", False), "residual_stride": n, "scale": 1.0,
        "pre": params["pre"], "bias": not deep,
        "residual": False, "multiprocessors": 2, **given,
    }  # fmt: skip


def runs(p: Problem) -> list[slice]:
    """The rows of each expert; of MASKED up to whole tiles, which are multiplied."""
    if p["groups"] != "MASKED":
        return [slice(a, b) for a, b in zip(starts(p)[:-1], starts(p)[1:], strict=True)]
    capacity, made = p["m"] // p["experts"], -(-counts(p) // LEAST_BLOCK) * LEAST_BLOCK
    return [slice(e * capacity, e * capacity + int(n)) for e, n in enumerate(made)]


def counts(p: Problem) -> np.ndarray:
    """Rows of each expert where not all of its places are taken."""
    taken = np.asarray(p["blocks"]) * p["block_size"]
    return np.maximum(taken - LEAST_BLOCK // 4, 0).astype(np.int32)


def starts(p: Problem) -> np.ndarray:
    """Where experts' places begin, and the last ones end."""
    return np.concatenate([[0], np.cumsum(p["blocks"])]).astype(np.int32) * p["block_size"]


def inputs(params: Params, p: Problem, rng: np.random.Generator) -> Arrays:
    """N(0, 1) and weights such that sums are. Where nobody's places are is NaN; of MASKED a number,
    so that it shows in results that should not be there."""
    m, n, k, dtype, end = p["m"], p["n"], p["k"], numpy_dtype(p["dtype"]), starts(p)[-1]
    if p["groups"] == "DEPTH":
        x, weight = (np.full((k, side), np.nan, dtype) for side in (m, n))
        x[:end] = (rng.standard_normal((end, m)) / math.sqrt(max(end, 1))).astype(dtype)
        weight[:end] = rng.standard_normal((end, n)).astype(dtype)
        return {"x": x, "weight": weight, "offsets": starts(p)}
    if p["gather"]:
        return _gathered(p, rng) | _weights(p, rng)
    x = np.full((m, k), 64.0 if p["groups"] == "MASKED" else np.nan, dtype)
    for run in runs(p):
        x[run] = rng.standard_normal((run.stop - run.start, k)).astype(dtype)
    offsets = counts(p) if p["groups"] == "MASKED" else starts(p)
    return {"x": x, "offsets": offsets} | _weights(p, rng)


def _weights(p: Problem, rng: np.random.Generator) -> Arrays:
    k, wide, experts, dtype = p["k"], outputs_of(p), p["experts"], numpy_dtype(p["dtype"])
    shape = (experts, wide, k) if p["weight_layout"] == "nk" else (experts, k, wide)
    weight = (rng.standard_normal(shape) / math.sqrt(k)).astype(dtype)
    bias = rng.standard_normal((experts, wide)).astype(dtype)
    return {"weight": weight, **({"bias": bias} if p["bias"] else {})}


_TOP_K, _NOBODY = 3, 5  # places at the end of each expert's that no token has


def _gathered(p: Problem, rng: np.random.Generator) -> Arrays:
    """x of tokens, and whose choices places have, in any order."""
    places = np.concatenate([np.arange(r.start, max(r.stop - _NOBODY, r.start)) for r in runs(p)])
    ids = np.full(p["m"], p["tokens"] * _TOP_K, np.int32)
    ids[places] = rng.permutation(p["tokens"] * _TOP_K)[: len(places)]
    x = rng.standard_normal((p["tokens"], p["k"])).astype(numpy_dtype(p["dtype"]))
    return {"x": x, "sorted_token_ids": ids, "offsets": starts(p)}


def outputs(params: Params, p: Problem) -> Arrays:
    """NaN, which stays where nobody's places are."""
    shape = (p["experts"], p["m"], p["n"]) if p["groups"] == "DEPTH" else (p["m"], p["n"])
    made = {"out": np.full(shape, np.nan, numpy_dtype(p["out_dtype"]))}
    if p["pre"]:
        made["pre"] = np.full((p["m"], outputs_of(p)), np.nan, numpy_dtype(p["dtype"]))
    return made


def reference(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """In float64, expert by expert."""
    x, weight = (np.asarray(arrays[name]).astype(np.float64) for name in ("x", "weight"))
    if p["groups"] == "DEPTH":
        return {"out": np.stack([x[run].T @ weight[run] for run in runs(p)])}
    if p["gather"]:
        ids = np.asarray(arrays["sorted_token_ids"])
        x = np.concatenate([x, np.zeros((1, p["k"]))])[np.minimum(ids // _TOP_K, p["tokens"])]
    z = np.full((p["m"], outputs_of(p)), np.nan)
    for expert, run in enumerate(runs(p)):
        own = weight[expert].T if p["weight_layout"] == "nk" else weight[expert]
        z[run] = x[run] @ own
        if p["bias"]:
            z[run] += np.asarray(arrays["bias"])[expert].astype(np.float64)
    y, n = activated(p["activation"], z[:, : p["n"]]), p["n"]
    y = y * z[:, n:] if p["gate"] else y
    return {"out": y, "pre": z} if p["pre"] else {"out": y}


GROUPED = Verification(
    problems=problems, inputs=inputs, outputs=outputs, reference=reference,
    tolerance=lambda params: TOLERANCE[params.get("out_dtype", params["dtype"])],
)  # fmt: skip
