"""The benchmark of decoding on the CPU: ours, the Triton twin and PyTorch against its reference."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bench.attention.cases_attention_decode import SETS, label, problem
from bench.core.catalog import operations
from bench.core.op import Refused

torch = pytest.importorskip("torch", reason="needs torch")
from fkjit.jit.build import quiet  # noqa: E402
from tests.twins.kit import interpreter  # noqa: E402, F401

DEVICE = SimpleNamespace(torch=torch, place="cpu")
SMALL = {"heads": (4, 2), "dim": 64}
CASES = [
    problem(2, 80, 16, "nhd", dtype="fp16", **SMALL),
    problem(1, 128, 32, "hnd", **SMALL),
    problem(2, 70, 0, "hnd", **SMALL),
]


def candidate(name, given, arrays):
    """Ours, or the peer of this name."""
    op = operations()["attention_decode"]
    if name == "ours":
        return op.ours(given, arrays)
    (made,) = [peer for peer in op.peers if peer.name == name]
    return made.prepare(given, arrays)


@pytest.mark.parametrize("name", ["ours", "triton", "sdpa"])
@pytest.mark.parametrize("given", CASES, ids=label)
def test_each_candidate_is_right_and_other_keys_are_found_wrong(interpreter, given, name):  # noqa: F811
    op = operations()["attention_decode"]
    arrays = op.inputs(given, DEVICE)
    if name == "sdpa" and given["page_size"]:
        with pytest.raises(Refused, match="takes"):
            candidate(name, given, arrays)
        return
    with quiet():
        prepared = candidate(name, given, arrays)
        found = prepared.output(prepared.call())
    assert op.expected(given, arrays).judge(found).why_wrong() is None
    arrays["v"].neg_()
    assert op.expected(given, arrays).judge(found).why_wrong() is not None


@pytest.mark.parametrize("storage", ["fp8", "int8"])
def test_codes_and_several_tokens_are_ours_alone(storage):
    op = operations()["attention_decode"]
    given = problem(2, 40, tokens=3, storage=storage, **SMALL)
    arrays = op.inputs(given, DEVICE)
    with quiet():
        ours = op.ours(given, arrays)
        found = ours.output(ours.call())
    assert op.expected(given, arrays).judge(found).why_wrong() is None
    for name in ("triton", "flashinfer"):
        with pytest.raises((Refused, ImportError)):
            candidate(name, given, arrays)


def test_the_table_has_its_rows():
    assert len(SETS["default"]) == 18
    assert label(SETS["default"][1]) == "bf16 B1 S4096 H32/8 D128 p16 nhd"
    op, one = operations()["attention_decode"], problem(64, 8192)
    assert op.bytes(one) == pytest.approx(2 * 2 * 64 * 8192 * 8 * 128, rel=1e-2)
