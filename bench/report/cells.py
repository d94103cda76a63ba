"""Stored results put in order: by case and candidate, ratios within one run, families of cases."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fkjit.errors import ParameterError
from fkjit.spec import registered

from ..core.method import MODES
from ..core.store import Run, read, results_folder
from .chart import short

Cell = dict[str, Any]
_DOCS = Path(__file__).resolve().parents[2] / "docs"
# What a curve runs over: the first of these that a problem has; else whatever varies most.
_LENGTHS = {
    "seqlen_k": "sequence length", "seqlen": "sequence length", "tokens": "tokens", "rows": "rows",
    "m": "rows", "n": "elements", "longest": "sequence length",
}  # fmt: skip


def default_files() -> list[Path]:
    """The newest result file of bench/results/ and docs/, as a list of one or none."""
    found = []
    for folder in (results_folder(), _DOCS):
        for path in folder.glob("*.jsonl"):
            try:
                found.append((max(str(run.header.get("date")) for run in read(path)), path))
            except ParameterError:
                continue  # a file of something else
    return [max(found)[1]] if found else []


def load(paths: Sequence[Path]) -> list[Run]:
    """The runs of files, and of all files in folders, oldest first. ParameterError as in `read`."""
    files: list[Path] = []
    for path in paths:
        files += sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    runs = [run for path in files for run in read(path)]
    return sorted(runs, key=lambda run: str(run.header.get("date")))


@dataclass
class Study:
    """What was measured of one operation on one GPU, in any number of runs, oldest first.

    Nothing is added to `turns` once anything was asked of it.
    """

    op: str
    gpu: str
    runs: list[Run] = field(default_factory=list)
    turns: dict[str, list[dict[str, Cell]]] = field(default_factory=dict)  # case -> by run
    _cells: dict[str, dict[str, Cell]] = field(default_factory=dict, init=False, repr=False)

    @property
    def cases(self) -> list[str]:
        return list(self.turns)

    @property
    def candidates(self) -> list[str]:
        """Those with a time in any case: ours, twins, peers."""
        kinds: dict[str, str] = {}
        for case in self.turns:
            for name, cell in self.cells(case).items():
                if any(median(cell, mode) for mode in MODES):
                    kinds[name] = cell["kind"]
        return sorted(kinds, key=lambda name: ("ours", "twin", "peer").index(kinds[name]))

    @property
    def modes(self) -> list[str]:
        """Those that anything was timed in: what most was timed in first, warm before others."""
        cells = [cell for case in self.turns for cell in self.cells(case).values()]
        timed = {mode: sum(bool(median(cell, mode)) for cell in cells) for mode in MODES}
        order = sorted(MODES, key=lambda mode: (-timed[mode], mode != "warm"))
        return [mode for mode in order if timed[mode]]

    @cached_property
    def own(self) -> str | None:
        """What stands for us: the public call, else the first kernel of ours."""
        ours = [n for n in self.candidates if any(self._kind(n, case) for case in self.turns)]
        return "fkjit" if "fkjit" in ours else ours[0] if ours else None

    def _kind(self, name: str, case: str) -> bool:
        return self.cells(case).get(name, {}).get("kind") == "ours"

    def cells(self, case: str) -> dict[str, Cell]:
        """The last of each candidate; modes that its last run left out are of the one before."""
        if case not in self._cells:
            self._cells[case] = self._put_together(case)
        return self._cells[case]

    def _put_together(self, case: str) -> dict[str, Cell]:
        made: dict[str, Cell] = {}
        for turn in self.turns[case]:
            for name, cell in turn.items():
                before = {} if "error" in cell else made.get(name, {})
                made[name] = {**{m: before[m] for m in MODES if median(before, m)}, **cell}
        return made

    def problem(self, case: str) -> dict[str, Any]:
        """Sizes of a case."""
        return next(iter(self.cells(case).values()))["problem"]

    def dtype(self, case: str) -> str:
        """Of a case; empty where it has none."""
        return str(self.problem(case).get("dtype") or "")

    def speedup(self, case: str, name: str, mode: str, over: str | None = None) -> float | None:
        """How many times the time of ours (or of `over`) this candidate takes, in its last run."""
        base = over or self.own
        for turn in reversed(self.turns[case]):
            theirs, ours = (median(turn.get(one or "", {}), mode) for one in (name, base))
            if theirs and ours:
                return theirs / ours
        return None

    def ceilings(self) -> dict[str, Any] | None:
        """Of the last run that measured them."""
        found = [run.header.get("ceilings") for run in self.runs]
        return next((limits for limits in reversed(found) if limits), None)


def studies(runs: Sequence[Run]) -> list[Study]:
    """One for each GPU and operation, in the order of appearance."""
    made: dict[tuple[str, str], Study] = {}
    for run in runs:
        gpu = str(run.header.get("gpu") or "no GPU")
        for cell in run.cells:
            study = made.setdefault((gpu, cell["op"]), Study(cell["op"], gpu))
            if run not in study.runs:
                study.runs.append(run)
                for turns in study.turns.values():
                    turns.append({})
            turns = study.turns.setdefault(cell["case"], [{} for _ in study.runs])
            turns[-1][cell["candidate"]] = cell
    return list(made.values())


def median(cell: Cell, mode: str) -> float | None:
    """Milliseconds; None where there is no time."""
    return cell.get(mode, {}).get("p50")


def work(cell: Cell, mode: str) -> tuple[float, float]:
    """Counted flops and bytes: of the cell's rates, else of the operation's spec; 0 unknown."""
    seconds = (median(cell, mode) or 0.0) * 1e-3
    rates = cell.get(mode, {})
    flops, moved = rates.get("tflops", 0.0) * 1e12 * seconds, rates.get("gbs", 0.0) * 1e9 * seconds
    specs = registered(cell["op"])
    if specs and not (flops and moved):
        with suppress(KeyError, TypeError):  # a problem that today's spec does not know
            flops, moved = (
                flops or specs[0].work.flops(cell["problem"]),
                moved or specs[0].work.bytes(cell["problem"]),
            )
    return flops, moved


@dataclass(frozen=True)
class Family:
    """Cases that differ in one size alone, or (`along` None) cases that are of no such row."""

    label: str
    along: str | None  # what the size is, for an axis
    places: tuple[tuple[float, str], ...]  # the size and the case
    tokens: int = 0  # in a batch, where the batch shrinks as the length grows


def families(study: Study) -> list[Family]:
    """Rows of cases with the same batch or, where that is no row, with the same tokens in all, or
    with the same name but for the size: other fields may follow from it."""
    along = _along(study)
    if along is None:
        return [_rest(study.cases)] if study.cases else []
    groups: dict[Any, list[tuple[float, str]]] = {}
    for case in study.cases:
        groups.setdefault(_same(study.problem(case), along, ()), []).append(
            (study.problem(case)[along], case)
        )
    name = _LENGTHS.get(along, along)
    made = [
        Family(_common(row), name, tuple(row)) for group in groups.values() if (row := _row(group))
    ]
    covered = {case for family in made for _, case in family.places}
    totals: dict[Any, list[tuple[float, str]]] = {}
    for case in study.cases:
        problem = study.problem(case)
        tokens = problem.get("batch", 1) * problem[along]
        key = (tokens, *_same(problem, along, ("batch",)))
        totals.setdefault(key, []).append((problem[along], case))
    for (tokens, *_), group in totals.items():
        row = _row(group)
        if any(case not in covered for _, case in row):
            label = f"{_common(row)}, {short(tokens, 2)} tokens"
            made.append(Family(label, name, tuple(row), tokens))
    covered |= {case for family in made for _, case in family.places}
    named: dict[str, list[tuple[float, str]]] = {}
    for case in study.cases:
        size = study.problem(case)[along]
        if case not in covered and (rest := _without(case, size)) is not None:
            named.setdefault(rest, []).append((size, case))
    made += [
        Family(rest, name, tuple(row)) for rest, group in named.items() if (row := _row(group))
    ]
    covered |= {case for family in made for _, case in family.places}
    left = [case for case in study.cases if case not in covered]
    return sorted(made, key=lambda f: -len(f.places)) + ([_rest(left)] if left else [])


def _without(case: str, size: Any) -> str | None:
    """The name of a case less the word of its size, or the size in it; None where it has none."""
    if not isinstance(size, int) or size < 1:
        return None
    marks = [str(size)] + [f"2^{size.bit_length() - 1}"] * (size & (size - 1) == 0)
    for mark in marks:
        rest, found = re.subn(rf"(?<!\d){re.escape(mark)}(?!\d)", "*", case, count=1)
        if found:
            return " ".join(word for word in rest.split() if not re.fullmatch(r"[A-Z]?\*", word))
    return None


def _row(group: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """The cases by size; none where there is one alone."""
    return sorted(group) if len(group) > 1 else []


def _rest(cases: Sequence[str]) -> Family:
    return Family("single cases", None, tuple((float(n), case) for n, case in enumerate(cases)))


def _along(study: Study) -> str | None:
    """The size that curves run over."""
    values: dict[str, set[Any]] = {}
    for case in study.cases:
        for name, value in study.problem(case).items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                values.setdefault(name, set()).add(value)
    varied = {name: found for name, found in values.items() if len(found) > 1}
    known = [name for name in _LENGTHS if name in varied]
    return known[0] if known else max(varied, key=lambda n: len(varied[n]), default=None)


def _same(problem: dict[str, Any], along: str, but: Sequence[str]) -> tuple[Any, ...]:
    """Everything of a problem that a row has in common; sizes that go along stand as such."""
    length = problem[along]
    return tuple(
        (name, "same" if value == length and str(name).startswith(along[:3]) else str(value))
        for name, value in sorted(problem.items())
        if name != along and name not in but
    )


def _common(row: Sequence[tuple[float, str]]) -> str:
    """The words that all labels of a row share."""
    first = row[0][1].split()
    shared = [word for word in first if all(word in case.split() for _, case in row)]
    return " ".join(shared) or row[0][1]


def note(name: str, case: str, cell: Cell, mode: str) -> str:
    """What is shown of a point: everything known of its time."""
    found = cell.get(mode, {})
    lines = [f"{name} ({mode})", case]
    lines.append(f"median {found['p50']:.4g} ms")
    if "min" in found and "p99" in found:
        lines[-1] += f", {found['min']:.4g} to {found['p99']:.4g} (min, p99)"
    rates = [f"{found[key]:.4g} {unit}" for key, unit in _RATES if key in found]
    shares = [f"{found[key]:.0%} of {what}" for key, what in _SHARES if key in found]
    lines += [", ".join(words) for words in (rates, shares) if words]
    return "\n".join(lines)


_RATES = (("tflops", "TFLOP/s"), ("gbs", "GB/s"))
_SHARES = (("share_gemm", "the GEMM rate"), ("share_copy", "the copy bandwidth"))


def each(study: Study, mode: str) -> Iterator[tuple[str, str, Cell]]:
    """Case, candidate and cell of everything that has a time in a mode."""
    for case in study.cases:
        for name, cell in study.cells(case).items():
            if median(cell, mode):
                yield case, name, cell
