"""Decoding, interpreted on the CPU: attention_decode and paged_attention against float64."""

from __future__ import annotations

import numpy as np
import pytest

import fkjit
from fkjit.ops.attention.decode.cases import attend
from tests.attention.decode.kit import LIMITS, Batch, check
from tests.core.sampling import one_in


@one_in(2)
@pytest.mark.parametrize("storage", ["same", "fp8", "int8"])
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_lengths_at_the_edges_of_pages_and_steps(layout, storage):
    """Poison beyond every length, race checks on."""
    lengths = [0, 1, 15, 16, 17, 63, 64, 65]
    batch = Batch(lengths, layout=layout, storage=storage, dtype="bf16")
    with fkjit.sanitize(race=True):
        o, lse = batch.call(return_lse=True)
    check(batch, o, lse)
    assert not o[0].any() and np.isneginf(lse[0]).all()


@pytest.mark.parametrize("page_size", [1, 2, 8, 32, 256])
def test_pages_of_all_sizes(page_size):
    batch = Batch([1023, 0, 1024], page_size=page_size, seed=page_size)
    check(batch, *batch.call(return_lse=True))


RNG = np.random.default_rng(8)
SHAPES = [  # tokens, heads of a group, KV heads, dim, dtype
    (1, 16, 1, 64, "fp16"), (16, 1, 1, 64, "bf16"), (3, 16, 1, 64, "fp16"), (16, 16, 1, 64, "fp16"),
    (2, 1, 3, 256, "bf16"), (5, 7, 1, 128, "bf16"), (1, 8, 2, 40, "fp16"), (7, 2, 2, 104, "fp16"),
    (4, 3, 1, 248, "fp16"), (13, 5, 1, 128, "fp16"),
]  # fmt: skip


