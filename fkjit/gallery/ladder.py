"""What a ladder is: kernels of ours in order, each with what it does better than the one before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fkjit.spec import KernelSpec, Params, find

Sizes = Mapping[str, Any]


@dataclass(frozen=True)
class Picture:
    """A picture of a step. `kind`: "tiling" (`of` an array), "grid" (`of` two sizes), "memory",
    "pipeline" (its `sizes` beside the small ones), "banks" or "fragments" (`of` an instruction).
    """

    kind: str
    of: str = ""
    sizes: Sizes = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """One variant of a kernel. `sizes` and `small`: where its problem is not the ladder's."""

    title: str
    kernel: str  # "attention.flash"
    params: Params
    why: str  # what changed, and why: a sentence or two
    sizes: Sizes = field(default_factory=dict)
    small: Sizes = field(default_factory=dict)
    pictures: tuple[Picture, ...] = ()

    @property
    def spec(self) -> KernelSpec:
        """The kernel's; `ops.load()` comes first."""
        return find(self.kernel)


@dataclass(frozen=True)
class Ladder:
    """Steps of one family. `problem` makes a kernel's problem of sizes: (step, sizes, SMs). `free`:
    sizes that every step takes as they come, and what they have to be a multiple of."""

    name: str
    title: str
    about: str
    steps: tuple[Step, ...]
    sizes: Sizes  # of the measurements, and on a GPU
    small: Sizes  # in the interpreter
    problem: Callable[[Step, Sizes, int], dict[str, Any]]
    free: Mapping[str, int]
    unit: str = "TB/s"  # of speed: "TFLOP/s" or "TB/s"

    def sizes_of(self, step: Step, small: bool, given: Sizes | None = None) -> dict[str, Any]:
        """A step's sizes; `given` goes before the ladder's, not before those that make the step."""
        own = {**self.small, **step.small} if small else {**self.sizes, **step.sizes}
        changed = {n: v for n, v in (given or {}).items() if n not in step.sizes}
        return {**own, **changed}

    def problem_of(
        self, step: Step, small: bool, multiprocessors: int, given: Sizes | None = None
    ) -> dict[str, Any]:
        """A step's problem, for a GPU of so many SMs."""
        return self.problem(step, self.sizes_of(step, small, given), multiprocessors)

    def work_of(
        self, step: Step, multiprocessors: int, given: Sizes | None = None
    ) -> tuple[float, float]:
        """What a step's kernel counts of its work: floating-point operations, and the bytes that
        have to move at least."""
        problem, work = self.problem_of(step, False, multiprocessors, given), step.spec.work
        return work.flops(problem), work.bytes(problem)

    def alike(self, one: Step, other: Step) -> bool:
        """Whether two steps do the same work, so that their times compare."""
        same = one.spec.op == other.spec.op or {one.spec.op, other.spec.op} <= _SAME_WORK
        types = one.params.get("dtype") == other.params.get("dtype")
        return same and types and self.sizes_of(one, False) == self.sizes_of(other, False)


_SAME_WORK = {"attention", "attention_decode"}  # of one query: see the ladder of decoding
