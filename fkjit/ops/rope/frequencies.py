"""Frequencies of rotary position embeddings: as the fused kernel's integers, and as tables."""

from __future__ import annotations

import math
import sys
from decimal import Decimal, localcontext
from typing import Any, NamedTuple

import numpy as np

from fkjit.arguments import shown, whole
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.runtime import interop
from fkjit.runtime.interop import CPU
from fkjit.symbolic import decision

THETA = 10_000.0
MAX_ROTARY_DIM = 512
_MAX_THETA = 1e300
_MAX_LENGTH = 1 << 26  # positions of a table
_PI = "3.14159265358979323846264338327950288419716939937511"
_INDEX_BITS = 8  # ROPE_INDEX_BITS of templates/rope/angle.cuh
_ROWS = 1 << 14  # of a table, made at a time


class Llama3Scaling(NamedTuple):
    """Llama 3.1's: long wavelengths are stretched by `factor`, short ones kept.

    A wavelength is long that fits less than `low_freq_factor` times into `original_context` tokens,
    and short that fits more than `high_freq_factor` times; between them the stretch fades out.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


class YarnScaling(NamedTuple):
    """YaRN (Peng et al. 2023): for tables.

    Pairs that turn more than `beta_fast` times in `original_context` tokens are kept, those that
    turn less than `beta_slow` times are stretched by `factor`, and between them both are mixed,
    linearly in the pair's number (from and to whole numbers where `truncate`). Results grow by
    `mscale`, by default 0.1 ln(factor) + 1.
    """

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    truncate: bool = True


Scaling = Llama3Scaling | YarnScaling


def check_frequencies(call: str, rotary_dim: Any, theta: Any, scaling: Any) -> None:
    """ParameterError for what has no frequencies."""
    if not 2 <= rotary_dim <= MAX_ROTARY_DIM or rotary_dim % 2:
        raise ParameterError(
            f"{call}: rotary_dim={rotary_dim} is not an even number from 2 to {MAX_ROTARY_DIM}"
        )
    if not (isinstance(theta, int | float) and 1 < theta < _MAX_THETA):
        raise ParameterError(f"{call}: theta={shown(theta)} is not a finite number above 1")
    if scaling is None:
        return
    if not isinstance(scaling, Llama3Scaling | YarnScaling):
        raise ParameterError(
            f"{call}: scaling={shown(scaling)} is not None, a fkjit.Llama3Scaling or a "
            "fkjit.YarnScaling"
        )
    slow, fast = (
        ("low_freq_factor", "high_freq_factor")
        if isinstance(scaling, Llama3Scaling)
        else ("beta_slow", "beta_fast")
    )
    strange = [n for n, v in zip(scaling._fields, scaling, strict=True) if not _is_number(n, v)]
    if strange:
        raise ArgumentTypeError(f"{call}: {strange[0]} of scaling={shown(scaling)} is no number")
    if not 1 <= scaling.factor < math.inf:
        raise ParameterError(f"{call}: factor of {scaling} is not a finite number from 1 on")
    if not 1 <= scaling.original_context < 1 << 31:
        raise ParameterError(f"{call}: original_context of {scaling} is not from 1 to 2^31 - 1")
    if not 0 < getattr(scaling, slow) < getattr(scaling, fast) < scaling.original_context:
        raise ParameterError(f"{call}: {scaling} needs 0 < {slow} < {fast} < original_context")


def _is_number(name: str, value: Any) -> bool:
    """Whether a field of a scaling is of its kind; YaRN's mscale may be None."""
    if value is None:
        return name == "mscale"
    return isinstance(value, int | float | np.integer | np.floating) and abs(value) < _MAX_THETA


@decision(256)
def fixed_point(rotary_dim: int, theta: float, scaling: Llama3Scaling | None) -> tuple[int, ...]:
    """`RopeFrequencies` of templates/rope/angle.cuh, as its integers."""
    with localcontext() as context:
        context.prec = 60
        one, log = Decimal(1 << 64), Decimal(theta).ln()
        powers = [int((-log * (2 << bit) / rotary_dim).exp() * one) for bit in range(_INDEX_BITS)]
        first = int(one / (2 * Decimal(_PI)))
        if scaling is None or scaling.factor == 1:
            return (*powers, first, 0, 0, 0, 0, 0)
        context_turns = one / scaling.original_context
        low = int(Decimal(scaling.low_freq_factor) * context_turns)
        high = int(Decimal(scaling.high_freq_factor) * context_turns)
        reduced = 1 / Decimal(scaling.factor)
        span = high - low
        shift = 64 - span.bit_length()
        slope = int((1 - reduced) * (1 << 63) * one / (span << shift))
    return (*powers, first, low, high, int(reduced * one), slope, shift)


