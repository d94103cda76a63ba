"""Gradients of attention's forms on Hopper's kernel without a GPU: whole calls in the interpreter,
when it is chosen, and planted bugs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.core.sampling import ONLY_WITH_EVERY_VARIANT, one_in

torch = pytest.importorskip("torch", reason="needs torch")

import fkjit  # noqa: E402
from fkjit.arch import arch, target  # noqa: E402
from fkjit.jit.build import build, quiet  # noqa: E402
from fkjit.ops.attention.backward import checks  # noqa: E402
from fkjit.ops.attention.backward import kernels_sm90 as sm90  # noqa: E402
from fkjit.ops.attention.backward.kernels import with_features  # noqa: E402
from fkjit.ops.attention.backward.kernels_wide_sm90 import FLASH_WIDE_SM90  # noqa: E402
from fkjit.ops.attention.backward.problem import Options  # noqa: E402
from fkjit.settings import settings  # noqa: E402
from tests.attention.backward.test_attention_backward import tensors  # noqa: E402
from tests.attention.backward.test_attention_feature_gradients import (  # noqa: E402
    assert_no_worse,
    check,
    grads,
    textbook,
)
from tests.attention.backward.test_attention_feature_gradients_gpu import one_by_one  # noqa: E402
from tests.core.mutations import Bug, K  # noqa: E402
from tests.core.test_mutations import check_found, right  # noqa: E402


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that gradients of forms take from now on, where Hopper's is there."""
    monkeypatch.setattr(
        "fkjit.jit.build.settings", lambda: replace(settings(), target="compute_90a")
    )
    seen, usual = [], checks.select

    def select(*given):
        made = usual(*given)
        seen.extend(launch.spec.name for launch in made.launches)
        return made

    monkeypatch.setattr(checks, "select", select)
    with quiet():
        yield seen


def test_sums_in_any_order_where_nothing_is_masked(launched):
    *given, dout = tensors(2, 1, 150, 140, 64, 48, "bf16")
    mask = torch.rand(1, 2, 1, 140) < 0.8
    options = {"sinks": torch.rand(2), "softcap": 4.0, "mask": mask}
    check(given, dout, options, mine={"deterministic": False})
    assert launched == ["mask", "rows", "flash_sm90", "dq", "heads"]


def test_packed_sequences_with_a_window(launched):
    more, learned = {"causal": True, "window": (100, None)}, {"alibi_slopes": torch.rand(2)}
    ends = [torch.tensor((0, *n)).cumsum(0).int() for n in ((70, 0, 5, 90), (40, 9, 0, 150))]
    made = torch.Generator().manual_seed(2)
    rows = [torch.randn(n, h, 40, generator=made).half() for n, h in ((165, 2), (199, 1), (199, 1))]
    dout = torch.randn(165, 2, 40, generator=made).half()

    def ours(q, k, v, **slopes):
        return fkjit.attention_varlen(
            q, k, v, ends[0], ends[1], 90, 150, **more, **slopes, deterministic=False
        )

    theirs = one_by_one(ends)
    found = grads(ours, rows, dout, learned)
    exact, peer = (
        grads(lambda *x, **o: theirs(*x, **more, **o), rows, dout, learned, dtype)
        for dtype in (torch.float64, None)
    )
    assert_no_worse(found, peer, exact)
    assert launched == ["rows", "flash_sm90", "dq", "slopes_sm90", "heads"]


def test_slopes_of_each_batch_beside_a_bias_a_sink_and_a_gradient_of_lse(launched):
    *given, dout = tensors(2, 1, 70, 136, 64, 48, "bf16", batch=2)
    made = torch.Generator().manual_seed(3)  # a slope near 0 has a gradient that cancels
    bias = torch.randn(1, 1, 1, 136, generator=made).bfloat16()
    slopes = 0.2 + torch.rand(2, 2, generator=made)
    options = {"alibi_slopes": slopes, "bias": bias, "sinks": torch.rand(2, generator=made)}

    def with_lse(q, k, v, **options):
        o, lse = fkjit.attention(q, k, v, **options, return_lse=True)
        return o + lse[..., None].to(o)

    def textbook_with_lse(q, k, v, *, sinks, **options):
        ones = torch.ones_like(v[..., :1])  # sum of p: 1 less the sink's share
        o, share = (textbook(q, k, x, sinks=sinks, **options) for x in (v, ones))
        return o + sinks.to(q)[:, None, None] - torch.log1p(-share)

    found = grads(with_lse, given, dout, options)
    exact = grads(textbook_with_lse, given, dout, options, torch.float64)
    for one, expected in zip(found, exact, strict=True):
        assert (one.double() - expected).norm() <= 1e-2 * expected.norm()
    assert launched == ["rows", "flash_sm90", "dq", "slopes_sm90", "bias_sum", "heads"]


