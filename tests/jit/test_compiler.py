"""Compiling must not endanger the process: signals, forks, crashes, processes that cannot be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

import fkjit
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.jit.compiler import compilers

ROOT = Path(__file__).resolve().parents[2]

# Every child begins with this: `compile_new()` compiles a kernel that no cache has.
PRELUDE = """
import itertools, os, random, signal, sys, threading, time
from contextlib import suppress
from pathlib import Path
from fkjit.arch import target
from fkjit.cache.lookup import Cache
from fkjit.jit.build import build_source
from fkjit.jit.compiler import compilers
from fkjit.jit.render import Rendered
TEXT = '''#include <cuda_fp16.h>
extern "C" __global__ void k(int* out) { *out = %s; }
'''
numbers, nothing = itertools.count(os.getpid() << 8), Cache(None)
def compile_new(text=TEXT, **values):
    rendered = Rendered("kernels_cu/k.cu", text % next(numbers), {}, Path("k.cu"))
    what = {"kernel": "test.k", "label": "", "params": {}}
    return build_source(rendered, "k", target("sm_80"), what, nothing)
def helpers():
    return [process._process.pid for process in compilers._all]
"""


def python(
    body: str, *arguments: object, rc: int = 0, stderr: Any = subprocess.PIPE, **settings: object
) -> str:
    """What a child that ran PRELUDE and `body` printed. settings: log="quiet" is FKJIT_LOG."""
    code = PRELUDE + textwrap.dedent(body)
    environ = {"FKJIT_LOG": settings.get("log"), "FKJIT_CACHE_DIR": settings.get("cache")}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=300,
        env={**os.environ, **{name: str(value) for name, value in environ.items() if value}},
    )  # fmt: skip
    assert done.returncode == rc, (done.returncode, done.stdout, done.stderr)
    return done.stdout


INTERRUPTED = """
number, most = getattr(signal, sys.argv[1]), int(sys.argv[2])
class Asked(Exception): pass
def handler(*_): raise Asked
if number == signal.SIGTERM:
    signal.signal(number, handler)
Raised = Asked if number == signal.SIGTERM else KeyboardInterrupt
compile_new()
late, sent = [], 0.0
def send(delay):
    global sent
    time.sleep(delay)
    sent = time.perf_counter()
    os.kill(os.getpid(), number)
for at in range(most):
    thread = threading.Thread(target=send, args=(random.Random(at).uniform(0.001, 0.06),))
    thread.start()
    try:
        while True:
            compile_new()
    except Raised:
        late.append(time.perf_counter() - sent)
    thread.join()
assert compile_new().image
print(len(late), max(late))
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_while_nvrtc_works_is_an_exception_of_ours(name, every_variant):
    most = 100 if every_variant else 4
    count, latest = python(INTERRUPTED, name, most).split()
    assert int(count) == most and float(latest) < 2


FORKED = """
compile_new()
stop = threading.Event()
def work():
    while not stop.is_set():
        compile_new()
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads: thread.start()
stuck = []
for at in range(int(sys.argv[1])):
    time.sleep(random.Random(at).uniform(0, 0.03))
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a deadlock
        os._exit(0 if compile_new().image and len(helpers()) == 1 else 3)
    stuck.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
stop.set()
for thread in threads: thread.join()
print(len(stuck), sum(map(bool, stuck)), set(stuck))
"""


def test_a_child_forked_in_the_middle_of_a_compile_compiles(every_variant):
    most = 200 if every_variant else 5
    assert python(FORKED, most).split()[:2] == [str(most), "0"]


@pytest.mark.parametrize("how", ["SIGSEGV", "SIGKILL"])
def test_a_compiler_that_crashes_is_a_typed_error_and_the_next_compile_works(how):
    said = python(
        """
        from fkjit.errors import CompilerStoppedError
        compile_new()
        met = threading.Event()
        def kill():
            while not met.wait(0.05):  # until one of these comes while it compiles
                for pid in helpers():
                    with suppress(ProcessLookupError): os.kill(pid, getattr(signal, sys.argv[1]))
        thread = threading.Thread(target=kill)
        thread.start()
        try:
            while True: compile_new()
        except CompilerStoppedError as error: print(error)
        met.set()
        thread.join()
        compile_new()
        os.kill(helpers()[0], signal.SIGKILL)  # while nobody uses it
        time.sleep(0.05)
        compile_new()
        print(len(helpers()))
        """,
        how,
    )
    died = f"test.k sm_80: NVRTC's process ended with {how} while it compiled this kernel"
    assert said.splitlines() == [died, "1"]


LATE = """
import fkjit, fkjit.jit.compiler as compiler
from fkjit.errors import CompilerStoppedError
compile_new()
compiler.SLOW_SECONDS = 0.1
print(fkjit.compile_timeout(0.4))
os.kill(helpers()[0], signal.SIGSTOP)  # in the middle of a compile, or before it reads a program
try: compile_new(TEXT + "//" + "x" * int(sys.argv[1]))
except CompilerStoppedError as error: print(error)
print(fkjit.compile_timeout(None), len(helpers()))
compile_new()
"""


@pytest.mark.parametrize("length", [10, 1 << 20])
def test_a_compiler_that_hangs_is_a_status_line_and_a_typed_error(length, tmp_path):
    with (tmp_path / "stderr").open("w+") as stderr:
        said = python(LATE, length, stderr=stderr, log="normal")
        stderr.seek(0)
        lines = stderr.read().splitlines()
    late = "test.k sm_80: NVRTC was not done with this kernel after 0.4 s; fkjit.compile_timeout"
    assert said.splitlines() == ["600.0", f"{late}(seconds) sets that limit", "0.4 0"]
    assert lines[1] == "fkjit: compiling test.k sm_80 ... still running ... failed"
    assert len(lines) == 3 and lines[2].endswith(" ms")


