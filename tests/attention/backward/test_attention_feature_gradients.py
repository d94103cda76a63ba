"""Gradients of fkjit.attention with a form and of packed sequences, against float64 autograd, in
the interpreter."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import fkjit  # noqa: E402
from fkjit.errors import ArgumentTypeError, ParameterError  # noqa: E402
from fkjit.jit.build import quiet  # noqa: E402
from fkjit.ops.attention.backward import call as backward  # noqa: E402
from fkjit.ops.attention.backward.checks import INPUTS  # noqa: E402
from fkjit.ops.attention.backward.checks import check as check_call  # noqa: E402
from fkjit.ops.attention.backward.problem import Options  # noqa: E402
from fkjit.ops.attention.features import ScoreFeatures  # noqa: E402
from fkjit.runtime import workspace  # noqa: E402
from fkjit.runtime.interop import Pointer, view  # noqa: E402
from tests.attention.backward.test_attention_backward import DTYPES, tensors  # noqa: E402
from tests.core.sampling import one_in  # noqa: E402
from tests.op.plan_kit import Kernel, driver  # noqa: E402, F401

HEADS, KV_HEADS, SQ, SK = 2, 1, 37, 53  # IN_RUNS have several KV heads
LEARNED = ("alibi_slopes", "bias", "sinks")


@pytest.fixture(autouse=True)
def silent():
    with quiet():
        yield


def arrays(seed=3):
    """alibi_slopes, bias, mask and sinks."""
    made = torch.Generator().manual_seed(seed)
    bias = torch.randn((1, HEADS, SQ, SK), generator=made)
    mask = torch.rand((2, 1, SQ, SK), generator=made) < 0.8
    slopes, sinks = (torch.rand(HEADS, generator=made) for _ in range(2))
    return {"alibi_slopes": slopes, "bias": bias, "mask": mask, "sinks": sinks}


def textbook(q, k, v, *, causal=False, window=None, softcap=None, alibi_slopes=None, bias=None,
             mask=None, sinks=None, mod=None):  # fmt: skip
    sq, sk = q.shape[2], k.shape[2]
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = q @ k.mT * q.shape[-1] ** -0.5
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    s = s if mod is None else mod(s)
    keys, queries = (torch.arange(n, device=q.device) for n in (sk, sq))
    apart = keys - (queries[:, None] + sk - sq)
    if alibi_slopes is not None:
        s = s - alibi_slopes.to(s)[..., None, None] * apart.abs()
    s = s if bias is None else s + bias.to(s)
    left, right = (sk + sq if x is None else x for x in window or (None, None))
    seen = (apart >= -left) & (apart <= (0 if causal else right))
    seen = seen if mask is None else seen & mask
    s = s.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        s = torch.cat([s, sinks.to(s)[:, None, None].expand(*s.shape[:3], 1)], -1)
    p = s.softmax(-1).nan_to_num()[..., :sk]
    return p @ v


def leaf(x, dtype):
    return x.detach().clone().to(dtype).requires_grad_()


def grads(call, given, dout, options, dtype=None):
    """Of q, k, v and what is learned; all in `dtype` if there is one."""
    rows = [leaf(x, dtype or x.dtype) for x in given]
    learned = {n: leaf(x, dtype or x.dtype) for n, x in options.items() if n in LEARNED}
    call(*rows, **options | learned).backward(dout.to(dtype or dout.dtype))
    return [x.grad for x in (*rows, *learned.values())]


def assert_no_worse(found, peer, exact):
    """At most twice PyTorch's own error in this dtype; a few numbers a head, where that may be
    small by chance, at most half of what rounding o once may make."""
    unit = torch.finfo(found[0].dtype).eps
    for one, other, expected in zip(found, peer, exact, strict=True):
        assert one.shape == expected.shape
        error, theirs = ((x.double() - expected).norm() for x in (one, other))
        least = max(2e-6, unit / 2 if one.dim() < 3 else 0.0)
        assert error <= 2 * theirs + least * expected.norm(), (error, theirs)


def check(given, dout, options, call=None, mine=None):
    """`mine`: further options of fkjit's."""
    call = call or textbook
    found = grads(lambda *x, **o: fkjit.attention(*x, **o, **(mine or {})), given, dout, options)
    exact, peer = (grads(call, given, dout, options, dtype) for dtype in (torch.float64, None))
    assert_no_worse(found, peer, exact)


