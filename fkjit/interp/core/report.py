"""Faults: the text of a report, and the exception that carries it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fkjit.errors import InterpreterError, SanitizerError
from fkjit.interp.core.lanes import Layout
from fkjit.interp.core.ptx import Instruction

Waiting = tuple[Instruction, np.ndarray] | tuple[Instruction, np.ndarray, str]


def where(ins: Instruction) -> str:
    """`kernels_cu/attention/flash.cu:12`, or that the PTX says no line."""
    return ins.location or "(no source line: compile with -lineinfo)"


def unsupported(ins: Instruction, why: str = "") -> InterpreterError:
    """The error of an instruction or a modifier that is not implemented."""
    reason = f" ({why})" if why else ""
    return InterpreterError(
        f"interpreter: this PTX instruction is not supported{reason}: {ins.text}\n"
        f"    at {where(ins)}"
    )


class Reporter:
    """Writes reports of one launch: it knows the launch's title and who its lanes are."""

    def __init__(self, title: str, layout: Layout) -> None:
        self.title = title
        self.layout = layout

    def fault(self, kind: str, detail: str, ins: Instruction, lanes: np.ndarray) -> SanitizerError:
        """The error of the first of `lanes`; raise it."""
        lane = int(lanes[0])
        block, thread = self.layout.block_of(lane), self.layout.thread_of(lane)
        more = f" (and {lanes.size - 1:,} more lanes)" if lanes.size > 1 else ""
        return SanitizerError(
            f"{self.title}: {kind}: {detail}\n"
            f"    at {where(ins)}\n"
            f"    block {block}, thread {thread}{more}\n"
            f"    {ins.text}",
            kind=kind,
            kernel=self.title,
            location=ins.location,
            block=block,
            thread=thread,
            ptx_lines=(ins.line,),
        )

    def waiting(self, kind: str, detail: str, who: Iterable[Waiting]) -> SanitizerError:
        """The error of threads that wait for one another.

        `who`: instruction, its lanes and, where it helps, what they wait for.
        """
        lines = [f"{self.title}: {kind}: {detail}"]
        places, lines_of_ptx = [], []
        for ins, lanes, *what in who:
            block = self.layout.block_of(int(lanes[0]))
            mine = lanes[self.layout.cta[lanes] == self.layout.cta[lanes[0]]]
            threads = spans(self.layout.thread[mine])
            places.append((ins.location, block, self.layout.thread_of(int(lanes[0]))))
            lines_of_ptx.append(ins.line)
            lines.append(
                f"    at {where(ins)}\n    block {block}, threads {threads} "
                f"{' '.join(['wait', *what])}\n    {ins.text}"
            )
        location, block, thread = places[0] if places else ("", None, None)
        return SanitizerError(
            "\n".join(lines),
            kind=kind,
            kernel=self.title,
            location=location,
            other=next((where for where, *_ in places if where != location), ""),
            block=block,
            thread=thread,
            ptx_lines=tuple(dict.fromkeys(lines_of_ptx))[:2],
        )


def spans(numbers: np.ndarray) -> str:
    """Ascending numbers in short: 0-31, 64."""
    parts: list[list[int]] = []
    for number in numbers.tolist():
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    shown = [f"{a}" if a == b else f"{a}-{b}" for a, b in parts[:6]]
    return ", ".join(shown) + (", …" if len(parts) > 6 else "")
