"""A pipeline as the interpreter ran it: when arrays in shared memory are filled, and when read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fkjit.arch import Target
from fkjit.cpu.run import GUARD, carve_outs, interpret
from fkjit.gallery.climb import SMALL_SMS
from fkjit.gallery.ladder import Ladder, Sizes, Step
from fkjit.interp.core.accesses import READ, Observer
from fkjit.interp.core.ptx import Instruction
from fkjit.interp.machine.machine import Machine
from fkjit.jit.build import quiet
from fkjit.numerics import drawn
from fkjit.sanitizer import sanitize


@dataclass
class Fill:
    """One content of an array, in moments: from where its copy is issued to where it is there, and
    from its first use to its last one."""

    begins: int
    lands: int
    first: int | None = None
    last: int | None = None


class Stages:
    """An observer of launches: what happens to the arrays of block 0, in order."""

    def __init__(self, step: Step) -> None:
        layout = step.spec.shared_layout
        parts, _ = carve_outs([] if layout is None else layout(step.params), GUARD)
        self.names = [part.name for part in parts]
        self._ends = np.array([part.offset + part.size for part in parts])
        self.fills: list[list[Fill]] = [[] for _ in parts]
        self.moments = 0

    def __call__(self, machine: Machine) -> Observer:
        """For `interp.run`."""
        shared, layout = machine.memory.shared, machine.layout

        def places(positions: np.ndarray) -> list[int]:
            if layout.first_cta:
                return []
            at = positions[positions < shared.size] - shared.dynamic_start
            found = np.searchsorted(self._ends, np.unique(at[at >= 0]), "right")
            return [place for place in np.unique(found).tolist() if place < len(self.names)]

        def see(
            kind: str, is_shared: bool, positions: np.ndarray, width: int, lanes: np.ndarray,
            ins: Instruction,
        ) -> None:  # fmt: skip
            if is_shared:
                self._happens(places(positions), kind != READ, True)

        def engine(begins: bool, write: bool, positions: np.ndarray, ins: Instruction) -> None:
            self._happens(places(positions), write, begins)

        machine.engine_observers.append(engine)
        return see

    def _happens(self, places: list[int], write: bool, begins: bool) -> None:
        self.moments += bool(places)
        for place in places:
            fills = self.fills[place]
            if write and begins and (not fills or fills[-1].last is not None):
                fills.append(Fill(self.moments, self.moments))
            elif write:
                fills[-1].lands = self.moments
            elif fills:
                last = fills[-1]
                last.first, last.last = last.first or self.moments, self.moments


def stages(ladder: Ladder, step: Step, sizes: Sizes, to: Target) -> Stages:
    """What the interpreter saw of a step, at its small sizes but for `sizes`."""
    problem = ladder.problem(step, {**ladder.sizes_of(step, True), **sizes}, SMALL_SMS)
    _, arrays = drawn(step.spec, step.params, problem, np.random.default_rng(0))
    seen = Stages(step)
    with quiet(), sanitize(mem=True, race=True):
        interpret(step.spec, step.params, problem, arrays, to, seen)
    return seen