CASES = (
    (("window",), {"window": (9, 4)}), (("window causal",), {"window": (20, None), "causal": True}),
    (("softcap",), {"softcap": 1.5}), (("mask",), {}), (("sinks",), {"causal": True}),
    (("alibi_slopes", "bias", "mask", "sinks"), {"softcap": 2.0, "window": (25, 3)}),
)  # fmt: skip


ALONE = {("window",), ("softcap",), ("mask",), ("sinks",)}  # of what the last case has together


@pytest.mark.sampled(key=lambda case: None if case[0] in ALONE else str(case))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_err_at_most_twice_as_much_as_pytorch(case):
    names, options = case
    *given, dout = tensors(HEADS, KV_HEADS, SQ, SK, 40, 24, "bf16", batch=2)
    with fkjit.sanitize(race=len(names) > 1):
        check(given, dout, options | {n: x for n, x in arrays().items() if n in names})


@one_in(2)
@pytest.mark.parametrize("case", [(150, 290, 64, (200, 70)), (300, 300, 128, (90, 0))], ids=str)
def test_tiles_inside_a_window_are_not_masked(case):
    sq, sk, dim, window = case
    *given, dout = tensors(2, 1, sq, sk, dim, dim, "bf16")
    check(given, dout, {"window": window}, mine={"deterministic": dim == 64})
    with pytest.raises(ArgumentTypeError, match="attention: deterministic='no' is not True or"):
        check(given, dout, {"window": window}, mine={"deterministic": "no"})


BIASES = (
    ((1, 1, 1, SK), "bf16", (64, 64)), ((2, HEADS, 1, SK), "fp32", (35, 61)),
    ((2, 1, SQ, SK), "fp16", (96, 64)), ((1, HEADS, SQ, SK), "bf16", (250, 64)),
)  # fmt: skip


@one_in(4)
@pytest.mark.parametrize(("shape", "dtype", "dims"), BIASES, ids=str)
def test_a_bias_of_any_shape_has_a_gradient(shape, dtype, dims):
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DTYPES[dtype])
    *given, dout = tensors(HEADS, KV_HEADS, SQ, SK, *dims, dtype, batch=2)
    with fkjit.sanitize(race=shape[2] == 1):
        check(given, dout, {"bias": bias, "causal": len(set(shape)) > 2})


# The shape of a bias and of a mask, whose rows hold whole runs of keys; heads and dtypes
IN_RUNS = (
    ((1, 8, 20, 136), None, (8, 2, 64), ("fp16", "fp32"), {"causal": True}),  # batches in turn
    ((2, 4, 37, 56), (2, 1, 37, 56), (4, 2, 64), ("bf16", "bf16"), {"window": (9, 4)}),
    ((1, 1, 1, 136), None, (4, 2, 128), ("bf16", "bf16"), {"causal": True}),
    ((2, 4, 1, 56), (1, 1, 1, 56), (4, 1, 64), ("bf16", "fp16"), {"deterministic": False}),
)  # fmt: skip


@one_in(4)
@pytest.mark.parametrize("case", IN_RUNS, ids=str)
def test_scores_start_from_a_bias_and_a_mask_in_whole_runs(case):
    shape, masked, (heads, heads_kv, dim), (dtype, of_bias), options = case
    made = torch.Generator().manual_seed(5)
    bias = torch.randn(shape, generator=made).to(DTYPES[of_bias])
    bias[..., 5] = float("-inf")
    sq = 20 if shape[3] > 100 else 37
    *given, dout = tensors(heads, heads_kv, sq, shape[3], dim, dim, dtype, batch=2)
    mine = {n: x for n, x in options.items() if n == "deterministic"}
    learned = {"bias": bias, **{n: x for n, x in options.items() if n not in mine}}
    if masked:
        learned["mask"] = torch.rand(masked, generator=made) < 0.8
    with fkjit.sanitize(race=dim == 64):
        check(given, dout, learned, mine=mine)


