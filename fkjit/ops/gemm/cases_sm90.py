"""How the products for Hopper are checked: ragged tiles, more tiles than blocks."""

from __future__ import annotations

from typing import Any

from fkjit.ops.gemm import cases
from fkjit.ops.gemm.kernels_sm90 import memory
from fkjit.spec import Params


def _problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """Some tiles that are cut, with gaps between rows; one block that takes several; and fewer rows
    than half a tile's of either operand."""
    block_m, block_n = params["block"]
    columns = block_n // 2 if params["gate"] else block_n
    wide, deep = (2, 200) if scale == "small" else (9, 1000)
    deep = deep + 64 * 8 if params["shares"] else deep
    blocks = params["cluster"] * (3 if params["shares"] else 2)
    step = 8 if params["tma_store"] else 1
    # Rows of out on no boundaries: of an odd number of columns, or at an odd distance.
    odd = step % 8 if params["weight_layout"] == "nk" else 0
    ragged = (block_m + 24, wide * columns - 8 + odd, deep)
    whole = (block_m * wide, columns, 64 * 3)
    few = (6 if params["x_layout"] == "mk" else 8, columns // 4 // 8 * 8, deep)
    kept = {name: params[name] for name in ("residual", "pre")}
    more = {**kept, "gap": 8, "scale": 0.75}
    if not params["tma_store"]:
        more["out_stride"] = ragged[1] + 9
    return [
        {**cases.problem(params, *ragged, **more), "multiprocessors": blocks},
        {**cases.problem(params, *whole, **kept, bias=False), "multiprocessors": params["cluster"]},
        {**cases.problem(params, *few, **kept, bias=False), "multiprocessors": blocks},
    ]


WGMMA = cases.with_scratch(cases.verification(_problems), memory)
