"""fkjit.moe_regroup and moe_route_and_regroup in the interpreter: order, tiles, maps, bad input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fkjit
from fkjit.errors import ArgumentTypeError, DeviceError, ParameterError
from fkjit.jit.build import quiet
from fkjit.ops.moe import cases, regroup
from fkjit.ops.moe import groups as groups
from tests.core.sampling import one_in

FIELDS = fkjit.MoeGroups._fields


def assert_grouped(found, p, ids, arrays):
    for name, right in cases.grouped(p, ids, arrays).items():
        one = np.asarray(getattr(found, name))
        assert one.dtype == np.int32 and np.array_equal(one, right), name


@pytest.fixture(params=[1, 3], ids=["one block", "three blocks"])
def blocks(request, monkeypatch):
    """How many blocks a call takes, however little there is to do."""
    monkeypatch.setattr(groups, "processors", lambda view: request.param)
    monkeypatch.setattr(regroup, "_ALONE", 0)
    monkeypatch.setattr(regroup, "_PER_BLOCK", 1)
    return request.param


@settings(max_examples=15)
@given(st.data(), st.integers(0, 300), st.integers(1, 9), st.integers(1, 1024), st.integers(0, 999))
def test_any_choices(data, tokens, top_k, experts, seed):
    rng = np.random.default_rng(seed)
    size = data.draw(st.sampled_from([1, 2, 16, 64, 100]))
    capacity = data.draw(st.sampled_from([None, 0, 1, 7, 10_000]))
    local = data.draw(st.none() | st.integers(1, experts))
    real = data.draw(st.none() | st.integers(-3, tokens + 9))
    p = cases.group_problem(tokens, top_k, experts, size, 3, mapped=local is not None, real=real)
    if local is not None:
        p["groups"] = local
    if capacity is not None:
        p["capacity"] = capacity
    p["places"] = groups.places_of(tokens * top_k, p["groups"], size)
    arrays = cases.random_lists(p, rng)
    few = min(experts, data.draw(st.sampled_from([1, 3, 1024])))
    ids = rng.integers(-1, few + 1, (tokens, top_k)).astype(rng.choice(["i4", "i8"]))
    lists = {name: arrays.get(name) for name in groups.INPUTS}
    with quiet(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(regroup, "_ALONE", 0)
        patch.setattr(regroup, "_PER_BLOCK", 64)
        found = fkjit.moe_regroup(
            ids, experts, size, capacity=capacity, num_local_experts=local, **lists
        )
    assert_grouped(found, p, ids, arrays)


def test_the_layout_of_an_example():
    ids = np.array([[2, 0], [2, 1], [0, 2]], np.int32)
    found = fkjit.moe_regroup(ids, 4, 2)
    assert found.sorted_token_ids.tolist() == [1, 4, 3, 6, 0, 2, 5, 6, 6, 6]
    assert found.expert_ids.tolist() == [0, 1, 2, 2, -1]
    assert found.num_tokens_post_padded.tolist() == [8]
    assert found.inverse.tolist() == [[4, 0], [5, 2], [1, 6]]
    assert found.offsets.tolist() == [0, 2, 4, 8, 8] and found.counts.tolist() == [2, 1, 3, 0]
    few = fkjit.moe_regroup(ids, 4, capacity=1)
    assert few.sorted_token_ids.tolist() == [1, 3, 0, 6, 6, 6]
    assert few.inverse.tolist() == [[2, 0], [-1, 1], [-1, -1]]


@one_in(3)
@pytest.mark.parametrize("tokens", [0, 1, 200])
@pytest.mark.parametrize("experts", [1, 60, 200, 300])
def test_together_is_one_after_the_other(experts, tokens, blocks):
    rng, top_k = np.random.default_rng(tokens), min(experts, 3)
    logits = np.round(rng.standard_normal((tokens, experts)) * 2).astype(np.float32)
    number = np.array([max(tokens - 4, 0)], np.int32)
    with quiet(), fkjit.sanitize(race=True):
        weights, ids = fkjit.moe_route(logits, top_k)
        found = fkjit.moe_route_and_regroup(logits, top_k, 4)
        after = fkjit.moe_regroup(ids, experts, 4)
        fewer = fkjit.moe_route_and_regroup(logits, top_k, 4, num_tokens=number)
    assert np.array_equal(found.topk_weights, weights) and np.array_equal(found.topk_ids, ids)
    for name in FIELDS:
        assert np.array_equal(getattr(found.groups, name), getattr(after, name)), name
    assert_grouped(after, cases.group_problem(tokens, top_k, experts, 4, blocks), ids, {})
    real = number[0]
    assert np.array_equal(fewer.topk_ids[:real], ids[:real]) and (fewer.topk_ids[real:] == -1).all()
    assert (fewer.topk_weights[real:] == 0).all() and (fewer.groups.inverse[real:] == -1).all()
    p = cases.group_problem(tokens, top_k, experts, 4, blocks)
    assert_grouped(fewer.groups, p, ids, {"num_tokens": number})


def test_remote_experts_keep_their_places(blocks):
    """As vLLM has it: sorted by all experts, and the map is asked for tiles alone."""
    rng, experts = np.random.default_rng(4), 12
    logits = rng.standard_normal((50, experts)).astype(np.float32)
    local = np.where(np.arange(experts) % 3 == 1, np.arange(experts) // 3, -1).astype(np.int32)
    said = {"expert_map": local, "num_local_experts": 4, "keep_remote": True}
    with quiet(), fkjit.sanitize(race=True):
        _, ids, together = fkjit.moe_route_and_regroup(logits, 3, 8, **said)
        found, whole = (
            fkjit.moe_regroup(ids, experts, 8, **said),
            fkjit.moe_regroup(ids, experts, 8),
        )
    for name in FIELDS:
        assert np.array_equal(getattr(together, name), getattr(found, name)), name
        if name != "expert_ids":
            assert np.array_equal(getattr(found, name), getattr(whole, name)), name
    expected = np.where(whole.expert_ids < 0, -1, local[whole.expert_ids])
    assert np.array_equal(found.expert_ids, expected)
    p = cases.group_problem(50, 3, experts, 8, blocks)
    assert_grouped(found, {**p, "keeps_remote": True}, ids, {"expert_map": local})


@pytest.mark.parametrize("size", [1, 2, 3, 7, 12, 64, 100, 65_535, 65_536])
def test_places_are_divided_by_a_product(size):
    inverse, shift = groups.inverse(size)
    tiles = np.unique(np.linspace(0, 2**31 // size, 1000).astype(np.uint64)) * np.uint64(size)
    for places in (tiles, tiles + np.uint64(size - 1)):
        places = places[places < 2**31]
        assert inverse < 2**32
        product = 2 * places * np.uint64(inverse) >> np.uint64(32 + shift)
        assert np.array_equal(product, places // size)


def test_all_to_one_expert_in_many_rounds(blocks):
    ids = np.full((9000, 1), 5, np.int64)
    with quiet():
        found = fkjit.moe_regroup(ids, 7, 64)
    assert_grouped(found, cases.group_problem(9000, 1, 7, 64, blocks), ids, {})


def test_of_torch_tensors_in_a_layer():
    logits = torch.randn(20, 16, generator=torch.Generator().manual_seed(2))
    with quiet():
        found = fkjit.moe_route_and_regroup(logits.bfloat16(), 4, 8)
    assert isinstance(found.groups.inverse, torch.Tensor)
    counts = torch.bincount(found.topk_ids.flatten(), minlength=16)
    assert torch.equal(found.groups.counts.long(), counts)


IDS = np.zeros((4, 2), np.int32)
BAD = {
    "num_experts=1025": dict(num_experts=1025),
    "block_size=0": dict(block_size=0),
    "num_local_experts=9": dict(num_local_experts=9),
    "capacity=-1": dict(capacity=-1),
    "keep_remote is True, but expert_map None": dict(keep_remote=True),
    "expert_map has shape": dict(expert_map=np.zeros(7, np.int32)),
    "num_tokens has shape": dict(num_tokens=np.zeros(2, np.int32)),
    "topk_ids has shape": dict(topk_ids=np.zeros(8, np.int32)),
    "gaps between its rows": dict(topk_ids=np.zeros((4, 4), np.int32)[:, :2]),
}


@pytest.mark.parametrize("text", BAD)
def test_bad_input(text):
    options = {"topk_ids": IDS, "num_experts": 8, **BAD[text]}
    with pytest.raises(ParameterError, match=text):
        fkjit.moe_regroup(**options)


def test_wrong_kinds():
    with pytest.raises(ArgumentTypeError, match="topk_ids is fp32"):
        fkjit.moe_regroup(IDS.astype(np.float32), 8)
    with pytest.raises(ArgumentTypeError, match="expert_map is int64"):
        fkjit.moe_regroup(IDS, 8, expert_map=np.zeros(8, np.int64))
    with pytest.raises(ArgumentTypeError, match="num_experts='8'"):
        fkjit.moe_regroup(IDS, "8")
    with pytest.raises(ArgumentTypeError, match="numpy array but topk_ids is a torch"):
        fkjit.moe_regroup(torch.zeros(4, 2).int(), 8, num_tokens=np.zeros(1, np.int32))
    with pytest.raises(DeviceError, match="allowed: dense"):
        fkjit.moe_regroup(torch.zeros(4, 2, device="meta").int(), 8)


@pytest.mark.parametrize(
    ("tile", "experts"), [((512, 64), 40), ((512, 256), 130), ((512, 512), 70)]
)
def test_counters_are_clean_again(tile, experts):
    params = {"ids": "int32", "tile": tile}
    p = cases.group_problem(1700, 2, experts, 4, 3)
    arrays = {**cases.regroup_inputs(params, p, np.random.default_rng(1)), **cases.group_outputs(p)}
    with quiet():
        for _ in range(2):
            fkjit.launch("moe_regroup.grid", params, p, arrays)
    assert not arrays["counters"].any()
    for name, right in cases.grouped(p, arrays["topk_ids"], arrays).items():
        assert np.array_equal(arrays[name].reshape(right.shape), right), name