def test_which_kernel_makes_the_gradient_of_a_bias():
    def makers(shape, wanted=("q", "k", "v", "bias"), scale=0.125, sk=56, **more):
        sizes = {n: (2, 8, 512 if n in ("q", "o", "dout") else sk, 64) for n in INPUTS[:5]}
        made = {n: torch.zeros(size).bfloat16() for n, size in sizes.items()}
        made |= {"lse": torch.zeros(2, 8, 512), "bias": torch.zeros(*shape, sk).bfloat16()}
        views = dict.fromkeys((*INPUTS, *(f"d{n}" for n in wanted)))
        views |= {n: view(x, "attention", n) for n, x in made.items()}
        form = ScoreFeatures(bias="bf16", **more).text
        options = Options(features=form, softmax_scale=scale, wanted=wanted)
        request = check_call(views, options)
        return [launch.spec.name for launch in request.launches]

    rows = ["rows", "keys"]
    assert makers((2, 8, 512)) == [*rows, "queries"]
    assert makers((1, 8, 512)) == [*rows, "queries", "queries"]
    assert makers((1, 1, 512)) == [*rows, "queries", "bias", "bias_sum"]
    assert makers((1, 8, 1)) == [*rows, "queries", "bias_sum"]
    assert makers((1, 8, 1), ("q", "bias")) == ["rows", "queries", "bias", "bias_sum"]
    assert makers((2, 8, 512), ("k", "bias")) == [*rows, "bias"]
    assert makers((2, 8, 512), scale=0.0) == [*rows, "queries", "bias"]
    assert makers((2, 8, 512), sk=60) == [*rows, "queries", "bias"]
    assert makers((2, 8, 512), softcap=True) == [*rows, "queries", "bias"]


def test_only_what_is_wanted_is_made():
    options = arrays() | {"bias": torch.zeros(1, 1, SQ, SK), "causal": True}
    *given, dout = tensors(HEADS, KV_HEADS, SQ, SK, 16, 16, "fp32", batch=2)
    whole = dict(zip((*"qkv", *LEARNED), grads(fkjit.attention, given, dout, options), strict=True))
    for wanted in ("bias", "k"):
        rows = dict(zip("qkv", given, strict=True))
        asked = {n: leaf(x, x.dtype) for n, x in (rows | options).items() if n == wanted}
        call = rows | {n: x for n, x in asked.items() if n in rows}
        form = options | {n: x for n, x in asked.items() if n in options}
        fkjit.attention(*call.values(), **form).backward(dout)
        assert torch.equal(asked[wanted].grad, whole[wanted])


def test_slopes_of_each_batch_and_a_gradient_of_lse():
    slopes, sinks = torch.rand(2, HEADS), torch.rand(HEADS)
    *given, dout = tensors(HEADS, KV_HEADS, SQ, SK, 16, 16, "fp32", batch=2)
    options = {"alibi_slopes": slopes, "sinks": sinks, "window": (20, 5)}
    check(given, dout, options)

    def lse_of(q, k, v, *, alibi_slopes, sinks, window):
        ones = torch.ones_like(v[..., :1])  # sum of p: 1 less the sink's share
        share = textbook(q, k, ones, alibi_slopes=alibi_slopes, sinks=sinks, window=window)
        return sinks.to(q)[:, None] - torch.log1p(-share[..., 0]) + 0 * v.sum()

    def ours(*rows, **options):
        return fkjit.attention(*rows, **options, return_lse=True)[1]

    of_lse = torch.randn(2, HEADS, SQ)
    found = grads(ours, given, of_lse, options)
    exact = grads(lse_of, given, of_lse, options, torch.float64)
    for one, expected in zip(found, exact, strict=True):
        assert (one.double() - expected).abs().max() <= 1e-5 * expected.abs().max() + 1e-12


# ------------------------------------------------------------------ a score of the user's


