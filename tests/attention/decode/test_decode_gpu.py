"""Decoding on a GPU: against float64, in CUDA graphs that follow growing sequences, repeated."""

from __future__ import annotations

import numpy as np
import pytest

import fkjit
from fkjit.errors import CaptureError
from tests.attention.decode.kit import Batch, check

torch = pytest.importorskip("torch", reason="needs torch")
pytestmark = pytest.mark.gpu


def there(array):
    """A NumPy array as a tensor on the GPU."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(array).cuda()


def back(tensor):
    """In float64."""
    return tensor.double().cpu().numpy()


def on_gpu(batch, **options):
    """paged_attention of a `Batch`, on the GPU."""
    pages = tuple(there(x) for x in batch.pages)
    given = {"layout": batch.layout, **{n: there(x) for n, x in batch.scales.items()}, **options}
    return fkjit.paged_attention(
        there(batch.q), pages, there(batch.table), there(batch.lengths), **given
    )


CASES = [  # tokens, query heads, head_dim, dtype, page_size, layout
    (1, 32, 128, "bf16", 16, "nhd"),
    (5, 8, 64, "fp16", 1, "hnd"),
    (16, 40, 128, "bf16", 256, "hnd"),
    (3, 8, 256, "fp16", 8, "nhd"),
]


@pytest.mark.parametrize("storage", ["same", "fp8", "int8"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_pages(case, storage):
    """Ragged lengths, poison beyond them; one token and several; rows in one tile and in more."""
    tokens, heads, dim, dtype, page_size, layout = case
    batch = Batch(
        [0, 1, 1024, 1023, 17, 3000], tokens=tokens, heads_q=heads, heads_kv=8, dim=dim,
        dtype=dtype, layout=layout, page_size=page_size, storage=storage,
    )  # fmt: skip
    want, want_lse = batch.expected()
    seen, limit = np.isfinite(want_lse), 0.02 if dtype == "bf16" else 3e-3
    for options in ({}, {"split_size": 512}):
        o, lse = (back(x) for x in on_gpu(batch, return_lse=True, **options))
        assert np.abs(o - want).max() <= limit
        assert np.abs(lse[seen] - want_lse[seen]).max() <= 3e-5
        assert not o[0].any() and np.isneginf(lse[~seen]).all()


@pytest.mark.parametrize(
    "shape", [(1, 32, 8, 131_072), (3, 32, 1, 40_000), (64, 32, 8, 777), (1, 1, 1, 1)], ids=str
)
@pytest.mark.parametrize("tokens", [1, 4])
def test_keys_in_one_piece(shape, tokens):
    batch, heads_q, heads_kv, keys = shape
    q, k, v = (
        torch.randn(batch, h, n, 128, device="cuda").bfloat16()
        for h, n in ((heads_q, tokens), (heads_kv, keys), (heads_kv, keys))
    )
    o = fkjit.attention_decode(q, k, v, causal=False)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    few = slice(0, 2)
    exact = sdpa(q[few].double(), k[few].double(), v[few].double(), enable_gqa=True)
    theirs = sdpa(q[few], k[few], v[few], enable_gqa=True)
    error, allowed = ((x.double() - exact).abs().max().item() for x in (o[few], theirs))
    assert error <= 2 * allowed
    last = fkjit.attention_decode(q[-1:], k[-1:], v[-1:], causal=False)
    assert (o[-1] - last[0]).abs().max().item() <= 2e-2


def test_many_repeats_give_the_same_bits():
    batch = Batch([5000, 3, 700, 20_000], heads_q=32, heads_kv=8, dim=128, dtype="bf16")
    pages = tuple(there(x) for x in batch.pages)
    rest = (pages, there(batch.table), there(batch.lengths))
    q = there(batch.q)
    first = fkjit.paged_attention(q, *rest)
    assert all(torch.equal(fkjit.paged_attention(q, *rest), first) for _ in range(250))
    one = fkjit.paged_attention(q, *rest, split_size=256)
    for b in range(4):
        rows = torch.tensor([b], dtype=torch.int32, device="cuda")
        alone = fkjit.paged_attention(q[b : b + 1], *rest, rows=rows, split_size=256)
        assert torch.equal(alone[0], one[b])


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_a_captured_step_follows_sequences_that_grow(dtype):
    """kv_slots, kv_append and paged_attention in one graph; the same as eager at every step."""
    scales = {} if dtype == "bf16" else {"k_scale": 0.02, "v_scale": 0.02}
    cache = fkjit.PagedKVCache(
        300, page_size=16, num_kv_heads=2, head_dim=128, dtype=dtype, device="cuda",
        framework="torch", max_sequences=4, **scales,
    )  # fmt: skip
    batch = [cache.allocate() for _ in range(3)]
    k, v = (torch.randn(1000 + 15, 2, 128, device="cuda").bfloat16() for _ in "kv")
    fkjit.kv_append(k, v, cache, cache.extend(batch, [1000, 15, 0]))
    rows = cache.rows(batch)
    q, new_k, new_v = (torch.randn(3, h, 128, device="cuda").bfloat16() for h in (8, 2, 2))
    fkjit.prepare("kv_slots", cache, rows)
    fkjit.prepare("kv_append", new_k, new_v, cache, torch.zeros_like(rows))
    fkjit.prepare("paged_attention", q, cache, rows=rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fkjit.kv_append(new_k, new_v, cache, fkjit.kv_slots(cache, rows))
        o = fkjit.paged_attention(q, cache, rows=rows)
    for _ in range(40):
        for x in (q, new_k, new_v):
            x.copy_(torch.randn_like(x))
        cache.reserve(batch, 1)
        graph.replay()
        cache.advance(batch, 1)
        assert torch.equal(o, fkjit.paged_attention(q, cache, rows=rows))
    for b, sequence in enumerate(batch):
        k, v = (
            x.double().transpose(0, 1)
            for x in cache.read([sequence], dtype=None if dtype == "bf16" else "fp16")
        )
        exact = torch.nn.functional.scaled_dot_product_attention(
            q[b].double()[:, None], k, v, enable_gqa=True
        )
        assert (o[b].double() - exact[:, 0]).abs().max().item() <= 0.02


def test_capture_needs_a_kernel_that_is_loaded():
    from fkjit.runtime import device

    device.forget()
    q, k = (
        torch.zeros(1, 4, 64, device="cuda").half(),
        torch.zeros(1, 4, 20, 64, device="cuda").half(),
    )
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(CaptureError, match="attention_decode"), torch.cuda.graph(graph):
        fkjit.attention_decode(q, k, k)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_few_queries_is_decoding(causal):
    from fkjit.ops.attention.forward import _ATTENTION
    from fkjit.ops.attention.select import to_decode

    q, k, v = (
        torch.randn(2, h, n, 128, device="cuda").half() for h, n in ((8, 3), (2, 700), (2, 700))
    )
    _ATTENTION.plans.forget()
    for _ in range(4):  # checked, checked and remembered, looked up, the last one's
        o, lse = fkjit.attention(q, k, v, causal=causal, return_lse=True)
    assert [plan.steps.delegate for plan in _ATTENTION.plans.known] == [to_decode]
    flash, flash_lse = fkjit.attention(q, k, v, causal=causal, return_lse=True, impl="flash")
    assert (o - flash).abs().max().item() <= 4e-3 and (lse - flash_lse).abs().max().item() <= 3e-5
    back = [x.transpose(1, 2) for x in (q, k, v)]
    other = fkjit.attention(*back, causal=causal, layout="bshd")
    assert torch.equal(other.transpose(1, 2), o)


def test_cupy_arrays_and_another_stream():
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    batch = Batch([100, 30])
    given = [cupy.asarray(x) for x in (batch.q, *batch.pages, batch.table, batch.lengths)]
    with cupy.cuda.Stream(non_blocking=True) as stream:
        o = fkjit.paged_attention(given[0], tuple(given[1:3]), *given[3:])
        o = fkjit.paged_attention(given[0], tuple(given[1:3]), *given[3:])
        stream.synchronize()
    check(batch, cupy.asnumpy(o))