def frequencies(rotary_dim: int, theta: float, scaling: Scaling | None) -> np.ndarray:
    """[rotary_dim / 2] radians a token, in NumPy's longest float."""
    pair = np.arange(rotary_dim // 2, dtype=np.longdouble)
    found = np.longdouble(theta) ** (-2 * pair / rotary_dim)
    if isinstance(scaling, Llama3Scaling):
        turns = scaling.original_context * found / (2 * np.longdouble(_PI))
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return found * (kept + (1 - kept) / scaling.factor)
    if isinstance(scaling, YarnScaling):
        kept = 1 - np.clip(_stretched(rotary_dim, theta, scaling, pair), 0, 1)
        return found * (kept + (1 - kept) / scaling.factor)
    return found


def _stretched(rotary_dim: int, theta: float, scaling: YarnScaling, pair: np.ndarray) -> np.ndarray:
    """How far each pair is on the way from kept (0) to stretched (1)."""

    def turning(times: float) -> float:
        """The pair, not a whole number, that turns so many times in the original context."""
        wavelength = scaling.original_context / (2 * math.pi * times)
        return rotary_dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = turning(scaling.beta_fast), turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    return (pair - low) / (high - low if high != low else 1e-3)


def amplitude(scaling: Scaling | None) -> float:
    """What the length of a turned pair grows by."""
    if not isinstance(scaling, YarnScaling):
        return 1.0
    if scaling.mscale is not None:
        return scaling.mscale
    return 0.1 * math.log(scaling.factor) + 1


def rope_table(
    length: int,
    rotary_dim: int,
    *,
    theta: float = THETA,
    scaling: Scaling | None = None,
    like: Any = None,
) -> Any:
    """Cosines and sines for `fkjit.rope(..., table=...)`.

    Args:
        length: positions 0 to length - 1.
        rotary_dim: columns that turn, even, up to 512: rotary_dim / 2 pairs.
        theta: base of the frequencies theta^(-2i / rotary_dim), in radians a token, above 1.
        scaling: for long contexts; `fkjit.Llama3Scaling`, `fkjit.YarnScaling` or None.
        like: an array whose framework and device the table gets; default NumPy.

    Returns:
        [length, rotary_dim] fp32: the cosines of all pairs, then their sines, times YaRN's mscale;
        computed in float64.

    Raises:
        ParameterError: a length, rotary_dim, theta or scaling out of range.

    Example:
        >>> table = fkjit.rope_table(4096, 64, scaling=fkjit.YarnScaling(4.0, 1024))
        >>> table.shape, table.dtype
        ((4096, 64), dtype('float32'))
    """
    length = whole("rope_table", "length", length, 0, _MAX_LENGTH)
    rotary_dim = whole("rope_table", "rotary_dim", rotary_dim)
    check_frequencies("rope_table", rotary_dim, theta, scaling)
    table = np.empty((length, rotary_dim), np.float32)
    turning, grown = frequencies(rotary_dim, theta, scaling).astype(np.float64), amplitude(scaling)
    for begin in range(0, length, _ROWS):
        rows = table[begin : begin + _ROWS]
        angle = np.arange(begin, begin + len(rows), dtype=np.float64)[:, None] * turning
        rows[:, : rotary_dim // 2] = grown * np.cos(angle)
        rows[:, rotary_dim // 2 :] = grown * np.sin(angle)
    return table if like is None else _moved(table, interop.view(like, "rope_table", "like"))


def _moved(table: np.ndarray, like: interop.View) -> Any:
    """`table` in the framework and on the device of an array."""
    if like.kind == "torch":
        return sys.modules["torch"].from_numpy(table).to(like.array.device)
    if like.device == CPU:
        return interop.give_back(like, table)
    import cupy

    with cupy.cuda.Device(like.device):
        return interop.give_back(like, cupy.asarray(table))
