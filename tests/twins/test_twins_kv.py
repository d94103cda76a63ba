"""Triton twins of the paged KV cache in Triton's interpreter, and the benchmark's references."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bench.core.catalog import operations
from bench.core.op import Refused
from bench.kv.cases_kv_append import problem

torch = pytest.importorskip("torch", reason="needs torch")
from fkjit.jit.build import quiet  # noqa: E402
from tests.twins.kit import interpreter  # noqa: E402, F401

DEVICE = SimpleNamespace(torch=torch, place="cpu")
CASES = [
    problem(5, 16, "nhd", "same", "fp16", 3, 8),
    problem(37, 16, "hnd", "same", "fp32", 2, 24),
    problem(33, 32, "nhd", "same", "bf16", 1, 64),
]


def candidates(op, name, given, arrays):
    """Ours, or the peer of this name."""
    if name == "ours":
        return op.ours(given, arrays)
    (made,) = [peer for peer in op.peers if peer.name == name]
    return made.prepare(given, arrays)


@pytest.mark.parametrize("name", ["ours", "triton", "torch"])
@pytest.mark.parametrize("given", CASES, ids=range(len(CASES)))
@pytest.mark.parametrize("op", ["kv_append", "kv_read"])
def test_each_candidate_is_right_and_another_slot_is_found_wrong(interpreter, op, given, name):  # noqa: F811
    op = operations()[op]
    arrays = op.inputs(given, DEVICE)
    if name == "torch" and given["layout"] != "nhd":
        with pytest.raises(Refused, match="takes pages of"):
            candidates(op, name, given, arrays)
        return
    with quiet():
        prepared = candidates(op, name, given, arrays)
        found = prepared.output(prepared.call())
    assert op.expected(given, arrays).judge(found).why_wrong() is None
    arrays["slot_mapping"][1:3] = arrays["slot_mapping"][1:3].flip(0)
    assert op.expected(given, arrays).judge(found).why_wrong() is not None


def test_the_twins_skip_slots_below_0(interpreter):  # noqa: F811
    given = CASES[0]
    append, read = (operations()[name] for name in ("kv_append", "kv_read"))
    arrays = append.inputs(given, DEVICE)
    arrays["slot_mapping"][2] = -1
    pools = append.peers[0].prepare(given, arrays)
    pools = pools.output(pools.call())
    arrays |= {"k_pages": pools[0], "v_pages": pools[1]}
    k, v = read.peers[0].prepare(given, arrays).call()
    for x, new in ((k, arrays["k"]), (v, arrays["v"])):
        new[2] = 0
        assert torch.equal(x, new)
    assert pools.count_nonzero() == k.count_nonzero() + v.count_nonzero()


@pytest.mark.parametrize("storage", ["fp8", "int8"])
@pytest.mark.parametrize("op", ["kv_append", "kv_read"])
def test_scaled_storage_is_ours_alone(op, storage):
    op, given = operations()[op], problem(20, 16, "hnd", storage, "bf16", 2, 16)
    arrays = op.inputs(given, DEVICE)
    with quiet():
        ours = op.ours(given, arrays)
        found = ours.output(ours.call())
    assert op.expected(given, arrays).judge(found).why_wrong() is None
    with pytest.raises(Refused, match="as they are"):
        candidates(op, "torch", given, arrays)


@pytest.mark.parametrize("name", ["ours", "triton", "rope + kv_append"])
def test_with_the_rotary_embedding(name, interpreter):  # noqa: F811
    from bench.kv import cases_rope_kv_append as bench

    given = bench.problem(20, dtype="fp32", heads=2, head_dim=16)
    arrays = bench.inputs(given, DEVICE)
    with quiet():
        prepared = candidates(operations()["rope_kv_append"], name, given, arrays)
        found = prepared.output(prepared.call())
    assert bench.expected(given, arrays).judge(found).why_wrong() is None
    arrays["positions"] += 1
    assert bench.expected(given, arrays).judge(found).why_wrong() is not None


@pytest.mark.parametrize("name", ["ours", "triton", "torch"])
def test_copies_of_pages(name, interpreter):  # noqa: F811
    op = operations()["kv_copy"]
    given = {"planes": 2, "num_pages": 6, "page_bytes": 64, "copies": 3}
    arrays = op.inputs(given, DEVICE)
    right, before = op.expected(given, arrays), arrays["storage"].clone()
    prepared = candidates(op, name, given, arrays)
    assert right.judge(prepared.output(None)).why_wrong() is not None
    with quiet():
        found = prepared.output(prepared.call())
    assert right.judge(found).why_wrong() is None
    sources, targets = arrays["pairs"].long().T
    before[:, targets] = before[:, sources]
    assert torch.equal(arrays["storage"], before)
