"""The one place that prints outside the commands: lines on stderr, where there is one.

Nothing here raises. A full disk, a reader that has gone, a closed descriptor or `sys.stderr = None`
costs the line, never the result that it is about.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fkjit.settings import settings
from fkjit.terminal import one_line

_open: list[str] | None = None  # what `running` yielded to whom the unfinished line belongs
_mine = threading.local()  # `line`: what this thread's `running` has yielded, and what it is about


def write(text: str, end: str = "\n") -> None:
    """Text for stderr, at once.

    Python's own stderr is written past its buffer: what could not be written would stay in there,
    and the process would end with status 120 for it.
    """
    stream = sys.stderr
    if stream is not None and stream is sys.__stderr__:
        with suppress(OSError, ValueError):  # not more: a handler of a signal may raise in here
            stream.flush()
            os.write(stream.fileno(), (text + end).encode(stream.encoding, "backslashreplace"))
    elif stream is not None:  # print() takes None for stdout
        with suppress(Exception):  # whatever a caller put there may raise
            stream.write(text + end)
            stream.flush()


def say(message: str) -> None:
    """One line, unless FKJIT_LOG=quiet."""
    if settings().log != "quiet":
        write(f"fkjit: {one_line(message)}")


@contextmanager
def running(what: str) -> Iterator[list[str]]:
    """A line about something that takes long: `what ... `, and at its end the text that the caller
    put into the list, or "failed".

    While several threads have one, each of them ends on a whole line.
    """
    done: list[str] = []
    _go_on(done, what, "", "")
    _mine.line = done, what
    try:
        yield done
    finally:
        _mine.line = None
        _go_on(done, what, done[0] if done else "failed", "\n")


def still_running() -> None:
    """Say so on this thread's line, if it has one."""
    line = getattr(_mine, "line", None)
    if line is not None:
        done, what = line
        _go_on(done, what, "still running ... ", "")


def _go_on(mine: list[str], what: str, text: str, end: str) -> None:
    """Continue the line, which begins anew where another thread wrote."""
    global _open
    start = f"fkjit: {one_line(what)} ... " if _open is not mine else ""
    write(("\n" if start and _open is not None else "") + start + text, end)
    _open = None if end else mine


def to_terminal() -> bool:
    """Whether somebody watches, so that a line may be rewritten."""
    with suppress(Exception):
        return sys.stderr is not None and sys.stderr.isatty()
    return False
