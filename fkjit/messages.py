"""The one place that prints outside the commands: lines on stderr, where there is one.

Nothing here raises. A full disk, a reader that has gone, a closed descriptor or `sys.stderr = None`
costs the line, never the result that it is about.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from fkjit.settings import settings
from fkjit.terminal import one_line


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


def to_terminal() -> bool:
    """Whether somebody watches, so that a line may be rewritten."""
    with suppress(Exception):
        return sys.stderr is not None and sys.stderr.isatty()
    return False
