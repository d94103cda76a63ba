"""The arrays of one layer of a KV cache, whatever the caller keeps them in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fkjit.arguments import one_of, shown, whole
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.ops.kv.problem import LAYOUTS
from fkjit.ops.kv.scales import CODES, as_codes, dtype_name, for_heads
from fkjit.ops.op import torch_ops


@dataclass(frozen=True)
class Planes:
    """k_pages and v_pages as kernels see them, and the scales of heads, None without."""

    arrays: tuple[Any, Any, Any, Any]
    storage: str  # "same", "fp8", "int8"
    layout: str  # "nhd", "hnd"


def planes(
    call: str, cache: Any, layer: int, layout: str | None, scales: tuple[Any, Any] = (None, None)
) -> Planes:
    """Of a `PagedKVCache` or of a pair of arrays, which may have k_scale and v_scale."""
    known = getattr(cache, "planes", None)
    if known is not None:
        refuse_traced(call)
        if layout is not None:
            raise ParameterError(
                f"{call}: layout={shown(layout)}, but the cache knows its own: leave it"
            )
        if any(scale is not None for scale in scales):
            raise ParameterError(f"{call}: k_scale and v_scale are the cache's own: leave them")
        return known[check_layer(call, layer, len(known))]
    if not isinstance(cache, tuple | list) or len(cache) != 2:
        raise ArgumentTypeError(
            f"{call}: cache is a {type(cache).__qualname__}; allowed: a PagedKVCache, or a pair "
            "(k_pages, v_pages)"
        )
    layout = LAYOUTS[0] if layout is None else layout
    one_of(call, "layout", layout, LAYOUTS)
    check_layer(call, layer, 1)
    storage = CODES.get(dtype_name(cache[0]), "same")
    if storage == "same" and scales[0] is scales[1] is None:
        return Planes((cache[0], cache[1], None, None), "same", layout)
    pages, shape = (as_codes(x) for x in cache), getattr(cache[0], "shape", ())
    heads = shape[2 if layout == "nhd" else 1] if len(shape) == 4 else 1
    own = (for_heads(scale, cache[0], heads) for scale in scales)
    return Planes((*pages, *own), storage, layout)


def refuse_traced(call: str) -> None:
    """ParameterError for a `PagedKVCache` in what torch.compile traces: all its arrays are of one
    piece of memory, and what of it is written and then read was seen to go wrong there."""
    if torch_ops.compiling():
        raise ParameterError(
            f"{call}: cache is a PagedKVCache; under torch.compile pass a pair (k_pages, v_pages), "
            "or leave the call out of what is compiled"
        )


def check_layer(call: str, layer: Any, count: int) -> int:
    """A layer that there is."""
    return whole(call, "layer", layer, 0, count - 1, " (the cache's layers)")
