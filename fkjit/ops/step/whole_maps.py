"""Tensor maps of all weights of a decode step, as step/whole.cu reads them (step/weight_ring.cuh):
boxes of eight rows, as wide as a stage, in groups of 64 elements of 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fkjit.jit.signature import TENSOR_MAP_BYTES
from fkjit.runtime.tensor_map import TensorMap
from fkjit.spec import Problem

LAYER_WORDS = 17  # of a layer in the table of layers: LayerWeights of the kernel
SCALES = 4  # of those: of qkv, out, up, down
NONE = -1 << 62  # there, of what there is not
MAP_WORDS = TENSOR_MAP_BYTES // 8
_WEIGHTS = (2, 4, 8, 10)  # of a layer's words: where the weights of these are
_ROWS, _GROUP = 8, 64  # of a box; columns side by side


def tensor_maps(
    p: Problem, offsets: Any, arrays: Mapping[str, Any], columns: int
) -> Iterator[TensorMap]:
    """Of the weight of each product in turn, and in a model of codes behind each one of its scales.
    offsets: the table of layers. arrays: weights, head, head_scales. columns: of a stage."""
    dim, hidden, mlp = p["head_dim"], p["hidden"], p["mlp"]
    heads, up = (p["heads_q"] + 2 * p["heads_kv"]) * dim, mlp * (2 if p["gate"] else 1)
    sizes = ((heads, hidden), (hidden, p["heads_q"] * dim), (up, hidden), (hidden, mlp))
    weights = arrays["weights"]
    for layer in offsets:
        for kind, size in enumerate(sizes):
            scales = int(layer[LAYER_WORDS - SCALES + kind])
            at = (int(layer[_WEIGHTS[kind]]), scales if scales != NONE else None)
            yield from _maps(p, size, columns, (weights, weights), at)
    scales = arrays["head_scales"] if p["head_coded"] else None
    at = (0, 0 if p["head_coded"] else None)
    yield from _maps(p, (p["vocabulary"], hidden), columns, (arrays["head"], scales), at)


def _maps(
    p: Problem, size: tuple[int, int], columns: int, arrays: tuple[Any, Any],
    at: tuple[int, int | None],
) -> Iterator[TensorMap]:  # fmt: skip
    """Of a weight of n x k numbers or codes that begins so many elements behind an array, and its
    scales, likewise."""
    (n, k), (first, scales) = size, at
    wide = k if scales is None else k // 4  # a row, in elements of 16 bits
    group = min(_GROUP, wide)
    yield TensorMap(
        arrays[0], p["dtype"], (group, n, wide // group), (2 * wide, 2 * group),
        (_GROUP, _ROWS, columns // _GROUP), origin=2 * first,
    )  # fmt: skip
    if not p["codes"]:
        return
    array, begin, wide = arrays[0], first, group  # of a weight of numbers, never read
    if scales is not None:
        array, begin, wide = arrays[1], scales, -(-k // 1024) * 8
    yield TensorMap(
        array, p["dtype"], (wide, n), (2 * wide,), (columns // 32, _ROWS), swizzle="none",
        origin=2 * begin,
    )  # fmt: skip
