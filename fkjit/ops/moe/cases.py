"""How the kernels that route and sort are checked: problems, arrays, references."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fkjit.ops.moe.groups import GROUP, NO_CAPACITY, MoeGroups, counters, made, places_of
from fkjit.ops.moe.problem import LEAST, MAX_EXPERTS, SCORINGS, is_vector
from fkjit.ops.moe.route_and_regroup import room_of
from fkjit.runtime.interop import ITEMSIZE, numpy_dtype
from fkjit.spec import Arrays, Params, Problem, Verification


def route_problem(
    dtype: str, tokens: int, experts: int, top_k: int, **other: Any
) -> dict[str, Any]:
    """A problem as tests and benchmarks want it: rows without gaps, softmax."""
    made = {
        **{"dtype": dtype, "tokens": tokens, "experts": experts, "top_k": top_k},
        **{"scoring": "softmax", "renormalize": False, "biased": False, "scale": 1.0},
        **{"num_groups": 1, "topk_groups": 1, "row_stride": experts},
        **other,
    }
    groups, best = made["num_groups"], 2 if made["biased"] else 1
    made.setdefault("group_topk", 1 if groups == 1 else min(best, experts // groups))
    made["vector"] = is_vector(dtype, experts, made["num_groups"], made["row_stride"], 0)
    return made


def route_problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """A full tile; a ragged one with gaps; groups with a bias, where lanes are left for them."""
    (lanes, values), dtype = params["tile"], params["dtype"]
    size, full = 16 // ITEMSIZE[params["dtype"]], lanes * values
    tokens = 37 if scale == "small" else 3001
    top_k = min(lanes, 8 if scale == "full" else 3)
    found = [route_problem(dtype, tokens, full, top_k)]
    if params["plain"]:
        odd = {"renormalize": True, "scale": 2.5, "row_stride": full}
        return [*found, route_problem(dtype, tokens, full - size, 2, **odd)]
    found = [] if scale == "small" else found
    found.append(
        route_problem(
            dtype, tokens, full - size - 3, 2, scoring="sigmoid", renormalize=True, biased=True,
            scale=2.5, row_stride=full,
        )
    )  # fmt: skip
    groups = {"num_groups": 4, "topk_groups": 2, "biased": True, "renormalize": True}
    found.append(route_problem(dtype, tokens, full, 3, scoring="sigmoid", **groups))
    if scale == "full":
        found.append(route_problem(dtype, tokens, full // 2, 1, num_groups=2, topk_groups=1))
        found.append(route_problem(dtype, tokens, full, 3, **groups))
    return found


def random_logits(p: Problem, rng: np.random.Generator) -> np.ndarray:
    """Rows with many ties, exact in every dtype; some with NaN, infinities, or all alike."""
    x = np.round(rng.standard_normal((p["tokens"], p["experts"])) * 16) / 8
    x[3::7] = 0.5
    for i, odd in enumerate((np.nan, np.inf, -np.inf)):
        x[i + 1 :: 11, rng.integers(p["experts"])] = odd
    x[5::17] = -np.inf
    made = np.full((p["tokens"], p["row_stride"]), np.nan)
    made[:, : p["experts"]] = x
    return made.astype(numpy_dtype(p["dtype"])).reshape(-1)


def random_routing(p: Problem, rng: np.random.Generator) -> Arrays:
    """Logits, and a bias where there is one."""
    made: Arrays = {"logits": random_logits(p, rng)}
    if p["biased"]:
        made["bias"] = (rng.integers(-2, 3, p["experts"]) / 4).astype(np.float32)
    return made


def route_outputs(params: Params, p: Problem) -> Arrays:
    """Poisoned."""
    shape = (p["tokens"], p["top_k"])
    return {
        "topk_weights": np.full(shape, np.nan, np.float32),
        "topk_ids": np.full(shape, -9, np.int32),
    }


def routed(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """Weights and ids of all tokens, in float64."""
    logits = np.asarray(arrays["logits"]).astype(np.float64).reshape(-1, p["row_stride"])
    x = np.nan_to_num(logits[: p["tokens"], : p["experts"]], nan=LEAST, posinf=np.inf, neginf=LEAST)
    with np.errstate(over="ignore"):
        scores = scores_of(x, p["scoring"])
    keys = x
    if arrays.get("bias") is not None:
        keys = scores.astype(np.float32) + np.asarray(arrays["bias"])
        keys = np.maximum(np.nan_to_num(keys, nan=LEAST, posinf=np.inf, neginf=LEAST), LEAST)
    keys = _limited(keys, scores if arrays.get("bias") is None else keys, p)
    ids = np.argsort(-keys, axis=-1, kind="stable")[:, : p["top_k"]]
    weights = np.take_along_axis(scores, ids, -1)
    if p["renormalize"]:
        total = weights.sum(-1, keepdims=True)
        weights = weights / np.where(total > 0, total, 1)
    return {"topk_weights": weights * p["scale"], "topk_ids": ids.astype(np.float64)}


def scores_of(x: np.ndarray, scoring: str) -> np.ndarray:
    """Softmax, sigmoid or the root of softplus of float64 rows; of several +inf each has the same
    share."""
    if scoring == "sigmoid":
        return 1 / (1 + np.exp(-x))
    if scoring == "sqrtsoftplus":
        return np.sqrt(np.logaddexp(0, np.minimum(x, 1e30)))
    peak = x.max(-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        terms = np.where(x == peak, 1.0, np.exp(x - peak))
    return terms / terms.sum(-1, keepdims=True)


def _limited(keys: np.ndarray, scores: np.ndarray, p: Problem) -> np.ndarray:
    """-inf for the experts of groups that are not among the best; of equal sums the first ones."""
    groups = p["num_groups"]
    if groups == 1:
        return keys
    of = keys if p["group_topk"] == 1 else scores
    grouped = np.sort(of.reshape(len(of), groups, -1), -1)
    best = np.maximum(grouped[..., -p["group_topk"] :].sum(-1), LEAST)
    kept = np.argsort(-best, axis=-1, kind="stable")[:, : p["topk_groups"]]
    mask = np.zeros(best.shape, bool)
    np.put_along_axis(mask, kept, True, -1)
    return np.where(np.repeat(mask, keys.shape[1] // groups, 1), keys, -np.inf)


def group_problem(
    tokens: int, top_k: int, experts: int, block_size: int, blocks: int, **other: Any
) -> dict[str, Any]:
    """A problem as tests and benchmarks want it: every expert is here, nothing is dropped."""
    made = {
        **{"tokens": tokens, "top_k": top_k, "experts": experts, "groups": experts},
        **{"block_size": block_size, "capacity": NO_CAPACITY, "blocks": blocks},
        **{"mapped": False, "real": None},
        **other,
    }
    made["places"] = places_of(tokens * top_k, made["groups"], block_size)
    return made


def variations(most: int, round_: int, scale: str) -> list[dict[str, Any]]:
    """Sizes of grids, maps, capacities, and tokens that are not there; for up to `most` groups.

    `round_`: tokens that the warps of a block have at a time.
    """
    blocks = 3 if scale == "small" else 60
    tokens = round_ * blocks * 5 // 4
    return [
        {"tokens": tokens, "experts": most, "block_size": 4, "blocks": blocks + GROUP},
        {
            **{"tokens": tokens, "experts": most - 7, "block_size": 12, "blocks": blocks},
            **{"mapped": True, "groups": (most - 7) // 2, "real": tokens - 14, "capacity": 5},
        },
        {"tokens": round_ * 3 // 2, "experts": most // 2, "block_size": 1, "blocks": 1},
    ]


def random_lists(p: Problem, rng: np.random.Generator, most: int = MAX_EXPERTS) -> Arrays:
    """A map to some of the experts, a number of tokens, and what blocks meet in."""
    found: Arrays = {"counters": np.zeros(max(counters(p, most), 1), np.uint32)}
    if p.get("mapped"):
        local = np.full(p["experts"], -1, np.int32)
        here = np.sort(rng.permutation(p["experts"])[: p["groups"]])
        local[here] = np.arange(here.size)
        found["expert_map"] = local
    if p.get("real") is not None:
        found["num_tokens"] = np.array([p["real"]], np.int32)
    return found


def group_outputs(p: Problem) -> Arrays:
    """Poisoned."""
    return {name: np.full(output.shape, -9, np.int32) for name, output in made(p).items()}


def grouped(p: Problem, ids: np.ndarray, arrays: Mapping[str, Any]) -> Arrays:
    """What becomes of ids [tokens, top_k]; in float64."""
    real = np.asarray(arrays.get("num_tokens", [p["tokens"]])).clip(0, p["tokens"])[0]
    flat = np.asarray(ids).astype(np.int64)[:real].reshape(-1)
    known = (flat >= 0) & (flat < p["experts"])
    group = np.where(known, flat, -1)
    keeps, local = p.get("keeps_remote", False), arrays.get("expert_map")
    if local is not None and not keeps:
        group = np.where(known, np.asarray(local)[group], -1)
    group[(group < 0) | (group >= p["groups"])] = -1
    size, sentinel = p["block_size"], p["tokens"] * p["top_k"]
    places = np.full(p["places"], sentinel)
    tiles, inverse = np.full(p["places"] // size, -1), np.full(sentinel, -1)
    offsets, counts = [0], []
    for e in range(p["groups"]):
        mine = np.flatnonzero(group == e)[: p["capacity"]]
        begin = offsets[-1]
        places[begin : begin + mine.size] = mine
        inverse[mine] = begin + np.arange(mine.size)
        end = begin + -(-mine.size // size) * size
        tiles[begin // size : end // size] = local[e] if keeps and local is not None else e
        offsets.append(end)
        counts.append(mine.size)
    found = (places, tiles, [offsets[-1]], inverse.reshape(-1, p["top_k"]), offsets, counts)
    return {
        name: np.asarray(x, np.float64) for name, x in zip(MoeGroups._fields, found, strict=True)
    }


def regroup_problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """Maps, capacities, grids; with ids that are none."""
    found = []
    kinds = variations(params["tile"][1], params["tile"][0] // 3, scale)
    for top_k, kind in zip((3, 2, 8), kinds, strict=True):
        found.append(group_problem(**{"top_k": top_k, **kind}))
    return found


def regroup_inputs(params: Params, p: Problem, rng: np.random.Generator) -> Arrays:
    """Ids of which some are outside; an expert that most go to, others that nobody goes to."""
    ids = rng.integers(-2, p["experts"] + 2, (p["tokens"], p["top_k"]))
    ids[rng.random(ids.shape) < 0.4] = p["experts"] // 3
    ids[ids % 5 == 1] = 0
    return {"topk_ids": ids.astype(params["ids"]), **random_lists(p, rng, params["tile"][1])}


def both_problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """As the two kernels have them."""
    lanes, values = params["tile"]
    found, dtype, plain = [], params["dtype"], params["plain"]
    kinds = variations(lanes * values, params["threads"] // lanes, scale)
    for number, kind in enumerate(kinds):
        top_k, biased = min(lanes, 3 + number), number == 1 and not plain
        if plain:
            kind = _in_chunks(kind, 16 // ITEMSIZE[dtype])
        group = group_problem(**{"top_k": min(top_k, kind["experts"]), **kind})
        scored = {"scoring": SCORINGS[biased], "biased": biased, "renormalize": number > 0}
        sizes = (group["tokens"], group["experts"], group["top_k"])
        found.append({**route_problem(dtype, *sizes, **scored), **group})
    return found


def _in_chunks(kind: dict[str, Any], size: int) -> dict[str, Any]:
    """With a multiple of so many experts."""
    experts = max(kind["experts"] // size, 1) * size
    some = {"groups": max(experts // 2, 1)} if "groups" in kind else {}
    return {**kind, "experts": experts, **some}


def both(p: Problem, arrays: Mapping[str, Any]) -> Arrays:
    """Of both."""
    made, real = routed(p, arrays), p["tokens"] if p["real"] is None else p["real"]
    made["topk_ids"][real:], made["topk_weights"][real:] = -1, 0
    return {**made, **grouped(p, made["topk_ids"], arrays)}


ROUTE = Verification(
    problems=route_problems,
    inputs=lambda params, p, rng: random_routing(p, rng),
    outputs=route_outputs,
    reference=routed,
    tolerance=lambda params: 1e-6,
)
REGROUP = Verification(
    problems=regroup_problems,
    inputs=regroup_inputs,
    outputs=lambda params, p: group_outputs(p),
    reference=lambda p, arrays: grouped(p, arrays["topk_ids"], arrays),
)
ROUTE_AND_REGROUP = Verification(
    problems=both_problems,
    inputs=lambda params, p, rng: {
        **random_routing(p, rng),
        **random_lists(p, rng, room_of(params["tile"])),
    },
    outputs=lambda params, p: {**route_outputs(params, p), **group_outputs(p)},
    reference=both,
    tolerance=lambda params: 1e-6,
)
