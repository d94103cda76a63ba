"""The cases of attention's gradients: ours right, wrong ones found, peers and twin right."""

from __future__ import annotations

import pytest

from bench.attention.cases_attention import problem
from bench.core.catalog import operations
from fkjit.jit.build import quiet

torch = pytest.importorskip("torch", reason="needs torch")
from tests.twins.kit import interpreter  # noqa: E402, F401


class CpuDevice:
    torch, place = torch, "cpu"


def made(causal, dtype="bf16", dim=32):
    op = operations()["attention_backward"]
    given = problem(1, 4, 40, dim, causal, dtype, heads_kv=2)
    with quiet():
        return op, given, op.inputs(given, CpuDevice)


@pytest.mark.parametrize("causal", [True, False])
def test_ours_is_right_and_other_numbers_are_not(causal):
    op, given, arrays = made(causal)
    with quiet():
        prepared = op.ours(given, arrays)
        found = prepared.output(prepared.call())
    assert op.expected(given, arrays).judge(found).why_wrong() is None
    other = {**arrays, "dout": arrays["dout"] * 1.5}
    assert "wrong result" in str(op.expected(given, other).judge(found).why_wrong())


@pytest.mark.parametrize("causal", [True, False])
def test_pytorch_is_right(causal):
    op, given, arrays = made(causal, "fp32")
    peer = next(peer for peer in op.peers if peer.name == "sdpa-flash").prepare(given, arrays)
    assert op.expected(given, arrays).judge(peer.output(peer.call())).why_wrong() is None


@pytest.mark.parametrize("causal", [True, False])
def test_the_twin_is_right(interpreter, causal):  # noqa: F811
    op, given, arrays = made(causal, "fp32", 24)
    twin = next(peer for peer in op.peers if peer.kind == "twin").prepare(given, arrays)
    assert op.expected(given, arrays).judge(twin.output(twin.call())).why_wrong() is None


def test_work_is_that_of_five_products():
    op, full = operations()["attention_backward"], problem(2, 4, 64, 32, False)
    assert op.flops(full) == 10 * 2 * 4 * 64 * 64 * 32
    assert op.flops(full) == 2.5 * operations()["attention"].flops(full)
