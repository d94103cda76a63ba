"""Where NVRTC runs: in processes of their own, else here.

While its front end runs, NVRTC has its own handlers of SIGINT and SIGTERM, which end the process; a
fork in the middle of a compile leaves its locks held in the child; and a compiler can crash. So a
program goes to a process that only compiles (`nvrtc.py`). It is out of reach of the terminal, ends
with this one, and stays for the next program. An exception while it works, a KeyboardInterrupt say,
ends it at once, and so does a compile that takes longer than `Compilers.timeout`. There are as many
as threads that compile at a time, up to one for each CPU.

Where no process can be started, NVRTC runs in this one.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from fkjit.errors import CompilerStoppedError
from fkjit.jit import nvrtc
from fkjit.jit.nvrtc import Made, Nvrtc, Program, Wait
from fkjit.messages import still_running

TIMEOUT = 600.0  # seconds; the slowest kernels take a few
SLOW_SECONDS = 10.0  # then the line on stderr says that it still runs
_DAY = 86400.0  # what poll() takes at a time
_FORK_SECONDS = 5.0  # a fork waits so long for a process that is being started
# Else it is a program with Python inside, and who knows what it does with `-c`.
_PYTHON = re.compile(r"(python|pypy)[\d.]*t?d?(\.exe)?", re.IGNORECASE)


class _Late(Exception):
    """The time for a program is over."""


class _Patience:
    """Waits for a process, and says that it does. No thread: what a signal's handler raises would
    be lost, or leave a lock held, in Python's own code of threads."""

    def __init__(self, seconds: float | None) -> None:
        self._begin, self._limit, self._said = time.monotonic(), seconds, False

    def wait(self, descriptor: int, event: int) -> None:
        """Until it can be read or written. _Late when the time is over."""
        ready = select.poll()
        ready.register(descriptor, event)
        while True:
            passed = time.monotonic() - self._begin
            if self._limit is not None and passed >= self._limit:
                raise _Late
            ends = [] if self._limit is None else [self._limit]
            ends += [] if self._said else [SLOW_SECONDS]
            if ready.poll(min(max(0.0, min(ends) - passed), _DAY) * 1e3 + 1 if ends else None):
                return
            if not self._said and time.monotonic() - self._begin >= SLOW_SECONDS:
                self._said = True
                still_running()


class _Process:
    """One process that compiles."""

    def __init__(self, library: str) -> None:
        """OSError if it cannot be started; whether it works shows at the first program."""
        self._ready = False
        theirs_in, self._to = _pipe()
        self._from, theirs_out = _pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", nvrtc.__file__, library],
                stdin=theirs_in,
                stdout=theirs_out,
                stderr=subprocess.DEVNULL,
                cwd="/",  # it keeps no folder of the caller's busy
                start_new_session=True,
            )
        except BaseException:
            self._close()
            raise
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        os.set_blocking(self._to, False)  # `_Patience` waits

    def compile(self, program: Program, wait: Wait) -> Made:
        """One program. EOFError or OSError: the process has ended."""
        if not self._ready and nvrtc.take(self._from, len(nvrtc.READY), wait) != nvrtc.READY:
            raise EOFError
        self._ready = True
        nvrtc.send(self._to, tuple(program), wait)
        return Made(*nvrtc.receive(self._from, wait))

    @property
    def ready(self) -> bool:
        """Whether it has ever answered."""
        return self._ready

    @property
    def alive(self) -> bool:
        """Whether it can be given a program."""
        return self._process.poll() is None

    def end(self, patience: float = 0.0) -> int:
        """After so many seconds, whatever it is doing: its exit status."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        with suppress(OSError):
            self._process.kill()
        status = self._process.wait()
        self._close()
        return status

    def forget(self) -> None:
        """In a forked child: it is the parent's."""
        self._close()
        self._process.returncode = 0

    def _close(self) -> None:
        ends, self._to, self._from = (self._to, self._from), -1, -1
        for descriptor in ends:
            with suppress(OSError):
                os.close(descriptor)


