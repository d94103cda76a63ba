"""Bugs planted in the kernels of streamed decode steps show: as races or as wrong numbers."""

from __future__ import annotations

import pytest

from tests.core.mutations import Bug
from tests.core.test_mutations import check_found

K, RINGS, SUMS = (
    "kernels_cu/step/stream.cu", "templates/step/stream_rings.cuh", "templates/step/stream_sums.cuh"
)  # fmt: skip
SHARED = {"kernel": "streamed_linear.stream", "params": {"tile": (64, 4, 80), "leaves": "none"}}
LEAVING = {"kernel": "streamed_linear.stream", "params": {"tile": (64, 4, 80), "leaves": "rms"}}
GATED = {"kernel": "streamed_linear.stream", "params": {"gate": True}}
CENTERED = {"kernel": "streamed_linear.stream", "params": {"norm": "layer"}}
APPEND = {"kernel": "streamed_append.stream", "params": {"norm": "rms"}}

BUGS = (
    Bug("no wait for the weight", RINGS,
        "mbarrier_wait(weight_full(of_weight.stage), of_weight.parity);", "", by="race", **GATED),
    Bug("no wait for x", RINGS, "mbarrier_wait(x_full(of_x.stage), of_x.parity);", "", by="race",
        **GATED),
    Bug("a stage of the weight fetched before it is free", RINGS,
        "mbarrier_wait(weight_empty(place.stage), place.parity ^ 1);", "", by="race", **GATED),
    Bug("a stage let go while it is multiplied", RINGS, "wgmma_wait<1>();", "", by="race", **GATED),
    Bug("others' sums read before they are there", K, "mbarrier_wait(rings.parts_full(), 0);", "",
        by="race", **SHARED),
    Bug("sums sent before all have left theirs", K,
        "  __syncthreads();\n  if (CLUSTER > 1) cluster_wait", "  if (CLUSTER > 1) cluster_wait",
        by="race", **SHARED),
    Bug("a LayerNorm's rows for one block alone", SUMS, "(behind ? extra : item) % CLUSTER",
        "behind ? 0 : item % CLUSTER", by="barrier", kernel="streamed_linear.stream",
        params={"norm": "layer", "tile": (64, 2, 80)}),
    Bug("a part of k left out", SUMS, "for (int rank = 1; rank < CLUSTER",
        "for (int rank = 2; rank < CLUSTER", by="numbers", **SHARED),
    Bug("up where gate is", RINGS, "row + half * apart", "row", by="numbers", **GATED),
    Bug("a part of the squares left out", SUMS, "for (int first = 0; first < parts",
        "for (int first = 1; first < parts", by="numbers", **APPEND),
    Bug("the mean not taken away", K, "-means[row]", "means[row]", by="numbers", **CENTERED),
    Bug("the norm's bias left out", K,
        "if (CENTERED) add_four(z, sums.behind(1, x_rows, place));", "", by="numbers", **CENTERED),
    Bug("squares of half a row", SUMS, "lanes_sum<LANES>(x.x * x.x",
        "lanes_sum<LANES / 2>(x.x * x.x", by="numbers", **LEAVING),
    Bug("a pair that is none", K, "GATE ? OUTPUTS : ROWS / 2", "GATE ? OUTPUTS : ROWS / 4",
        by="numbers", kernel="streamed_append.stream",
        params={"dtype": "fp16"}),
    Bug("a slot beyond what is reserved", "kernels_cu/step/begin.cu", "if (length < end)",
        "if (known)", by="numbers", kernel="step_begin.rows"),
    Bug("largest of one warp", "kernels_cu/step/pick.cu", "lane < WARPS ?", "lane < 1 ?",
        by="numbers", kernel="pick_largest.rows"),
    Bug("the new key left out", "templates/attention/decode/schedule.cuh",
        "all.seq_lens[number] + all.added", "all.seq_lens[number]", by="numbers",
        kernel="settled_attention.split"),
)  # fmt: skip


@pytest.mark.sampled(key=lambda bug: bug.by)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug, monkeypatch):
    check_found(bug, monkeypatch)
