"""Planted bugs: each has to be found, with its kind, the argument's name, and file and line."""

from __future__ import annotations

import numpy as np
import pytest

from fkjit.errors import InterpreterError, SanitizerError
from fkjit.interp import Arg, run
from tests.interp.interp_kit import compile_ptx, line_of

NAME = "kernels_cu/test/bug.cu"
RNG = np.random.default_rng(9)


def fault(source: str, *arguments: Arg, block: int = 64, grid: int = 2, shared: int = 0) -> str:
    """The report of a kernel whose bug stands in the line marked BUG; nothing may be written."""
    before = [a.value.copy() for a in arguments if isinstance(a.value, np.ndarray)]
    with pytest.raises(SanitizerError) as caught:
        run(
            compile_ptx(source, name=NAME),
            "k",
            grid,
            block,
            list(arguments),
            shared,
            title="the title",
        )
    after = [a.value for a in arguments if isinstance(a.value, np.ndarray)]
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
    report = str(caught.value)
    assert report.startswith("the title: ")
    assert f"{NAME}:{line_of(source, 'BUG')}" in report
    return report


def floats(n: int) -> np.ndarray:
    return RNG.standard_normal(n).astype("f4")


ADD = """
extern "C" __global__ void k(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = 0;
  if (i < n) y[i] = x[i + OFFSET];  // BUG
}"""


@pytest.mark.parametrize(("offset", "first"), [(1, 127), (-1, 0), (1 << 20, 0), (-(1 << 30), 0)])
def test_global_read_out_of_bounds(offset: int, first: int) -> None:
    report = fault(ADD.replace("OFFSET", str(offset)), Arg("values", floats(128)),
                   Arg("y", floats(128), True), Arg("n", np.int32(128)))  # fmt: skip
    assert "out-of-bounds global read" in report and "of values (512 bytes" in report
    assert f"= values[{first + offset}]: " in report
    assert f"byte {(first + offset) * 4:,} of values" in report
    assert f"block ({first // 64}, 0, 0), thread ({first % 64}, 0, 0)" in report
    assert "ld.global" in report


def test_global_write_out_of_bounds_and_read_only() -> None:
    source = """
    extern "C" __global__ void k(float* y) {
      y[blockIdx.x * blockDim.x + threadIdx.x] = 1;  // BUG
    }"""
    report = fault(source, Arg("result", floats(127), True))
    assert "out-of-bounds global write" in report and "byte 508 of result (508 bytes" in report
    assert "block (1, 0, 0), thread (63, 0, 0)" in report
    report = fault(source, Arg("result", floats(128)))
    assert "write to a read-only argument" in report and "result" in report


def test_an_element_is_named_by_its_index() -> None:
    source = """
    extern "C" __global__ void k(const float* x, float* y) {
      y[threadIdx.x] = x[threadIdx.x + 33];  // BUG
    }"""
    report = fault(source, Arg("x", floats(96).reshape(4, 3, 8)), Arg("y", floats(64), True))
    assert "byte 384 of x (384 bytes, shape (4, 3, 8) float32) = x[4, 0, 0]: 0 bytes past" in report
    assert "thread (63, 0, 0)" in report


def test_a_pointer_that_is_no_argument() -> None:
    source = """
    extern "C" __global__ void k(float* y, long long at) {
      if (threadIdx.x == 3) *(float*)at = *y;  // BUG
    }"""
    report = fault(source, Arg("y", floats(4)), Arg("at", np.int64(64)))
    assert "belongs to no argument" in report and "thread (3, 0, 0)" in report


