"""The benchmark of packed queries and pages on the CPU: both ways of ours against its reference."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bench.attention.cases_paged_attention import OP, SETS, label, problem
from bench.core.op import Refused
from tests.core.sampling import one_in

torch = pytest.importorskip("torch", reason="needs torch")
from fkjit.jit.build import quiet  # noqa: E402

DEVICE = SimpleNamespace(torch=torch, place="cpu")
SMALL = {"heads": (4, 2), "dim": 64}


def peer(name, given, arrays):
    (made,) = [one for one in OP.peers if one.name == name]
    return made.prepare(given, arrays)


@one_in(2)
@pytest.mark.parametrize("storage", ["same", "fp8"])
def test_mixed_batches_are_right_and_other_values_are_found_wrong(storage):
    given = problem("few", [(1, 50), (20, 33), (1, 7)], storage=storage, **SMALL)
    arrays = OP.inputs(given, DEVICE)
    expected = OP.expected(given, arrays)
    assert OP.ours is not None
    with quiet():
        for prepared in (OP.ours(given, arrays), peer("one-kernel", given, arrays)):
            assert expected.judge(prepared.output(prepared.call())).why_wrong() is None
    assert expected.judge(-prepared.call()).why_wrong() is not None


def test_sets_and_work():
    assert {"paged-prefill", "mixed", "codes", "default", "quick"} <= set(SETS)
    assert label(SETS["mixed"][0]) == "bf16 64 x 1 of 8192, 1 x 2048 of 2048 H32/8 D128 p16"
    one = problem("one", [(2, 10)], **SMALL)
    assert OP.flops(one) == 4.0 * (9 + 10) * 4 * 64
    with pytest.raises(Refused, match="nothing decodes"):
        peer("one-kernel", one, {})
