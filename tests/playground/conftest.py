"""The registry with the scaffold of a new kernel in it, put back afterwards."""

from __future__ import annotations

import pytest

from fkjit import ops, spec
from fkjit.playground import catalog


@pytest.fixture(autouse=True, scope="module")
def registry():
    """As the playground's processes have it."""
    ops.load()
    before = dict(spec._REGISTRY), dict(spec._HOME)
    catalog.load_scaffold()
    yield
    catalog.load_scaffold.cache_clear()
    for table, known in zip((spec._REGISTRY, spec._HOME), before, strict=True):
        table.clear()
        table.update(known)
