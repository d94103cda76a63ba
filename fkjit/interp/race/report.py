"""The report of a race: both accesses with their lines, and what would order them."""

from __future__ import annotations

from array import array

import numpy as np

from fkjit.errors import SanitizerError
from fkjit.interp.core import report
from fkjit.interp.core.lanes import WARP
from fkjit.interp.core.ptx import Instruction
from fkjit.interp.core.report import Reporter
from fkjit.interp.machine.machine import Machine
from fkjit.interp.race.clocks import Clocks
from fkjit.interp.race.shadow import Conflict

_DONE_BY = {
    "tma": "a wait for its mbarrier",
    "wgmma": "wgmma.wait_group",
    "bulk": "cp.async.bulk.wait_group",
}
_ARTICLE = {"strong read": "atomic read", "strong write": "atomic access"}


class RaceReport:
    """Knows the launch: which instruction stands behind a stamp, who an actor is."""

    def __init__(self, machine: Machine, clocks: Clocks) -> None:
        self.machine, self.clocks = machine, clocks
        self.events = array("i")  # program counter by stamp - 1

    def conflict(
        self, found: Conflict, kind: str, shared: bool, position: int, lane: int,
        ins: Instruction, reporter: Reporter,
    ) -> SanitizerError:  # fmt: skip
        """Two accesses that nothing orders."""
        other = self.machine.function.instructions[self.events[found.stamp - 1]]
        lines = [
            f"{reporter.title}: race: {self._where(shared, position)}",
            self._access(kind, ins, self._actor(int(self.clocks.actors(np.array([lane]))[0]))),
            self._access(found.kind, other, self._actor(found.actor)),
            f"    hint: {self._hint(lane, found.actor, shared, ins)}",
        ]
        return self._error(lines, ins, lane, other)

    def same_instruction(
        self, shared: bool, position: int, lanes: np.ndarray, ins: Instruction
    ) -> SanitizerError:
        """Two threads write one byte at once."""
        actors = [self._actor(int(actor)) for actor in self.clocks.actors(lanes)]
        lines = [
            f"{self.machine.reporter.title}: race: {self._where(shared, position)}",
            *(self._access("write", ins, actor) for actor in actors),
            "    hint: two threads write it in one instruction: let one of them do it, or use an "
            "atomic",
        ]
        return self._error(lines, ins, int(lanes[0]), ins)

    def missing_wait(
        self, kind: str, shared: bool, position: int, lane: int, ins: Instruction,
        other: Instruction, write: bool,
    ) -> SanitizerError:  # fmt: skip
        """An access to what an asynchronous one has not finished with."""
        actor = self._actor(int(self.clocks.actors(np.array([lane]))[0]))
        doing = "still writes it" if write else "still reads it"
        lines = [
            f"{self.machine.reporter.title}: missing wait: {self._where(shared, position)}",
            self._access(kind, ins, actor),
            f"    {_name(other):<6} at {report.where(other)}, which {doing}",
            f"    hint: {_wait_for(other)} must stand before the access",
        ]
        return self._error(lines, ins, lane, other)

    def missing_proxy_fence(
        self, shared: bool, position: int, lane: int, ins: Instruction, actor: int, stamp: int
    ) -> SanitizerError:
        """An engine reads what a thread stored without a fence between the two proxies."""
        other = self.machine.function.instructions[self.events[stamp - 1]]
        lines = [
            f"{self.machine.reporter.title}: missing fence: {self._where(shared, position)}",
            f"    {_name(ins):<6} at {report.where(ins)} reads it",
            self._access("write", other, self._actor(actor)),
            "    hint: the writing threads need a fence.proxy.async after their stores, before the "
            "barrier",
        ]
        return self._error(lines, ins, lane, other)

    def _error(
        self, lines: list[str], ins: Instruction, lane: int, other: Instruction
    ) -> SanitizerError:
        title, layout = self.machine.reporter.title, self.machine.layout
        return SanitizerError(
            "\n".join(lines),
            kind=lines[0].removeprefix(f"{title}: ").partition(":")[0],
            kernel=title,
            location=ins.location,
            other=other.location,
            block=layout.block_of(lane),
            thread=layout.thread_of(lane),
            hint=lines[-1].strip().removeprefix("hint: "),
            ptx_lines=(ins.line, other.line),
        )

    def _where(self, shared: bool, position: int) -> str:
        memory = self.machine.memory
        if shared:
            return memory.shared.describe(position % memory.shared.size)
        for place in memory.globals.allocations:
            if place.start <= position < place.start + place.size:
                return place.describe(position - place.start)
        return f"arena byte {position}"

    def _access(self, kind: str, ins: Instruction, actor: str) -> str:
        return f"    {_ARTICLE.get(kind, kind):<6} at {report.where(ins)}   {actor}"

    def _actor(self, actor: int) -> str:
        layout, clocks = self.machine.layout, self.clocks
        block, index = np.array([actor // clocks.width]), actor % clocks.width
        x, y, z = (int(part[0]) for part in layout.coordinates(block))
        if index >= clocks.threads:
            name = clocks.names.get(actor)
            kind = name[0] if isinstance(name, tuple) else name
            return f"block {x, y, z}, {kind}"
        bx, by, _ = layout.block
        thread = (index % bx, index // bx % by, index // (bx * by))
        return f"block {x, y, z}, thread {thread}"

    def _hint(self, lane: int, actor: int, shared: bool, ins: Instruction) -> str:
        layout, clocks = self.machine.layout, self.clocks
        block, index = actor // clocks.width, actor % clocks.width
        if index >= clocks.threads:
            name = clocks.names.get(actor)
            kind = name[0] if isinstance(name, tuple) else str(name)
            wait = _DONE_BY.get(str(kind), f"a wait for the {kind}")
            return f"{wait} must order the two"
        if block != layout.first_cta + int(layout.cta[lane]):
            return (
                "blocks run in any order: use atomics, or publish with __threadfence() and a flag "
                "that is read with an atomic or volatile load"
            )
        if index // WARP == int(layout.thread[lane]) // WARP:
            return "threads of one warp need a __syncwarp() between the two"
        return "a __syncthreads() must stand between the two"


def _name(ins: Instruction) -> str:
    return ".".join(ins.op[:2]) if ins.op[0] == "cp" else ins.op[0]


def _wait_for(ins: Instruction) -> str:
    if ins.op[0] == "wgmma":
        return "wgmma.wait_group"
    if ins.op[:2] == ("cp", "async") and "bulk" not in ins.op:
        return "cp.async.wait_group, and a barrier where other threads copied,"
    if "bulk" in ins.op:
        return "a wait for its mbarrier (or cp.async.bulk.wait_group for a store)"
    return f"a wait for the {ins.op[0]}"
