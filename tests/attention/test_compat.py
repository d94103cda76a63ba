"""Attention under others' names, beside theirs."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as theirs

from fkjit import compat
from fkjit.errors import ArgumentTypeError, ParameterError


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(made, expected, tolerance=2e-5):
    assert made.shape == expected.shape and made.dtype == expected.dtype
    error = (made.double() - expected.double()).norm() / expected.double().norm()
    assert error < tolerance, error


@pytest.mark.parametrize("lengths", [(9, 9), (5, 12), (12, 5)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_sdpa(lengths, is_causal, batched):
    sq, sk = lengths
    q, k, v = (draw(2, 4, n, 24, seed=n) for n in (sq, sk, sk))
    if not batched:
        q, k, v = q[0], k[0], v[0]
    made = compat.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=0.2)
    close(made, theirs(q, k, v, is_causal=is_causal, scale=0.2))


def test_sdpa_with_grouped_heads():
    q, k, v = draw(1, 6, 7, 16), draw(1, 2, 8, 16, seed=1), draw(1, 2, 8, 16, seed=2)
    close(
        compat.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        theirs(q, k, v, enable_gqa=True),
    )
    with pytest.raises(ParameterError, match="enable_gqa=True"):
        compat.scaled_dot_product_attention(q, k, v)


MASKS = {
    "rows": (6, 9), "keys": (1, 9), "heads": (4, 6, 9), "a batch": (2, 1, 1, 9),
    "all": (2, 4, 6, 9), "one key": (6, 1), "one": (1, 1, 1, 1),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", MASKS.values(), ids=list(MASKS))
def test_sdpa_with_masks_of_any_shape(shape, kind):
    q, k, v = (draw(2, 4, n, 24, seed=n) for n in (6, 9, 9))
    mask = draw(*shape, seed=4)
    mask = mask > (-0.5 if len(mask) > 1 else -9) if kind == "bool" else mask
    made = compat.scaled_dot_product_attention(q, k, v, mask)
    close(made, theirs(q, k, v, mask).nan_to_num())
    if len(shape) < 4:
        close(
            compat.scaled_dot_product_attention(q[0], k[0], v[0], mask),
            theirs(q[0], k[0], v[0], mask).nan_to_num(),
        )


def textbook(q, k, v, window, softcap, slopes):
    """[S, H, D] of one sequence, as flash-attn's documentation has it."""
    sq, sk = len(q), len(k)
    k, v = (x.transpose(0, 1).repeat_interleave(q.shape[1] // x.shape[1], 0) for x in (k, v))
    scores = softcap * torch.tanh(q.transpose(0, 1) @ k.mT / q.shape[2] ** 0.5 / softcap)
    apart = torch.arange(sk) - torch.arange(sq)[:, None] - (sk - sq)
    scores = scores - slopes[:, None, None] * apart.abs()
    hidden = (apart < -window[0]) | (apart > window[1])
    scores = scores.masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1), scores.logsumexp(-1)


def test_flash_attn_with_a_window_a_soft_cap_and_alibi():
    lengths, slopes = [(6, 9), (3, 3), (9, 12)], torch.tensor([0.1, 0.2, 0.0, 0.4])
    q, k, v = draw(18, 4, 32), draw(24, 2, 32, seed=1), draw(24, 2, 32, seed=2)
    ends = [torch.tensor([0, *[sum(p[i] for p in lengths[: n + 1]) for n in range(3)]]).int()
            for i in (0, 1)]  # fmt: skip
    o, lse, nothing = compat.flash_attn_varlen_func(
        q, k, v, *ends, 9, 12, window_size=(4, 1), softcap=3.0, alibi_slopes=slopes,
        return_attn_probs=True,
    )  # fmt: skip
    assert nothing is None
    for b in range(3):
        rows, keys = slice(*ends[0][b : b + 2]), slice(*ends[1][b : b + 2])
        expected, sums = textbook(q[rows], k[keys], v[keys], (4, 1), 3.0, slopes)
        close(o[rows], expected)
        close(lse[:, rows], sums)
        alone = compat.flash_attn_func(
            *(x[None] for x in (q[rows], k[keys], v[keys])), 0.0, None, False, (4, 1), 3.0, slopes
        )
        close(alone[0], expected)


def test_flash_attn_func():
    q, k, v = draw(2, 6, 4, 32), draw(2, 9, 2, 32, seed=1), draw(2, 9, 2, 32, seed=2)
    o, lse, nothing = compat.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    hidden = torch.ones(6, 9, dtype=torch.bool).triu(9 - 6 + 1)
    scores = q.transpose(1, 2) @ k.transpose(1, 2).repeat_interleave(2, 1).mT / 32**0.5
    scores = scores.masked_fill(hidden, float("-inf"))
    expected = scores.softmax(-1) @ v.transpose(1, 2).repeat_interleave(2, 1)
    close(o, expected.transpose(1, 2))
    close(lse, scores.logsumexp(-1))
    assert nothing is None
    assert torch.equal(compat.flash_attn_func(q, k, v, 0.0, None, True), o)


def cached(paged, lengths, new, page=16, heads=2, dim=32):
    """Caches poisoned beyond their lengths, the same keys and values in one piece, new tokens."""
    most = 48
    k, v = (draw(len(lengths), most, heads, dim, seed=s, dtype=torch.float16) for s in (1, 2))
    fresh = [
        draw(len(lengths), new, heads, dim, seed=s, dtype=torch.float16) if new else None
        for s in (3, 4)
    ]
    whole = []
    for x, f in zip((k, v), fresh, strict=True):
        rows = [
            torch.cat([x[b, :n], *([] if f is None else [f[b]])]) for b, n in enumerate(lengths)
        ]
        whole.append(rows)
        for b, n in enumerate(lengths):
            x[b, n:] = float("nan")
    if not paged:
        return k, v, fresh, whole, None
    pages = len(lengths) * most // page
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(5))
    table = torch.argsort(order).int().view(len(lengths), -1)
    k, v = (x.view(pages, page, heads, dim)[order].contiguous() for x in (k, v))
    return k, v, fresh, whole, table


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("new", [0, 1, 3])
def test_flash_attn_with_kvcache(paged, new):
    lengths = [17, 33, 1]
    k, v, (fresh_k, fresh_v), whole, table = cached(paged, lengths, new)
    tokens = max(new, 1)
    q = draw(3, tokens, 4, 32, dtype=torch.float16)
    o, lse = compat.flash_attn_with_kvcache(
        q, k, v, fresh_k, fresh_v, cache_seqlens=torch.tensor(lengths, dtype=torch.int32),
        block_table=table, causal=True, return_softmax_lse=True,
    )  # fmt: skip
    for b in range(3):
        one = [x[b].double().transpose(0, 1).repeat_interleave(2, 0) for x in whole]
        hidden = torch.ones(tokens, one[0].shape[1], dtype=torch.bool).triu(
            one[0].shape[1] - tokens + 1
        )
        scores = q[b].double().transpose(0, 1) @ one[0].mT / 32**0.5
        scores = scores.masked_fill(hidden, float("-inf"))
        expected = (scores.softmax(-1) @ one[1]).transpose(0, 1)
        close(o[b], expected.to(o.dtype), 2e-3)
        close(lse[b].double(), scores.logsumexp(-1), 1e-4)


