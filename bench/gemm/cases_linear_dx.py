"""The gradient of x: dx [m, k] = dy [m, n] weight [n, k], a product with its weight as [k, n]."""

from __future__ import annotations

from typing import Any

from .gradients import operation
from .products import problem


def dx(m: int, k: int, n: int) -> dict[str, Any]:
    """Of a forward [m, k] by [n, k]."""
    return problem(m, n, k, weight_layout="kn")


OP = operation("linear_dx", dx)
