"""`fkjit gallery`: the ladders, one of them gone up here, or their pages."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from fkjit.cli import console as report
from fkjit.errors import ParameterError
from fkjit.gallery import catalog, page
from fkjit.gallery.changes import launch_changes, source_changes
from fkjit.gallery.climb import Row, chosen_target, climb, sizes
from fkjit.gallery.ladder import Ladder
from fkjit.gallery.measured import measured, ratios

_PATIENCE = 1.0  # seconds before progress is shown


def run(name: str | None, shape: str | None, arch: str | None, as_json: bool) -> int:
    """Print the ladders, or go up one; the exit status: 1 where numbers are wrong."""
    from fkjit.runtime.gpus import gpus

    if name is None:
        if shape or arch:
            raise ParameterError("gallery: --shape and --arch go with the name of a ladder")
        return _list(as_json)
    ladder = catalog.find(name)
    given = sizes(ladder, shape or "")
    here, _ = gpus()
    gpu = bool(here) and arch is None
    to = chosen_target(arch, _target_here() if gpu else page.ARCH)
    with _progress(len(ladder.steps)) as told:
        rows = list(climb(ladder, to, gpu, given, told))
    if as_json:
        print(json.dumps(_plain(ladder, rows, to.name, gpu, given), indent=2))
    else:
        _print(ladder, rows, to.name, gpu, given)
    return 0 if all(row.error is None or row.error <= 1 for row in rows) else 1


def write(folder: Path, name: str | None) -> None:
    """Write the pages of a ladder or of all of them."""
    names = catalog.NAMES if name is None else (name,)
    with _progress(len(names)) as told:
        for number, one in enumerate(names):
            told(number, one)
            _, written, *_ = page.write(folder, [catalog.find(one)])
            print(written)
    print(folder / page.INDEX)


def differences(name: str | None, number: int) -> None:
    """Print what differs between a step and the one before it."""
    if name is None:
        raise ParameterError("gallery: --diff goes with the name of a ladder")
    ladder, (step, before) = catalog.find(name), catalog.step(f"{name}/{number}")
    if before is None:
        raise ParameterError(f"gallery: --diff 1: {ladder.name} has no step before its first")
    made = report.table("launch", before.title, step.title)
    report.console().print(report.add_rows(made, launch_changes(ladder, step, before)))
    print("\n".join(source_changes(step, before)))


def _target_here() -> str:
    from fkjit.runtime.device import device_target

    return device_target(0).name


@contextmanager
def _progress(of: int) -> Iterator[Callable[[int, str], None]]:
    """What is under way, on stderr, once it takes longer than a second."""
    err, begin = report.console(stderr=True), time.monotonic()
    columns = (BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=of, visible=False)

        def told(done: int, what: str) -> None:
            late = time.monotonic() - begin > _PATIENCE
            bar.update(task, completed=done, description=what, visible=late)
            if late and not err.is_terminal:
                err.print(f"{done + 1} of {of}: {what}", soft_wrap=True)

        yield told


def _list(as_json: bool) -> int:
    ladders = [catalog.find(name) for name in catalog.NAMES]
    if as_json:
        found = [
            {"name": one.name, "title": one.title, "steps": [s.title for s in one.steps]}
            for one in ladders
        ]
        print(json.dumps(found, indent=2))
        return 0
    made = report.table("ladder", ">steps", "from", "to")
    rows = [(one.name, len(one.steps), one.steps[0].title, one.steps[-1].title) for one in ladders]
    report.console().print(report.add_rows(made, rows))
    return 0


# ------------------------------------------------------------------ a ladder


def _print(ladder: Ladder, rows: list[Row], target: str, gpu: bool, given: dict[str, Any]) -> None:
    out = report.console()
    out.print(f"{ladder.title} on {target}", soft_wrap=True)
    stored = [None if given else measured(ladder, step) for step in ladder.steps]
    if gpu:
        times = [None if row.seconds is None else row.seconds * 1e6 for row in rows]
        columns = ("", "step", ">time", f">{ladder.unit}", ">vs first", ">vs last", ">registers")
    else:
        times = [None if one is None else one.microseconds for one in stored]
        columns = ("", "step", ">error/\ntol.", ">regs", ">spill", ">shared\nKiB", ">occu-\npancy")
        columns = (*columns, ">measured", ">vs\nfirst", ">vs\nlast")
    made = report.table(*columns)
    for number, (row, time_, (first, last)) in enumerate(
        zip(rows, times, ratios(ladder, times), strict=True), 1
    ):
        both = page.times_as_fast(first), page.times_as_fast(last)
        shown = "-" if time_ is None else page.duration(time_)
        cells = _timed(row, shown, both) if gpu else _checked(row, shown, both)
        report.add_rows(made, [(number, row.step.title, *cells)])
    out.print(made)
    for number, row in enumerate(rows, 1):
        if row.why_not:
            out.print(f"{number}: {row.step.kernel} {row.why_not}", soft_wrap=True)
    _explain(ladder, gpu, given)


def _checked(row: Row, shown: str, both: tuple[str, str]) -> tuple[str, ...]:
    if row.why_not:
        return ("-", "-", "-", "-", "-", shown, *both)
    used = row.resources
    return (
        _error(row), str(used["registers"]), str(used["spilled"]),
        f"{used['shared'] / 1024:.0f}", f"{used['occupancy']:.0%}", shown, *both,
    )  # fmt: skip


def _timed(row: Row, shown: str, both: tuple[str, str]) -> tuple[str, ...]:
    if row.why_not:
        return ("-", "", "", "", "")
    wrong = "" if row.error is None or row.error <= 1 else f" wrong: {_error(row)} tolerances"
    speed = "" if row.speed is None else page.figure(row.speed)
    return (shown + wrong, speed, *both, str(row.resources["registers"]))


def _error(row: Row) -> str:
    return "-" if row.error is None else f"{row.error:.2g}"


def _explain(ladder: Ladder, gpu: bool, given: dict[str, Any]) -> None:
    """On stderr, so that a table in a file is a table."""
    err = report.console(stderr=True)
    err.print(f"counted, {page.counted(ladder, given)}", soft_wrap=True)
    sized = " ".join(f"{n}={v}" for n, v in {**ladder.sizes, **given}.items())
    if gpu:
        text = (
            f"time: at {sized}, where a step has no sizes of its own; the median of replays of a "
            "CUDA graph, caches warm. Numbers were checked at small sizes"
        )
    else:
        text = (
            "error: of the CPU interpreter, at small sizes, in tolerances; measured: NVIDIA H200, "
            f"stored runs, see docs/gallery/{ladder.name}.md"
        )
    err.print(text, soft_wrap=True)


def _plain(
    ladder: Ladder, rows: list[Row], target: str, gpu: bool, given: dict[str, Any]
) -> dict[str, Any]:
    """For programs."""
    steps = []
    for row in rows:
        stored = measured(ladder, row.step)
        steps.append({
            "title": row.step.title,
            "kernel": row.step.kernel,
            "params": dict(row.step.params),
            "sizes": ladder.sizes_of(row.step, not gpu, given),
            "why_not": row.why_not,
            "error": row.error,
            "resources": dict(row.resources),
            "microseconds": None if row.seconds is None else row.seconds * 1e6,
            "speed": row.speed,
            "measured": None if stored is None else vars(stored),
        })  # fmt: skip
    return {
        "ladder": ladder.name, "target": target, "timed": gpu, "unit": ladder.unit, "steps": steps,
    }  # fmt: skip
