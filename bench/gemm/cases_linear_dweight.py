"""The gradient of a weight: dweight [n, k] = dy [m, n] transposed, by x [m, k]."""

from __future__ import annotations

from typing import Any

from .gradients import operation
from .products import problem


def dweight(m: int, k: int, n: int) -> dict[str, Any]:
    """Of a forward [m, k] by [n, k]."""
    return problem(n, m, k, x_layout="km", weight_layout="kn")


OP = operation("linear_dweight", dweight)
