"""Bugs planted in the textbook product and in the gradient of the activation show: as races, memory
faults or wrong numbers."""

from __future__ import annotations

import pytest

from tests.core.mutations import Bug
from tests.core.test_mutations import check_found, each_planted, outcome

K, D = "kernels_cu/gemm/", "templates/gemm/"
T, A = K + "tiled.cu", K + "activation_backward.cu"
SYNC = "__syncthreads();"
TILED = {"kernel": "linear.tiled", "params": {"dtype": "fp32", "out_dtype": "fp32", "block": 32}}
SWIGLU = {"kernel": "linear.tiled", "params": {"dtype": "bf16", "gate": True, "block": 32}}
KM = {"kernel": "linear.tiled", "params": {"x_layout": "km", "block": 32}}
PLAIN = {"kernel": "linear_backward.activation", "params": {"activation": "none", "threads": 32}}
GATED = {"kernel": "linear_backward.activation", "params": {"gate": True, "threads": 32}}

BUGS = (
    Bug("no barrier before tiles are fetched", T, SYNC, "", by="race", **TILED),
    Bug("no barrier before they are read", T, SYNC, "", by="race", nth=1, **TILED),
    Bug("a row too many", T, "row < rows && d < depth", "row <= rows && d < depth", by="memory",
        **KM),
    Bug("k too long", T, "d < depth ?", "d <= depth ?", by="numbers", **TILED),
    Bug("a column too many is stored", T, "row < m && column < n", "row < m && column <= n",
        by="memory", **TILED),
    Bug("up is gate", T, "WEIGHT_KN ? n : n * weight_stride", "0", by="numbers", **SWIGLU),
    Bug("x as if it were not transposed", T, "X_KM ? x_stride : 1", "1", by="numbers", **KM),
    Bug("the scale after the bias", D + "epilogue.cuh", "float z = scale * sum;\n",
        "float z = sum;\n", by="numbers", **TILED),
    Bug("bias of gate for up", D + "epilogue.cuh", "before(up, row, n + column)",
        "before(up, row, column)", by="numbers", **SWIGLU),
    Bug("a slope is a value", D + "activation.cuh", "return s * (1.f + x * (1.f - s));",
        "return s * x;", by="numbers", **GATED),
    Bug("gate's gradient without up", A, "dy * up * activation_t", "dy * activation_t",
        by="numbers", **GATED),
    Bug("sums of the last row alone", A, "sum.x + made.x", "made.x", by="numbers", **PLAIN),
    Bug("a row of partials left out", A, "part < gridDim.y", "part < gridDim.y - 1", by="numbers",
        **PLAIN),
    Bug("the last block does not wait for its own warps", A, SYNC, "", by="race", nth=2,
        **PLAIN | {"params": {"activation": "none", "threads": 128}}),
    Bug("sums of groups over those that are still read", A, SYNC, "", by="race", **GATED),
    Bug("sums of groups before they are there", A, SYNC, "", by="race", nth=1, **PLAIN),
    Bug("a group's sums left out", A, "other < GROUPS - 1", "other < GROUPS - 2", by="numbers",
        **PLAIN),
    Bug("dz beyond its rows", A, "made.store(dz + place, thread, here)",
        "made.store(dz + place, thread, here + 8)", by="race",
        problem={"dbias": False}, **PLAIN),
)  # fmt: skip


@each_planted(BUGS)
def test_a_planted_bug_is_found(bug, monkeypatch):
    check_found(bug, monkeypatch)


@pytest.mark.parametrize("kernel", sorted({bug.kernel for bug in BUGS}))
def test_without_it_nothing_is_said(kernel, monkeypatch):
    bug = next(bug for bug in BUGS if bug.kernel == kernel)
    assert outcome(bug, monkeypatch, plant=False) == ""
