"""Few queries of many keys in `fkjit.attention` on a GPU: drawn shapes against float32, the same
bits each time, plans, graphs and gradients."""

from __future__ import annotations

import numpy as np
import pytest

import fkjit
from fkjit.jit.build import quiet
from fkjit.ops.attention.forward import _ATTENTION

torch = pytest.importorskip("torch", reason="needs torch")
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def silent():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    with quiet():
        yield


def kernels():
    """The ops of the kernels that calls have plans for."""
    return {s.kernel.spec.id for plan in _ATTENTION.plans.known for s in plan.steps.starts}


def drawn(seed):
    """(batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, causal, dtype), few queries."""
    rng = np.random.default_rng(seed)
    kv, group = (int(rng.choice([1, 2, 4, 8])) for _ in "ab")
    sq, sk = int(2 ** rng.uniform(4.1, 9)), int(2 ** rng.uniform(9, 15))
    dim = int(rng.choice([40, 64, 96, 128, 136, 256]))
    dtype = torch.bfloat16 if rng.random() < 0.5 else torch.float16
    return int(rng.integers(1, 3)), kv * group, kv, sq, sk, dim, bool(rng.random() < 0.5), dtype


def make(shape):
    b, hq, hkv, sq, sk, dim, _, dtype = shape
    q = torch.randn(b, sq, hq, dim, device="cuda", dtype=dtype).transpose(1, 2)
    k, v = (torch.randn(b, hkv, sk, dim, device="cuda", dtype=dtype) for _ in "kv")
    return q, k, v


def exact(q, k, v, causal):
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device="cuda").triu(
            1 + k.shape[2] - q.shape[2]
        )
        s = s.masked_fill(hidden, -torch.inf)
    return s.softmax(-1) @ v, s.logsumexp(-1)


@pytest.mark.parametrize("seed", range(24))
def test_drawn_shapes(seed):
    shape = drawn(seed)
    q, k, v = make(shape)
    causal = shape[6]
    want, want_lse = exact(q, k, v, causal)
    first = fkjit.attention(q, k, v, causal=causal, return_lse=True)
    assert (first[1].double() - want_lse).abs().max() <= 1e-3
    limit = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[shape[7]]
    assert (first[0].double() - want).abs().max() <= 2 * limit * max(1, want.abs().max().item())
    for _ in range(3):
        again = fkjit.attention(q, k, v, causal=causal, return_lse=True)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_they_get_these_kernels_and_others_do_not():
    _ATTENTION.plans.forget()
    few = make((1, 32, 8, 40, 16384, 128, False, torch.bfloat16))
    for _ in range(3):
        fkjit.attention(*few)
    assert kernels() == {"attention_few.flash_sm90", "attention_few.combine"}
    _ATTENTION.plans.forget()
    many = make((1, 32, 8, 2048, 2048, 128, False, torch.bfloat16))
    for _ in range(3):
        fkjit.attention(*many)
    assert kernels() == {"attention.flash_sm90"}


def test_heads_that_share_a_tile_without_parts():
    _ATTENTION.plans.forget()
    shape = (20, 32, 8, 20, 3000, 128, True, torch.bfloat16)
    q, k, v = make(shape)
    for _ in range(3):
        o = fkjit.attention(q, k, v, causal=True)
    assert kernels() == {"attention_few.flash_sm90"}
    assert (o.double() - exact(q, k, v, True)[0]).abs().max() <= 2**-7


def test_a_graph_follows_its_inputs():
    shape = (1, 16, 4, 64, 9000, 64, False, torch.float16)
    q, k, v = make(shape)
    fkjit.attention.prepare(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = fkjit.attention(q, k, v)
    for _ in range(3):
        for x in (q, k, v):
            x.normal_()
        graph.replay()
        assert (o.double() - exact(q, k, v, False)[0]).abs().max() <= 2e-3


def test_gradients():
    shape = (1, 8, 2, 33, 5000, 64, True, torch.float16)
    q, k, v = (x.detach().requires_grad_() for x in make(shape))
    do = torch.randn_like(q)
    fkjit.attention(q, k, v, causal=True).backward(do)
    found = [x.grad.double() for x in (q, k, v)]
    doubles = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact(*doubles, True)[0].backward(do.double())
    for mine, theirs in zip(found, doubles, strict=True):
        assert (mine - theirs.grad).abs().max() <= 2e-3 * max(1, theirs.grad.abs().max().item())
