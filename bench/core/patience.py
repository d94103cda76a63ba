"""A limit to what a peer takes to prepare, and signs of life meanwhile."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .op import Refused

_EVERY = 10.0  # seconds between signs of life


class _TooLong(BaseException):
    """No Exception: libraries catch those of their own tries, and go on with the next one."""


@contextmanager
def within(
    seconds: float,
    what: str,
    every: float = _EVERY,
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
) -> Iterator[None]:
    """Refused where the block takes longer. `what` is told every ten seconds.

    The limit needs the main thread, and a system with interval timers; elsewhere there is none.
    """
    begin = time.monotonic()

    def look(*_: object) -> None:
        spent = time.monotonic() - begin
        if spent >= seconds:
            raise _TooLong
        say(f"{what}: {spent:.0f} of at most {seconds:.0f} s")

    try:
        before = signal.signal(signal.SIGALRM, look)
    except (AttributeError, ValueError):
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, min(every, seconds), min(every, seconds))
    try:
        yield
    except _TooLong:
        raise Refused(f"took more than {seconds:.0f} s to prepare") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
