"""Signals that wait a moment: around code that may swallow what a handler raises."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def held() -> Iterator[None]:
    """Handlers of signals run at the end, not within.

    An exception of a handler comes up wherever Python is just then. Below an `except Exception` it
    is lost: importlib.metadata has one around listing a folder, and all that looks for installed
    packages goes through it, as CuPy does when it is imported. KeyboardInterrupt comes through,
    but from a class statement as the RuntimeError of a `__set_name__`.

    Handlers run in the main thread alone, so elsewhere there is nothing to do.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = _handlers()
    try:
        for number in before:
            signal.signal(number, lambda number, _: came.append(number))
        yield
    finally:
        _restore(dict(before))
        for number in came:
            before[number](number, sys._getframe())


def _handlers() -> dict[int, Callable[[int, Any], Any]]:
    """By signal, those in Python."""
    found = {int(number): signal.getsignal(number) for number in signal.valid_signals()}
    return {number: handler for number, handler in found.items() if callable(handler)}


def _restore(handlers: dict[int, Callable[[int, Any], Any]]) -> None:
    """All of them, whatever one that is there again raises meanwhile; that comes at the end."""
    raised: BaseException | None = None
    while handlers:
        try:
            for number in tuple(handlers):
                signal.signal(number, handlers[number])
                del handlers[number]
        except BaseException as error:
            raised = error
    if raised is not None:
        raise raised
