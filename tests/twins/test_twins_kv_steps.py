"""Triton twins of kv_slots and rope_kv_append beside ours, in Triton's interpreter: what is written
besides the results that the suite compares."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from bench.core.catalog import operations
from bench.core.op import Refused
from bench.kv import cases_kv_slots as slots_bench
from bench.kv import cases_rope_kv_append as fused_bench
from fkjit.ops.kv.slots import SLOTS as KERNEL

torch = pytest.importorskip("torch", reason="needs torch")
import fkjit  # noqa: E402
from fkjit.jit.build import quiet  # noqa: E402
from tests.twins.kit import interpreter  # noqa: E402, F401

DEVICE = SimpleNamespace(torch=torch, place="cpu")
SLOTS = [slots_bench.problem(4, 1), slots_bench.problem(1, 50), slots_bench.problem(3, 20, 32)]


@pytest.mark.parametrize("name", ["ours", "triton", "torch"])
@pytest.mark.parametrize("given", SLOTS, ids=slots_bench.label)
def test_slots_are_right_and_others_are_not(interpreter, given, name):  # noqa: F811
    op = operations()["kv_slots"]
    arrays = op.inputs(given, DEVICE)
    peers = {peer.name: peer.prepare for peer in op.peers}
    with quiet():
        found = {**peers, "ours": op.ours}[name](given, arrays).call()
    assert op.expected(given, arrays).judge(found).why_wrong() is None
    arrays["page_table"] = arrays["page_table"].flip(0)
    assert op.expected(given, arrays).judge(found).why_wrong() is not None


@pytest.mark.parametrize("problem", KERNEL.verification.problems({}, "small"), ids=range(6))
def test_the_twin_of_slots_counts_and_leaves_out_what_ours_does(interpreter, problem):  # noqa: F811
    from bench.kv.triton_kv_slots import kv_slots as twin

    made = KERNEL.verification.inputs({}, problem, np.random.default_rng(3))
    want = KERNEL.verification.reference(problem, made)
    given = {name: torch.from_numpy(array.copy()) for name, array in made.items()}
    tables = tuple(given[name] for name in ("page_table", "lengths", "capacities"))
    several = (given["cu_seqlens"], problem["tokens"]) if "cu_seqlens" in given else (None, None)
    found = twin(given["rows"], tables, problem["page_size"], *several, problem["append"])
    assert np.array_equal(found.numpy(), want["slot_mapping"])
    assert np.array_equal(tables[1].numpy(), want["lengths"])


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_fused_twin_fills_the_pages_as_ours_does(interpreter, dtype, layout):  # noqa: F811
    from bench.kv.triton_rope_kv_append import rope_kv_append as twin
    from bench.kv.triton_rope_kv_append import turns

    given = fused_bench.problem(21, dtype=dtype, heads=3, head_dim=16, layout=layout)
    given = {**given, "heads_q": 6}
    arrays = fused_bench.inputs(given, DEVICE)
    arrays["slot_mapping"][[3, 20]] = -1
    arrays["positions"] += 1000
    q, k, v, slots, at = (arrays[n] for n in ("q", "k", "v", "slot_mapping", "positions"))
    pages = [[torch.zeros_like(arrays[f"{side}_pages"]) for side in "kv"] for _ in range(2)]
    turned = twin(q, k, v, tuple(pages[0]), slots, at, turns(given, q.device), layout)
    with quiet():
        ours = fkjit.rope_kv_append(
            q, k, v, tuple(pages[1]), slots, at, theta=given["theta"], layout=layout
        )
    limits = {"rtol": 0, "atol": {"fp32": 1e-5, "bf16": 3e-2}[dtype]}
    for one, two in zip((turned, *pages[0]), (ours, *pages[1]), strict=True):
        torch.testing.assert_close(one, two, **limits)
    assert torch.equal(pages[0][1], pages[1][1])


def test_the_fused_twin_refuses_what_it_does_not_take(interpreter):  # noqa: F811
    (twin,) = [peer for peer in operations()["rope_kv_append"].peers if peer.kind == "twin"]
    given = fused_bench.problem(5, heads=2, head_dim=24)
    with pytest.raises(Refused, match="turns whole heads"):
        twin.prepare(given, fused_bench.inputs(given, DEVICE))
    given = fused_bench.problem(5, heads=2, head_dim=16, storage="fp8")
    with pytest.raises(Refused, match="as they are"):
        twin.prepare(given, fused_bench.inputs(given, DEVICE))
