"""The arrays of one layer of a KV cache, whatever the caller keeps them in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fkjit.arguments import one_of, shown, whole
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.ops.kv.problem import LAYOUTS
from fkjit.ops.op import torch_ops


@dataclass(frozen=True)
class Planes:
    """k_pages and v_pages as kernels see them, and the scales of heads, None without."""

    arrays: tuple[Any, Any, Any, Any]
    storage: str  # "same", "fp8", "int8"
    layout: str  # "nhd", "hnd"


def planes(call: str, cache: Any, layer: int, layout: str | None) -> Planes:
    """Of a `PagedKVCache` or of a pair of arrays."""
    known = getattr(cache, "planes", None)
    if known is not None:
        refuse_traced(call)
        if layout is not None:
            raise ParameterError(
                f"{call}: layout={shown(layout)}, but the cache knows its own: leave it"
            )
        return known[check_layer(call, layer, len(known))]
    if not isinstance(cache, tuple | list) or len(cache) != 2:
        raise ArgumentTypeError(
            f"{call}: cache is a {type(cache).__qualname__}; allowed: a PagedKVCache, or a pair "
            "(k_pages, v_pages)"
        )
    layout = LAYOUTS[0] if layout is None else layout
    one_of(call, "layout", layout, LAYOUTS)
    check_layer(call, layer, 1)
    return Planes((cache[0], cache[1], None, None), "same", layout)


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
