"""`fkjit.warm`: compile every variant into the cache ahead of time. Needs no GPU."""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from fkjit import ops as _ops
from fkjit import warm_calls
from fkjit.api import prepare
from fkjit.arch import DEFAULT_ARCHS, Target, target
from fkjit.arguments import shown, whole
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.jit.build import gpu_target, interpreter_target
from fkjit.jit.compiler import compilers
from fkjit.runtime.abstract import taking
from fkjit.runtime.gpus import gpus
from fkjit.spec import KernelSpec, Params, registered
from fkjit.warm_worker import Job, Outcome, job_of

COMMON, ALL = "common", "all"  # in place of names of ops
# Seconds that NVRTC takes for a variant on one core, by the beginning of the op's name.
_SECONDS = {"attention": 0.9, "decode": 1.2, "linear": 0.45, "moe_route_and": 0.7}
_SECONDS_ELSE = 0.17
_CHILD = "import sys; sys.path[:] = {path!r}; from fkjit.warm_worker import main; main({limit!r})"


@dataclass
class Warmed:
    """What `warm` did. `seconds` is the wall clock's."""

    total: int = 0
    compiled: int = 0
    present: int = 0  # in the cache or a bundle already
    seconds: float = 0.0
    failed: list[tuple[str, str]] = field(default_factory=list)  # (variant, error)
    problems: list[tuple[str, str]] = field(default_factory=list)  # (variant, spill or warning)
    unsaved: int = 0  # compiled, but no file could be written

    def add(self, outcome: Outcome) -> None:
        """Count one variant."""
        label = outcome.job.label
        self.compiled += outcome.origin == "compiled"
        self.present += outcome.origin in ("disk", "bundle", "memory")
        self.unsaved += outcome.origin == "compiled" and not outcome.stored
        self.problems += [(label, problem) for problem in outcome.problems]
        if outcome.origin == "failed":
            self.failed.append((label, outcome.error))


