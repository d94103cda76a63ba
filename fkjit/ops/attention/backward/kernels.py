"""dk, dv and dq on tensor cores of sm_80 and newer, with any score features rendered in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from fkjit.ops.attention.backward import problem
from fkjit.ops.attention.backward.features import CPU_MULTIPROCESSORS
from fkjit.ops.attention.backward.kernels_preprocess import (
    ALIGNED,
    CASES,
    HALF,
    NEEDS,
    OP,
    OP_FEATURES,
)
from fkjit.ops.attention.backward.tiles import (
    every_tile,
    is_heavy,
    is_tight,
    tiles,
    why_illegal,
)
from fkjit.ops.attention.features import PLAIN, parse
from fkjit.ops.attention.problem import shape_class
from fkjit.spec import KernelSpec, Param, Params, Problem, SharedLayout, Work

_DIMS = (
    Param("head_dim", (64, 128, 192, 256), "of q and k, padded to this in shared memory"),
    Param("head_dim_v", (64, 128, 256), "of v and dout, padded to this in shared memory"),
)
_FEATURES = "what it does beside causal attention"


@lru_cache(maxsize=1024)
def with_features(base: KernelSpec, text: str) -> KernelSpec:
    """A kernel with these score features (`ScoreFeatures.text`); `base` itself for ""."""
    if not text:
        return base
    params = [
        replace(param, values=every_tile(base.name, text)) if param.name == "tile" else param
        for param in base.params
    ]
    return replace(base, op=OP_FEATURES, params=(*params, Param("form", (text,), _FEATURES)))


def feature_values(name: str, params: Params, values: dict[str, Any]) -> dict[str, Any]:
    """`values` of a template and those of its score features, which take registers."""
    if "form" not in params:
        return {**PLAIN, **values}
    values = {**values, **parse(params["form"]).values()}
    if params["tile"] not in tiles("queries", params["head_dim"]):
        values["in_registers"] = False
    if "step_k" in values and params["head_dim"] > 128 and is_heavy(params):
        values["step_k"] = 16
    return {**values, **({"step_k": 16, "step_q": 16} if is_tight(name, params) else {})}


def rows_in_blocks(heads: str, rows: str, step: Callable[[Params], int]) -> Callable[..., Any]:
    """A grid of blocks of `step` rows of each head."""

    def grid(params: Params, one: Problem) -> tuple[int, int, int]:
        blocks = -(-one[rows] // step(params))
        return (blocks * one[heads] * one["batch"], 1, 1)

    return grid


def _spec(name: str, flops: Callable[[Problem], float], tile: str, **more: Any) -> KernelSpec:
    """What kernels on tensor cores have in common; `tile`: what its numbers are. Sums by atomics
    are only for aligned rows."""
    aligned = () if name in ("sums", "ordered") else (ALIGNED,)
    return KernelSpec(
        op=OP,
        name=name,
        illegal=lambda params: why_illegal(name, params),
        features=lambda params: NEEDS,
        shape_class=shape_class,
        arguments=more.pop("arguments", problem.arguments),
        work=Work(flops=flops, bytes=problem.traffic, interpreter_flops=3.6e9),
        params=(HALF, *_DIMS, Param("tile", every_tile(name), tile, tunable=True), *aligned),
        **more,
    )


# ------------------------------------------------------------------ dk and dv: a block owns keys


def _dkdv_shared(sums: bool) -> Callable[[Params], SharedLayout]:
    def layout(params: Params) -> SharedLayout:
        """K, V, P and dS where other warps read them, and stages of Q, dO, lse and delta."""
        block_k, block_q, _, warps_c, count = params["tile"]
        d, dv = params["head_dim"], params["head_dim_v"]
        scores = ("P", "dS") if warps_c > 1 else ("dS",) if sums else ()
        stages = [
            (f"{name} stage {i}", size)
            for i in range(count)
            for name, size in (
                ("Q", 2 * block_q * d), ("dO", 2 * block_q * dv), ("lse", 4 * block_q),
                ("delta", 4 * block_q),
            )
        ]  # fmt: skip
        exchanged = [(name, 2 * block_k * block_q) for name in scores]
        return [("K", 2 * block_k * d), ("V", 2 * block_k * dv), *exchanged, *stages]

    return layout


def heads_abreast(one: Problem) -> int:
    """Heads whose blocks of keys are drawn one after the other: as many as run at a time, so that
    few of one head do, and wait for one another."""
    return min(one["batch"] * one["heads_kv"], one.get("multiprocessors", CPU_MULTIPROCESSORS))


def _ordered_arguments(params: Params, one: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **problem.arguments(params, one, arrays),
        "counters": arrays.get("counters"),
        "heads_abreast": heads_abreast(one),
    }


def _dkdv(
    name: str, doc: str, entry: str = "keys", source: str = "backward_dkdv", **more: Any
) -> KernelSpec:
    """dk and dv; "sums": and dq, which blocks add to by atomics, "ordered": in a fixed order."""
    verified = {"sums": "DKDV_DQ", "ordered": "DKDV_ORDERED"}.get(name, "DKDV")
    sums = name in ("sums", "ordered")

    def derive(params: Params) -> dict[str, Any]:
        names = ("block_k", "block_q", "warps_k", "warps_c", "stages")
        values = {**dict(zip(names, params["tile"], strict=True)), "step_q": 32, "min_blocks": 1}
        more = {"sums": sums, **({"aligned": True} if sums else {})}
        return feature_values(name, params, values | more)

    return _spec(
        name,
        lambda one: problem.products(one, 2 + sums, 2),
        "keys, queries, warps of keys, warps alike, stages",
        source=f"attention/{source}.cu",
        entry=f"attention_backward_{entry}",
        doc=doc,
        derive=derive,
        shared_layout=_dkdv_shared(sums),
        block=lambda params: (32 * params["tile"][2] * params["tile"][3], 1, 1),
        grid=rows_in_blocks("heads_kv", "seqlen_k", lambda params: params["tile"][0]),
        verification=f"{CASES}:{verified}",
        **more,
    )


DKDV = _dkdv(
    "keys", "dk and dv on tensor cores (mma.sync): a block owns keys and walks over queries"
)
DKDV_DQ = _dkdv(
    "sums",
    "keys, with dq added up by atomics: five products, but not the same bits at every call",
)

DKDV_ORDERED = _dkdv(
    "ordered",
    "sums, whose blocks wait for one another: five products, the same bits at every call",
    "ordered",
    "backward/ordered",
    arguments=_ordered_arguments,
)

# ------------------------------------------------------------------ dq: a block owns queries


def _dq_derive(params: Params) -> dict[str, Any]:
    names = ("block_q", "block_k", "num_warps", "stages")
    values = {**dict(zip(names, params["tile"], strict=True)), "step_k": 32, "min_blocks": 1}
    return feature_values("queries", params, values | {"in_registers": params["head_dim"] <= 64})


def _dq_shared(params: Params) -> SharedLayout:
    """Q, dO, and stages of K and V; where accumulators start from a bias, lse and delta, too."""
    (block_q, block_k, _, count), d, dv = params["tile"], params["head_dim"], params["head_dim_v"]
    stages = [
        (f"{name} stage {i}", 2 * block_k * dim)
        for i in range(count)
        for name, dim in zip("KV", (d, dv), strict=True)
    ]
    rows = ("lse", "delta") if "form" in params and parse(params["form"]).seeded else ()
    own = [("Q", 2 * block_q * d), ("dO", 2 * block_q * dv)]
    return [*own, *stages, *((name, 4 * block_q) for name in rows)]


DQ = _spec(
    "queries",
    lambda one: problem.products(one, 2, 1),
    "queries, keys, warps, stages",
    source="attention/backward_dq.cu",
    entry="attention_backward_queries",
    doc="dq on tensor cores (mma.sync): a block owns queries and walks over keys",
    derive=_dq_derive,
    shared_layout=_dq_shared,
    block=lambda params: (32 * params["tile"][2], 1, 1),
    grid=rows_in_blocks("heads_q", "seqlen_q", lambda params: params["tile"][0]),
    verification=f"{CASES}:DQ",
)
