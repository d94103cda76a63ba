"""Decoding in all its forms on a GPU: against float64, in graphs, pages before windows gone."""

from __future__ import annotations

import numpy as np
import pytest

import fkjit
from tests.attention.decode.kit import Batch
from tests.attention.feature_kit import FEATURES, draw, exact, own_case

torch = pytest.importorskip("torch", reason="needs torch")
pytestmark = pytest.mark.gpu

LIMITS = {"fp16": 4e-3, "bf16": 2e-2}


def there(value):
    """What a call takes, on the GPU."""
    if isinstance(value, dict):
        return {name: there(item) for name, item in value.items()}
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.name == "bfloat16":
        return torch.from_numpy(value.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(value)).cuda()


SHAPES = (  # tokens, heads, dims, longest, dtype, features
    (1, (32, 8), (128, 128), 5000, "bf16", {"window", "softcap", "sinks"}),
    (4, (8, 2), (64, 64), 3001, "fp16", FEATURES),
    (16, (16, 2), (128, 96), 1024, "bf16", {"alibi_slopes", "mask", "score_mod", "window"}),
    (2, (4, 4), (256, 256), 2000, "fp16", {"window", "softcap", "sinks", "score_mod"}),
    (7, (40, 8), (96, 96), 777, "bf16", {"bias", "window", "alibi_slopes"}),
)


@pytest.mark.parametrize(
    "shape", SHAPES, ids=lambda one: " ".join(map(str, [*one[:-1], *sorted(one[-1])]))
)
def test_compositions(shape):
    tokens, heads, dims, longest, dtype, features = shape
    lengths = [longest, 0, tokens // 2, 17, longest - 1]
    case = draw(longest, 5, heads, (tokens, longest), dims, dtype, features)
    given = [there(x) for x in case[:3]]
    for x in given[1:]:
        for b, length in enumerate(lengths):
            x[b, :, length:] = float("nan")
    given.append(torch.tensor(lengths, dtype=torch.int32, device="cuda"))
    for split in (None, 256):
        o, lse = fkjit.attention_decode(
            *given, **there(case.options), split_size=split, return_lse=True
        )
        for b, length in enumerate(lengths):
            want, want_lse = exact(own_case(case, b, length))
            limit = LIMITS[dtype] * max(1, np.abs(want).max(initial=0))
            assert np.abs(o[b].double().cpu().numpy() - want[0]).max() <= limit, b
            found, seen = lse[b].cpu().numpy(), np.isfinite(want_lse[0])
            assert np.array_equal(np.isneginf(found), ~seen), b
            assert np.abs(found[seen] - want_lse[0][seen]).max(initial=0) <= 1e-3, b


@pytest.mark.parametrize("storage", ["same", "fp8", "int8"])
def test_windows_of_pages_are_those_of_whole_sequences(storage):
    """Pages before the window are gone; codes; repeats to the bit, alone and among others."""
    batch = Batch(
        [9000, 30, 4001, 0, 512], tokens=3, heads_q=16, heads_kv=4, dim=128, dtype="bf16",
        storage=storage, page_size=32,
    )  # fmt: skip
    form = {
        "window": (1000, 0),
        "softcap": 4.0,
        "alibi_slopes": np.linspace(0, 0.1, 16, dtype="f4"),
    }
    for b, length in enumerate(batch.lengths):
        batch.table[b, : max(length - 1003, 0) // 32] = -1
    pages = tuple(there(x) for x in batch.pages)
    rest = (pages, there(batch.table), there(batch.lengths))
    given = {**there(form), **there(batch.scales)}
    q = there(batch.q)
    o = fkjit.paged_attention(q, *rest, **given)
    assert all(torch.equal(fkjit.paged_attention(q, *rest, **given), o) for _ in range(250))
    parts = fkjit.paged_attention(q, *rest, **given, split_size=256)
    assert (o - parts).abs().max().item() <= 2e-2
    for b, length in enumerate(batch.lengths):
        rows = torch.tensor([b], dtype=torch.int32, device="cuda")
        alone = fkjit.paged_attention(q[b : b + 1], *rest, rows=rows, **given, split_size=256)
        assert torch.equal(alone[0], parts[b])
        case = draw(0, 1, (16, 4), (3, 1), (128, 128), "bf16", ())
        own = [x.astype(np.float64)[None].swapaxes(1, 2)
               for x in (batch.q[b], batch.k[b], batch.v[b])]  # fmt: skip
        want, _ = exact(case._replace(
            q=own[0], k=own[1], v=own[2], options={**form, "causal": True}))  # fmt: skip
        assert np.abs(o[b].double().cpu().numpy().swapaxes(0, 1) - want[0]).max() <= 2e-2, length


def test_a_graph_follows_windows_of_sequences_that_grow():
    q, k, v = (torch.randn(2, h, n, 128, device="cuda").bfloat16()
               for h, n in ((8, 1), (2, 8000), (2, 8000)))  # fmt: skip
    lengths = torch.tensor([1, 7000], dtype=torch.int32, device="cuda")
    form = {"window": (511, 0), "sinks": torch.randn(8, device="cuda")}
    fkjit.prepare("attention_decode", q, k, v, lengths, **form)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = fkjit.attention_decode(q, k, v, lengths, **form)
    for step in (1, 30, 600):
        lengths += step
        graph.replay()
        assert torch.equal(o, fkjit.attention_decode(q, k, v, lengths, **form))
        for b, length in enumerate(lengths.tolist()):
            one = (q[b : b + 1], k[b : b + 1, :, :length], v[b : b + 1, :, :length])
            flash = fkjit.attention(*one, causal=True, **form)
            assert (o[b] - flash[0]).abs().max().item() <= 2e-2


def test_no_worse_than_twice_torch():
    q, k, v = (torch.randn(2, h, n, 128, device="cuda").bfloat16()
               for h, n in ((8, 2), (2, 3000), (2, 3000)))  # fmt: skip
    keys = torch.arange(3000, device="cuda")
    apart = torch.tensor([2998, 2999], device="cuda")[:, None] - keys
    hidden = (apart < 0) | (apart > 700)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    exactly = sdpa(q.double(), k.double(), v.double(), attn_mask=~hidden, enable_gqa=True)
    theirs = sdpa(q, k, v, attn_mask=~hidden, enable_gqa=True)
    o = fkjit.attention_decode(q, k, v, window=(700, 0))
    error, allowed = ((x.double() - exactly).abs().max().item() for x in (o, theirs))
    assert error <= 2 * allowed