def test_an_error_of_a_signals_handler_is_not_taken_for_the_end_of_the_compiler():
    body = """
        def late(*_): raise TimeoutError
        signal.signal(signal.SIGALRM, late)
        compile_new()
        for _ in range(20):  # until it comes while a compile is under way, not between two
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            try:
                while True: compile_new()
            except TimeoutError: pass
            if not helpers(): break
        print(len(helpers()))
        """
    assert python(body) == "0\n"


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), 1e300, "9", [1], True])
def test_a_time_limit_that_is_none(seconds):
    with pytest.raises((ParameterError, ArgumentTypeError), match=r"compile_timeout: seconds="):
        fkjit.compile_timeout(seconds)
    assert compilers.timeout == 600


PARALLEL = """
import fkjit
together, compile_one = threading.Barrier(3, timeout=60), compilers.compile
def at_once(*args):
    together.wait()  # each begins before another one ends
    return compile_one(*args)
compilers.compile = at_once
x = "bf16[1, 2, 64, 64]"
fkjit.prepare("attention_backward", x, x, x, x, x, "fp32[1, 2, 64]", arch="sm_80")
"""


def test_prepare_compiles_the_kernels_of_a_call_at_the_same_time(tmp_path):
    with (tmp_path / "stderr").open("w+") as stderr:
        python(PARALLEL, stderr=stderr, log="normal", cache=tmp_path / "cache")
        stderr.seek(0)
        lines = stderr.read().splitlines()
    assert len([line for line in lines if line.endswith(" ms")]) == 3, lines
    assert all(line.startswith("fkjit: compiling attention_backward.") for line in lines)


def test_prepare_raises_what_one_of_the_compiles_raises(tmp_path):
    body = """
        from fkjit.errors import CompilerStoppedError
        fkjit.compile_timeout(1e-3)
        try: fkjit.prepare("attention_backward", x, x, x, x, x, "fp32[1, 2, 64]", arch="sm_80")
        except CompilerStoppedError as error: print("attention_backward." in str(error))
        """
    start = 'import fkjit\nx = "bf16[1, 2, 64, 64]"\n' + textwrap.dedent(body)
    assert python(start, cache=tmp_path) == "True\n"


CANNOT = """
from unittest import mock
from fkjit.jit import compiler
def ways():
    yield mock.patch.object(sys, "frozen", True, create=True)
    for name in ("/usr/bin/blender", "", None, "/tmp/python"):
        yield mock.patch.object(sys, "executable", name)
    yield mock.patch.object(compiler.nvrtc, "__file__", "/dev/null")  # as in an archive
    yield mock.patch.object(compiler.nvrtc, "__file__", os.__file__)  # it ends at once
    for name in ("_pipe", "subprocess.Popen"):
        yield mock.patch(f"fkjit.jit.compiler.{name}", side_effect=OSError)
for way in ways():
    with way:
        compilers.__init__()
        assert compile_new().image and not helpers(), way.attribute
"""


def test_without_a_process_nvrtc_runs_in_this_one():
    python(CANNOT)


def test_standard_descriptors_may_be_closed():
    """Then pipes get their numbers, unless they are moved."""
    body = """
        fd = os.dup(1)
        for number in (0, 1, 2): os.close(number)
        for _ in range(2): assert compile_new().image
        ends = [(p._to, p._from) for p in compilers._all]
        os.write(fd, str(min(ends[0]) > 2 and len(ends)).encode())
        """
    assert python(body) == "1"


def test_a_process_ends_with_its_parent_and_leaves_no_zombie():
    body = """
        compile_new()
        def again():
            while True: compile_new()
        for _ in range(2): threading.Thread(target=again, daemon=True).start()
        time.sleep(0.1)
        print(*helpers(), flush=True)
        {}
        """
    for end in ("sys.exit()", "os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)"):
        code = 0 if "exit" in end else -signal.SIGKILL
        for pid in python(body.format(end), rc=code).split():
            assert _gone(int(pid)), end


def _gone(pid: int) -> bool:
    for _ in range(200):
        try:
            os.kill(pid, 0)
            state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
            if state == "Z" and parent == "1":  # an init that collects nobody's children
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


def test_an_idle_process_gives_its_memory_back_and_stays(tmp_path):
    body = """
        import fkjit.jit.nvrtc as n
        from fkjit.jit import compiler
        short = Path(sys.argv[1], "nvrtc.py")
        short.write_text(Path(n.__file__).read_text().replace("SECONDS = 30", "SECONDS = 0.2"))
        n.__file__ = str(short)
        compile_new()
        size = lambda: int(Path(f"/proc/{helpers()[0]}/statm").read_text().split()[1])
        before, pid = size(), helpers()
        while size() > before / 2: time.sleep(0.02)
        for _ in range(3):
            compile_new()
            time.sleep(0.4)
        print(helpers() == pid)
        """
    assert python(body, tmp_path) == "True\n"


def test_as_many_processes_as_threads_compile_but_no_more_than_cpus():
    body = """
        start = threading.Barrier(6)
        def run():
            start.wait()
            compile_new()
        threads = [threading.Thread(target=run) for _ in range(6)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(1 <= len(helpers()) <= len(os.sched_getaffinity(0)))
        """
    assert python(body) == "True\n"