WIDE = {
    "window, sinks": {"window": (40, 9), "sinks": torch.rand(2)},
    "mask": {"mask": torch.rand(1, 1, 70, 130) < 0.8},
    "soft cap": {"softcap": 4.0, "sinks": torch.rand(2)},
}


@ONLY_WITH_EVERY_VARIANT  # the sweep has a variant with most of them
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("options", WIDE.values(), ids=WIDE)
def test_above_head_dimension_128(options, deterministic, launched):
    *given, dout = tensors(2, 1, 70, 130, 200, 136, "bf16")
    check(given, dout, options, mine={"deterministic": deterministic})
    assert "flash_wide_sm90" in launched


PROBLEM = {
    "dtype": "bf16", "batch": 1, "heads_q": 2, "heads_kv": 1, "seqlen_q": 100, "seqlen_k": 200,
    "head_dim": 128, "head_dim_v": 128, "softmax_scale": 0.1, "causal": False,
    "strides": dict.fromkeys(("q", "k", "v", "dout"), (51200, 25600, 128)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "form", "name", "taken"),
    [
        ({}, "window", "sm_90a", True),
        ({}, "window", "sm_80", False),
        ({"head_dim": 192}, "window", "sm_90a", True),
        ({"head_dim": 192}, "bias=bf16", "sm_90a", False),
        ({"head_dim_v": 192}, "score_mod=2 + score; derivative=1", "sm_90a", False),
        ({"softcap": 30.0}, "softcap", "sm_90a", True),
        ({"softcap": 0.1}, "softcap", "sm_90a", False),
        ({}, "softcap alibi", "sm_90a", False),
        ({}, "softcap bias=bf16", "sm_90a", False),
        ({}, "bias=fp32", "sm_90a", False),
        ({}, "bias=bf16 mask", "sm_90a", False),
        ({}, "score_mod=2 + score; derivative=1", "sm_90a", True),
        ({}, "score_mod=2 * score; derivative=2", "sm_90a", True),
        ({}, "bias=bf16 score_mod=2 * score; derivative=2", "sm_90a", False),
        ({}, "varlen score_mod=2 * score; derivative=2", "sm_90a", False),
        ({}, "alibi dalibi", "sm_90a", True),
        ({}, "mask score_mod=2 + score; derivative=1", "sm_90a", False),
        ({}, "bias=bf16 varlen", "sm_90a", True),
        ({}, "mask varlen", "sm_90a", True),
    ],
)
def test_hopper_takes_bands_that_tma_can_read(changes, form, name, taken):
    options = Options(features=form)
    assert sm90.takes({**PROBLEM, **changes}, options, True, arch(name)) is taken


@one_in(3)
@pytest.mark.parametrize(
    "form",
    [
        "alibi varlen",
        "softcap mask",
        "alibi bias=fp16 dbias",
        "score_mod=ids[q_idx] == ids[k_idx] ? score : NEG_INFINITY; int32 ids; derivative=1",
        "score_mod=score * score + score * x[q_idx]; fp32 x; derivative=2 * score + x[q_idx]",
    ],
)
def test_forms_that_are_not_swept_spill_no_registers(form):
    assert_no_spills(sm90.FLASH_SM90, 128, True, form)


@one_in(2)
@pytest.mark.parametrize(
    ("form", "dim_v"), [("window", 128), ("alibi mask varlen", 192), ("softcap", 256)]
)
def test_nor_do_those_above_head_dimension_128(form, dim_v):
    assert_no_spills(FLASH_WIDE_SM90, max(dim_v, 192), True, form, head_dim_v=dim_v)


