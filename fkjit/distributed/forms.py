"""Which form of attention, and which pieces of a product, are the fastest by `schedule`'s times."""

from __future__ import annotations

from functools import lru_cache

from fkjit.distributed import schedule
from fkjit.distributed.schedule import Attention, Machine, Product, Timeline

PIECES = (1, 2, 4)
FORMS = {"ring": schedule.ring, "gather": schedule.gather, "ulysses": schedule.ulysses}
MOST_GATHERED = 4 << 30  # bytes of keys and values of a whole sequence, beside their travelling


def times(
    a: Attention, machine: Machine, size: int, layout: str, backward: bool = False
) -> dict[str, Timeline]:
    """What each form that can be taken would take."""
    found = {
        name: make(a, machine, size, layout, backward)
        for name, make in FORMS.items()
        if not (name == "ulysses" and (a.heads_kv % size or a.heads_q % size))
        and not (name == "gather" and a.kv_bytes * size > MOST_GATHERED)
    }
    return found


@lru_cache(maxsize=1024)
def best(a: Attention, size: int, layout: str, share_heads: bool) -> str:
    """Of forward and backward together; the first of `FORMS` where two are alike."""
    both = [times(a, Machine(), size, layout, backward) for backward in (False, True)]
    seconds = {
        name: sum(found[name].seconds for found in both)
        for name in both[0]
        if share_heads or name != "ulysses"
    }
    return min(seconds, key=lambda name: seconds[name])


def choose(
    q: tuple[int, ...], k: tuple[int, ...], head_dim_v: int, itemsize: int, causal: bool,
    size: int, layout: str, *, may_share_heads: bool, heads_over: int,
) -> str:  # fmt: skip
    """The form for q [B, Hq, S, D] and k [B, Hkv, S, D] of a rank. heads_over: ranks that share
    heads, each with so many times the tokens and so much fewer heads."""
    batch, heads_q, tokens, head_dim = q
    if size == 1:
        return "ring"
    a = Attention(
        tokens * heads_over, max(heads_q // heads_over, 1), max(k[1] // heads_over, 1), head_dim,
        head_dim_v, itemsize, batch, causal,
    )  # fmt: skip
    return best(a, size, layout, may_share_heads)


@lru_cache(maxsize=1024)
def best_pieces(column: bool, a: Product, size: int) -> int:
    """Messages that a rank's rows of a parallel product travel in: more overlap better, and cost
    more beginnings. The fewest of those that are as fast to the microsecond."""
    make = schedule.column_linear if column else schedule.row_linear
    return min(PIECES, key=lambda count: round(make(a, Machine(), size, pieces=count).seconds, 6))