@one_in(2)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tokens_and_groups(shape):
    """Rows in one tile and in several; fewer keys than new tokens, too."""
    tokens, group, heads, dim, dtype = shape
    lengths = [int(RNG.integers(tokens, 90)), tokens, tokens // 2]
    batch = Batch(
        lengths, tokens=tokens, heads_q=group * heads, heads_kv=heads, dim=dim, dtype=dtype,
        seed=group,
    )  # fmt: skip
    check(batch, *batch.call(return_lse=True))
    check(batch, batch.call(causal=False), causal=False)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_keys_in_one_piece(layout):
    """Any strides; lengths, or all of the keys; v narrower than k."""
    rng = np.random.default_rng(3)
    q, k, v = (
        rng.standard_normal((2, s, h, d), dtype=np.float32).astype(np.float16)
        for s, h, d in ((3, 4, 64), (90, 2, 64), (90, 2, 48))
    )
    k = np.concatenate([k, k], -1)[..., :64]  # rows further apart
    lengths = np.array([90, 41], np.int32)
    order = (0, 2, 1, 3)
    given = (q, k, v) if layout == "bshd" else tuple(x.transpose(order) for x in (q, k, v))
    for seen in (None, lengths):
        o, lse = fkjit.attention_decode(*given, seen, layout=layout, return_lse=True)
        o = o if layout == "bshd" else o.transpose(order)
        for b, n in enumerate([90, 90] if seen is None else lengths):
            one = [x[b].astype(np.float64).swapaxes(0, 1) for x in (q, k[:, :n], v[:, :n])]
            want, want_lse = attend(*one, 0.125, True)
            assert np.abs(o[b].swapaxes(0, 1) - want).max() <= LIMITS["float16"]
            assert np.abs(lse[b] - want_lse).max() <= 2e-5


def test_one_token_needs_no_dimension_of_its_own():
    batch = Batch([20, 37])
    o, lse = batch.call(return_lse=True)
    flat, flat_lse = batch.call(return_lse=True, one_token=True)
    assert np.array_equal(flat, o[:, 0]) and np.array_equal(flat_lse, lse[..., 0])
    q = batch.q[:, 0]
    k = np.stack([x[:20] for x in batch.k]).swapaxes(1, 2).astype(np.float16)
    short = fkjit.attention_decode(q, k, k)
    assert short.shape == q.shape and np.isfinite(short).all()


@pytest.mark.parametrize("scale", [-0.125, 0.0, 3.0, 300.0])
def test_scales_of_the_softmax(scale):
    batch = Batch([50, 3], tokens=2)
    check(batch, batch.call(softmax_scale=scale), softmax_scale=scale)


def test_out_is_written_and_given_back():
    batch = Batch([30, 40])
    out = np.full((2, 1, 8, 64), np.nan, np.float16)[:, :, ::2]
    assert batch.call(out=out) is out
    check(batch, out)


@pytest.mark.parametrize("tokens", [1, 5])
def test_parts_of_a_fixed_size_do_not_depend_on_the_batch(tokens, on_sms):
    """Alone, among others, on a GPU of another size: the same bits."""
    many = Batch([300, 0, 129, 128, 700], tokens=tokens, heads_q=16, heads_kv=2)
    o = many.call(split_size=128)
    check(many, o)
    on_sms(5)
    assert np.array_equal(many.call(split_size=128), o)
    for b in (0, 2, 4):
        rows = np.array([b], np.int32)
        alone = fkjit.paged_attention(
            many.q[b : b + 1], many.pages, many.table, many.lengths, rows=rows, split_size=128
        )
        assert np.array_equal(alone[0], o[b])


def test_parts_of_a_fixed_size_are_not_tuned(monkeypatch):
    from fkjit import tuning

    def tuned(spec, params, problem, arch):
        raise AssertionError(problem["batch"])

    monkeypatch.setattr(tuning, "tuned", tuned)
    batch = Batch([40, 7])
    check(batch, batch.call(split_size=128))
    with pytest.raises(AssertionError, match="2"):
        batch.call()


def test_the_same_call_gives_the_same_bits(on_sms):
    batch = Batch([500, 1, 77], dtype="bf16")
    on_sms(7)  # each head in several blocks
    with fkjit.sanitize(race=True):
        first = batch.call()
    check(batch, first)
    assert np.array_equal(batch.call(), first)


@one_in(2)
@pytest.mark.parametrize("dtype", ["fp16", "fp8", "int8"])
def test_a_cache_whose_sequences_share_their_first_pages(dtype):
    scales = {} if dtype == "fp16" else {"k_scale": [0.02, 0.03], "v_scale": 0.04}
    cache = fkjit.PagedKVCache(
        20, page_size=16, num_kv_heads=2, head_dim=64, dtype=dtype, device="cpu",
        framework="numpy", max_sequences=6, num_layers=2, **scales,
    )  # fmt: skip
    rng = np.random.default_rng(4)

    def append(sequences, counts):
        k, v = (rng.standard_normal((sum(counts), 2, 64)).astype(np.float16) for _ in "kv")
        fkjit.kv_append(k, v, cache, cache.extend(sequences, counts), layer=1)

    first = cache.allocate()
    append([first], [50])
    second, third = cache.fork(first), cache.fork(first, 33)
    append([second, third], [3, 20])
    live = [third, first, second]
    rows = np.append(cache.rows(live), -1).astype(np.int32)
    q = rng.standard_normal((4, 2, 8, 64)).astype(np.float16)
    o = fkjit.paged_attention(q, cache, rows=rows, layer=1)
    for b, sequence in enumerate(live):
        k, v = cache.read([sequence], layer=1, dtype="fp16" if scales else None)
        one = [x.astype(np.float64).swapaxes(0, 1) for x in (q[b], k, v)]
        assert np.abs(o[b].swapaxes(0, 1) - attend(*one, 0.125, True)[0]).max() <= 4e-3
    assert not o[3].any()


def test_torch_tensors_and_fp8_of_torchs_own():
    torch = pytest.importorskip("torch", reason="needs torch")
    batch = Batch([40, 17], storage="fp8")
    k, v = (torch.from_numpy(x).view(torch.float8_e4m3fn) for x in batch.pages)
    rest = [torch.from_numpy(x) for x in (batch.table, batch.lengths)]
    scales = {name: torch.from_numpy(x) for name, x in batch.scales.items()}
    o = fkjit.paged_attention(torch.from_numpy(batch.q), (k, v), *rest, **scales)
    assert isinstance(o, torch.Tensor)
    check(batch, o.numpy())


def test_no_worse_than_twice_torch():
    """Against float64, beside torch's own attention in bf16."""
    torch = pytest.importorskip("torch", reason="needs torch")
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 4, n, 64).bfloat16() for n in (2, 300, 300))
    o = fkjit.attention_decode(q, k, v, causal=False)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    exact, theirs = sdpa(q.double(), k.double(), v.double()), sdpa(q, k, v)
    error, allowed = ((x.double() - exact).abs().max().item() for x in (o, theirs))
    assert error <= 2 * allowed


