"""Attention that goes on where other keys left it, on a GPU: rings of ranks, one after the other in
one process, against float64 and PyTorch; the same bits; CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest

from fkjit.jit.build import quiet

torch = pytest.importorskip("torch", reason="needs torch")
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def silent():
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs a GPU of compute capability 8.0")
    with quiet():
        yield


def of_rank(x: Any, rank: int, size: int) -> Any:
    """A rank's rows of [B, H, S, D], zigzag."""
    from fkjit.distributed.order import chunks_of

    chunks = x.chunk(2 * size, 2)
    return torch.cat([chunks[c] for c in chunks_of("zigzag", rank, size)], 2).contiguous()


def ring(kind: str, qkv: Any, rank: int, size: int, causal: bool, sinks: Any) -> Any:
    """(o, lse) of a rank's rows, without messages."""
    from fkjit.distributed import ring as rings
    from fkjit.distributed.groups import Group
    from fkjit.distributed.pieces import Dense, Rules

    q = of_rank(qkv[0], rank, size)
    rows = Dense(Rules((None, 0 if causal else None), None, None))
    call = rings.Ring(Group("ring", None, rank, size), "zigzag", rows, q.shape[2] // 2)
    steps = call.steps()
    every = tuple(tile for step in steps for tile in step)
    made = getattr(rings, kind)(rows, q, qkv[2], sinks, every)
    for step, found in enumerate(steps):
        k, v = (of_rank(x, (rank - step) % size, size) for x in qkv[1:])
        for tile in found:
            made.add(k, v, tile)
    return made.results()


def exact(q: Any, k: Any, v: Any, causal: bool, sinks: Any) -> Any:
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
        s = s.masked_fill(hidden, -torch.inf)
    lse = s.logsumexp(-1)
    lse = lse if sinks is None else torch.logaddexp(lse, sinks.double()[None, :, None])
    return (s - lse[..., None]).exp() @ v, lse


CASES = [
    # head_dim, head_dim_v, heads_q, heads_kv, tokens, ranks, causal, sinks, dtype
    (128, 128, 8, 2, 1216, 4, True, True, torch.bfloat16),
    (64, 64, 4, 4, 608, 2, True, False, torch.float16),
    (256, 256, 4, 1, 608, 4, True, False, torch.bfloat16),
    (96, 96, 4, 2, 912, 3, False, True, torch.bfloat16),
    (192, 128, 4, 4, 608, 2, True, False, torch.bfloat16),
    (40, 24, 4, 2, 304, 4, True, True, torch.float16),
    (128, 128, 4, 1, 128, 4, True, False, torch.bfloat16),  # few rows a rank
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_ring_of_ranks_is_attention_of_the_whole_sequence(case):
    dim, dim_v, heads, kv, tokens, size, causal, has_sinks, dtype = case
    torch.manual_seed(tokens + dim)
    shapes = ((heads, dim), (kv, dim), (kv, dim_v))
    qkv = [torch.randn(2, h, tokens, d, device="cuda", dtype=dtype) for h, d in shapes]
    sinks = torch.randn(heads, device="cuda") if has_sinks else None
    wanted, sums = exact(*qkv, causal, sinks)
    scale = float(wanted.abs().max())
    for rank in range(size):
        o, lse = ring("Carried", qkv, rank, size, causal, sinks)
        again = ring("Carried", qkv, rank, size, causal, sinks)
        assert torch.equal(o, again[0]) and torch.equal(lse, again[1])
        limit = scale * {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}[dtype]
        for found in (o, ring("Merged", qkv, rank, size, causal, sinks)[0]):
            assert float((found.double() - of_rank(wanted, rank, size)).abs().max()) < limit
        exactly = of_rank(sums[..., None], rank, size)[..., 0]
        assert torch.allclose(lse.double(), exactly, atol=2e-5, rtol=1e-6)


def test_a_graph_replays_a_ring_with_other_numbers():
    size, shapes = 4, ((8, 128), (2, 128), (2, 128))
    qkv = [torch.randn(1, h, 1024, d, device="cuda", dtype=torch.bfloat16) for h, d in shapes]
    for _ in range(3):
        ring("Carried", qkv, 1, size, True, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = ring("Carried", qkv, 1, size, True, None)
    for x in qkv:
        x.normal_()
    graph.replay()
    assert torch.equal(made[0], ring("Carried", qkv, 1, size, True, None)[0])
