"""`fkjit warm`: which variants, how long it takes, a progress bar, and what went wrong."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from fkjit import ops, warm_calls, warm_record
from fkjit.arch import target
from fkjit.cli import console as report
from fkjit.cli.select import selection
from fkjit.errors import ParameterError
from fkjit.models import warm as models
from fkjit.models.config import configuration
from fkjit.warm_worker import Job, job_of
from fkjit.warming import (
    ALL,
    COMMON,
    Warmed,
    chosen_targets,
    compile_jobs,
    estimate,
    plan,
    planned,
    processes,
)

_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
_LINES = 10  # of progress where stderr is no terminal


def chosen(
    names: Sequence[str], arch: str | None, values: Mapping[str, str | None], where: Sequence[str]
) -> list[Job]:
    """The variants of names, or of calls where head dimensions, dtypes or options are given; of
    kernels by the grammar of all commands where words name one (`attention flash`) or give a
    parameter's value (`--block 32`)."""
    if _of_kernels(names):
        fields = [f"{name}={value}" for name, value in values.items() if value]
        words = [word for field in (*fields, *where) for word in ("--where", field)]
        return _kernels([*names, *words], arch)
    dims, dtypes = values["head_dim"], values["dtype"]
    if dims is dtypes is None and not where:
        return plan(names or [COMMON], arch)
    if not names:
        raise ParameterError("warm: --head-dim, --dtype and --where are of a call: name it")
    asked = {
        "dtypes": tuple(dtypes.split(",")) if dtypes else warm_calls.DTYPES,
        "head_dims": _numbers(dims) if dims else warm_calls.HEAD_DIMS,
        "where": dict(map(_option, where)),
    }
    calls = [call for name in names for call in warm_calls.calls(name, **asked)]
    return planned(calls, chosen_targets(arch))


def _of_kernels(words: Sequence[str]) -> bool:
    if any(word.startswith("--") for word in words):
        return True
    ops.load()
    known = {*ops.known_names(), ALL, COMMON}
    return words[:1] != [] and words[0] in known and any(w not in known for w in words[1:])


def _kernels(words: Sequence[str], arch: str | None) -> list[Job]:
    asked = selection("warm", words)
    asked.check_fields(())
    return [
        job_of(spec, params, to)
        for to in map(target, chosen_targets(arch))
        for spec, variants in asked.variants(to)
        for params in variants
    ]


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError as error:
        raise ParameterError(f"warm: --head-dim {text!r} is not numbers: 64,128") from error


def _option(text: str) -> tuple[str, Any]:
    """ "window=1024,0" -> ("window", (1024, 0)); "causal=true" -> ("causal", True)."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ParameterError(
            f"warm: --where {text!r} is not an option with its value: window=1024,0"
        )
    words = {"true": True, "false": False, "none": None}
    if value.lower() in words:
        return name, words[value.lower()]
    try:
        return name, literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


class Model(NamedTuple):
    """What --config, --batch, --prompt, --weights and --head say."""

    config: str | None
    batch: str | None
    prompt: int | None
    weights: str | None
    head: str | None


def of_model(said: Model, dtype: str | None, arch: str | None, others: bool) -> list[Job]:
    """The variants that generation with a model takes. others: whether kernels are chosen in
    another way as well."""
    if said.config is None:
        raise ParameterError("warm: --batch, --prompt, --weights and --head go with --config")
    if others:
        raise ParameterError(
            "warm: --config goes with --batch, --prompt, --weights, --head, --dtype, --arch alone"
        )
    batches = said.batch or "1"
    try:
        sizes = tuple(map(int, batches.split(",")))
    except ValueError as error:
        raise ParameterError(f"warm: --batch {batches!r} is not numbers: 1,16") from error
    model = configuration("warm", said.config)
    length = min(512, model.max_length) if said.prompt is None else said.prompt
    return models.jobs(
        model, batches=sizes, prompt=length, dtype=dtype or "bf16", arch=arch,
        quantize=said.weights, quantize_head=said.head,
        tell=lambda text: report.console(stderr=True).print(text, soft_wrap=True),
    )  # fmt: skip


def record(path: Path, command: Sequence[str]) -> int:
    """Write what a command compiles, or what the cache holds; the command's exit status."""
    count, status = warm_record.record(path, command)
    report.console().print(f"{count} variants in {path}", soft_wrap=True)
    return status


def run(work: list[Job], jobs: int | None) -> int:
    """The exit status: 0, 1 when a variant failed or could not be kept, 130 after Ctrl-C."""
    err = report.console(stderr=True)
    count = processes(jobs, len(work))
    begin = f"{_variants(len(work))}: about {estimate(work, count):.0f} s on {count}"
    err.print(f"{begin} {'core' if count == 1 else 'cores'}, less for what the cache has")
    with _progress(err) as bar:
        task = bar.add_task("", total=len(work))

        def show(done: int, total: int, label: str) -> None:
            bar.update(task, completed=done, total=total, description=label)
            if not err.is_terminal and done * _LINES // total > (done - 1) * _LINES // total:
                err.print(f"{done} of {total}: {label}", soft_wrap=True)

        try:
            done = compile_jobs(work, jobs, show)
        except KeyboardInterrupt:
            finished = bar.tasks[0].completed
            bar.stop()
            err.print(
                f"interrupted: {_variants(int(finished))} done and kept; start again to go on"
            )
            return _INTERRUPTED
    return _summary(done)


def _progress(err: Console) -> Progress:
    """A bar that keeps its numbers: a long label is cut, however narrow the terminal is."""
    rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    columns = (
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False, table_column=rest),
    )
    hidden = not err.is_terminal
    return Progress(*columns, console=err, transient=True, disable=hidden, expand=True)


def _variants(count: int) -> str:
    return "1 variant" if count == 1 else f"{count} variants"


def _summary(done: Warmed) -> int:
    out, err = report.console(), report.console(stderr=True)
    out.print(
        f"{_variants(done.total)}: {done.compiled} compiled, {done.present} already there, "
        f"{len(done.failed)} failed, in {report.duration(done.seconds)}"
    )
    for label, problem in done.problems:
        err.print(f"{label}: {problem}", style="yellow")
    for label, error in done.failed:
        err.print(f"failed: {label}\n{error}", style="red")
    if done.unsaved:
        err.print(f"{done.unsaved} could not be kept: see `fkjit doctor`", style="red")
    return 1 if done.failed or done.unsaved else 0
