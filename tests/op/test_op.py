"""The warm path of simple ops, on CPU tensors and with a kernel that only notes its arguments."""

from __future__ import annotations

import sys
import threading

import pytest

import fkjit
from fkjit.errors import LaunchError
from fkjit.ops.op import plan as plans
from fkjit.runtime import device, workspace
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
        op.plans.store(arrays, options, request, [kernel], op._pairs(request))
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


@pytest.mark.parametrize("captures", [False, True])
def test_a_plan_asks_whether_a_graph_is_captured(plan, monkeypatch, captures):
    monkeypatch.setattr(Kernel, "dependent", True)
    monkeypatch.setattr(device._frame, "captures", captures)
    a, b = torch.randn(6, 32), torch.randn(6, 32)
    kernel, request = plan(ADD, [a, b, None])
    out = fkjit.vector_add(a, b)
    assert device._frame.dependent == captures
    assert [values for _, values, _ in kernel.launches] == [
        expected(request, kernel, a=a, b=b, out=out)
    ]


def test_what_the_driver_refuses_is_a_launch_error(plan, monkeypatch):
    def refuse(*arguments):
        raise RuntimeError("no")

    monkeypatch.setattr(device._frame, "launch", refuse)
    a, b = torch.randn(6, 32), torch.randn(6, 32)
    plan(ADD, [a, b, None])
    with pytest.raises(LaunchError, match="no"):
        fkjit.vector_add(a, b)


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
    assert ADD.plans.lookup([a, b, None], ()) is not None
    assert ADD.plans.lookup([CHANGED[change](a), b, None], ()) is None
    assert ADD.plans.lookup([a, b, a], ()) is None
    assert ADD.plans.lookup([a, b, None], (1,)) is None


def test_overlaps_that_were_not_checked_go_the_long_way(plan):
    x = torch.randn(4096)
    plan(ADD, [x[1024:2048], x[2048:3072], x[:1024]])
    assert ADD.plans.lookup([x[1024:2048], x[3072:], x[2048:3072]], ()) is not None
    assert ADD.plans.lookup([x[1024:2048], x[3072:], x[512:1536]], ()) is None
    assert ADD.plans.lookup([x[1024:2048], x[3072:], x[1024:2048]], ()) is None
    plan(ADD, [x[1024:2048], x[2048:3072], x[1024:2048]])  # in place: was looked at now
    assert ADD.plans.lookup([x[:1024], x[3072:], x[:1024]], ()) is not None


def test_what_requires_grad_has_a_plan_only_without_autograd(plan):
    w, x = torch.nn.Parameter(torch.randn(50)), torch.randn(50)
    with torch.no_grad():
        plan(ADD, [x, w, None])
        assert ADD.plans.lookup([x, w, None], ()) is not None
    assert ADD.plans.lookup([x, w, None], ()) is None
    assert ADD.plans.lookup([x, x.clone(), None], ()) is None


def test_there_are_only_so_many_plans_and_those_in_use_stay(plan, monkeypatch):
    monkeypatch.setattr(plans, "MAX_PLANS", 3)
    often = [torch.randn(5), torch.randn(5), None]
    plan(ADD, often)
    for n in range(10, 30):
        plan(ADD, [torch.randn(n), torch.randn(n), None])
        assert 1 <= len(ADD.plans.known) <= 6
        assert ADD.plans.lookup(often, ()) is not None
    assert ADD.plans.lookup([torch.randn(10), torch.randn(10), None], ()) is None


def test_a_plan_is_made_for_what_is_met_again(monkeypatch):
    def meet(n):
        return ADD.plans.meet(ADD.plans.sight([torch.zeros(n), torch.zeros(n), None])[1], ())

    ADD.plans.forget()
    assert [meet(n) for n in (10, 11, 11, 10, 11)] == [False, False, True, True, False]
    monkeypatch.setattr(plans, "MAX_MET", 4)
    for n in range(20):
        meet(n)
        assert len(ADD.plans._met) <= 4


class TestTheLastPlan:
    """What a call with the same options had last is asked first, by PyTorch's own guards."""

    def ready(self, plan, *arrays):
        kernel, _ = plan(ADD, list(arrays))
        assert ADD.plans.lookup(list(arrays), ()) is not None
        return kernel

    def test_it_answers_calls_like_that_one(self, plan, monkeypatch):
        a, b = torch.randn(100), torch.randn(100)
        kernel = self.ready(plan, a, b, None)
        monkeypatch.setattr(ADD.plans, "lookup", lambda *_: pytest.fail("looked up"))
        out = fkjit.vector_add(b, a)
        assert kernel.launches[-1][1][:3] == (b.data_ptr(), a.data_ptr(), out.data_ptr())

    @pytest.mark.parametrize("change", list(CHANGED))
    def test_anything_else_is_not_its(self, plan, change):
        a, b = torch.randn(100), torch.randn(100)
        self.ready(plan, a, b, None)
        assert ADD.plans.try_last([CHANGED[change](a), b, None], ()) is plans.MISSED
        assert ADD.plans.try_last([a, b, a], ()) is plans.MISSED
        assert ADD.plans.try_last([a, b, None], (1,)) is plans.MISSED
        assert ADD.plans.try_last([a, None, None], ()) is plans.MISSED
        assert ADD.plans.try_last([a, b, None], ()) is not plans.MISSED

    def test_addresses_of_another_alignment_are_not_its(self, plan):
        x, b = torch.randn(200), torch.randn(100)
        self.ready(plan, x[1:101], b, None)
        assert ADD.plans.try_last([x[9:109], b, None], ()) is not plans.MISSED
        assert ADD.plans.try_last([x[:100], b, None], ()) is plans.MISSED
        assert ADD.plans.try_last([b, x[1:101], None], ()) is plans.MISSED

    def test_overlaps_that_were_not_checked_are_not_its(self, plan):
        x = torch.randn(4096)
        self.ready(plan, x[1024:2048], x[2048:3072], x[:1024])
        assert ADD.plans.try_last([x[1024:2048], x[3072:], x[:1024]], ()) is not plans.MISSED
        assert ADD.plans.try_last([x[1024:2048], x[3072:], x[512:1536]], ()) is plans.MISSED

    def test_gradients_are_not_its(self, plan):
        w, x = torch.nn.Parameter(torch.randn(50)), torch.randn(50)
        with torch.no_grad():
            self.ready(plan, x, w, None)
            assert ADD.plans.try_last([x, w, None], ()) is not plans.MISSED
        assert ADD.plans.try_last([x, w, None], ()) is plans.MISSED

    def test_two_geometries_take_turns(self, plan):
        pairs = [(torch.randn(n), torch.randn(n)) for n in (30, 40)]
        kernels = [self.ready(plan, a, b, None) for a, b in pairs]
        for _ in range(3):
            for (a, b), kernel in zip(pairs, kernels, strict=True):
                out = fkjit.vector_add(a, b)
                assert kernel.launches[-1][1][:3] == (a.data_ptr(), b.data_ptr(), out.data_ptr())
