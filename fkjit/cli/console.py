"""How the commands write to a terminal: tables of at most 100 columns, sizes, durations, tiles."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fkjit.terminal import printable

WIDTH = 100  # of what is written to a pipe or a file


class _Console(Console):
    """A console that no text gives orders to: a name may have escape sequences in it."""

    def print(self, *objects: Any, **how: Any) -> None:
        super().print(*(printable(o) if isinstance(o, str) else o for o in objects), **how)


def console(stderr: bool = False) -> Console:
    """Where to print; texts come out as they are: a path may have "[red]" or ":x:" in it.

    As wide as the terminal, or as COLUMNS says; in a pipe as wide as the tables are made for.
    """
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS") else WIDTH
    return _Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


def table(*columns: str, title: str | None = None) -> Table:
    """An empty table; a column whose name begins with ">" is right-aligned."""
    made = Table(box=None, pad_edge=False, show_header=any(columns), title=title)
    made.title_justify, made.title_style = "left", "bold"
    for column in columns:
        name = column.removeprefix(">")
        made.add_column(name, justify="right" if name != column else "left", overflow="fold")
    return made


def add_rows(made: Table, rows: Iterable[Iterable[Any]]) -> Table:
    """Append rows of anything; texts are taken as they are, not as markup."""
    for row in rows:
        made.add_row(
            *(cell if isinstance(cell, Text) else Text(printable(str(cell))) for cell in row)
        )
    return made


def size(count: float) -> str:
    """Bytes for people: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def duration(seconds: float) -> str:
    """Seconds for people: 0.000123 -> "123 us"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def value(given: Any) -> str:
    """A parameter's value as the command line takes it: (128, 64) -> "128,64", True -> "true"."""
    if isinstance(given, tuple):
        return ",".join(map(value, given))
    return str(given).lower() if isinstance(given, bool) else str(given)
