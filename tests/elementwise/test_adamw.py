"""The kernel of `patch_optimizer`: bugs planted in it. (Whole steps beside PyTorch's AdamW:
tests/models/test_patch_optimizer.py.)"""

from __future__ import annotations

from tests.core.mutations import Bug
from tests.core.test_mutations import check_found, each_planted, outcome

FILE = "kernels_cu/elementwise/adamw.cu"
ROWS = {"kernel": "adamw.rows", "params": {"dtype": "fp32", "vector": True, "threads": 128}}
BUGS = (
    Bug("an access behind the end", FILE, "begin + WIDTH <= elements", "begin < elements",
        by="memory", **ROWS),
    Bug("the last elements are left out", FILE, "i < min(begin + WIDTH, elements)",
        "i < min(begin + WIDTH, elements) - 1", by="numbers", **ROWS),
    Bug("no bias of the second moment", FILE, "second * inverse", "second", by="numbers", **ROWS),
    Bug("moments changed places", FILE, "m.set(k, made.y), v.set(k, made.z)",
        "m.set(k, made.z), v.set(k, made.y)", by="numbers", **ROWS),
    Bug("decay without the rate", FILE, "1.f - lr * decay", "1.f - decay", by="numbers", **ROWS),
)  # fmt: skip


@each_planted(BUGS)
def test_a_planted_bug_is_found(bug, monkeypatch):
    check_found(bug, monkeypatch)


def test_without_it_nothing_is_said(monkeypatch):
    assert outcome(BUGS[0], monkeypatch, plant=False) == ""
