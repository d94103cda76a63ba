"""Ulysses: an all-to-all gives each rank all tokens of some heads, and another one takes them back.

    before  rank u: all heads of its tokens          after  rank u: its heads of all tokens

Between the two, attention knows nothing of ranks, or of another group's: a ring may be inside.

Source: Jacobs et al., "DeepSpeed Ulysses" (2023).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from fkjit.distributed.exchange import Routed
from fkjit.distributed.gather import out_of_order
from fkjit.distributed.groups import Group
from fkjit.distributed.order import in_order
from fkjit.errors import ParameterError

Inner = Callable[[Any, Any, Any, Any], tuple[Any, Any]]


def check_heads(group: Group, q: Any, k: Any) -> None:
    for name, x in (("q", q), ("k", k)):
        if x.shape[1] % group.size:
            raise ParameterError(
                f"{group.call}: {name} has {x.shape[1]} heads, form='ulysses' shares them out over "
                f"{group.size} ranks; allowed: a multiple of that, or form='ring'"
            )


def ulysses(
    q: Any, k: Any, v: Any, sinks: Any, group: Group, layout: str, inner: Inner, needs_lse: bool
) -> tuple[Any, Any]:
    """(o, lse) of this rank's queries. inner: attention of whole heads; lse None without need."""
    torch, size, batch = sys.modules["torch"], group.size, q.shape[0]
    packed = [_by_heads(x, size) for x in (q, k, v)]
    got = Routed(group)(torch.cat([x.flatten(1) for x in packed], 1))
    pieces = got.split([x[0].numel() for x in packed], 1)
    rows, keys, values = (
        in_order(piece.reshape(x.shape), layout, 2) for piece, x in zip(pieces, packed, strict=True)
    )
    heads = q.shape[1] // size
    own = None if sinks is None else sinks.narrow(0, group.rank * heads, heads)
    o, lse = inner(rows, keys, values, own)

    def back(x: Any) -> Any:
        """Of [B, own heads, all tokens, …]: [B, heads, this rank's tokens, …]."""
        made = Routed(group)(out_of_order(x, layout, size, 2)).movedim(0, 1)
        return made.reshape(batch, size * heads, *made.shape[3:])

    return back(o), back(lse) if needs_lse else None


def _by_heads(x: Any, size: int) -> Any:
    """[ranks, B, heads of one, S, D], contiguous."""
    batch, heads, *rest = x.shape
    return x.reshape(batch, size, heads // size, *rest).movedim(1, 0).contiguous()
