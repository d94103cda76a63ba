"""Dependent launches in CUDA graphs: kernels that read what the one before has just written."""

from __future__ import annotations

import pytest

import fkjit

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="needs torch")


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda").to(dtype)


def captured(call):
    """A graph of what `call` does, which was called before."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


@pytest.mark.parametrize("shape", [(1, 4096), (64, 1024), (2048, 8192)], ids=str)
def test_norms_in_place_one_after_the_other(shape):
    start, weight = normal(*shape), 1 + 0.01 * normal(shape[1])
    x = start.clone()

    def chain():
        for _ in range(30):
            fkjit.rms_norm(x, weight, out=x)
            fkjit.vector_add(x, start, out=x)

    graph = captured(chain)
    x.copy_(start)
    chain()
    expected = x.clone()
    for _ in range(5):
        x.copy_(start)
        graph.replay()
        assert torch.equal(x, expected)


@pytest.mark.parametrize("batch", [1, 8])
def test_a_decode_step_of_many_layers(batch):
    keys, layers, page = 1024, 12, 16
    pages = batch * keys // page
    pools = [normal(pages, page, 8, 128) for _ in range(2 * layers)]
    table = torch.randperm(pages, device="cuda").int().view(batch, -1)
    lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    slots = table[:, -1] * page + page - 1
    start, weight = normal(batch, 4096), 1 + 0.01 * normal(4096)
    x, q, k = start.clone(), normal(batch, 32, 128), normal(batch, 8, 128)
    o, ids = torch.empty_like(q), lengths.long() - 1

    def step():
        for layer in range(layers):
            cache = (pools[2 * layer], pools[2 * layer + 1])
            fkjit.rms_norm(x, weight, out=q.view(batch, 4096))
            k.copy_(q[:, :8])
            fkjit.rope(q, k, ids, inplace=True)
            fkjit.kv_append(k, k, cache, slots)
            fkjit.paged_attention(q, cache, table, lengths, layout="nhd", out=o)
            fkjit.vector_add(x, o.view(batch, 4096), out=x)

    graph = captured(step)
    x.copy_(start)
    step()
    expected = x.clone()
    assert expected.isfinite().all() and not torch.equal(expected, start)
    for _ in range(5):
        x.copy_(start)
        graph.replay()
        assert torch.equal(x, expected)


def test_other_kernels_before_and_behind():
    a = normal(1 << 20, dtype=torch.float32)
    x, y = torch.empty_like(a), torch.empty_like(a)

    def chain():
        torch.mul(a, 3.0, out=x)
        fkjit.vector_add(x, a, out=y)
        x.zero_()
        y.mul_(0.5)
        fkjit.vector_add(x, y, out=y)

    graph = captured(chain)
    for _ in range(20):
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, (a * 3.0 + a) * 0.5)