@pytest.mark.parametrize("direction", [1, -1])
def test_holes_of_a_strided_view(direction: int) -> None:
    source = """
    extern "C" __global__ void k(const float* x, float* y, int stride) {
      y[threadIdx.x] = x[(int)threadIdx.x * stride];  // BUG
    }"""
    whole = floats(3 * 64).reshape(64, 3)
    view = whole[::direction, 1]
    y = np.zeros(64, "f4")
    arguments = [Arg("view", view), Arg("y", y, True), Arg("stride", np.int32(3 * direction))]
    run(compile_ptx(source, name=NAME), "k", 1, 64, arguments)
    np.testing.assert_array_equal(y, view)
    arguments[2] = Arg("stride", np.int32(2 * direction))
    report = fault(source, *arguments, grid=1)
    assert "between the elements of the view" in report and "of view" in report


def test_misaligned_accesses() -> None:
    source = """
    extern "C" __global__ void k(const char* x, float2* y) {
      y[threadIdx.x] = *(const float2*)(x + 4 + 8 * threadIdx.x);  // BUG
    }"""
    report = fault(source, Arg("x", floats(200)), Arg("y", floats(256), True), grid=1)
    assert "misaligned global access" in report and "8-byte access at byte 4 of x" in report
    source = """
    extern "C" __global__ void k(float* y) {
      __shared__ __align__(16) float s[70];
      for (int i = threadIdx.x; i < 70; i += 32) s[i] = i;
      __syncthreads();
      unsigned p = (unsigned)__cvta_generic_to_shared(s + 1 + 2 * threadIdx.x);
      float a, b;
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(a), "=f"(b) : "r"(p));  // BUG
      y[threadIdx.x] = a + b;
    }"""
    report = fault(source, Arg("y", floats(64), True), block=32)
    assert "misaligned shared access" in report and "byte 4 of " in report and "static" in report


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("dynamic", [True, False])
def test_one_past_shared_memory(dynamic: bool, write: bool) -> None:
    access = (
        "s[threadIdx.x + 1] = 1;  // BUG"
        if write
        else "y[threadIdx.x] = s[threadIdx.x + 1];  // BUG"
    )
    source = f"""
    {"extern __shared__ float s[];" if dynamic else ""}
    extern "C" __global__ void k(float* y) {{
      {"" if dynamic else "__shared__ float s[64];"}
      s[threadIdx.x] = y[threadIdx.x];
      __syncthreads();
      {access}
      __syncthreads();
      y[threadIdx.x] += s[63 - threadIdx.x];
    }}"""
    report = fault(source, Arg("y", floats(64), True), shared=256 if dynamic else 0)
    assert f"out-of-bounds shared {'write' if write else 'read'}" in report
    assert ("(dynamic shared, 256 bytes)" if dynamic else "(static shared, 256 bytes)") in report
    assert "byte 256 of" in report and "thread (63, 0, 0)" in report


def test_too_little_dynamic_shared_memory() -> None:
    source = """
    extern __shared__ float s[];
    extern "C" __global__ void k(float* y) {
      s[threadIdx.x] = 1;  // BUG
      y[threadIdx.x] = s[0];
    }"""
    assert "out-of-bounds shared write" in fault(source, Arg("y", floats(64), True), shared=128)
    report = fault(source, Arg("y", floats(64), True), shared=0)
    assert "out-of-bounds shared write" in report and "no shared memory" in report


def test_uninitialised_shared_read() -> None:
    source = """
    extern "C" __global__ void k(float* y) {
      __shared__ float s[64];
      if (threadIdx.x != 7) s[threadIdx.x] = 1;
      __syncthreads();
      y[threadIdx.x] = s[threadIdx.x ^ 1];  // BUG
    }"""
    report = fault(source, Arg("y", floats(64), True))
    assert "uninitialised shared read" in report and "byte 28 of" in report
    assert "thread (6, 0, 0)" in report


ASYNC = """
extern "C" __global__ void k(const float* x, float* y) {
  __shared__ float s[2][64];
  unsigned p = (unsigned)__cvta_generic_to_shared(&s[0][threadIdx.x]);
  unsigned q = (unsigned)__cvta_generic_to_shared(&s[1][threadIdx.x]);
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(p), "l"(x + threadIdx.x));
  asm volatile("cp.async.commit_group;");
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(q), "l"(x + threadIdx.x));
  asm volatile("cp.async.commit_group;");
  asm volatile("cp.async.wait_group WAIT;" ::: "memory");
  __syncthreads();
  y[threadIdx.x] = s[0][63 - threadIdx.x];
  y[threadIdx.x] += s[1][63 - threadIdx.x];  // BUG
}"""


