"""The suite's cases of vector_add and the reductions: ours right, wrong ones found, twins right."""

from __future__ import annotations

import pytest

from bench.core import twins
from bench.core.op import Candidate, Refused
from bench.elementwise import cases_vector_add
from bench.reduce import cases_reduce
from fkjit.jit.build import quiet

torch = pytest.importorskip("torch", reason="needs torch")
from tests.twins.kit import interpreter  # noqa: E402, F401


class CpuDevice:
    torch, place = torch, "cpu"


SMALL = [
    (cases_vector_add.OP, cases_vector_add.problem(1001)),
    (cases_vector_add.OP, cases_vector_add.problem(640, "bf16")),
    (cases_reduce.OP, cases_reduce.problem("sum", 1, 70_001)),
    (cases_reduce.OP, cases_reduce.problem("max", 1, 5000, "bf16")),
    (cases_reduce.OP, cases_reduce.problem("mean", 7, 300, "fp16", -1)),
    (cases_reduce.OP, cases_reduce.problem("sum", 70, 32, axis=-1)),
]
IDS = [f"{op.name} {op.label(problem)}" for op, problem in SMALL]


def judge(op, problem, arrays, prepare):
    with quiet():
        prepared = prepare(problem, arrays)
        return op.expected(problem, arrays).judge(prepared.output(prepared.call()))


@pytest.mark.parametrize("op", [cases_reduce.OP, cases_vector_add.OP], ids=lambda op: op.name)
def test_labels_are_unique_and_the_kernels_are_chosen(op):
    every = [problem for cases in op.sets.values() for problem in cases]
    labels = {op.label(problem): problem for problem in every}
    assert all(labels[op.label(problem)] == problem for problem in every)
    assert op.bytes(every[0]) > 0 and op.flops(every[0]) > 0


@pytest.mark.parametrize(("op", "problem"), SMALL, ids=IDS)
def test_ours_is_right_and_other_numbers_are_not(op, problem):
    arrays = op.inputs(problem, CpuDevice)
    assert judge(op, problem, arrays, op.ours).why_wrong() is None
    wrong = {name: array * 1.5 for name, array in arrays.items()}
    found = op.expected(problem, arrays).judge(op.ours(problem, wrong).call())
    assert "wrong result" in str(found.why_wrong())


@pytest.mark.parametrize(("op", "problem"), SMALL, ids=IDS)
def test_pytorch_is_right(op, problem):
    arrays = op.inputs(problem, CpuDevice)
    eager = next(peer for peer in op.peers if peer.name == "eager")
    assert judge(op, problem, arrays, eager.prepare).why_wrong() is None


@pytest.mark.parametrize(("op", "problem"), SMALL, ids=IDS)
def test_the_twins_are_right(op, problem, interpreter):  # noqa: F811
    arrays = op.inputs(problem, CpuDevice)
    twin = twins.twin(op.name)
    assert isinstance(twin, Candidate)
    assert judge(op, problem, arrays, twin.prepare).why_wrong() is None


def test_the_twin_of_a_maximum_keeps_nan(interpreter):  # noqa: F811
    from bench.reduce.triton_reduce import reduce as twin

    x = torch.randn(3, 200)
    x[1, 77] = float("nan")
    assert torch.equal(torch.isnan(twin(x, "max", -1)), torch.tensor([False, True, False]))


def test_what_peers_do_not_take_is_refused():
    cub = next(peer for peer in cases_reduce.OP.peers if peer.name == "cub")
    for problem in (cases_reduce.problem("mean", 1, 8), cases_reduce.problem("sum", 1, 8, "bf16")):
        with pytest.raises(Refused, match="takes sums and maxima of fp16 and fp32"):
            cub.prepare(problem, cases_reduce.inputs(problem, CpuDevice))
