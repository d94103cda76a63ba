"""Tables of a page out of stored runs: between markers, of each case the trial of the last run.

A case is shown as the last run has it. Where that is not the last of the runs given, its time
carries the letter of its run, and `listed` says which file that is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from .bandwidth import Cells, source, trials


class Trial(NamedTuple):
    """What a case's candidates took, and the letter of its run unless that is the last one."""

    cells: Cells
    letter: str = ""

    @property
    def mark(self) -> str:
        return f" ({self.letter})" if self.letter else ""


Known = dict[tuple[str, str], Trial]
NOT_MEASURED = Trial({})


def known_of(paths: Sequence[Path]) -> Known:
    """Of each case the trial of the last run that has it; of one that was beside more candidates in
    an earlier run, that one: fewer peers would flatter."""
    found: Known = {}
    for letter, path in _lettered(paths):
        shown_letter = "" if path == paths[-1] else letter
        for case, cells in trials(path).items():
            if case not in found or len(cells) >= len(found[case].cells):
                found[case] = Trial(cells, shown_letter)
    return found


def _lettered(paths: Sequence[Path]) -> list[tuple[str, Path]]:
    return [(chr(ord("a") + number), path) for number, path in enumerate(paths)]


def listed(paths: Sequence[Path]) -> str:
    """The lines that say what each letter is."""
    return "".join(f"{source(letter, path)}\n" for letter, path in _lettered(paths))


def time_of(cells: Cells, name: str) -> float | None:
    """Microseconds of a call in a CUDA graph."""
    cell = cells.get(name)
    return None if cell is None else cell["graph"]["p50"] * 1e3


def shown(time: float | None) -> str:
    """Three figures or so."""
    if time is None:
        return ""
    return f"{time:.{2 if time < 10 else 1 if time < 100 else 0}f}"


def markdown(lines: Iterable[Sequence[str]], words: Collection[int] = (0,)) -> str:
    """A table whose numbers stand to the right; every row as wide as the heading.

    words: columns of text, which stand to the left.
    """
    head, *rest = lines
    for line in rest:
        if len(line) != len(head):
            raise ValueError(f"{len(line)} cells under {len(head)} headings: {line}")
    rule = ["---" if column in words else "---:" for column in range(len(head))]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, rule, *rest))


def with_tables(page: str, made: dict[str, str]) -> str:
    """The page's text with what stands between the markers of each name replaced."""
    for name, text in made.items():
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
        before, rest = page.split(begin)
        page = f"{before}{begin}{text}{end}{rest.split(end)[1]}"
    return page
