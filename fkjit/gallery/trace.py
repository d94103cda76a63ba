"""What the interpreter saw of a step at its small sizes: who touches an array, and banks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fkjit.arch import Target
from fkjit.cpu.run import interpret
from fkjit.gallery.climb import SMALL_SMS
from fkjit.gallery.ladder import Ladder, Step
from fkjit.interp.core.accesses import Observer
from fkjit.interp.core.lanes import WARP
from fkjit.interp.core.ptx import Instruction
from fkjit.interp.machine.machine import Machine
from fkjit.jit.build import build, quiet
from fkjit.jit.render import load
from fkjit.numerics import drawn
from fkjit.playground.banks import Watch
from fkjit.playground.check import without_swizzle
from fkjit.playground.listing import Ptx

NOBODY = -1
_WRAP = 2048  # elements of a line of an array that is one long row


@dataclass(frozen=True)
class Owners:
    """Of each element [rows, columns] the block and the warp that touched it last; NOBODY."""

    block: np.ndarray
    warp: np.ndarray
    problem: dict[str, Any]


class _Touched:
    """An observer of launches: who touches the elements of one array."""

    def __init__(self, name: str, array: np.ndarray) -> None:
        self.name, self.itemsize = name, array.itemsize
        self.block = np.full(array.size, NOBODY)
        self.warp = np.full(array.size, NOBODY)

    def __call__(self, machine: Machine) -> Observer:
        """For `interp.run`."""
        layout = machine.layout
        place = next(p for p in machine.memory.globals.allocations if p.name == self.name)

        def see(
            kind: str, is_shared: bool, positions: np.ndarray, width: int, lanes: np.ndarray,
            ins: Instruction,
        ) -> None:  # fmt: skip
            if is_shared:
                return
            at = (positions - place.start) // self.itemsize
            mine = (at >= 0) & (at < self.block.size)
            at, who = at[mine], lanes[mine]
            for element in range(max(width // self.itemsize, 1)):
                self.block[at + element] = layout.cta[who] + layout.first_cta
                self.warp[at + element] = layout.thread[who] // WARP

        return see


def owners(ladder: Ladder, step: Step, name: str, to: Target) -> Owners:
    """Who touches the array `name` of the small problem."""
    problem = ladder.problem_of(step, True, SMALL_SMS)
    _, arrays = drawn(step.spec, step.params, problem, np.random.default_rng(0))
    seen = _Touched(name, arrays[name])
    with quiet():
        interpret(step.spec, step.params, problem, arrays, to, seen)
    columns = _columns(arrays[name], name, problem)
    return Owners(_lines(seen.block, columns), _lines(seen.warp, columns), problem)


def _columns(array: np.ndarray, name: str, problem: dict[str, Any]) -> int:
    """Elements of a row of an array, which may be the buffer of a matrix."""
    if array.ndim > 1:
        return array.shape[-1]
    named = (problem.get(word) for word in (f"{name}_stride", "stride", "block_size", "row_stride"))
    row = next((stride for stride in named if stride), array.size)
    return row if array.size > row or row <= _WRAP else _WRAP


def _lines(flat: np.ndarray, columns: int) -> np.ndarray:
    rows = -(-flat.size // columns)
    made = np.full(rows * columns, NOBODY)
    made[: flat.size] = flat
    return made.reshape(rows, columns)


def banks(ladder: Ladder, step: Step, instruction: str, to: Target) -> list[dict[str, Any]]:
    """The access of a warp that needs most wavefronts among those of an instruction, as the kernel
    has it, and with its tiles in plain rows: playground/banks.py has the words."""
    found = []
    for source in (load, lambda *given: without_swizzle(load, *given)):
        problem, watch = ladder.problem_of(step, True, SMALL_SMS), Watch()
        _, arrays = drawn(step.spec, step.params, problem, np.random.default_rng(0))
        with quiet():
            interpret(step.spec, step.params, problem, arrays, to, watch, source)
            text = build(step.spec, step.params, to, load=source).image.decode()
        rows = watch.lines(Ptx(text), load(step.spec, step.params).name)
        some = (r["picture"] for r in rows if r["instruction"].startswith(instruction))
        found.append(max((p for p in some if p), key=lambda picture: picture["wavefronts"]))
    return found
