"""Flushing of subnormal floats to zero (.ftz)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fkjit.interp.numbers.rounding import FORMATS, quantise

_TINY = np.float32(2.0**-126)


def flush(values: np.ndarray, tiny: np.float32 = _TINY) -> np.ndarray:
    """Subnormal float32 values -> zero of the same sign (.ftz)."""
    return np.where(np.abs(values) < tiny, np.copysign(np.float32(0), values), values)


def flush_rounded(
    result: np.ndarray, exact: Callable[[], np.ndarray], mode: str = "rn", kind: str = "f32"
) -> np.ndarray:
    """.ftz of rounded results, as values; `exact` gives them in float64 before rounding.

    As an H200 does, also what only rounding made the smallest normal number becomes zero, if
    rounding it to as many bits without a lowest exponent would not.
    """
    tiny = FORMATS[kind].lowest
    smallest = result.dtype.type(2.0**tiny)
    flushed = flush(result, smallest)
    edge = np.abs(result) == smallest
    if edge.any():
        with_room = quantise(np.ldexp(exact(), -tiny), kind, mode)  # to about 1
        below = edge & (np.abs(with_room) < 1.0)
        flushed = np.where(below, np.copysign(result.dtype.type(0), result), flushed)
    return flushed
