"""A mask as bits, as attention's backward on Hopper has it (templates/device/backward_mask.cuh)."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from fkjit.ops.attention.backward.kernels_preprocess import CASES, OP_FEATURES
from fkjit.runtime.interop import View
from fkjit.spec import KernelSpec, Param, Params, Problem

THREADS = 128
_BLOCK_K = 128


def shape(block_q: int, problem: Problem) -> tuple[int, int, int, int, int]:
    """Of the bits, in words."""
    batch, heads, rows = problem["mask_shape"]
    keys = -(-problem["seqlen_k"] // _BLOCK_K) * _BLOCK_K
    return batch, heads, -(-rows // block_q), keys, block_q // 32


def strides(block_q: int, problem: Problem) -> tuple[int, int, int]:
    """Words between batches, heads and tiles: 0 where there is but one."""
    sizes = shape(block_q, problem)
    return tuple(prod(sizes[i + 1 :]) * (sizes[i] > 1) for i in range(3))  # type: ignore[return-value]


def own_shape(mask: View) -> tuple[int, ...]:
    """Batches, heads and rows of its own: an expanded mask has fewer than it says."""
    pairs = zip(mask.shape[:3], mask.strides[:3], strict=True)
    return tuple(extent if step else 1 for extent, step in pairs)


def _items(params: Params, problem: Problem) -> int:
    batch, heads, tiles, keys, _ = shape(params["block_q"], problem)
    return batch * heads * tiles * (keys // _BLOCK_K)


def _grid(params: Params, problem: Problem) -> tuple[int, int, int]:
    return -(-_items(params, problem) * 32 // THREADS), 1, 1


def _arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    mask = arrays["mask"]
    _, heads, tiles, keys, _ = shape(params["block_q"], problem)
    steps = zip(mask.strides[:3], problem["mask_shape"], strict=True)
    return {
        **{name: arrays[name] for name in ("mask", "mask_bits")},
        "mask_strides": tuple(step * (extent > 1) for step, extent in steps),
        "works": _items(params, problem),
        **{"heads": heads, "rows": problem["mask_shape"][2], "tiles": tiles},
        **{"blocks": keys // _BLOCK_K, "seqlen_k": problem["seqlen_k"]},
    }


MASK = KernelSpec(
    op=OP_FEATURES,
    name="mask",
    source="attention/backward_mask.cu",
    entry="attention_backward_mask",
    doc="a mask of bytes as bits, for blocks of keys",
    params=(Param("block_q", (64, 128), "queries of a tile"),),
    derive=lambda params: {"threads": THREADS},
    block=lambda params: (THREADS, 1, 1),
    grid=_grid,
    arguments=_arguments,
    verification=f"{CASES}_sm90:MASK",
)
