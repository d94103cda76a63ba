"""Lengths, tables, slopes, sinks and scales in other forms than kernels read."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import fkjit  # noqa: E402
from fkjit.errors import ArgumentTypeError, ParameterError  # noqa: E402
from fkjit.jit.build import quiet  # noqa: E402

HEADS, HEADS_KV, DIM, PAGE = 4, 2, 32, 16


@pytest.fixture(autouse=True)
def silent():
    with quiet():
        yield


def draw(*shape, seed=0, dtype=torch.float16):
    made = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=made).to(dtype)


def paged(kind):
    """q, (k, v), the table and the lengths."""
    pages = draw(6, PAGE, HEADS_KV, DIM, seed=1), draw(6, PAGE, HEADS_KV, DIM, seed=2)
    table, lengths = np.array([[5, 0, 2], [1, 3, 4]]), np.array([40, 33])
    return draw(2, HEADS, DIM), pages, *(torch.tensor(x, dtype=kind) for x in (table, lengths))


def test_int64_tables_and_lengths():
    expected = fkjit.paged_attention(*paged(torch.int32))
    assert torch.equal(fkjit.paged_attention(*paged(torch.int64)), expected)
    q, (k, v), table, lengths = paged(torch.int64)
    ends = torch.tensor([0, 1, 2])
    made = fkjit.paged_attention(q, (k, v), table, lengths, cu_seqlens_q=ends, max_seqlen_q=1)
    assert (made - expected).abs().max() <= 2e-3
    fkjit.paged_attention.prepare(q, (k, v), table, lengths)
    dense = (x[:2].transpose(1, 2) for x in (k, v))
    made = fkjit.attention_decode(q, *dense, lengths // 4)
    dense = (x.numpy()[:2].swapaxes(1, 2) for x in (k, v))
    other = fkjit.attention_decode(q.numpy(), *dense, lengths.numpy() // 4)
    assert np.array_equal(made.numpy(), other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sinks_and_slopes_of_16_bits_have_gradients(dtype):
    q, k, v = (draw(1, h, 20, DIM, seed=h) for h in (HEADS, HEADS_KV, HEADS_KV))
    narrow = [draw(HEADS, seed=s, dtype=dtype) for s in (3, 4)]
    found = []
    for small in (narrow, [x.float() for x in narrow]):
        small = [x.detach().requires_grad_() for x in small]
        o = fkjit.attention(q, k, v, causal=True, sinks=small[0], alibi_slopes=small[1])
        found.append((o.detach(), *torch.autograd.grad(o, small, draw(1, HEADS, 20, DIM, seed=9))))
    assert torch.equal(found[0][0], found[1][0])
    for mine, whole in zip(found[0][1:], found[1][1:], strict=True):
        assert mine.dtype == dtype and torch.equal(mine, whole.to(dtype))


@pytest.mark.parametrize("kept", ["fp8", "int8"])
@pytest.mark.parametrize("scales", ["numbers", "of one element", "of heads"])
def test_quantized_pairs_of_pages(kept, scales):
    """Written by kv_append outside a PagedKVCache, read by attention and kv_read."""
    code = torch.float8_e4m3fn if kept == "fp8" else torch.int8
    pages = tuple(torch.zeros(6, PAGE, HEADS_KV, DIM).to(code) for _ in "kv")
    given = {"k_scale": 0.04, "v_scale": 0.035}
    if scales != "numbers":
        count = 1 if scales == "of one element" else HEADS_KV
        given = {name: torch.full((count,), x) for name, x in given.items()}
    k, v = draw(40, HEADS_KV, DIM, seed=1), draw(40, HEADS_KV, DIM, seed=2)
    slots = torch.cat([torch.arange(16) + 16 * page for page in (5, 0, 2)])[:40]
    fkjit.kv_append(k, v, pages, slots, **given)
    held = fkjit.kv_read(pages, slots, dtype="fp16", **given)
    assert all((x - y).abs().max() <= 0.2 for x, y in zip(held, (k, v), strict=True))
    table, lengths = torch.tensor([[5, 0, 2]]).int(), torch.tensor([40]).int()
    made = fkjit.paged_attention(draw(1, HEADS, DIM), pages, table, lengths, **given)
    whole = (x[None].transpose(1, 2) for x in held)
    expected = fkjit.attention_decode(draw(1, HEADS, DIM), *whole)
    assert (made - expected).abs().max() <= 5e-3
    with pytest.raises(ParameterError, match="k_scale and v_scale are None, but keys and values"):
        fkjit.kv_append(k, v, pages, slots)


def test_a_nested_tensor_is_no_kind_of_array_that_calls_take():
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([torch.zeros(2, 8), torch.zeros(3, 8)], layout=layout)
        with pytest.raises(ArgumentTypeError, match="q is a nested tensor; allowed: plain"):
            fkjit.attention(nested, nested, nested)