def test_a_wide_soft_cap_is_taken_in_order_as_it_spills_otherwise():
    one = {**PROBLEM, "window": (200, 200)}
    options = Options(features="softcap", deterministic=False)
    assert [sm90.in_order({**one, "head_dim": dim}, options) for dim in (128, 256)] == [False, True]


def assert_no_spills(spec, head_dim, deterministic, form, **more):
    params = {"dtype": "fp16", "head_dim": head_dim, "deterministic": deterministic, "form": form}
    params |= more
    with quiet():
        made = build(with_features(spec, form), params, target("sm_90a")).meta
    assert made["resources"]["spill_stores"] == 0 and not made["problems"]
    order = [{"128s": 0, "P": 1}.get(argument[1], 2) for argument in made["arguments"]]
    assert order == sorted(order)  # maps, pointers, then numbers: as plans want them


@pytest.mark.sampled(key=lambda form: "one")
@pytest.mark.parametrize("form", ["bias=bf16 varlen", "mask varlen"])
def test_arrays_of_scores_beside_the_largest_tiles(form, launched):
    params = {"dtype": "bf16", "head_dim": 128, "deterministic": True, "form": form}
    problem = sm90.FLASH_SM90.verification.problems(params, "small")[-1]
    assert right(with_features(sm90.FLASH_SM90, form), params, problem)


# The shape of a bias, and the launches that gradients take.
BIASES = {
    (1, 2, 70): ["zeros", "rows", "flash_sm90", "dq"],  # shared by two batches
    (1, 1, 1): ["rows", "flash_sm90", "dq", "bias_sum"],
}


@pytest.mark.sampled(key=lambda shape: "one")
@pytest.mark.parametrize("shape", BIASES, ids=str)
def test_gradients_of_a_bias(shape, launched):
    *given, dout = tensors(2, 1, 70, 136, 64, 48, "bf16", batch=2)
    bias = torch.randn(*shape, 136, generator=torch.Generator().manual_seed(3)).bfloat16()
    check(given, dout, {"bias": bias})
    assert launched == BIASES[shape]


@ONLY_WITH_EVERY_VARIANT
def test_a_score_mod_that_only_adds(launched):
    *given, dout = tensors(2, 1, 70, 136, 64, 48, "bf16")
    slopes, group = torch.rand(2), torch.arange(136).int() // 50
    text = "group[q_idx + 66] == group[k_idx] ? score + slopes[h] * (k_idx - q_idx) : NEG_INFINITY"
    mine = {"score_mod": text, "score_args": {"group": group, "slopes": slopes}}

    def theirs(q, k, v):
        def mod(s):
            apart = torch.arange(136) - torch.arange(70)[:, None]
            seen = group[66:136, None] == group
            return (s + slopes.to(s)[:, None, None] * apart).masked_fill(~seen, -torch.inf)

        return textbook(q, k, v, causal=True, mod=mod)

    check(given, dout, {}, theirs, {**mine, "score_mod_grad": "1", "causal": True})
    assert launched == ["rows", "flash_sm90", "dq"]


