"""What a handler of a signal raises comes up in the caller, whatever swallows exceptions within."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fkjit import messages
from fkjit.jit import signals

ROOT = Path(__file__).resolve().parents[2]


class Asked(Exception):
    pass


def asks(*_: object) -> None:
    raise Asked


@pytest.fixture
def handler():
    before = signal.signal(signal.SIGTERM, asks)
    yield
    signal.signal(signal.SIGTERM, before)


def raised_within(wrapped: bool) -> bool:
    """Whether code that swallows every exception has met that of the handler."""
    try:
        signal.raise_signal(signal.SIGTERM)
    except Exception:
        return wrapped
    return False


def test_a_handler_runs_at_the_end_and_what_it_raises_comes_out(handler):
    within = []
    with pytest.raises(Asked), signals.held(), signals.held():
        within.append(raised_within(True))
        within.append("here")
    assert within == [False, "here"]
    assert signal.getsignal(signal.SIGTERM) is asks


def test_other_errors_and_threads_are_let_be(handler):
    with pytest.raises(KeyError), signals.held():
        raise KeyError
    assert signal.getsignal(signal.SIGTERM) is asks
    found = []

    def work():
        with signals.held():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [asks]  # handlers run in the main thread alone


def test_every_handler_is_there_again_whatever_one_raises_meanwhile(handler, monkeypatch):
    before, real, calls = signals._handlers(), signal.signal, []

    def interrupted(number, new):
        done = real(number, new)
        if new is asks and not calls:
            calls.append(number)
            raise Asked
        return done

    with pytest.raises(Asked), signals.held():
        monkeypatch.setattr(signal, "signal", interrupted)
    assert calls and signals._handlers() == before


def test_a_line_on_stderr_swallows_no_handlers_exception(handler, monkeypatch):
    def write(*_):
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(sys, "stderr", sys.__stderr__)
    monkeypatch.setattr(messages.os, "write", write)
    with pytest.raises(Asked):
        messages.write("a line")


# A signal whenever a folder is listed, which importlib.metadata does below a `suppress(Exception)`.
FIRST_CALL = """
import os, signal, sys
import numpy as np, fkjit
class Asked(Exception): pass
def handler(*_): raise Asked
signal.signal(signal.SIGTERM, handler)
listdir, sent = os.listdir, []
def listed(*path):
    if "cupy" in sys.modules and not sent:
        sent.append(path)
        signal.raise_signal(signal.SIGTERM)
    return listdir(*path)
os.listdir = listed
x = np.ones(6, np.float32)
try:
    fkjit.vector_add(x, x)
except Asked:
    print("asked", len(sent))
os.listdir = listdir
print(fkjit.vector_add(x, x).sum())
"""


def test_a_signal_while_cupy_is_imported_is_not_lost(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALL], cwd=ROOT, capture_output=True, text=True, timeout=120,
        env={**os.environ, "FKJIT_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.stdout == "asked 1\n12.0\n", done.stderr