def test_a_score_of_the_users_has_the_derivative_that_he_gives():
    table = torch.rand(SQ)
    *given, dout = tensors(HEADS, KV_HEADS, SQ, SK, 24, 24, "fp32", batch=2)

    def call(*rows, softcap):
        return textbook(*rows, softcap=softcap, causal=True,
                        mod=lambda s: 0.5 * s * s + s * table.to(s)[:, None])  # fmt: skip

    derivative = "k_idx > q_idx + 16 ? 1.f / 0.f : score + table[q_idx]"  # infinite where hidden
    mine = {
        "score_mod": "half * score * score + score * table[q_idx]", "causal": True,
        "score_args": {"half": 0.5, "table": table}, "score_mod_grad": derivative,
    }  # fmt: skip
    check(given, dout, {"softcap": 3.0}, call, mine)


def test_what_has_no_gradient_is_refused():
    q, k, v, _ = tensors(HEADS, KV_HEADS, SQ, SK, 16, 16, "fp32")
    q.requires_grad_()
    for words, error, options in (
        ("has no derivative; pass score_mod_grad", ParameterError, {"score_mod": "score * 2"}),
        ("score_mod_grad is given, but no score_mod", ParameterError,
         {"softcap": 3.0, "score_mod_grad": "1.f"}),
        ("score_mod_grad=2 is not a str", ArgumentTypeError,
         {"score_mod": "score * 2", "score_mod_grad": 2}),
        ("score_mod_grad='1;' is not one expression", ParameterError,
         {"score_mod": "score * 2", "score_mod_grad": "1;"}),
        ("score_args: t requires grad, but has no gradient", ParameterError,
         {"score_mod": "score * t[0]", "score_mod_grad": "t[0]",
          "score_args": {"t": torch.ones(1, requires_grad=True)}}),
    ):  # fmt: skip
        with pytest.raises(error, match="attention: .*" + words.replace("?", ".")):
            fkjit.attention(q, k, v, **options)
    o = fkjit.attention(q, k, v, score_mod="score * 2", score_mod_grad="scores")
    with pytest.raises(ParameterError, match="score_mod_grad='scores' does not compile"):
        o.sum().backward()


# ------------------------------------------------------------------ packed sequences

LENGTHS = ((37, 0, 5, 70, 3), (20, 7, 0, 70, 9))


def packed(dims, dtype):
    """q, k, v, dout and where sequences end."""
    made = torch.Generator().manual_seed(5)
    (total_q, total_k), (d, dv) = (sum(lengths) for lengths in LENGTHS), dims
    shapes = (
        (total_q, HEADS, d),
        (total_k, KV_HEADS, d),
        (total_k, KV_HEADS, dv),
        (total_q, HEADS, dv),
    )
    rows = [torch.randn(shape, generator=made).to(DTYPES[dtype]) for shape in shapes]
    ends = [torch.tensor((0, *lengths)).cumsum(0).int() for lengths in LENGTHS]
    return *rows, ends


def by_sequence(q, k, v, *, bias=None, **options):
    """`textbook` of one after the other."""
    made, firsts = [], [0, 0]
    for number, (sq, sk) in enumerate(zip(*LENGTHS, strict=True)):
        queries, keys = (slice(at, at + n) for at, n in zip(firsts, (sq, sk), strict=True))
        firsts = [queries.stop, keys.stop]
        own = [x.transpose(0, 1)[None] for x in (q[queries], k[keys], v[keys])]
        if bias is not None:
            options["bias"] = bias[number % len(bias)][None, :, :sq, :sk]
        o = textbook(*own, **options) if sq and sk else own[0].new_zeros(1, HEADS, sq, v.shape[2])
        made.append(o[0].transpose(0, 1))
    return torch.cat(made)


PACKED = (
    ("bf16", (40, 24), {"causal": True}, ()),
    ("fp32", (40, 24), {"window": (9, 3), "softcap": 2.0}, LEARNED),
    ("fp16", (64, 64), {"causal": True}, LEARNED),
)


