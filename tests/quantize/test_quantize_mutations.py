"""Bugs planted in the kernels of quantization show: as races or wrong numbers. (The
sweep finds nothing in the kernels as they are.)"""

from __future__ import annotations

import pytest

from tests.core.mutations import Bug
from tests.core.test_mutations import check_found

K, T = "kernels_cu/quantize/", "templates/quantize/"
FP16 = {"dtype": "fp16"}
ROW = {"kernel": "quantize.spans",
       "params": {**FP16, "code": "fp8", "span": "row", "wide": False}}  # fmt: skip
WIDE = {"kernel": "quantize.spans",
        "params": {**FP16, "code": "fp8", "span": "row", "wide": True}}  # fmt: skip
INT4 = {"kernel": "quantize.spans",
        "params": {**FP16, "code": "int4", "span": "group", "wide": True}}  # fmt: skip
BLOCK = {"kernel": "quantize.spans",
         "params": {**FP16, "code": "fp8", "span": "block", "wide": True}}  # fmt: skip
AMAX = {"kernel": "quantize.amax", "params": {**FP16, "code": "fp8", "wide": True}}
BACK = {"kernel": "dequantize.eights",
        "params": {"dtype": "fp32", "code": "int4", "span": "group", "wide": True,
                   "scale_dtype": "fp16"}}  # fmt: skip

BUGS = (
    Bug("no barrier where warps meet", T + "scale.cuh", "__syncthreads();", "", by="race", **ROW),
    Bug("a column too many", T + "codes.cuh", "if (column + i < columns) x[i]",
        "if (column + i <= columns) x[i]", by="memory", **ROW),
    Bug("only what the registers hold", K + "spans.cu",
        "most = max(most, magnitude(load(i)))", "most = most", by="numbers", **WIDE),
    Bug("ties and the rest towards zero", T + "codes.cuh", "cut + ROUNDER",
        "truncf(cut) + ROUNDER", by="numbers", **INT4),
    Bug("neighbours in neighbouring nibbles", T + "codes.cuh", "i / 2 * 4 + i % 2 * 16", "i * 4",
        by="numbers", **INT4),
    Bug("half of a group", K + "spans.cu", "lanes_most<16>(most)", "lanes_most<8>(most)",
        by="numbers", **INT4),
    Bug("a row of a block left out", K + "spans.cu",
        "for (int i = 0; i < HELD; ++i) most", "for (int i = 1; i < HELD; ++i) most",
        by="numbers", **BLOCK),
    Bug("a block's magnitude lost", K + "amax.cu", "i < gridDim.x", "i + 1 < gridDim.x",
        by="numbers", **AMAX),
    Bug("the counter stays", K + "amax.cu", "last_block(counters, gridDim.x)",
        "last_block(counters, gridDim.x + 1)", by="numbers", **AMAX),
    Bug("codes without their sign", T + "codes.cuh", ">> 28) * scale", ">> 28 & 15) * scale",
        by="numbers", **BACK),
    Bug("the scale of the first group", K + "dequantize.cu", "groups + column / WIDTH", "groups",
        by="numbers", **BACK),
)  # fmt: skip


@pytest.mark.sampled(key=lambda bug: bug.kernel)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug, monkeypatch):
    check_found(bug, monkeypatch)
