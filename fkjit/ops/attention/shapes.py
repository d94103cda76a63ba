"""Shapes, scale and tile of a call of attention, whatever its features: what is asked, once."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.runtime.interop import ITEMSIZE, View

MAX_HEAD_DIM = 256
WIDEST = 512  # head dimension of the forward on tensor cores, where nothing is in pages
LAYOUTS = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3)}  # where batch, head, row, column stand
PACKED_AXES = (None, 1, 0)  # where they stand in packed rows, which have no batch
PAGE_AXES = {"nhd": (0, 2, 1), "hnd": (0, 1, 2)}  # where page, head, token of a KV cache stand
_MAX_SCALE = 2e38  # times log2(e) it is still an fp32
_MAX_SIZE = 2**31 - 1
_CHUNK = 16  # bytes of an asynchronous copy

Sizes = dict[str, Any]


def dense_sizes(call: str, rows: Mapping[str, View], layout: str) -> Sizes:
    """Batch, heads, lengths and head dimensions of q, k and v that fit one another."""
    for name, view in rows.items():
        if len(view.shape) != 4:
            raise ParameterError(
                f"{call}: {name} has {len(view.shape)} dimensions {view.shape}; allowed: 4 "
                f"({', '.join(_axes(layout))})"
            )
        if view.strides[3] != 1:
            check_columns(call, name, view, "call .contiguous() or transpose before the projection")
    q, k, v = [tuple(view.shape) for view in rows.values()]
    axes = LAYOUTS[layout]
    _, head, row, _ = axes
    if k[:3] != v[:3]:
        _refuse_fit(call, rows, layout, "k", "v's batch, heads or length")
    if q[0] != k[0] or q[3] != k[3]:
        _refuse_fit(call, rows, layout, "q", "k's batch or head_dim")
    check_dims(call, q[3], v[3], WIDEST)
    for name, size in (("q", q[row]), ("k", k[row])):
        if size > _MAX_SIZE:
            raise ParameterError(f"{call}: {name} has {size} rows; allowed: up to {_MAX_SIZE}")
    check_heads(call, rows, q[head], k[head])
    return {
        "axes": axes, "batch": q[0], "heads_q": q[head], "heads_kv": k[head], "seqlen_q": q[row],
        "seqlen_k": k[row], "head_dim": q[3], "head_dim_v": v[3],
    }  # fmt: skip


def packed_sizes(call: str, rows: Mapping[str, View]) -> Sizes:
    """Rows, heads and head dimensions of packed q, k and v that fit one another."""
    q, k, v = [tuple(view.shape) for view in rows.values()]
    if not len(q) == len(k) == len(v) == 3:
        raise ParameterError(
            f"{call}: {_shown(rows)}; allowed: three dimensions, [total, heads, head_dim]"
        )
    (total_q, heads_q, dim), (_, heads_kv, k_dim), dim_v = q, k, v[2]
    if k_dim != dim or k[:2] != v[:2]:
        raise ParameterError(
            f"{call}: {_shown(rows)}; allowed: q [total_q, Hq, D], k [total_k, Hkv, D], v "
            "[total_k, Hkv, Dv]"
        )
    check_heads(call, rows, heads_q, heads_kv)
    for name, view in rows.items():
        if view.strides[2] != 1:
            check_columns(call, name, view)
    check_dims(call, dim, dim_v, WIDEST)
    return {
        "axes": PACKED_AXES, "total_q": total_q, "heads_q": heads_q, "heads_kv": heads_kv,
        "head_dim": dim, "head_dim_v": dim_v,
    }  # fmt: skip


def _shown(rows: Mapping[str, View]) -> str:
    return ", ".join(f"{name} {tuple(view.shape)}" for name, view in rows.items())


def _axes(layout: str) -> tuple[str, ...]:
    names = ("batch", "heads", "seqlen", "head_dim")
    return tuple(names[i] for i in LAYOUTS[layout])


def _refuse_fit(call: str, rows: Mapping[str, View], layout: str, name: str, what: str) -> NoReturn:
    shapes = ", ".join(f"{n} {view.shape}" for n, view in rows.items())
    raise ParameterError(
        f"{call}: {name} does not match {what}: {shapes}; allowed: q [B, Hq, Sq, D], "
        f"k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv] (here in layout={layout!r})"
    )


def check_heads(call: str, rows: Mapping[str, View], heads_q: int, heads_kv: int) -> None:
    """ParameterError unless query heads share KV heads evenly."""
    if heads_q and (not heads_kv or heads_q % heads_kv):
        raise ParameterError(
            f"{call}: q has {heads_q} heads, not a multiple of k's {heads_kv} (shapes "
            f"{', '.join(f'{n} {v.shape}' for n, v in rows.items())})"
        )


def check_columns(call: str, name: str, view: View, fix: str = "call .contiguous()") -> None:
    """ParameterError unless the last dimension is contiguous."""
    if view.shape[-1] > 1 and view.strides[-1] != 1 and 0 not in view.shape:
        raise ParameterError(
            f"{call}: {name} has stride {view.strides[-1]} in its last dimension; it must be "
            f"contiguous: {fix}"
        )


def check_dims(call: str, head_dim: int, head_dim_v: int, most: int = MAX_HEAD_DIM) -> None:
    """ParameterError for head dimensions that no kernel has."""
    for name, size in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
        if not 1 <= size <= most:
            raise ParameterError(f"{call}: {name}={size} is not in 1 .. {most}")


def check_scale(call: str, scale: Any, head_dim: int) -> float:
    """softmax_scale as a float that fp32 can hold; 1 / sqrt(head_dim) for None."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    try:
        if isinstance(scale, (str, bytes)) or getattr(scale, "requires_grad", False):
            raise TypeError
        value = float(scale)
    except (TypeError, ValueError, OverflowError):
        raise ArgumentTypeError(
            f"{call}: softmax_scale={scale!r} is not a plain number; None means 1/sqrt(head_dim)"
        ) from None
    if not abs(value) <= _MAX_SCALE:
        raise ParameterError(
            f"{call}: softmax_scale={value} is not a finite number up to {_MAX_SCALE:g}"
        )
    return value


def check_block(call: str, block: Any) -> Any:
    """An int or a pair of ints, a square pair as one int; None stays."""
    if block is None:
        return None
    try:
        pair = block if isinstance(block, (tuple, list)) else (block, block)
        block_q, block_k = (operator.index(x) for x in pair)
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            f"{call}: block={block!r} is not a number, a pair (block_q, block_k) or None"
        ) from None
    return block_q if block_q == block_k else (block_q, block_k)


def are_rows_aligned(views: Iterable[View], *dims: int) -> bool:
    """Whether every row starts on a 16-byte boundary: of these arrays, and of contiguous ones of
    the first one's dtype with rows of `dims` elements."""
    for view in views:
        size, together = ITEMSIZE.get(view.dtype, 1), 0  # bits of all distances
        for step in (*dims, *view.strides[:-1]):
            together |= step
        if (view.pointer | together * size) % _CHUNK:  # unless no row is that far from another
            pairs = zip(view.strides[:-1], view.shape[:-1], strict=True)
            apart = [*dims, *(step for step, n in pairs if n > 1)]
            if view.pointer % _CHUNK or any(step * size % _CHUNK for step in apart):
                return False
    return True


def padded_pair(
    pairs: Iterable[tuple[int, int]], head_dim: int, head_dim_v: int
) -> tuple[int, int]:
    """The cheapest compiled pair that holds these head dimensions."""
    return min((p for p in pairs if p[0] >= head_dim and p[1] >= head_dim_v), key=sum)
