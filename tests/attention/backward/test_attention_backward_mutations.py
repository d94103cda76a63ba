"""Bugs planted in the kernels of attention's backward show: races, memory faults, wrong numbers."""

from __future__ import annotations

import pytest

from tests.core.mutations import Bug
from tests.core.sampling import ONLY_WITH_EVERY_VARIANT
from tests.core.test_mutations import check_found, each_planted, outcome

K, D = "kernels_cu/attention/", "templates/"
OP, SYNC, PENDING = "attention_backward.", "__syncthreads();", "if (STAGES > 1) cp_async_wait<0>();"
KEYS, QUERIES = K + "backward_dkdv.cu", K + "backward_dq.cu"
LAYOUT = D + "attention/backward/dkdv_layout.cuh"
ALONE = {"kernel": OP + "keys", "params": {"tile": (64, 64, 4, 1, 2), "aligned": True}}
SHARED = {"kernel": OP + "keys", "params": {"tile": (64, 32, 2, 2, 2), "aligned": True}}
ONE_STAGE = {"kernel": OP + "keys", "params": {"tile": (32, 32, 2, 2, 1), "aligned": True}}
SUMS = {"kernel": OP + "sums", "params": {"tile": (64, 32, 2, 2, 2)}}
ORDERED = {"kernel": OP + "ordered", "params": {"tile": (64, 32, 2, 2, 2)}}
DQ = {"kernel": OP + "queries", "params": {"tile": (32, 32, 2, 2), "aligned": True}}
KEYS_FP32 = {"kernel": OP + "keys_fp32", "params": {"tile": (32, 32, 2), "aligned": True}}
ROWS = {"kernel": OP + "rows", "params": {"aligned": True}}
ONE_HEAD = {"batch": 1, "heads_q": 1, "heads_kv": 1}

BUGS = (
    Bug("no barrier before Q and dO are read", KEYS, SYNC, "", by="race", **ALONE),
    Bug("no wait for Q and dO", KEYS, PENDING, "", by="race", **ALONE),
    Bug("no wait for the only stage", KEYS, "cp_async_wait<0>();", "", nth=1, by="race",
        **ONE_STAGE),
    Bug("P and dS are read before they are there", KEYS,
        "named_barrier_wait<WARPS_C * WARP_SIZE>(1 + warp % WARPS_K);", "", by="race", **SHARED),
    Bug("warps of other keys meet", KEYS, "(1 + warp % WARPS_K)", "(1 + warp / WARPS_C)",
        by="race", **SHARED),
    Bug("dS of the other warps is not waited for", KEYS, SYNC, "", nth=2, by="race", **SUMS),
    Bug("a block adds before its turn", K + "backward/ordered.cu", "wait_for_turn(turns",
        "if (false) wait_for_turn(turns",
        by="race", problem={"seqlen_k": 140}, **ORDERED),
    Bug("the first one adds to what is not there", K + "backward/ordered.cu", "k0 == 0);",
        "false);",
        by="numbers", **ORDERED),
    Bug("dK over K that is still read", KEYS, SYNC, "", nth=3, by="race", **SUMS),
    Bug("the ring begins inside dS", LAYOUT, "RING = DS + (SHARES_DS ? PTile::BYTES",
        "RING = DS + (SHARES_DS ? PTile::BYTES - 512", by="memory", **SHARED),
    Bug("one key too many is stored", D + "tile/tile_copy.cuh", "row >= rows_left || elements",
        "row > rows_left || elements", by="memory", problem=ONE_HEAD, **SHARED),
    Bug("one query head of a group only", KEYS, "head + turns", "head", by="numbers",
        **ALONE),
    Bug("hidden scores of a negative scale", D + "attention/backward/mma.cuh",
        "scale_log2 < 0.f ? -NEG_INFINITY : NEG_INFINITY", "NEG_INFINITY", by="numbers",
        problem={"softmax_scale": -0.2}, **DQ),
    Bug("keys past the end have probabilities", KEYS, "return QUERIES;",
        "return first_seeing - q0 - query;", by="numbers",
        problem={"causal": False, "seqlen_k": 1, "softmax_scale": 40.0}, **SUMS),
    Bug("one tile is not masked", QUERIES, "tile >= unmasked_tiles", "tile > unmasked_tiles",
        by="numbers", **DQ),
    Bug("no barrier before K and V are read", QUERIES, SYNC, "", nth=1, by="race", **DQ),
    Bug("no __syncwarp() before dQ is stored", QUERIES, "__syncwarp();", "", by="race", **DQ),
    Bug("no barrier before the next tile", K + "backward_dkdv_fp32.cu", SYNC, "", by="race",
        **KEYS_FP32),
    Bug("no __syncwarp() before P is read", K + "backward_dkdv_fp32.cu", "__syncwarp();", "",
        by="race", **KEYS_FP32),
    Bug("rows past the end have an lse", K + "backward_preprocess.cu", "exists ? lse[place]",
        "stored ? lse[place]", by="memory", problem={"batch": 1, "heads_q": 1}, **ROWS),
    Bug("half a dot product", K + "backward_preprocess.cu", "column += SIZE * lanes",
        "column += 2 * SIZE * lanes", by="numbers", problem={"head_dim_v": 512}, **ROWS),
)  # fmt: skip


@each_planted(BUGS)
def test_a_planted_bug_is_found(bug, monkeypatch):
    check_found(bug, monkeypatch)


@ONLY_WITH_EVERY_VARIANT
@pytest.mark.parametrize("kernel", sorted({bug.kernel for bug in BUGS}))
def test_without_it_nothing_is_said(kernel, monkeypatch):
    for bug in BUGS:
        if bug.kernel == kernel and bug.problem:
            assert outcome(bug, monkeypatch, plant=False) == ""
