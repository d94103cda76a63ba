"""Bugs planted in Hopper's kernel of quantized attention show: as races or wrong numbers."""

from __future__ import annotations

import pytest

from tests.core.mutations import Bug
from tests.core.test_mutations import check_found

KERNEL, T = "kernels_cu/attention/flash_codes_sm90.cu", "templates/attention/sm90/codes.cuh"
ROWS = "templates/attention/sm90/code_rows.cuh"
ON = {"kernel": "quantized_attention.flash_sm90"}
FP8 = {**ON, "params": {"dtype": "fp16", "code": "fp8", "values": "fp8", "promote": 0,
                        "head_dim": 64, "packed": False, "block": (192, 128)}}  # fmt: skip
ASIDE = {**ON, "params": {**FP8["params"], "promote": 256}}
E5M2 = {**ON, "params": {**FP8["params"], "values": "e5m2"}}
INT8 = {**ON, "params": {**FP8["params"], "code": "int8"}}
HALF = {**ON, "params": {**INT8["params"], "values": "half", "block": (192, 64)}}
THIRDS = {**ON, "params": {**FP8["params"], "head_dim": 128, "block": (192, 96)}}

BUGS = (
    Bug("no wait for K", KERNEL, "mbarrier_wait(barriers.k_full(place.stage), place.parity);", "",
        by="race", **FP8),
    Bug("no wait for V", KERNEL, "mbarrier_wait(barriers.v_full(place.stage), place.parity);", "",
        by="race", **FP8),
    Bug("a row's scale for the row below", ROWS, "row + 8 * half, last", "row, last", by="numbers",
        **FP8),
    Bug("one scale for all keys", KERNEL, "scales -= Softmax::step(tile);", "", by="numbers",
        **HALF),
    Bug("a third of keys with its neighbour's scale", T, "i == 1 && tile % 2 == 0", "i == 1",
        by="numbers", **THIRDS),
    Bug("sums as whole numbers' bits", KERNEL, ", sums_to_float(sums);", ";", by="numbers", **INT8),
    Bug("no mask", KERNEL, "if (!range.is_whole(tile))", "if (false)", by="numbers", **FP8),
    Bug("the output keeps its old maximum", KERNEL, "if (rescale) scale_rows(acc, correction);", "",
        by="numbers", **FP8),
    Bug("two keys changed", T, "pack4_e4m3(low[0], low[1], high[0], high[1])",
        "pack4_e4m3(high[0], high[1], low[0], low[1])", by="numbers", **FP8),
    Bug("another column's scale", ROWS, "lane % 4 * 2) * 4", "lane % 4) * 4", by="numbers", **FP8),
    Bug("the lse of smooth keys", ROWS, "shift == nullptr ? 0.f", "true ? 0.f", by="numbers",
        **FP8),
    Bug("sums aside are forgotten", KERNEL, "aside.take(acc, warp_o(), lane_index_again())",
        "void()", by="numbers", **ASIDE),
    Bug("what grew is not looked at", T, "__any_sync(FULL_MASK, most > LIMIT)", "false",
        by="numbers", **FP8),
    Bug("sums keep their old maximum", T, "row_sum[half] *= by_less, sums", "sums", by="numbers",
        **FP8),
    Bug("what grew keeps its old maximum", T, "add[half] -= less;", "", by="numbers", **FP8),
    Bug("e5m2 as e4m3", "templates/ptx/wgmma_bytes.cuh", "f32.e4m3.e5m2", "f32.e4m3.e4m3",
        by="numbers", **E5M2),
)  # fmt: skip


@pytest.mark.sampled(key=lambda bug: bug.by)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug, monkeypatch):
    check_found(bug, monkeypatch)
