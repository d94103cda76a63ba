"""Forms of attention in the suite, on CPU tensors: each case's call, peers and reference agree."""

from __future__ import annotations

import pytest

from bench.attention.cases_attention_form import CASES, FORMS, OP, label, problem
from bench.core.op import Refused
from fkjit.jit.build import quiet
from tests.core.sampling import one_in

torch = pytest.importorskip("torch", reason="needs torch")
from tests.bench.test_bench_attention import CpuDevice  # noqa: E402


def test_labels_are_unique():
    assert len({label(case) for case in CASES}) == len(CASES) == 2 * len(FORMS)


@one_in(2)
@pytest.mark.parametrize("form", FORMS)
def test_ours_and_the_peers_agree_with_the_reference(form):
    given = problem(form, 1, 2, 48, 32)
    given["window"] = (20 if form == "window" else given["window"][0], given["window"][1])
    arrays = OP.inputs(given, CpuDevice())
    expected = OP.expected(given, arrays)
    assert OP.ours is not None
    peers = [peer for peer in OP.peers if peer.name in ("eager", "sdpa")]  # not what is compiled
    prepares = [OP.ours, *(peer.prepare for peer in peers)]
    for prepare in prepares:
        try:
            with quiet():
                prepared = prepare(given, arrays)
                made = prepared.call()
        except Refused:
            assert form in ("softcap", "sinks")
            continue
        assert expected.judge(made).why_wrong() is None, prepare
