"""`fkjit warm`: a progress bar over `fkjit.warm`, and what went wrong at the end."""

from __future__ import annotations

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fkjit.cli import console as report
from fkjit.warming import Warmed, warm

_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
_LINES = 10  # of progress where stderr is no terminal


def run(ops: list[str], arch: str | None, jobs: int | None) -> int:
    """The exit status: 0, 1 when a variant failed or could not be kept, 130 after Ctrl-C."""
    columns = (
        TextColumn("compiling"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    err = report.console(stderr=True)
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def show(done: int, total: int, label: str) -> None:
            bar.update(task, completed=done, total=total, description=label)
            if not err.is_terminal and done * _LINES // total > (done - 1) * _LINES // total:
                err.print(f"{done} of {total}: {label}")

        try:
            done = warm(*ops, arch=arch, jobs=jobs, progress=show)
        except KeyboardInterrupt:
            count = bar.tasks[0].completed
            bar.stop()
            err.print(f"interrupted: {count:.0f} variants are done and kept; start again to go on")
            return _INTERRUPTED
    return _summary(done)


def _summary(done: Warmed) -> int:
    out, err = report.console(), report.console(stderr=True)
    out.print(
        f"{done.total} variants: {done.compiled} compiled, {done.present} already there, "
        f"{len(done.failed)} failed, in {report.duration(done.seconds)}"
    )
    for label, problem in done.problems:
        err.print(f"{label}: {problem}", style="yellow")
    for label, error in done.failed:
        err.print(f"failed: {label}\n{error}", style="red")
    if done.unsaved:
        err.print(f"{done.unsaved} could not be kept: see `fkjit doctor`", style="red")
    return 1 if done.failed or done.unsaved else 0
