"""What tests of decoding need around them."""

from __future__ import annotations

import pytest

from fkjit.jit.build import quiet


@pytest.fixture(autouse=True)
def silent():
    """No status lines of compilations."""
    with quiet():
        yield


@pytest.fixture
def on_sms(monkeypatch):
    """Calls on the CPU from now on take the grid of a GPU with so many SMs."""
    from fkjit.ops.attention.decode import checks

    return lambda count: monkeypatch.setattr(checks, "CPU_SMS", count)
