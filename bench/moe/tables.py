"""The tables and the picture of docs/MOE.md out of a stored run of the routing operations.

python -m bench.moe.tables bench/results/FILE.jsonl
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..report.bandwidth import Cells, trials
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
_TOKENS = sorted({p["tokens"] for p in cases_moe.SETS["table"]})

Known = dict[tuple[str, str], Cells]


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
            cells = known.get((op, cases_moe.label(p)), {})
            times = [time_of(cells, name) for name in NAMES]
            if times[0] is not None:
                ratio = "" if times[2] is None else f"{times[2] / times[0]:.1f}"
                yield [f"{text}, {cases_moe.label(p)}", *map(shown, times), ratio]


def rows(known: Known) -> Iterator[list[str]]:
    """What moves rows: microseconds, and GB/s as a share of the copy."""
    yield ["rows, microseconds in a CUDA graph", *_COLUMNS, "fkjit, GB/s (share of the copy)"]
    for text, op in ROWS:
        for p in cases_moe_rows.SETS["default"]:
            cells = known.get((op, cases_moe_rows.label(p)), {})
            if "fkjit" in cells:
                times = [shown(time_of(cells, name)) for name in NAMES]
                yield [f"{text}, {cases_moe_rows.label(p)}", *times, speed_of(cells["fkjit"])]


def sizes(known: Known, op: str) -> Iterator[list[str]]:
    """Experts and choices down, tokens across; a cell is ours, the twin, PyTorch."""
    yield ["experts, choices", *(f"{tokens:,}" for tokens in _TOKENS)]
    table = cases_moe.SETS["table"]
    for experts, top_k in dict.fromkeys((p["experts"], p["top_k"]) for p in table):
        line = [f"{experts}, {top_k}"]
        for tokens in _TOKENS:
            label = cases_moe.label(cases_moe.problem(tokens, experts, top_k))
            times = [time_of(known.get((op, label), {}), name) for name in NAMES]
            line.append(" / ".join(map(shown, times)) if times[0] is not None else "")
        yield line


def shown(time: float | None) -> str:
    """Three figures or so."""
    if time is None:
        return ""
    return f"{time:.{2 if time < 10 else 1 if time < 100 else 0}f}"


def markdown(lines: Iterable[Sequence[str]]) -> str:
    """A table whose numbers stand to the right."""
    head, *rest = lines
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, rule, *rest))


def with_tables(page: str, made: dict[str, str]) -> str:
    """The page's text with what stands between the markers of each name replaced."""
    for name, text in made.items():
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
        before, rest = page.split(begin)
        page = f"{before}{begin}{text}{end}{rest.split(end)[1]}"
    return page


def tables(path: Path) -> dict[str, str]:
    """Markdown by the name of its markers."""
    known = trials(path)
    makers: dict[str, Callable[[], Iterator[list[str]]]] = {
        "headlines": lambda: headlines(known),
        "rows": lambda: rows(known),
        "sizes of route": lambda: sizes(known, ROUTE),
        "sizes of both": lambda: sizes(known, BOTH),
    }
    return {name: markdown(make()) for name, make in makers.items()}


def main() -> None:
    """Write the tables and the picture of the run given on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("results", type=Path, help="a result file of `fkjit bench`")
    path = parser.parse_args().results
    PAGE.write_text(with_tables(PAGE.read_text(), tables(path)))
    PICTURE.write_text(moe_steps.picture(moe_steps.steps(trials(path)), path.name))


_COLUMNS = ("fkjit", "Triton twin", "PyTorch")

if __name__ == "__main__":
    main()
