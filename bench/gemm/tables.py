"""The tables of docs/GEMM.md out of stored runs of products.

python -m bench.gemm.tables bench/results/FILE.jsonl …    oldest first
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..report.tables import (
    NOT_MEASURED,
    Known,
    Trial,
    known_of,
    listed,
    markdown,
    shown,
    time_of,
    with_tables,
)
from . import cases_linear, cases_linear_dweight, cases_linear_dx

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "GEMM.md"
OPS = (cases_linear.OP, cases_linear_dx.OP, cases_linear_dweight.OP)
COLUMNS = {
    "Triton": "triton", "PyTorch": "torch", "compiled tail": "torch + compiled tail",
    "cuBLASLt's epilogue": "addmm_activation", "torch.compile": "compile", "quack": "quack",
}  # fmt: skip
# Steps of the ladder: what, whose fastest variant (kernel, words of its name), on which case.
_SQUARE, _SINGLE = "bf16 M8192 K8192 N8192", "fp32 M4096 K4096 N4096"
_WHOLE = ("schedule=cooperative", "shares=False")
LADDER = (
    ("1. tiles in shared memory (`tiled.cu`)", "tiled", (), _SQUARE),
    ("2. register tiles, a ring (`fma.cu`), fp32", "fma", (), _SINGLE),
    ("3. tensor cores, warp by warp (`mma.cu`)", "mma", (), _SQUARE),
    ("4. wgmma and TMA, persistent (`wgmma.cu`)", "wgmma", (*_WHOLE, "cluster=1"), _SQUARE),
    ("5. clusters of two", "wgmma", (*_WHOLE, "cluster=2"), _SQUARE),
    ("6. ping-pong", "wgmma", ("schedule=pingpong", "shares=False"), _SQUARE),
    ("8. the last tiles shared", "wgmma", ("shares=True",), _SQUARE),
)
_CUBLAS = ("torch", "cublaslt")  # what the drawn shapes are compared with
_ROWS = (8, 64, 512, 4096, 1 << 20)  # of x, up to: rows of the table of drawn shapes


def ladder(known: Known) -> Iterator[list[str]]:
    """Each step's fastest variant, beside cuBLAS of the same run."""
    yield ["step", "case", "the fastest variant", "us", "TFLOP/s", "of cuBLAS"]
    for text, kernel, words, case in LADDER:
        trial = known.get(("linear", case), NOT_MEASURED)
        times = {
            name: time_of(trial.cells, name) or math.inf
            for name, cell in trial.cells.items()
            if cell["kind"] == "ours" and _is(name, kernel, words)
        }
        if times:
            name = min(times, key=lambda one: times[one])
            theirs = time_of(trial.cells, "torch")
            share = "" if theirs is None else f"{theirs / times[name]:.2f}"
            speed = f"{trial.cells[name]['graph']['tflops']:.0f}"
            variant = " ".join(name.split()[2:])
            yield [text + trial.mark, case, variant, shown(times[name]), speed, share]


def _is(name: str, kernel: str, words: Sequence[str]) -> bool:
    """Whether a candidate ("fkjit wgmma block=... cluster=2") is a variant of this kernel."""
    return name.split()[1:2] == [kernel] and all(word in name for word in words)


def products(known: Known) -> Iterator[list[str]]:
    """Every default case: ours, each peer, and the best of them."""
    yield ["microseconds in a CUDA graph", "fkjit", "", *COLUMNS, "best peer / fkjit"]
    for op in OPS:
        for p in op.sets["default"]:
            trial = known.get((op.name, op.label(p)), NOT_MEASURED)
            if "fkjit" in trial.cells:
                text = op.label(p) if op is OPS[0] else f"{op.name} {op.label(p)}"
                yield [text + trial.mark, *_row(trial)]


def _row(trial: Trial) -> list[str]:
    own = time_of(trial.cells, "fkjit")
    times = [time_of(trial.cells, name) for name in COLUMNS.values()]
    best = _best(trial)
    ratio = "" if best is None or own is None else f"{best / own:.2f}"
    return [shown(own), _speed(trial.cells["fkjit"]), *map(shown, times), ratio]


def _best(trial: Trial) -> float | None:
    """The least time of a peer."""
    peers = [name for name, cell in trial.cells.items() if cell["kind"] != "ours"]
    return min((time_of(trial.cells, name) or math.inf for name in peers), default=None)


def _speed(cell: dict[str, Any]) -> str:
    """By what bounds it: TFLOP/s or TB/s."""
    graph = cell["graph"]
    if graph.get("share_copy", 0.0) > graph.get("share_gemm", 1.0):
        return f"{graph['gbs'] / 1e3:.2f} TB/s"
    return f"{graph['tflops']:.0f} TFLOP/s"


def drawn(known: Known) -> Iterator[list[str]]:
    """The drawn shapes by the rows of x: time of cuBLAS over ours."""
    yield ["rows of x", "shapes", "geometric mean", "least", "the least one"]
    op, least = cases_linear.OP, 1
    every: list[tuple[float, str]] = []
    for most in _ROWS:
        problems = [p for p in op.sets["random"] if least <= p["m"] <= most]
        found = [r for p in problems if (r := _ratio(known, op.label(p))) is not None]
        if found:
            yield [f"{least:,} to {max(p['m'] for p in problems):,}", *_summary(found)]
        every, least = every + found, most + 1
    if every:
        yield ["all", *_summary(every)]


def _ratio(known: Known, case: str) -> tuple[float, str] | None:
    """The best of cuBLAS over ours, and the case."""
    cells = known.get(("linear", case), NOT_MEASURED).cells
    own = time_of(cells, "fkjit")
    peers = [time for name in _CUBLAS if (time := time_of(cells, name)) is not None]
    return (min(peers) / own, case) if own and peers else None


def _summary(found: Sequence[tuple[float, str]]) -> list[str]:
    mean = math.exp(sum(math.log(ratio) for ratio, _ in found) / len(found))
    worst, case = min(found)
    return [str(len(found)), f"{mean:.3f}", f"{worst:.3f}", case]


def _table(lines: Iterable[list[str]]) -> str:
    """Markdown, or that there is nothing yet."""
    every = list(lines)
    return markdown(every) if len(every) > 1 else "Not measured yet.\n"


def tables(paths: Sequence[Path]) -> dict[str, str]:
    """Markdown by the name of its markers, of runs from the oldest to the last."""
    known = known_of(paths)
    makers = {"ladder": ladder, "products": products, "drawn": drawn}
    made = {name: _table(make(known)) for name, make in makers.items()}
    return {**made, "runs": listed(paths)}


def main() -> None:
    """Write the tables of the runs given on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("results", type=Path, nargs="+", help="result files of `fkjit bench`")
    paths = parser.parse_args().results
    PAGE.write_text(with_tables(PAGE.read_text(), tables(paths)))


if __name__ == "__main__":
    main()