def _pipe() -> tuple[int, int]:
    """A pipe with no end among the standard descriptors, even where those are closed."""
    ends = os.pipe()
    moved = []
    try:
        for end in ends:
            moved.append(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3))
    finally:
        for end in ends:
            os.close(end)
    return moved[0], moved[1]


class Compilers:
    """The processes of this process."""

    timeout: float | None = TIMEOUT  # seconds for one program

    def __init__(self) -> None:
        self._usable = _can_start()
        self._after_fork()

    def _after_fork(self) -> None:
        self._guard = threading.Lock()
        self._turn = threading.BoundedSemaphore(_cpus())
        self._all: set[_Process] = set()
        self._idle: list[_Process] = []

    def start(self, library: Path | None) -> None:
        """Have the first process begin while the caller gets a program ready."""
        with suppress(OSError, RuntimeError), self._guard:
            if self._usable and library is not None and not self._all:
                self._idle.append(self._new(str(library)))

    def compile(self, program: Program, library: Path | None, who: str) -> Made | None:
        """What a process made of the program, None where there can be no process.

        CompilerStoppedError, which begins with `who`, when the process ended over it.
        """
        if not self._usable or library is None:
            return None
        limit = self.timeout
        with self._turn:
            try:
                process = self._take(str(library))
            except (OSError, RuntimeError):  # no descriptors or processes left; interpreter ends
                return None
            try:
                made = process.compile(program, _Patience(limit).wait)
            except (EOFError, BrokenPipeError, ValueError):  # a handler may raise other OSErrors
                return self._ended(process, who)
            except _Late:
                self._drop(process)
                raise CompilerStoppedError(
                    f"{who}: NVRTC was not done with this kernel after {limit:g} s; "
                    "fkjit.compile_timeout(seconds) sets that limit"
                ) from None
            except BaseException:
                self._drop(process)
                raise
            with self._guard:
                self._idle.append(process)
            return made

    def _ended(self, process: _Process, who: str) -> None:
        status = self._drop(process, patience=1.0)
        if process.ready:
            raise CompilerStoppedError(f"{who}: {_end(status)} while it compiled this kernel")
        self._usable = False  # it cannot load the library, say

    def _take(self, library: str) -> _Process:
        with self._guard:
            while self._idle:
                process = self._idle.pop()
                if process.alive:
                    return process
                self._drop(process)  # killed while nobody used it
            return self._new(library)

    def _new(self, library: str) -> _Process:
        """To be called with `_guard`: a fork waits for it, so no child has pipes unknown to it."""
        process = _Process(library)
        self._all.add(process)
        return process

    def _drop(self, process: _Process, patience: float = 0.0) -> int:
        status = process.end(patience)
        self._all.discard(process)
        return status

    def end(self) -> None:
        """At exit."""
        for process in list(self._all):
            process.end()

    def before_fork(self) -> None:
        self._forking = self._guard.acquire(timeout=_FORK_SECONDS)

    def after_fork_in_parent(self) -> None:
        if self._forking:
            self._guard.release()

    def after_fork_in_child(self) -> None:
        for process in self._all:
            process.forget()
        self._after_fork()


def _can_start() -> bool:
    """Whether this Python can be started once more, and is nothing else."""
    name = os.path.basename(sys.executable or "")
    frozen = getattr(sys, "frozen", False) or not os.path.isfile(nvrtc.__file__)
    return bool(_PYTHON.fullmatch(name)) and not frozen


def _cpus() -> int:
    with suppress(AttributeError):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _end(status: int) -> str:
    if status >= 0:
        return f"NVRTC's process ended with status {status}"
    with suppress(ValueError):
        return f"NVRTC's process ended with {signal.Signals(-status).name}"
    return f"NVRTC's process ended with signal {-status}"


compilers = Compilers()
atexit.register(compilers.end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=compilers.before_fork,
        after_in_parent=compilers.after_fork_in_parent,
        after_in_child=compilers.after_fork_in_child,
    )


def compile_here(program: Program, library: str) -> Made:
    """In this process, with this thread deaf to the signals by which NVRTC would end it.

    OSError if the library cannot be loaded.
    """
    deaf_to = (signal.SIGINT, signal.SIGTERM)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, deaf_to)
    try:
        return Nvrtc(library).compile(program)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