def test_missing_cp_async_wait() -> None:
    x, y = floats(64), floats(64)
    report = fault(ASYNC.replace("WAIT", "1"), Arg("x", x), Arg("y", y, True))
    assert "uninitialised shared read" in report and "cp.async" in report and "in flight" in report
    run(
        compile_ptx(ASYNC.replace("WAIT", "0"), name=NAME),
        "k",
        2,
        64,
        [Arg("x", x), Arg("y", y, True)],
    )
    np.testing.assert_array_equal(y, 2 * x[::-1])


def test_cp_async_out_of_bounds_on_either_side() -> None:
    source = ASYNC.replace(" // BUG", "").replace("WAIT", "0")
    beyond = source.replace('"l"(x + threadIdx.x));', '"l"(x + threadIdx.x + 1));  // BUG', 1)
    report = fault(beyond, Arg("x", floats(64)), Arg("y", floats(64), True))
    assert "out-of-bounds global read" in report and "byte 256 of x" in report
    assert "cp.async" in report
    line = '"r"(q), "l"(x + threadIdx.x));'
    beyond = source.replace(line, line.replace("(q)", "(q + 4)") + "  // BUG")
    report = fault(beyond, Arg("x", floats(64)), Arg("y", floats(64), True))
    assert "out-of-bounds shared write" in report and "byte 512 of" in report


def test_divergent_barrier() -> None:
    source = """
    extern "C" __global__ void k(float* y) {
      if (threadIdx.x < 16) {
        __syncthreads();  // BUG
        y[threadIdx.x] = 1;
      } else {
        __syncthreads();
        y[threadIdx.x] = 2;
      }
    }"""
    report = fault(source, Arg("y", floats(64), True))
    assert "barrier divergence" in report and "threads 0-15 wait" in report
    assert "threads 16-63 wait" in report and "bar.sync" in report


def test_deadlock_between_named_barriers() -> None:
    source = """
    extern "C" __global__ void k(float* y) {
      if (threadIdx.x < 32) asm volatile("bar.sync 1, 64;");  // BUG
      else asm volatile("bar.sync 2, 64;");
      y[threadIdx.x] = 1;
    }"""
    report = fault(source, Arg("y", floats(64), True))
    assert "deadlock" in report and "threads 0-31 wait" in report and "threads 32-63" in report


def test_shuffle_from_a_lane_that_is_not_there() -> None:
    source = """
    extern "C" __global__ void k(float* y) {
      float v = y[threadIdx.x];
      if (threadIdx.x < 16)
        v = __shfl_down_sync(0xffff, v, 1);  // BUG
      y[threadIdx.x] = v;
    }"""
    report = fault(source, Arg("y", floats(64), True))
    assert "shuffle from an inactive lane" in report and "lane 16" in report


def test_tensor_instruction_without_the_whole_warp() -> None:
    source = """
    extern "C" __global__ void k(unsigned* y) {
      __shared__ __align__(16) unsigned s[32];
      s[threadIdx.x] = 0;
      if (threadIdx.x == 31) return;
      unsigned r, p = (unsigned)__cvta_generic_to_shared(s + threadIdx.x % 8 * 4);
      asm("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r) : "r"(p));  // BUG
      y[threadIdx.x] = r;
    }"""
    report = fault(source, Arg("y", np.zeros(32, "u4"), True), block=32)
    assert "incomplete warp" in report and "ldmatrix" in report


