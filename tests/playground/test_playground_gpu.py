"""The playground's times on a GPU."""

from __future__ import annotations

import pytest

from fkjit.playground import catalog
from fkjit.playground.request import variants
from fkjit.playground.timing import measured
from fkjit.runtime.device import device_target
from tests.playground.kit import NEW, template_of

pytestmark = pytest.mark.gpu


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The new kernel, for this GPU; as in a worker, its process finds the scaffold's folder."""
    monkeypatch.setenv("FKJIT_KERNEL_PATH", str(catalog.write_scaffold(tmp_path)))
    return {**NEW, "arch": device_target(0).name}


def test_an_edited_kernel_is_timed_beside_the_unedited_one(here):
    slow = "for (int k = 0; k < 20000; ++k) value = value * 1.0001f + 1e-9f;\n  y[i] = "
    found = measured({**here, "text": template_of(NEW).replace("y[i] = ", slow)})
    assert found["edited"] > 5 * found["unedited"] > 0, found


def test_an_unedited_kernel_has_one_time(here):
    variants({"a": here})
    found = measured(here)
    assert found["unedited"] > 0 and "edited" not in found and found["gpu"]


def test_another_target_says_why(here):
    arch = "sm_80" if here["arch"] != "sm_80" else "sm_90a"
    assert "choose that target" in measured({**here, "arch": arch})["why"]
