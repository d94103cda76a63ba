"""Attention under others' names on a CUDA GPU, beside PyTorch's."""

from __future__ import annotations

import pytest

from fkjit import compat
from fkjit.jit.build import quiet

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="needs torch")
theirs = torch.nn.functional.scaled_dot_product_attention
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.fixture(autouse=True)
def silent():
    with quiet():
        yield


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda", dtype=dtype)


def close(made, expected, theirs=None):
    """At most twice as wrong as theirs in the same dtype."""
    assert made.shape == expected.shape
    error = (made.double() - expected.double()).norm() / expected.double().norm()
    limit = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-5}[made.dtype]
    if theirs is not None:
        limit = max(2 * (theirs.double() - expected).norm() / expected.norm(), 1e-6)
    assert error <= limit, error


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [(128, 128), (113, 203), (203, 113), (1, 1024)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_sdpa(dtype, lengths, is_causal):
    sq, sk = lengths
    q, k, v = normal(2, 8, sq, 64, dtype=dtype), *(normal(2, 2, sk, 64, dtype=dtype) for _ in "kv")
    options = {"is_causal": is_causal, "enable_gqa": True}
    exact = theirs(q.double(), k.double(), v.double(), **options)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        other = theirs(q, k, v, **options)
    close(compat.scaled_dot_product_attention(q, k, v, **options), exact, other)
    close(compat.scaled_dot_product_attention(q[0], k[0], v[0], **options), exact[0], other[0])


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attn_func(causal):
    q, k, v = normal(2, 113, 8, 128), *(normal(2, 203, 2, 128) for _ in "kv")
    o, lse, nothing = compat.flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    exact = [x.double().transpose(1, 2) for x in (q, k, v)]
    k, v = (x.repeat_interleave(4, 1) for x in exact[1:])
    scores = exact[0] @ k.mT * 128**-0.5
    if causal:
        hidden = torch.ones(113, 203, dtype=torch.bool, device="cuda").triu(203 - 113 + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
    close(o, (scores.softmax(-1) @ v).transpose(1, 2))
    assert torch.allclose(lse.double(), scores.logsumexp(-1), atol=1e-3) and nothing is None


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("new", [0, 1, 5])
def test_flash_attn_with_kvcache(paged, new):
    """Against attention of each sequence; caches are NaN beyond their lengths."""
    lengths, most, page, tokens = [300, 17, 1], 512, 16, max(new, 1)
    k, v = (normal(3, most, 2, 64) for _ in "kv")
    fresh = [normal(3, new, 2, 64) if new else None for _ in "kv"]
    q = normal(3, tokens, 8, 64)
    expected = []
    for b, n in enumerate(lengths):
        kept = [x[b, :n] if f is None else torch.cat([x[b, :n], f[b]])
                for x, f in zip((k, v), fresh, strict=True)]  # fmt: skip
        one = compat.flash_attn_func(q[b, None], *(x[None] for x in kept), causal=True)
        expected.append(one[0])
        k[b, n:], v[b, n:] = float("nan"), float("nan")
    table = None
    if paged:
        order = torch.randperm(3 * most // page, device="cuda")
        table = torch.argsort(order).int().view(3, -1)
        k, v = (x.view(-1, page, 2, 64)[order].contiguous() for x in (k, v))
    made = compat.flash_attn_with_kvcache(
        q, k, v, *fresh, block_table=table, causal=True,
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device="cuda"),
    )  # fmt: skip
    close(made, torch.stack(expected).double())


def test_a_step_is_captured_and_follows_lengths():
    """New tokens are written where the lengths on the device say, at each replay."""
    k, v, q = normal(2, 64, 2, 64), normal(2, 64, 2, 64), normal(2, 1, 8, 64)
    new_k, new_v = normal(2, 1, 2, 64), normal(2, 1, 2, 64)
    lengths = torch.tensor([3, 9], dtype=torch.int32, device="cuda")

    def step():
        return compat.flash_attn_with_kvcache(
            q, k, v, new_k, new_v, cache_seqlens=lengths, causal=True
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    for n in (3, 4, 20):
        lengths.copy_(torch.tensor([n, n + 6]))
        new_k.normal_(), new_v.normal_()
        graph.replay()
        assert torch.equal(k[0, n], new_k[0, 0]) and torch.equal(v[1, n + 6], new_v[1, 0])
        assert torch.equal(made, step())


def test_calls_are_compiled_whole():
    q, k, v = (normal(2, 8, 100, 64) for _ in "qkv")

    def model(q, k, v):
        o = compat.scaled_dot_product_attention(q, k, v, is_causal=True)
        return o + compat.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    made = torch.compile(model, fullgraph=True)(q, k, v)
    assert torch.allclose(made, model(q, k, v), atol=2e-2)


@pytest.mark.parametrize("causal", [False, True])
def test_a_cache_in_another_order_with_rotary(causal):
    """Rows of the cache by index, queries and keys turned: as by hand."""
    import fkjit

    q, new_k, new_v = normal(3, 2, 8, 64), normal(3, 2, 2, 64), normal(3, 2, 2, 64)
    k, v = (normal(5, 1000, 2, 64) for _ in "kv")
    lengths = torch.tensor([900, 3, 77], dtype=torch.int32, device="cuda")
    order = torch.tensor([4, 0, 2], dtype=torch.int32, device="cuda")
    table = fkjit.rope_table(1000, 64, like=q)
    cosine, sine = table.chunk(2, -1)
    turned_k = fkjit.rope(new_k, None, lengths, layout="bshd")
    at = lengths if causal else lengths[:, None].expand(3, 2).contiguous()
    turned_q = fkjit.rope(q, None, at, layout="bshd")
    kept = [x.clone() for x in (k, v)]
    for row, (index, n) in enumerate(zip(order.tolist(), lengths.tolist(), strict=True)):
        kept[0][index, n : n + 2], kept[1][index, n : n + 2] = turned_k[row], new_v[row]
    expected = fkjit.attention_decode(
        turned_q, *(x[order.long()] for x in kept), lengths + 2, layout="bshd", causal=causal
    )
    made = compat.flash_attn_with_kvcache(
        q, k, v, new_k, new_v, cosine.contiguous(), sine.contiguous(), cache_seqlens=lengths,
        cache_batch_idx=order, causal=causal, rotary_interleaved=False,
    )  # fmt: skip
    close(made, expected.double())
    close(k, kept[0].double())
    assert torch.equal(v, kept[1])
