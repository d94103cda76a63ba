"""`fkjit cache …`: what is in the kernel cache, and moving it between machines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fkjit.cache.lookup import EntryInfo, default_cache
from fkjit.cli import console as report
from fkjit.errors import CacheError

app = typer.Typer(no_args_is_help=True, help="The kernel cache: list, count, clear, move.")


@app.command("ls")
def ls(
    match: Annotated[str, typer.Argument(help="only entries whose description has this")] = "",
    bundles: Annotated[bool, typer.Option("--bundles", help="read-only bundles too")] = False,
) -> None:
    """Every entry: kernel, target, registers, size, age."""
    cache = default_cache()
    found = [e for e in cache.entries(bundles=bundles) if match in e.meta.get("describe", "")]
    rows = sorted(found, key=lambda entry: entry.meta.get("describe", ""))
    made = report.table("key", "kernel", ">regs", ">size", ">used")
    report.console().print(report.add_rows(made, map(_row, rows)))
    total = report.size(sum(entry.image_bytes for entry in rows))
    report.console().print(
        f"{len(rows)} entries, {total} of images in {cache.directory}", soft_wrap=True
    )


def _row(entry: EntryInfo) -> tuple[str, ...]:
    resources = entry.meta.get("resources") or {}
    used = entry.last_used or entry.meta.get("created", time.time())
    return (
        entry.key[:8],
        entry.meta.get("describe", "?"),
        str(resources.get("registers", "-")),
        report.size(entry.image_bytes),
        _age(time.time() - used) if entry.origin == "disk" else entry.origin,
    )


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return "< 1 h"


@app.command()
def stats() -> None:
    """Where the cache is, and how much of it is used."""
    found = default_cache().stats()
    rows = [
        ("directory", found.directory or "none: kernels are kept for one process only"),
        *([("not used", found.distrust)] if found.distrust else []),
        ("entries", found.entries),
        ("size", f"{report.size(found.bytes)} of at most {report.size(found.max_bytes)}"),
        ("set aside", f"{found.quarantined_files} bad entries"),
        ("bundles", ", ".join(map(str, found.bundles)) or "none"),
    ]
    report.console().print(report.add_rows(report.table("", ""), rows))


@app.command()
def clear(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
) -> None:
    """Remove every entry (files the cache did not make stay)."""
    cache = default_cache()
    if not yes:
        typer.confirm(f"remove {cache.stats().entries} entries from {cache.directory}?", abort=True)
    files, size = cache.clear()
    report.console().print(f"removed {files} files, {report.size(size)}")


@app.command("export")
def export(
    path: Annotated[Path, typer.Argument(help="the .fkb file to write")],
    match: Annotated[str, typer.Option(help="only entries whose description has this")] = "",
) -> None:
    """Write entries into one bundle file, for `import` or FKJIT_BUNDLE_PATH elsewhere.

    Bad ones are left out; then the status is 1.
    """
    cache = default_cache()
    keys = [e.key for e in cache.entries() if match in e.meta.get("describe", "")]
    if not keys:
        having = f" whose description has {match!r}" if match else ""
        raise CacheError(f"cache export: {cache.directory} has no entry{having}")
    done = cache.export(path, keys)
    report.console().print(f"{done.path}: {done.entries} entries, {report.size(done.bytes)}")
    _refused("left out", done.refused)


@app.command("import")
def import_(
    path: Annotated[Path, typer.Argument(help="a .fkb file or a folder of .fkc files")],
) -> None:
    """Copy a bundle's entries into the cache, each verified; status 1 if empty or one is bad."""
    done = default_cache().import_(path)
    if not (done.imported or done.present or done.refused):
        raise CacheError(f"cache import: {path} has no entries")
    report.console().print(f"{done.imported} imported, {done.present} already there")
    _refused("refused", done.refused)


def _refused(what: str, entries: Sequence[tuple[str, str]]) -> None:
    """Status 1 if there are any, and why."""
    err = report.console(stderr=True)
    for key, reason in entries:
        err.print(f"{what} {key[:12]}: {reason}", style="red")
    if entries:
        raise typer.Exit(1)
