"""Bugs planted in the decode step of one launch show: as races or as wrong numbers.

The sweep finds nothing in the kernel as it is.
"""

from __future__ import annotations

import pytest

from tests.core.mutations import Bug
from tests.core.test_mutations import check_found

K, T = "kernels_cu/step/whole.cu", "templates/step/"
SMALL = {"kernel": "decode_step.whole", "params": {"head_dim": 16, "norm": "rms"}}
LAYER = {"kernel": "decode_step.whole", "params": {"head_dim": 16, "norm": "layer"}}
CODED = {"kernel": "decode_step.whole", "params": {"head_dim": 32, "dtype": "bf16"}}
NUMBERS = {"kernel": "decode_step.whole", "params": {"head_dim": 32, "dtype": "fp16"}}

BUGS = (
    Bug("no wait for a stage", T + "tile_sums.cuh",
        "mbarrier_wait(ring.full + 8 * ring.place.stage, ring.place.parity);", "", by="race",
        **SMALL),
    Bug("a stage fetched before it is free", T + "weight_ring.cuh",
        "mbarrier_wait(empty + 8 * place.stage, place.parity ^ 1);", "", by="race", **SMALL),
    Bug("sums added up before all are there", T + "tile_sums.cuh",
        "Meet()();  // sums are there", "", by="race", **SMALL),
    Bug("sums left where others are added up", T + "tile_sums.cuh",
        "Meet()();  // sums have been added up", "", by="race", **SMALL),
    Bug("rows gathered where attention is not over", K,
        "angles, meet, calm);\n      meet();", "angles, meet, calm);", by="race", **SMALL),
    Bug("rows multiplied before they are there", K,
        "if (waits) calm(false);\n    meet();", "if (waits) calm(false);", by="race", **SMALL),
    Bug("words taken as they are", T + "exchange.cuh", "while (!all);", "while (false);",
        by="numbers", **SMALL),
    Bug("the new key left out", T + "decode_heads.cuh",
        "if (key + i * STEP == cached && span.fresh)", "if (false)", by="numbers", **SMALL),
    Bug("a key beyond the window", T + "decode_heads.cuh", "max(item.keys - window, 0)",
        "max(item.keys - window - 1, 0)", by="numbers", **SMALL),
    Bug("half of a tile's second rows", T + "weight_ring.cuh", "both ? lane / 8 % 2 : 0", "0",
        by="numbers", **SMALL),
    Bug("columns where another swizzle has them", T + "weight_ring.cuh", "at ^ SPAN", "at + SPAN",
        by="race", **SMALL),
    Bug("another tile's rows", T + "weight_ring.cuh", "group = 0, row += step;",
        "group = 0, row += 8;", by="numbers", **SMALL),
    Bug("codes by another group's scale", T + "weight_ring.cuh",
        "row * SCALE_PITCH + warp * CODED_PART / 64", "row * SCALE_PITCH", by="numbers", **CODED),
    Bug("rows not normalised", K, "sum.x *= by.y, sum.y *= by.y;", "", by="numbers", **CODED),
    Bug("a mean left in", K, "sum.x -= by.x * more[0].x", "sum.x -= 0.f", by="numbers", **LAYER),
    Bug("a norm's bias not waited for", T + "gathered_rows.cuh",
        "if (CENTERED) cp_async_wait<0>();", "", by="race", **LAYER),
    Bug("scales not waited for", T + "weight_ring.cuh", "HALF + (coded ? SCALE_HALF : 0)",
        "HALF", by="barrier", **CODED),
    Bug("digits in another order than codes", T + "row_digits.cuh", "0x6240", "0x6420",
        by="numbers", **CODED),
    Bug("another token's digits", T + "weight_ring.cuh", "min(g / 2, count - 1) * bytes",
        "min(g / 4, count - 1) * bytes", by="numbers", **CODED),
    Bug("a group's greatest of four lanes", T + "row_digits.cuh",
        "__reduce_max_sync(FULL_MASK, most)", "most", by="numbers", **CODED),
    Bug("digits behind one another without a gap", T + "row_digits.cuh",
        "factors(k) + round_up(k / GROUP * 4, 16)", "factors(k) + k / GROUP * 4", by="memory",
        **CODED),
    Bug("codes in another order than x", T + "coded_part.cuh", "(turned ? pair ^ 1 : pair)",
        "pair", by="numbers", **NUMBERS),
    Bug("a warp's sums left out", T + "tile_sums.cuh", "for (int w = 0; w < WARPS; ++w)",
        "for (int w = 1; w < WARPS; ++w)", by="numbers", **SMALL),
    Bug("tokens not counted", K, "lengths[row] = length + 1;", "lengths[row] = length;",
        by="numbers", **SMALL),
)  # fmt: skip


@pytest.mark.sampled(key=lambda bug: bug.by)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug, monkeypatch):
    check_found(bug, monkeypatch)
