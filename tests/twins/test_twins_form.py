"""The Triton twin of attention's forms, in Triton's interpreter and on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bench.attention.cases_attention_form import FORMS, OP, problem
from bench.core import twins
from tests.attention.feature_kit import FEATURES, draw, exact
from tests.attention.kit import assert_close
from tests.core.sampling import one_in

torch = pytest.importorskip("torch", reason="needs torch")
from tests.bench.test_bench_attention import CpuDevice  # noqa: E402
from tests.twins.kit import interpreter  # noqa: E402, F401

RULES = {name for name in FEATURES if name != "score_mod"}  # which the twin has not
CASES = [  # heads, lengths, dims, dtype, features; tiles are 16 queries by 32 keys
    ((4, 2), (37, 83), (32, 32), "fp16", RULES),
    ((2, 1), (50, 37), (40, 72), "bf16", {"window", "sinks", "mask"}),  # first rows see nothing
    ((2, 2), (20, 130), (77, 51), "fp32", {"window", "softcap", "alibi_slopes"}),
    ((2, 2), (3, 70), (64, 64), "fp16", {"bias"}),
    ((1, 1), (33, 33), (16, 16), "fp16", set()),
]


def tensor(array: Any) -> Any:
    if not isinstance(array, np.ndarray):
        return array
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


@one_in(2)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_compositions(interpreter, case):  # noqa: F811
    from bench.attention.triton_attention_form import attention

    heads, lengths, dims, dtype, features = CASES[case]
    drawn = draw(101 + case, 2, heads, lengths, dims, dtype, features)
    options = {name: tensor(array) for name, array in drawn.options.items()}
    o, lse = attention(*map(tensor, drawn[:3]), **options, return_lse=True)
    assert_close(o.float().numpy(), lse.numpy(), *exact(drawn), dtype)


@one_in(2)
@pytest.mark.parametrize("form", FORMS)
def test_the_suite_finds_the_twin_right_and_another_form_wrong(interpreter, form):  # noqa: F811
    given = problem(form, 1, 2, 48, 32)
    given["window"] = (20 if form == "window" else given["window"][0], given["window"][1])
    arrays, twin = OP.inputs(given, CpuDevice()), twins.twin("attention_form")
    expected = OP.expected(given, arrays)
    assert twin is not None
    assert expected.judge(twin.prepare(given, arrays).call()).why_wrong() is None
    other = {**given, "window": (3, 0), "softcap": 0.5}
    assert "wrong result" in str(expected.judge(twin.prepare(other, arrays).call()).why_wrong())


@pytest.mark.gpu
def test_the_twin_is_right_on_the_quick_cases_of_the_suite():
    from types import SimpleNamespace

    pytest.importorskip("triton", reason="needs triton")
    twin = twins.twin("attention_form")
    assert twin is not None
    for given in OP.sets["quick"]:
        arrays = OP.inputs(given, SimpleNamespace(torch=torch, place="cuda"))
        right, prepared = OP.expected(given, arrays), twin.prepare(given, arrays)
        for _ in range(2):  # while tiles are tried, and afterwards
            assert right.judge(prepared.output(prepared.call())).why_wrong() is None