@one_in(2)
@pytest.mark.parametrize("dim", [64, 128])
def test_a_score_mod_with_a_derivative(dim, launched):
    """Which is infinite where a key is hidden."""
    sq = {64: 140, 128: 76}[dim]  # two tiles of queries
    *given, dout = tensors(dim // 64, 1, sq, sq - 4, dim, 48, "bf16")
    table = torch.rand(sq)
    mine = {
        "score_mod": "0.5f * score * score + score * table[q_idx]",
        "score_mod_grad": "k_idx > q_idx - 4 ? 1.f / 0.f : score + table[q_idx]",
        "score_args": {"table": table}, "causal": True,
    }  # fmt: skip

    def theirs(q, k, v):
        return textbook(q, k, v, causal=True, mod=lambda s: 0.5 * s * s + s * table.to(s)[:, None])

    with fkjit.sanitize(race=True):
        check(given, dout, {}, theirs, mine)
    assert launched == ["rows", "flash_sm90", "dq"]


@pytest.mark.parametrize(
    ("heads_kv", "seqlen", "causal", "dim", "ordered"),
    [
        (8, 4096, True, 128, True),
        (32, 4096, True, 128, False),
        (8, 4096, False, 128, False),
        (8, 2048, True, 128, False),
        (32, 4096, False, 192, True),
        (4, 700, False, 192, False),
        (32, 4096, False, 256, False),
        (8, 4096, True, 256, False),
    ],
)
def test_sums_in_any_order_are_ordered_where_that_is_faster(heads_kv, seqlen, causal, dim, ordered):
    sizes = {"heads_q": 32, "heads_kv": heads_kv, "seqlen_q": seqlen, "seqlen_k": seqlen}
    sizes |= {"head_dim": dim, "head_dim_v": dim}
    one = {**PROBLEM, **sizes, "causal": causal}
    assert sm90.in_order(one, Options(deterministic=False)) is ordered
    assert sm90.in_order(one, Options(deterministic=True))


D = "templates/attention/backward_sm90/"
PACKED = {
    "kernel": "attention_backward_form.flash_sm90",
    "params": {"head_dim": 128, "deterministic": True, "form": "softcap varlen"},
}
BIASED = {
    "kernel": "attention_backward_form.flash_sm90",
    "params": {"head_dim": 128, "deterministic": True, "form": "alibi bias=bf16 dbias"},
}
BUGS = (
    Bug("a neighbour's rows are read", D + "tensor_rows.cuh", "row = RAGGED_ROWS - count",
        "row = 0", by="memory", **PACKED),
    Bug("keys are taken before they are announced", D + "features.cuh",
        "mbarrier_wait(barriers.work_full(slot.stage), slot.parity);", "", by="race", **PACKED),
    Bug("a bias is read before it is there", D + "features.cuh",
        "mbarrier_wait(barriers.bias_full(), step & 1);", "", by="race", **BIASED),
    Bug("a bias over one that is read", D + "bias.cuh",
        "mbarrier_wait(loads.barriers.bias_empty(), step_number & 1 ^ 1);", "", by="race",
        **BIASED),
    Bug("a bias not turned over", D + "bias.cuh", "ldmatrix_x4_trans(pairs", "ldmatrix_x4(pairs",
        by="numbers", problem={"seqlen_k": 136}, **BIASED),
    Bug("dS not turned over", D + "bias_gradient.cuh", "ldmatrix_x4_trans(", "ldmatrix_x4(",
        by="numbers", problem={"seqlen_k": 136}, **BIASED),
    Bug("one score too many is hidden", D + "features.cuh", "tile.width - column",
        "tile.width - 1 - column", by="numbers", problem={"window": (30, 0), "heads_q": 1},
        **PACKED),
)  # fmt: skip


SLOPES = {
    "kernel": "attention_backward_form.slopes_sm90",
    "params": {"head_dim": 64, "form": "alibi mask dalibi"},
}
SLOPE_BUGS = (
    Bug("K and V are read before they are there", K + "backward_slopes_sm90.cu",
        "mbarrier_wait(barriers.full(ring.stage), ring.parity);", "", by="race", **SLOPES),
    Bug("K and V over what is read", K + "backward_slopes_sm90.cu",
        "mbarrier_wait(barriers.empty(ring.stage), ring.parity ^ 1);", "", by="race",
        problem={"seqlen_k": 389, "window": (400, 400)}, **SLOPES),
    Bug("distances from the other end", D + "distances.cuh", "- column -", "+ column -",
        by="numbers", **SLOPES),
)  # fmt: skip

SLOW = (
    Bug("each of two batches stores dS", D + "bias_gradient.cuh", "if (shared)", "if (false)",
        by="race", **BIASED),
)  # fmt: skip


@pytest.mark.sampled(key=lambda bug: None if bug in SLOW else (bug.kernel, bug.by))
@pytest.mark.parametrize("bug", (*BUGS, *SLOPE_BUGS, *SLOW), ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug, monkeypatch):
    check_found(bug, monkeypatch)
