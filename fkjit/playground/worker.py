"""One worker process: requests as lines of JSON on stdin, events as lines of JSON on stdout.

It has a limit of memory, which the processes that it starts inherit. Templates run in Jinja's
sandbox (fkjit/jit/render.py), NVRTC and nvdisasm in processes of their own. `jobs.py` ends all of
them after an edit, or past the time limit.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from contextlib import suppress
from functools import partial
from typing import Any, TextIO

MEMORY = 6 << 30  # bytes of address space
FILE = 256 << 20  # bytes of a file that it may write


def main() -> None:
    """Until stdin ends."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a kernel's own Python prints is no event
    _limit()
    _get_ready()
    _Events(out).emit("ready")
    for line in sys.stdin:
        serve(json.loads(line), out)


def serve(asked: dict[str, Any], out: TextIO) -> None:
    """One request: its events, the last of which is "end"."""
    from fkjit.errors import FkjitError
    from fkjit.playground.request import variants
    from fkjit.playground.stages import Stages, differences

    events = _Events(out)
    try:
        ran = []
        for name, variant in zip("ab", variants(asked), strict=False):
            ran.append(Stages(variant, partial(events.emit, which=name)))
            ran[-1].run()
        if len(ran) == 2:
            events.emit("diff", text=differences(*ran))
    except FkjitError as error:
        events.emit("error", which="a", stage="request", text=str(error), marks=[])
    except Exception as error:  # a kernel's own Python may raise anything
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}"
        events.emit("error", which="a", stage="worker", text=text, marks=[])
    events.emit("end")


class _Events:
    """Writes events, of several threads, each in one piece."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._lock = out, threading.Lock()

    def emit(self, event: str, **data: Any) -> None:
        """One event."""
        text = json.dumps({"event": event, **data}, default=str)
        with self._lock:
            self._out.write(text + "\n")
            self._out.flush()


def _limit() -> None:
    with suppress(ImportError, ValueError, OSError):
        import resource

        for what, most in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_FSIZE, FILE)):
            _, hard = resource.getrlimit(what)
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(what, (most, hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _get_ready() -> None:
    """What each request needs: imports, the registry, a process that compiles."""
    import jinja2.sandbox  # noqa: F401

    from fkjit import ops
    from fkjit.errors import FkjitError
    from fkjit.jit.compiler import compilers
    from fkjit.jit.toolchain import nvrtc_info
    from fkjit.playground import catalog, stages  # noqa: F401

    ops.load()
    catalog.load_scaffold()
    with suppress(FkjitError):
        compilers.start(nvrtc_info().library)


if __name__ == "__main__":
    main()
