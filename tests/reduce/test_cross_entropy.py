"""The kernel of `linear_cross_entropy`: odd rows, and bugs planted in it. (Losses and gradients
beside PyTorch's: tests/models/test_linear_cross_entropy.py.)"""

from __future__ import annotations

import pytest

from fkjit.ops.reduce.cross_entropy import cross_entropy
from tests.core.mutations import Bug
from tests.core.test_mutations import check_found, each_planted, outcome

torch = pytest.importorskip("torch", reason="needs torch")

FILE = "kernels_cu/reduce/cross_entropy.cu"
ROWS = {"kernel": "cross_entropy.rows", "params": {"dtype": "bf16", "threads": 256, "unroll": 2}}
HELD_FILE = "kernels_cu/reduce/cross_entropy_held.cu"
HELD = {"kernel": "cross_entropy.held", "params": {"dtype": "bf16", "tile": (512, 8, 2)}}
BUGS = (
    Bug("maximum and sum in one place", FILE, "warps[1]", "warps[0]", by="race", **ROWS),
    Bug("columns behind the row", "templates/tile/logits.cuh", "column + LOGITS <= columns",
        "column < columns", by="numbers", **ROWS),
    Bug("a sum of before", FILE, "sum *= exp2_fast((top - most) * LOG2E);", "", by="numbers",
        **ROWS),
    Bug("the first access is left out", FILE, "first >= 0;", "first > 0;", by="numbers", **ROWS),
    Bug("every target but the last column", FILE, "column + k == place", "k == place", by="numbers",
        **ROWS),
    Bug("blocks do not wait for each other", HELD_FILE, "  meet_cluster();\n", "", by="race",
        **HELD),
    Bug("maximum and sum of warps in one place", HELD_FILE, "sum, sums, Sum()", "sum, tops, Sum()",
        by="race", **HELD),
    Bug("the block's own maximum", HELD_FILE, "(level - whole.top)", "(level - level)",
        by="numbers", **HELD),
)  # fmt: skip


@each_planted(BUGS)
def test_a_planted_bug_is_found(bug, monkeypatch):
    check_found(bug, monkeypatch)


def test_without_it_nothing_is_said(monkeypatch):
    assert outcome(BUGS[0], monkeypatch, plant=False) == ""


def test_logits_of_minus_infinity_and_targets_that_are_none():
    logits = torch.full((4, 16), float("-inf"))
    logits[0, 3], logits[1, 2:4] = 50.0, torch.tensor([100.0, 100.0])
    logits[2:] = torch.arange(16.0)
    target = torch.tensor([3, 2, 99, -1])
    gradient = torch.full((4, 16), float("nan"))
    loss = cross_entropy(logits, target, torch.tensor([1.0, 2.0, 1.0, 1.0]), 11, gradient)
    assert loss[:2].tolist() == pytest.approx([0.0, 0.6931472])
    assert loss[2:].isnan().all()
    wanted = torch.zeros(2, 16)
    wanted[1, 2:4] = torch.tensor([-1.0, 1.0])
    torch.testing.assert_close(gradient[:2], wanted)
    torch.testing.assert_close(gradient[2, :11], logits[2, :11].softmax(0))
