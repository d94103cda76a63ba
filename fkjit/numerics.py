"""A kernel's arrays for a problem, and how far what it wrote is from its reference, measured in its
tolerance."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fkjit.spec import Arrays, KernelSpec, Params, Problem


@dataclass(frozen=True)
class Difference:
    """The element of one output that is furthest from the reference."""

    name: str  # of the output
    index: tuple[int, ...]
    found: float
    expected: float
    bound: float  # the greatest error that is allowed

    @property
    def ratio(self) -> float:
        """Error to bound: above 1 it is wrong; inf for a NaN, an infinity, or a bound of 0."""
        error = abs(self.found - self.expected)
        if self.found == self.expected:
            return 0.0
        return error / self.bound if np.isfinite(error) and self.bound else float("inf")

    def __str__(self) -> str:
        at = ", ".join(map(str, self.index))
        return (
            f"{self.name}[{at}] is {self.found:.6g} where the reference has {self.expected:.6g}: "
            f"{self.ratio:.3g} times the tolerance ({self.bound:.3g})"
        )


def drawn(
    spec: KernelSpec, params: Params, problem: Problem, rng: np.random.Generator
) -> tuple[Arrays, Arrays]:
    """A problem's inputs as the reference takes them, and all arrays of a launch: copies of these,
    since some are written in place, and outputs."""
    inputs = spec.verification.inputs(params, problem, rng)
    copies = {name: copy(array) for name, array in inputs.items()}
    return inputs, {**copies, **spec.verification.outputs(params, problem)}


def differences(
    spec: KernelSpec, params: Params, expected: Arrays, found: Mapping[str, Any]
) -> list[Difference]:
    """Of each output that has a reference its worst element, the worst output first.

    The tolerance is the spec's, times the greatest expected value where that is above 1. NaN in
    the reference stands for what no kernel has to write; infinities have to be the same.
    """
    tolerance = spec.verification.tolerance(params)
    seen = partial(spec.verification.numbers, params)
    made = [
        _worst(name, seen(name, array), seen(name, found[name]), tolerance)
        for name, array in expected.items()
    ]
    return sorted((one for one in made if one), key=lambda one: -one.ratio)


def _worst(name: str, expected: Any, found: Any, tolerance: float) -> Difference | None:
    wanted = np.asarray(expected).astype(np.float64)
    got = np.asarray(found).astype(np.float64)
    finite = np.abs(wanted[np.isfinite(wanted)])
    bound = tolerance * max(1.0, finite.max(initial=0.0))
    with np.errstate(invalid="ignore"):
        error = np.where(got == wanted, 0.0, np.abs(got - wanted))
    error[np.isnan(error)] = np.inf
    error[np.isnan(wanted)] = -1.0
    if error.max(initial=-1.0) < 0.0:
        return None
    index = tuple(map(int, np.unravel_index(int(error.argmax()), error.shape)))
    return Difference(name, index, float(got[index]), float(wanted[index]), float(bound))
