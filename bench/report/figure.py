"""The tables and the picture of attention's speed, out of runs of the suite.

    fkjit bench attention --set peers --set readme --peers sdpa-flash,sdpa-cudnn,fa4,triton
    fkjit bench attention_backward --set peers --modes warm --append
    python -m bench.report.figure bench/results/THAT.jsonl
    python -m bench.report.figure docs/attention_portable_h200.jsonl --portable

docs/ATTENTION_SPEED.md has every case of a run, the README six of them. Of the first run this draws
docs/attention_h200.svg as well, as `fkjit report` draws.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..core.store import read as read_runs
from . import svg
from .chart import Axis, Chart, Point, Series

ROOT = Path(__file__).resolve().parents[2]
README, PAGE = ROOT / "README.md", ROOT / "docs" / "ATTENTION_SPEED.md"
PICTURE = ROOT / "docs" / "attention_h200.svg"
OURS = {"fkjit": "fkjit", "any order": "fkjit, any order"}
NAMES = OURS | {
    "sdpa-cudnn": "cuDNN",
    "fa4": "FlashAttention-4",
    "sdpa-flash": "FlashAttention-2",
    "triton": "Triton",
}
TWIN = "triton"
_DRAWN = (64, 128)  # head dimensions, and lengths from 2k on
_TOKENS, _WIDTH = 16_384, 2048

Cell = tuple[int, bool, int]  # head_dim, causal, seqlen


class Table(NamedTuple):
    """A table between two markers of its name: where it stands and what it shows of a run."""

    page: Path
    op: str = "attention"
    over: str | None = None  # whom the last column compares with; None: the best peer
    rows: tuple[Cell, ...] = ()  # no rows: all that were measured


TABLES = {
    "summary": Table(
        README,
        rows=(
            (64, False, 4096),
            (64, True, 4096),
            (128, False, 512),
            (128, False, 4096),
            (128, True, 4096),
            (256, False, 4096),
        ),
    ),
    "forward": Table(PAGE),
    "backward": Table(PAGE, op="attention_backward"),
    "portable": Table(PAGE, over="sdpa-flash"),  # of the same instructions
}


def read(path: Path, op: str = "attention") -> tuple[dict[Cell, dict[str, float]], dict[str, Any]]:
    """{cell: {candidate: TFLOP/s}} in the order head_dim, full before causal, length; the header.

    TFLOP/s are those of warm calls in bf16, of 16k tokens. Of a candidate that was measured more
    than once in a cell the first line counts.
    """
    cells: dict[Cell, dict[str, float]] = {}
    runs = read_runs(path)
    for run in runs:
        for found in run.cells:
            if found["op"] == op and found["candidate"] in NAMES and "warm" in found:
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
    peers = {name: speed for name, speed in found.items() if name not in (*OURS, TWIN)}
    return found["fkjit"] / (peers[over] if over else max(peers.values()))


def candidates(cells: dict[Cell, dict[str, float]]) -> list[str]:
    """Those that were measured in any cell, ours first."""
    return [name for name in NAMES if any(name in found for found in cells.values())]


def table(source: Path, name: str) -> str:
    """The Markdown table of a name, with its caption below, of a file of results."""
    _, op, over, rows = TABLES[name]
    cells, environment = read(source, op)
    names = candidates(cells)
    last = f"fkjit / {NAMES[over] if over else 'best peer'}"
    head = ["head_dim", "mask", "length", *(NAMES[name] for name in names), last]
    lines = [_line(head), _line(["---:", "---", *["---:"] * (len(head) - 2)])]
    for cell in rows or cells:
        (dim, causal, length), found = cell, cells[cell]
        speeds = [f"{found[name]:.0f}" if name in found else "" for name in names]
        mask = "causal" if causal else "full"
        lines.append(
            _line([str(dim), mask, _thousands(length), *speeds, f"{ratio(found, over):.2f}"])
        )
    below = f"{caption(environment, op)}\n{means(cells, over)}"
    return "\n".join(lines) + f"\n\n{below} From `{source.relative_to(ROOT)}`.\n"


def means(cells: dict[Cell, dict[str, float]], over: str | None) -> str:
    """Geometric means of the last column."""
    parts = []
    for causal in (False, True):
        found = [ratio(cells[cell], over) for cell in cells if cell[1] is causal]
        mean = math.exp(sum(map(math.log, found)) / len(found))
        parts.append(f"{mean:.2f} {'causal' if causal else 'full'}")
    return f"Geometric means of the last column over all {len(cells)} cases: {', '.join(parts)}."


def caption(environment: dict[str, Any], op: str = "attention") -> str:
    """What was measured, where and when."""
    torch = environment["versions"]["torch"].split("+")[0]
    where = f"{environment['gpu']}, {environment['date'][:10]}, NVRTC {environment['nvrtc']}"
    direction = "backward" if op == "attention_backward" else "forward"
    return (
        f"Attention {direction}, TFLOP/s, bf16, 16k tokens in a batch, heads x head_dim = 2048; "
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


def with_table(page: str, name: str, made: str) -> str:
    """The page's text with what is between the two markers of this name replaced."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = page.split(begin)
    return f"{before}{begin}\n{made}{end}{rest.split(end)[1]}"


def main() -> None:
    """Write what the run given on the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("results", type=Path, help="a result file of `fkjit bench`")
    parser.add_argument("--portable", action="store_true", help="a run of the portable kernel")
    given = parser.parse_args()
    source = given.results.resolve()
    if not given.portable:
        PICTURE.write_text(picture(*read(source)))
    for name in ("portable",) if given.portable else ("summary", "forward", "backward"):
        page = TABLES[name].page
        page.write_text(with_table(page.read_text(), name, table(source, name)))


if __name__ == "__main__":
    main()
