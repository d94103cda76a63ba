"""Decoding: how a problem becomes a grid that fills the GPU once, and the kernel's arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from fkjit.arch import Arch
from fkjit.ops.attention.decode.problem import keys_read, keys_seen, rows
from fkjit.ops.attention.problem import feature_arguments
from fkjit.runtime.interop import ITEMSIZE
from fkjit.runtime.workspace import ARGUMENTS
from fkjit.spec import Params, Problem, SharedLayout

_RESERVED = 1024  # bytes of shared memory that the system takes of each block
_BUSY = 0.95  # of the SMs, at least, where heads go abreast
_NO_PAGES = 31  # log2 of a page that no sequence fills
_LEAST_SCALE = 1e-30  # leaves exp2(score * scale) = 1, where 0 would turn a masked -inf into NaN


def stored_bytes(params: Params) -> int:
    """Of an element of k and v in memory."""
    return ITEMSIZE[params["dtype"]] if params["storage"] == "same" else 1


def groups(params: Params) -> int:
    """Of warps that share a tile of rows, each with keys of its own."""
    return _groups(params["tile"], params["rows"])


def _groups(tile: tuple[int, ...], rows: int) -> int:
    return tile[0] * 16 // rows or 1


def shared_layout(params: Params) -> SharedLayout:
    """Q, and the groups' rings of keys and values."""
    return _shared(
        params["tile"], params["rows"], params["head_dim"], stored_bytes(params), groups(params)
    )


@lru_cache(maxsize=256)
def _shared(
    tile: tuple[int, ...], rows: int, head_dim: int, element: int, groups: int
) -> SharedLayout:
    _, keys, stages, _ = tile
    rings = [(f"ring {i}", stages * 2 * keys * head_dim * element) for i in range(groups)]
    return [("Q", 2 * rows * head_dim), *rings]


def blocks_of_an_sm(params: Params, arch: Arch) -> int:
    """That run at a time."""
    tile, each = params["tile"], stored_bytes(params)
    return _blocks(tile, params["rows"], params["head_dim"], each, arch.shared_per_sm)


@lru_cache(maxsize=256)
def _blocks(
    tile: tuple[int, ...], rows: int, head_dim: int, element: int, shared_per_sm: int
) -> int:
    layout = _shared(tile, rows, head_dim, element, _groups(tile, rows))
    shared = _RESERVED + sum(size for _, size in layout)
    return max(1, min(tile[3], shared_per_sm // shared))


def unit_keys(params: Params, problem: Problem) -> int:
    """Keys of a work unit: a step of every group, or a split of fixed size."""
    tile = params["tile"]
    return problem["split"] or tile[1] * _groups(tile, params["rows"])


def heads(params: Params, problem: Problem) -> int:
    """KV heads of a sequence, each as often as it has tiles of rows."""
    return problem["heads_kv"] * -(-rows(problem) // params["rows"])


def units(params: Params, problem: Problem) -> int:
    """Work units of all sequences, each as long as it may become."""
    each = max(1, -(-keys_read(problem, problem["longest"]) // unit_keys(params, problem)))
    return problem["batch"] * heads(params, problem) * each


def on_grid(params: Params, problem: Problem, sms: int, arch: Arch) -> dict[str, Any]:
    """The problem with a grid that fills so many SMs once, or has a block for each unit.

    Heads go abreast where that leaves few SMs without work.
    """
    most, of_sequence = sms * blocks_of_an_sm(params, arch), heads(params, problem)
    whole = most // of_sequence * of_sequence
    blocks = min(whole if whole >= _BUSY * most else most, units(params, problem))
    return {**problem, "blocks": blocks}


def abreast(params: Params, problem: Problem) -> int:
    """Heads that neighbouring blocks take: all of a sequence where that divides the grid, or 1."""
    of_sequence = heads(params, problem)
    return 1 if problem["blocks"] % of_sequence or params["head_dim"] > 128 else of_sequence


def slots(params: Params, problem: Problem) -> int:
    """Of partial results in the workspace."""
    return units(params, problem) if problem["split"] else 2 * problem["blocks"]


def workspace(params: Params, problem: Problem) -> tuple[int, int]:
    """(bytes, counters) in which blocks meet."""
    of_a_slot = min(rows(problem), params["rows"]) * (params["head_dim"] + 2)
    of_heads = problem["batch"] * heads(params, problem)
    counters = of_heads if problem["split"] else min(of_heads, problem["blocks"])
    return 4 * slots(params, problem) * of_a_slot, counters


def padded_flops(params: Params, problem: Problem) -> float:
    """What the kernel multiplies: whole tiles of rows, steps and padded head dimensions; with
    score features as much again for their rules."""
    steps = keys_seen(problem) / params["tile"][1] + 4 * problem["batch"]
    tile = params["rows"] * params["tile"][1] * params["head_dim"]
    return (8.0 if "form" in params else 4.0) * heads(params, problem) * steps * tile


# The first arguments of the kernel.
POINTERS = (
    "q", "k", "v", "page_table", "seq_lens", "rows", "k_scale", "v_scale", "o", "lse", "workspace",
    "counters",
)  # fmt: skip


def arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Kernel arguments by name. Strides are taken from the arrays."""
    axes, page_axes = problem["axes"], problem["page_axes"]
    group, page_size = problem["heads_q"] // problem["heads_kv"], problem["page_size"]
    scale = problem["softmax_scale"] * math.log2(math.e)
    usual = {
        **{n: arrays.get(n) for n in POINTERS if n in arrays or n not in ARGUMENTS},
        "q_strides": _strides(arrays["q"], axes), "o_strides": _strides(arrays["o"], axes),
        "k_strides": _strides(arrays["k"], page_axes),
        "v_strides": _strides(arrays["v"], page_axes),
        "batch": problem["batch"], "heads_kv": problem["heads_kv"],
        "seqlen_q": problem["seqlen_q"],
        "head_dim": problem["head_dim"], "head_dim_v": problem["head_dim_v"],
        "group_size": group, "group_inverse": 1 / group,
        "longest": problem["longest"], "table_rows": problem["table_rows"],
        "table_width": problem["table_width"], "num_pages": problem["num_pages"],
        "page_log2": page_size.bit_length() - 1 if page_size else _NO_PAGES,
        "unit_log2": unit_keys(params, problem).bit_length() - 1,
        "split": int(problem["split"] > 0),
        "slots": slots(params, problem),
        "abreast": abreast(params, problem),
        "softmax_scale_log2": scale if abs(scale) > _LEAST_SCALE else _LEAST_SCALE,
        "causal": int(problem["causal"]),
    }  # fmt: skip
    return usual | feature_arguments(problem, arrays) if "window" in problem else usual


def _strides(array: Any, axes: tuple[int, int, int | None]) -> tuple[int, int, int]:
    """In elements, of batch (page), head and token."""
    (batch, head, token), steps, size = axes, array.strides, array.itemsize
    of_token = 0 if token is None else steps[token] // size
    return steps[batch] // size, steps[head] // size, of_token
