"""`fkjit.sanitize(indices=True)`: cu_seqlens are read before each call of attention_varlen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fkjit
from fkjit.errors import DeviceError, ParameterError, SanitizerError
from fkjit.ops.attention.checks import look_at_ends

ROWS = 16


def arrays(framework: str, ends: list[int]) -> Any:
    q = np.zeros((ROWS, 1, 16), np.float16)
    made = (q, q, q, np.array(ends, np.int32), np.array([0, 8, ROWS], np.int32))
    return tuple(map(torch.from_numpy, made)) if framework == "torch" else made


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ([0, -4, 16], r"cu_seqlens_q\[1\]=-4 after 0"),
        ([0, 40, 16], r"cu_seqlens_q\[1\]=40 after 0; allowed: 0, then rising, up to the 16 rows"),
        ([0, 9, 8], r"cu_seqlens_q\[2\]=8 after 9"),
        ([0, 8, 17], r"cu_seqlens_q\[2\]=17 after 8"),
        ([1, 8, 16], r"cu_seqlens_q\[0\]=1 after 0"),
    ],
)
def test_rows_that_are_not_there_are_named(framework, ends, said):
    inputs, message = arrays(framework, ends), f"^attention_varlen: {said}"
    looking = fkjit.sanitize(mem=False, race=False, indices=True)
    with looking, pytest.raises(ParameterError, match=message):
        fkjit.attention_varlen(*inputs, 16, 16)


def test_rows_that_are_there_pass_and_every_call_is_looked_at():
    good, bad = arrays("numpy", [0, 5, 12]), arrays("numpy", [0, 8, 99])
    with fkjit.sanitize(mem=False, race=False, indices=True):
        for _ in range(3):
            assert fkjit.attention_varlen(*good, 8, 8).shape == (ROWS, 1, 16)
        with pytest.raises(ParameterError, match="=99"):
            fkjit.attention_varlen(*bad, 8, 8)
        longer = [*bad[:3], *(x.astype(np.int64) for x in bad[3:])]  # which is cast
        with pytest.raises(ParameterError, match="=99"):
            fkjit.attention_varlen(*longer, 8, 8)
    with pytest.raises(SanitizerError):  # outside, the interpreter finds what the kernel does
        fkjit.attention_varlen(*bad, 99, 99)


def test_what_is_no_list_of_ends_is_left_to_the_check():
    q, _, _, ends, _ = arrays("numpy", [0, 8, 16])
    for wrong in (ends.astype(np.float32), ends.reshape(1, -1), np.zeros((), np.int32)):
        look_at_ends((q, q, q, wrong, ends))
        with fkjit.sanitize(indices=True), pytest.raises((TypeError, ValueError)):
            fkjit.attention_varlen(q, q, q, wrong, ends, 8, 8)


def test_on_a_gpu_indices_alone_may_be_looked_at():
    from fkjit.sanitizer import refuse_gpu

    with fkjit.sanitize(mem=False, race=False, indices=True):
        refuse_gpu("attention_varlen")
    with fkjit.sanitize(indices=True), pytest.raises(DeviceError):
        refuse_gpu("attention_varlen")
    with pytest.raises(ParameterError, match="sanitize: indices='x' is not True or False"):
        fkjit.sanitize(indices="x")  # type: ignore[arg-type]


@pytest.mark.gpu
def test_ends_on_a_gpu_are_read_there():
    q, k, v, _, ends_k = (x.cuda() for x in arrays("torch", [0, 8, 16]))
    bad = torch.tensor([0, 8, 400], dtype=torch.int32, device="cuda")
    fkjit.attention_varlen(q, k, v, ends_k, ends_k, 8, 8)  # a plan is there
    with fkjit.sanitize(mem=False, race=False, indices=True):
        fkjit.attention_varlen(q, k, v, ends_k, ends_k, 8, 8)
        with pytest.raises(ParameterError, match=r"cu_seqlens_q\[2\]=400 after 8"):
            fkjit.attention_varlen(q, k, v, bad, ends_k, 8, 8)
