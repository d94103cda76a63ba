"""The cases of attention's gradients: ours right, wrong ones found, peers and twin right."""

from __future__ import annotations

import pytest

from bench.attention.cases_attention import problem
from bench.core import kernels
from bench.core.catalog import operations
from bench.core.op import Refused
from fkjit.arch import arch
from fkjit.jit.build import quiet

torch = pytest.importorskip("torch", reason="needs torch")
from tests.twins.kit import interpreter  # noqa: E402, F401


class CpuDevice:
    torch, place = torch, "cpu"


class NumpyDevice:
    @staticmethod
    def array(values):
        return values


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


@pytest.mark.parametrize("causal", [True, False])
def test_its_kernel_alone_has_what_others_make(causal):
    op, given, arrays = made(causal)
    (spec,) = op.specs
    params = op.choose(spec, given, arch("sm_80"))
    with quiet():
        prepared = kernels.launched(op, spec, params, given, arrays, CpuDevice)
        found = prepared.output(prepared.call())
    assert op.expected(given, arrays).judge(found).why_wrong() is None


def test_a_kernel_whose_arrays_are_missing_is_not_launched():
    """Their pointers would be null: on a GPU an illegal memory access."""
    op, given, arrays = made(False)
    (spec,) = op.specs
    params = op.choose(spec, given, arch("sm_80"))
    with pytest.raises(Refused, match="other kernels make its delta, lse_log2"):
        kernels.launcher(spec, params, given, arrays, NumpyDevice)