def test_one_length_for_all_and_the_whole_cache():
    k, v, _, _, _ = cached(False, [48, 48], 0)
    q = draw(2, 1, 2, 32, dtype=torch.float16)
    whole = compat.flash_attn_with_kvcache(q, k, v)
    assert torch.equal(compat.flash_attn_with_kvcache(q, k, v, cache_seqlens=48), whole)
    part = compat.flash_attn_with_kvcache(q, k[:, :20], v[:, :20])
    assert torch.equal(compat.flash_attn_with_kvcache(q, k, v, cache_seqlens=20), part)


@pytest.mark.parametrize(
    ("call", "options", "words"),
    [
        ("scaled_dot_product_attention", {"dropout_p": 0.1}, "dropout_p=0.1"),
        (
            "scaled_dot_product_attention",
            {"attn_mask": torch.ones(1), "is_causal": True},
            "attn_mask and is_causal",
        ),
        ("flash_attn_func", {"dropout_p": 0.1}, "dropout_p=0.1"),
        ("flash_attn_func", {"window_size": (4, -2)}, r"window=\(4, -2\)"),
        ("flash_attn_with_kvcache", {"rotary_cos": torch.ones(2, 8)}, "rotary_sin has shape None"),
        ("flash_attn_with_kvcache", {"rotary_sin": torch.ones(2, 8)}, "rotary_cos has shape None"),
        ("flash_attn_with_kvcache", {"k": torch.ones(2)}, "together"),
        ("flash_attn_with_kvcache", {"block_table": torch.ones(1, 1)}, "cache_seqlens"),
    ],
    ids=str,
)
def test_what_there_is_no_kernel_for_is_refused(call, options, words):
    x = draw(1, 2, 2, 32, dtype=torch.float16)
    with pytest.raises(ParameterError, match=words):
        getattr(compat, call)(x, x, x, **options)


