"""Arrays within dynamic shared memory by name, and local memory that nobody has written."""

from __future__ import annotations

import numpy as np
import pytest

from fkjit.errors import SanitizerError
from fkjit.interp import Arg, Checks, run
from fkjit.interp.spaces.shared import CarveOut
from tests.interp.interp_kit import compile_ptx, line_of

NAME = "kernels_cu/test/parts.cu"
PARTS = (CarveOut("K", 0, 128), CarveOut("V", 128 + 64, 128))
SOURCE = """
extern "C" __global__ void k(float* y, int at) {
  extern __shared__ float s[];
  s[threadIdx.x] = s[threadIdx.x + 48] = y[threadIdx.x];
  __syncthreads();
  s[threadIdx.x + at] = 1;  // BUG
  y[threadIdx.x] = s[31 - threadIdx.x];
}"""


def launch(at: int, parts=PARTS, mem: bool = True) -> np.ndarray:
    y = np.random.default_rng(1).standard_normal(32, dtype="f4")
    run(compile_ptx(SOURCE, name=NAME), "k", 1, 32, [Arg("y", y, True), Arg("at", np.int32(at))],
        320, Checks(mem=mem), carve_outs=parts, title="parts")  # fmt: skip
    return y


@pytest.mark.parametrize(
    ("at", "where", "thread"),
    [(1, "byte 128 of K (dynamic shared, 128 bytes)", 31),
     (15, "byte 128 of K (dynamic shared, 128 bytes)", 17),
     (44, "byte -16 of V (dynamic shared, 128 bytes)", 0),
     (49, "byte 128 of V (dynamic shared, 128 bytes)", 31)],
)  # fmt: skip
def test_the_gap_belongs_to_nobody(at: int, where: str, thread: int) -> None:
    with pytest.raises(SanitizerError) as caught:
        launch(at)
    assert f"out-of-bounds shared write: 4-byte access at {where}" in str(caught.value)
    assert caught.value.thread == (thread, 0, 0)
    assert caught.value.location == f"{NAME}:{line_of(SOURCE, 'BUG')}"


def test_what_is_right_runs_and_what_is_not_looked_for_too() -> None:
    np.testing.assert_array_equal(launch(0), 1)
    np.testing.assert_array_equal(launch(1, mem=False)[:31], 1)
    np.testing.assert_array_equal(launch(1, parts=())[:31], 1)  # one array of 320 bytes


LOCAL = """
extern "C" __global__ void k(const int* at, float* y) {
  float a[32];
  for (int i = 0; i < 32; ++i)
    if (i != SKIPPED) a[(i * at[0]) % 32] = i;
  y[threadIdx.x] = a[at[threadIdx.x]];  // BUG
}"""


def test_uninitialised_local_memory() -> None:
    at = np.roll(np.arange(32, dtype="i4"), -1)  # at[0] = 1
    y = np.zeros(32, "f4")
    arguments = [Arg("at", at), Arg("y", y, True)]
    complete = compile_ptx(LOCAL.replace("SKIPPED", "-1"), name=NAME)
    assert "ld.local" in complete
    for _ in range(2):
        run(complete, "k", 3, 32, arguments)
    np.testing.assert_array_equal(y, at)
    source = LOCAL.replace("SKIPPED", "5")
    with pytest.raises(SanitizerError) as caught:
        run(compile_ptx(source, name=NAME), "k", 3, 32, arguments)
    error = caught.value
    assert error.kind == "uninitialised local read" and error.thread == (4, 0, 0)
    assert "4-byte read at byte 20 of 128 bytes of local memory" in str(error)
    assert error.location == f"{NAME}:{line_of(source, 'BUG')}"
    run(compile_ptx(source, name=NAME), "k", 3, 32, arguments, checks=Checks(mem=False))


def test_members_that_nobody_uses_may_be_unwritten() -> None:
    source = """
    extern "C" __global__ void k(const int* at, float* y) {
      float4 a[8];
      for (int i = 0; i < 8; ++i) a[at[i]].x = i, a[at[i]].w = 2 * i;
      float4 both = a[at[threadIdx.x]];
      y[threadIdx.x] = both.x + both.w;
    }"""
    at, y = np.arange(8, dtype="i4"), np.zeros(8, "f4")
    ptx = compile_ptx(source)
    assert "ld.local.v4" in ptx
    run(ptx, "k", 1, 8, [Arg("at", at), Arg("y", y, True)])
    np.testing.assert_array_equal(y, 3 * at)
