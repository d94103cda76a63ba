"""Threads, streams, forked processes and several GPUs: what a serving process has of each."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

import fkjit
from fkjit.jit.build import quiet
from fkjit.ops.op.op import Op
from fkjit.runtime import device

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("cupy", reason="needs CuPy")
from tests.op.operator_cases import CASES  # noqa: E402
from tests.op.test_operators_all import outputs  # noqa: E402

THREADS = 8


def forget():
    """As in a process that has called nothing yet, but for the cache on the disk."""
    device.forget()
    for name, module in list(sys.modules.items()):
        for op in vars(module).values() if name.startswith("fkjit.ops.") else ():
            if isinstance(op, Op):
                op.plans.forget()


def together(work):
    """work(i) in THREADS threads that begin at once, each on a stream of its own."""
    start, failed = threading.Barrier(THREADS), []

    def run(i):
        try:
            with torch.cuda.stream(torch.cuda.Stream()), quiet():
                start.wait()
                work(i)
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("cached", [False, True])
def test_threads_make_their_first_calls_at_once(alike, cached, monkeypatch, tmp_path):
    """The same variant in all of them, and another one in each; compiled, or from the disk."""
    from fkjit.settings import settings

    if not cached:
        monkeypatch.setenv("FKJIT_CACHE_DIR", str(tmp_path))
        settings.cache_clear()
    dims = [64 if alike else 32 + 16 * i for i in range(THREADS)]
    given = [[torch.randn(2, 4, 200, d, device="cuda").half() for _ in "qkv"] for d in dims]
    made = [None] * THREADS

    def work(i):
        for _ in range(20):
            o = fkjit.attention(*given[i], causal=True)
            made[i] = fkjit.vector_add(o, o), fkjit.rms_norm(o), fkjit.reduce_sum(o, -1)

    torch.cuda.synchronize()
    forget()
    together(work)
    monkeypatch.undo()
    settings.cache_clear()
    for one, (q, k, v) in zip(made, given, strict=True):
        o = fkjit.attention(q, k, v, causal=True)
        expected = o + o, fkjit.rms_norm(o), fkjit.reduce_sum(o, -1)
        assert all(torch.equal(x, y) for x, y in zip(one, expected, strict=True))


def test_threads_call_every_op_at_once():
    with quiet():
        given = [case.inputs("cuda") for case in CASES]
        expected = [
            outputs(case.call(*[x.clone() for x in inputs]))
            for case, inputs in zip(CASES, given, strict=True)
        ]
        torch.cuda.synchronize()
        forget()

        def work(i):
            for step in range(len(CASES)):
                at = (step + 3 * i) % len(CASES)
                mine = [x.clone() for x in given[at]]
                for one, two in zip(outputs(CASES[at].call(*mine)), expected[at], strict=True):
                    assert torch.equal(one, two), CASES[at].name

        together(work)


FORKED = """
import os, sys
import numpy as np, torch, fkjit
if sys.argv[1] == "torch":
    x = torch.ones(100, device="cuda")
else:
    import cupy
    x = cupy.ones(100, "f4")
if sys.argv[2] == "used":
    fkjit.vector_add(x, x)
child = os.fork()
if child == 0:
    here = np.ones(100, np.float32)
    assert (fkjit.vector_add(here, here) == 2).all()
    try:
        fkjit.vector_add(x, x)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
        os._exit(0 if "spawn" in str(error) else 3)
    os._exit(4)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert float(fkjit.vector_add(x, x).sum()) == 200
"""


@pytest.mark.parametrize("framework", ["torch", "cupy"])
def test_a_forked_process_is_told_why_it_cannot_use_the_gpu(framework):
    """On the CPU it works; the parent goes on."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED, framework, "used"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout, done.stderr)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_another_gpu_than_the_current_one(case):
    with quiet():
        inputs = case.inputs("cuda:0")
        there = [x.to("cuda:1") for x in inputs]
        expected = outputs(case.call(*inputs))
        for _ in range(2):
            again = [x.clone() for x in there]
            made = outputs(case.call(*again))
            assert torch.cuda.current_device() == 0
            for one, two in zip(made, expected, strict=True):
                assert one.device.index == 1 and torch.equal(one.cpu(), two.cpu())