def warm(
    *ops: str,
    arch: str | Iterable[str] | None = None,
    jobs: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Warmed:
    """Compile every legal variant of some kernels into the cache; those already there are skipped.

    Args:
        ops: public calls ("reduce_sum"), ops ("attention") or kernels ("attention.flash"), or
            "common": what inference takes by default, in bf16 and fp16 at head dimensions 64 and
            128. Default, and "all": every registered kernel.
        arch: targets such as "sm_90a", a list of them, or "all" (arch.DEFAULT_ARCHS). Default: the
            GPUs of this machine; without one, the target of the CPU interpreter.
        jobs: processes, default one for each CPU this process may use.
        progress: called with (variants done, of how many, the last one) as they finish.

    Returns counts, and each failed variant with its error: one failure does not stop the others.
    An interrupt (Ctrl-C) keeps what is done and is raised on. ParameterError for unknown names.
    """
    for name in ops:
        if not isinstance(name, str):
            raise ArgumentTypeError(f"warm: ops: {shown(name)} is not the name of a call or kernel")
    if progress is not None and not callable(progress):
        raise ArgumentTypeError(f"warm: progress={shown(progress)} cannot be called")
    return compile_jobs(plan(ops, arch), jobs, progress)


def compile_jobs(
    work: list[Job],
    jobs: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Warmed:
    """As `warm`, of variants that were chosen before."""
    begin = time.perf_counter()
    done = Warmed(total=len(work))
    for count, outcome in enumerate(_run(work, processes(jobs, len(work))), start=1):
        done.add(outcome)
        if progress is not None:
            progress(count, len(work), outcome.job.label)
    done.seconds = time.perf_counter() - begin
    return done


def plan(ops: Iterable[str] = (), arch: str | Iterable[str] | None = None) -> list[Job]:
    """The variants `warm` would compile: those of kernels in the order of the registry."""
    names, targets = list(ops), [target(name) for name in chosen_targets(arch)]
    found: list[Job] = []
    if COMMON in names:
        found = planned(warm_calls.common(), [to.name for to in targets])
    rest = [name for name in names if name != COMMON]
    specs = chosen_specs(() if ALL in rest else rest) if rest or not names else []
    every = (
        job_of(s, params, to) for to in targets for s in specs for params in s.variants(to.arch)
    )
    done = {job.label for job in found}
    return found + [job for job in every if job.label not in done]


def planned(
    calls: Iterable[warm_calls.Call], targets: Iterable[str],
    prepare: Callable[..., None] = prepare, strict: bool = False,
) -> list[Job]:  # fmt: skip
    """The variants that calls take, each once. Calls that a target has no kernel for are left out;
    ParameterError where no call is left, strict: where one is left out. prepare: `fkjit.prepare`,
    or one that knows more calls."""
    found: dict[str, Job] = {}
    last: ParameterError | None = None

    def take(spec: KernelSpec, params: Params, to: Target) -> None:
        job = job_of(spec, params, to)
        found.setdefault(job.label, job)

    asked = list(calls)
    for name in targets:
        for call in asked:
            try:
                with taking(take):
                    prepare(call.op, *call.args, arch=name, **call.options)
            except ParameterError as error:
                last = error
    if last is not None and (strict or not found):
        raise last
    return list(found.values())


def estimate(work: Iterable[Job], processes: int) -> float:
    """About how many seconds it takes to compile these, none of which is in the cache."""
    return sum(map(_seconds, work)) / processes


def _seconds(job: Job) -> float:
    family = next((name for name in _SECONDS if job.op.startswith(name)), "")
    return _SECONDS.get(family, _SECONDS_ELSE)


def chosen_specs(names: Iterable[str]) -> list[KernelSpec]:
    """What calls, ops and full names of kernels mean, in the registry's order; all for none."""
    _ops.load()
    wanted = [spec for name in names for spec in _ops.kernels("warm", name)]
    return [spec for spec in registered() if not wanted or spec in wanted]


def chosen_targets(arch: str | Iterable[str] | None) -> list[str]:
    """Target names out of `warm`'s argument, each once."""
    if arch is None:
        found, _ = gpus()
        names = [gpu_target(gpu.capability).name for gpu in found]
        return list(dict.fromkeys(names)) or [interpreter_target().name]
    try:
        given = arch.split(",") if isinstance(arch, str) else list(arch)
    except Exception:  # an array's own, too
        given = []
    if not given or not all(isinstance(part, str) for part in given):
        raise ArgumentTypeError(f"warm: arch={shown(arch)} is not a list of names such as sm_90a")
    names = [part.strip() for part in given if part.strip()]
    if not names:
        raise ParameterError(f'warm: arch={arch!r} names no target; sm_90a is one, or "all"')
    names = [name for part in names for name in (DEFAULT_ARCHS if part == "all" else (part,))]
    try:
        return list(dict.fromkeys(target(name).name for name in names))
    except ParameterError as error:
        raise ParameterError(f"warm: arch: {error}") from None


def processes(jobs: int | None, work: int) -> int:
    """How many compile so many variants: `jobs`, or one for each CPU this process may use."""
    jobs = None if jobs is None else whole("warm", "jobs", jobs, 1)
    with suppress(AttributeError):
        return max(1, min(jobs or len(os.sched_getaffinity(0)), work))
    return max(1, min(jobs or os.cpu_count() or 1, work))


def _run(work: list[Job], processes: int) -> Iterator[Outcome]:
    """Outcomes as they come, from `processes` workers that take the next job when they are free."""
    todo: queue.SimpleQueue[Job] = queue.SimpleQueue()
    done: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    for job in work:
        todo.put(job)
    workers = [_Worker(todo, done) for _ in range(processes if work else 0)]
    try:
        for _ in work:
            yield done.get()
    finally:
        for worker in workers:
            worker.stop()


class _Worker:
    """A thread that feeds one process; a process that dies fails its job and is replaced."""

    def __init__(self, todo: queue.SimpleQueue[Job], done: queue.SimpleQueue[Outcome]) -> None:
        self._todo, self._done, self._stopped = todo, done, False
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._feed, daemon=True)
        self._thread.start()

    def _feed(self) -> None:
        while not self._stopped:
            try:
                job = self._todo.get_nowait()
            except queue.Empty:
                return
            self._done.put(self._do(job))

    def _do(self, job: Job) -> Outcome:
        try:
            process = self._process = self._process or _start()
            assert process.stdin is not None and process.stdout is not None
            pickle.dump(job, process.stdin)
            process.stdin.flush()
            return pickle.load(process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            died, self._process = self._process, None
            return Outcome(job, "failed", error=f"its process ended with status {_end(died)}")
        except Exception as error:  # a job that cannot be pickled
            return Outcome(job, "failed", error=f"cannot be sent to a process: {error}")

    def stop(self) -> None:
        """End the process; entries are written atomically, so a kill loses only work under way."""
        self._stopped = True
        process = self._process
        if process is not None:
            process.kill()
        self._thread.join(timeout=10)
        _end(process)


def _end(process: subprocess.Popen[bytes] | None) -> int | None:
    """Wait for a process that is dead or dying, and close its pipes: its exit status."""
    if process is None:
        return None
    for stream in (process.stdin, process.stdout):
        with suppress(OSError):
            if stream is not None:
                stream.close()
    return process.wait()


def _start() -> subprocess.Popen[bytes]:
    """A worker with this process's import path, out of reach of the terminal's Ctrl-C."""
    return subprocess.Popen(
        [sys.executable, "-c", _CHILD.format(path=sys.path, limit=compilers.timeout)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
