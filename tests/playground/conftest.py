"""The registry with the scaffold of a new kernel in it, put back afterwards."""

from __future__ import annotations

import pytest

from fkjit import ops, spec, user_kernels
from fkjit.playground import catalog


@pytest.fixture(autouse=True, scope="module")
def registry(tmp_path_factory):
    """As the playground's processes have it."""
    ops.load()
    before = dict(spec._REGISTRY), dict(spec._HOME)
    folder = catalog.write_scaffold(tmp_path_factory.mktemp("scaffold"))
    ops.load_folder(folder)
    yield
    for table, known in zip((spec._REGISTRY, spec._HOME), before, strict=True):
        table.clear()
        table.update(known)
    user_kernels._failures.clear()  # a second server's new kernel
