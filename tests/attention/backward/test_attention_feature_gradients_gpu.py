"""Gradients of fkjit.attention with a form and of packed sequences on a GPU: sizes that users know,
repeats, graphs, finite differences."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import fkjit  # noqa: E402
from fkjit.jit.build import quiet  # noqa: E402
from tests.attention.backward.test_attention_feature_gradients import (  # noqa: E402
    DTYPES,
    LEARNED,
    assert_no_worse,
    grads,
    leaf,
    textbook,
)

pytestmark = pytest.mark.gpu
DIMS = ((32, 32), (40, 40), (64, 64), (96, 111), (128, 128), (128, 128), (192, 128), (256, 256))
PAIRS = ((113, 203), (108, 256), (1, 339), (64, 1024), (517, 300), (600, 601))
FEATURES = ("window", "softcap", "mask", *LEARNED)


class Case(NamedTuple):
    """A composition from a seed."""

    seed: int
    packed: bool

    def draw(self) -> tuple[Any, ...]:
        """(q, k, v, dout), options and where packed sequences end."""
        rng = random.Random(self.seed)
        (d, dv), (sq, sk) = rng.choice(DIMS), rng.choice(PAIRS)
        dtype = DTYPES[rng.choice(("fp16", "bf16", "bf16", "fp32"))]
        made = torch.Generator("cuda").manual_seed(self.seed)
        has = {name: rng.random() < 0.5 for name in FEATURES}
        batch, heads = 3, 4

        def normal(*shape: int) -> Any:
            return torch.randn(shape, device="cuda", generator=made)

        ends = None
        if self.packed:
            lengths = [[sq, 0, rng.randrange(1, sq + 1)], [sk, 7, rng.randrange(sk + 1)]]
            ends = [torch.tensor((0, *n)).cumsum(0).int().cuda() for n in lengths]
            totals = [sum(n) for n in lengths]
            shapes = ((totals[0], heads, d), (totals[1], 2, d), (totals[1], 2, dv))
            rows = [normal(*s).to(dtype) for s in (*shapes, (totals[0], heads, dv))]
        else:
            shapes = ((heads, sq, d), (2, sk, d), (2, sk, dv), (heads, sq, dv))
            rows = [normal(batch, *s).to(dtype) for s in shapes]
        bias = [rng.choice((1, n)) for n in (batch, heads, sq)]
        slopes = normal(*(batch, heads)[rng.randrange(2) :]).abs() / 10
        options: dict[str, Any] = {
            "window": (rng.randrange(sk), rng.choice((None, 5))), "softcap": 3.0,
            "mask": torch.rand(batch, 1, sq, sk, device="cuda", generator=made) < 0.8,
            "alibi_slopes": slopes, "bias": normal(*bias, sk).to(rng.choice(list(DTYPES.values()))),
            "sinks": normal(heads),
        }  # fmt: skip
        kept = {name: x for name, x in options.items() if has[name]}
        return rows, kept | {"causal": rng.random() < 0.5}, ends


def one_by_one(ends: Any) -> Any:
    """`textbook` of each sequence."""

    def call(q: Any, k: Any, v: Any, **options: Any) -> Any:
        made = []
        for b in range(len(ends[0]) - 1):
            queries, keys = (slice(int(end[b]), int(end[b + 1])) for end in ends)
            sq, sk = queries.stop - queries.start, keys.stop - keys.start
            own = dict(options)
            for name in ("bias", "mask"):
                if name in own:
                    x = own[name][b % len(own[name])][None]
                    own[name] = x[:, :, : sq if x.shape[2] > 1 else 1, :sk]
            if "alibi_slopes" in own and own["alibi_slopes"].dim() == 2:
                own["alibi_slopes"] = own["alibi_slopes"][b]
            rows = [x.transpose(0, 1)[None] for x in (q[queries], k[keys], v[keys])]
            seen = sq and sk
            o = textbook(*rows, **own) if seen else rows[0].new_zeros(1, q.shape[1], sq, v.shape[2])
            made.append(o[0].transpose(0, 1))
        return torch.cat(made)

    return call


CASES = [Case(seed, seed % 3 == 0) for seed in range(40)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_err_at_most_twice_as_much_as_pytorch(case):
    (*given, dout), options, ends = case.draw()
    lengths = [] if ends is None else [*ends, *(int(end.diff().max()) for end in ends)]

    def ours(*rows, **options):
        call = fkjit.attention if ends is None else fkjit.attention_varlen
        return call(*rows, *lengths, **options)

    theirs = textbook if ends is None else one_by_one(ends)
    with quiet():
        found = grads(ours, given, dout, options)
    exact, peer = (grads(theirs, given, dout, options, to) for to in (torch.float64, None))
    assert_no_worse(found, peer, exact)


def learned(case, *more):
    """A call's leaves, and what makes its result."""
    (*given, dout), options, ends = case.draw()
    rows = [leaf(x, x.dtype) for x in given]
    names = [name for name in LEARNED if name in options]
    leaves = [leaf(options[name], options[name].dtype) for name in names]
    return rows, leaves, dout, options | dict(zip(names, leaves, strict=True)), ends


