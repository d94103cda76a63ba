"""Threads and forked processes, as far as they can be had without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import fkjit
from fkjit.errors import DeviceError
from fkjit.jit.build import quiet
from fkjit.ops.op.plan import Plan, Plans
from fkjit.runtime import interop

FORKED = """
import os
import numpy as np, fkjit
x = np.ones(100, np.float32)
fkjit.vector_add(x, x)
child = os.fork()
if child == 0:
    os._exit(0 if (fkjit.reduce_sum(fkjit.vector_add(x, x)) == 200).all() else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_a_forked_process_interprets_as_its_parent_does():
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("used", [False, True])
def test_a_forked_process_is_told_why_it_cannot_use_the_gpu(monkeypatch, used):
    torch = pytest.importorskip("torch", reason="needs torch")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used)
    monkeypatch.setattr(interop, "_forked", False)
    interop._before_fork()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # as torch says in the child
    interop._after_fork()
    there = SimpleNamespace(device=3)
    monkeypatch.setattr(interop, "_view", lambda *_: there)
    if not used:
        assert interop.view(None, "test", "x") is there
        return
    with pytest.raises(DeviceError, match="test: x is on cuda:3, but this process was forked"):
        interop.view(None, "test", "x")


def test_a_forked_process_has_no_plans():
    """In the child each call is checked again."""
    plans = Plans("test", ("a",))
    plans.young["key"] = plans.last["options"] = None  # type: ignore[assignment]
    child = os.fork()
    if child == 0:
        os._exit(len(plans.known) + len(plans.last))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and len(plans.known) == 1


def test_threads_make_their_first_calls_at_once():
    """Of the same variant and of others, eight at a time."""
    given = [np.ones((n, 40), "f2" if n % 2 else "f4") for n in range(1, 9)]
    made, start = [None] * 8, threading.Barrier(8)

    def run(i):
        start.wait()
        made[i] = fkjit.vector_add(given[i], given[i]), fkjit.rms_norm(given[i])

    with quiet():
        threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for (added, normed), x in zip(made, given, strict=True):
        assert np.array_equal(added, 2 * x) and np.allclose(normed, 1, atol=1e-3)


def test_other_threads_see_a_plan_when_it_is_whole(monkeypatch):
    """Not before it knows which arrays may overlap."""
    torch = pytest.importorskip("torch", reason="needs torch")
    plans, seen = Plans("test", ("a", "b")), []
    monkeypatch.setattr(Plan, "__init__", lambda *_: None)
    monkeypatch.setattr(Plan, "allow", lambda *_: seen.append(plans.known))
    request = SimpleNamespace(like=SimpleNamespace(kind="torch"))
    plans.store([torch.ones(3), None], (), request, (), ())  # type: ignore[arg-type]
    assert seen == [[]] and len(plans.known) == 1
