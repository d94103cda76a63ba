"""Decoding: which tiles the kernel is compiled for, how a problem becomes a grid and arguments.

A problem: new tokens `seqlen_q` of `batch` sequences, `longest` keys at most, in pages of
`page_size` tokens, or 0: a page a sequence, without a table. `axes` and `page_axes` say where batch
(page), head and token stand in q and o, and in k and v. `split` is the number of keys of a part, or
0: parts as even as they come. `blocks` is the grid. A problem with a form has window=(left, right).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fkjit.arch import Arch
from fkjit.runtime.interop import ITEMSIZE
from fkjit.runtime.workspace import ARGUMENTS
from fkjit.spec import Params, Problem, SharedLayout

HEAD_DIMS = (64, 128, 256)  # what rows are padded to
ROWS = (16, 64)  # of a tile: query heads of a KV head times new tokens
MAX_TOKENS = 16  # new ones of a sequence
LEAST_SPLIT = 128  # keys of a part of a fixed size
ROUND = (
    32  # keys: a window's first unit begins at a multiple (templates/attention/decode/schedule.cuh)
)
_RESERVED = 1024  # bytes of shared memory that the system takes of each block
_BUSY = 0.95  # of the SMs, at least, where heads go abreast
_NO_PAGES = 31  # log2 of a page that no sequence fills

Tile = tuple[int, int, int, int]  # warps, keys of a step, steps in a ring, blocks of an SM
# By bytes of a key's element, head_dim, rows; fastest first. The last one fits GPUs with 99 KB.
_TILES: dict[tuple[int, int, int], tuple[Tile, ...]] = {
    (2, 64, 16): ((4, 32, 2, 3),),
    (2, 128, 16): ((8, 16, 2, 1), (4, 16, 2, 2)),
    (2, 256, 16): ((4, 16, 2, 1), (2, 16, 2, 1)),
    (2, 64, 64): ((4, 32, 3, 2),),
    (2, 128, 64): ((4, 32, 3, 2),),
    (1, 64, 16): ((4, 32, 3, 3),),
    (1, 128, 16): ((8, 32, 2, 1), (4, 32, 2, 2)),
    (1, 256, 16): ((4, 32, 2, 1), (2, 16, 4, 1)),
    (1, 64, 64): ((4, 32, 5, 2),),
    (1, 128, 64): ((4, 32, 5, 2),),
}
TILES = tuple(dict.fromkeys(tile for tiles in _TILES.values() for tile in tiles))


def kept_bytes(params: Params) -> int:
    """Of an element of k and v."""
    return ITEMSIZE[params["dtype"]] if params["storage"] == "same" else 1


def tiles(params: Params) -> tuple[Tile, ...]:
    """Those that are compiled, fastest first."""
    return _TILES.get((kept_bytes(params), params["head_dim"], params["rows"]), ())


def derive(params: Params) -> dict[str, Any]:
    """Further values of the template."""
    warps, keys, stages, min_blocks = params["tile"]
    kept = {"same": params["dtype"], "fp8": "e4m3", "int8": "i8"}[params["storage"]]
    return {
        **{"kept": kept, "num_warps": warps, "keys": keys, "stages": stages},
        **{"min_blocks": min_blocks, "q_in_registers": params["head_dim"] <= 128},
        "form": False,
    }


def illegal(params: Params) -> str | None:
    """Why a variant is not compiled, or None."""
    if not tiles(params):
        return f"rows={params['rows']} needs more shared memory than most GPUs have"
    return None if params["tile"] in tiles(params) else "is never the fastest tile"


def shared_layout(params: Params) -> SharedLayout:
    """Q, and the groups' rings of keys and values."""
    warps, keys, stages, _ = params["tile"]
    groups = max(1, warps * 16 // params["rows"])
    ring = stages * 2 * keys * params["head_dim"] * kept_bytes(params)
    return [("Q", 2 * params["rows"] * params["head_dim"]),
            *((f"ring {i}", ring) for i in range(groups))]  # fmt: skip


def blocks_of_an_sm(params: Params, arch: Arch) -> int:
    """That run at a time."""
    shared = sum(size for _, size in shared_layout(params)) + _RESERVED
    return max(1, min(params["tile"][3], arch.shared_per_sm // shared))


def unit_keys(params: Params, problem: Problem) -> int:
    """Keys of a unit of work: a step of every group, or a part of fixed size."""
    warps, keys, _, _ = params["tile"]
    return problem["split"] or keys * max(1, warps * 16 // params["rows"])


def heads(params: Params, problem: Problem) -> int:
    """KV heads of a sequence, each as often as it has tiles of rows."""
    rows = problem["heads_q"] // problem["heads_kv"] * problem["seqlen_q"]
    return problem["heads_kv"] * -(-rows // params["rows"])


def keys_read(problem: Problem, length: int) -> int:
    """Of a sequence, at most: a window's, from ROUND on."""
    window = problem.get("window")
    return length if window is None else min(length, window[0] + problem["seqlen_q"] + ROUND - 1)


def units(params: Params, problem: Problem) -> int:
    """Of all sequences, each as long as it may become."""
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
    """Of parts in the workspace."""
    return units(params, problem) if problem["split"] else 2 * problem["blocks"]


def workspace(params: Params, problem: Problem) -> tuple[int, int]:
    """(bytes, counters) in which blocks meet."""
    rows = problem["heads_q"] // problem["heads_kv"] * problem["seqlen_q"]
    size = 4 * slots(params, problem) * min(rows, params["rows"]) * (params["head_dim"] + 1)
    of_heads = problem["batch"] * heads(params, problem)
    return size, of_heads if problem["split"] else min(of_heads, problem["blocks"])


# The first arguments of the kernel.
POINTERS = (
    "q", "k", "v", "page_table", "seq_lens", "rows", "k_scale", "v_scale", "o", "lse", "workspace",
    "counters",
)  # fmt: skip


def arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Kernel arguments by name. Strides are taken from the arrays."""

    def strides(name: str, axes: tuple[int | None, ...]) -> tuple[int, ...]:
        array = arrays[name]
        return tuple(0 if at is None else array.strides[at] // array.itemsize for at in axes)

    table, group = problem["page_size"] > 0, problem["heads_q"] // problem["heads_kv"]
    # A scale of 0 would turn a masked -inf into NaN; 1e-30 leaves exp2(score * scale) = 1.
    scale = problem["softmax_scale"] * math.log2(math.e)
    return {
        **{n: arrays.get(n) for n in POINTERS if n in arrays or n not in ARGUMENTS},
        **{f"{name}_strides": strides(name, problem["axes"]) for name in ("q", "o")},
        **{f"{name}_strides": strides(name, problem["page_axes"]) for name in ("k", "v")},
        **{n: problem[n] for n in ("batch", "heads_kv", "seqlen_q", "head_dim", "head_dim_v")},
        **{"group_size": group, "group_inverse": 1 / group},
        **{n: problem[n] for n in ("longest", "table_rows", "table_width", "num_pages")},
        "page_log2": problem["page_size"].bit_length() - 1 if table else _NO_PAGES,
        "unit_log2": unit_keys(params, problem).bit_length() - 1,
        "split": int(problem["split"] > 0),
        "slots": slots(params, problem),
        "abreast": abreast(params, problem),
        "softmax_scale_log2": scale if abs(scale) > 1e-30 else 1e-30,
        "causal": int(problem["causal"]),
    }


def keys_seen(problem: Problem) -> float:
    """Of all sequences: those that `lengths` of a problem say, or all there may be; in a window."""
    given = problem.get("lengths")
    lengths = [problem["longest"]] * problem["batch"] if given is None else given
    return float(sum(keys_read(problem, length) for length in lengths))


def flops(problem: Problem) -> float:
    """Multiplications and additions of the two products; the few masked keys are counted."""
    pairs = keys_seen(problem) * problem["heads_q"] * problem["seqlen_q"]
    return 2.0 * pairs * (problem["head_dim"] + problem["head_dim_v"])


def padded_flops(params: Params, problem: Problem) -> float:
    """What the kernel multiplies: whole tiles of rows, steps and padded head dimensions."""
    _, keys, _, _ = params["tile"]
    steps = keys_seen(problem) / keys + 4 * problem["batch"]
    return 4.0 * heads(params, problem) * params["rows"] * steps * keys * params["head_dim"]


def traffic(problem: Problem) -> float:
    """Bytes of keys and values, each read once; of queries and output."""
    dims = problem["head_dim"] + problem["head_dim_v"]
    kept = 1 if problem["storage"] != "same" else ITEMSIZE[problem["dtype"]]
    rows = problem["batch"] * problem["heads_q"] * problem["seqlen_q"]
    return dims * (keys_seen(problem) * problem["heads_kv"] * kept + rows * ITEMSIZE["fp16"])


def shape_class(problem: Problem) -> dict[str, Any]:
    """What decides which tile is best, coarsely."""

    def up_to(most: int, size: int) -> int:
        return min(1 << (max(size, 1) - 1).bit_length(), most)

    keys = keys_read(problem, problem["longest"])
    return {"keys": up_to(1 << 22, problem["batch"] * problem["heads_kv"] * keys),
            "page_size": problem["page_size"]}  # fmt: skip
