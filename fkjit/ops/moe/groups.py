"""What the kernels that sort choices by expert share: sizes, checks and arguments.

A grouping problem: `tokens` times `top_k` items, each with an expert's id; ids below `experts` go
through a map, if there is one, to one of `groups` groups; a group's places are a multiple of
`block_size`, and at most `capacity` of its items have one. `blocks` is the size of the grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fkjit.arguments import whole
from fkjit.errors import ParameterError
from fkjit.ops.moe.problem import MAX_EXPERTS
from fkjit.ops.op.checks import check_dtype, check_flag, check_shape
from fkjit.ops.op.node import of_dtype
from fkjit.ops.op.op import Output
from fkjit.ops.op.shapes import log2_ceil, rows_of
from fkjit.runtime.device import multiprocessors
from fkjit.runtime.interop import CPU, View
from fkjit.spec import Problem
from fkjit.symbolic import cached

NO_CAPACITY = 2**31 - 1
MAX_ITEMS = 2**27 - 1  # GridSums counts them in 27 bits
_MAX_PLACES = 2**31 - 2**20
INPUTS = ("expert_map", "num_tokens")
_SHARED = 32 * 1024  # bytes of counts of a block's warps
GROUP = 16  # blocks of a group, and words before the sums, of GridSums
_HEAD = 32
_CPU_BLOCKS = 3


class MoeGroups(NamedTuple):
    """Choices sorted by expert; int32, all on the device. See `fkjit.moe_regroup`."""

    sorted_token_ids: Any
    expert_ids: Any
    num_tokens_post_padded: Any
    inverse: Any
    offsets: Any
    counts: Any

    def __repr__(self) -> str:
        shapes = zip(self._fields, self, strict=True)
        shown = (f"{name}={list(getattr(array, 'shape', ()))}" for name, array in shapes)
        return f"MoeGroups({', '.join(shown)})"


_ABSENT = dict.fromkeys((*INPUTS, *MoeGroups._fields))


def counts_fit(threads: int, most: int) -> bool:
    """Whether the warps of a block have room for the counts of so many groups."""
    return threads // 32 * most * 4 <= _SHARED


def processors(view: View) -> int:
    """Blocks that run at the same time, whatever they need."""
    return _CPU_BLOCKS if view.device == CPU else multiprocessors(view.device)


def describe(
    call: str, views: Mapping[str, View | None], tokens: int, top_k: int, *options: Any
) -> dict[str, Any]:
    """The grouping problem of checked ids and moe_regroup's options, without `blocks`."""
    experts, block_size, local, capacity, *more = options
    keeps = check_flag(call, "keep_remote", more[0]) if more else False
    experts = whole(call, "num_experts", experts, 1, MAX_EXPERTS)
    block_size = whole(call, "block_size", block_size, 1, 1 << 16)
    groups = experts if local is None else whole(call, "num_local_experts", local, 1, experts)
    if capacity is not None:
        capacity = whole(call, "capacity", capacity, 0, NO_CAPACITY)
    _check_lists(call, views, experts)
    if keeps:
        groups = experts
        if views["expert_map"] is None:
            raise ParameterError(f"{call}: keep_remote is True, but expert_map None: all are here")
    items = tokens * top_k
    places = places_of(items, groups, block_size)
    if items > MAX_ITEMS or places > _MAX_PLACES:
        raise ParameterError(f"{call}: {tokens} tokens of {top_k} choices are too many")
    return {
        **{"tokens": tokens, "top_k": top_k, "experts": experts, "groups": groups},
        **{"block_size": block_size, "places": places},
        "capacity": NO_CAPACITY if capacity is None else capacity,
        "keeps_remote": keeps,
    }


def _check_lists(call: str, views: Mapping[str, View | None], experts: int) -> None:
    for name, shape in (("expert_map", (experts,)), ("num_tokens", (1,))):
        view = views[name]
        if view is not None:
            check_dtype(call, name, view, ("int32",))
            check_shape(call, name, view, shape, "[num_experts], here" if shape[0] > 1 else "")
            rows_of(call, name, view)


def check_groups(call: str, views: Mapping[str, View | None]) -> int:
    """How many groups `offsets` and `counts` are of; 0 without them."""
    offsets, counts = views["offsets"], views["counts"]
    if offsets is None or counts is None:
        return 0
    for name, view in (("offsets", offsets), ("counts", counts)):
        check_dtype(call, name, view, ("int32",))
        if len(view.shape) != 1 or (view.shape[0] > 1 and view.strides[0] != 1):
            raise ParameterError(f"{call}: {name} is not one dimension, contiguous")
    if offsets.shape[0] != counts.shape[0] + 1:
        raise ParameterError(f"{call}: offsets has not one number more than counts")
    return counts.shape[0]


def places_of(items: int, groups: int, block_size: int) -> int:
    """Places for the worst that items can be spread, in whole tiles."""
    most = min(items * block_size, items + groups * (block_size - 1))
    return -(-most // block_size) * block_size


def made(p: Problem) -> dict[str, Output]:
    """The outputs, in the order of `MoeGroups`."""
    tiles = p["places"] // p["block_size"]
    shapes = (
        ("sorted_token_ids", (p["places"],)), ("expert_ids", (tiles,)),
        ("num_tokens_post_padded", (1,)), ("inverse", (p["tokens"], p["top_k"])),
        ("offsets", (p["groups"] + 1,)), ("counts", (p["groups"],)),
    )  # fmt: skip
    return {name: Output(shape, "int32") for name, shape in shapes}


def fake(
    ids: Any, tokens: Any, top_k: int, experts: int, block_size: int, local: int | None,
    keeps: bool = False,
) -> list[Any]:  # fmt: skip
    """The outputs without data, beside `ids`."""
    groups = experts if local is None or keeps else local
    sizes = {"tokens": tokens, "top_k": top_k, "groups": groups, "block_size": block_size}
    places = places_of(tokens * top_k, groups, block_size)
    return [of_dtype(ids, o.shape, "int32") for o in made({**sizes, "places": places}).values()]


def counters(p: Problem, most: int) -> int:
    """Words that the blocks add their counts up in; `most`: groups that the kernel has room for."""
    blocks = p["blocks"]
    return _HEAD + (-(-blocks // GROUP) + blocks) * most if blocks > 1 else 0


def grouping(p: Problem, pieces: int) -> tuple[int, ...]:
    """The kernels' argument `Grouping`; `pieces`: what share_of_warp divides by."""
    return (
        p["experts"], p["groups"], p["block_size"], *inverse(p["block_size"]),
        p["capacity"], p["places"], p["tokens"] * p["top_k"], *inverse(pieces),
        int(p.get("keeps_remote", False)),
    )  # fmt: skip


@cached(256)
def inverse(size: int) -> tuple[int, int]:
    """1 << (31 + shift) divided by `size`, rounded up, and shift: what divides by it."""
    shift = log2_ceil(size)
    return -(-(1 << 31 + shift) // size), shift


def arguments(p: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Kernel arguments that both kernels have."""
    return {**_ABSENT, **arrays, "tokens": p["tokens"]}


def traffic(p: Problem) -> float:
    """Bytes of the sorted list and of its inverse written."""
    return 4.0 * (p["places"] + p["tokens"] * p["top_k"])
