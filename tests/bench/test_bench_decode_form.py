"""Forms of decoding in the suite, on CPU tensors: each case's call, peers and reference agree."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bench.attention.cases_decode_form import FORMS, SETS, label, problem
from bench.core.catalog import operations
from bench.core.op import Refused
from fkjit.jit.build import quiet
from tests.core.sampling import one_in

torch = pytest.importorskip("torch", reason="needs torch")
DEVICE = SimpleNamespace(torch=torch, place="cpu")


def test_labels_are_unique_and_a_window_counts_what_it_shows():
    cases = SETS["default"]
    assert len({label(case) for case in cases}) == len(cases) == 3 * len(FORMS) + 3
    assert label(cases[1]) == "bf16 B1 S131072 H32/8 D128 one piece window 4096"
    op = operations()["decode_form"]
    assert op.bytes(cases[1]) == pytest.approx(2 * 2 * 4096 * 8 * 128, rel=2e-2)


@one_in(4)
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("form", FORMS)
def test_ours_and_the_peers_agree_with_the_reference(form, page_size):
    op = operations()["decode_form"]
    layout = "nhd" if page_size else "hnd"
    given = problem(form, 2, 96, page_size, layout, window=40, heads=(4, 2), dim=64)
    arrays = op.inputs(given, DEVICE)
    expected = op.expected(given, arrays)
    assert op.ours is not None
    peers = [peer for peer in op.peers if peer.name in ("eager", "sdpa")]
    for prepare in (op.ours, *(peer.prepare for peer in peers)):
        try:
            with quiet():
                prepared = prepare(given, arrays)
                made = prepared.output(prepared.call())
        except Refused:
            assert page_size or form in ("softcap", "sinks")
            continue
        assert expected.judge(made).why_wrong() is None, prepare
