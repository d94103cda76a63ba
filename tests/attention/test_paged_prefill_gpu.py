"""Packed queries of keys in pages on a GPU: mixed batches, codes, graphs that follow other
lengths."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import fkjit  # noqa: E402
from fkjit.jit.build import quiet  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
HEADS, KV_HEADS = 8, 2
BATCHES = (
    ((1, 900), (300, 700), (1, 33), (0, 5), (1, 1), (129, 129), (1, 4000)),
    ((1, 500),) * 70 + ((40, 40),),
    ((64, 1000), (200, 200), (33, 2000)),
)
KINDS = ((128, torch.bfloat16), (64, torch.float16), (256, torch.bfloat16))
STORED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@pytest.fixture(autouse=True)
def silent():
    with quiet():
        yield


def draw(lengths: Any, page: int, dim: int, dtype: Any, seed: int = 0) -> dict[str, Any]:
    """Arrays of a call, pages in an order drawn anew; pages of nobody hold NaN."""
    made = torch.Generator("cuda").manual_seed(seed)
    pages = [-(-keys // page) for _, keys in lengths]
    shape = (sum(pages) + 3, page, KV_HEADS, dim)
    k, v = (torch.randn(shape, device="cuda", generator=made).to(dtype) for _ in "kv")
    order = torch.randperm(shape[0], device="cuda", generator=made).int()
    for x in (k, v):
        x[order[sum(pages) :].long()] = torch.nan
    table = torch.full((len(lengths), max(pages)), -1, dtype=torch.int32, device="cuda")
    for row, own in enumerate(order[: sum(pages)].split(pages)):
        table[row, : len(own)] = own
    ends = torch.tensor([0, *(n for n, _ in lengths)], device="cuda").cumsum(0).int()
    q = torch.randn((int(ends[-1]), HEADS, dim), device="cuda", generator=made).to(dtype)
    sizes = torch.tensor([keys for _, keys in lengths], device="cuda").int()
    longest = max(new for new, _ in lengths)
    return {"q": q, "pages": (k, v), "table": table, "sizes": sizes, "ends": ends, "most": longest}


def call(given: dict[str, Any], **more: Any) -> Any:
    return fkjit.paged_attention(
        given["q"], more.pop("pages", given["pages"]), given["table"], given["sizes"],
        cu_seqlens_q=given["ends"], max_seqlen_q=given["most"], return_lse=True, **more,
    )  # fmt: skip


def textbook(given: dict[str, Any], row: int, window: int | None = None) -> Any:
    """o [S, Hq, D] of a sequence in float64."""
    keys, (first, last) = int(given["sizes"][row]), given["ends"][row : row + 2].tolist()
    page = given["pages"][0].shape[1]
    held = given["table"][row, : -(-keys // page)].long()
    k, v = (x[held].flatten(0, 1)[:keys].double().transpose(0, 1) for x in given["pages"])
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (k, v))
    q = given["q"][first:last].double().transpose(0, 1)
    apart = torch.arange(keys, device="cuda") - (
        torch.arange(last - first, device="cuda")[:, None] + keys - (last - first)
    )
    hidden = apart > 0 if window is None else (apart > 0) | (apart < -window)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1).nan_to_num() @ v).transpose(0, 1)


def assert_right(given: dict[str, Any], o: Any, window: int | None = None) -> None:
    limit = 4e-3 if o.dtype == torch.float16 else 2.5e-2
    for row in range(len(given["sizes"])):
        first, last = given["ends"][row : row + 2].tolist()
        expected = textbook(given, row, window)
        if last > first:
            assert (o[first:last] - expected).norm() <= limit * expected.norm()


@pytest.mark.parametrize("dim, dtype", KINDS)
@pytest.mark.parametrize("lengths", BATCHES, ids=["few", "70 and one", "none decodes"])
@pytest.mark.parametrize("page", [1, 16, 256])
def test_mixed_batches(lengths, page, dim, dtype):
    given = draw(lengths, page, dim, dtype)
    for window in (None, 300):
        options = {} if window is None else {"window": (window, 0)}
        o, lse = call(given, mixed=True, **options)
        assert_right(given, o, window)
        apart, sums = call(given, **options)
        assert_right(given, apart, window)
        there = torch.isfinite(sums)
        assert torch.equal(there, torch.isfinite(lse))
        assert (lse - sums)[there].abs().max() <= 2e-3


@pytest.mark.parametrize("storage", STORED)
@pytest.mark.parametrize(
    ("dim", "page", "dtype"),
    [
        (128, 16, "float16"), (40, 16, "float16"), (128, 64, "bfloat16"), (64, 8, "bfloat16"),
        (256, 16, "bfloat16"), (192, 256, "bfloat16"), (96, 16, "float16"), (64, 1, "float16"),
    ],
)  # fmt: skip
def test_quantized_pages(storage, dim, page, dtype):
    given = draw(BATCHES[0], page, dim, getattr(torch, dtype))
    scales = [torch.rand(KV_HEADS, device="cuda") * 0.02 + 0.01 for _ in "kv"]
    codes, numbers = [], []
    for held, scale in zip(given["pages"], scales, strict=True):
        scaled = (held.float() / scale[:, None]).nan_to_num(0).clamp(-127, 127)
        code = (scaled.round() if storage == "int8" else scaled).to(STORED[storage])
        codes.append(code)
        numbers.append((code.float() * scale[:, None]).to(held.dtype))
    for mixed in (False, True):
        o, _ = call(given, pages=tuple(codes), k_scale=scales[0], v_scale=scales[1], mixed=mixed)
        assert_right({**given, "pages": tuple(numbers)}, o)


@pytest.mark.parametrize("dim", [64, 128])
def test_a_captured_graph_follows_other_batches(dim):
    given = draw(((1, 400), (90, 400), (1, 300), (200, 420)), 16, dim, torch.float16)
    call(given, mixed=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, _ = call(given, mixed=True)
    for lengths in ((1, 1, 1, 1), (50, 1, 200, 1), (0, 0, 0, 0), (73, 73, 73, 73), (1, 200, 90, 1)):
        given["ends"].copy_(torch.tensor((0, *lengths)).cumsum(0).int())
        graph.replay()
        assert_right(given, o)
