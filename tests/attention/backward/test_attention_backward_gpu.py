"""Gradients of fkjit.attention on a GPU: sizes that users know, repeats, graphs, streams."""

from __future__ import annotations

import itertools
import random

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import fkjit  # noqa: E402
from fkjit.jit.build import quiet  # noqa: E402

pytestmark = pytest.mark.gpu
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
PAIRS = ((113, 203), (108, 256), (1023, 1024), (1, 339), (3, 1024), (64, 2048), (517, 300))
GRID = list(
    itertools.product(
        (32, 40, 59, 64, 96, 111, 128, 192, 256), PAIRS, (False, True), ("fp16", "bf16", "fp32"),
        (True, False),
    )
)  # fmt: skip
SAMPLE = random.Random(8).sample(GRID, 60)


def tensors(sq, sk, dim, dtype, heads=4, heads_kv=2, batch=2, seed=0):
    """q, k, v and dout, N(0, 1)."""
    made = torch.Generator("cuda").manual_seed(seed)
    shapes = ((heads, sq), (heads_kv, sk), (heads_kv, sk), (heads, sq))
    return [
        torch.randn(batch, *s, dim, device="cuda", generator=made).to(DTYPES[dtype]) for s in shapes
    ]


def textbook(q, k, v, dout, causal):
    """dq, dk, dv by autograd in the dtype of q; rows without keys have none."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    scores = leaves[0] @ leaves[1].repeat_interleave(group, 1).mT * q.shape[-1] ** -0.5
    sq, sk = scores.shape[-2:]
    if causal:
        hidden = torch.ones(sq, sk, dtype=torch.bool, device="cuda").triu(1 + sk - sq)
        hidden[: max(sq - sk, 0)] = False  # these rows are left out below
        scores = scores.masked_fill(hidden, float("-inf"))
    o = scores.softmax(-1) @ leaves[2].repeat_interleave(group, 1)
    skipped = max(sq - sk, 0) if causal else 0
    (o * dout)[:, :, skipped:].sum().backward()
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_gradients_err_at_most_twice_as_much_as_pytorch(case):
    dim, (sq, sk), causal, dtype, deterministic = case
    q, k, v, dout = tensors(sq, sk, dim, dtype)
    exact = textbook(*(x.double() for x in (q, k, v, dout)), causal)
    o, lse = fkjit.attention(q, k, v, causal=causal, return_lse=True)
    theirs = textbook(q, k, v, dout, causal)
    found = fkjit.attention_backward(
        dout, q, k, v, o, lse, causal=causal, deterministic=deterministic
    )
    for one, other, expected in zip(found, theirs, exact, strict=True):
        error, peer = ((x.double() - expected).norm() for x in (one, other))
        assert error <= 2 * peer + 1e-6 * expected.norm()


@pytest.mark.parametrize("impl", ["auto", "portable"])
@pytest.mark.parametrize("dim", [64, 128])
def test_250_repeats_have_the_same_bits(dim, impl):
    q, k, v, dout = tensors(1000, 1100, dim, "bf16", heads=8)
    o, lse = fkjit.attention(q, k, v, causal=True, return_lse=True)
    first = fkjit.attention_backward(dout, q, k, v, o, lse, causal=True, impl=impl)
    for _ in range(250):
        again = fkjit.attention_backward(dout, q, k, v, o, lse, causal=True, impl=impl)
        assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))


def test_autograd_is_what_the_call_gives():
    q, k, v, dout = tensors(300, 300, 64, "bf16")
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    fkjit.attention(*leaves, causal=True).backward(dout)
    o, lse = fkjit.attention(q, k, v, causal=True, return_lse=True)
    found = fkjit.attention_backward(dout, q, k, v, o, lse, causal=True)
    assert all(torch.equal(x.grad, dx) for x, dx in zip(leaves, found, strict=True))


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_captured_graph_reads_its_inputs_anew(deterministic):
    q, k, v, dout = tensors(200, 200, 64, "fp16")
    o, lse = fkjit.attention(q, k, v, return_lse=True)
    options = {"deterministic": deterministic}
    with quiet():
        fkjit.prepare("attention_backward", dout, q, k, v, o, lse, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = fkjit.attention_backward(dout, q, k, v, o, lse, **options)
    for seed in range(3):
        for old, new in zip((q, k, v, dout), tensors(200, 200, 64, "fp16", seed=seed), strict=True):
            old.copy_(new)
        new_o, new_lse = fkjit.attention(q, k, v, return_lse=True)
        o.copy_(new_o), lse.copy_(new_lse)
        graph.replay()
        expected = fkjit.attention_backward(dout, q, k, v, o, lse)
        for one, two in zip(made, expected, strict=True):
            assert torch.allclose(one, two, rtol=1e-2, atol=1e-2)


def test_another_stream():
    q, k, v, dout = tensors(300, 300, 128, "bf16")
    o, lse = fkjit.attention(q, k, v, return_lse=True)
    expected = fkjit.attention_backward(dout, q, k, v, o, lse)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        found = fkjit.attention_backward(dout, q, k, v, o, lse)
    stream.synchronize()
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
