"""Routing to experts on a CUDA GPU: numbers, graphs, streams, repeats, gradients."""

from __future__ import annotations

import sys

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("cupy", reason="needs CuPy")

import fkjit  # noqa: E402
from fkjit.jit.build import quiet  # noqa: E402

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def logits(tokens, experts, dtype="fp32", seed=0):
    generator = torch.Generator("cuda").manual_seed(seed + tokens + experts)
    return torch.randn(tokens, experts, device="cuda", generator=generator).to(DTYPES[dtype])


def sorted_by_torch(ids, experts, block_size):
    """(sorted_token_ids, expert_ids, num_tokens_post_padded, inverse, counts) of ids [T, K]."""
    flat, items = ids.flatten().long(), ids.numel()
    order = torch.sort(flat, stable=True).indices
    counts = torch.bincount(flat, minlength=experts)
    padded = -(-counts // block_size) * block_size
    offsets, before = padded.cumsum(0) - padded, counts.cumsum(0) - counts
    group = flat[order]
    place = offsets[group] + torch.arange(items, device=ids.device) - before[group]
    most = min(items * block_size, items + experts * (block_size - 1))
    most = -(-most // block_size) * block_size
    sorted_ids = torch.full((most,), items, device=ids.device)
    sorted_ids[place] = order
    inverse = torch.empty_like(flat)
    inverse[order] = place
    tiles = torch.full((most // block_size,), -1, device=ids.device)
    of_tiles = torch.repeat_interleave(torch.arange(experts, device=ids.device), padded)
    of_tiles = of_tiles[::block_size]
    tiles[: of_tiles.numel()] = of_tiles
    return sorted_ids, tiles, padded.sum(), inverse.view_as(ids), counts


def assert_sorted(groups, ids, experts, block_size):
    found = (
        groups.sorted_token_ids, groups.expert_ids, groups.num_tokens_post_padded[0],
        groups.inverse, groups.counts,
    )  # fmt: skip
    for one, two in zip(found, sorted_by_torch(ids, experts, block_size), strict=True):
        assert one.dtype == torch.int32 and torch.equal(one.long(), two)


SHAPES = [
    (32_768, 64, 2, 64), (1, 64, 2, 64), (4096, 128, 8, 16), (70_001, 8, 1, 1), (5000, 256, 8, 64),
    (131_072, 512, 8, 64), (3000, 1000, 32, 128), (777, 60, 4, 32), (300, 96, 6, 1),
    (900, 256, 8, 64), (100, 8, 8, 16), (3000, 16, 2, 4), (5000, 32, 8, 8),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_as_torch_does_it(dtype, shape):
    tokens, experts, top_k, block_size = shape
    x = logits(tokens, experts, dtype)
    with quiet():
        weights, ids, groups = fkjit.moe_route_and_regroup(x, top_k, block_size)
        alone = fkjit.moe_route(x, top_k)
        again = [fkjit.moe_regroup(i, experts, block_size) for i in (ids, ids.long())]
    ordered = torch.sort(x.float(), dim=-1, descending=True, stable=True).indices[:, :top_k]
    assert torch.equal(ids.long(), ordered)
    exact = torch.softmax(x.double(), -1).gather(1, ordered)
    peer = torch.softmax(x.float(), -1).gather(1, ordered)
    error = ((weights - exact) / exact).abs().max()
    assert error <= 2 * ((peer - exact) / exact).abs().max() + 1e-7
    assert torch.equal(alone[0], weights) and torch.equal(alone[1], ids)
    assert_sorted(groups, ids, experts, block_size)
    assert all(torch.equal(a, b) for other in again for a, b in zip(other, groups, strict=True))


def test_deepseek_groups():
    x, bias = logits(4096, 256), logits(1, 256)[0] / 10
    with quiet():
        weights, ids = fkjit.moe_route(
            x, 8, scoring="sigmoid", renormalize=True, bias=bias, num_groups=8, topk_groups=4,
            routed_scaling_factor=2.5,
        )  # fmt: skip
    scores = torch.sigmoid(x)
    best = (scores + bias).view(-1, 8, 32).topk(2, -1).values.sum(-1).topk(4, -1).indices
    kept = torch.zeros(4096, 8, device="cuda").scatter_(1, best, 1).bool()
    masked = (scores + bias).masked_fill(~kept.repeat_interleave(32, 1), -torch.inf)
    expected = masked.topk(8, -1).indices
    same = (ids.long() == expected).all(-1)
    assert same.float().mean() > 0.999  # sums of rounded scores may tie
    chosen = scores.gather(1, expected)
    chosen = chosen / chosen.sum(-1, keepdim=True) * 2.5
    assert (weights - chosen)[same].abs().max() < 1e-6


@pytest.mark.parametrize("experts", [64, 512])
def test_all_tokens_to_one_expert_and_all_alike(experts):
    x = torch.zeros(9000, experts, device="cuda")
    with quiet():
        _, ids, groups = fkjit.moe_route_and_regroup(x, 4, 32)
        assert torch.equal(ids, torch.arange(4, device="cuda").int().expand(9000, 4))
        assert_sorted(groups, ids, experts, 32)
        x[:, experts - 1] = 9
        _, ids, groups = fkjit.moe_route_and_regroup(x, 1, 32)
    assert (ids == experts - 1).all()
    assert_sorted(groups, ids, experts, 32)


@pytest.mark.parametrize("shape", [(32_768, 64, 2), (9001, 256, 8), (40, 64, 2)], ids=str)
def test_a_thousand_repeats_are_the_same_bits(shape):
    tokens, experts, top_k = shape
    x = torch.round(logits(tokens, experts) * 2)
    with quiet():
        weights, ids, groups = fkjit.moe_route_and_regroup(x, top_k, 64)
        wrong = torch.zeros((), device="cuda", dtype=torch.bool)
        for _ in range(1000):
            again = fkjit.moe_route_and_regroup(x, top_k, 64)
            wrong |= (again[0] != weights).any() | (again[1] != ids).any()
            for one, two in zip(again[2], groups, strict=True):
                wrong |= (one != two).any()
    assert not wrong.item()


def test_in_a_cuda_graph_with_the_number_of_tokens_on_the_device():
    x, most = logits(3000, 64), 3000
    number = torch.tensor([most], device="cuda", dtype=torch.int32)
    with quiet():
        fkjit.prepare("moe_route_and_regroup", x, 2, 16, num_tokens=number)
        fkjit.prepare("moe_regroup", torch.zeros(most, 2, device="cuda").int(), 64, 16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weights, ids, groups = fkjit.moe_route_and_regroup(x, 2, 16, num_tokens=number)
        alone = fkjit.moe_regroup(ids, 64, 16)
    for tokens in (3000, 1, 0, 2999, 130, 5000, -3):
        real = min(max(tokens, 0), most)
        number.fill_(tokens)
        x.copy_(logits(most, 64, seed=tokens))
        graph.replay()
        with quiet():
            expected = fkjit.moe_route_and_regroup(x[:real].contiguous(), 2, 16)
        assert torch.equal(ids[:real], expected.topk_ids) and (ids[real:] == -1).all()
        assert torch.equal(weights[:real], expected.topk_weights) and (weights[real:] == 0).all()
        for found in (groups, alone):
            assert torch.equal(found.counts, expected.groups.counts)
            assert torch.equal(found.offsets, expected.groups.offsets)
            assert torch.equal(found.inverse[:real], expected.groups.inverse)
            assert (found.inverse[real:] == -1).all()


def test_many_captured_calls_have_counters():
    """Those of one capture on one stream share them; on another stream they have their own."""
    x = logits(32_768, 64)
    side = torch.cuda.Stream()
    with quiet():
        expected = fkjit.moe_route_and_regroup(x, 2, 64).groups.inverse
    graph, found = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        for _ in range(100):
            found.append(fkjit.moe_route_and_regroup(x, 2, 64).groups.inverse)
            with torch.cuda.stream(side):
                found.append(fkjit.moe_route_and_regroup(x, 2, 64).groups.inverse)
        torch.cuda.current_stream().wait_stream(side)
    for _ in range(3):
        for one in found:
            one.fill_(-5)
        graph.replay()
        assert all(torch.equal(one, expected) for one in found)


def test_graphs_on_streams_at_once():
    """Blocks that come in early wait for one another, while other streams' take the room."""
    shapes, running = ((32_768, 64, 2, "fp32"), (32_768, 64, 2, "bf16"), (4096, 128, 8, "fp32")), []
    for tokens, experts, top_k, dtype in shapes:
        x, stream, graph = (
            logits(tokens, experts, dtype),
            torch.cuda.Stream(),
            torch.cuda.CUDAGraph(),
        )
        with quiet():
            expected = fkjit.moe_route_and_regroup(x, top_k, 64)
            fkjit.moe_regroup(expected.topk_ids, experts, 64)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            results = []
            for _ in range(30):
                found = fkjit.moe_route_and_regroup(x, top_k, 64)
                results += [found.groups, fkjit.moe_regroup(found.topk_ids, experts, 64)]
        running.append((stream, graph, expected.groups, results, x))
    for _ in range(100):
        for stream, graph, *_ in running:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for _, _, expected, results, _ in running:
        for found in results:
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_on_several_streams_at_once():
    """Grids that do not fit beside each other: none may hold up another for ever."""
    x = logits(32_768, 64)
    with quiet():
        expected = fkjit.moe_route_and_regroup(x, 2, 64)
        streams = [torch.cuda.Stream() for _ in range(6)]
        torch.cuda.synchronize()
        found = []
        for _ in range(50):
            for stream in streams:
                with torch.cuda.stream(stream):
                    found.append(fkjit.moe_route_and_regroup(x, 2, 64).groups.inverse)
    torch.cuda.synchronize()
    assert all(torch.equal(one, expected.groups.inverse) for one in found)


@pytest.mark.parametrize("top_k", [2, 6])
@pytest.mark.parametrize("columns", [7168, 999])
@pytest.mark.parametrize("dtype", DTYPES)
def test_permute_and_combine_with_gradients(dtype, columns, top_k):
    tokens, experts = 700, 40
    with quiet():
        weights, _, groups = fkjit.moe_route_and_regroup(logits(tokens, experts), top_k, 16)
    x = logits(tokens, columns, dtype).requires_grad_()
    weights.requires_grad_()
    with quiet():
        rows = fkjit.moe_permute(x, groups)
        rows.retain_grad()
        out = fkjit.moe_combine(rows, groups, weights)
        given = logits(tokens, columns, dtype, 1)
        out.backward(given)
        first = [x.grad.clone(), weights.grad.clone()]
    places = groups.sorted_token_ids.long()
    known = places < tokens * top_k
    assert torch.equal(rows[known], x[places[known] // top_k]) and not rows[~known].any()
    double, w = (a.detach().double().requires_grad_() for a in (x, weights))
    exact = (double[:, None] * w[..., None]).sum(1)
    exact.backward(given.double())
    bound = {"fp16": 2e-3, "bf16": 2e-2, "fp32": 1e-5}[dtype]
    scale = lambda a: a.abs().max().clamp(min=1)  # noqa: E731
    for found, right in ((out, exact), (first[0], double.grad), (first[1], w.grad)):
        assert (found.double() - right).abs().max() <= bound * scale(right)
    assert not rows.grad[~known].any()
    with quiet():
        plain = fkjit.moe_combine(rows.detach().requires_grad_(), groups.inverse, weights)
        assert torch.equal(plain, out)
    weights.grad = None
    plain.backward(given)
    assert torch.equal(weights.grad, first[1])


def test_a_geometry_that_was_met_twice_takes_the_warm_path():
    op = sys.modules["fkjit.ops.moe.route_and_regroup"]._OP
    x = logits(500, 64)
    with quiet():
        for _ in range(2):
            fkjit.moe_route_and_regroup(x, 2, 16)
    options = (2, "softmax", False, None, None, 1.0, 16, None, None, None, False)
    assert op.plans.lookup([x, *[None] * 11], options) is not None


def test_a_graph_of_all_of_it_again_and_again():
    """Kernels that come in before the one ahead is over read what it wrote."""
    logits_, x = logits(500, 64), logits(500, 1024, "bf16")

    def layer():
        weights, ids = fkjit.moe_route(logits_, 8)
        groups = fkjit.moe_regroup(ids, 64, 16)
        rows = fkjit.moe_permute(x, groups)
        return fkjit.moe_combine(rows, groups, weights)

    with quiet():
        layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [layer() for _ in range(20)]
    for seed in range(20):
        logits_.copy_(logits(500, 64, seed=seed))
        x.copy_(logits(500, 1024, "bf16", seed))
        graph.replay()
        with quiet():
            expected = layer()
        assert all(torch.equal(one, expected) for one in found)