@pytest.mark.parametrize(
    "call", ["scaled_dot_product_attention", "flash_attn_func", "flash_attn_with_kvcache"]
)
def test_other_arrays_are_refused(call):
    x = draw(1, 2, 2, 32, dtype=torch.float16)
    with pytest.raises(ArgumentTypeError, match="ndarray; allowed: torch tensors"):
        getattr(compat, call)(x.numpy(), x, x)


def test_calls_are_compiled_whole():
    """Whatever else was imported before."""
    q, k, v = (draw(1, 2, 9, 16, seed=s) for s in range(3))

    def model(q, k, v):
        o = compat.scaled_dot_product_attention(q, k, v, is_causal=True)
        return o + compat.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    torch._dynamo.reset()
    made = torch.compile(model, backend="aot_eager", fullgraph=True)(q, k, v)
    close(made, model(q, k, v))


@pytest.mark.parametrize("lower", [False, True])
def test_sdpa_with_a_causal_bias(lower):
    bias = pytest.importorskip("torch.nn.attention.bias", reason="newer PyTorch has it")
    q, k, v = draw(1, 2, 6, 16), draw(1, 2, 9, 16, seed=1), draw(1, 2, 9, 16, seed=2)
    mask = (bias.causal_lower_right if lower else bias.causal_upper_left)(6, 9)
    seen = torch.ones(6, 9, dtype=torch.bool).tril(3 if lower else 0)
    close(compat.scaled_dot_product_attention(q, k, v, mask), theirs(q, k, v, seen))


def test_packed_functions_are_the_others():
    qkv = draw(2, 9, 3, 4, 32)
    q, k, v = qkv.unbind(2)
    expected = compat.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(compat.flash_attn_qkvpacked_func(qkv, causal=True), expected)
    assert torch.equal(compat.flash_attn_kvpacked_func(q, qkv[:, :, 1:], causal=True), expected)
    ends = torch.tensor([0, 9, 18]).int()
    flat = qkv.flatten(0, 1)
    made = compat.flash_attn_varlen_qkvpacked_func(flat, ends, 9, causal=True)
    other = compat.flash_attn_varlen_kvpacked_func(
        flat[:, 0], flat[:, 1:], ends, ends, 9, 9, causal=True
    )
    assert torch.equal(made, other)
    close(made.view(2, 9, 4, 32), expected)
    with pytest.raises(ParameterError, match=r"qkv has shape .*; allowed: \[B, S, 3, H, D\]"):
        compat.flash_attn_qkvpacked_func(qkv[:, :, :2])


def test_flash_attn_varlen_with_a_block_table():
    k, v, _, whole, table = cached(True, [17, 33], 0)
    ends_q, ends_k = torch.tensor([0, 5, 25]).int(), torch.tensor([0, 17, 50]).int()
    q = draw(25, 4, 32, dtype=torch.float16)
    made = compat.flash_attn_varlen_func(
        q, k, v, ends_q, ends_k, 20, 33, causal=True, block_table=table
    )
    expected = compat.flash_attn_varlen_func(
        q, *(torch.cat(x) for x in whole), ends_q, ends_k, 20, 33, causal=True
    )
    close(made, expected, 2e-3)


@pytest.mark.parametrize("raised, cause", [(MemoryError("m"), None), (ValueError("v"), "v")])
def test_an_error_is_not_its_own_cause(raised, cause, monkeypatch):
    """What arguments are not to blame for comes as it is, else what it is made of is the cause."""

    def attention(*args, **options):
        raise raised

    monkeypatch.setattr("fkjit.compat.sdpa.attention", attention)
    q = draw(1, 2, 3, 8)
    with pytest.raises((MemoryError, ParameterError)) as caught:
        compat.scaled_dot_product_attention(q, q, q)
    assert (caught.value is raised) == (cause is None)
    assert caught.value.__cause__ is (None if cause is None else raised)
