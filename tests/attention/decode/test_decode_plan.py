"""The warm path of decoding, on stand-ins for a GPU's kernels: which calls the last plan takes, and
what it launches."""

from __future__ import annotations

import sys

import pytest

import fkjit
from fkjit.runtime import workspace
from tests.op.plan_kit import STREAM, Kernel, driver

torch = pytest.importorskip("torch", reason="needs torch")

__all__ = ["driver"]
MODULE = sys.modules[fkjit.attention_decode.__module__]
OPS = {"attention_decode": MODULE._CONTIGUOUS, "paged_attention": MODULE._PAGED}


def contiguous():
    q, k, v = (torch.randn(2, h, n, 64).half() for h, n in ((4, 1), (2, 90), (2, 90)))
    return q, k, v, torch.tensor([90, 41], dtype=torch.int32)


def paged():
    q, k, v = (torch.randn(n, *rest, 64).half() for n, *rest in ((2, 4), (6, 16, 2), (6, 16, 2)))
    table = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    return q, (k, v), table, torch.tensor([33, 7], dtype=torch.int32)


CALLS = {"attention_decode": contiguous, "paged_attention": paged}
PLACES = {  # where each array of a call stands among the kernel's first arguments
    "attention_decode": ("q", "k", "v", "seq_lens"),
    "paged_attention": ("q", "k", "v", "page_table", "seq_lens"),
}


SCRATCH = (1 << 20, 1 << 21)  # addresses of workspace and counters


@pytest.fixture(params=OPS)
def name(request, driver, monkeypatch):
    monkeypatch.setattr(workspace, "find", lambda *sizes: (*SCRATCH, None))
    yield request.param
    OPS[request.param].plans.forget()


def plan(name, given, **options):
    """The kernel of a plan for this call, as `prepare` makes one: with a stand-in."""
    op, kernels = OPS[name], []

    def prepare(arrays, said):
        request = op._request(op._views(arrays), said)
        (launch,) = request.launches
        kernels.append(Kernel(launch.spec, launch.params))
        op.plans.store(arrays, said, request, kernels, op._pairs(request))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "prepare", prepare)
        getattr(fkjit, name).prepare(*given, **options)
    return kernels[0]


def addresses(given):
    flat = [x for each in given for x in (each if isinstance(each, tuple) else (each,))]
    return [x.data_ptr() for x in flat]


FEATURES = {"window": [20, None], "softcap": 3.0, "sinks": torch.ones(4)}


@pytest.mark.parametrize(
    "options", [{}, {"split_size": 128}, FEATURES], ids=["plain", "split", "features"]
)
def test_what_prepare_plans_the_call_takes(name, options, monkeypatch):
    """A window as a list as well; addresses are in the places of the arrays' names."""
    kernel = plan(name, CALLS[name](), **options)
    fresh = CALLS[name]()
    made = getattr(fkjit, name)(*fresh, **options)
    assert made.shape == fresh[0].shape and len(kernel.launches) == 1
    _, values, stream = kernel.launches[0]
    found = dict(zip(kernel.names, values, strict=False))  # pointers come first, a value each
    assert stream == STREAM and found["o"] == made.data_ptr() and found["lse"] == 0
    assert (found["workspace"], found["counters"]) == SCRATCH
    assert [found[place] for place in PLACES[name]] == addresses(fresh)
    assert ("sinks" in found) == ("sinks" in options)
    monkeypatch.setattr(OPS[name].plans, "lookup", lambda *a: pytest.fail("looked up"))
    getattr(fkjit, name)(*CALLS[name](), **options)
    assert len(kernel.launches) == 2


def test_an_output_of_the_callers(name):
    given, out = CALLS[name](), torch.empty(CALLS[name]()[0].shape).half()
    kernel = plan(name, given, out=out)
    assert getattr(fkjit, name)(*given, out=out) is out
    found = dict(zip(kernel.names, kernel.launches[0][1], strict=False))
    assert found["o"] == out.data_ptr()
