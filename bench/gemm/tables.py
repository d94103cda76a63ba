"""The tables and the pictures of docs/GEMM.md out of stored runs of products.

python -m bench.gemm.tables bench/results/FILE.jsonl …    oldest first
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fkjit.spec import Problem

from ..core.store import Run, read, records
from ..report import svg, work
from ..report.bandwidth import Cells
from ..report.cells import load, studies
from ..report.look import styles
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
from . import cases_linear, cases_linear_dweight, cases_linear_dx, ladder, round_trip
from .products import label

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "GEMM.md"
LADDER, ROOFLINE = ROOT / "docs" / "gemm_ladder.svg", ROOT / "docs" / "gemm_roofline.svg"
OPS = (cases_linear.OP, cases_linear_dx.OP, cases_linear_dweight.OP)
COLUMNS = {
    "Triton": "triton", "PyTorch": "torch", "compiled tail": "torch + compiled tail",
    "cuBLASLt's epilogue": "addmm_activation", "torch.compile": "compile", "quack": "quack",
}  # fmt: skip
_CUBLAS = ("torch", "cublaslt")  # what the drawn shapes are compared with
_SUMMARY = ("shapes", "geometric mean", "below 0.93", "least", "the least one")
_LEAST = 0.93  # what none of the drawn shapes should be below
_ROWS = (8, 64, 512, 4096, 1 << 20)  # of x, up to: rows of the table of drawn shapes


def products(known: Known) -> Iterator[list[str]]:
    """Every default case: ours, each peer, the best of them, and what the GPU did meanwhile."""
    yield ["microseconds in a CUDA graph", "fkjit", "", *COLUMNS, "best peer / fkjit", "MHz, W"]
    for op in OPS:
        for p in op.sets["default"]:
            trial = known.get((op.name, op.label(p)), NOT_MEASURED)
            if "fkjit" in trial.cells:
                text = op.label(p) if op is OPS[0] else f"{op.name} {op.label(p)}"
                yield [text + trial.mark, *_row(trial)]


def single(known: Known) -> Iterator[list[str]]:
    """fp32, exact and rounded to tf32: ours and cuBLAS."""
    yield ["fp32", "fkjit", "", "cuBLAS", "cuBLAS / fkjit", "MHz, W"]
    op = cases_linear.OP
    for p in op.sets["fp32"]:
        trial = known.get((op.name, op.label(p)), NOT_MEASURED)
        found = _ratio(known, op.label(p))
        if found:
            cell, own = trial.cells["fkjit"], time_of(trial.cells, "fkjit") or math.nan
            yield [op.label(p) + trial.mark, shown(own), _speed(cell), shown(own * found[0]),
                   f"{found[0]:.2f}", _gpu(cell)]  # fmt: skip


def models(known: Known) -> Iterator[list[str]]:
    """Layers with all that follows their products, by model and rows, as far as all of these were
    measured: the best peer over ours."""
    yield ["layers", "rows of x", *_SUMMARY]
    op = cases_linear.OP
    for name in ("gpt2", "llama", "decode"):
        for m in dict.fromkeys(p["m"] for p in op.sets[name]):
            cases = [op.label(p) for p in op.sets[name] if p["m"] == m]
            found = [one for case in cases if (one := _over_best(known, case)) is not None]
            if len(found) == len(cases):
                yield [name, f"{m:,}", *_summary(found)]


def _over_best(known: Known, case: str) -> tuple[float, str] | None:
    trial = known.get(("linear", case), NOT_MEASURED)
    own, best = time_of(trial.cells, "fkjit"), _best(trial)
    return (best / own, case) if own and best else None


def _row(trial: Trial) -> list[str]:
    own = time_of(trial.cells, "fkjit")
    times = [time_of(trial.cells, name) for name in COLUMNS.values()]
    best = _best(trial)
    ratio = "" if best is None or own is None else f"{best / own:.2f}"
    cell = trial.cells["fkjit"]
    return [shown(own), _speed(cell), *map(shown, times), ratio, _gpu(cell)]


def _gpu(cell: dict[str, Any]) -> str:
    """Clocks and the greatest power while our turns ran."""
    seen = cell.get("gpu", {}).get("during", {})
    least, most = seen.get("sm_mhz", (None, None))
    if least is None:
        return ""
    clocks = f"{least}" if least == most else f"{least} to {most}"
    watts = f", {seen['watts'][1]:.0f}" if "watts" in seen else ""
    return clocks + watts


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
    """The shapes of the set "random" by the rows of x: time of cuBLAS over ours."""
    op = cases_linear.OP
    return _by_rows(op.sets["random"], lambda p: _ratio(known, op.label(p)))


def anew(paths: Sequence[Path]) -> Iterator[list[str]]:
    """The same of the last run of the set "drawn", whose shapes no other run has."""
    runs = [run for path in paths for run in read(path) if _draws(run)]
    own = [cell for run in runs[-1:] for cell in run.cells if cell["candidate"] == "fkjit"]
    cells: dict[str, Cells] = {}
    for cell in [cell for run in runs[-1:] for cell in run.cells if "p50" in cell.get("graph", {})]:
        cells.setdefault(cell["case"], {})[cell["candidate"]] = cell
    known = {("linear", case): Trial(found) for case, found in cells.items()}
    fixed = {label(p) for p in cases_linear.SETS["random"]}  # a run may have both sets
    problems = [cell["problem"] for cell in own if cell["case"] not in fixed]
    return _by_rows(problems, lambda p: _ratio(known, label(p)))


def seed(paths: Sequence[Path]) -> str:
    """That of the last run of the set "drawn"."""
    runs = [run for path in paths for run in read(path) if _draws(run)]
    found = [str(run.header["configuration"]["seed"]) for run in runs[-1:]]
    return "".join(f"The seed was {one}: `fkjit bench linear --set drawn --seed {one}`.\n"
                   for one in found)  # fmt: skip


def _draws(run: Run) -> bool:
    return "--set drawn" in run.header.get("command", "")


def _by_rows(
    problems: Sequence[Problem], ratio: Callable[[Problem], tuple[float, str] | None]
) -> Iterator[list[str]]:
    yield ["rows of x", *_SUMMARY]
    least = 1
    every: list[tuple[float, str]] = []
    for most in _ROWS:
        some = [p for p in problems if least <= p["m"] <= most]
        found = [one for p in some if (one := ratio(p)) is not None]
        if found:
            rows = [p["m"] for p in some]
            yield [f"{min(rows):,} to {max(rows):,}", *_summary(found)]
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
    few = sum(ratio < _LEAST for ratio, _ in found)
    return [str(len(found)), f"{mean:.3f}", str(few), f"{worst:.3f}", case]


def _table(lines: Iterable[list[str]]) -> str:
    """Markdown, or that there is nothing yet."""
    every = list(lines)
    return markdown(every) if len(every) > 1 else "Not measured yet.\n"


def tables(paths: Sequence[Path]) -> dict[str, str]:
    """Markdown by the name of its markers, of runs from the oldest to the last."""
    known = known_of(paths)
    makers = {"ladder": ladder.rows, "products": products, "drawn": drawn}
    makers |= {"fp32": single, "models": models}
    made = {name: _table(make(known)) for name, make in makers.items()}
    made["anew"] = _table(anew(paths)) + seed(paths)
    made["round trip"] = _table(moved(paths))
    return {**made, "runs": listed(paths) + absent(paths[-1])}


def moved(paths: Sequence[Path]) -> Iterator[list[str]]:
    """Bytes of device memory, of the last run that has them."""
    found = [one for path in paths for one in records(path) if one["record"] == round_trip.RECORD]
    return round_trip.rows(found[-1]) if found else iter(())


def absent(path: Path) -> str:
    """The peers that a run asked for in vain, and why."""
    whys = {
        peer["name"]: peer["missing"]
        for run in read(path)
        for peer in run.header.get("peers", ())
        if peer.get("missing") and peer.get("kind") == "peer"
    }
    if not whys:
        return ""
    each = "; ".join(f"{name}: {why}" for name, why in whys.items())
    return f"\nPeers that were not there in the last of these: {each}.\n"


def pictures(paths: Sequence[Path]) -> dict[Path, str]:
    """The ladder, and the roofline of products in bf16; those that there are results for."""
    made = {LADDER: ladder.picture(known_of(paths)), ROOFLINE: _roofline(paths)}
    return {path: text for path, text in made.items() if text is not None}


def _roofline(paths: Sequence[Path]) -> str | None:
    """As `fkjit report` draws it."""
    found = [study for study in studies(load(paths[-1:])) if study.op == "linear"]
    charts = [
        chart
        for study in found
        for chart in work.roofline(study, styles([study]), None).charts
        if chart.choice == {"dtype": "bf16", "mode": "graph"}
    ]
    return svg.draw(charts[0], f"Products in bf16; {paths[-1].name}") if charts else None


def main() -> None:
    """Write the tables and the pictures of the runs given on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("results", type=Path, nargs="+", help="result files of `fkjit bench`")
    paths = parser.parse_args().results
    PAGE.write_text(with_tables(PAGE.read_text(), tables(paths)))
    for path, text in pictures(paths).items():
        path.write_text(text)


if __name__ == "__main__":
    main()
