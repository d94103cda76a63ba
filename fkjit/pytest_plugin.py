"""A pytest fixture, known wherever fkjit is installed: a test that asks for `sanitize` runs with
memory and race checks.

    @pytest.mark.sanitize(race=False, banks=2)  # options, as of fkjit.sanitize
    def test_mine(sanitize): ...
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fkjit.sanitizer import Sanitizer


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known, for --strict-markers."""
    config.addinivalue_line(
        "markers",
        "sanitize(mem=True, race=True, banks=False): what the fixture `sanitize` has fkjit check",
    )


@pytest.fixture
def sanitize(request: pytest.FixtureRequest) -> Iterator[Sanitizer]:
    """Kernels that the test runs on the CPU are checked; `.reports` has bank figures."""
    from fkjit.sanitizer import sanitize as block

    marker = request.node.get_closest_marker("sanitize")
    if marker is not None and marker.args:
        raise pytest.UsageError(
            f"{request.node.nodeid}: the marker sanitize takes options by name, "
            "sanitize(race=False); got " + ", ".join(map(repr, marker.args))
        )
    with block(**(marker.kwargs if marker else {})) as chosen:
        yield chosen
