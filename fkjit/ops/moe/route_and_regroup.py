"""`fkjit.moe_route_and_regroup`: `moe_route` and `moe_regroup` in one launch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from fkjit.ops.moe import groups as groups
from fkjit.ops.moe import problem as moe
from fkjit.ops.moe.groups import MoeGroups
from fkjit.ops.moe.route import GROUP_TOPK, OPTIONS, chosen, describe, fake
from fkjit.ops.op.checks import FLOATS
from fkjit.ops.op.node import Node
from fkjit.ops.op.op import Launch, Op, Request, arch_of
from fkjit.runtime.interop import ITEMSIZE, View
from fkjit.spec import KernelSpec, Param, Params, Problem, Work, register
from fkjit.types import Scoring

_CALL = "moe_route_and_regroup"
_TILES = (moe.STAGED, *moe.TILES[len(moe.QUICK) :])
_ROUTING = 6  # options of moe_route before its last one
_ALONE = 2  # rounds of a block's warps that one block does alone


class MoeRouting(NamedTuple):
    """What `moe_route` and `moe_regroup` return."""

    topk_weights: Any
    topk_ids: Any
    groups: MoeGroups


def moe_route_and_regroup(
    logits: Any,
    top_k: int,
    block_size: int = 1,
    *,
    scoring: Scoring = "softmax",
    renormalize: bool = False,
    bias: Any = None,
    num_groups: int | None = None,
    topk_groups: int | None = None,
    routed_scaling_factor: float = 1.0,
    expert_map: Any = None,
    num_local_experts: int | None = None,
    capacity: int | None = None,
    num_tokens: Any = None,
    group_topk: int | None = None,
    keep_remote: bool = False,
) -> MoeRouting:
    """The experts of each token, and all choices sorted by expert, in one kernel.

    Arguments and results are those of `moe_route` and `moe_regroup`:
    (topk_weights, topk_ids, groups). Tokens from `num_tokens` on have ids -1 and weights 0.

    One launch, which does not wait for the host and may be captured into a CUDA graph; logits are
    read once, and the choices go from registers to their places. Its blocks wait for one another:
    it is a cooperative launch of at most one block a multiprocessor.

    Example:
        >>> logits = np.array([[0, 1, 3, 2], [5, 0, 0, 4]], np.float32)  # two tokens, four experts
        >>> weights, ids, groups = fkjit.moe_route_and_regroup(logits, 2)
        >>> groups.counts
        array([1, 0, 1, 2], dtype=int32)
    """
    routing = (
        top_k, scoring, renormalize, num_groups, topk_groups, routed_scaling_factor,
    )  # fmt: skip
    found = _OP(
        (logits, bias, expert_map, num_tokens),
        (None,) * len(_OUTPUTS),
        (*routing, block_size, num_local_experts, capacity, group_topk, keep_remote),
    )
    return MoeRouting(found[0], found[1], MoeGroups(*found[2:]))


def _prepare(
    logits: Any,
    top_k: int,
    block_size: int = 1,
    *,
    scoring: Scoring = "softmax",
    renormalize: bool = False,
    bias: Any = None,
    num_groups: int | None = None,
    topk_groups: int | None = None,
    routed_scaling_factor: float = 1.0,
    expert_map: Any = None,
    num_local_experts: int | None = None,
    capacity: int | None = None,
    num_tokens: Any = None,
    group_topk: int | None = None,
    keep_remote: bool = False,
) -> None:
    """Compile and load what the call with the same arguments needs, without running it."""
    routing = (
        top_k, scoring, renormalize, num_groups, topk_groups, routed_scaling_factor,
    )  # fmt: skip
    arrays = (logits, bias, expert_map, num_tokens, *(None for _ in _OUTPUTS))
    _OP.prepare(
        [*arrays], (*routing, block_size, num_local_experts, capacity, group_topk, keep_remote)
    )


@lru_cache(maxsize=256)
def threads_of(tile: moe.Tile) -> int:
    """Of a block: as many as have room for their warps' counts."""
    return next(t for t in (512, 256) if groups.counts_fit(t, tile[0] * tile[1]))


def room_of(tile: moe.Tile) -> int:
    """Groups that the kernel has room for: whole warps of them."""
    return max(tile[0] * tile[1], 64)


