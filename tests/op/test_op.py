"""The warm path of simple ops, on CPU tensors and with a kernel that only notes its arguments."""

from __future__ import annotations

import sys
import threading

import pytest

import fkjit
from fkjit.ops.op import plan as simple_plan
from fkjit.runtime import workspace
from fkjit.runtime.device import flatten
from fkjit.runtime.interop import Pointer, view

torch = pytest.importorskip("torch", reason="needs torch")
from tests.op.plan_kit import STREAM, Kernel, driver  # noqa: E402, F401

fkjit.vector_add, fkjit.reduce_sum  # noqa: B018  imports the modules
ADD = sys.modules["fkjit.ops.elementwise.vector_add"]._OP
SUM = sys.modules["fkjit.ops.reduce.call"]._SUM


@pytest.fixture
def plan(monkeypatch, driver):  # noqa: F811
    """Make a call's plan as the first call on a GPU does; returns the kernel and the request."""
    monkeypatch.setattr(workspace, "find", lambda *_: (1 << 40, 1 << 41, None))

    def make(op, arrays, options=()):
        request = op._request(op._views(arrays), options)
        (launch,) = request.launches
        kernel = Kernel(launch.spec, launch.params)
        op.plans.remember(arrays, options, request, [kernel], op._pairs(request))
        return kernel, request

    yield make
    for op in (ADD, SUM):
        op.plans.forget()


def expected(request, kernel, **arrays):
    """Flat values as the cold path would pass them."""
    (launch,) = request.launches
    stand_ins = {n: Pointer(view(x, "test", n)) for n, x in arrays.items()}
    named = launch.spec.arguments(launch.params, launch.problem, stand_ins)
    named = {n: getattr(value, "pointer", value) for n, value in named.items()}
    return flatten(kernel.names, {"workspace": 1 << 40, "counters": 1 << 41, **named})


def test_a_second_call_launches_with_the_arguments_of_the_first(plan):
    a, b = torch.randn(6, 40)[:, :32], torch.randn(6, 32)
    kernel, request = plan(ADD, [a, b, None])
    other = torch.randn(6, 40)[:, :32]
    out = fkjit.vector_add(other, b)
    (launched,) = kernel.launches
    (one,) = request.launches
    values = expected(request, kernel, a=other, b=b, out=out)
    assert launched == (one.spec.grid(one.params, one.problem), values, STREAM)
    assert out.shape == (6, 32) and out.is_contiguous()


def test_a_given_output_is_written_and_returned(plan):
    a, b, out = (torch.randn(100) for _ in range(3))
    kernel, request = plan(ADD, [a, b, out])
    assert fkjit.vector_add(a, b, out=out) is out
    assert kernel.launches[0][1] == expected(request, kernel, a=a, b=b, out=out)


def test_kernels_get_the_memory_that_their_blocks_meet_in(plan):
    x = torch.randn(1 << 20)
    kernel, request = plan(SUM, [x, None], (None, None, False))
    assert request.counters == 1 and request.workspace >= 4 * 64
    out = fkjit.reduce_sum(x)
    assert out.shape == () and kernel.launches[0][1] == expected(request, kernel, x=x, out=out)


def test_threads_have_their_arguments_to_themselves(plan):
    """Each thread's launch reads what that thread wrote, however they take turns."""
    given = [[torch.randn(100) for _ in "ab"] for _ in range(8)]
    kernel, request = plan(ADD, [*given[0], None])
    together, outputs = threading.Barrier(len(given)), [None] * len(given)

    def run(i):
        together.wait()
        for _ in range(200):
            outputs[i] = fkjit.vector_add(*given[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    launched = {values[:2] for _, values, _ in kernel.launches}
    assert launched == {(a.data_ptr(), b.data_ptr()) for a, b in given}
    assert len(kernel.launches) == 200 * len(given)
    for (a, b), out in zip(given, outputs, strict=True):
        assert any(x[1] == expected(request, kernel, a=a, b=b, out=out) for x in kernel.launches)


def test_what_the_driver_refuses_is_explained(plan, monkeypatch):
    from fkjit.errors import LaunchError
    from fkjit.runtime import device

    def refuse(*arguments):
        raise RuntimeError("out of resources")

    monkeypatch.setattr(device._frame, "launch", refuse)
    a, b = torch.randn(100), torch.randn(100)
    plan(ADD, [a, b, None])
    with pytest.raises(LaunchError, match=r"vector_add\.rows grid=\(1, 1, 1\): out of resources"):
        fkjit.vector_add(a, b)


CHANGED = {
    "shape": lambda a: a[:64],
    "strides": lambda a: a[::2][:100],
    "dtype": lambda a: a.half(),
    "alignment": lambda a: torch.cat([a, a])[1:101],
    "subclass": lambda a: a.as_subclass(type("Mine", (torch.Tensor,), {})),
    "negated": lambda a: torch.randn(100, dtype=torch.complex64).conj().imag,
    "array": lambda a: a.numpy(),
}


@pytest.mark.parametrize("change", list(CHANGED))
def test_whatever_else_it_is_has_no_plan(plan, change):
    a, b = torch.randn(100), torch.randn(100)
    plan(ADD, [a, b, None])
    assert ADD.plans.find([a, b, None], ()) is not None
    assert ADD.plans.find([CHANGED[change](a), b, None], ()) is None
    assert ADD.plans.find([a, b, a], ()) is None
    assert ADD.plans.find([a, b, None], (1,)) is None


def test_overlaps_that_were_not_checked_go_the_long_way(plan):
    x = torch.randn(4096)
    plan(ADD, [x[1024:2048], x[2048:3072], x[:1024]])
    assert ADD.plans.find([x[1024:2048], x[3072:], x[2048:3072]], ()) is not None
    assert ADD.plans.find([x[1024:2048], x[3072:], x[512:1536]], ()) is None
    assert ADD.plans.find([x[1024:2048], x[3072:], x[1024:2048]], ()) is None
    plan(ADD, [x[1024:2048], x[2048:3072], x[1024:2048]])  # in place: was looked at now
    assert ADD.plans.find([x[:1024], x[3072:], x[:1024]], ()) is not None


def test_what_requires_grad_has_a_plan_only_without_autograd(plan):
    w, x = torch.nn.Parameter(torch.randn(50)), torch.randn(50)
    with torch.no_grad():
        plan(ADD, [x, w, None])
        assert ADD.plans.find([x, w, None], ()) is not None
    assert ADD.plans.find([x, w, None], ()) is None
    assert ADD.plans.find([x, x.clone(), None], ()) is None


def test_there_are_only_so_many_plans(plan, monkeypatch):
    monkeypatch.setattr(simple_plan, "MAX_PLANS", 3)
    for n in range(10, 15):
        plan(ADD, [torch.randn(n), torch.randn(n), None])
        assert 1 <= len(ADD.plans.known) <= 3
