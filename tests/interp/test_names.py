"""Symbols as the source has them."""

from __future__ import annotations

import numpy as np
import pytest

from fkjit.errors import SanitizerError
from fkjit.interp import Arg, run
from fkjit.interp.core.names import source_name
from tests.interp.interp_kit import compile_ptx


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("add", "add"),
        ("_Z3addPKfPf", "add"),
        ("_ZL3addv", "add"),
        ("_Z4manyILi3EEvPf", "many"),
        ("_ZN2ns5inner3addEv", "add"),
        ("_ZZ3addPKfPfE4part", "part"),
        ("_ZZ3addPKfPfE4part_0", "part"),  # the second one of this name
        ("_ZZN2ns3addEvE10part_sums2", "part_sums2"),
        ("_Zebra", "_Zebra"),
    ],
)
def test_names(symbol: str, name: str) -> None:
    assert source_name(symbol) == name


def test_reports_name_variables_so() -> None:
    source = """
    __constant__ float weights[4];
    __global__ void k(float* y, int at, int from) {
      __shared__ float part[32];
      part[threadIdx.x] = y[threadIdx.x];
      __syncthreads();
      y[threadIdx.x] = part[threadIdx.x + at] + weights[threadIdx.x % 4 + from];
    }"""
    for at, first, text in ((1, 0, "byte 128 of part (static shared, 128 bytes)"),
                            (0, 1, "byte 16 of variable weights (16 bytes)")):  # fmt: skip
        arguments = [Arg("y", np.zeros(32, "f4"), True), Arg("at", np.int32(at))]
        arguments.append(Arg("from", np.int32(first)))
        with pytest.raises(SanitizerError) as caught:
            run(compile_ptx(source), "_Z1kPfii", 1, 32, arguments)
        assert text in str(caught.value)
