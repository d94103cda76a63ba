"""Public calls as PyTorch's operators: torch.compile without graph breaks, fake tensors, export."""

import subprocess
import sys

import pytest
import torch

import fkjit
from fkjit.errors import ParameterError
from tests.core.sampling import one_in

BACKENDS = ("eager", "aot_eager")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def tensors(seed=0, heads=2, heads_kv=1, rows=20, keys=24, dim=32, dtype=torch.float16):
    made = torch.Generator().manual_seed(seed)
    shapes = ((1, heads, rows, dim), (1, heads_kv, keys, dim), (1, heads_kv, keys, dim))
    return [torch.randn(shape, generator=made).to(dtype) for shape in shapes]


@one_in(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "softmax_scale": 0.3},
        {"block": 16, "impl": "tiled"},
        {"block": (128, 64), "causal": True},
    ],
    ids=str,
)
def test_attention_is_one_node_of_a_whole_graph(backend, options):
    def model(q, k, v):
        return fkjit.attention(q + 1, k, v, **options) * 2

    inputs = tensors()
    made = torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    assert torch.equal(made, model(*inputs))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_with_lse_and_in_either_layout(backend, layout):
    def model(q, k, v):
        o, lse = fkjit.attention(q, k, v, return_lse=True, layout=layout)
        return o.float().sum(-1), lse - 1

    inputs = tensors(heads_kv=2)
    if layout == "bshd":
        inputs = [x.transpose(1, 2) for x in inputs]
    made = torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    for one, expected in zip(made, model(*inputs), strict=True):
        assert torch.equal(one, expected)


def test_lengths_may_be_dynamic():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    def model(q, k, v):
        return fkjit.attention(q, k, v, causal=True)

    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for rows in (16, 20, 33):
        inputs = tensors(rows=rows, keys=rows + 3)
        assert torch.equal(compiled(*inputs), model(*inputs))
    assert len(graphs) == 1


@pytest.mark.parametrize("name", ["attention", "attention_lse"])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "block": [16]}, {"layout": "bshd", "softmax_scale": 0.5}]
)
def test_operators_are_what_their_schemas_say(name, options):
    inputs = tensors(heads_kv=2, rows=24)
    torch.library.opcheck(getattr(torch.ops.fkjit, name).default, inputs, options)


def test_fake_tensors_have_the_shapes_of_real_ones():
    q, k, v = tensors(heads=4, heads_kv=2, dim=48)
    v = v[..., :40].contiguous()
    for layout in ("bhsd", "bshd"):
        turned = [x.transpose(1, 2) for x in (q, k, v)] if layout == "bshd" else [q, k, v]
        real = torch.ops.fkjit.attention_lse(*turned, layout=layout)
        fake = torch.ops.fkjit.attention_lse(*(x.to("meta") for x in turned), layout=layout)
        for one, other in zip(real, fake, strict=True):
            assert one.shape == other.shape and one.dtype == other.dtype
            assert one.stride() == other.stride()


def test_a_model_is_exported():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return fkjit.attention(q, k, v, causal=True)

    inputs = tuple(tensors())
    program = torch.export.export(Model(), inputs)
    assert "fkjit.attention" in str(program.graph)
    assert torch.equal(program.module()(*inputs), fkjit.attention(*inputs, causal=True))


def test_bad_arguments_are_explained_when_the_graph_runs():
    def model(q, k, v):
        return fkjit.attention(q, k, v, impl="best")

    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(ParameterError, match="impl='best'"):
        compiled(*tensors())


def test_torch_may_come_later():
    code = (
        "import numpy as np, fkjit\n"
        "x = np.ones((1, 1, 4, 16), np.float16)\n"
        "fkjit.attention(x, x, x)\n"
        "import torch\n"
        "t = torch.from_numpy(x)\n"
        "f = torch.compile(lambda t: fkjit.attention(t, t, t), backend='eager', fullgraph=True)\n"
        "assert torch.equal(f(t), t)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_vmap_is_a_larger_batch():
    q, k, v = tensors(rows=9, keys=11)
    many = torch.stack([q, q + 1, q * 2])
    expected = torch.stack([fkjit.attention(one, k, v, causal=True) for one in many])
    made = torch.func.vmap(lambda q: fkjit.attention(q, k, v, causal=True))(many)
    assert torch.equal(made, expected)
    o, lse = torch.func.vmap(
        lambda q, v: fkjit.attention(q, k, v, return_lse=True), in_dims=(1, 0), out_dims=1
    )(many.transpose(0, 1), torch.stack([v, v, v + 1]))
    assert o.shape == (1, 3, 2, 9, 32) and lse.shape == (1, 3, 2, 9)
    assert torch.equal(o[:, 2], fkjit.attention(q * 2, k, v + 1))


def decoding(tokens=2, pages=6, page=16):
    q = tensors(heads=4, rows=tokens)[0].expand(3, -1, -1, -1).contiguous() * 1.5
    k, v = (
        torch.randn(pages, page, 2, 32, generator=torch.Generator().manual_seed(s)).half()
        for s in (1, 2)
    )
    table = torch.tensor([[0, 3], [1, 4], [2, 5]], dtype=torch.int32)
    return q, k, v, table, torch.tensor([17, 3, 32], dtype=torch.int32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_decoding_is_one_node(backend):
    q, k, v, table, lengths = decoding()

    def model(q, k, v, table, lengths):
        turned = q.transpose(1, 2).contiguous()
        paged, lse = fkjit.paged_attention(turned, (k, v), table, lengths, return_lse=True)
        whole = [x[table].flatten(1, 2) for x in (k, v)]
        piece = fkjit.attention_decode(turned, *whole, lengths, layout="bshd", window=(9, None))
        return paged + 0, lse, piece

    inputs = (q, k, v, table, lengths)
    made = torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    for one, expected in zip(made, model(*inputs), strict=True):
        assert torch.equal(one, expected)


@one_in(2)
@pytest.mark.parametrize("suffix", ["", "_lse"])
def test_decoding_operators_are_what_their_schemas_say(suffix):
    q, k, v, table, lengths = decoding()
    turned = q.transpose(1, 2).contiguous()
    check = torch.library.opcheck
    paged = getattr(torch.ops.fkjit, "paged_attention" + suffix).default
    check(paged, (turned, k, v, table, lengths), {"softmax_scale": 0.2})
    check(paged, (turned[:, 0].contiguous(), k, v, table, lengths))
    contiguous = getattr(torch.ops.fkjit, "attention_decode" + suffix).default
    whole = [x[table].flatten(1, 2) for x in (k, v)]
    check(contiguous, (turned, *whole, lengths), {"layout": "bshd", "causal": False})
    form = {"window": [4, -1], "softcap": 3.0, "sinks": torch.ones(q.shape[1])}
    check(contiguous, (q, *(x.transpose(1, 2).contiguous() for x in whole)), form)


def test_what_a_graph_cannot_hold_is_refused():
    q, k, v, table, lengths = decoding(tokens=1)
    q = q[:, :, 0].contiguous()

    def with_out(q):
        return fkjit.paged_attention(q, (k, v), table, lengths, out=torch.empty_like(q))

    def with_score_mod(q):
        return fkjit.paged_attention(q, (k, v), table, lengths, score_mod="2 * score")

    for call, words in ((with_out, "out is given"), (with_score_mod, "score_mod is given")):
        with pytest.raises(Exception, match=words):
            torch.compile(call, backend="eager", fullgraph=True)(q)