@one_in(3)
@pytest.mark.parametrize("case", PACKED, ids=str)
def test_packed_sequences_err_at_most_twice_as_much_as_pytorch(case):
    dtype, dims, options, learned = case
    mine = {"deterministic": dtype != "bf16"}
    *given, dout, ends = packed(dims, dtype)
    longest = [max(lengths) for lengths in LENGTHS]
    made = torch.Generator().manual_seed(2)
    more = {"alibi_slopes": torch.rand(HEADS), "sinks": torch.rand(HEADS)}
    more["bias"] = torch.randn((1, HEADS, *longest), generator=made)
    options = options | {name: more[name] for name in learned}

    def ours(*rows, **options):
        return fkjit.attention_varlen(*rows, *ends, *longest, **options, **mine)

    with fkjit.sanitize(race=dtype == "fp16"):
        found = grads(ours, given, dout, options)
    exact, peer = (grads(by_sequence, given, dout, options, to) for to in (torch.float64, None))
    assert_no_worse(found, peer, exact)


def test_rows_of_no_sequence_and_beyond_the_longest_have_no_gradient():
    *given, dout, ends = packed((40, 24), "bf16")
    rows = [leaf(x, x.dtype) for x in given]
    shorter = [end[:-1] for end in ends]
    fkjit.attention_varlen(*rows, *shorter, 50, 60).backward(dout)
    for x, end, longest in zip(rows, (ends[0], ends[1], ends[1]), (50, 60, 60), strict=True):
        assert (x.grad[end[3] + longest :] == 0).all() and torch.isfinite(x.grad).all()
    assert (rows[0].grad[: ends[0][1]] != 0).any()


# ------------------------------------------------------------------ compiled, as operators


def test_compiled_whole_they_have_the_same_gradients():
    torch._dynamo.reset()
    *given, dout, ends = packed((64, 64), "fp16")
    learned = [torch.rand(HEADS), torch.randn(1, HEADS, 70, 70), torch.rand(HEADS)]

    def model(q, k, v, *learned):
        form = dict(zip(LEARNED, learned, strict=True))
        o, lse = fkjit.attention_varlen(q * 2, k, v, *ends, 70, 70, causal=True, return_lse=True,
                                        **form)  # fmt: skip
        return o + lse.T[..., None].half()

    found = []
    for call in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        rows = [leaf(x, x.dtype) for x in (*given, *learned)]
        call(*rows).backward(dout)
        found.append([x.grad for x in rows])
    for eager, compiled in zip(*found, strict=True):
        assert torch.equal(eager, compiled)


def test_torch_func_grad():
    q, k, v, dout = tensors(2, 1, 9, 11, 16, 16, "fp32")
    bias = torch.randn(1, 1, 9, 11)

    def loss(call):
        return lambda q, k, v, bias: (call(q, k, v, bias=bias) * dout).sum()

    found, exact = (
        torch.func.grad(loss(call), argnums=(0, 1, 2, 3))(q, k, v, bias)
        for call in (fkjit.attention, textbook)
    )
    assert all(torch.allclose(one, two, atol=1e-5) for one, two in zip(found, exact, strict=True))


@one_in(2)
@pytest.mark.parametrize("name", ["attention_form", "attention_varlen_lse"])
def test_operators_are_what_their_schemas_say(name):
    *given, _, ends = packed((64, 64), "fp16")
    form = [torch.rand(HEADS), torch.randn(1, 1, 1, 70), None, torch.rand(HEADS)]
    more = [*ends, 70, 70] if "varlen" in name else []
    if not more:
        given = [x[None, :70].transpose(1, 2) for x in given]
    form = [x if x is None else leaf(x, x.dtype) for x in form]
    operator = getattr(torch.ops.fkjit, name).default
    inputs = (*(leaf(x, x.dtype) for x in given), *more, *form, [5, -1])
    torch.library.opcheck(operator, inputs, {"causal": True})


