"""Gradients of attention's forms on Hopper's kernel on a GPU: usual sizes, repeats, graphs."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import fkjit  # noqa: E402
from fkjit.jit.build import quiet  # noqa: E402
from fkjit.ops.attention.backward import call, checks  # noqa: E402
from fkjit.ops.op.plan import Plans  # noqa: E402
from tests.attention.backward.test_attention_feature_gradients import (  # noqa: E402
    assert_no_worse,
    grads,
    leaf,
    textbook,
)
from tests.attention.backward.test_attention_feature_gradients_gpu import one_by_one  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs Hopper",
    ),
]
HEADS = 4
VARLEN: Any = fkjit.attention_varlen
DIMS = ((64, 64), (128, 128), (40, 64), (128, 72), (96, 96))
PAIRS = ((113, 203), (512, 512), (1000, 1000), (64, 1024), (517, 300), (600, 601), (40, 900))
LENGTHS = (0, 1, 33, 64, 100, 128, 129, 300, 700)


@pytest.fixture(autouse=True)
def taken(monkeypatch):
    """Hopper's kernel wherever it can be; how many calls it took."""
    seen, usual, op = [], checks.select, call._FEATURES

    def select(*given):
        made = usual(*given)
        seen.append("flash_sm90" in [launch.spec.name for launch in made.launches])
        return made

    monkeypatch.setattr(checks, "select", select)
    monkeypatch.setattr(op, "plans", Plans(op.name, op.names, op.outputs))
    with quiet():
        yield seen
    assert seen and all(seen)


class Case(NamedTuple):
    """A composition from a seed: (rows of q, k, v, dout), options of a call, ends of sequences."""

    seed: int
    packed: bool
    deterministic: bool

    def draw(self) -> tuple[Any, ...]:
        rng, made = random.Random(self.seed), torch.Generator("cuda").manual_seed(self.seed)
        (d, dv), kv = DIMS[self.seed % len(DIMS)], rng.choice((1, 2, 4))
        dtype = rng.choice((torch.float16, torch.bfloat16))

        def normal(*shape: int) -> Any:
            return torch.randn(shape, device="cuda", generator=made).to(dtype)

        causal = rng.random() < 0.6
        window = (rng.choice((None, 1, 5, 300)), None if causal else rng.choice((None, 7, 130)))
        slopes = torch.rand(HEADS, device="cuda", generator=made)
        rule = rng.choice(({}, {"softcap": rng.choice((1.5, 30.0))}, {"alibi_slopes": slopes}))
        if window == (None, None) and not rule:
            rule = {"sinks": slopes}
        options = {"causal": causal, "window": window, **rule}
        if not self.packed:
            sq, sk = rng.choice(PAIRS)
            shapes = ((HEADS, sq, d), (kv, sk, d), (kv, sk, dv), (HEADS, sq, dv))
            return [normal(2, *shape) for shape in shapes], options, None
        lengths = [[64, *rng.choices(LENGTHS, k=4)] for _ in "qk"]
        ends = [torch.tensor((0, *n)).cumsum(0).int().cuda() for n in lengths]
        total_q, total_k = (sum(n) + 5 for n in lengths)
        shapes = ((total_q, HEADS, d), (total_k, kv, d), (total_k, kv, dv), (total_q, HEADS, dv))
        return [normal(*shape) for shape in shapes], options, ends


