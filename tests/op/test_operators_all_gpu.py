"""Every public op on a CUDA GPU: compiled with gradients, checked, captured, under autocast."""

from __future__ import annotations

import pytest

from fkjit.jit.build import quiet

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="needs torch")
import fkjit  # noqa: E402
from fkjit.ops.op import torch_ops  # noqa: E402
from tests.op.operator_cases import CASES  # noqa: E402
from tests.op.test_operators_all import Calls, differentiated, outputs  # noqa: E402

ATTENTION = ("attention", "attention_decode", "paged_attention")
_BUT_VALUES = ("test_schema", "test_autograd_registration", "test_faketensor")
_ALL = (*_BUT_VALUES, "test_aot_dispatch_dynamic")
SIMPLE = [case for case in CASES if case.op not in ATTENTION]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    with quiet():
        yield


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_call_is_compiled_without_a_break(case, backend):
    inputs = case.inputs("cuda")
    compiled = torch.compile(case.call, backend=backend, fullgraph=True)
    expected, theirs = differentiated(case, case.call, inputs)
    made, ours = differentiated(case, compiled, inputs)
    for one, two in zip([*made, *ours], [*expected, *theirs], strict=True):
        assert one.dtype == two.dtype and torch.allclose(one, two, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", SIMPLE, ids=lambda case: case.name)
def test_operators_are_what_their_schemas_say(case, monkeypatch):
    differentiated(case, case.call, case.inputs("cuda"))  # defines what is only behind gradients
    with monkeypatch.context() as patched, Calls() as calls:
        patched.setattr(torch_ops, "compiling", lambda: True)
        differentiated(case, case.call, case.inputs("cuda"))
    assert calls.seen
    for function, args in calls.seen:
        # Rows of no expert hold whatever memory held, which no second run repeats.
        whole = "grouped_linear" not in str(function)
        torch.library.opcheck(function, args, test_utils=_ALL if whole else _BUT_VALUES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_call_is_captured_and_replayed_on_other_inputs(case):
    inputs, others = case.inputs("cuda"), case.inputs("cuda")
    before = [x.clone() for x in inputs]
    case.call(*inputs)  # compiles and loads
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = outputs(case.call(*inputs))
    for given in (before, others):
        for x, y in zip(inputs, given, strict=True):
            x.copy_(y)
        graph.replay()
        copies = [y.clone() for y in given]
        expected = outputs(case.call(*copies))
        for one, two in zip([*made, *inputs], [*expected, *copies], strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_call_goes_to_the_callers_stream(case):
    """What a call reads is written late, on the same stream."""
    inputs = case.inputs("cuda")
    expected = outputs(case.call(*[x.clone() for x in inputs]))
    late = [torch.zeros_like(x) for x in inputs]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(5_000_000)
        for x, y in zip(late, inputs, strict=True):
            x.copy_(y)
        made = outputs(case.call(*late))
    stream.synchronize()
    for one, two in zip(made, expected, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_casts_attention_warm_and_cold(dtype):
    q, k, v = (torch.randn(2, 4, 100, 64, device="cuda") for _ in "qkv")
    compiled = torch.compile(lambda q, k, v: fkjit.attention(q, k, v), fullgraph=True)
    expected = fkjit.attention(*(x.to(dtype) for x in (q, k, v)))
    for call in (fkjit.attention, compiled):
        for _ in range(3):
            with torch.autocast("cuda", dtype):
                made = call(q, k, v)
                theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            assert made.dtype == theirs.dtype == dtype and torch.equal(made, expected)
            assert call(q, k, v).dtype == torch.float32
            with torch.autocast("cuda", enabled=False):
                assert call(q, k, v).dtype == torch.float32


def test_deterministic_algorithms_are_all_there_is():
    """Nothing warns or raises under the flag, backward included; repeats have the same bits."""
    torch.use_deterministic_algorithms(True)
    try:
        for case in SIMPLE:
            inputs = case.inputs("cuda")
            first = differentiated(case, case.call, inputs)
            again = differentiated(case, case.call, inputs)
            for one, two in zip([*first[0], *first[1]], [*again[0], *again[1]], strict=True):
                assert torch.equal(one, two), case.name
    finally:
        torch.use_deterministic_algorithms(False)
