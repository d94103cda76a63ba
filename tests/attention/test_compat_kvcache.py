"""flash-attn's call with a KV cache, argument by argument, beside the textbook."""

from __future__ import annotations

import inspect

import pytest

from fkjit import compat
from fkjit.errors import FkjitError, ParameterError
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
    scores = q @ k.mT * DIM**-0.5  # whatever the head dimension
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
    """Those of flash-attn 2.8, in its order, and one of ours; each is used in these tests."""
    names = list(inspect.signature(call).parameters)
    assert names == [
        "q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens",
        "cache_batch_idx", "cache_leftpad", "block_table", "softmax_scale", "causal",
        "window_size", "softcap", "rotary_interleaved", "alibi_slopes", "num_splits",
        "return_softmax_lse", "check_lengths",
    ]  # fmt: skip
    assert all(f" {name}" in call.__doc__ for name in names)


@pytest.mark.parametrize("how", ["plain", "causal", "window", "wide window"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(how, interleaved):
    """Only some columns turn; k from the length on, q as well if causal or with a window that the
    cache does not fit into, else all of it there."""
    causal, window = (
        how == "causal",
        {"window": (12, 1), "wide window": (48, 48)}.get(how, (-1, -1)),
    )
    successive = how in ("causal", "window")
    angle = torch.rand(60, 12, generator=torch.Generator().manual_seed(9)) * 6
    cosine, sine = angle.cos().half(), angle.sin().half()
    k, v = draw(2, 48, HEADS_KV, DIM, seed=1), draw(2, 48, HEADS_KV, DIM, seed=2)
    new_k, new_v = draw(2, 3, HEADS_KV, DIM, seed=3), draw(2, 3, HEADS_KV, DIM, seed=4)
    q, lengths = draw(2, 3, HEADS, DIM), [17, 40]
    before = k.clone()
    made = call(
        q, k, v, new_k, new_v, cosine, sine, cache_seqlens=torch.tensor(lengths).int(),
        causal=causal, rotary_interleaved=interleaved, window_size=window,
    )  # fmt: skip
    for b, n in enumerate(lengths):
        at = torch.arange(n, n + 3)
        kept = turned(new_k[b], at, cosine, sine, interleaved)
        close(k[b, n : n + 3], kept, 1e-3)
        assert torch.equal(k[b, :n], before[b, :n]) and torch.equal(v[b, n : n + 3], new_v[b])
        queries = turned(q[b], at if successive else at[:1].expand(3), cosine, sine, interleaved)
        keys = torch.cat([before[b, :n].double(), kept])
        close(made[b], textbook(queries, keys, v[b, : n + 3], causal, window))


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


ROOM = "lengths from 15 to 15, and 2 new tokens; allowed: 0 to 14"
FAULTS = {
    "no room": ({"cache_seqlens": torch.tensor([15]).int()}, ROOM),
    "no room for a number": ({"cache_seqlens": 15}, ROOM),
    "a negative length": ({"cache_seqlens": torch.tensor([-1]).int()}, "lengths from -1"),
    "slopes of another number": ({"alibi_slopes": torch.ones(3)}, "alibi_slopes"),
    "a window": ({"window_size": (4, -2)}, "window"),
    "another dtype": ({"cache_seqlens": torch.tensor([3.0])}, "seq_lens"),
}


@pytest.mark.parametrize("what", FAULTS)
@pytest.mark.parametrize("paged", [False, True])
def test_after_an_error_the_caches_are_as_they_were(what, paged):
    options, words = FAULTS[what]
    shape = (2, 8) if paged else (1, 16)
    k, v = draw(*shape, HEADS_KV, DIM), draw(*shape, HEADS_KV, DIM)
    table = torch.arange(2).int()[None] if paged else None
    before = k.clone(), v.clone()
    q, new = draw(1, 2, HEADS, DIM), draw(1, 2, HEADS_KV, DIM, seed=3)
    given = {"cache_seqlens": torch.tensor([5]).int(), "block_table": table, **options}
    with pytest.raises(FkjitError, match=words):
        call(q, k, v, new, new, **given)
    assert torch.equal(k, before[0]) and torch.equal(v, before[1])


@pytest.mark.parametrize("dim", [DIM, 36, 192], ids=lambda n: f"D{n}")
@pytest.mark.parametrize("paged", [False, True])
def test_more_than_sixteen_new_tokens_and_any_head_dimension(dim, paged):
    k, v = draw(4, 24, HEADS_KV, dim, seed=1), draw(4, 24, HEADS_KV, dim, seed=2)
    if not paged:
        k, v = (x.view(2, 48, HEADS_KV, dim) for x in (k, v))
    table = torch.tensor([[3, 1], [0, 2]]).int() if paged else None
    count = 20 if dim == DIM else 3
    q, new = draw(2, count, HEADS, dim), [draw(2, count, HEADS_KV, dim, seed=s) for s in (3, 4)]
    whole = [(x[table.long()].flatten(1, 2) if paged else x).clone() for x in (k, v)]
    lengths = [11, 25]
    made, lse = call(
        q, k, v, *new, cache_seqlens=torch.tensor(lengths).int(), causal=True, block_table=table,
        softmax_scale=DIM**-0.5, return_softmax_lse=True,
    )  # fmt: skip
    assert lse.shape == (2, HEADS, count)
    for b, n in enumerate(lengths):
        kept = [torch.cat([x[b, :n], f[b]]) for x, f in zip(whole, new, strict=True)]
        close(made[b], textbook(q[b], *kept, causal=True))


@pytest.mark.parametrize("dim", [DIM, 160], ids=lambda n: f"D{n}")
@pytest.mark.parametrize("rotary", [False, True])
def test_keys_before_a_left_pad_are_not_seen(dim, rotary):
    k, v = draw(3, 48, HEADS_KV, dim, seed=1), draw(3, 48, HEADS_KV, dim, seed=2)
    q, new = draw(2, 3, HEADS, dim), [draw(2, 3, HEADS_KV, dim, seed=s) for s in (3, 4)]
    rows, lengths, pads = [2, 0], [30, 17], [9, 0]
    angle = torch.rand(60, 8, generator=torch.Generator().manual_seed(9)) * 6
    cosine, sine = (angle.cos().half(), angle.sin().half()) if rotary else (None, None)
    expected = []
    for b, (row, n, pad) in enumerate(zip(rows, lengths, pads, strict=True)):
        at = torch.arange(n - pad, n - pad + 3)
        q_b, k_b = q[b], new[0][b]
        if rotary:
            q_b, k_b = (turned(x, at, cosine, sine, True) for x in (q_b, k_b))
        kept = (torch.cat([k[row, pad:n].double(), k_b.double()]),
                torch.cat([v[row, pad:n], new[1][b]]))  # fmt: skip
        expected.append(textbook(q_b, *kept, causal=True))
    made = call(
        q, k, v, *new, cosine, sine, cache_seqlens=torch.tensor(lengths).int(), causal=True,
        cache_batch_idx=torch.tensor(rows).int(), cache_leftpad=torch.tensor(pads).int(),
        softmax_scale=DIM**-0.5,
    )  # fmt: skip
    for one, two in zip(made, expected, strict=True):
        close(one, two)


def test_rows_with_gaps_between_them_in_another_order():
    """A part of longer rows, whose tokens fill no page that kernels have."""
    whole = [draw(3, 40, HEADS_KV, DIM, seed=s) for s in (1, 2)]
    k, v = (x[:, :21] for x in whole)
    new = [draw(2, 2, HEADS_KV, DIM, seed=s) for s in (3, 4)]
    q, rows, before = draw(2, 2, HEADS, DIM), [2, 0], [x.clone() for x in whole]
    made = call(
        q, k, v, *new, cache_seqlens=torch.tensor([19, 4]).int(), causal=True,
        cache_batch_idx=torch.tensor(rows).int(),
    )  # fmt: skip
    for b, (row, n) in enumerate(zip(rows, (19, 4), strict=True)):
        for held, old, fresh in zip(whole, before, new, strict=True):
            assert torch.equal(held[row, n : n + 2], fresh[b])
            assert torch.equal(held[row, n + 2 :], old[row, n + 2 :])
        kept = [torch.cat([x[row, :n], f[b]]) for x, f in zip(before, new, strict=True)]
        close(made[b], textbook(q[b], *kept, causal=True))


EIGHT = torch.ones(9, 8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cache_batch_idx": True, "block_table": True}, "without a block_table"),
        ({"rotary_cos": EIGHT, "rotary_sin": EIGHT}, "go with k and v"),
        ({"rotary_cos": EIGHT, "rotary_sin": EIGHT[:, :4]}, r"rotary_sin has shape \(9, 4\)"),
        ({"cache_leftpad": True, "block_table": True}, "cache_leftpad is for caches without"),
        ({"strides": True, "cache_batch_idx": True}, "rows a whole number of tokens apart"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_is_refused(options, words):
    k = draw(3, 24, HEADS_KV, DIM)
    if options.get("strides"):
        apart = 24 * HEADS_KV * DIM + 8
        k = torch.zeros(3 * apart).half().as_strided(k.shape, (apart, *k.stride()[1:]))
    index = torch.zeros(1, dtype=torch.int32)
    made = {"cache_batch_idx": index, "block_table": index[None], "cache_leftpad": index}
    given = {name: made.get(name, x) for name, x in options.items() if name != "strides"}
    with pytest.raises(ParameterError, match=words):
        call(draw(1, 1, HEADS, DIM), k, k, cache_seqlens=index, **given)
