"""Triton twins on a CUDA GPU, compiled and tuned by Triton itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs triton")
from bench.core.catalog import operations  # noqa: E402
from tests.twins.kit import assert_right, normal  # noqa: E402


def attention(*arguments, **options):
    from bench.attention.triton_attention import attention as twin

    return twin(*arguments, **options)


SHAPES = [  # B, Hq, Hkv, Sq, Sk, D, Dv, causal
    (2, 8, 2, 1000, 1000, 128, 128, True),
    (2, 4, 2, 777, 333, 64, 64, True),
    (1, 3, 1, 500, 500, 192, 128, True),
    (1, 2, 1, 129, 257, 77, 51, False),
    (3, 8, 2, 1, 4097, 128, 128, True),
]


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_errs_at_most_twice_as_much_as_pytorch(shape, dtype):
    b, hq, hkv, sq, sk, d, dv, causal = shape
    sizes = ((hq, sq, d), (hkv, sk, d), (hkv, sk, dv))
    q, k, v = (
        normal(b, h, s, w, dtype=dtype, device="cuda", seed=i) for i, (h, s, w) in enumerate(sizes)
    )
    poison = torch.full((b, hq, sq, dv), float("nan"), dtype=q.dtype, device="cuda")
    del poison  # the allocator may hand this memory out next
    assert_right(attention(q, k, v, causal=causal, return_lse=True), q, k, v, causal)


def test_attention_replays_in_a_graph_and_takes_strides():
    packed = normal(2, 600, 3, 4, 64, device="cuda")  # [B, S, 3, H, D]
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    expected, lse = attention(q, k, v, causal=True, return_lse=True)
    assert_right((expected, lse), q, k, v, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, _ = attention(q, k, v, causal=True, return_lse=True)
    graph.replay()
    assert torch.equal(o, expected)


def test_attention_without_keys():
    q = normal(2, 2, 20, 64, device="cuda")
    o, lse = attention(q, q[:, :, :0], q[:, :, :0], return_lse=True)
    assert not o.any() and torch.isneginf(lse).all()


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("count", [1, 1000, (1 << 20) + 3])
def test_vector_add_rounds_once(count, dtype):
    from bench.elementwise.triton_vector_add import vector_add

    a, b = (normal(count, dtype=dtype, device="cuda", seed=i) for i in range(2))
    assert torch.equal(vector_add(a, b), (a.float() + b.float()).to(a.dtype))


QUICK = [
    (name, number)
    for name in (
        "kv_append", "kv_read", "kv_copy", "kv_slots", "rope", "rope_kv_append", "reduce",
        "grouped_linear", "moe_layer",
    )
    for number in range(len(operations()[name].sets["quick"]))
]  # fmt: skip


@pytest.mark.parametrize(("name", "number"), QUICK)
def test_twins_are_right_on_the_quick_cases_of_the_suite(name, number):
    op = operations()[name]
    (twin,) = [peer for peer in op.peers if peer.kind == "twin"]
    given = op.sets["quick"][number]
    arrays = op.inputs(given, SimpleNamespace(torch=torch, place="cuda"))
    right, prepared = op.expected(given, arrays), twin.prepare(given, arrays)
    for _ in range(2):  # while tiles are tried, and afterwards
        assert right.judge(prepared.output(prepared.call())).why_wrong() is None