def test_inlined_functions_name_both_lines() -> None:
    source = """
    __device__ __forceinline__ float get(const float* x, int i) {
      return x[i];  // BUG
    }
    extern "C" __global__ void k(const float* x, float* y) {
      y[threadIdx.x] = get(x, threadIdx.x + 1);  // CALL
    }"""
    report = fault(source, Arg("x", floats(64)), Arg("y", floats(64), True))
    assert f"(inlined at {NAME}:{line_of(source, 'CALL')})" in report


def test_the_first_fault_is_the_same_every_time() -> None:
    source = ADD.replace("OFFSET", "n - 100")
    reports = {
        fault(source, Arg("x", np.ones(128, "f4")), Arg("y", np.ones(128, "f4"), True),
              Arg("n", np.int32(128)))
        for _ in range(3)
    }  # fmt: skip
    assert len(reports) == 1


def test_traps_are_faults() -> None:
    source = """
    extern "C" __global__ void k(float* y) {
      if (y[threadIdx.x] != y[threadIdx.x]) __trap();  // BUG
      y[threadIdx.x] = 2;
    }"""
    y = floats(64)
    y[5] = np.nan
    report = fault(source, Arg("y", y, True))
    assert "trap" in report and "thread (5, 0, 0)" in report


def test_failed_assertions_are_faults() -> None:
    source = """
    extern "C" __global__ void k(int* y) {
      assert(y[threadIdx.x] < 60);  // BUG
      y[threadIdx.x] = 1;
    }"""
    report = fault(source, Arg("y", np.arange(64, dtype="i4"), True))
    assert "assertion failed: y[threadIdx.x] < 60, at kernels_cu/test/bug.cu:3" in report
    assert "void k(int *)" in report and "thread (60, 0, 0)" in report


def test_unknown_instructions_are_refused_before_anything_runs() -> None:
    source = """
    extern "C" __global__ void k(float* y) {
      y[threadIdx.x] = 1;
      asm volatile("wmma.unknown.sync.f32 %0;" :: "f"(y[0]));  // BUG
    }"""
    y = floats(64)
    before = y.copy()
    ptx = compile_ptx(source, name=NAME)
    with pytest.raises(
        InterpreterError, match=r"not supported.*wmma\.unknown\.sync\.f32 %f"
    ) as caught:
        run(ptx, "k", 1, 64, [Arg("y", y, True)])
    assert f"{NAME}:{line_of(source, 'BUG')}" in str(caught.value)
    np.testing.assert_array_equal(y, before)


@pytest.mark.parametrize(
    "instruction",
    ["mma.sync.aligned.m8n8k3.row.col.f64.f64.f64.f64 {fd,fd}, {fd}, {fd}, {fd,fd};",
     "cp.async.bulk.commit_group.read;",
     "ldmatrix.sync.aligned.m8n8.x3.shared.b16 {r,r,r}, [r];", "shfl.down.b32 r, r, 1, 31;"],
)  # fmt: skip
def test_unknown_modifiers_are_refused(instruction: str) -> None:
    text = f""".version 8.0
    .target sm_90
    .address_size 64
    .visible .entry k(.param .u64 p) {{
    .reg .b32 r; .reg .f32 f; .reg .f64 fd; .reg .b64 rd; .reg .b16 h;
    {instruction}
    ret; }}"""
    with pytest.raises(InterpreterError, match="not supported"):
        run(text, "k", 1, 32, [Arg("p", np.zeros(1, "f4"))])


def test_a_kernel_runs_well_after_its_own_fault() -> None:
    x, y = floats(128), np.zeros(128, "f4")
    source = ADD.replace("OFFSET", "n - 128")
    for n in (128, 129, 128):
        y[:] = 0
        arguments = [Arg("x", x), Arg("y", y, True), Arg("n", np.int32(n))]
        if n == 129:
            assert "of x (512 bytes" in fault(source, *arguments)
            assert (y == 0).all()
        else:
            run(compile_ptx(source, name=NAME), "k", 2, 64, arguments, title="another title")
            np.testing.assert_array_equal(y, x)
