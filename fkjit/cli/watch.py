"""`fkjit check --watch`: the same check again in this process, whenever a source file changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from fkjit.cli import console as report
from fkjit.errors import FkjitError
from fkjit.jit.render import load
from fkjit.paths import kernels_dir, templates_dir
from fkjit.spec import KernelSpec

_PAUSE = 0.1  # seconds between looks at the files

Stamps = dict[Path, tuple[int, int]]


def watch(once: Callable[[], int], specs: Sequence[KernelSpec]) -> int:
    """Call `once` now and after each change of the kernels' `.cu` files and headers, until Ctrl-C;
    the last status. An error of fkjit, of the compiler for example, is printed, and is status 1."""
    err = report.console(stderr=True)
    status = 1
    try:
        while True:
            seen = stamps(specs)
            begin = time.perf_counter()
            try:
                status = once()
            except FkjitError as error:
                status = 1
                err.print(f"fkjit: {error}", style="red", soft_wrap=True)
            err.print(
                f"{report.duration(time.perf_counter() - begin)}; waits for a change (Ctrl-C ends)"
            )
            while stamps(specs) == seen:
                time.sleep(_PAUSE)
    except KeyboardInterrupt:
        return status


def stamps(specs: Iterable[KernelSpec]) -> Stamps:
    """When each file of the kernels was written, and its size; a file that is away has none."""
    found: Stamps = {}
    for path in {path for spec in specs for path in files(spec)}:
        try:
            stat = path.stat()
        except OSError:  # an editor may be about to replace it
            continue
        found[path] = (stat.st_mtime_ns, stat.st_size)
    return found


def files(spec: KernelSpec) -> list[Path]:
    """A kernel's `.cu` and the headers that it includes now."""
    source = (spec.root or kernels_dir()) / spec.source
    try:
        headers = load(spec, next(iter(spec.variants()))).headers
    except (FkjitError, StopIteration):  # what `once` shows
        headers = {}
    beside = ((templates_dir() / name, source.parent / name) for name in headers)
    return [source, *(ours if ours.is_file() else other for ours, other in beside)]
