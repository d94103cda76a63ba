"""A fault's fields say what its text says."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from fkjit.errors import SanitizerError
from fkjit.interp import Arg, run
from tests.interp.interp_kit import compile_ptx, line_of

NAME = "kernels_cu/test/report.cu"


def caught(source: str, block: int, *arguments: Arg, grid: int = 2) -> SanitizerError:
    with pytest.raises(SanitizerError) as found:
        run(compile_ptx(source, name=NAME), "k", grid, block, list(arguments), title="the title")
    return found.value


def test_the_place_of_an_access() -> None:
    source = """
    extern "C" __global__ void k(float* y) {
      y[blockIdx.x * 40 + threadIdx.y * 8 + threadIdx.x] = 1;  // BUG
    }"""
    y = np.zeros(75, "f4")
    with pytest.raises(SanitizerError) as found:
        run(compile_ptx(source, name=NAME), "k", 2, (8, 5), [Arg("y", y, True)], title="the title")
    error = found.value
    assert error.kind == "out-of-bounds global write" and error.kernel == "the title"
    assert error.location == f"{NAME}:{line_of(source, 'BUG')}" and error.other == ""
    assert (error.block, error.thread) == ((1, 0, 0), (3, 4, 0))
    assert all(part in str(error) for part in (error.kind, error.kernel, error.location))
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and vars(again) == vars(error)


def test_both_places_of_a_barrier_divergence() -> None:
    source = """
    extern "C" __global__ void k(float* y) {
      if (threadIdx.x < 16) {
        __syncthreads();  // ONE
        y[threadIdx.x] = 1;
      } else {
        __syncthreads();  // OTHER
        y[threadIdx.x] = 2;
      }
    }"""
    error = caught(source, 64, Arg("y", np.zeros(64, "f4"), True))
    assert error.kind == "barrier divergence"
    places = {f"{NAME}:{line_of(source, mark)}" for mark in ("// ONE", "// OTHER")}
    assert {error.location, error.other} == places
    assert error.block == (0, 0, 0) and error.thread in ((0, 0, 0), (16, 0, 0))
