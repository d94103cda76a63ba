"""fkjit.merge_states on a CUDA GPU: right, in graphs, warm and cold alike."""

from __future__ import annotations

import sys

import pytest

import fkjit

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="needs torch")

fkjit.merge_states.prepare  # noqa: B018  imports the module
PLANS = sys.modules["fkjit.ops.attention.merge.call"]._OP.plans
SHAPES = [  # parts, B, H, S, Dv
    (2, 64, 32, 1, 128), (8, 3, 8, 1000, 128), (5, 1, 3, 77, 59), (33, 1, 1, 1, 256),
    (2, 1, 32, 16_384, 128), (3, 2, 4, 100, 40), (4, 1, 2, 9, 1), (2, 1, 1, 3, 5000),
]  # fmt: skip


def exact(o, lse, layout):
    seen = lse.isfinite()
    weights = lse.double().masked_fill(~seen, float("-inf")).softmax(0).nan_to_num()
    turned = o.transpose(2, 3) if layout == "bshd" else o
    made = (weights[..., None] * turned.double().masked_fill(~seen[..., None], 0)).sum(0)
    sums = lse.double().masked_fill(~seen, float("-inf")).logsumexp(0)
    return (made.transpose(1, 2) if layout == "bshd" else made), sums


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_in_float64(shape, dtype, layout):
    parts, b, h, s, columns = shape
    rows = (b, s, h) if layout == "bshd" else (b, h, s)
    o = torch.randn(parts, *rows, columns, device="cuda", dtype=dtype)
    lse = 4 * torch.randn(parts, b, h, s, device="cuda")
    lse[torch.rand_like(lse) < 0.2] = float("-inf")
    expected, sums = exact(o, lse, layout)
    calls = [(o, lse)] + ([(o[0], lse[0], o[1], lse[1])] if parts == 2 else [])
    for given in calls:
        for _ in range(4):  # cold, with a plan made, and warm
            made, whole = fkjit.merge_states(*given, layout=layout)
            rounded = expected.to(dtype).double()
            limit = 2 * (rounded - expected).abs().max() + 2e-6
            assert (made.double() - expected).abs().max() <= limit
            assert torch.allclose(whole.double(), sums, rtol=1e-6, atol=2e-6)


def test_warm_calls_graphs_and_the_same_bits():
    o = torch.randn(4, 2, 8, 100, 64, device="cuda", dtype=torch.bfloat16)
    lse = torch.randn(4, 2, 8, 100, device="cuda")
    first = fkjit.merge_states(o, lse)
    fkjit.merge_states(o, lse)  # what is met again gets a plan
    assert PLANS.lookup([o, lse, None, None, None, None], ("bhsd",)) is not None
    for _ in range(250):
        again = fkjit.merge_states(o, lse)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = fkjit.merge_states(o, lse)
    o.normal_()
    graph.replay()
    expected = fkjit.merge_states(o, lse)
    assert torch.equal(made[0], expected[0]) and torch.equal(made[1], expected[1])


def test_a_shared_prefix_and_what_follows_it():
    """The prefix once for all sequences, the rest of each by its own pages, merged: as at once."""
    q = torch.randn(4, 8, 128, device="cuda", dtype=torch.bfloat16)
    prefix = [torch.randn(1, 2, 300, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv"]
    rest = [torch.randn(4, 2, 40, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv"]
    shared = fkjit.attention(q.transpose(0, 1)[None], *prefix, return_lse=True)
    shared = shared[0][0].transpose(0, 1), shared[1][0].T
    own = fkjit.attention_decode(q, *rest, return_lse=True)
    o, lse = fkjit.merge_states(*shared, *own)
    whole = [torch.cat([p.expand(4, -1, -1, -1), r], 2) for p, r in zip(prefix, rest, strict=True)]
    expected = fkjit.attention_decode(q, *whole, return_lse=True)
    assert torch.allclose(lse, expected[1], atol=1e-4)
    assert (o.float() - expected[0].float()).norm() <= 6e-3 * expected[0].float().norm()


def test_gradients():
    o = torch.randn(3, 2, 4, 10, 32, device="cuda", requires_grad=True)
    lse = torch.randn(3, 2, 4, 10, device="cuda", requires_grad=True)
    found, whole = fkjit.merge_states(o, lse)
    (found.square().sum() + whole.sum()).backward()
    mine = o.grad.clone(), lse.grad.clone()
    o.grad = lse.grad = None
    ((lse.softmax(0)[..., None] * o).sum(0).square().sum() + lse.logsumexp(0).sum()).backward()
    assert torch.allclose(mine[0], o.grad, atol=1e-5) and torch.allclose(
        mine[1], lse.grad, atol=1e-4
    )
