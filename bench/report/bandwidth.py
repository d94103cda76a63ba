"""The tables of docs/BANDWIDTH.md and docs/DECODE.md out of stored runs of what memory bounds.

python -m bench.report.bandwidth bench/results/FILE.jsonl …    oldest first

Of each case the last run has a row, and below it earlier ones with peers that the last one has not.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.store import read

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
COLUMNS = {
    "Triton": ("triton",),
    "PyTorch": ("eager", "torch"),
    "compiled": ("compile", "compiled", "torch.compile"),
}
OTHERS = {
    "flashinfer": "FlashInfer", "quack": "quack", "cub": "CUB", "cupy": "CuPy",
    "rope + kv_append": "our two calls", "sdpa-cudnn": "cuDNN",
}  # fmt: skip
_NORMS = [f"bf16 {rows}x{columns}{stream}" for rows, columns in
          ((16_384, 4096), (2048, 4096), (2048, 8192), (2048, 16_384), (1, 4096), (1, 16_384))
          for stream in ("", " residual")]  # fmt: skip
_GRADIENTS = [f"bf16 {shape} residual" for shape in ("16384x1024", "16384x4096", "4096x16384")]
_KV = [
    f"bf16 T{tokens} H8 D128 {rest}"
    for tokens, rest in (
        (16_384, "p16 nhd"), (16_384, "p256 hnd"), (16_384, "p16 nhd fp8"), (64, "p16 nhd"),
    )
]  # fmt: skip
_ROPE = ["bf16 bshd B4 S4096 H32/32 D128", "bf16 bhsd B4 S4096 H32/32 D128"] + [
    f"bf16 thd S{length} H32/8 D128{kind}"
    for length, kinds in ((16_384, ("", " table", " in place", " table in place")), (32, ("",)))
    for kind in kinds
]
HEADLINES = {
    "vector_add": ["fp32 2^16", "fp32 2^28", "bf16 2^28"],
    "reduce": ["fp32 sum 2^16", "fp32 sum 2^20", "fp32 sum 2^28", "bf16 sum 2^28",
               "fp32 sum 1048576x128", "fp32 sum 16384x4096"],
    "layer_norm": _NORMS,
    "rms_norm": _NORMS,
    "layer_norm_backward": _GRADIENTS,
    "rms_norm_backward": _GRADIENTS,
    "rope": _ROPE,
    "kv_append": _KV,
    "kv_read": _KV,
    "rope_kv_append": ["bf16 T1 H8 D128 p16 nhd"],
    "kv_slots": ["64 sequences of 1 p16", "1 sequences of 16384 p16"],
    "kv_copy": ["64 pages of 512 KiB in 2 planes"],
}  # fmt: skip

DECODE = {
    "attention_decode": [
        f"bf16 {size} H32/8 D128 {pages}"
        for size in ("B1 S4096", "B1 S32768", "B1 S131072", "B16 S4096", "B64 S4096", "B64 S8192")
        for pages in ("one piece", "p16 nhd", "p256 nhd")
    ],
}
PAGES = {ROOT / "docs" / "BANDWIDTH.md": HEADLINES, ROOT / "docs" / "DECODE.md": DECODE}

Cells = dict[str, dict[str, Any]]  # by candidate
Headlines = Mapping[str, Sequence[str]]  # cases by operation


def trials(path: Path) -> dict[tuple[str, str], Cells]:
    """Of each case the trial in which most candidates took turns; the last one of several."""
    found: dict[tuple[str, str], Cells] = {}
    for run in read(path):
        here: dict[tuple[str, str], Cells] = {}
        for cell in run.cells:
            if "p50" in cell.get("graph", {}):
                here.setdefault((cell["op"], cell["case"]), {})[cell["candidate"]] = cell
        for key, cells in here.items():
            if len(cells) >= len(found.get(key, ())):
                found[key] = cells
    return found


def table(paths: Sequence[Path], headlines: Headlines = HEADLINES) -> str:
    """Markdown: microseconds a call in a CUDA graph, and what ours moves; which run a row is of."""
    runs = [(chr(ord("a") + number), trials(path)) for number, path in enumerate(paths)]
    head = ["", "", "fkjit", "TB/s", *COLUMNS, "others", "run"]
    lines = [_line(head), _line(["---", "---", *["---:"] * (len(head) - 4), "---", "---"])]
    for op, cases in headlines.items():
        named = op
        for case in cases:
            named_case, seen = case, set[str]()
            for run, found in reversed(runs):
                cells = found.get((op, case), {})
                if cells.keys() - seen:
                    lines.append(_line([named, named_case, *_figures(cells), run]))
                    named, named_case, seen = "", "", seen | cells.keys()
    lines += ["", *(source(run, path) for (run, _), path in zip(runs, paths, strict=True))]
    return "\n".join(lines) + "\n"


def source(run: str, path: Path) -> str:
    """The line below a table that says what its run is: file, date, speed of the copy."""
    headers = [part.header for part in read(path)]
    copies = [header["ceilings"]["copy_gbs"] / 1e3 for header in headers if "ceilings" in header]
    copy = f"; copy {min(copies):.2f} to {max(copies):.2f} TB/s" if copies else ""
    date = f", {headers[0]['date'][:10]}" if "date" in headers[0] else ""
    return f"- {run}: `bench/results/{path.name}`{date}{copy}"


def _figures(cells: Cells) -> Iterator[str]:
    ours = next(cell for cell in cells.values() if cell["kind"] == "ours")
    yield _time(ours)
    speed = ours["graph"].get("gbs", 0.0) / 1e3
    yield f"{speed:.2f}" if speed >= 1 else ""
    for names in COLUMNS.values():
        yield next((_time(cells[name]) for name in names if name in cells), "")
    yield ", ".join(f"{text} {_time(cells[n])}" for n, text in OTHERS.items() if n in cells)


def _time(cell: dict[str, Any]) -> str:
    microseconds = cell["graph"]["p50"] * 1e3
    return f"{microseconds:.{2 if microseconds < 10 else 1 if microseconds < 1000 else 0}f}"


def _line(columns: list[str]) -> str:
    return f"| {' | '.join(columns)} |"


def with_table(page: str, made: str) -> str:
    """The page's text with the table between the markers replaced."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{made}{END}{rest.split(END)[1]}"


def sources(page: str) -> list[Path]:
    """The runs that a page names, in its order."""
    return [ROOT / name for name in re.findall(r"^- [a-z]: `(bench/results/\S+)`", page, re.M)]


def main() -> None:
    """Write the tables of the runs given on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("results", type=Path, nargs="+", help="result files of `fkjit bench`")
    results = parser.parse_args().results
    for page, headlines in PAGES.items():
        ops = set(headlines)
        paths = [path for path in results if ops & {op for op, _ in trials(path)}]
        page.write_text(with_table(page.read_text(), table(paths, headlines)))


if __name__ == "__main__":
    main()
