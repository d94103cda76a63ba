"""Problems of the product's textbook kernel."""

from __future__ import annotations

from typing import Any

from fkjit.ops.gemm.cases import problem, verification
from fkjit.spec import Params


def _problems(params: Params, scale: str) -> list[dict[str, Any]]:
    """Several tiles with odd edges, all of the epilogue, one element."""
    sizes = (70, 67, 37) if scale == "small" else (1000, 771, 515)
    pre = params["out_dtype"] == params["dtype"]  # else it is rounded more than out
    return [
        problem(params, *sizes, gap=3, residual=True, pre=pre, scale=0.5),
        problem(params, 1, 1, 1, bias=False),
    ]


TILED = verification(_problems)
