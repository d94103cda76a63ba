"""Exponentials before anyone has looked for the maximum, on a Hopper GPU: maxima that rise, beside
PyTorch's error; the same bits every time; windows and packed sequences of it."""

from __future__ import annotations

import pytest

import fkjit
from tests.attention.test_attention_gpu import exact, normal, pytorch

torch = pytest.importorskip("torch", reason="needs torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]


def rising(dim, keys, dtype="bf16", queries=None, heads=3):
    """q, k, v whose scores grow from the last key to the first, at some by more than 2^128."""
    q, k, v = (
        normal(2, heads, n, dim, dtype=dtype, seed=i)
        for i, n in enumerate((queries or keys, keys, keys))
    )
    rise = torch.linspace(30, 1, keys, device="cuda")
    rise[:5] = 300
    return q, (k * rise[:, None]).to(k.dtype), v


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(
    ("dim", "block"), [(64, (256, 64)), (64, (192, 128)), (96, (192, 96)), (96, 128), (128, 128)]
)
def test_error_is_at_most_twice_pytorchs_where_maxima_rise(dim, block, dtype, causal):
    q, k, v = rising(dim, 2100, dtype)
    o, lse = fkjit.attention(q, k, v, causal=causal, block=block, return_lse=True)
    expected, expected_lse = exact(q, k, v, causal)
    theirs = pytorch(q, k, v, causal).double()
    ours = (o.double() - expected).abs()
    assert ours.max() <= 2 * (theirs - expected).abs().max() + 1e-6
    assert ours.square().mean() <= 4 * (theirs - expected).square().mean() + 1e-12
    assert torch.allclose(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dim", "keys"), [(64, 1000), (64, 9000), (96, 4100), (128, 2500)])
def test_250_calls_give_the_same_bits(dim, keys):
    inputs = rising(dim, keys, queries=600)
    first = fkjit.attention(*inputs, causal=True, return_lse=True)
    for _ in range(250):
        again = fkjit.attention(*inputs, causal=True, return_lse=True)
        assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))


@pytest.mark.parametrize("dim", [64, 96])
def test_windows_and_packed_sequences_where_maxima_rise(dim):
    q, k, v = rising(dim, 1500)
    o = fkjit.attention(q, k, v, window=(700, 0))
    row, key = (torch.arange(1500, device="cuda")[s] for s in ((slice(None), None), (None,)))
    bias = torch.zeros(1500, 1500, dtype=torch.double, device="cuda")
    bias.masked_fill_((key > row) | (key < row - 700), float("-inf"))
    scores = q.double() @ k.double().transpose(-1, -2) * dim**-0.5 + bias
    expected = torch.softmax(scores, -1) @ v.double()
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
    bound = 2 * (theirs.double() - expected).abs().max() + 1e-6
    assert (o.double() - expected).abs().max() <= bound

    q, k, v = (x.transpose(1, 2).reshape(3000, 3, dim) for x in (q, k, v))
    ends = torch.tensor([0, 1500, 1500, 3000], dtype=torch.int32, device="cuda")
    o = fkjit.attention_varlen(q, k, v, ends, ends, 1500, 1500, window=(700, 0))
    o = o.reshape(2, 1500, 3, dim).transpose(1, 2)
    assert (o.double() - expected).abs().max() <= bound
