"""fkjit.merge_states without a GPU: against attention over all keys, and against float64."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fkjit
from bench.attention import cases_merge_states as bench
from bench.core.catalog import operations
from fkjit import arch
from fkjit.errors import ArgumentTypeError, FkjitError, ParameterError
from fkjit.jit.build import build, quiet
from fkjit.ops.attention.merge.cases import merged, problem_of
from fkjit.ops.attention.merge.kernels import MOST_KNOWN, kernel, parameters
from fkjit.runtime.interop import numpy_dtype
from tests.core.mutations import Bug
from tests.core.test_mutations import check_found, each_planted

torch = pytest.importorskip("torch", reason="needs torch")
from tests.twins.kit import interpreter  # noqa: E402, F401

TYPE, VALUE = ArgumentTypeError, ParameterError
INF = float("inf")


def merge(*states, **options):
    with quiet():
        return fkjit.merge_states(*states, **options)


def states(parts, rows=(2, 3, 5), columns=24, dtype="fp32", layout="bhsd", seed=0):
    """(o, lse), stacked."""
    rng = np.random.default_rng([seed, parts, *rows])
    o = rng.standard_normal((parts, *rows, columns), dtype=np.float32)
    o = np.ascontiguousarray(o.swapaxes(2, 3) if layout == "bshd" and len(rows) == 3 else o)
    lse = (3 * rng.standard_normal((parts, *rows), dtype=np.float32)).astype(np.float32)
    return o.astype(numpy_dtype(dtype)), lse


def turn(o, layout):
    return o.swapaxes(-3, -2) if layout == "bshd" else o


def assert_right(found, o, lse, layout="bhsd"):
    """At most twice PyTorch's own error in o's dtype."""
    expected, whole = merged(turn(o, layout), lse)
    kind = {"float32": torch.float32, "float16": torch.float16}.get(o.dtype.name, torch.bfloat16)
    mine = turn(np.asarray(found[0]), layout)
    seen = np.isfinite(lse)
    clean = torch.from_numpy(np.where(seen[..., None], turn(o, layout), 0).astype(np.float32))
    weights = torch.from_numpy(np.where(seen, lse, -np.inf)).softmax(0).nan_to_num().to(kind)
    theirs = (weights[..., None] * clean.to(kind)).sum(0).double().numpy()
    error = np.abs(mine.astype(np.float64) - expected)
    assert mine.shape == expected.shape and found[0].dtype == o.dtype
    assert error.max() <= 2 * np.abs(theirs - expected).max() + 1e-6
    made = np.asarray(found[1])
    assert made.dtype == np.float32 and np.array_equal(np.isneginf(made), np.isneginf(whole))
    assert np.allclose(made, whole, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("cuts", [(0, 4, 11), (0, 0, 3, 11), (0, 1, 2, 5, 5, 7, 11)], ids=str)
def test_parts_of_the_keys_make_attention_over_all(cuts, layout):
    q, k, v = (torch.randn(2, h, n, 16) for h, n in ((4, 5), (2, 11), (2, 11)))
    whole, lse = fkjit.attention(q, k, v, return_lse=True)

    def placed(x):
        return x.transpose(1, 2).contiguous() if layout == "bshd" else x.contiguous()

    parts = [
        fkjit.attention(placed(q), placed(k[:, :, a:b]), placed(v[:, :, a:b]), return_lse=True,
                        layout=layout)
        for a, b in pairwise(cuts)
    ]  # fmt: skip
    stacked = [torch.stack(list(x)) for x in zip(*parts, strict=True)]
    found = [merge(*stacked, layout=layout)]
    if len(parts) == 2:
        found.append(merge(*parts[0], *parts[1], layout=layout))
    for o, sums in found:
        assert torch.allclose(o, placed(whole), atol=2e-6) and torch.allclose(sums, lse, atol=2e-6)


@settings(deadline=None, max_examples=15)
@given(st.data())
def test_any_shape_strides_dtype_and_parts_without_keys(data):
    dtype = data.draw(st.sampled_from(["fp16", "bf16", "fp32"]))
    layout = data.draw(st.sampled_from(["bhsd", "bshd"]))
    parts = data.draw(st.integers(1, 9))
    rows = tuple(data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=3)))
    columns = data.draw(st.sampled_from([1, 8, 24, 40, 59, 128, 300]))
    start, gap = (data.draw(st.sampled_from([0, 0, 1, 8])) for _ in range(2))
    layout = layout if len(rows) == 3 else "bhsd"
    o, lse = states(parts, rows, columns + start + gap, dtype, layout)
    o = o[..., start : start + columns]
    turned = turn(o, layout)
    empty = data.draw(st.sampled_from([0.0, 0.3, 1.0]))
    nothing = np.random.default_rng(3).random(lse.shape) < empty
    turned[nothing] = np.nan
    lse[nothing] = data.draw(st.sampled_from([-np.inf, np.inf]))
    if data.draw(st.booleans()):
        lse = np.ascontiguousarray(lse.T).T
    assert_right(merge(o, lse, layout=layout), o, lse, layout)
    if parts == 2:
        assert_right(merge(o[0], lse[0], o[1], lse[1], layout=layout), o, lse, layout)


def test_nothing_seen_nan_and_great_sums():
    o, lse = states(3)
    lse[:] = -INF
    found, sums = merge(o, lse)
    assert not found.any() and np.isneginf(sums).all()
    lse[:] = [[[[1e4]]], [[[-1e4]]], [[[1e4]]]]
    found, sums = merge(o, lse)
    assert np.allclose(found, (o[0] + o[2]) / 2, atol=1e-6) and np.allclose(sums, 1e4 + np.log(2))
    lse[1] = np.nan
    assert np.isnan(merge(o, lse)[0]).all() and np.isnan(merge(o, lse)[1]).all()
    o[1], lse[1] = np.nan, 0
    assert np.isnan(merge(o, lse)[0]).all()


@pytest.mark.parametrize("parts", [5, MOST_KNOWN, MOST_KNOWN + 1])
def test_counts_that_are_known_when_compiled(parts):
    """And the first that is not: a kernel for any count."""
    o, lse = states(parts, (2, 3, 50), 64, "bf16")
    lse[:, 0, 1], lse[parts // 2, 1] = -INF, INF
    assert_right(merge(o, lse), o, lse)
    problem = problem_of("bf16", (2, 3, 50), 64, parts)
    assert parameters(problem, True)["parts"] == (parts if parts <= MOST_KNOWN else 0)
    assert parameters(problem, False)["parts"] == 0
    for name in ("sm_75", "sm_90a") if parts == MOST_KNOWN else ():
        with quiet():
            made = build(
                kernel(parts), {**parameters(problem, True), "dtype": "fp16"}, arch.target(name)
            )
        assert made.meta["resources"]["spill_stores"] == 0


def test_no_parts_and_no_rows():
    found, sums = merge(*states(0))
    assert found.shape == (2, 3, 5, 24) and not found.any() and np.isneginf(sums).all()
    found, sums = merge(*states(2, (2, 0, 5)))
    assert found.shape == (2, 0, 5, 24) and sums.shape == (2, 0, 5)


def test_in_place():
    o, lse = states(2)
    expected = merge(o, lse)[0]
    for target in (0, 1):
        o, lse = states(2)
        made, _ = merge(o[0], lse[0], o[1], lse[1], out=o[target])
        assert np.shares_memory(made, o) and np.array_equal(o[target], expected)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("pair", [False, True])
def test_gradients(pair, layout):
    o, lse = (torch.from_numpy(x).requires_grad_() for x in states(2, layout=layout))
    lse_of = lse.detach().clone()
    lse_of[1, 0, 1] = -INF
    lse = lse_of.requires_grad_()
    given = (o[0], lse[0], o[1], lse[1]) if pair else (o, lse)
    found, sums = merge(*given, layout=layout)
    weights = torch.randn(found.shape), torch.randn(sums.shape)
    (found * weights[0]).sum().add((sums * weights[1]).sum()).backward()
    mine, ours = o.grad.clone(), lse.grad.clone()
    o.grad = lse.grad = None
    by = lse.softmax(0)
    by = by.transpose(2, 3) if layout == "bshd" else by
    loss = ((by[..., None] * o).sum(0) * weights[0]).sum() + (lse.logsumexp(0) * weights[1]).sum()
    loss.backward()
    assert torch.allclose(mine, o.grad, atol=2e-6) and torch.allclose(ours, lse.grad, atol=2e-5)


@pytest.mark.parametrize("result", [0, 1])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_gradients_of_one_result_where_a_part_saw_no_key(layout, result):
    """Its o, which holds NaN, has no say; what nothing depends on costs nothing."""
    o, lse = (torch.from_numpy(x) for x in states(2, layout=layout))
    lse[1, 0, 1], hidden = -INF, torch.zeros(lse.shape, dtype=torch.bool)
    hidden[1, 0, 1] = True
    o[hidden.transpose(2, 3) if layout == "bshd" else hidden] = float("nan")
    given = [x.requires_grad_() for x in (o[0], lse[0], o[1], lse[1])]
    gradients = torch.autograd.grad(
        merge(*given, layout=layout)[result].sum(), given, allow_unused=True
    )
    for x, gradient in zip(given, gradients, strict=True):
        if gradient is None:
            assert result == 1 and x.dim() == 4
        else:
            assert gradient.isfinite().all() and gradient.any()
    assert not gradients[3][0, 1].any()


PARTS, LSE = states(2)
HALF = PARTS.astype(np.float16)

# fmt: off
CALLS = [  # id, arguments, options, error, what the message must say
    ("layout", (PARTS, LSE), {"layout": "sbhd"}, VALUE, "layout='sbhd' is not one of bhsd, bshd"),
    ("alone", (PARTS[0], LSE[0], PARTS[1]), {}, VALUE, "other and other_lse are given together"),
    ("lse shape", (PARTS, LSE[:, :1]), {}, VALUE, r"o has shape .*, lse \(2, 1, 3, 5\)"),
    ("lse rank", (PARTS[0, 0], LSE[0, 0]), {}, VALUE, r"allowed: o \[N, B, H, S, Dv\]"),
    ("number", (PARTS, np.ones((), "f4")), {}, VALUE, "o has shape"),
    ("turned", (PARTS, LSE), {"layout": "bshd"}, VALUE, "layout='bshd'"),
    ("no columns", (PARTS[..., :0], LSE), {}, VALUE, "o has shape"),
    ("other shape", (PARTS[0], LSE[0], PARTS[1, :1], LSE[1]), {}, VALUE, r"other has shape \(1,"),
    ("other lse", (PARTS[0], LSE[0], PARTS[1], LSE[1, :1]), {}, VALUE, r"other_lse has shape \(1,"),
    ("dtypes", (PARTS[0], LSE[0], HALF[1], LSE[1]), {}, TYPE, "other is fp16 but o is fp32"),
    ("lse dtype", (PARTS, LSE.astype("f8")), {}, TYPE, "lse is fp64; allowed: fp32"),
    ("columns", (PARTS[..., ::2], LSE), {}, VALUE, "o has stride 2 in its last dimension"),
    ("out", (PARTS, LSE), {"out": PARTS[0, :1]}, VALUE, r"out has shape \(1, 3, 5, 24\)"),
    ("overlap", (PARTS, LSE), {"out": PARTS[0]}, VALUE, "out overlaps o in memory"),
    ("list", ([1], LSE), {}, TYPE, r"o is a builtins\.list"),
]
# fmt: on


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"), [pytest.param(*c[1:], id=c[0]) for c in CALLS]
)
def test_bad_input_gets_one_clear_typed_error(arguments, options, error, message, monkeypatch):
    monkeypatch.setattr("fkjit.ops.op.op.interpret", lambda *_: pytest.fail("something ran"))
    with pytest.raises(error, match=message) as caught:
        fkjit.merge_states(*arguments, **options)
    assert isinstance(caught.value, FkjitError) and str(caught.value).startswith("merge_states: ")
    with pytest.raises(error, match=message):
        fkjit.prepare("merge_states", *arguments, **options)


# ------------------------------------------------------------------ planted bugs

FILE = "kernels_cu/attention/merge_states.cu"
STACK = {
    "kernel": "merge_states.rows",
    "params": {"dtype": "fp32", "vector": True, "pair": False, "parts": 0},
}
TWO = {
    "kernel": "merge_states.rows",
    "params": {"dtype": "fp32", "vector": False, "pair": True, "parts": 2},
}
EIGHT = {"kernel": STACK["kernel"], "params": {**STACK["params"], "parts": 8}}
BUGS = (
    Bug("parts without keys are looked at", FILE, "if (by < 0.f)", "if (false)",
        by="numbers", **STACK),
    Bug("plus infinity is a sum", FILE, "isinf(x) ? NEG_INFINITY : x", "x", by="numbers", **TWO),
    Bug("what came before is not rescaled", FILE, "sum * weight(top, higher)", "sum",
        by="numbers", **STACK),
    Bug("one row too many", FILE, "min(own, rows - 1)", "own", by="memory", **TWO),
    Bug("one part too many", FILE, "if (k < count) fetch", "if (k <= count) fetch", by="memory",
        **STACK),
    Bug("weights are read before all are there", FILE, "__syncwarp();", "", nth=2, by="race",
        **STACK),
    Bug("the row of another lane", FILE, "from[p] = number << lanes_log2", "from[p] = 0",
        by="race", **STACK),
    Bug("sums at the place of o", FILE, "place(at, lse_strides)", "place(at, out_strides)",
        by="memory", **STACK),
    Bug("the second part's sum is the first's", FILE, "part == 1 ? other_lse",
        "part == 2 ? other_lse", by="memory", **TWO),
    Bug("its own row's weight for every row", FILE, "told(own_weight, p)", "own_weight",
        by="numbers", **EIGHT),
)  # fmt: skip


@each_planted(BUGS)
def test_a_planted_bug_is_found(bug, monkeypatch):
    check_found(bug, monkeypatch)


# ------------------------------------------------------------------ twin and peers


@pytest.mark.parametrize("name", ["ours", "triton", "torch"])
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_each_candidate_is_right_and_other_numbers_are_found_wrong(interpreter, dtype, pair, name):  # noqa: F811
    device = SimpleNamespace(torch=torch, place="cpu")
    op, given = (
        operations()["merge_states"],
        bench.problem(2, 7, 2 if pair else 3, pair, dtype, 3, 40),
    )
    with quiet():
        arrays, others = op.inputs(given, device), op.inputs(given, device)
        if name == "ours":
            prepared = op.ours(given, arrays)
        else:
            (peer,) = [peer for peer in op.peers if peer.name == name]
            prepared = peer.prepare(given, arrays)
        found = prepared.output(prepared.call())
    assert op.expected(given, arrays).judge(found).why_wrong() is None
    assert op.expected(given, others).judge(found).why_wrong() is not None


def test_labels():
    assert bench.label(bench.problem(1, 16_384)) == "bf16 B1 S16384 H32 D128 x2"
    assert bench.label(bench.problem(1, 9, 8, False)) == "bf16 B1 S9 H32 D128 stack of 8"


@pytest.mark.parametrize("shape", [(2, 3, 5), (5,), (2, 1, 1)], ids=str)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_mask_of_rows_that_are_merged(shape, library):
    """Elsewhere a row keeps what it has, to the bit."""
    (o, lse), mask = states(2), np.random.default_rng(1).random(shape) < 0.5
    given = [o[0], lse[0], o[1], lse[1], mask]
    if library == "torch":
        given = [torch.from_numpy(x) for x in given]
    found = [np.asarray(x) for x in merge(*given[:4], mask=given[4])]
    whole = [np.asarray(x) for x in merge(*given[:4])]
    merged_there = np.broadcast_to(mask, lse[0].shape)
    for one, both, kept in zip(found, whole, (o[0], lse[0]), strict=True):
        assert np.array_equal(one[merged_there], both[merged_there])
        assert np.abs(one - kept)[~merged_there].max() <= 1e-6
    assert np.array_equal(found[0][~merged_there], o[0][~merged_there])


@pytest.mark.parametrize("mask", [np.ones(4, bool), np.ones(5), True], ids=repr)
def test_a_mask_that_does_not_fit(mask):
    o, lse = states(2)
    with pytest.raises(ParameterError, match=r"merge_states: mask=.*; allowed: bool of a shape"):
        merge(o[0], lse[0], o[1], lse[1], mask=mask)
    with pytest.raises(ParameterError, match=r"mask=.*with other"):
        merge(o, lse, mask=np.ones(5, bool))