CASES = [Case(seed, seed % 2 == 0, seed // 2 % 2 == 0) for seed in range(24)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_err_at_most_twice_as_much_as_pytorch(case):
    (*given, dout), options, ends = case.draw()
    names = ("sinks", "alibi_slopes") if case.seed % 3 else ("sinks",)
    fixed = {n: x for n, x in options.items() if n not in names}
    learned = {n: x for n, x in options.items() if n in names}
    more = {**fixed, "deterministic": case.deterministic}
    if ends is None:
        call, theirs = fkjit.attention, textbook
    else:
        lengths = [*ends, *(int(end.diff().max()) for end in ends)]
        inner, past = one_by_one(ends), len(given[0]) - int(ends[0][-1])

        def call(q, k, v, **options):
            return VARLEN(q, k, v, *lengths, **options)

        def theirs(q, k, v, **options):
            return torch.nn.functional.pad(inner(q, k, v, **options), (0, 0, 0, 0, 0, past))

    exact, peer = (
        grads(lambda *x, **o: theirs(*x, **fixed, **o), given, dout, learned, to)
        for to in (torch.float64, None)
    )
    if ends is not None:  # what is behind the last sequence is nobody's
        for x, end in zip((*given, dout), (ends[0], ends[1], ends[1], ends[0]), strict=True):
            x[int(end[-1]) :] = torch.nan
    found = grads(lambda *x, **o: call(*x, **more, **o), given, dout, learned)
    assert_no_worse(found, peer, exact)


@pytest.mark.parametrize("seed", range(8))
def test_masks(seed):
    (*given, dout), options, _ = Case(seed, False, seed % 2 == 0).draw()
    rng, made = random.Random(seed), torch.Generator("cuda").manual_seed(seed)
    (batch, heads, sq, _), sk = given[0].shape, given[1].shape[2]
    own = [rng.choice((1, n)) for n in (batch, heads, sq)]
    mask = torch.rand(*own, sk, device="cuda", generator=made) < rng.choice((0.3, 0.9))
    fixed = options | {"mask": mask.expand(batch, heads, sq, sk) if seed % 3 == 0 else mask}
    mine = {**fixed, "deterministic": seed % 2 == 0}
    exact, peer = (
        grads(lambda *x, **o: textbook(*x, **fixed, **o), given, dout, {}, to)
        for to in (torch.float64, None)
    )
    found = grads(lambda *x, **o: fkjit.attention(*x, **mine, **o), given, dout, {})
    assert_no_worse(found, peer, exact)


@pytest.mark.parametrize("seed", range(16))
def test_biases(seed):
    rng, made = random.Random(seed), torch.Generator("cuda").manual_seed(seed)
    batch, sq, sk = rng.choice((1, 2, 3)), rng.choice((64, 257, 700)), rng.choice((64, 320, 1000))
    d, kv, dtype = rng.choice((64, 96, 128)), rng.choice((1, 2, 4)), torch.bfloat16
    shapes = ((HEADS, sq, d), (kv, sk, d), (kv, sk, d), (HEADS, sq, d))
    *given, dout = (torch.randn(batch, *s, device="cuda", generator=made).to(dtype) for s in shapes)
    own = [rng.choice((1, n)) for n in (batch, HEADS, sq)]
    learned = {"bias": torch.randn(*own, sk, device="cuda", generator=made).to(dtype)}
    fixed = {"causal": rng.random() < 0.3, "window": (rng.choice((None, 90)), None)}
    if seed % 3 == 0:
        fixed["alibi_slopes"] = torch.rand(HEADS, device="cuda", generator=made)
    mine = {**fixed, "deterministic": seed % 2 == 0}
    exact, peer = (
        grads(lambda *x, **o: textbook(*x, **fixed, **o), given, dout, learned, to)
        for to in (torch.float64, None)
    )
    found = grads(lambda *x, **o: fkjit.attention(*x, **mine, **o), given, dout, learned)
    assert_no_worse(found, peer, exact)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_score_mods_with_a_derivative(dims, causal):
    made = torch.Generator("cuda").manual_seed(0)
    (d, dv), (sq, sk) = dims, PAIRS[dims[0] % len(PAIRS)]
    shapes = ((HEADS, sq, d), (2, sk, d), (2, sk, dv), (HEADS, sq, dv))
    *given, dout = (torch.randn(2, *s, device="cuda", generator=made).bfloat16() for s in shapes)
    table = torch.rand(sq, device="cuda", generator=made)
    mine = {
        "score_mod": "0.1f * score * score + score * table[q_idx]",
        "score_mod_grad": "0.2f * score + table[q_idx]", "score_args": {"table": table},
    }  # fmt: skip

    def theirs(*x):
        return textbook(*x, causal=causal, mod=lambda s: 0.1 * s * s + s * table.to(s)[:, None])

    exact, peer = (grads(theirs, given, dout, {}, to) for to in (torch.float64, None))
    found = grads(lambda *x: fkjit.attention(*x, causal=causal, **mine), given, dout, {})
    assert_no_worse(found, peer, exact)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("window", [(700, 0), (300, 200), (None, None)], ids=str)
def test_100_repeats_have_the_same_bits(dim, window):
    made = torch.Generator("cuda").manual_seed(0)
    lengths = (1500, 0, 700, 1, 64, 2048, 333)
    ends = torch.tensor((0, *lengths), device="cuda").cumsum(0).int()
    shapes = ((sum(lengths), 8, dim), *((sum(lengths), 2, dim),) * 2)
    rows = [leaf(torch.randn(s, device="cuda", generator=made), torch.bfloat16) for s in shapes]
    o = VARLEN(*rows, ends, ends, 2048, 2048, window=window)
    first = torch.autograd.grad(o, rows, o, retain_graph=True)
    for _ in range(100):
        again = torch.autograd.grad(o, rows, o, retain_graph=True)
        assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))


def test_a_captured_graph_follows_other_lengths():
    made = torch.Generator("cuda").manual_seed(0)
    rows = [torch.randn(900, 4, 128, device="cuda", generator=made).half() for _ in "qkv"]
    rows = [leaf(x, x.dtype) for x in rows]
    ends = torch.tensor((0, 300, 300, 900), device="cuda", dtype=torch.int32)

    def step():
        o = VARLEN(*rows, ends, ends, 600, 600, causal=True)
        return torch.autograd.grad(o, rows, o.detach())

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for lengths in ((100, 500, 300), (600, 1, 299), (0, 150, 30)):
        ends.copy_(torch.tensor((0, *lengths)).cumsum(0).int())
        graph.replay()
        for one, two in zip(captured, step(), strict=True):
            assert torch.equal(one[: sum(lengths)], two[: sum(lengths)])
