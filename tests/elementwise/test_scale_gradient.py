"""The kernel that scales gradients in place: bugs planted in it, and a factor of 1."""

from __future__ import annotations

import numpy as np
import pytest

from fkjit.ops.elementwise.scale_gradient import scale_gradient
from tests.core.mutations import Bug
from tests.core.test_mutations import check_found, each_planted

FILE = "kernels_cu/elementwise/scale_gradient.cu"
PARAMS = {"dtype": "fp32", "vector": True, "threads": 128}
ROWS = {"kernel": "scale_gradient.rows", "params": PARAMS}
BUGS = (
    Bug("an access behind the end", FILE, "at + WIDTH <= elements", "at < elements", by="memory",
        **ROWS),
    Bug("one turn", FILE, "at += step) {", "at += elements) {", by="numbers", **ROWS),
    Bug("the last elements are left out", FILE, "i < min(at + WIDTH, elements)",
        "i < min(at + WIDTH, elements) - 1", by="numbers", **ROWS),
    Bug("1 leaves another array as it was", FILE, "out == x && by", "by", by="numbers", **ROWS),
)  # fmt: skip


@each_planted(BUGS)
def test_a_planted_bug_is_found(bug, monkeypatch):
    check_found(bug, monkeypatch)


@pytest.mark.parametrize("factor", [1.0, -0.5])
def test_in_place(factor):
    x = np.arange(37, dtype=np.float32)
    scale_gradient(x, np.array([factor], np.float32))
    assert (x == factor * np.arange(37)).all()