def test_gradcheck_in_fp32():
    """Differences in fp32 err by rounding over eps: that is what the tolerances are for."""
    rows = [leaf(x, x.dtype) for x in tensors(2, 1, 3, 4, 4, 4, "fp32")[:3]]
    learned = [leaf(torch.rand(s), torch.float32) for s in ((2,), (1, 2, 1, 4), (2,))]

    def call(q, k, v, slopes, bias, sinks):
        return fkjit.attention(
            q, k, v, window=(2, 1), softcap=2.0, alibi_slopes=slopes, bias=bias, sinks=sinks,
            score_mod="score + 0.1f * score * score", score_mod_grad="1.f + 0.2f * score",
            return_lse=True,
        )  # fmt: skip

    assert torch.autograd.gradcheck(
        call, (*rows, *learned), eps=1e-2, atol=5e-3, rtol=2e-2, nondet_tol=0.0, fast_mode=True
    )


# ------------------------------------------------------------------ the warm path of a GPU


@pytest.mark.parametrize(("layout", "deterministic"), [("bhsd", True), ("packed", False)])
def test_a_warm_call_launches_what_a_cold_one_does(layout, deterministic, driver, monkeypatch):  # noqa: F811
    """On CPU tensors, with kernels that only note their arguments."""
    monkeypatch.setattr(workspace, "find", lambda *_: (0, 0, None))
    q, k, v, dout, ends = packed((64, 64), "bf16")
    bias, lse = torch.randn(1, 1, 1, 70), torch.randn(HEADS, q.shape[0])
    rows = {"dout": dout, "q": q, "k": k, "v": v, "o": dout.clone(), "lse": lse}
    if layout == "bhsd":
        rows = {n: (x if n == "lse" else x[:70].transpose(0, 1))[None] for n, x in rows.items()}
        rows["lse"] = rows["lse"][..., :70].contiguous()
        given = rows
    else:
        given = rows | {"cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1]}
    given |= {"alibi_slopes": torch.rand(HEADS), "bias": bias, "sinks": torch.rand(HEADS)}
    form = ScoreFeatures(alibi=True, bias="fp32", varlen=layout == "packed", dalibi=deterministic)
    wanted = ("q", "k", "v", *LEARNED[not deterministic :])
    options = Options(
        form.text, layout, True, max_seqlen_q=70, max_seqlen_k=70, wanted=wanted,
        deterministic=deterministic,
    )  # fmt: skip
    inputs = tuple(given.get(name) for name in INPUTS)
    op = backward._FEATURES
    outputs = backward._written_to(inputs, options)
    request = op._request(op._views([*inputs, *outputs]), options)
    kernels = [Kernel(launch.spec, launch.params) for launch in request.launches]
    assert len(kernels) == 6
    op.plans.store([*inputs, *outputs], options, request, kernels, op._pairs(request))
    made = op(inputs, outputs, options)
    op.plans.forget()
    assert [x.shape for x in made] == [given[name].shape for name in wanted]
    assert all(len(kernel.launches) == 1 for kernel in kernels)
    for kernel in kernels:  # what is not there is null, what is there is not
        values = dict(zip(kernel.names, kernel.launches[0][1], strict=False))
        assert not values.get("mask") and values.get("q", 1)
        assert bool(values.get("dq_sum")) in (not deterministic, "dq_sum" in values)


def test_what_is_not_wanted_is_a_null_pointer():
    """Of packed sequences, whose arrays say their strides: on a GPU a null pointer has none."""
    q, k, v, dout, ends = packed((64, 64), "bf16")
    given = {"dout": dout, "q": q, "k": k, "v": v, "o": dout, "lse": torch.randn(HEADS, len(q))}
    given |= {"cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1]}
    op = backward._FEATURES
    for wanted, names in ((("q",), ["rows", "queries"]), (("v",), ["rows", "keys"])):
        options = Options("varlen", "packed", max_seqlen_q=70, max_seqlen_k=70, wanted=wanted)
        inputs = tuple(given.get(name) for name in INPUTS)
        outputs = backward._written_to(inputs, options)
        request = op._request(op._views([*inputs, *outputs]), options)
        arrays = {name: Pointer(seen) for name, seen in request.inputs.items()}
        assert [launch.spec.name for launch in request.launches] == names
        for spec, params, problem in request.launches:
            named = spec.arguments(params, problem, arrays)
            assert named["q_strides"] == (0, 64, HEADS * 64)
