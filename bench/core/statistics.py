"""What is said of a list of times, and how far a median can be believed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

_NORMAL = 1.4826  # a median absolute deviation of 1 is this standard deviation, if normal
_Z = 1.96  # 95 %


def summary(samples: Sequence[float], turns: Sequence[Sequence[float]] = ()) -> dict[str, Any]:
    """Count, mean, std (of a sample), min, max, p50, p95, p99, and how sure p50 is.

    `low` and `high` are a 95 % interval of the median that assumes no distribution. `turns` are the
    same samples by turn; their medians are kept, because they show what drifts. Units are those of
    `samples`. ValueError without samples.
    """
    values = np.asarray(samples, np.float64)
    if not values.size:
        raise ValueError("summary: no samples")
    p50, p95, p99 = np.percentile(values, (50, 95, 99))
    low, high = median_interval(samples)
    found = {
        "count": int(values.size),
        "mean": values.mean(),
        "std": values.std(ddof=1) if values.size > 1 else 0.0,
        "min": values.min(),
        "max": values.max(),
        "p50": p50, "p95": p95, "p99": p99,
        "low": low, "high": high,
    }  # fmt: skip
    made: dict[str, Any] = {k: v if k == "count" else float(v) for k, v in found.items()}
    if turns:
        made["turns"] = [float(np.median(turn)) for turn in turns if len(turn)]
    return made


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """The order statistics between which the median lies with 95 % confidence."""
    ordered = np.sort(np.asarray(samples, np.float64))
    reach = _Z * math.sqrt(ordered.size) / 2
    first = max(0, math.floor(ordered.size / 2 - reach) - 1)
    last = min(ordered.size - 1, math.ceil(ordered.size / 2 + reach))
    return float(ordered[first]), float(ordered[last])


def spread(values: Sequence[float]) -> float:
    """A standard deviation that a few outliers do not move."""
    found = np.asarray(values, np.float64)
    return float(_NORMAL * np.median(np.abs(found - np.median(found)))) if found.size else 0.0


def noise(found: dict[str, Any]) -> float:
    """How far p50 of a `summary` may be off, as a share of p50.

    The larger of half the median's interval and the spread of the turns' medians: neighbouring
    samples share clocks and temperature, so the interval alone would promise too much. 0 for a
    summary that has neither.
    """
    interval = (found.get("high", 0.0) - found.get("low", 0.0)) / 2
    between = spread(found.get("turns", ()))
    return max(interval, between) / found["p50"] if found["p50"] > 0 else 0.0
