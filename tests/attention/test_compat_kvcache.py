"""flash-attn's call with a KV cache, argument by argument, beside the textbook."""

from __future__ import annotations

import inspect

import pytest

from fkjit import compat
from fkjit.errors import ParameterError
from fkjit.jit.build import quiet

torch = pytest.importorskip("torch", reason="needs torch")
call = compat.flash_attn_with_kvcache
HEADS, HEADS_KV, DIM = 4, 2, 32


@pytest.fixture(autouse=True)
def silent():
    with quiet():
        yield


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


def close(made, expected, tolerance=3e-3):
    assert made.shape == expected.shape
    assert (made.double() - expected).norm() <= tolerance * expected.norm()


def textbook(q, k, v, causal, window=(-1, -1), softcap=0.0, slopes=None):
    """[Sq, Hq, D] of one sequence, in float64, aligned to the bottom right."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // HEADS_KV, 0) for x in (k, v))
    scores = q @ k.mT * DIM**-0.5
    scores = softcap * (scores / softcap).tanh() if softcap else scores
    apart = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None] - k.shape[1] + q.shape[1]
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * apart.abs()
    for hidden, side in ((-apart, window[0]), (apart, window[1])):
        scores = scores if side < 0 else scores.masked_fill(hidden > side, float("-inf"))
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(k.shape[1] - q.shape[1] + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1)


def turned(x, at, cosine, sine, interleaved):
    """[S, H, D], rows at these positions, in float64."""
    x, half = x.double(), cosine.shape[1]
    c, s = (y.double()[at][:, None] for y in (cosine, sine))
    pairs = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (
        slice(0, half), slice(half, 2 * half)
    )  # fmt: skip
    out = x.clone()
    out[..., pairs[0]] = x[..., pairs[0]] * c - x[..., pairs[1]] * s
    out[..., pairs[1]] = x[..., pairs[1]] * c + x[..., pairs[0]] * s
    return out


def test_every_argument_is_of_flash_attns_and_told_of():
    """Those of flash-attn 2.8, in its order; each is used or refused by name in these tests."""
    names = list(inspect.signature(call).parameters)
    assert names == [
        "q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens",
        "cache_batch_idx", "cache_leftpad", "block_table", "softmax_scale", "causal",
        "window_size", "softcap", "rotary_interleaved", "alibi_slopes", "num_splits",
        "return_softmax_lse",
    ]  # fmt: skip
    assert all(f" {name}" in call.__doc__ for name in names)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(causal, interleaved):
    """Only some columns turn; k from the length on, q as well if causal, else all of it there."""
    angle = torch.rand(60, 12, generator=torch.Generator().manual_seed(9)) * 6
    cosine, sine = angle.cos().half(), angle.sin().half()
    k, v = draw(2, 48, HEADS_KV, DIM, seed=1), draw(2, 48, HEADS_KV, DIM, seed=2)
    new_k, new_v = draw(2, 3, HEADS_KV, DIM, seed=3), draw(2, 3, HEADS_KV, DIM, seed=4)
    q, lengths = draw(2, 3, HEADS, DIM), [17, 40]
    before = k.clone()
    made = call(
        q, k, v, new_k, new_v, cosine, sine, cache_seqlens=torch.tensor(lengths).int(),
        causal=causal, rotary_interleaved=interleaved,
    )  # fmt: skip
    for b, n in enumerate(lengths):
        at = torch.arange(n, n + 3)
        kept = turned(new_k[b], at, cosine, sine, interleaved)
        close(k[b, n : n + 3], kept, 1e-3)
        assert torch.equal(k[b, :n], before[b, :n]) and torch.equal(v[b, n : n + 3], new_v[b])
        queries = turned(q[b], at if causal else at[:1].expand(3), cosine, sine, interleaved)
        keys = torch.cat([before[b, :n].double(), kept])
        close(made[b], textbook(queries, keys, v[b, : n + 3], causal))


@pytest.mark.parametrize("rows", [48, 24, 21], ids=lambda n: f"{n} tokens")
@pytest.mark.parametrize("new", [0, 2])
def test_rows_of_the_cache_in_another_order(rows, new):
    """cache_batch_idx: five rows, whose tokens fill whole pages, parts of one, or none."""
    k, v = draw(5, rows, HEADS_KV, DIM, seed=1), draw(5, rows, HEADS_KV, DIM, seed=2)
    fresh = [draw(3, new, HEADS_KV, DIM, seed=s) if new else None for s in (3, 4)]
    q, order, lengths = draw(3, 2, HEADS, DIM), [4, 0, 2], [9, 1, rows - 2]
    expected = []
    for b, (row, n) in enumerate(zip(order, lengths, strict=True)):
        kept = [x[row, :n] if f is None else torch.cat([x[row, :n], f[b]])
                for x, f in zip((k, v), fresh, strict=True)]  # fmt: skip
        expected.append(textbook(q[b], *kept, causal=True))
    made, lse = call(
        q, k, v, *fresh, cache_seqlens=torch.tensor(lengths).int(), causal=True, num_splits=3,
        cache_batch_idx=torch.tensor(order).int(), return_softmax_lse=True, softmax_scale=DIM**-0.5,
    )  # fmt: skip
    assert lse.shape == (3, HEADS, 2)
    for one, two in zip(made, expected, strict=True):
        close(one, two.nan_to_num())  # the first of two tokens sees nothing where there is one key


@pytest.mark.parametrize("page", [1, 8, 24, 48, 512])
def test_pages_of_any_size(page):
    """Also those that no kernel has: they are cut."""
    pages = 2 * 48 // page if page <= 48 else 2
    most = pages // 2 * page
    whole = [draw(2, most, HEADS_KV, DIM, seed=s) for s in (1, 2)]
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(5))
    table = torch.argsort(order).int().view(2, -1)
    k, v = (x.view(pages, page, HEADS_KV, DIM)[order].contiguous() for x in whole)
    q, lengths = draw(2, 1, HEADS, DIM), [17, 47]
    new = [draw(2, 1, HEADS_KV, DIM, seed=s) for s in (3, 4)]
    made = call(q, k, v, *new, cache_seqlens=torch.tensor(lengths).int(), block_table=table)
    for b, n in enumerate(lengths):
        kept = [torch.cat([x[b, :n], f[b]]) for x, f in zip(whole, new, strict=True)]
        close(made[b], textbook(q[b], *kept, causal=False))


@pytest.mark.parametrize("paged", [False, True])
def test_a_window_a_soft_cap_and_alibi(paged):
    """By each sequence's length, new tokens included."""
    k, v = draw(4, 24, HEADS_KV, DIM, seed=1), draw(4, 24, HEADS_KV, DIM, seed=2)
    q, new = draw(2, 3, HEADS, DIM), [draw(2, 3, HEADS_KV, DIM, seed=s) for s in (3, 4)]
    slopes, lengths = torch.rand(2, HEADS, generator=torch.Generator().manual_seed(7)), [41, 9]
    form = {"window_size": (12, 1), "softcap": 3.0, "alibi_slopes": slopes}
    if paged:
        table = torch.arange(4).int().view(2, 2)
        whole = [x.reshape(2, 48, HEADS_KV, DIM).clone() for x in (k, v)]
        given = (k, v)
    else:
        table, whole, lengths = None, [x[:2].clone() for x in (k, v)], [20, 9]
        given = (k[:2], v[:2])
    made = call(
        q, *given, *new, cache_seqlens=torch.tensor(lengths).int(), block_table=table, **form
    )
    for b, n in enumerate(lengths):
        kept = [torch.cat([x[b, :n], f[b]]) for x, f in zip(whole, new, strict=True)]
        close(made[b], textbook(q[b], *kept, False, (12, 1), 3.0, slopes[b]))


