"""The command line of `fkjit report`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fkjit import ops
from fkjit.errors import ParameterError
from fkjit.paths import document

from ..core.store import Run, in_help, results_folder
from ..profile import store as profiles
from . import cells, host, look, machine, png, speed, summary, svg, work
from .chart import PALETTE, Chart
from .matrix import matrices
from .page import page
from .section import Section

_PICTURES = 6  # of a section: the rest is in the page


def parser() -> argparse.ArgumentParser:
    """Every option, with its default."""
    made = argparse.ArgumentParser(
        prog="fkjit report",
        description="Stored results as one HTML page that works offline, and as pictures.",
        epilog=document("BENCHMARKS.md") + " says what a result file holds.",
    )
    add = made.add_argument
    add("results", nargs="*", type=Path, metavar="RESULTS", help="files or folders; default: the "
        f"newest of {in_help(results_folder())}")  # fmt: skip
    add("--out", type=Path, default=Path("report"), metavar="DIR", help="default: report/")
    add("--target", metavar="ARCH", help="compile every variant of the operations for a table of "
        "registers and occupancy, which takes minutes: sm_90a; default: none")  # fmt: skip
    add(
        "--profile",
        type=Path,
        metavar="FILE",
        help=f"default: {in_help(profiles.folder())}/GPU.json",
    )
    add("--pictures", action="store_true", help="also SVG and PNG pictures of the first charts")
    add("--no-pictures", action="store_true", help=argparse.SUPPRESS)  # what is so anyway
    return made


def main(arguments: Sequence[str]) -> int:
    """Write the page and the pictures; the exit status.

    ParameterError where there are no results and for a folder that cannot be written.
    """
    chosen = parser().parse_args(arguments)
    ops.load()
    paths = chosen.results or cells.default_files()
    runs = cells.load(paths)
    if not any(run.cells or run.host for run in runs):
        looked = ", ".join(map(str, paths)) or str(results_folder())
        raise ParameterError(
            f"report: no results in {looked}: `fkjit bench` measures and stores some, or name "
            "files: fkjit report RESULTS.jsonl"
        )
    studies = cells.studies(runs)
    parts = build(runs, chosen.target, chosen.profile)
    text = page(_title(runs), parts, runs, look.styles(studies), look.ours_of(studies))
    try:
        chosen.out.mkdir(parents=True, exist_ok=True)
        (chosen.out / "index.html").write_text(text, encoding="utf-8")
        (chosen.out / "summary.txt").write_text(_summary(parts), encoding="utf-8")
        if chosen.pictures:
            _pictures(parts, chosen.out / "pictures")
    except OSError as error:
        raise ParameterError(f"report: --out {chosen.out} cannot be written: {error}") from error
    print(_summary(parts), end="")
    print(chosen.out / "index.html")
    return 0


def build(
    runs: Sequence[Run], to: str | None, profile: Path | None
) -> list[tuple[str, list[Section]]]:
    """A part for each operation and GPU: its name and its sections, those without data too."""
    parts = []
    studies = cells.studies(runs)
    styles = look.styles(studies)
    for study in sorted(studies, key=lambda study: not study.op.startswith("attention")):
        stored = _profile(study.gpu, profile)
        for entry in work.profile_entries(study, stored):
            for one in entry["candidates"]:
                _add_style(styles, one["candidate"])
        parts.append((f"{study.op} on {study.gpu}", [
            Section("summary", f"{study.op}: how many times as fast", summary.words(study),
                    matrices=matrices(study)),
            speed.latency(study, styles),
            speed.throughput(study, styles),
            speed.speedup(study, styles),
            speed.scaling(study, styles),
            speed.bandwidth(study, styles),
            speed.memory(study, styles),
            work.roofline(study, styles, stored),
            work.decode(study, styles),
            work.twins(study, styles),
            machine.resources(study.op, None if to == "none" else to),
            machine.counters(study, stored),
        ]))  # fmt: skip
    for gpu, run in host.runs_of(runs).items():
        words = Section("summary", "Summary", ["What a call costs before the GPU has any work."])
        parts.append((f"host time on {gpu}", [words, host.section(run)]))
    return parts


def _add_style(styles: dict[str, int], name: str) -> None:
    """Of what only a profile has: ours in ours' colour, others in the last one."""
    last = 0 if name.startswith("fkjit") else len(PALETTE) - 1
    styles.setdefault(name, len(PALETTE) * len(styles) + last)


def _profile(gpu: str, path: Path | None) -> dict[str, Any] | None:
    """The stored profile of a GPU; None where there is none."""
    if path is not None:
        return profiles.read(path)
    found = profiles.folder() / profiles.file_name(gpu)
    return profiles.read(found) if found.exists() else None


def _title(runs: Sequence[Run]) -> str:
    gpus = dict.fromkeys(str(run.header.get("gpu") or "no GPU") for run in runs)
    return f"fkjit on {', '.join(gpus)}"


def _summary(parts: Sequence[tuple[str, Sequence[Section]]]) -> str:
    """The page's words alone, and what it could not show."""
    lines = []
    for name, sections in parts:
        lines += [name, *(f"  {text}" for text in sections[0].text)]
        lines += [f"  {s.title}: not here: {s.missing}." for s in sections if s.missing]
    return "".join(f"{line}\n" for line in lines or ["no results"])


def _pictures(parts: Sequence[tuple[str, Sequence[Section]]], folder: Path) -> None:
    """An SVG and a PNG of the first charts of each section."""
    folder.mkdir(parents=True, exist_ok=True)
    why = png.available()
    left = 0
    for name, sections in parts:
        for section in sections:
            some = [c for c in section.charts if c.choice.get("mode") == _mode(section)]
            left += max(0, len(some) - _PICTURES)
            for chart in some[:_PICTURES]:
                stem = folder / f"{_slug(name, chart, section)}"
                stem.with_suffix(".svg").write_text(svg.draw(chart), encoding="utf-8")
                if why is None:
                    png.write(chart, stem.with_suffix(".png"))
    if why:
        print(f"fkjit: no PNG pictures: {why}", file=sys.stderr)
    if left:
        print(f"fkjit: {left} more charts are in the page alone", file=sys.stderr)


def _mode(section: Section) -> str | None:
    """The first mode of its charts: pictures show one."""
    return next((chart.choice.get("mode") for chart in section.charts), None)


def _slug(part: str, chart: Chart, section: Section) -> str:
    """ "attention-on-nvidia-h200-latency-bf16-d128-b4-h16-full-warm": no dot, so that a suffix
    stays one."""
    words = [part, section.name, *chart.choice.values()]
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")
