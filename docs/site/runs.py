"""The table of docs/FIGURES.md: which stored run each page's figures are from.

python -m docs.site.runs            write it anew
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bench.core.store import Run, read
from bench.report.tables import markdown, with_tables

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "FIGURES.md"
RESULTS = ROOT / "bench" / "results"


def lines() -> Iterator[list[str]]:
    """The table."""
    yield ["run", "driver", "NVRTC", "torch", "copy, TB/s", "GEMM, TFLOP/s", "cells", "shown in"]
    for path in sorted(RESULTS.glob("*.jsonl")):
        runs = read(path)
        header, cells = runs[0].header, sum(len(run.cells) for run in runs)
        yield [
            f"`{path.name}`{changed(runs)}",
            header["driver"],
            header["nvrtc"],
            header["versions"]["torch"].partition("+")[0],
            f"{header['ceilings']['copy_gbs'] / 1e3:.2f}",
            f"{header['ceilings']['gemm_tflops']['bf16']:.0f}",
            str(cells),
            ", ".join(pages_naming(path.name)) or "the report",
        ]


def changed(runs: list[Run]) -> str:
    """A mark for runs of files that differed from the commit."""
    return " \\*" if any(run.header.get("modified") for run in runs) else ""


def pages_naming(name: str) -> list[str]:
    """Links to the pages whose text has the file's name."""
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [
        f"[{path.stem}]({'../' if path.parent == ROOT else ''}{path.name})"
        for path in documents
        if path != PAGE and name in path.read_text(encoding="utf-8")
    ]


def page() -> str:
    """The page with its table as it is now."""
    table = markdown(lines(), words=(0, 1, 2, 3, 7))
    return with_tables(PAGE.read_text(encoding="utf-8"), {"runs": table})


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
