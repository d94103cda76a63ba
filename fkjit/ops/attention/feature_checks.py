"""What can be wrong with score features: a window, a soft cap, arrays, a score_mod."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol

from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.ops.attention.features import ARRAYS, BIAS_DTYPES, SLOTS, ScoreFeatures
from fkjit.ops.attention.shapes import Sizes, check_columns
from fkjit.ops.op.checks import check_dtype, check_flag, check_shape
from fkjit.runtime.interop import ITEMSIZE, View

_UNBOUNDED = (None, -1)
_kept = lru_cache(maxsize=1024)(ScoreFeatures)  # calls that ask for the same have the very same


class FeatureOptions(Protocol):
    """What options of any call with score features have."""

    @property
    def causal(self) -> Any: ...
    @property
    def window(self) -> Any: ...
    @property
    def softcap(self) -> Any: ...
    @property
    def score_mod(self) -> str: ...
    @property
    def score_names(self) -> tuple[str, ...]: ...
    @property
    def score_scalars(self) -> tuple[tuple[str, str, Any], ...]: ...


def check_features(
    call: str, seen: Mapping[str, View], problem: Sizes, options: FeatureOptions
) -> ScoreFeatures:
    """What is to be compiled; every array of it is looked at on the way. The problem has batch,
    heads_q, seqlen_q, seqlen_k and dtype; it gets window, softcap, score_scalars, form_bytes."""
    problem |= {
        "window": window_of(call, options.window, options.causal, problem),
        "softcap": softcap_of(call, options.softcap),
        "score_scalars": {name: value for name, _, value in options.score_scalars},
    }
    paired = {}
    for name, allowed in (("bias", BIAS_DTYPES), ("mask", ("bool",))):
        if name in seen:
            check_dtype(call, name, seen[name], allowed)
            paired[name] = _broadcast(call, name, seen[name], problem)
    if "sinks" in seen:
        check_dtype(call, "sinks", seen["sinks"], ("fp32",))
        check_shape(call, "sinks", seen["sinks"], (problem["heads_q"],), "[Hq],")
        check_columns(call, "sinks", seen["sinks"])
    if "alibi_slopes" in seen:
        _alibi(call, seen["alibi_slopes"], problem)
    problem["form_bytes"] = _bytes(seen)
    return _kept(
        softcap=problem["softcap"] > 0, alibi="alibi_slopes" in seen, sinks="sinks" in seen,
        bias=seen["bias"].dtype if "bias" in seen else "", bias_paired=paired.get("bias", False),
        mask="mask" in seen, mask_paired=paired.get("mask", False),
        varlen="cu_seqlens_q" in seen, score_mod=options.score_mod,
        paged=seen.keys() >= {"cu_seqlens_q", "page_table"}, codes=_codes(problem),
        mixed=bool(problem.get("mixed")),
        score_args=_score_args(call, seen, options),
    )  # fmt: skip


def _codes(problem: Sizes) -> str:
    """Of keys in pages, "" where they are kept as q."""
    stored = problem.get("storage", "same")
    return "" if stored == "same" or "total_q" not in problem else stored


def window_of(call: str, window: Any, causal: Any, problem: Sizes) -> tuple[int, int]:
    """(left, right) as the kernel wants them: causal folded in, at most as wide as the scores."""
    causal = check_flag(call, "causal", causal)
    wide = max(problem["seqlen_q"], problem["seqlen_k"])
    try:
        left, right = (None, None) if window is None else window
        sides = [wide if s in _UNBOUNDED else operator.index(s) for s in (left, right)]
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            f"{call}: window={window!r} is not a pair (left, right) of whole numbers or None"
        ) from None
    if min(sides) < 0:
        raise ParameterError(
            f"{call}: window={window!r}: a side is at least 0; None or -1 is without a bound"
        )
    return min(sides[0], wide), 0 if causal else min(sides[1], wide)


def softcap_of(call: str, softcap: Any) -> float:
    """0.0 where there is none."""
    if softcap is None:
        return 0.0
    try:
        value = float(softcap) if not isinstance(softcap, (str, bytes)) else math.nan
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if math.isnan(value):
        raise ArgumentTypeError(f"{call}: softcap={softcap!r} is not a plain number or None")
    if not (value == 0 or 1e-6 <= value <= 1e30):
        raise ParameterError(
            f"{call}: softcap={value} is not in 1e-6 .. 1e30; None or 0 is without one"
        )
    return value


def _broadcast(call: str, name: str, view: View, problem: Sizes) -> bool:
    """Checks a [B | 1, Hq | 1, Sq | 1, Sk] array; whether two neighbouring keys are one load."""
    lengths = (problem["batch"], problem["heads_q"], problem["seqlen_q"], problem["seqlen_k"])
    shape, together = view.shape, 0  # bits of what must be even
    fits = len(shape) == 4 and shape[3] == lengths[3]
    for n, step, whole in zip(shape[:3], view.strides, lengths, strict=False) if fits else ():
        fits = fits and n in (1, whole)
        together |= step if n > 1 else 0
    if not fits:
        raise ParameterError(
            f"{call}: {name} has shape {tuple(shape)}; allowed: four dimensions that broadcast to "
            f"{lengths}, the last one in full"
        )
    check_columns(call, name, view)
    if problem["dtype"] == "fp32":  # whose kernel takes keys one by one
        return False
    pair = 2 * ITEMSIZE.get(view.dtype, 1)
    return not (view.pointer % pair or (together | shape[3]) % 2)


def _alibi(call: str, view: View, problem: Sizes) -> None:
    heads = problem["heads_q"]
    check_dtype(call, "alibi_slopes", view, ("fp32",))
    if tuple(view.shape) not in ((heads,), (problem["batch"], heads)):
        raise ParameterError(
            f"{call}: alibi_slopes has shape {tuple(view.shape)}; allowed: [Hq] ({heads},) or "
            f"[B, Hq] {(problem['batch'], heads)}"
        )
    check_columns(call, "alibi_slopes", view)


def _score_args(
    call: str, seen: Mapping[str, View], options: FeatureOptions
) -> tuple[tuple[str, str], ...]:
    """(name, kind) of what a score_mod reads: arrays in the order of their slots, then numbers."""
    if not options.score_mod:
        return ()
    found = []
    for name, slot in zip(options.score_names, SLOTS, strict=False):
        view = seen[slot]
        check_dtype(call, f"score_args {name}", view, tuple(ARRAYS))
        if len(view.shape) != 1:
            raise ParameterError(
                f"{call}: score_args: {name} has shape {tuple(view.shape)}; allowed: one dimension"
            )
        check_columns(call, f"score_args {name}", view)
        found.append((name, view.dtype))
    return (*found, *((name, kind) for name, kind, _ in options.score_scalars))


def _bytes(seen: Mapping[str, View]) -> int:
    """Of a bias and a mask, as often as they are stored."""
    total = 0
    for name in ("bias", "mask"):
        if name in seen:
            total += ITEMSIZE.get(seen[name].dtype, 1) * math.prod(seen[name].shape)
    return total
