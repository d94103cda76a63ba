"""Bugs planted in the kernels of quantized attention show: as races or wrong numbers. (The sweep
finds nothing in the kernels as they are.)"""

from __future__ import annotations

import pytest

from tests.core.mutations import Bug
from tests.core.test_mutations import check_found

K, T = "kernels_cu/attention/", "templates/attention/"
SYNC = "__syncthreads();"
FINE = {"dtype": "fp16", "head_dim": 64, "packed": False, "block": (64, 64)}
INT8 = {"kernel": "quantized_attention.flash",
        "params": {**FINE, "code": "int8", "values": "half"}}  # fmt: skip
WIDE = {"kernel": "quantized_attention.flash",
        "params": {**FINE, "code": "int8", "values": "half", "block": (128, 64)}}  # fmt: skip
FP8 = {
    "kernel": "quantized_attention.flash",
    "params": {**FINE, "code": "fp8", "values": "fp8", "weights": "fp8", "promote": 32},
}  # fmt: skip
FP16 = {"kernel": "quantized_attention.flash",
        "params": {**FINE, "code": "int8", "values": "fp8", "weights": "half"}}  # fmt: skip
E5M2 = {"kernel": "quantized_attention.flash", "params": {**FP8["params"], "values": "e5m2"}}
E5M2_16 = {"kernel": "quantized_attention.flash",
           "params": {**E5M2["params"], "weights": "half", "promote": 0}}  # fmt: skip
SMALL = {"dtype": "fp16", "head_dim": 64, "smooth": True, "rotate": True, "packed": False}
CHANNELS = {"kernel": "quantize_attention.channels",
            "params": {"dtype": "fp16", "head_dim": 64, "means": True, "mosts": True,
                       "packed": False}}  # fmt: skip
SPANS = {"kernel": "quantize_attention.spans", "params": {**SMALL, "code": "int8"}}
CODES = {"kernel": "quantize_attention.codes",
         "params": {**SMALL, "code": "int8", "values": "fp8", "given": False}}  # fmt: skip
SHARED = {**CODES, "params": {**CODES["params"], "shared": 128}}
GIVEN = {"kernel": "quantize_attention.codes",
         "params": {**SMALL, "code": "fp8", "values": "fp8", "given": True}}  # fmt: skip

