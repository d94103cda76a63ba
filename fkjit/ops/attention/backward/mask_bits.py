"""A mask as bits, as attention's backward on sm_90 has it:
templates/attention/backward_sm90/mask.cuh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fkjit.ops.attention.backward.kernels_preprocess import CASES, OP_FEATURES
from fkjit.ops.attention.backward.problem import BITS_BLOCK_K, bits_shape
from fkjit.runtime.interop import View
from fkjit.spec import KernelSpec, Param, Params, Problem

_THREADS = 128


def own_shape(mask: View) -> tuple[int, ...]:
    """Batches, heads and rows of its own: an expanded mask has fewer than it says."""
    pairs = zip(mask.shape[:3], mask.strides[:3], strict=True)
    return tuple(extent if step else 1 for extent, step in pairs)


def _items(params: Params, problem: Problem) -> int:
    batch, heads, tiles, keys, _ = bits_shape(params["block_q"], problem)
    return batch * heads * tiles * (keys // BITS_BLOCK_K)


def _grid(params: Params, problem: Problem) -> tuple[int, int, int]:
    return -(-_items(params, problem) * 32 // _THREADS), 1, 1


def _arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    mask = arrays["mask"]
    _, heads, tiles, keys, _ = bits_shape(params["block_q"], problem)
    steps = zip(mask.strides[:3], problem["mask_shape"], strict=True)
    return {
        **{name: arrays[name] for name in ("mask", "mask_bits")},
        "mask_strides": tuple(step * (extent > 1) for step, extent in steps),
        "works": _items(params, problem),
        **{"heads": heads, "rows": problem["mask_shape"][2], "tiles": tiles},
        **{"blocks": keys // BITS_BLOCK_K, "seqlen_k": problem["seqlen_k"]},
    }


MASK = KernelSpec(
    op=OP_FEATURES,
    name="mask",
    source="attention/backward_mask.cu",
    entry="attention_backward_mask",
    doc="a mask of bytes as bits, for blocks of keys",
    params=(Param("block_q", (64, 128), "queries of a tile"),),
    derive=lambda params: {"threads": _THREADS},
    block=lambda params: (_THREADS, 1, 1),
    grid=_grid,
    arguments=_arguments,
    verification=f"{CASES}_sm90:MASK",
)
