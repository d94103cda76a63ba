"""Bugs planted in the kernels for few rows of x show: as races, memory faults or wrong numbers."""

from __future__ import annotations

import pytest

from tests.core.mutations import Bug
from tests.core.test_mutations import check_found, each_planted, outcome

K, D = "kernels_cu/gemm/", "templates/"
SYNC = "__syncthreads();"
GEMV = {"kernel": "linear.gemv", "params": {"dtype": "bf16", "weight_layout": "nk"}}
GEMV_KN = {"kernel": "linear.gemv", "params": {"dtype": "bf16", "weight_layout": "kn"}}
GEMV_FP32 = {"kernel": "linear.gemv", "params": {"dtype": "fp32", "weight_layout": "nk"}}
GEMV_FP32_KN = {"kernel": "linear.gemv", "params": {"dtype": "fp32", "weight_layout": "kn"}}
SKINNY = {"kernel": "linear.skinny", "params": {"tokens": 32, "weight_layout": "nk"}}
CLUSTER = {"kernel": "linear.skinny", "params": {"cluster": 4}}
SKINNY_KN = {"kernel": "linear.skinny", "params": {"tokens": 32, "weight_layout": "kn"}}

BUGS = (
    Bug("warps' sums are read without a barrier", K + "gemv.cu", SYNC, "", by="race", **GEMV),
    Bug("a warp's sums are left out", K + "gemv.cu", "w < WARPS; ++w", "w < WARPS - 1; ++w",
        by="numbers", **GEMV),
    Bug("an output too many", K + "gemv.cu", "if (first + column < n)",
        "if (first + column <= n)", by="memory", **GEMV),
    Bug("spans are taken twice", K + "gemv.cu",
        "product.load_weight(ring[i], span + WARPS * UNROLL + i);",
        "product.load_weight(ring[i], span + i);", by="numbers", **GEMV),
    Bug("the next span comes too early", K + "gemv.cu",
        "product.load_x(ring[i], span + WARPS * UNROLL + i);", "", by="numbers", **GEMV),
    Bug("a chunk of x past its row", D + "gemm/gemv_mma.cuh",
        "exists && first + static_cast<int>(threadIdx.x % 4) * 8 < k", "exists", by="memory",
        **GEMV),
    Bug("a row of the weight too many", D + "gemm/gemv.cuh",
        "min(first + i % OUTPUTS, n - RUN)", "(first + i % OUTPUTS)", by="memory", **GEMV),
    Bug("k of the other operand", D + "gemm/gemv_mma.cuh", "x.z, x.w);\n}",
        "x.w, x.z);\n}", by="numbers", **GEMV),
    Bug("halves of a word swapped", D + "gemm/gemv_mma.cuh", "0x5410", "0x7632", by="numbers",
        **GEMV_KN),
    Bug("k past the end", D + "gemm/gemv_mma.cuh", "source, row < k", "source, true",
        by="memory", **GEMV_KN),
    Bug("lanes are not added up", D + "gemm/gemv_fma.cuh", "lanes_sum<8>", "lanes_sum<4>",
        by="numbers", **GEMV_FP32),
    Bug("a span past the end", D + "gemm/gemv_fma.cuh", "first, step.k < k ? m : 0", "first, m",
        by="numbers", nth=1, **GEMV_FP32_KN),
    Bug("a row of x too many", D + "gemm/gemv_fma.cuh", "first + i < m", "true", by="memory",
        **GEMV_FP32),
    Bug("no wait for the stage", K + "skinny.cu", "cp_async_wait<STAGES - 2>();", "", by="race",
        **SKINNY),
    Bug("a wait too lax by one", K + "skinny.cu", "cp_async_wait<STAGES - 2>();",
        "cp_async_wait<STAGES - 1>();", by="race", **SKINNY),
    Bug("no barrier before a stage is filled again", K + "skinny.cu", SYNC, "", by="race",
        **SKINNY),
    Bug("sums over a ring in use", K + "skinny.cu", SYNC, "", by="race", nth=1, **SKINNY),
    Bug("parts of k are read without a barrier", K + "skinny.cu", SYNC, "", by="race", nth=2,
        **SKINNY),
    Bug("sums are published before they are there", K + "skinny.cu", SYNC, "", by="race", nth=3,
        **SKINNY),
    Bug("all blocks' sums are read without a barrier", K + "skinny.cu", SYNC, "", by="race",
        nth=4, **SKINNY),
    Bug("the stage in use", K + "skinny.cu", "ring + next % STAGES * STAGE_BYTES",
        "ring + step % STAGES * STAGE_BYTES", by="race", **SKINNY),
    Bug("a part of k is left out", K + "skinny.cu", "part < WARPS_K; ++part)\n      total",
        "part < WARPS_K - 1; ++part)\n      total", by="numbers", **SKINNY),
    Bug("a block's sums are left out", K + "skinny.cu", "s < split; ++s", "s < split - 1; ++s",
        by="numbers", **SKINNY),
    Bug("one output too many", K + "skinny.cu", "if (column >= n) break;",
        "if (column > n) break;", by="memory", **SKINNY),
    Bug("sums of a cluster are read too early", K + "skinny.cu",
        "    meet_cluster();\n", "    __syncthreads();\n", by="race", **CLUSTER),
    Bug("a block ends while others read its sums", K + "skinny.cu",
        "if (CLUSTER > 1) meet_cluster();", "", by="end", **CLUSTER),
    Bug("rows of another block", K + "skinny.cu", "rank * PASS + threadIdx.x", "threadIdx.x",
        by="race", **CLUSTER),
    Bug("sums of one block alone", K + "skinny.cu", "i < CLUSTER * WARPS_K", "i < WARPS_K",
        by="numbers", **CLUSTER),
    Bug("rows of x that are not there", K + "skinny.cu", "x_stride, m, k - k0",
        "x_stride, m + 1, k - k0", by="memory", **SKINNY),
    Bug("the weight as it lies", K + "skinny.cu", "ldmatrix_x4_trans(a", "ldmatrix_x4(a",
        by="numbers", **SKINNY_KN),
    Bug("rows of k past the end", K + "skinny.cu", "k - k0, n - first", "BLOCK_K, n - first",
        by="memory", **SKINNY_KN),
)  # fmt: skip


@each_planted(BUGS)
def test_a_planted_bug_is_found(bug, monkeypatch):
    check_found(bug, monkeypatch)


@pytest.mark.parametrize("kernel", sorted({bug.kernel for bug in BUGS}))
def test_without_it_nothing_is_said(kernel, monkeypatch):
    for bug in {str(bug.params): bug for bug in BUGS if bug.kernel == kernel}.values():
        assert outcome(bug, monkeypatch, plant=False) == ""
