"""How the kernels of a decode step are chosen.

`linear` chooses by a product alone. In a step a product runs beside others, which start early and
fetch their weights meanwhile, and there other kernels may be faster. So a plan names them, and it
can be measured: step by step, as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from fkjit.arguments import one_of, shown
from fkjit.errors import ArgumentTypeError, ParameterError

PRODUCTS = ("qkv", "out", "up", "down", "head")
IMPLS = ("auto", "gemv", "skinny", "wgmma", "mma")
MEASURED = "measured"
_FUSED = ("qkv", "up")  # products that a fused layer has otherwise
_TRIED = ("auto", "gemv", "skinny")
_CALL = "Decoder"


class StepPlan(NamedTuple):
    """qkv, out, up, down, head: `linear`'s impl for the products of a layer and of the head.
    early: whether kernels of a CUDA graph start before the one before them is over (PDL). fused:
    five launches a layer in place of eight, where the model (no weights of codes, no norm of heads)
    and the number of sequences (up to eight) permit it: norm, qkv, RoPE and append are one, norm
    and up another; qkv and up then name nothing."""

    qkv: str = "auto"
    out: str = "auto"
    up: str = "auto"
    down: str = "auto"
    head: str = "auto"
    early: bool = True
    fused: bool = False

    def checked(self) -> StepPlan:
        """Itself. ParameterError, ArgumentTypeError: what no plan may say."""
        for name in PRODUCTS:
            one_of(_CALL, f"plan.{name}", getattr(self, name), IMPLS)
        for name in ("early", "fused"):
            if not isinstance(given := getattr(self, name), bool):
                raise ArgumentTypeError(f"{_CALL}: plan.{name}={shown(given)}; allowed: a bool")
        return self

    @classmethod
    def alike(cls, impl: str, early: bool = True, fused: bool = False) -> StepPlan:
        """One impl for all products."""
        return cls(**dict.fromkeys(PRODUCTS, impl), early=early, fused=fused)


def checked(plan: Any) -> StepPlan | None:
    """What a Decoder was given; None: it is to be measured."""
    if plan is None:
        return StepPlan()
    if isinstance(plan, StepPlan):
        return plan.checked()
    if plan != MEASURED:
        raise ParameterError(
            f"{_CALL}: plan={shown(plan)}; allowed: None, {MEASURED!r}, or a StepPlan"
        )
    return None


def best(seconds: Callable[[StepPlan], float]) -> StepPlan:
    """The plan of the least time: of those with one impl for all products, then with another one
    for each product in turn.

    seconds: of a step; ParameterError for a plan that so many rows cannot have.
    """
    times: dict[StepPlan, float] = {}

    def timed(plan: StepPlan) -> float:
        if plan not in times:
            try:
                times[plan] = seconds(plan)
            except ParameterError:
                times[plan] = float("inf")
        return times[plan]

    found = min(_starts(), key=timed)
    for product in PRODUCTS:
        if not (found.fused and product in _FUSED):
            found = min((found._replace(**{product: impl}) for impl in _TRIED), key=timed)
    return min((found._replace(early=early) for early in (found.early, not found.early)), key=timed)


def _starts() -> Iterator[StepPlan]:
    for fused in (False, True):
        for early in (True, False):
            for impl in _TRIED:
                yield StepPlan.alike(impl, early, fused)
