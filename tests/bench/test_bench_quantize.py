"""The suite's cases of quantization and of products with codes: ours right, wrong ones found."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from bench.attention import cases_quantized_attention
from bench.quantize import cases_quantize, cases_quantize_rows, cases_quantized_linear
from fkjit.arch import arch
from fkjit.jit.build import quiet

CPU = SimpleNamespace(torch=torch, place="cpu")
CASES = [
    (cases_quantize.OP, cases_quantize.problem("int4_group", 3, 256)),
    (cases_quantize_rows.OP, cases_quantize_rows.problem("rms_norm", "fp8_block", 3, 256, True)),
    (cases_quantize_rows.OP, cases_quantize_rows.problem("gated", "int8_row", 3, 256)),
    (cases_quantized_linear.OP, cases_quantized_linear.problem("int4_group", 3, 256, 32)),
    (cases_quantized_linear.OP, cases_quantized_linear.problem("int8_row", 3, 128, 32)),
    (cases_quantized_attention.OP, cases_quantized_attention.problem("int8", 70, 64, True, (2, 1))),
]


@pytest.mark.parametrize(("op", "problem"), CASES, ids=lambda x: getattr(x, "name", None))
def test_ours_is_right_and_a_wrong_one_is_found(op, problem):
    torch.manual_seed(0)
    with quiet():
        arrays = op.inputs(problem, CPU)
        judge = op.expected(problem, arrays).judge
        made = op.ours(problem, arrays)
        found = made.output(made.call())
    assert judge(found).why_wrong() is None
    found[-1, -1] += 5
    assert judge(found).why_wrong() is not None


@pytest.mark.parametrize("op", list({case[0].name: case[0] for case in CASES}.values()))
def test_every_case_has_a_variant_work_and_a_name_of_its_own(op):
    to = arch("sm_90a")
    problems = [p for each in op.sets.values() for p in each]
    for problem in problems:
        spec, params = op.chosen(problem, to) if op.chosen else (op.specs[0], None)
        params = params or op.choose(spec, problem, to)
        assert spec.why_not(params, to) is None or spec.ahead
        assert op.flops(problem) > 0 and op.bytes(problem) > 0
    assert len({op.label(p) for p in problems}) == len({str(p) for p in problems})