def test_without_room_nothing_is_written():
    k, v = draw(1, 16, HEADS_KV, DIM), draw(1, 16, HEADS_KV, DIM)
    before = k.clone()
    q, new = draw(1, 2, HEADS, DIM), draw(1, 2, HEADS_KV, DIM, seed=3)
    call(q, k, v, new, new, cache_seqlens=torch.tensor([15]).int(), causal=True)
    assert torch.equal(k[0, :15], before[0, :15]) and torch.equal(k[0, 15], new[0, 0])


EIGHT = torch.ones(9, 8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cache_batch_idx": True, "block_table": True}, "without a block_table"),
        ({"rotary_cos": EIGHT, "rotary_sin": EIGHT}, "go with k and v"),
        ({"rotary_cos": EIGHT, "rotary_sin": EIGHT[:, :4]}, r"rotary_sin has shape \(9, 4\)"),
        ({"gaps": True, "cache_batch_idx": True}, "24 tokens in a row or page and gaps"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_is_refused(options, words):
    k = draw(3, 40, HEADS_KV, DIM)
    k = k[:, :24] if options.get("gaps") else k[:, :24].contiguous()
    index = torch.zeros(1, dtype=torch.int32)
    made = {"cache_batch_idx": index, "block_table": index[None]}
    given = {name: made.get(name, x) for name, x in options.items() if name != "gaps"}
    with pytest.raises(ParameterError, match=words):
        call(draw(1, 1, HEADS, DIM), k, k, cache_seqlens=index, **given)
