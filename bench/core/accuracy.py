"""Whether an output is right: parts of it against float64, by norm and at the worst element."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LIMITS = {"fp32": 3e-5, "fp16": 4e-3, "bf16": 2.5e-2}  # of ‖out - reference‖ / ‖reference‖
_WORST = 3  # times the limit, for max |out - reference| / max |reference|


@dataclass(frozen=True)
class Accuracy:
    """Errors relative to the reference's norm and largest element; `limit` is of the former."""

    relative: float
    worst: float
    limit: float

    def why_wrong(self) -> str | None:
        """What is wrong, or None. NaN is wrong."""
        if self.relative <= self.limit and self.worst <= _WORST * self.limit:
            return None
        return (
            f"wrong result: relative error {self.relative:.3g} (allowed {self.limit:g}), "
            f"worst element {self.worst:.3g} of the largest (allowed {_WORST * self.limit:g})"
        )


@dataclass(frozen=True)
class Expected:
    """Parts of the right output, in float64, each with the index that takes it out of an output.

    `limit`: greatest relative error, by the dtype (LIMITS).
    """

    parts: Sequence[tuple[Any, Any]]
    limit: float

    def judge(self, output: Any) -> Accuracy:
        """Compare an output, laid out as the reference is. NumPy arrays or torch tensors."""
        square = total = worst = largest = 0.0
        for index, want in self.parts:
            got = _double(output[index])
            if tuple(got.shape) != tuple(want.shape):
                return Accuracy(math.inf, math.inf, self.limit)
            off = abs(got - want)
            square += float((off * off).sum())
            total += float((want * want).sum())
            far = float(off.max())
            worst = far if math.isnan(far) else max(worst, far)
            largest = max(largest, float(abs(want).max()))
            if math.isnan(far):
                return Accuracy(math.nan, math.nan, self.limit)
        norm = math.sqrt(total) or 1.0
        return Accuracy(math.sqrt(square) / norm, worst / (largest or 1.0), self.limit)


def _double(array: Any) -> Any:
    return array.double() if hasattr(array, "double") else np.asarray(array).astype(np.float64)
