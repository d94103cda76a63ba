"""Texts of one kernel, linked by line: where lines of source, PTX and machine code come from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fkjit.jit.disassemble import Line
from fkjit.jit.render import Rendered

Frame = tuple[str, int]  # file as errors name it, line
Key = tuple[str, int, int]  # file, line, column
_DIRECTIVE = re.compile(r'\s*#line (\d+) "([^"]*)"')
_FILE = re.compile(r'\s*\.file\s+(\d+)\s+"([^"]*)"')
_LOC = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)\s+(\d+)")
_INLINED = re.compile(r"inlined_at\s+(\d+)\s+(\d+)\s+(\d+)")
_DEPTH = 32  # calls within calls


@dataclass
class Listing:
    """Lines of a text. `cu`: the template's lines that each comes from, inlined functions before
    their callers; `inner`: the innermost place in any file, as a number into `places`."""

    name: str  # the template's
    text: list[str] = field(default_factory=list)
    cu: list[list[int]] = field(default_factory=list)
    inner: list[int] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)

    def add(self, text: str, frames: Sequence[Frame]) -> None:
        """One more line; `frames`: where it comes from, the innermost first."""
        self.text.append(text)
        self.cu.append(template_lines(self.name, frames))
        place = f"{frames[0][0]}:{frames[0][1]}" if frames else ""
        self.inner.append(self.places.setdefault(place, len(self.places)))

    def to_json(self) -> dict[str, Any]:
        """For the page."""
        return {
            "text": "\n".join(self.text),
            "cu": self.cu,
            "inner": self.inner,
            "places": list(self.places),
        }


def template_lines(name: str, frames: Iterable[Frame]) -> list[int]:
    """The lines of the template among frames, in their order, each once."""
    return list(dict.fromkeys(line for file, line in frames if file == name))


def of_source(rendered: Rendered) -> Listing:
    """The rendered CUDA: `#line` says where each line comes from."""
    made, number, file = Listing(rendered.name), 0, rendered.name
    for line in rendered.text.split("\n"):
        found = _DIRECTIVE.match(line)
        if found:
            number, file = int(found[1]), found[2]
        else:
            made.add(line, [(file, number)])
            number += 1
    return made


def of_machine_code(name: str, lines: Iterable[Line]) -> Listing:
    """Instructions with their addresses, and labels."""
    made = Listing(name)
    for line in lines:
        text = line.text if line.address is None else f"{line.address:05x}  {line.text}"
        made.add(text, line.frames)
    return made


class Ptx:
    """PTX and where each of its lines comes from. A `.loc` has one caller; the caller's own `.loc`,
    which came before, has the next."""

    def __init__(self, text: str) -> None:
        self.lines = text.rstrip("\0").split("\n")
        found = (match for line in self.lines if (match := _FILE.match(line)))
        files = {match[1]: match[2] for match in found}
        self._callers: dict[Key, Key | None] = {}
        self._known: dict[str, tuple[Frame, ...]] = {}  # of `.loc` lines as they were met
        self.frames: list[tuple[Frame, ...]] = []  # of each line
        now: tuple[Frame, ...] = ()
        for line in self.lines:
            if line.lstrip().startswith(".loc"):
                now = self._located(line, files)
            self.frames.append(now)

    def _located(self, line: str, files: dict[str, str]) -> tuple[Frame, ...]:
        own = _LOC.match(line)
        if own is None:
            return ()
        key = (files.get(own[1], own[1]), int(own[2]), int(own[3]))
        by = _INLINED.search(line)
        caller = (files.get(by[1], by[1]), int(by[2]), int(by[3])) if by else None
        self._callers[key] = caller
        frames: list[Frame] = []
        step: Key | None = key
        while step is not None and len(frames) < _DEPTH:
            frames.append(step[:2])
            step = self._callers.get(step)
        return tuple(frames) if key[1] else ()

    def template_lines(self, name: str, line: int) -> list[int]:
        """The template's lines that a line of PTX, counted from 1, comes from."""
        return template_lines(name, self.frames[line - 1]) if 1 <= line <= len(self.frames) else []

    def listing(self, name: str) -> Listing:
        """What a person reads of it: without directives that only say lines, and debug sections."""
        made, skipped, last = Listing(name), False, ""
        for line, frames in zip(self.lines, self.frames, strict=True):
            skipped = skipped or bool(re.match(r"\s*\.section\s+\.debug", line))
            if skipped:
                skipped = line.strip() != "}"
            elif not line.lstrip().startswith((".loc", ".file")) and (line.strip() or last):
                code = line.startswith(("\t", "$", " ", "@")) and not line.strip().startswith(".")
                made.add(line.expandtabs(8), frames if code else ())
                last = line.strip()
        while made.text and not made.text[-1].strip():
            for column in (made.text, made.cu, made.inner):
                column.pop()
        return made
