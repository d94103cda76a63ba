"""Groups of tests, each of which runs in one worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core.groups import FIRST, SWEEP, TOGETHER, WITH_MODELS, group_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("place", dict.fromkeys((SWEEP, *TOGETHER, *WITH_MODELS, *FIRST)))
def test_what_is_named_is_there(place):
    assert (ROOT / place).exists()


def test_a_group_is_a_file_a_folder_or_a_kernel_of_the_sweep():
    assert group_of("tests/jit/test_keys.py::test_it[a-b]") == "tests/jit/test_keys.py"
    assert group_of("tests/models/test_patch.py::test_it") == "tests/models"
    assert group_of(f"{WITH_MODELS[0]}::test_it[x]") == "tests/models"
    assert group_of("tests/models/test_decoder_gpu.py::test_it[a]") != group_of(
        "tests/models/test_decoder_gpu.py::test_it[b]"
    )
    compiled, run = (
        f"{SWEEP}::{name}[linear.mma-{target}-1]"
        for name, target in (("test_compiles", "sm_80"), ("test_is_right", "compute_80"))
    )
    assert group_of(compiled) == group_of(run) == f"{SWEEP} linear.mma"
    assert group_of(f"{SWEEP}::test_the_baseline") == SWEEP