def test_nan_in_a_visible_key_is_seen():
    batch = Batch([20, 30])
    where = batch.table[1, 0]
    batch.pages[0][where, 3] = np.nan
    o = batch.call()
    assert np.isfinite(o[0].astype(np.float32)).all() and np.isnan(o[1].astype(np.float32)).all()


def test_pages_that_there_are_not_are_zeros():
    batch = Batch([40])
    batch.table[0, 1] = 99
    k, v = (np.where(np.arange(40)[:, None, None] // 16 == 1, 0, x[0]) for x in (batch.k, batch.v))
    want, _ = attend(
        batch.q[0].swapaxes(0, 1).astype(float), k.swapaxes(0, 1), v.swapaxes(0, 1), 0.125, True
    )
    assert np.abs(batch.call()[0].swapaxes(0, 1) - want).max() <= 2e-3


def test_nothing_to_do():
    q, k = np.zeros((0, 4, 64), np.float16), np.zeros((0, 2, 9, 64), np.float16)
    assert fkjit.attention_decode(q, k, k).shape == (0, 4, 64)
    q, k = np.ones((2, 4, 64), np.float16), np.zeros((2, 2, 0, 64), np.float16)
    o, lse = fkjit.attention_decode(q, k, k, return_lse=True)
    assert not o.any() and np.isneginf(lse).all()


def test_few_queries_of_attention():
    """On a GPU: many keys, rows on 16-byte boundaries, nothing asked for by name."""
    from fkjit.arch import arch
    from fkjit.ops.attention import select
    from fkjit.ops.attention.decode import problem as decoding
    from fkjit.ops.attention.options import AttentionOptions
    from fkjit.runtime import interop

    assert select.MAX_TOKENS == decoding.MAX_TOKENS

    rng = np.random.default_rng(1)
    q, k, v = (
        rng.standard_normal((1, h, n, 64)).astype(np.float16)
        for h, n in ((4, 2), (2, 300), (2, 300))
    )
    views = {
        name: interop.view(x, "attention", name) for name, x in zip("qkv", (q, k, v), strict=True)
    }
    problem = {
        **{"dtype": "fp16", "batch": 1, "heads_q": 4, "heads_kv": 2, "seqlen_q": 2},
        **{"seqlen_k": 300, "head_dim": 64, "head_dim_v": 64, "multiprocessors": 132},
        "softmax_scale": 0.125,
    }

    def takes(impl="auto", block=None, aligned=True, to="sm_90a", **other):
        options = AttentionOptions(True, impl=impl, block=block)
        whole = {**problem, "causal": True, **other}
        return select.decodes(whole, views, None, options, aligned, arch(to))

    assert takes()
    for other in ({"impl": "flash"}, {"block": 64}, {"aligned": False}, {"to": "sm_75"}):
        assert not takes(**other)
    for other in ({"seqlen_q": 17}, {"seqlen_k": 50}, {"dtype": "fp32"}, {"head_dim": 60}):
        assert not takes(**other)
    many = {"seqlen_q": 16, "seqlen_k": 1024, "to": "sm_80"}  # rows of more than one small tile
    assert takes(**many) and not takes(**{**many, "to": "sm_90a"})
    assert takes(**{**many, "to": "sm_90a", "softmax_scale": -1.0}), "not for Hopper's kernels"
    for other in ({"seqlen_k": 1000}, {"heads_q": 40}):
        assert not takes(**{**many, **other})
    said = AttentionOptions(True, return_lse=True)
    for x, y in zip(
        select.to_decode((q, k, v), (), said),
        fkjit.attention(q, k, v, causal=True, return_lse=True),
        strict=True,
    ):
        assert np.abs(x - y).max() <= 2e-3


@pytest.mark.parametrize("name", ["sm_80", "sm_86", "sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("storage", ["same", "fp8"])
def test_every_problem_has_a_variant_from_sm_80_on(name, storage):
    from fkjit.arch import arch
    from fkjit.ops.attention.decode.kernels import select

    for dim in (16, 64, 128, 256):
        for tokens in (1, 16):
            problem = {
                **{"dtype": "bf16", "storage": storage, "heads_q": 16, "heads_kv": 4},
                **{"seqlen_q": tokens, "head_dim": dim, "head_dim_v": dim},
            }
            _, params = select(problem, arch(name))
            assert params["head_dim"] == max(dim, 64)
