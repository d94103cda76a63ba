"""The tables and the picture of docs/MOE.md out of stored runs of the routing operations.

python -m bench.moe.tables bench/results/FILE.jsonl …    oldest first

A case is shown as the last run has it. Where that is not the last of the runs given, its time
carries the letter of its run, and a list below the tables says which file that is.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..report.bandwidth import Cells, source, trials
from . import cases_moe, cases_moe_rows
from . import steps as moe_steps

ROOT = Path(__file__).resolve().parents[2]
PAGE, PICTURE = ROOT / "docs" / "MOE.md", ROOT / "docs" / "moe_steps.svg"
ROUTE, REGROUP, BOTH = "moe_route", "moe_regroup", "moe_route_and_regroup"
NAMES = ("fkjit", "triton", "torch")
HEADLINES = (
    ("route", ROUTE, cases_moe.SETS["default"]),
    ("regroup", REGROUP, [p for p in cases_moe.SETS["default"] if p["dtype"] == "fp32"]),
    ("both in one launch", BOTH, cases_moe.SETS["default"]),
)
ROWS = (("permute", "moe_permute"), ("combine", "moe_combine"))


class Trial(NamedTuple):
    """What a case's candidates took, and the letter of its run unless that is the last one."""

    cells: Cells
    letter: str = ""

    @property
    def mark(self) -> str:
        return f" ({self.letter})" if self.letter else ""


Known = dict[tuple[str, str], Trial]
_NOT_MEASURED = Trial({})


def known_of(paths: Sequence[Path]) -> Known:
    """Of each case the trial of the last run that has it."""
    found: Known = {}
    for letter, path in _lettered(paths):
        shown_letter = "" if path == paths[-1] else letter
        found |= {case: Trial(cells, shown_letter) for case, cells in trials(path).items()}
    return found


def _lettered(paths: Sequence[Path]) -> list[tuple[str, Path]]:
    return [(chr(ord("a") + number), path) for number, path in enumerate(paths)]


def time_of(cells: Cells, name: str) -> float | None:
    """Microseconds of a call in a CUDA graph."""
    cell = cells.get(name)
    return None if cell is None else cell["graph"]["p50"] * 1e3


def speed_of(cell: dict[str, Any]) -> str:
    """GB/s, and how much that is of the copy's."""
    graph = cell["graph"]
    return f"{graph['gbs']:.0f} ({graph['share_copy']:.3f})"


def headlines(known: Known) -> Iterator[list[str]]:
    """One shape a row: ours, the twin, PyTorch."""
    yield ["microseconds in a CUDA graph", *_COLUMNS, "PyTorch / fkjit"]
    for text, op, problems in HEADLINES:
        for p in problems:
            trial = known.get((op, cases_moe.label(p)), _NOT_MEASURED)
            times = [time_of(trial.cells, name) for name in NAMES]
            if times[0] is not None:
                ratio = "" if times[2] is None else f"{times[2] / times[0]:.1f}"
                yield [f"{text}, {cases_moe.label(p)}{trial.mark}", *map(shown, times), ratio]


def rows(known: Known) -> Iterator[list[str]]:
    """What moves rows: microseconds, and GB/s as a share of the copy."""
    yield ["rows, microseconds in a CUDA graph", *_COLUMNS, "fkjit, GB/s (share of the copy)"]
    for text, op in ROWS:
        for p in cases_moe_rows.SETS["default"]:
            trial = known.get((op, cases_moe_rows.label(p)), _NOT_MEASURED)
            if "fkjit" in trial.cells:
                times = [shown(time_of(trial.cells, name)) for name in NAMES]
                first = f"{text}, {cases_moe_rows.label(p)}{trial.mark}"
                yield [first, *times, speed_of(trial.cells["fkjit"])]


def sizes(known: Known, op: str) -> Iterator[list[str]]:
    """Experts and choices down, tokens across, as far as measured: ours, the twin, PyTorch."""
    found = {
        (p["experts"], p["top_k"], p["tokens"]): trial
        for p in cases_moe.SETS["table"]
        if "fkjit" in (trial := known.get((op, cases_moe.label(p)), _NOT_MEASURED)).cells
    }
    tokens = sorted({key[2] for key in found})
    yield ["experts, choices", *(f"{count:,}" for count in tokens)]
    for experts, top_k in dict.fromkeys(key[:2] for key in found):
        row = (found.get((experts, top_k, count), _NOT_MEASURED) for count in tokens)
        yield [f"{experts}, {top_k}", *map(_times, row)]


def _times(trial: Trial) -> str:
    if not trial.cells:
        return ""
    return " / ".join(shown(time_of(trial.cells, name)) for name in NAMES) + trial.mark


def shown(time: float | None) -> str:
    """Three figures or so."""
    if time is None:
        return ""
    return f"{time:.{2 if time < 10 else 1 if time < 100 else 0}f}"


def markdown(lines: Iterable[Sequence[str]]) -> str:
    """A table whose numbers stand to the right; every row as wide as the heading."""
    head, *rest = lines
    for line in rest:
        if len(line) != len(head):
            raise ValueError(f"{len(line)} cells under {len(head)} headings: {line}")
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, rule, *rest))


def with_tables(page: str, made: dict[str, str]) -> str:
    """The page's text with what stands between the markers of each name replaced."""
    for name, text in made.items():
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
        before, rest = page.split(begin)
        page = f"{before}{begin}{text}{end}{rest.split(end)[1]}"
    return page


def tables(paths: Sequence[Path]) -> dict[str, str]:
    """Markdown by the name of its markers, of runs from the oldest to the last."""
    known = known_of(paths)
    makers: dict[str, Callable[[], Iterator[list[str]]]] = {
        "headlines": lambda: headlines(known),
        "rows": lambda: rows(known),
        "sizes of route": lambda: sizes(known, ROUTE),
        "sizes of both": lambda: sizes(known, BOTH),
    }
    listed = "".join(f"{source(letter, path)}\n" for letter, path in _lettered(paths))
    return {name: markdown(make()) for name, make in makers.items()} | {"runs": listed}


def main() -> None:
    """Write the tables and the picture of the runs given on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("results", type=Path, nargs="+", help="result files of `fkjit bench`")
    paths = parser.parse_args().results
    PAGE.write_text(with_tables(PAGE.read_text(), tables(paths)))
    PICTURE.write_text(moe_steps.picture(moe_steps.steps(trials(paths[-1])), paths[-1].name))


_COLUMNS = ("fkjit", "Triton", "PyTorch")

if __name__ == "__main__":
    main()
