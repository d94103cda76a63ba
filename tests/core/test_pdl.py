"""Dependent launches, as far as they go without a GPU: what the driver is told, and when."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from fkjit.runtime import pdl
from fkjit.runtime.device import _Frame

GIVEN = (0x1234, 5, 6, 7, 128, 2, 1, 4096, 0x77, 0x9000)  # function, grid, block, shared, stream, …


@pytest.fixture
def driver(monkeypatch):
    """Stands for cuLaunchKernelEx: notes what it was told, and says `status`."""

    class Driver:
        status = together = 0
        told, early = (), 1

        def __call__(self, configuration, function, arguments, extra):
            c = pdl._Configuration.from_address(configuration)
            found = {a.id: a.value[0] for a in c.attributes[: c.count]}
            sizes = (c.grid_x, c.grid_y, c.grid_z, c.block_x, c.block_y, c.block_z, c.shared_bytes)
            self.told = (function, *sizes, c.stream, arguments)
            self.together = found.pop(2, 0)
            assert (found, extra) == ({6: self.early}, None)
            return self.status

    made = Driver()
    monkeypatch.setattr(pdl, "_driver", lambda: made)
    return made


def test_the_structs_are_as_long_as_the_drivers():
    assert ctypes.sizeof(pdl._Attribute) == 72
    assert ctypes.sizeof(pdl._Configuration) == 56


@pytest.mark.parametrize("together", [False, True])
def test_the_driver_is_told_what_a_launch_was_given(driver, together):
    pdl.launch(*GIVEN, together=together)
    assert driver.told == GIVEN and driver.together == together


def test_who_captures_can_have_it_otherwise(driver):
    driver.early = 0
    with pdl.starting(False):
        pdl.launch(*GIVEN)
    driver.early = 1
    pdl.launch(*GIVEN)
    assert driver.told == GIVEN


def test_a_refusal_is_an_error(driver):
    driver.status = 801
    with pytest.raises(RuntimeError, match="801"):
        pdl.launch(*GIVEN)


@pytest.mark.parametrize("capturing", [False, True])
def test_only_what_is_captured_is_launched_so(driver, capturing):
    plain = []
    frame = SimpleNamespace(
        is_capturing=lambda stream: capturing and stream == 0x77,
        launch=lambda *arguments: plain.append(arguments),
    )
    _Frame.launch_dependent(frame, *GIVEN, 0)  # type: ignore[arg-type]
    assert driver.told == (GIVEN if capturing else ())
    assert plain == ([] if capturing else [(*GIVEN, 0)])


@pytest.mark.parametrize("capturing", [False, True])
def test_so_is_what_waits_for_one_another(driver, capturing):
    plain = []
    frame = SimpleNamespace(
        is_capturing=lambda stream: capturing and stream == 0x77,
        launch_together=lambda *arguments: plain.append(arguments),
    )
    _Frame.launch_together_dependent(frame, *GIVEN)  # type: ignore[arg-type]
    assert (driver.told, driver.together) == ((GIVEN, 1) if capturing else ((), 0))
    assert plain == ([] if capturing else [GIVEN])