FLASH = K + "flash_codes.cu"
BUGS = (
    Bug("no barrier before a tile is read", FLASH, SYNC, "", by="race", nth=1, **INT8),
    Bug("no wait for a tile", FLASH, "cp_async_wait<0>();", "", by="race", nth=1, **INT8),
    Bug("no barrier before Q makes room for O", FLASH, SYNC, "", by="race", nth=2, **WIDE),
    Bug("one scale for all keys", FLASH, "k_scales[tile / (SCALE_KEYS / BLOCK_K)]", "k_scales[0]",
        by="numbers", **INT8),
    Bug("sums as bits", T + "codes.cuh", "SUM_START<i8_pair> = ROUNDER", "SUM_START<i8_pair> = 0.f",
        by="numbers", **INT8),
    Bug("rows below have the scales of those above", T + "codes.cuh", "(m * 16 + half * 8) * 4",
        "(m * 16) * 4", by="numbers", **FP16),
    Bug("the same of whole sums", T + "codes.cuh", "(m * 16 + half * 8) * 4", "(m * 16) * 4",
        by="numbers", nth=1, **INT8),
    Bug("sums that begin elsewhere", T + "folded_softmax.cuh", "- RAISED + zero[m][half]",
        "- RAISED", by="numbers", **INT8),
    Bug("a lse of smooth keys", FLASH, "lse != nullptr && shift != nullptr", "false",
        by="numbers", **INT8),
    Bug("no sign of the scale", FLASH, "V_CODES ? softmax_scale : 1.f", "1.f", by="numbers",
        **FP16),
    Bug("sums keep their sign", FLASH, "if (softmax_scale < 0.f)", "if (false)", by="numbers",
        **INT8),
    Bug("a sum is added twice", T + "codes.cuh", "part[i / 8][i / 4 % 2][i % 4] = 0.f;", "",
        by="numbers", **FP8),
    Bug("two keys changed", T + "codes.cuh", "x[0], x[1]) | pack2_e4m3(x[2], x[3])",
        "x[2], x[3]) | pack2_e4m3(x[0], x[1])", by="numbers", **FP8),
    Bug("another column's scale", T + "codes.cuh", "lane % 4 * 2 + i;\n      const float by",
        "lane % 4 * 2;\n      const float by", by="numbers", **FP8),
    Bug("two keys of fp16 changed", T + "codes.cuh", "fp16_of_e4m3(four);",
        "fp16_of_e4m3(four >> 16);", by="numbers", **FP16),
    Bug("e5m2 as e4m3", "templates/ptx/mma_8bit.cuh", "f32.e4m3.e5m2.f32", "f32.e4m3.e4m3.f32",
        by="numbers", **E5M2),
    Bug("two keys of e5m2 changed", T + "codes.cuh", "0x1404", "0x0414", by="numbers", **E5M2_16),
    Bug("no barrier before the parts are added up", K + "quantize_channels.cu", SYNC, "", by="race",
        **CHANNELS),
    Bug("no barrier before the counter", K + "quantize_channels.cu", SYNC, "", by="race", nth=1,
        **CHANNELS),
    Bug("no barrier before runs are added up", K + "quantize_channels.cu", SYNC, "", by="race",
        nth=2, **CHANNELS),
    Bug("the last chunk is left out", K + "quantize_channels.cu", "i < chunks; i += RUNS",
        "i + 1 < chunks; i += RUNS", by="numbers", **CHANNELS),
    Bug("K's first rows for all", K + "quantize_spans.cu", "block - q_blocks, ceil_div",
        "0, ceil_div", by="numbers", **SPANS),
    Bug("one block's maximum is left out", K + "quantize_spans.cu", "int i = threadIdx.x; i",
        "int i = threadIdx.x + 1; i", by="numbers", **SPANS),
    Bug("no barrier before V is transposed", K + "quantize_codes.cu", SYNC, "", by="race", **CODES),
    Bug("keys in their own order", K + "quantize_codes.cu", "word % 4 * 2 + half * 8;",
        "word % 4 * 2 + half * 2;", by="numbers", **SHARED),
    Bug("words of columns in one place", K + "quantize_codes.cu",
        "column * VALUE_ROWS + (word + column / 8)", "(word + column / 8)", by="race", **CODES),
    Bug("signs that no row has", "templates/quantize/hadamard.cuh", "x[i] = -x[i];", "",
        by="numbers", **CODES),
    Bug("signs of neighbouring ones in e and t", "templates/quantize/sixteen_rows.cuh",
        "e2 == 1 ? t % 2 * BOTH_SIGNS : 0", "0", by="numbers", **CODES),
    Bug("zeros behind the last key lose the mean", T + "quantize_rows.cuh",
        "(means, row < length, row + 8 < length)", "(means, true, true)", by="numbers", **CODES),
    Bug("no barrier before the mean is read", T + "quantize_rows.cuh", SYNC, "", by="race",
        **CODES),
    Bug("a scale for keys that are not there", K + "quantize_codes.cu",
        "(i == 0 || tile.first + i * SCALE_KEYS < tile.length)", "true", by="race", **SHARED),
    Bug("one scale for 128 keys, not two", K + "quantize_codes.cu", "i < ROWS / SCALE_KEYS &&",
        "i == 0 &&", by="numbers", **SHARED),
    Bug("scales of q that is not there", K + "quantize_codes.cu",
        "lane % 4 == 0 && own_row < tile.length) scales", "lane % 4 == 0) scales", by="memory",
        **SHARED),
    Bug("the first head's scale for all", K + "quantize_codes.cu", "min(tile.head, q_spans - 1)",
        "0", by="numbers", **GIVEN),
)  # fmt: skip


@pytest.mark.sampled(key=lambda bug: bug.kernel)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug, monkeypatch):
    check_found(bug, monkeypatch)
