"""The README's table and picture of attention, out of a run of the suite.

    fkjit bench attention --set readme --peers sdpa-flash,sdpa-cudnn --out docs/attention_h200.jsonl
    python -m bench.figure docs/attention_h200.jsonl

Writes the `.svg` beside the file, drawn as `fkjit report` draws, and the table between the README's
two markers.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .report import svg
from .report.chart import Axis, Chart, Point, Series
from .store import read as read_runs

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
NAMES = {
    "fkjit": "fkjit",
    "sdpa-flash": "FlashAttention-2",
    "sdpa-cudnn": "cuDNN",
    "fa4": "FlashAttention-4",
}
FA2 = "sdpa-flash"

Cell = tuple[int, bool, int]  # head_dim, causal, seqlen


def read(path: Path) -> tuple[dict[Cell, dict[str, float]], dict[str, Any]]:
    """{cell: {candidate: TFLOP/s}} in the order head_dim, full before causal, length; the header.

    TFLOP/s are those of warm calls. Of a candidate that was measured more than once in a cell the
    last line counts.
    """
    cells: dict[Cell, dict[str, float]] = {}
    runs = read_runs(path)
    for run in runs:
        for found in run.cells:
            if found["op"] == "attention" and found["candidate"] in NAMES and "warm" in found:
                problem = found["problem"]
                cell = (problem["head_dim"], problem["causal"], problem["seqlen_k"])
                cells.setdefault(cell, {})[found["candidate"]] = found["warm"]["tflops"]
    return dict(sorted(cells.items())), runs[-1].header


def candidates(cells: dict[Cell, dict[str, float]]) -> list[str]:
    """Those that were measured in any cell, ours first."""
    return [name for name in NAMES if any(name in found for found in cells.values())]


def table(cells: dict[Cell, dict[str, float]], environment: dict[str, Any]) -> str:
    """The Markdown table, with its caption below."""
    names = candidates(cells)
    head = ["head_dim", "mask", "length", *(NAMES[name] for name in names), "fkjit / FA2"]
    lines = [_line(head), _line(["---:", "---", *["---:"] * (len(head) - 2)])]
    for (dim, causal, length), found in cells.items():
        speeds = [f"{found[name]:.0f}" if name in found else "" for name in names]
        ratio = f"{found['fkjit'] / found[FA2]:.2f}" if FA2 in found else ""
        mask = "causal" if causal else "full"
        lines.append(_line([str(dim), mask, _thousands(length), *speeds, ratio]))
    return "\n".join(lines) + f"\n\n{caption(environment)}\n"


def caption(environment: dict[str, Any]) -> str:
    """What was measured, where and when."""
    torch = environment["versions"]["torch"].split("+")[0]
    return (
        f"Attention forward, TFLOP/s, bf16, 16k tokens in a batch, heads x head_dim = 2048; "
        f"{environment['gpu']}, {environment['date'][:10]}, NVRTC {environment['nvrtc']}; "
        f"FlashAttention-2 is PyTorch {torch}'s, measured in turns with fkjit."
    )


def _line(columns: Sequence[str]) -> str:
    return f"| {' | '.join(columns)} |"


def _thousands(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def picture(cells: dict[Cell, dict[str, float]], environment: dict[str, Any]) -> str:
    """The bars as an SVG with a transparent background."""
    series = [
        Series(
            NAMES[name],
            [Point(n, found[name]) for n, found in enumerate(cells.values()) if name in found],
            style,
        )
        for style, name in enumerate(candidates(cells))
    ]
    title = f"Attention forward by length on {environment['gpu']}, bf16"
    chart = Chart(title, "bar", Axis(""), Axis("speed [TFLOP/s]"), series)
    chart.categories = [
        (_thousands(length), f"head_dim {dim}{', causal' if causal else ''}")
        for dim, causal, length in cells
    ]
    return svg.draw(chart, caption(environment))


def with_table(readme: str, made: str) -> str:
    """The README's text with the table between the markers replaced."""
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n{made}{END}{rest.split(END)[1]}"


def main() -> None:
    """Write the picture and the table of the run given on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("results", type=Path, help="a result file of `fkjit bench`")
    results = parser.parse_args().results
    cells, environment = read(results)
    results.with_suffix(".svg").write_text(picture(cells, environment))
    readme = ROOT / "README.md"
    readme.write_text(with_table(readme.read_text(), table(cells, environment)))


if __name__ == "__main__":
    main()
