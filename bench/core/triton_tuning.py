"""How twins with many shapes tune themselves. Imports triton."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import triton


def quickly(call: Callable[[], Any], quantiles: Sequence[float]) -> Any:
    """Times of one configuration within 30 ms, not Triton's 130: tables have a hundred shapes."""
    return triton.testing.do_bench(call, warmup=5, rep=20, quantiles=quantiles)
