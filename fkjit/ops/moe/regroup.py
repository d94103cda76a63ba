"""`fkjit.moe_regroup`: the choices of all tokens sorted by expert, padded to tiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fkjit.errors import ParameterError
from fkjit.ops.moe import groups as groups
from fkjit.ops.moe.checks import check_dense
from fkjit.ops.moe.groups import MoeGroups
from fkjit.ops.op.checks import check_dtype
from fkjit.ops.op.node import Node
from fkjit.ops.op.op import Launch, Op, Request
from fkjit.runtime.interop import View
from fkjit.spec import KernelSpec, Param, Params, Problem, Work, register

_CALL = "moe_regroup"
_IDS = ("int32", "int64")
# Threads of a block, and groups that it has room for; the first that has enough is taken, _MANY
# only for so many items a warp.
TILES = ((512, 64), (512, 256), (512, 512), (256, 1024))
_MANY, _WORTH = TILES[1], range(65, 129)
_ALONE = 4096  # items that one block sorts alone
_PER_BLOCK = 512  # items of a block, at least, where there are several


def moe_regroup(
    topk_ids: Any,
    num_experts: int,
    block_size: int = 1,
    *,
    expert_map: Any = None,
    num_local_experts: int | None = None,
    capacity: int | None = None,
    num_tokens: Any = None,
    keep_remote: bool = False,
) -> MoeGroups:
    """Sort the choices of all tokens by expert: stably, in one kernel, without atomics that decide.

    Args:
        topk_ids: int32 or int64 [tokens, top_k], contiguous: an expert's id for each choice; ids
            outside of 0 to num_experts - 1 are dropped. torch, CuPy, NumPy or any DLPack array.
        num_experts: up to 1024.
        block_size: rows of a tile of the matrix product to come: each expert's places are a
            multiple of it.
        expert_map: int32 [num_experts] on the same device, for expert parallelism: the local
            expert of each id, from 0 to num_local_experts - 1, or -1: not here, dropped.
        num_local_experts: default: num_experts.
        capacity: choices that an expert takes, at most: those of the lowest tokens (of one token
            the better one); the others are dropped.
        num_tokens: int32 [1] on the same device, read when the kernel runs: so many tokens are
            there, the rest of topk_ids is dropped. Default: all.
        keep_remote: choices of experts that expert_map has elsewhere keep places, as in vLLM's
            moe_align_block_size: all num_experts have tiles, and offsets and counts; expert_ids
            says -1 for those elsewhere, which whoever multiplies leaves out.

    Returns:
        MoeGroups, int32 arrays in the framework of `topk_ids`. Choice k of token t is number
        t * top_k + k.
        sorted_token_ids: the numbers, by expert and in order within each; up to the next tile, and
            behind the last one, the number of all choices stands in for none.
        expert_ids: the (local) expert of each tile; behind the last one -1.
        num_tokens_post_padded [1]: places up to the end of the last tile.
        inverse [tokens, top_k]: the place of each choice; -1: dropped.
        offsets [num_local_experts + 1]: where each expert's places begin, and the last ones end.
        counts [num_local_experts]: choices of each expert, without those dropped.
        The first three are laid out as vLLM's moe_align_block_size does it.

    Raises:
        ParameterError: sizes that do not fit, shapes, strides. ArgumentTypeError: not arrays, other
        dtypes. DeviceError: mixed devices. CaptureError: first call of a geometry under CUDA graph
        capture; see `fkjit.prepare`.

    One launch, which does not wait for the host and may be captured into a CUDA graph. Its blocks
    wait for one another: it is a cooperative launch of at most one block a multiprocessor.

    Example:
        >>> ids = np.array([[2, 3], [0, 3]], np.int32)  # of two tokens, two experts each
        >>> groups = fkjit.moe_regroup(ids, num_experts=4)
        >>> groups.counts, groups.offsets
        (array([1, 0, 1, 2], dtype=int32), array([0, 1, 1, 2, 4], dtype=int32))
    """
    return MoeGroups(*_OP(*_call(
        topk_ids, num_experts, block_size, expert_map, num_local_experts, capacity, num_tokens,
        keep_remote,
    )))  # fmt: skip


def _call(
    topk_ids: Any, num_experts: Any, block_size: Any, expert_map: Any, num_local_experts: Any,
    capacity: Any, num_tokens: Any, keep_remote: Any,
) -> Any:  # fmt: skip
    options = (num_experts, block_size, num_local_experts, capacity, keep_remote)
    return (topk_ids, expert_map, num_tokens), (None,) * len(MoeGroups._fields), options


def _prepare(
    topk_ids: Any,
    num_experts: int,
    block_size: int = 1,
    *,
    expert_map: Any = None,
    num_local_experts: int | None = None,
    capacity: int | None = None,
    num_tokens: Any = None,
    keep_remote: bool = False,
) -> None:
    """Compile and load what the call with the same arguments needs, without running it."""
    inputs, made, options = _call(
        topk_ids,
        num_experts,
        block_size,
        expert_map,
        num_local_experts,
        capacity,
        num_tokens,
        keep_remote,
    )
    _OP.prepare([*inputs, *made], options)


def _check(views: Mapping[str, View | None], *options: Any) -> Request:
    ids = views["topk_ids"]
    assert ids is not None
    check_dtype(_CALL, "topk_ids", ids, _IDS)
    if len(ids.shape) != 2 or not ids.shape[1]:
        raise ParameterError(
            f"{_CALL}: topk_ids has shape {tuple(ids.shape)}; allowed: [tokens, top_k]"
        )
    check_dense(_CALL, "topk_ids", ids)
    tokens, top_k = ids.shape
    problem = groups.describe(_CALL, views, tokens, top_k, *options)
    problem["ids"] = ids.dtype
    items = tokens * top_k
    blocks = min(groups.processors(ids), max(1, -(-items // _PER_BLOCK)))
    problem["blocks"] = 1 if items <= _ALONE else blocks
    each = -(-items // (problem["blocks"] * _MANY[0] // 32))
    tiles = (t for t in TILES if t != _MANY or each in _WORTH)
    tile = next(t for t in tiles if t[1] >= problem["groups"])
    launch = Launch(REGROUP, {"ids": ids.dtype, "tile": tile}, problem)
    return Request(
        {name: views[name] for name in _INPUTS}, groups.made(problem), (launch,),
        counters=groups.counters(problem, tile[1]),
    )  # fmt: skip


def arguments(params: Params, p: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Kernel arguments by name."""
    made = {"topk_ids": arrays.get("topk_ids"), **groups.arguments(p, arrays)}
    pieces = p["blocks"] * params["tile"][0] // 32
    return {**made, "top_k": p["top_k"], "how": groups.grouping(p, pieces)}


