"""Bugs planted in the kernels of quantized products show: as races or wrong numbers. (The
sweep finds nothing in the kernels as they are.)"""

from __future__ import annotations

import pytest

from tests.core.mutations import Bug
from tests.core.test_mutations import check_found

K, T = "kernels_cu/quantize/", "templates/quantize/"
SYNC = "__syncthreads();"
# fp16 into fp32: what a wrong scale or a lost product does is far from what rounding does.
FINE = {"dtype": "fp16", "out_dtype": "fp32"}
GEMV = {"kernel": "quantized_linear.gemv", "params": {**FINE, "code": "int4"}}
GEMV8 = {"kernel": "quantized_linear.gemv", "params": {"code": "int8", "gate": False}}
RAISED = {"kernel": "quantized_linear.gemv", "params": {"dtype": "bf16", "code": "int4"}}
SKINNY64 = {"kernel": "quantized_linear.skinny", "params": {"tokens": 64}}
SKINNY = {"kernel": "quantized_linear.skinny", "params": {**FINE, "code": "int4"}}
INT8 = {"kernel": "quantized_linear.mma", "params": {"code": "int8", "gate": False}}
GATED = {"kernel": "quantized_linear.mma", "params": {"code": "int8", "gate": True}}

BLOCKS = {"kernel": "quantized_linear.wgmma",
          "params": {"scales": "blocks", "cluster": 2}}  # fmt: skip
TURNS = {"kernel": "quantized_linear.wgmma",
         "params": {"schedule": "pingpong", "cluster": 2}}  # fmt: skip

SM90 = {"kernel": "quantized_linear.gemv_sm90", "params": {"dtype": "bf16", "code": "int4"}}
DIGITS = {"kernel": "quantized_linear.gemv_digits",
          "params": {**FINE, "code": "int4", "tile": (16, 2, 2)}}  # fmt: skip
DIGITS8 = {"kernel": "quantized_linear.gemv_digits", "params": {"code": "int8"}}
WIDE = {"kernel": "quantized_linear.wgmma_blocks", "params": {"out_dtype": "fp32"}}

