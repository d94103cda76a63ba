"""Worker processes: one a page that is at work, one spare that has everything imported.

An edit ends the page's job: its worker is killed with all that it has started, unless the job is
over, and the spare takes its place. So is a job past the time limit.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fkjit.cache.disk import default_directory
from fkjit.playground.catalog import write_scaffold
from fkjit.settings import Settings

SECONDS = 60.0  # of a job
PAGES = 4  # that have a worker
_CACHE_BYTES = 128 << 20
_CHILD = "import sys; sys.path[:] = {path!r}; from fkjit.playground.worker import main; main()"
_LATE = "the time limit of {:g} s is over: an endless loop, or a problem that is too large"
_DIED = "the worker process ended: out of memory, or a crash; the next edit starts another"


class Worker:
    """One process."""

    def __init__(self, folders: Sequence[Path], temporary: Path) -> None:
        """`folders`: of kernels, beside those of the user's FKJIT_KERNEL_PATH. `temporary`: for
        what it leaves, such as the sources that NVRTC has refused."""
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD.format(path=sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(folders) | {"TMPDIR": str(temporary)},
            start_new_session=True,
        )
        self._ended = threading.Lock()
        self.late = self.killed = False
        self.busy = False

    def work(self, asked: Any, seconds: float) -> Iterator[dict[str, Any]]:
        """The events of one request, "end" or an error last."""
        timer = threading.Timer(seconds, self._time_is_over)
        timer.daemon = True
        timer.start()
        try:
            yield from self._events(asked)
        finally:
            timer.cancel()

    def _events(self, asked: Any) -> Iterator[dict[str, Any]]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        with suppress(OSError, ValueError):
            stdin.write(json.dumps(asked).encode() + b"\n")
            stdin.flush()
            for line in stdout:
                event = json.loads(line)
                if event["event"] == "end":
                    self.busy = False
                if event["event"] != "ready":
                    yield event
                if not self.busy:
                    return
        yield {
            "event": "stopped",
            "why": "late" if self.late else "killed" if self.killed else "died",
        }

    def _time_is_over(self) -> None:
        self.late = True
        self.kill()

    def kill(self) -> None:
        """End it and what it has started."""
        with self._ended:
            self.killed = True
            if self._process.poll() is None:
                with suppress(OSError):
                    os.kill(self._process.pid, signal.SIGSTOP)  # it starts no other meanwhile
                children = _descendants(self._process.pid)
                self._process.kill()
                self._process.wait()
                for pid in children:
                    with suppress(OSError):
                        os.kill(pid, signal.SIGKILL)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None


class Jobs:
    """The workers of all pages."""

    def __init__(self, folder: Path, seconds: float = SECONDS, gpu: bool = False) -> None:
        """`folder`: of saved kernels, which workers load as well. `gpu`: whether to time on it."""
        self.folder, self.seconds, self.gpu = folder, seconds, gpu
        self._temporary = tempfile.TemporaryDirectory(prefix="fkjit-playground-")
        self._scaffold = write_scaffold(Path(self._temporary.name))
        self._lock = threading.Lock()
        self._pages: OrderedDict[str, Worker] = OrderedDict()  # the latest last
        self._spare: Worker | None = None
        self._closed = False

    def kernel_folders(self) -> list[Path]:
        """The new kernel's, and that of saved ones once it is there."""
        return [self._scaffold, *([self.folder] if self.folder.is_dir() else [])]

    def _worker(self) -> Worker:
        return Worker(self.kernel_folders(), Path(self._temporary.name))

    def prepare(self) -> None:
        """Have a worker ready."""
        with self._lock:
            if not self._closed and (self._spare is None or not self._spare.alive):
                self._spare = self._worker()

    def run(self, page: str, asked: dict[str, Any]) -> Iterator[str]:
        """The events of one request as server-sent events. What the page had under way is ended."""
        worker = self._take(page)
        for event in worker.work({**asked, "gpu": self.gpu}, self.seconds):
            yield _sse(self._told(event))

    def stop(self, page: str) -> None:
        """End what a page has under way."""
        with self._lock:
            worker = self._pages.get(page)
            if worker is not None and worker.busy:
                self._drop(page)
        self.prepare()

    def restart(self) -> None:
        """New processes, which find what has been saved."""
        with self._lock:
            self._end_all()
        self.prepare()

    def close(self) -> None:
        """End all."""
        with self._lock:
            self._closed = True
            self._end_all()
        self._temporary.cleanup()

    def _end_all(self) -> None:
        for page in list(self._pages):
            self._drop(page)
        if self._spare is not None:
            self._spare.kill()
            self._spare = None

    def _take(self, page: str) -> Worker:
        with self._lock:
            worker = self._pages.get(page)
            if worker is not None and (worker.busy or not worker.alive):
                self._drop(page)
                worker = None
            if worker is None:
                worker, self._spare = self._spare or self._worker(), None
                if not worker.alive:
                    worker = self._worker()
            worker.busy = True
            self._pages[page] = worker
            self._pages.move_to_end(page)
            while len(self._pages) > PAGES:
                self._drop(next(iter(self._pages)))
        self.prepare()
        return worker

    def _drop(self, page: str) -> None:
        self._pages.pop(page).kill()

    def _told(self, event: dict[str, Any]) -> dict[str, Any]:
        """Why a worker stopped, as an error of the page's; an edit that killed it is none."""
        why = event.get("why")
        if event["event"] != "stopped" or why == "killed":
            return event
        text = _LATE.format(self.seconds) if why == "late" else _DIED
        return {"event": "error", "which": "a", "stage": "time limit", "text": text, "marks": []}


def _sse(event: dict[str, Any]) -> str:
    return f"data: {json.dumps(event)}\n\n"


def _environment(folders: Sequence[Path]) -> dict[str, str]:
    """A cache of the playground's own beside the user's, so that no edit drops a kernel of theirs;
    saved kernels; no setting that would change what the page asks for."""
    made = {name: value for name, value in os.environ.items() if not name.startswith("FKJIT_")}
    kept = ("FKJIT_KERNEL_PATH", "FKJIT_INTERPRETER_LIMIT")
    made |= {name: os.environ[name] for name in kept if name in os.environ}
    paths = [made.get(kept[0], ""), *map(str, folders)]
    made[kept[0]] = os.pathsep.join(path for path in paths if path)
    cache = default_directory()
    if cache is not None:
        made[Settings.variable("cache_dir")] = str(cache.parent / "playground")
    made[Settings.variable("cache_size")] = str(_CACHE_BYTES)
    made[Settings.variable("log")] = "quiet"
    for library in ("OPENBLAS", "OMP", "MKL"):  # each thread's buffers count as memory
        made.setdefault(f"{library}_NUM_THREADS", str(min(4, os.cpu_count() or 1)))
    return made


def _descendants(pid: int) -> list[int]:
    """Processes that a process has started, and those that they have (Linux)."""
    found: list[int] = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError, ValueError):
            for child in map(int, tasks.read_text().split()):
                found += [child, *_descendants(child)]
    return found
