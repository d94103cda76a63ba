"""fkjit.moe_route in the interpreter: choices, ties, odd numbers, groups, bad input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fkjit
from fkjit.errors import ArgumentTypeError, DeviceError, ParameterError
from fkjit.jit.build import quiet
from fkjit.ops.moe import cases
from fkjit.ops.moe import problem as moe

INF, NAN = np.inf, np.nan


def route(logits, top_k, **options):
    with quiet():
        return fkjit.moe_route(logits, top_k, **options)


def random_problem(rng, dtype, experts, top_k, tokens=7, **other):
    p = cases.route_problem(dtype, tokens, experts, top_k, **other)
    return p, cases.random_routing(p, rng)


def assert_routed(found, p, arrays):
    expected = cases.routed(p, arrays)
    weights, ids = (np.asarray(x) for x in found)
    assert weights.dtype == np.float32 and ids.dtype == np.int32
    assert np.array_equal(ids, expected["topk_ids"])
    assert np.allclose(weights, expected["topk_weights"], rtol=5e-7, atol=1e-30)


@settings(max_examples=20)
@given(
    st.integers(1, moe.MAX_EXPERTS), st.integers(1, moe.MAX_TOP_K), st.sampled_from(moe.SCORINGS),
    st.booleans(), st.booleans(), st.sampled_from(["fp16", "bf16", "fp32"]), st.integers(0, 9),
    st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_any_number_of_experts(experts, top_k, scoring, renormalize, biased, dtype, gap, seed):
    top_k, rng = min(top_k, experts), np.random.default_rng(seed)
    p, arrays = random_problem(
        rng, dtype, experts, top_k, scoring=scoring, renormalize=renormalize, biased=biased,
        row_stride=experts + gap,
    )  # fmt: skip
    rows = arrays["logits"].reshape(p["tokens"], -1)[:, :experts]
    options = {"scoring": scoring, "renormalize": renormalize, "bias": arrays.get("bias")}
    assert_routed(route(rows, top_k, **options), p, arrays)


@settings(max_examples=20)
@given(
    st.integers(1, 32), st.integers(1, 32), st.data(), st.booleans(), st.sampled_from(moe.SCORINGS)
)
def test_any_groups(num_groups, group_size, data, biased, scoring):
    topk_groups = data.draw(st.integers(1, num_groups))
    top_k = data.draw(st.integers(1, min(32, topk_groups * group_size)))
    given_topk = data.draw(st.sampled_from((None, 1, 2, 3, 7)))
    more = {} if given_topk is None else {"group_topk": min(given_topk, group_size)}
    p, arrays = random_problem(
        np.random.default_rng(data.draw(st.integers(0, 999))), "fp32", num_groups * group_size,
        top_k, num_groups=num_groups, topk_groups=topk_groups, biased=biased, scoring=scoring,
        scale=2.5, renormalize=True, **more,
    )  # fmt: skip
    options = {n: p[n] for n in ("scoring", "renormalize", "num_groups", "topk_groups")}
    options["group_topk"] = given_topk
    logits = arrays["logits"].reshape(p["tokens"], -1)
    found = route(
        logits, top_k, bias=arrays.get("bias"), routed_scaling_factor=p["scale"], **options
    )
    assert_routed(found, p, arrays)


def test_as_torch_does_it():
    x = torch.randn(33, 60, generator=torch.Generator().manual_seed(1))
    expected = torch.softmax(x, -1).topk(6)
    weights, ids = route(x, 6)
    assert torch.equal(ids.long(), expected.indices)
    assert (weights - expected.values).abs().max() < 1e-7
    weights, ids = route(x, 6, renormalize=True)
    expected = expected.values / expected.values.sum(-1, keepdim=True)
    assert (weights - expected).abs().max() < 2e-7


@pytest.mark.parametrize("experts", [1, 32])
def test_all_experts_in_order_and_ties_to_the_lower(experts):
    weights, ids = route(np.zeros((3, experts), np.float32), experts)
    assert np.array_equal(ids, np.tile(np.arange(experts), (3, 1)))
    assert np.all(weights == np.float32(1 / experts))


def test_what_nan_and_infinities_do():
    rows = np.array(
        [[NAN, 1, -INF, 0], [INF, 1, INF, NAN], [NAN, -INF, NAN, NAN], [-INF, 2, 3, -1]], np.float32
    )
    weights, ids = route(rows, 3)
    assert ids.tolist() == [[1, 3, 0], [0, 2, 1], [0, 1, 2], [2, 1, 3]]
    assert weights[0, 2] == 0 and weights[1].tolist() == [0.5, 0.5, 0.0]
    assert weights[2].tolist() == [0.25, 0.25, 0.25]
    weights, ids = route(rows[1:3], 3, scoring="sigmoid", renormalize=True)
    assert weights[0, :2].tolist() == [weights[0, 0]] * 2 and weights[1].tolist() == [0, 0, 0]
    odd = np.array([NAN, -INF, 0, 0], np.float32)
    assert route(np.zeros((1, 4), np.float32), 4, bias=odd)[1].tolist() == [[2, 3, 0, 1]]


def test_groups_as_transformer_engine_scores_them():
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(2))
    scores = torch.nn.functional.softplus(x.double()).sqrt()
    best = scores.view(40, 8, 8).topk(8 // 4).values.sum(-1).topk(4).indices
    kept = torch.zeros(40, 8).scatter(1, best, 1).bool().repeat_interleave(8, 1)
    expected = scores.masked_fill(~kept, -torch.inf).topk(8)
    options = {"scoring": "sqrtsoftplus", "num_groups": 8, "topk_groups": 4, "group_topk": 2}
    weights, ids = route(x, 8, **options)
    assert torch.equal(ids.long(), expected.indices)
    assert (weights - expected.values).abs().max() < 1e-6


def test_no_tokens():
    weights, ids = route(np.zeros((0, 8), np.float32), 2)
    assert weights.shape == ids.shape == (0, 2)


BAD = {
    "top_k=9": dict(top_k=9),
    "top_k=0": dict(top_k=0),
    "scoring='relu'": dict(scoring="relu"),
    "num_groups=3 does not divide 8": dict(num_groups=3, topk_groups=1),
    "go together": dict(num_groups=2),
    "topk_groups=3; allowed: 1 to 2": dict(num_groups=2, topk_groups=3),
    "fewer than top_k=2": dict(num_groups=8, topk_groups=1),
    "group_topk=0": dict(num_groups=2, topk_groups=1, group_topk=0),
    "bias has shape": dict(bias=np.zeros(7, np.float32)),
    "routed_scaling_factor=inf": dict(routed_scaling_factor=INF),
    "1 to 1024": dict(logits=np.zeros((2, 1025), np.float32)),
    "contiguous": dict(logits=np.zeros((8, 8), np.float32)[:, ::2]),
    "num_groups=64": dict(logits=np.zeros((2, 64), np.float32), num_groups=64, topk_groups=2),
    "3 groups of 341": dict(
        logits=np.zeros((2, 1023), np.float32), num_groups=3, topk_groups=2
    ),
    "requires grad": dict(logits=torch.zeros(2, 8, requires_grad=True)),
}  # fmt: skip


@pytest.mark.parametrize("text", BAD)
def test_bad_input(text):
    given = {"logits": np.zeros((2, 8), np.float32), "top_k": 2, **BAD[text]}
    with pytest.raises(ParameterError, match=text):
        route(given.pop("logits"), given.pop("top_k"), **given)


def test_wrong_kinds():
    logits = np.zeros((2, 8), np.float32)
    with pytest.raises(ArgumentTypeError, match="logits is fp64"):
        route(logits.astype(np.float64), 2)
    with pytest.raises(ArgumentTypeError, match=r"top_k=2\.0"):
        route(logits, 2.0)
    with pytest.raises(ArgumentTypeError, match="bias is int32"):
        route(logits, 2, bias=np.zeros(8, np.int32))
    with pytest.raises(DeviceError, match="allowed: dense"):
        route(torch.zeros(2, 8, device="meta"), 2)
