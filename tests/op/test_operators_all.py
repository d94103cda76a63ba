"""Every public op as PyTorch's operator: whole graphs, fake tensors, gradients, autocast."""

from __future__ import annotations

import pytest

from fkjit.jit.build import quiet
from tests.core.sampling import one_in

torch = pytest.importorskip("torch", reason="needs torch")
import fkjit  # noqa: E402
from fkjit.ops.op import torch_ops  # noqa: E402
from tests.op.operator_cases import CASES, EVERY, OTHERS  # noqa: E402


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    with quiet():
        yield


def outputs(made):
    return [] if made is None else [made] if isinstance(made, torch.Tensor) else list(made)


def assert_alike(made, expected):
    made, expected = outputs(made), outputs(expected)
    assert len(made) == len(expected)
    for one, two in zip(made, expected, strict=True):
        assert one.dtype == two.dtype and one.stride() == two.stride()
        assert torch.equal(one, two)


def test_each_op_has_a_case():
    assert EVERY - {case.op for case in CASES} <= OTHERS


def differentiated(case, call, inputs):
    """What a call returns, and gradients of the sum of its squares."""
    leaves = [x.clone().requires_grad_(i in case.grads) for i, x in enumerate(inputs)]
    made = outputs(call(*leaves))
    if case.grads:
        sum(x.float().square().sum() for x in made if x.requires_grad).backward()
    return [*(x.detach() for x in made), *(leaves[i].detach() for i in case.written)], [
        leaves[i].grad for i in case.grads
    ]


@one_in(6)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_call_is_traced_without_a_break(case):
    """By AOTAutograd, backward included, with what it writes made functional."""
    inputs = case.inputs("cpu")
    compiled = torch.compile(case.call, backend="aot_eager", fullgraph=True)
    (made, ours), (expected, theirs) = (
        differentiated(case, call, inputs) for call in (compiled, case.call)
    )
    assert_alike(made, expected)
    for one, two in zip(ours, theirs, strict=True):
        assert torch.allclose(one, two, rtol=1e-5, atol=1e-6)


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """The operators of fkjit that run, with their arguments as they are before."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "fkjit":
            copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
            self.seen.append((function, copies))
        return function(*args, **(kwargs or {}))


SIMPLE = [case for case in CASES if case.op not in ("attention", "attention_decode")]
SIMPLE = [case for case in SIMPLE if case.op != "paged_attention"]  # see test_operators.py


@one_in(4)
@pytest.mark.parametrize("case", SIMPLE, ids=lambda case: case.name)
def test_operators_are_what_their_schemas_say(case, monkeypatch):
    """Those that a call goes through, backward included, each on what it is given there."""
    # Defines what stands behind gradients only: what arrived later would undo the patch.
    differentiated(case, case.call, case.inputs("cpu"))
    monkeypatch.setattr(torch_ops, "compiling", lambda: True)
    with Calls() as calls:
        differentiated(case, case.call, case.inputs("cpu"))
    assert len(calls.seen) >= 1 + bool(case.grads and case.op != "merge_states")
    for function, args in calls.seen:
        torch.library.opcheck(function, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("call", ["kv_slots", "kv_append", "paged_attention"])
def test_a_cache_is_refused_in_a_graph(call):
    """Pairs of its pages' arrays are not."""
    cache = fkjit.PagedKVCache(
        4, page_size=16, num_kv_heads=2, head_dim=16, dtype="fp16", device="cpu",
        framework="torch", max_sequences=3,
    )  # fmt: skip
    x, rows = torch.zeros(1, 2, 16).half(), torch.zeros(1, dtype=torch.int32)
    model = {
        "kv_slots": lambda x, rows: fkjit.kv_slots(cache, rows),
        "kv_append": lambda x, rows: fkjit.kv_append(x, x, cache, rows),
        "paged_attention": lambda x, rows: fkjit.paged_attention(x, cache, rows=rows),
    }[call]
    with pytest.raises(Exception, match=f"{call}: cache is .*; under torch.compile pass"):
        torch.compile(model, backend="eager", fullgraph=True)(x, rows)


def test_ops_are_exported():
    class Model(torch.nn.Module):
        def forward(self, x, w, q):
            return fkjit.vector_add(fkjit.rms_norm(x, w), x), fkjit.rope(q, None, 3)

    inputs = torch.randn(5, 16), torch.randn(16), torch.randn(1, 2, 4, 16)
    program = torch.export.export(Model(), inputs)
    assert all(f"fkjit.{name}" in str(program.graph) for name in ("rms_norm", "vector_add", "rope"))
    assert_alike(program.module()(*inputs), Model()(*inputs))


@pytest.mark.parametrize("name", ["rms_norm", "vector_add", "sum", "kv_append", "gelu_linear"])
def test_sizes_may_be_dynamic(name):
    (case,) = [case for case in CASES if case.name == name]
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(case.call, backend=backend, fullgraph=True, dynamic=True)
    for rows in (5, 4, 3):
        inputs = case.inputs("cpu")
        inputs = [x[:rows].clone() if x.shape[0] > 4 and x.shape != (40,) else x for x in inputs]
        assert_alike(compiled(*inputs), case.call(*inputs))
    assert len(graphs) == 1


@one_in(3)
@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
@pytest.mark.parametrize("given", [torch.float32, torch.float16], ids=str)
def test_autocast_casts_attention_as_it_does_pytorchs(backend, given):
    """Warm as well: the same call without autocast is another one."""
    q, k, v = (torch.randn(1, 2, 20, 16).to(given) for _ in "qkv")

    def call(q, k, v):
        return fkjit.attention(q, k, v, causal=True)

    model = call if backend is None else torch.compile(call, backend=backend, fullgraph=True)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            made = model(q, k, v)
            theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        assert made.dtype == theirs.dtype == torch.bfloat16
        assert torch.equal(made, call(*(x.bfloat16() for x in (q, k, v))))
        with torch.autocast("cpu", torch.bfloat16):
            assert fkjit.attention(q, k, v, window=(5, 5)).dtype == torch.bfloat16
        assert model(q, k, v).dtype == given


def test_autocast_leaves_keys_that_are_kept_as_they_are():
    q, k, v = torch.randn(1, 2, 1, 16), *(torch.randn(1, 2, 9, 16).bfloat16() for _ in "kv")
    with torch.autocast("cpu", torch.bfloat16):
        made = fkjit.attention_decode(q, k, v)
        assert fkjit.rms_norm(q).dtype == torch.float32  # norms take what they are given
    assert torch.equal(made, fkjit.attention_decode(q.bfloat16(), k, v))


def test_given_outputs_are_refused_in_a_graph():
    def model(a, b):
        return fkjit.vector_add(a, b, out=torch.empty_like(a))

    with pytest.raises(Exception, match="vector_add: out is given; not supported"):
        torch.compile(model, backend="eager", fullgraph=True)(torch.ones(3), torch.ones(3))


def test_vmap_is_refused_but_for_attention():
    with pytest.raises(fkjit.errors.ArgumentTypeError, match="without memory of its own"):
        torch.func.vmap(lambda x: fkjit.rms_norm(x))(torch.randn(3, 4, 8))
