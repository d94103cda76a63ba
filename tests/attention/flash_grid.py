"""flash-attn's functions with random arguments, drawn by seed, and what they mean in float64.

A draw has every argument of its function with a chance: head dimensions that are no multiples of
anything, MHA, GQA and MQA, lengths on either side of a tile and empty sequences, windows, soft
caps, slopes, pages, rotary tables, left padding. `check` calls the function and compares o, lse,
gradients and caches with each sequence's own, by PyTorch's operations in float64.
"""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Any, NamedTuple

from fkjit import compat

DIMS = (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
CALLS = (
    "func", "kvpacked", "qkvpacked", "varlen", "varlen_kvpacked", "varlen_qkvpacked",
    "varlen_pages", "kvcache", "kvcache", "kvcache",
)  # fmt: skip


class Draw(NamedTuple):
    """A call; `options` as flash-attn has them; sizes of each sequence."""

    call: str
    dtype: str
    heads: tuple[int, int]
    dim: int
    lengths: list[tuple[int, int]]
    options: dict[str, Any]
    cache: dict[str, Any]  # of flash_attn_with_kvcache

    @property
    def packed(self) -> bool:
        return self.call.startswith("varlen")


def draw(seed: int, most: int) -> Draw:
    """Sequences of up to `most` tokens."""
    rng = random.Random(seed)
    call, dim = rng.choice(CALLS), rng.choice(DIMS)
    own = "qkvpacked" in call
    heads_kv = rng.choice((1, 2, 3))
    heads = (heads_kv * (1 if own else rng.choice((1, 1, 2, 3))), heads_kv)
    batch = rng.randint(1, 3)
    few = call == "kvcache" and rng.random() < 0.6
    long_k = rng.randint(1, most)
    long_q = long_k if own else rng.randint(1, 4) if few else rng.randint(1, most)
    lengths = [(long_q, long_k)] * batch
    if call.startswith("varlen"):
        lengths = [(rng.randint(0, long_q), rng.randint(0, long_k)) for _ in range(batch)]
        lengths = [(k, k) for _, k in lengths] if own else lengths
    options: dict[str, Any] = {"causal": rng.random() < 0.5}
    if rng.random() < 0.4:
        options["window_size"] = (rng.randrange(long_k), rng.randrange(long_k))
    if rng.random() < 0.3:
        options["softcap"] = rng.choice((15.0, 50.0))
    if rng.random() < 0.3:
        options["alibi_slopes"] = rng.choice(("of heads", "of all"))
    if rng.random() < 0.2:
        options["softmax_scale"] = rng.uniform(0.01, 0.3)
    cache = {}
    if call == "kvcache":
        options["num_splits"] = rng.choice((0, 1, 3))
        cache = _draw_cache(rng, most, lengths, dim)
    else:
        options["deterministic"] = rng.random() < 0.5
    dtype = rng.choice(("float16", "bfloat16"))
    return Draw(call, dtype, heads, dim, lengths, options, cache)


def _draw_cache(
    rng: random.Random, most: int, lengths: list[tuple[int, int]], dim: int
) -> dict[str, Any]:
    """What a cache holds before the call and after it; new tokens; pages, rows or left padding."""
    tokens_q, _ = lengths[0]
    new = rng.choice((0, 0, tokens_q, rng.randint(1, tokens_q)))
    held = [rng.randint(0 if new else 1, most) for _ in lengths]
    kind = rng.choice(("pages", "rows", "rows", "plain"))
    made: dict[str, Any] = {"new": new, "held": held, "kind": kind, "whole": rng.random() < 0.1}
    made["page"] = rng.choice((1, 16, 24, 256))
    if kind != "pages" and rng.random() < 0.3:
        made["pads"] = [rng.randint(0, n // 2) for n in held]
    if new and rng.random() < 0.6:
        turned = rng.choice((16, dim // 16 * 8, dim // 16 * 16))
        made["rotary"] = turned or None
        made["interleaved"] = rng.random() < 0.5
    return made


# ------------------------------------------------------------------ in float64


def exact(q: Any, k: Any, v: Any, options: dict[str, Any], slopes: Any) -> tuple[Any, Any]:
    """o [Sq, H, D] and lse [H, Sq] of one sequence, aligned to the bottom right."""
    import torch

    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    scores = q @ k.mT * (options.get("softmax_scale") or q.shape[-1] ** -0.5)
    if options.get("softcap"):
        scores = options["softcap"] * (scores / options["softcap"]).tanh()
    at = torch.arange(q.shape[1], device=q.device)[:, None] + k.shape[1] - q.shape[1]
    apart = torch.arange(k.shape[1], device=q.device) - at
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * apart.abs()
    left, right = options.get("window_size", (-1, -1))
    right = 0 if options["causal"] else right
    hidden = (apart < -left) & (left >= 0) | (apart > right) & (right >= 0)
    scores = scores.masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(-1) if k.shape[1] else scores.new_full(scores.shape[:2], -torch.inf)
    weights = (scores - lse.detach().clamp(min=-1e30)[..., None]).exp()
    total = weights.sum(-1, keepdim=True)
    return (weights / torch.where(total == 0, 1, total) @ v).transpose(0, 1), lse


def turned(x: Any, at: Any, cosine: Any, sine: Any, interleaved: bool) -> Any:
    """[S, H, D], rows at these positions."""
    x, half = x.double(), cosine.shape[1]
    c, s = (y.double()[at][:, None] for y in (cosine, sine))
    one, two = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (
        slice(0, half), slice(half, 2 * half)
    )  # fmt: skip
    out = x.clone()
    out[..., one] = x[..., one] * c - x[..., two] * s
    out[..., two] = x[..., two] * c + x[..., one] * s
    return out


# ------------------------------------------------------------------ a call and its results


class Torch:
    """Random tensors of a draw, always the same."""

    def __init__(self, seed: int, dtype: str, device: str) -> None:
        import torch

        self.torch, self.device, self.dtype = torch, device, getattr(torch, dtype)
        self.made = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Any:
        x = self.torch.randn(shape, generator=self.made)
        return x.to(self.device, self.dtype)

    def slopes(self, case: Draw) -> Any:
        kind = case.options.get("alibi_slopes")
        shape = (len(case.lengths), case.heads[0])[0 if kind == "of all" else 1 :]
        some = self.torch.rand(shape, generator=self.made) * 0.3
        return None if kind is None else some.to(self.device)

    def ints(self, values: Any) -> Any:
        return self.torch.tensor(values, dtype=self.torch.int32, device=self.device)


def check(seed: int, most: int, device: str) -> None:
    """AssertionError where a result is off, and whatever the call raises."""
    case = draw(seed, most)
    some = Torch(seed, case.dtype, device)
    slopes = some.slopes(case)
    options = {**case.options, "alibi_slopes": slopes}
    if case.call == "kvcache":
        _check_cache(case, some, options, slopes)
    else:
        _check_sequences(case, some, options, slopes)


def close(name: str, made: Any, expected: Any, tolerance: float, least: float = 1e-6) -> None:
    """By the norm, and nowhere far off. least: what elements count as, at least."""
    assert made.shape == expected.shape, name
    if not expected.numel():
        return
    error = made.double() - expected
    size = max(float(expected.norm()), least * expected.numel() ** 0.5)
    assert float(error.norm()) <= tolerance * size, f"{name}: {float(error.norm()) / size:.1e}"
    most = max(float(expected.abs().max()), least)
    assert float(error.abs().max()) <= 6 * tolerance * most, f"{name}: {float(error.abs().max())}"


def _tolerance(case: Draw) -> float:
    return 2e-3 if case.dtype == "float16" else 1.2e-2


def _close_lse(made: Any, expected: Any) -> None:
    there = expected.isfinite()
    assert bool((made.isfinite() == there).all())
    assert float((made.double() - expected)[there].abs().max() if there.any() else 0) <= 2e-3


def _row(slopes: Any, b: int) -> Any:
    return slopes if slopes is None or slopes.dim() == 1 else slopes[b]


def _check_sequences(case: Draw, some: Torch, options: dict[str, Any], slopes: Any) -> None:
    """The functions of dense and packed sequences, with gradients."""
    (hq, hkv), torch = case.heads, some.torch
    parts = [
        [some.normal(s, h, case.dim).requires_grad_() for s, h in ((sq, hq), (sk, hkv), (sk, hkv))]
        for sq, sk in case.lengths
    ]
    join = torch.cat if case.packed else torch.stack
    q, k, v = (join([one[i] for one in parts]) for i in range(3))
    given: dict[str, Any] = {"return_attn_probs": True, **options}
    ends = [some.ints([0, *accumulate(one[i] for one in case.lengths)]) for i in (0, 1)]
    longest = [max(one[i] for one in case.lengths) for i in (0, 1)]
    if case.packed:
        given |= {"cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1]}
        given |= {"max_seqlen_q": longest[0], "max_seqlen_k": longest[1]}
    graded = case.call != "varlen_pages"
    if case.call == "varlen_pages":
        k, v, given["block_table"] = _pages(some, [one[1:] for one in parts], 16)
    if "qkvpacked" in case.call:
        arrays = (torch.stack((q, k, v), -3),)
        if case.packed:
            given = {n: x for n, x in given.items() if not n.endswith(("_q", "_k"))}
            given |= {"cu_seqlens": ends[0], "max_seqlen": longest[0]}
    else:
        arrays = (q, torch.stack((k, v), -3)) if "kvpacked" in case.call else (q, k, v)
    name = "flash_attn_varlen_func" if case.call == "varlen_pages" else f"flash_attn_{case.call}"
    call = getattr(compat, name if name.endswith("func") else f"{name}_func")
    with torch.set_grad_enabled(graded):
        o, lse, nothing = call(*arrays, **given)
    assert nothing is None and o.dtype == some.dtype
    made = [exact(q, k, v, options, _row(slopes, b)) for b, (q, k, v) in enumerate(parts)]
    expected = join([one for one, _ in made])
    close("o", o.detach(), expected.detach(), _tolerance(case))
    lses = [one for _, one in made]
    _close_lse(lse.detach(), (torch.cat(lses, 1) if case.packed else torch.stack(lses)).detach())
    if not graded or not expected.numel():
        return
    way = some.normal(*o.shape)
    leaves = [x for one in parts for x in one if x.numel()]
    exactly = torch.autograd.grad(expected, leaves, way.double(), allow_unused=True)
    ours = torch.autograd.grad(o, leaves, way, allow_unused=True)
    least = 0.3 * max(longest[1], 1) ** -0.5  # what rounding leaves of sums that are 0
    for x, mine, own in zip(leaves, ours, exactly, strict=True):
        own = torch.zeros_like(x) if own is None else own
        close("a gradient", mine, own.double(), 3 * _tolerance(case), least)


def _pages(some: Torch, keys: list[Any], page: int) -> tuple[Any, Any, Any]:
    """Sequences' k and v in pages of any order, NaN where nobody is; and their table."""
    torch = some.torch
    each = [max(-(-k.shape[0] // page), 1) for k, _ in keys]
    order = torch.randperm(sum(each), generator=some.made).tolist()
    _, heads, dim = keys[0][0].shape
    shape = (sum(each), page, heads, dim)
    made = [torch.full(shape, torch.nan, dtype=some.dtype, device=some.device) for _ in "kv"]
    table = torch.full((len(keys), max(each)), -1, dtype=torch.int32)
    for row, pair in enumerate(keys):
        for at in range(each[row]):
            table[row, at] = order.pop()
            for whole, own in zip(made, pair, strict=True):
                part = own.detach()[at * page : (at + 1) * page]
                whole[table[row, at], : len(part)] = part
    return made[0], made[1], table.to(some.device)


def _check_cache(case: Draw, some: Torch, options: dict[str, Any], slopes: Any) -> None:
    """flash_attn_with_kvcache, and what it wrote."""
    torch, cache, (hq, hkv), dim = some.torch, case.cache, case.heads, case.dim
    batch, tokens, new, held = len(case.lengths), case.lengths[0][0], cache["new"], cache["held"]
    if cache["whole"] and not new:
        held = [max(held)] * batch
    room = max(held) + new
    pads = cache.get("pads", [0] * batch)
    before = [[some.normal(n, hkv, dim) for _ in "kv"] for n in held]
    fresh: list[Any] = [some.normal(batch, new, hkv, dim) if new else None for _ in "kv"]
    q = some.normal(batch, tokens, hq, dim)
    given: dict[str, Any] = {**options, "return_softmax_lse": True}
    given["cache_seqlens"] = some.ints(held)
    if cache["whole"] and not new and cache["kind"] == "plain":
        del given["cache_seqlens"]
    k, v, rows = _cached(case, some, before, room, given)
    if "pads" in cache:
        given["cache_leftpad"] = some.ints(pads)
    cosine: Any = None
    sine: Any = None
    if cache.get("rotary"):
        angle = torch.rand((room + tokens, cache["rotary"] // 2), generator=some.made) * 6
        cosine, sine = (x.to(some.device, some.dtype) for x in (angle.cos(), angle.sin()))
        given |= {"rotary_cos": cosine, "rotary_sin": sine}
        given["rotary_interleaved"] = cache["interleaved"]
    o, lse = compat.flash_attn_with_kvcache(q, k, v, *fresh, **given)
    local = any(0 <= side < _seen(case, k, given) for side in options.get("window_size", (-1, -1)))
    for b, pair in enumerate(before):
        own_q, keys = q[b].double(), [x.double() for x in pair]
        if new:
            added = [x[b].double() for x in fresh]
            if cosine is not None:
                at = held[b] - pads[b] + torch.arange(max(new, tokens), device=some.device)
                added[0] = turned(added[0], at[:new], cosine, sine, cache["interleaved"])
                at = at[:tokens] if options["causal"] or local else at[:1].expand(tokens)
                own_q = turned(own_q, at, cosine, sine, cache["interleaved"])
            written = [x[held[b] :] for x in rows(b, held[b] + new)]
            assert torch.equal(written[1], fresh[1][b])
            close("written keys", written[0], added[0], _tolerance(case))
            added = [x.double() for x in written]
            keys = [torch.cat(one) for one in zip(keys, added, strict=True)]
        kept = [x[: held[b]] for x in rows(b, held[b])]
        assert all(torch.equal(x, y) for x, y in zip(kept, pair, strict=True))
        own_k, own_v = (x[pads[b] :] for x in keys)
        expected, sums = exact(own_q, own_k, own_v, options, _row(slopes, b))
        close("o", o[b], expected, 2 * _tolerance(case) if cosine is not None else _tolerance(case))
        if cosine is None:
            _close_lse(lse[b], sums)


def _seen(case: Draw, k: Any, given: dict[str, Any]) -> int:
    """Keys that the cache has room for: a window as wide is none."""
    table = given.get("block_table")
    return k.shape[1] * (1 if table is None else table.shape[1])


def _cached(
    case: Draw, some: Torch, before: list[Any], room: int, given: dict[str, Any]
) -> tuple[Any, Any, Any]:
    """The caches, NaN beyond the lengths; and a function (sequence, tokens) -> its k and v."""
    torch, batch, cache = some.torch, len(before), case.cache
    if cache["kind"] == "pages":
        padded = [
            [torch.cat([x, x.new_full((room - len(x), *x.shape[1:]), torch.nan)]) for x in pair]
            for pair in before
        ]
        k, v, table = _pages(some, padded, cache["page"])
        given["block_table"] = table
        return k, v, lambda b, n: [x[table[b].long().clamp(0)].flatten(0, 1)[:n] for x in (k, v)]
    order = list(range(batch))
    count = batch
    if cache["kind"] == "rows":
        count = batch + 2
        order = torch.randperm(count, generator=some.made)[:batch].tolist()
        given["cache_batch_idx"] = some.ints(order)
    shape = (count, room, case.heads[1], case.dim)
    k, v = (torch.full(shape, torch.nan, dtype=some.dtype, device=some.device) for _ in "kv")
    for row, pair in zip(order, before, strict=True):
        for whole, own in zip((k, v), pair, strict=True):
            whole[row, : len(own)] = own
    return k, v, lambda b, n: [x[order[b], :n] for x in (k, v)]
