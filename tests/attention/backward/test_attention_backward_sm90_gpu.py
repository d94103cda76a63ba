"""Attention's backward for Hopper on a GPU: blocks that wait for one another, and the same bits."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import fkjit  # noqa: E402
from fkjit.jit.build import quiet  # noqa: E402
from tests.attention.backward.test_attention_backward_gpu import tensors, textbook  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]
# Blocks of keys that all run at once; fewer tiles of queries than those; more blocks than SMs; more
# heads than there are teams.
SIZES = ((1000, 1100), (2048, 2048), (100, 8000), (300, 17_000), (1100, 300), (600, 600))


def assert_right(found, q, k, v, dout, causal):
    exact = textbook(*(x.float() for x in (q, k, v, dout)), causal)
    peers = textbook(q, k, v, dout, causal)
    for one, other, expected in zip(found, peers, exact, strict=True):
        error, peer = ((x.float() - expected).norm() for x in (one, other))
        assert error <= 2 * peer + 1e-6 * expected.norm()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_250_repeats_in_turns_have_the_same_bits_and_are_right(size, dim, causal):
    q, k, v, dout = tensors(*size, dim, "bf16", heads=24, heads_kv=6)
    with quiet():
        o, lse = fkjit.attention(q, k, v, causal=causal, return_lse=True)

        def call():
            return fkjit.attention_backward(dout, q, k, v, o, lse, causal=causal, impl="flash_sm90")

        first = call()
        for _ in range(250):
            assert all(torch.equal(x, y) for x, y in zip(first, call(), strict=True))
    assert_right(first, q, k, v, dout, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (96, 48), (192, 128), (256, 256)])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sums_in_any_order_are_right(size, dims, causal):
    q, k, _, _ = tensors(*size, dims[0], "fp16", heads=24, heads_kv=12)
    _, _, v, dout = tensors(*size, dims[1], "fp16", heads=24, heads_kv=12)
    with quiet():
        o, lse = fkjit.attention(q, k, v, causal=causal, return_lse=True)
        options = {"causal": causal, "impl": "flash_sm90", "deterministic": False}
        assert_right(
            fkjit.attention_backward(dout, q, k, v, o, lse, **options), q, k, v, dout, causal
        )