def blocks_of(tile: moe.Tile, threads: int, tokens: int, processors: int) -> int:
    """One where its warps need few rounds; else as few as make no more rounds than all would."""
    rounds = -(-tokens // (threads // tile[0]))
    return 1 if rounds <= _ALONE else -(-rounds // -(-rounds // processors))


def _check(views: Mapping[str, View | None], *options: Any) -> Request:
    routing, (block_size, local, capacity) = options[:_ROUTING], options[_ROUTING:][:3]
    more = options[_ROUTING + 3 :]  # not there where PyTorch leaves defaults out
    logits = views["logits"]
    assert logits is not None
    staged = "cp_async" in arch_of(logits).features
    processors = groups.processors(logits)
    problem = describe(_CALL, views, *routing, *more[:1], blocks=processors, staged=staged)
    tile = problem["tile"]
    sizes = problem["tokens"], problem["top_k"]
    problem |= groups.describe(
        _CALL, views, *sizes, problem["experts"], block_size, local, capacity, *more[1:]
    )
    threads = threads_of(tile)
    problem["blocks"] = blocks_of(tile, threads, problem["tokens"], processors)
    params = {**moe.variant(problem), "threads": threads}
    return Request(
        {name: views[name] for name in _INPUTS}, {**chosen(problem), **groups.made(problem)},
        (Launch(KERNEL, params, problem),),
        counters=groups.counters(problem, room_of(tile)),
    )  # fmt: skip


def arguments(params: Params, p: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Kernel arguments by name."""
    return {
        **dict.fromkeys(("logits", "bias", "topk_weights", "topk_ids")),
        **groups.arguments(p, arrays),
        **{"row_stride": p["row_stride"], "how": moe.routing(params, p)},
        "grouping": groups.grouping(p, p["blocks"] * params["threads"] // params["tile"][0]),
    }


def _illegal(params: Params) -> str | None:
    lanes, values = params["tile"]
    if reason := moe.illegal(params):
        return reason
    if not groups.counts_fit(params["threads"], lanes * values):
        return "has too many warps for the counts of its experts"
    return None if params["threads"] == threads_of(params["tile"]) else "is never the fastest"


def _rows_bytes(params: Params) -> int:
    """Of the rows that are staged: a token for every two lanes."""
    if params["tile"] != moe.STAGED:
        return 0
    return params["threads"] * moe.STAGED[1] * ITEMSIZE[params["dtype"]]


KERNEL = register(
    KernelSpec(
        op=_CALL,
        name="grid",
        source="moe/route_and_regroup.cu",
        entry="moe_route_and_regroup",
        doc="top-k and a counting sort of the choices, whose blocks meet once",
        params=(
            Param("dtype", FLOATS, "element type of logits"),
            Param("tile", _TILES, "(lanes of a warp on a token, logits of each)"),
            Param("plain", (True, False), "softmax of one group of experts, in whole chunks"),
            Param("threads", (256, 512), "threads of a block", tunable=True),
        ),
        cooperative=True,
        pdl=True,
        derive=lambda params: {
            **dict(zip(("lanes", "values"), params["tile"], strict=True)),
            "staged": params["tile"] == moe.STAGED,
        },
        features=lambda params: frozenset({"cp_async"} if params["tile"] == moe.STAGED else ()),
        shared_bytes=_rows_bytes,
        illegal=_illegal,
        block=lambda params: (params["threads"], 1, 1),
        grid=lambda params, p: (p["blocks"], 1, 1),
        arguments=arguments,
        work=Work(
            flops=lambda p: float(p["tokens"] * p["experts"] * (4 + p["top_k"])),
            bytes=lambda p: moe.route_traffic(p) + groups.traffic(p),
        ),
        verification="fkjit.ops.moe.cases:ROUTE_AND_REGROUP",
    )
)

_INPUTS = ("logits", "bias", *groups.INPUTS)
_OUTPUTS = ("topk_weights", "topk_ids", *MoeGroups._fields)


def _fake(
    logits: Any, bias: Any, expert_map: Any, num_tokens: Any, top_k: int, *options: Any
) -> list[Any]:
    block_size, local, _, *more = options[_ROUTING - 1 :]
    tokens, experts = logits.shape
    grouped = groups.fake(logits, tokens, top_k, experts, block_size, local, *more[1:])
    return [*fake(logits, bias, top_k), *grouped]


_OP = Op(
    _CALL, inputs=_INPUTS, outputs=_OUTPUTS, check=_check, optional=_INPUTS[1:],
    node=Node(
        _fake,
        f"{OPTIONS}, int block_size, int? num_local_experts, int? capacity, {GROUP_TOPK}, "
        "bool keep_remote=False",
        len(_OUTPUTS),
    ),
)  # fmt: skip
moe_route_and_regroup.prepare = _prepare  # type: ignore[attr-defined]
