"""The README's tables and picture of attention, out of runs of the suite.

    fkjit bench attention --set peers --set readme --peers sdpa-flash,sdpa-cudnn,fa4,triton
    python -m bench.report.figure bench/results/THAT.jsonl
    python -m bench.report.figure docs/attention_portable_h200.jsonl --table portable

Writes a table between two of the README's markers and, of the first, docs/attention_h200.svg, drawn
as `fkjit report` draws.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.store import read as read_runs
from . import svg
from .chart import Axis, Chart, Point, Series

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "attention_h200.svg"
# Tables, and whom their last column compares with: all peers, or the one of the same instructions.
TABLES = {"figures": None, "portable": "sdpa-flash"}
NAMES = {
    "fkjit": "fkjit",
    "sdpa-cudnn": "cuDNN",
    "fa4": "FlashAttention-4",
    "sdpa-flash": "FlashAttention-2",
    "triton": "Triton twin",
}
TWIN = "triton"
_DRAWN = (64, 128)  # head dimensions, and lengths from 2k on
_TOKENS, _WIDTH = 16_384, 2048

Cell = tuple[int, bool, int]  # head_dim, causal, seqlen


def read(path: Path) -> tuple[dict[Cell, dict[str, float]], dict[str, Any]]:
    """{cell: {candidate: TFLOP/s}} in the order head_dim, full before causal, length; the header.

    TFLOP/s are those of warm calls in bf16, of 16k tokens. Of a candidate that was measured more
    than once in a cell the first line counts.
    """
    cells: dict[Cell, dict[str, float]] = {}
    runs = read_runs(path)
    for run in runs:
        for found in run.cells:
            if found["op"] == "attention" and found["candidate"] in NAMES and "warm" in found:
                problem = found["problem"]
                if _is_usual(problem):
                    cell = (problem["head_dim"], problem["causal"], problem["seqlen_k"])
                    speeds = cells.setdefault(cell, {})
                    speeds.setdefault(found["candidate"], found["warm"]["tflops"])
    return dict(sorted(cells.items())), runs[-1].header


def _is_usual(problem: dict[str, Any]) -> bool:
    return (
        problem["dtype"] == "bf16"
        and problem["batch"] * problem["seqlen_k"] == _TOKENS
        and problem["heads_q"] * problem["head_dim"] == _WIDTH
        and problem["seqlen_q"] == problem["seqlen_k"]
    )


def ratio(found: dict[str, float], over: str | None = None) -> float:
    """Ours to one of the peers, or to the best of them."""
    peers = {name: speed for name, speed in found.items() if name not in ("fkjit", TWIN)}
    return found["fkjit"] / (peers[over] if over else max(peers.values()))


def candidates(cells: dict[Cell, dict[str, float]]) -> list[str]:
    """Those that were measured in any cell, ours first."""
    return [name for name in NAMES if any(name in found for found in cells.values())]


def table(
    cells: dict[Cell, dict[str, float]], environment: dict[str, Any], source: Path, name: str
) -> str:
    """The Markdown table of a name, with its caption below."""
    names, over = candidates(cells), TABLES[name]
    last = f"fkjit / {NAMES[over] if over else 'best peer'}"
    head = ["head_dim", "mask", "length", *(NAMES[name] for name in names), last]
    lines = [_line(head), _line(["---:", "---", *["---:"] * (len(head) - 2)])]
    for (dim, causal, length), found in cells.items():
        speeds = [f"{found[name]:.0f}" if name in found else "" for name in names]
        mask = "causal" if causal else "full"
        lines.append(
            _line([str(dim), mask, _thousands(length), *speeds, f"{ratio(found, over):.2f}"])
        )
    where = source.relative_to(ROOT)
    return "\n".join(lines) + f"\n\n{caption(environment)}\n{means(cells, over)} From `{where}`.\n"


def means(cells: dict[Cell, dict[str, float]], over: str | None) -> str:
    """Geometric means of the last column."""
    parts = []
    for causal in (False, True):
        found = [ratio(cells[cell], over) for cell in cells if cell[1] is causal]
        mean = math.exp(sum(map(math.log, found)) / len(found))
        parts.append(f"{mean:.2f} {'causal' if causal else 'full'}")
    return f"Geometric means of the last column: {', '.join(parts)}."


def caption(environment: dict[str, Any]) -> str:
    """What was measured, where and when."""
    torch = environment["versions"]["torch"].split("+")[0]
    where = f"{environment['gpu']}, {environment['date'][:10]}, NVRTC {environment['nvrtc']}"
    return (
        f"Attention forward, TFLOP/s, bf16, 16k tokens in a batch, heads x head_dim = 2048; "
        f"{where}; medians of warm calls, all in turns in one process; cuDNN and FlashAttention-2 "
        f"are PyTorch {torch}'s."
    )


def _line(columns: Sequence[str]) -> str:
    return f"| {' | '.join(columns)} |"


def _thousands(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def picture(cells: dict[Cell, dict[str, float]], environment: dict[str, Any]) -> str:
    """The bars of the longer ones as an SVG with a transparent background."""
    drawn = {
        cell: found for cell, found in cells.items() if cell[0] in _DRAWN and cell[2] >= _WIDTH
    }
    series = [
        Series(
            NAMES[name],
            [Point(n, found[name]) for n, found in enumerate(drawn.values()) if name in found],
            style,
        )
        for style, name in enumerate(candidates(drawn))
        if name != TWIN
    ]
    title = f"Attention forward by length on {environment['gpu']}, bf16"
    chart = Chart(title, "bar", Axis(""), Axis("speed [TFLOP/s]"), series)
    chart.categories = [
        (_thousands(length), f"head_dim {dim}{', causal' if causal else ''}")
        for dim, causal, length in drawn
    ]
    return svg.draw(chart, caption(environment))


def with_table(readme: str, name: str, made: str) -> str:
    """The README's text with what is between the two markers of this name replaced."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = readme.split(begin)
    return f"{before}{begin}\n{made}{end}{rest.split(end)[1]}"


def main() -> None:
    """Write what the run given on the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("results", type=Path, help="a result file of `fkjit bench`")
    parser.add_argument("--table", choices=list(TABLES), default="figures")
    given = parser.parse_args()
    cells, environment = read(given.results)
    if given.table == "figures":
        PICTURE.write_text(picture(cells, environment))
    readme = ROOT / "README.md"
    made = table(cells, environment, given.results.resolve(), given.table)
    readme.write_text(with_table(readme.read_text(), given.table, made))


if __name__ == "__main__":
    main()