BUGS = (
    Bug("no barrier before the warps' sums", K + "gemv.cu", SYNC, "", by="race", **GEMV),
    Bug("no barrier before the next tiles' sums", K + "gemv.cu", SYNC, "", by="race", nth=1,
        **GEMV),
    Bug("a wait too lax by one", K + "gemv.cu", "cp_async_wait<GROUPS - 1>",
        "cp_async_wait<GROUPS>", by="race", **GEMV),
    Bug("the first group's scale", T + "coded_weight.cuh", "from[i][group] :", "from[i][0] :",
        by="numbers", **GEMV),
    Bug("codes beyond the end of k", T + "coded_weight.cuh", "span * Weights::SPAN < left ?",
        "span * Weights::SPAN <= left ?", by="memory", **GEMV),
    Bug("two halves of x changed", K + "gemv.cu", "step % 2 == 0 ? own.x : own.z",
        "step % 2 == 1 ? own.x : own.z", by="numbers", **GEMV),
    Bug("codes of int4 without a sign", "templates/ptx/math.cuh", "0x6a", "0xea", by="numbers",
        **GEMV),
    Bug("what raised codes add, of another token", K + "gemv.cu", "bases.x : bases.y",
        "bases.y : bases.x", by="numbers", **RAISED),
    Bug("rows below change places", T + "weights.cuh", "a[1] = p[0], a[3] = p[1]",
        "a[3] = p[0], a[1] = p[1]", by="numbers", **GEMV),
    Bug("bytes of int8 in another order", T + "weights.cuh", "0x7651 + 2 * j", "0x7650 + 2 * j",
        by="numbers", **GEMV8),
    Bug("sums of the first part of k alone", K + "gemv_sm90.cu", "if (part > 0)", "if (false)",
        by="numbers", **SM90),
    Bug("what raised codes add is not taken off", K + "gemv_sm90.cu", "(-sums[0])", "(sums[0])",
        by="numbers", **SM90),
    Bug("a stage is free when one warp is done", K + "gemv_sm90.cu", "memory.begin(WARPS, 1)",
        "memory.begin(1, 1)", by="race", **SM90),
    Bug("no barrier before the warps' sums", K + "gemv_sm90.cu",
        "named_barrier_wait<CONSUMERS>(1);", "", by="race", **SM90),
    Bug("digits: no barrier before the warps' sums", K + "gemv_digits.cu", SYNC, "", by="race",
        **DIGITS),
    Bug("digits: one batch of sums", K + "gemv_digits.cu", "turn % 2 * (BATCH", "0 * (BATCH",
        by="race", **DIGITS),
    Bug("digits: a wait too lax by one", K + "gemv_digits.cu", "cp_async_wait<DEPTH - 2>",
        "cp_async_wait<DEPTH - 1>", by="race", **DIGITS),
    Bug("digits: scales before other lanes' copies", K + "gemv_digits.cu",
        "__syncwarp();  // other lanes' scales", "// other lanes' scales", by="race", **DIGITS),
    Bug("digits: codes beyond the end of k", K + "gemv_digits.cu", "there && i < left ? 16",
        "there ? 16", by="memory", **DIGITS),
    Bug("digits: the first part of k alone", K + "gemv_digits.cu", "if (part > 0)", "if (false)",
        by="numbers", **DIGITS),
    Bug("digits: the last one is left out", T + "digits.cuh", "g % 2 == row && g < 6",
        "g % 2 == row && g < 2", by="numbers", **DIGITS),
    Bug("digits: high nibbles count as low ones", T + "digits.cuh", "power_of_two(17 - exponent)",
        "power_of_two(21 - exponent)", by="numbers", **DIGITS),
    Bug("digits: what the 8 of low nibbles adds", T + "digits.cuh",
        "DIGITS_BEGIN_BITS - __float_as_uint(d[0])", "DIGITS_BEGIN_BITS", by="numbers", **DIGITS),
    Bug("digits: both rows in the first one's units", T + "digits.cuh", "by[row] =", "by[0] =",
        by="numbers", **DIGITS),
    Bug("digits: words of int8 change places", T + "digits.cuh", "low[i / 2], i % 2 * 2 + 1",
        "low[i / 2], i % 2 * 2", by="numbers", **DIGITS8),
    Bug("no barrier before a stage is filled", K + "skinny.cu", SYNC, "", by="race", **SKINNY),
    Bug("a wait too lax by one", K + "skinny.cu", "cp_async_wait<DEPTH - 2>",
        "cp_async_wait<DEPTH - 1>", by="race", **SKINNY),
    Bug("no barrier before sums are where stages were", K + "skinny.cu", SYNC, "", by="race",
        nth=1, **SKINNY),
    Bug("no barrier before the counter", K + "skinny.cu", SYNC, "", by="race", nth=3, **SKINNY),
    Bug("a part of k left out", K + "skinny.cu", "part < split", "part + 1 < split",
        by="numbers", **SKINNY),
    Bug("a chunk in another's place", K + "skinny.cu", "/ 8 + step / 2",
        "/ 8 + step / 2 % 2", by="numbers", **SKINNY),
    Bug("codes that nobody copies", K + "skinny.cu", "ahead, part);", "ahead, 0);", by="race",
        **SKINNY64),
    Bug("no barrier before a stage is read", K + "mma.cu", SYNC, "", by="race", **INT8),
    Bug("sums as bits", T + "scaled_sums.cuh", "if (BITS)", "if (false)", by="numbers", **INT8),
    Bug("the scale of the column before", T + "scaled_sums.cuh", "min(output + 1, last)",
        "min(output, last)", by="numbers", **INT8),
    Bug("up with the scales of gate", T + "scaled_sums.cuh", "Pairs::n + min(column, last)",
        "min(column, last)", by="numbers", **GATED),
    Bug("no wait for products", K + "wgmma.cu", "wgmma_wait<0>();", "", by="wgmma", nth=1,
        **BLOCKS),
    Bug("sums that were added stay", K + "wgmma.cu", "step % STEPS > 0", "step > 0",
        by="numbers", **BLOCKS),
    Bug("the first 128's scales", K + "wgmma.cu", "n, step, steps", "n, 0, steps",
        by="numbers", **BLOCKS),
    Bug("no wait for products", K + "wgmma_blocks.cu", "wgmma_wait<0>();", "", by="wgmma", **WIDE),
    Bug("one scale for outputs of two blocks", K + "wgmma_blocks.cu", "(WIDE ? time : 0)", "0",
        by="numbers", **WIDE),
    Bug("scales in a stage that is not free", K + "wgmma_blocks.cu",
        "mbarrier_wait(empty, parity);", "", by="race", **WIDE),
    Bug("the first 128's scales", K + "wgmma_blocks.cu", "* steps + step)", "* steps)",
        by="numbers", **WIDE),
    Bug("a stage is free when one block is done", K + "wgmma.cu", "4 * CLUSTER * (",
        "4 * (", by="barrier", **BLOCKS),
    Bug("rows of a tile below change places", K + "wgmma.cu", "row + block * (TWICE",
        "row + (1 - block) * (TWICE", by="numbers", **TURNS),
    Bug("one half of the weight for both", K + "wgmma.cu", "rank == 0 ? column : further",
        "column", by="numbers", **BLOCKS),
)  # fmt: skip


@pytest.mark.sampled(key=lambda bug: bug.kernel)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug, monkeypatch):
    check_found(bug, monkeypatch)