def _traffic(p: Problem) -> float:
    id_bytes = 8.0 if p.get("ids") == "int64" else 4.0
    return groups.traffic(p) + p["tokens"] * p["top_k"] * id_bytes


REGROUP = register(
    KernelSpec(
        op=_CALL,
        name="grid",
        source="moe/regroup.cu",
        entry="moe_regroup",
        doc="choices sorted by expert: a counting sort whose blocks meet once",
        params=(
            Param("ids", _IDS, "element type of topk_ids"),
            Param("tile", TILES, "(threads of a block, groups that it has room for)"),
        ),
        cooperative=True,
        pdl=True,
        derive=lambda params: {
            "id_type": {"int32": "i32", "int64": "i64"}[params["ids"]],
            **dict(zip(("threads", "most"), params["tile"], strict=True)),
        },
        block=lambda params: (params["tile"][0], 1, 1),
        grid=lambda params, p: (p["blocks"], 1, 1),
        arguments=arguments,
        work=Work(
            bytes=_traffic,
            interpreter_work=lambda params, p: 100.0 * p["tokens"] * p["top_k"],
        ),
        verification="fkjit.ops.moe.cases:REGROUP",
    )
)

_INPUTS = ("topk_ids", *groups.INPUTS)


def _fake(
    ids: Any, expert_map: Any, num_tokens: Any,
    experts: int, block_size: int, local: int | None, capacity: int | None, keeps: bool = False,
) -> list[Any]:  # fmt: skip
    return groups.fake(ids, ids.shape[0], ids.shape[1], experts, block_size, local, keeps)


_OP = Op(
    _CALL, inputs=_INPUTS, outputs=MoeGroups._fields, check=_check, optional=groups.INPUTS,
    node=Node(
        _fake,
        "int num_experts, int block_size, int? num_local_experts, int? capacity, "
        "bool keep_remote=False",
        len(MoeGroups._fields),
    ),
)  # fmt: skip
moe_regroup.prepare = _prepare  # type: ignore[attr-defined]
