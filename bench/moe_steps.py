"""The picture of docs/MOE.md, step by step from PyTorch's calls to one launch, out of a run:

    fkjit bench moe_route_and_regroup --set quick --only "T32768 E64 K2" --modes warm,graph \\
        --out docs/moe_h200.jsonl
    python -m bench.moe_steps docs/moe_h200.jsonl

Writes the `.svg` beside the file, drawn as `fkjit report` draws.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .report import svg
from .report.chart import Axis, Chart, Point, Series
from .store import read as read_runs

OP = "moe_route_and_regroup"
CASE = "fp32 T32768 E64 K2"
# Candidate, mode, what it is called, which of the proposals it adds.
STEPS = (
    ("torch", "warm", "PyTorch, call by call", ""),
    ("torch", "graph", "PyTorch in a CUDA graph", "graph"),
    ("route + torch", "graph", "one kernel routes, PyTorch sorts", "fusion"),
    ("triton", "graph", "Triton: histogram, then atomics", "counting sort"),
    ("route + regroup", "graph", "two launches, stable", "counting sort"),
    ("fkjit", "graph", "one launch", "fusion"),
)


def read(path: Path) -> tuple[list[float | None], dict[str, Any]]:
    """Microseconds of each step, None where it was not measured; the header of the last run."""
    runs, found = read_runs(path), {}
    for run in runs:
        for cell in run.cells:
            if cell["op"] == OP and cell["case"] == CASE:
                for mode in ("warm", "graph"):
                    if mode in cell:
                        found[cell["candidate"], mode] = 1e3 * cell[mode]["p50"]
    return [found.get(step[:2]) for step in STEPS], runs[-1].header


def picture(times: list[float | None], environment: dict[str, Any]) -> str:
    """A row for each step, time to the right."""
    steps = [(step, time) for step, time in zip(STEPS, times, strict=True) if time is not None]
    points = [
        [Point(n, time) for n, (step, time) in enumerate(steps) if ours(step[0]) is mine]
        for mine in (True, False)
    ]
    series = [Series(name, p, i) for i, (name, p) in enumerate(zip(NAMES, points, strict=True))]
    chart = Chart(
        "Route 32,768 tokens to 2 of 64 experts and sort them", "dots", Axis(""),
        Axis("time [µs]", log=True), series,
    )  # fmt: skip
    chart.categories = [(f"{step[2]}: {time:.1f} µs", step[3]) for step, time in steps]
    return svg.draw(chart, f"{environment['gpu']}, {environment['date'][:10]}; medians, warm")


NAMES = ("with fkjit", "without")


def ours(candidate: str) -> bool:
    """Whether a kernel of ours takes part."""
    return candidate == "fkjit" or candidate.startswith("route")


def main() -> None:
    """Draw the run given on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("results", type=Path, help="a result file of `fkjit bench`")
    results = parser.parse_args().results
    results.with_suffix(".svg").write_text(picture(*read(results)))


if __name__ == "__main__":
    main()
