"""A mask as bits, as attention's backward on sm_90 has it:
templates/attention/backward_sm90/mask.cuh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from fkjit.ops.attention.backward import feature_kernels as portable
from fkjit.runtime.interop import View
from fkjit.spec import Arrays, KernelSpec, Param, Params, Problem, register

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


def _works(params: Params, problem: Problem) -> int:
    batch, heads, tiles, keys, _ = shape(params["block_q"], problem)
    return batch * heads * tiles * (keys // _BLOCK_K)


def _grid(params: Params, problem: Problem) -> tuple[int, int, int]:
    return -(-_works(params, problem) * 32 // THREADS), 1, 1


def _arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    mask = arrays["mask"]
    _, heads, tiles, keys, _ = shape(params["block_q"], problem)
    steps = zip(mask.strides[:3], problem["mask_shape"], strict=True)
    return {
        **{name: arrays[name] for name in ("mask", "mask_bits")},
        "mask_strides": tuple(step * (extent > 1) for step, extent in steps),
        "works": _works(params, problem),
        **{"heads": heads, "rows": problem["mask_shape"][2], "tiles": tiles},
        **{"blocks": keys // _BLOCK_K, "seqlen_k": problem["seqlen_k"]},
    }


def bits(block_q: int, problem: Problem, mask: np.ndarray) -> np.ndarray:
    """Those of a mask."""
    batch, heads, tiles, keys, words = shape(block_q, problem)
    found = np.zeros((batch, heads, tiles * block_q, keys), bool)
    rows = problem["mask_shape"][2]
    own = mask[:batch, :heads, :rows] != 0
    found[:, :, :rows, : mask.shape[3]] = own
    found[:, :, rows:, : mask.shape[3]] = own[:, :, -1:]
    turned = found.reshape(batch, heads, tiles, words, 32, keys).transpose(0, 1, 2, 5, 3, 4)
    packed = (turned.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(-1)
    return np.ascontiguousarray(packed, np.uint32)


def _problems(params: Params, scale: str) -> Sequence[Problem]:
    long = 70 if scale == "small" else 1000
    return [
        {"mask_shape": (2, 1, long), "seqlen_k": 132}, {"mask_shape": (1, 3, 1), "seqlen_k": 71},
    ]  # fmt: skip


def _inputs(params: Params, problem: Problem, rng: np.random.Generator) -> Arrays:
    size = (*problem["mask_shape"], problem["seqlen_k"])
    return {
        "mask": (rng.random(size) < 0.5).astype(np.uint8) * rng.integers(1, 255, size, np.uint8)
    }


def _reference(problem: Problem, arrays: Mapping[str, Any]) -> Arrays:
    return {"mask_bits": bits(problem["block_q"], problem, arrays["mask"]).astype(np.float64)}


MASK = register(
    KernelSpec(
        op=portable.OP,
        name="mask",
        source="attention/backward_mask.cu",
        entry="attention_backward_mask",
        doc="a mask of bytes as bits, for blocks of keys",
        params=(Param("block_q", (64, 128), "queries of a tile"),),
        derive=lambda params: {"threads": THREADS},
        block=lambda params: (THREADS, 1, 1),
        grid=_grid,
        problems=lambda params, scale: [
            {**one, "block_q": params["block_q"]} for one in _problems(params, scale)
        ],
        inputs=_inputs,
        outputs=lambda params, problem: {
            "mask_bits": np.full(shape(params["block_q"], problem), 0xA5A5A5A5, np.uint32)
        },
        arguments=_arguments,
        reference=_reference,
        tolerance=lambda params: 0.0,
    )
)
