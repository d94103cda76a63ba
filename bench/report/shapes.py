"""The README's tables of small batches and of few queries, out of one run of the suite.

    fkjit bench attention --set small_batch --set short_q --modes graph \
        --peers sdpa-flash,sdpa-cudnn,fa4
    python -m bench.report.shapes bench/results/THAT.jsonl

Microseconds of a call in a CUDA graph: what the GPU takes, without the host.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..attention.cases_attention import SETS, label
from ..core.store import read
from .figure import NAMES, README
from .tables import markdown, shown, time_of, with_tables

Cells = dict[str, dict[str, Any]]
NAMED = ("small_batch", "short_q")  # sets, and the markers of their tables
_OURS, _TWIN = "fkjit", "triton"


def cases(path: Path) -> tuple[dict[str, Cells], dict[str, Any]]:
    """{case: {candidate: cell}} of attention in the last run that has it, and that run's header."""
    found: dict[str, Cells] = {}
    runs = read(path)
    for cell in (cell for run in runs for cell in run.cells):
        if cell["op"] == "attention" and "graph" in cell:
            found.setdefault(cell["case"], {})[cell["candidate"]] = cell
    return found, runs[-1].header


def table(found: dict[str, Cells], header: dict[str, Any], name: str) -> str:
    """The Markdown table of a set, with what was measured below; empty where no case was."""
    known = [case for p in SETS[name] if _OURS in found.get(case := label(p), {})]
    if not known:
        return ""
    names = [n for n in NAMES if any(n in found[case] for case in known)]
    head = ["case", *(NAMES[n] for n in names), "best peer / fkjit"]
    lines = [head, *(_row(case, found[case], names) for case in known)]
    where = f"{header['gpu']}, {header['date'][:10]}, NVRTC {header['nvrtc']}"
    return (
        f"{markdown(lines)}\nAttention forward, microseconds in a CUDA graph, medians; {where}.\n"
    )


def _row(case: str, cells: Cells, names: Sequence[str]) -> list[str]:
    times = {name: time_of(cells, name) for name in names}
    peers = [time for name, time in times.items() if time and name not in (_OURS, _TWIN)]
    own = times[_OURS]
    ratio = f"{min(peers) / own:.2f}" if peers and own else ""
    return [case, *map(shown, times.values()), ratio]


def tables(path: Path) -> Iterator[tuple[str, str]]:
    """Name and text of each table that a file has cases for."""
    found, header = cases(path)
    for name in NAMED:
        if made := table(found, header, name):
            yield name, made


def main() -> None:
    """Write the tables of the run given on the command line between the README's markers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("results", type=Path, help="a result file of `fkjit bench`")
    given = parser.parse_args()
    README.write_text(with_tables(README.read_text(), dict(tables(given.results))))


if __name__ == "__main__":
    main()
