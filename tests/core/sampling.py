"""What `make test` leaves out of tests that have more cases than kinds of them: see the mark
`sampled` in tests/conftest.py. With --every-variant it leaves nothing out."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

# Of planted bugs so many that each kernel has one, and each kind of report.
ONE_OF_EACH_KIND = pytest.mark.sampled(cover=lambda bug: {bug.kernel, bug.by})
# What other tests cover more cheaply, if not as well.
ONLY_WITH_EVERY_VARIANT = pytest.mark.sampled(key=lambda **_: None)


def one_in(share: int, **axes: Sequence[Any]) -> pytest.MarkDecorator:
    """One case in so many. With axes along each in turns, so that each value stays, in company of
    one or more values of each other axis; without, those with the most values between them."""
    if not axes:
        return pytest.mark.sampled(share=share)

    def key(**params: Any) -> str | None:
        places = sum(list(values).index(params[name]) for name, values in axes.items())
        return repr(sorted(params.items())) if places % share == 0 else None

    return pytest.mark.sampled(key=key)


def covering(cases: Sequence[set[Any]]) -> set[int]:
    """The places of cases that have all values between them: next is always the first of those with
    the most that are new."""
    seen: set[Any] = set()
    kept: set[int] = set()
    while new := max((len(values - seen) for values in cases), default=0):
        place = next(i for i, values in enumerate(cases) if len(values - seen) == new)
        kept.add(place)
        seen |= cases[place]
    return kept


def spread(cases: Sequence[Mapping[str, Any]], share: int) -> set[int]:
    """The places of one case in so many: the next is always the one with the most values that are
    new, of such the first in an order that says nothing."""
    order = random.Random(len(cases)).sample(range(len(cases)), len(cases))
    values = {place: {(name, repr(one)) for name, one in cases[place].items()} for place in order}
    seen: set[tuple[str, str]] = set()
    kept: set[int] = set()
    while len(kept) < -(-len(cases) // share):
        best = max(
            (place for place in order if place not in kept), key=lambda i: len(values[i] - seen)
        )
        kept.add(best)
        seen |= values[best]
    return kept
