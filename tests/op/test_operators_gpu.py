"""Public calls as PyTorch's operators on a CUDA GPU: compiled, checked, exported, captured."""

from __future__ import annotations

import pytest

import fkjit
from fkjit.jit.build import quiet

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="needs torch")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    with quiet():
        yield


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda", dtype=dtype)


def prompt(heads=8, heads_kv=2, rows=300, dim=64):
    return normal(2, heads, rows, dim), *(normal(2, heads_kv, rows, dim) for _ in "kv")


def decoding(tokens=1, page=16):
    """q [B, S, H, D], pages, their table, lengths."""
    q = normal(3, tokens, 8, 64)
    k, v = (normal(60, page, 2, 64) for _ in "kv")
    table = torch.randperm(60, device="cuda").int().view(3, 20)
    return q, k, v, table, torch.tensor([317, 3, 100], dtype=torch.int32, device="cuda")


def layer(q, k, v, tokens, k_pages, v_pages, table, lengths):
    """Every form of attention that is an operator, with something of PyTorch's around them."""
    whole, lse = fkjit.attention(q * 2, k, v, causal=True, return_lse=True)
    paged = fkjit.paged_attention(tokens + 1, (k_pages, v_pages), table, lengths)
    rows = [x[table].flatten(1, 2) for x in (k_pages, v_pages)]
    piece = fkjit.attention_decode(tokens + 1, *rows, lengths, layout="bshd")
    return whole.sigmoid(), lse - 1, paged.float() * 2, piece - 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_whole_graph_is_what_eager_calls_are(backend):
    inputs = (*prompt(), *decoding())
    made = torch.compile(layer, backend=backend, fullgraph=True)(*inputs)
    for one, two in zip(made, layer(*inputs), strict=True):
        assert torch.allclose(one, two, atol=2e-2)


def test_the_same_bits_and_no_break_with_lengths_that_grow():
    def model(q, k, v):
        return fkjit.attention(q, k, v, causal=True)

    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for rows in (64, 100, 333):
        inputs = prompt(rows=rows)
        assert torch.equal(compiled(*inputs), model(*inputs))


def test_compiled_for_cuda_graphs():
    """mode="reduce-overhead" captures what it compiled."""
    inputs = prompt()

    def model(q, k, v):
        return fkjit.attention(q + 1, k, v).relu()

    expected = model(*inputs)
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.allclose(compiled(*inputs), expected, atol=2e-2)


def cases():
    """Each operator with arguments; made when the test runs, for there must be a GPU."""
    half = {"dtype": torch.float16}
    for suffix in ("", "_lse"):
        yield f"attention{suffix}", lambda: ((*prompt(),), {"causal": True})
        yield (
            f"attention{suffix}",
            lambda: (tuple(normal(1, 2, 20, 40, **half) for _ in "qkv"), {"layout": "bshd"}),
        )
        yield f"paged_attention{suffix}", lambda: (decoding(), {"softmax_scale": 0.2})
        yield (
            f"attention_decode{suffix}",
            lambda: ((normal(2, 8, 64), normal(2, 2, 90, 64), normal(2, 2, 90, 64)), {}),
        )


CASES = list(cases())


@pytest.mark.parametrize(
    ("name", "made"), CASES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(CASES)]
)
def test_operators_are_what_their_schemas_say(name, made):
    inputs, options = made()
    fkjit.attention, fkjit.paged_attention  # noqa: B018  imports the modules
    torch.library.opcheck(getattr(torch.ops.fkjit, name).default, inputs, options)


def test_a_model_is_exported():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return fkjit.attention(q, k, v, causal=True)

    inputs = prompt()
    program = torch.export.export(Model(), inputs)
    assert torch.equal(program.module()(*inputs), fkjit.attention(*inputs, causal=True))


def test_vmap_is_a_larger_batch():
    q, k, v = prompt(rows=70)
    many = torch.stack([q, q + 1, q * 2])
    made = torch.func.vmap(lambda q: fkjit.attention(q, k, v, causal=True))(many)
    for one, expected in zip(made, many, strict=True):
        assert torch.equal(one, fkjit.attention(expected, k, v, causal=True))


def test_work_goes_to_the_callers_stream():
    q, k, v = prompt()
    expected = fkjit.attention(q, k, v)
    compiled = torch.compile(lambda q, k, v: fkjit.attention(q, k, v), fullgraph=True)
    compiled(q, k, v)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = torch.zeros_like(q)
        torch.cuda._sleep(20_000_000)
        late.copy_(q)
        made, again = fkjit.attention(late, k, v), compiled(late, k, v)
    stream.synchronize()
    assert torch.equal(made, expected) and torch.equal(again, expected)
