"""Ranks find out that their shapes differ before they send one another anything."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from fkjit.distributed.exchange import all_gather
from fkjit.distributed.groups import Group
from fkjit.errors import ParameterError

_MOST = 16  # numbers
_agreed: WeakKeyDictionary[Any, set[Any]] = WeakKeyDictionary()


def agree(group: Group, what: str, own: Sequence[int], device: Any) -> None:
    """ParameterError, on every rank, unless all ranks have the same numbers.

    Ranks exchange them when they meet them for the first time, and then no more: a rank that comes
    with others after that runs into the time-out, as any rank does that makes another call.
    """
    known = _agreed.setdefault(group.process_group, set())
    key = (group.call, what, *own)
    if group.size == 1 or key in known:
        return
    filled = [len(own), *own, *[0] * (_MOST - 1 - len(own))]
    mine = sys.modules["torch"].tensor(filled, device=device)
    found = all_gather(group, mine).wait().tolist()
    if any(numbers != found[0] for numbers in found):
        shown = "; ".join(f"rank {n}: {x[1 : 1 + x[0]]}" for n, x in enumerate(found))
        raise ParameterError(f"{group.call}: ranks differ in {what}: {shown}; allowed: all alike")
    known.add(key)
