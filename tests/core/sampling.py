"""What `make test` leaves out of tests that have more cases than kinds of them: see the mark
`sampled` in tests/conftest.py. With --every-variant it leaves nothing out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

# Of the bugs that a report should call the same in one kernel the first in each source file.
ONE_OF_EACH_KIND = pytest.mark.sampled(key=lambda bug: (bug.kernel, bug.by, bug.file))


def one_in(share: int, **axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Of the combinations of these parameters one in so many: along each axis in turns, so that
    each value stays, in company of one or more values of each other axis."""

    def key(**params: Any) -> str | None:
        places = sum(list(values).index(params[name]) for name, values in axes.items())
        return repr(sorted(params.items())) if places % share == 0 else None

    return pytest.mark.sampled(key=key)