def test_100_repeats_have_the_same_bits():
    rows, leaves, dout, options, _ = learned(Case(1, False))
    options["bias"] = bias = torch.randn(1, 1, 1, rows[1].shape[2], device="cuda").requires_grad_()
    options["sinks"] = sinks = torch.randn(4, device="cuda").requires_grad_()
    of = [*rows, *leaves[: "alibi_slopes" in options], bias, sinks]
    with quiet():
        o = fkjit.attention(*rows, **options)
    first = torch.autograd.grad(o, of, dout, retain_graph=True)
    for _ in range(100):
        again = torch.autograd.grad(o, of, dout, retain_graph=True)
        assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))


def test_a_captured_graph_follows_other_lengths():
    made = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (torch.randn(300, 4, 64, device="cuda", generator=made).half() for _ in "qkvo")
    bias = torch.randn(1, 4, 200, 200, device="cuda", generator=made)
    ends = torch.tensor([0, 100, 100, 300], device="cuda", dtype=torch.int32)
    leaves = [leaf(x, x.dtype) for x in (q, k, v, bias)]

    def step():
        q, k, v, bias = leaves
        o = fkjit.attention_varlen(q, k, v, ends, ends, 200, 200, causal=True, bias=bias)
        return torch.autograd.grad(o, leaves, dout)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side), quiet():
        step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for lengths in ((100, 0, 200), (200, 1, 99), (0, 150, 30)):
        ends.copy_(torch.tensor((0, *lengths)).cumsum(0).int())
        graph.replay()
        for one, two in zip(captured, step(), strict=True):
            assert torch.equal(one, two)


def test_gradcheck_in_fp32():
    """Differences in fp32 err by rounding over eps: that is what the tolerances are for."""
    made = torch.Generator("cuda").manual_seed(3)

    def normal(*shape):
        return torch.randn(shape, device="cuda", generator=made).requires_grad_()

    rows = [normal(1, h, s, 4) for h, s in ((2, 3), (1, 4), (1, 4))]
    more = [normal(2), normal(1, 2, 1, 4), normal(2)]

    def dense(q, k, v, slopes, bias, sinks):
        return fkjit.attention(
            q, k, v, window=(2, 1), softcap=2.0, alibi_slopes=slopes, bias=bias, sinks=sinks,
            score_mod="score + 0.1f * score * score", score_mod_grad="1.f + 0.2f * score",
            return_lse=True,
        )  # fmt: skip

    ends = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in ((0, 1, 3), (0, 4, 4))]

    def packed(q, k, v, slopes, bias, sinks):
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        form = {"alibi_slopes": slopes, "bias": bias, "sinks": sinks}
        return fkjit.attention_varlen(q, k, v, ends[0], ends[1], 2, 4, causal=True, **form)

    for call in (dense, packed):
        assert torch.autograd.gradcheck(
            call, (*rows, *more), eps=1e-2, atol=4e-3, rtol=2e-2, nondet_tol=0.0
        )


@pytest.mark.parametrize("of", [(b, h, r) for b in (1, 2) for h in (1, 16) for r in (1, 520)])
@pytest.mark.parametrize(
    ("dim", "dtype"), [(64, "bf16"), (128, "bf16"), (128, "fp16"), (256, "bf16")]
)
def test_a_bias_in_whole_runs_of_keys(of, dim, dtype):
    made = torch.Generator("cuda").manual_seed(dim)
    q, dout, k, v, bias = (
        torch.randn(shape, device="cuda", generator=made).to(DTYPES[dtype])
        for shape in (*((2, 16, 520, dim),) * 2, *((2, 8, 1048, dim),) * 2, (*of, 1048))
    )
    options = {"bias": bias, "causal": of[0] == 1}
    if of[1] == 1:
        options["mask"] = torch.rand(2, 1, 520, 1048, device="cuda", generator=made) < 0.8
    with quiet():
        found, again = (grads(fkjit.attention, (q, k, v), dout, options) for _ in range(2))
    exact, peer = (grads(textbook, (q, k, v), dout, options, to) for to in (torch.float64, None))
    assert_no_worse(found, peer, exact)
    assert all(torch.equal(one, two) for one, two in zip(found, again, strict=True))


def test_any_order_is_close_to_the_same_bits():
    made = torch.Generator("cuda").manual_seed(3)
    q, k, v, dout = (
        torch.randn(2, 8, 512, 64, device="cuda", generator=made).half() for _ in "qkvo"
    )
    found = []
    for deterministic in (True, False, None):
        rows = [leaf(x, x.dtype) for x in (q, k, v)]
        fkjit.attention(*rows, causal=True, deterministic=deterministic).backward(dout)
        found.append([x.grad for x in rows])
    for exact, *others in zip(*found, strict=True):
        assert all(torch.allclose(exact, x, rtol=1e-2, atol=1e-2) for x in others)
