"""Planted bugs around wgmma: each is found, at the line of the source."""

from __future__ import annotations

import numpy as np
import pytest

from fkjit.errors import SanitizerError
from fkjit.interp import Arg, run
from tests.interp.interp_kit import compile_ptx, line_of
from tests.interp.wgmma.test_wgmma_kernels import ATTENTION
from tests.interp.wgmma.wgmma_kit import PRELUDE, mma_function

NAME = "kernels_cu/test/bug.cu"
RNG = np.random.default_rng(92)

# One product of 64 x 8 x 16; each test replaces one of the words in capitals.
KERNEL = (
    PRELUDE
    + mma_function("mma", 8, "f32.f16.f16", ", 1, 1, 0, 0")
    + mma_function("wider", 16, "f32.f16.f16", ", 1, 1, 0, 0")
    + mma_function("from_registers", 8, "f32.f16.f16", ", 1, 1, 0", from_registers=True)
    + """
__device__ __forceinline__ void copy(unsigned to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from));
}
extern "C" __global__ void k(const uint4* in, float* o, float x) {
  __shared__ __align__(1024) uint4 tile[80 * 8 FEWER];  // a: 64 rows of 128 bytes, b: 16
  for (int i = threadIdx.x; i < 640; i += blockDim.x) COPY
  asm volatile("cp.async.commit_group; COPIED" ::: "memory");
  proxy_fence();
  __syncthreads();
  const unsigned at = shared_address(tile);
  u64 a = descriptor(at) A_CHANGE, b = descriptor(at + 8192) B_CHANGE;
  int scale = 1 SCALE_CHANGE;
  unsigned r[4] = {1, 2, 3, threadIdx.x};
  float d[4], e[8];
  for (int i = 0; i < 4; ++i) d[i] = i;
  FENCE
  WHERE
  mma(d, a, b, scale);
  commit();
  AFTER
  wait<WAITS>();
  LATER
  for (int i = 0; i < 4; ++i) o[blockIdx.x * 512 + threadIdx.x * 4 + i] = d[i];
}"""
)
PLAIN = {
    "FEWER": "", "COPY": "tile[i] = in[i];", "COPIED": "cp.async.wait_all;", "A_CHANGE": "",
    "B_CHANGE": "", "SCALE_CHANGE": "", "FENCE": "fence();", "WHERE": "", "AFTER": "",
    "WAITS": "0", "LATER": "",
}  # fmt: skip


def filled(**changes: str) -> str:
    source = KERNEL
    for word, text in {**PLAIN, **changes}.items():
        source = source.replace(word, text)
    return source


def arguments() -> list[Arg]:
    data = RNG.integers(-3, 4, (640, 8)).astype("f2")
    return [Arg("in", data), Arg("o", np.zeros(4096, "f4"), True), Arg("x", np.float32(3))]


def fault(source: str, block: int = 128, marked: bool = True) -> str:
    """The report of a kernel with a bug, in the line marked BUG."""
    with pytest.raises(SanitizerError) as caught:
        run(compile_ptx(source, "compute_90a", NAME), "k", 2, block, arguments(), title="the title")
    report = str(caught.value)
    assert report.startswith("the title: ")
    if marked:
        assert f"{NAME}:{line_of(source, 'BUG')}" in report
    return report


def calling(source: str) -> str:
    """The line of the call of mma, for reports that name the wgmma itself."""
    return f"{NAME}:{line_of(source, 'mma(d, a, b, scale);')}"


def test_the_kernel_without_a_bug() -> None:
    each = arguments()
    run(compile_ptx(filled(), "compute_90a", NAME), "k", 2, 128, each)
    assert each[1].value.any()  # type: ignore[union-attr]


def test_a_result_read_too_early() -> None:
    report = fault(filled(AFTER="o[threadIdx.x] = d[1];  // BUG"))
    assert "register of a wgmma in flight: this reads %f" in report
    assert "wgmma.wait_group must stand before it" in report and "st.global.f32" in report
    source = filled(WAITS="1", LATER="d[2] *= x;  // BUG")
    assert "this reads" in fault(source)
    assert f"the wgmma at {NAME}" in fault(source) and calling(source) in fault(source)


def test_a_result_shuffled() -> None:
    """Instructions for whole warps see results as any other instruction does."""
    shuffle = "d[1] = __shfl_xor_sync(~0u, d[1], 1);"
    report = fault(filled(AFTER=f"{shuffle}  // BUG"))
    assert "this reads %r" in report and "shfl.sync" in report
    plain, shuffled = arguments(), arguments()
    shuffled[0] = plain[0]
    for each, later in ((plain, ""), (shuffled, shuffle)):
        run(compile_ptx(filled(LATER=later), "compute_90a", NAME), "k", 2, 128, each)
    before, after = (np.reshape(each[1].value, (8, 128, 4))[:2] for each in (plain, shuffled))
    np.testing.assert_array_equal(after[:, :, 1], before[:, np.arange(128) ^ 1, 1])


def test_a_result_overwritten_in_flight() -> None:
    text = 'asm volatile("mov.f32 %0, 0f3F800000;" : "+f"(d[3]) :: "memory");  // BUG'
    assert "this overwrites %f" in fault(filled(AFTER=text))


def test_operand_a_overwritten_in_flight() -> None:
    source = filled(
        AFTER='fence(); from_registers(d, r, b, 1); commit();\n'
        'asm volatile("add.u32 %0, %0, 1;" : "+r"(r[2]) :: "memory");  // BUG'
    )  # fmt: skip
    assert "this overwrites operand A in %r" in fault(source)
    source = ATTENTION.replace("TIE", "").replace("PACK_LATE", "for (int i = 0; i < 16; ++i) p[i]"
                                                 " = fresh[i];")  # fmt: skip
    source = source.replace("PACK_EARLY", "unsigned fresh[16]; pack(next, fresh);")
    half = np.ones((256, 64), "f2")
    each = [Arg("q", half), Arg("k", half), Arg("v", half), Arg("o", np.zeros((256, 64), "f4"),
            True), Arg("tiles", np.int32(3))]  # fmt: skip
    with pytest.raises(SanitizerError, match="overwrites operand A"):
        run(compile_ptx(source, "compute_90a"), "k", 2, 256, each, 65536)


def test_never_waited_for() -> None:
    source = filled().replace("wait<0>();", "").replace("= d[i];", "= 0;")
    report = fault(source, marked=False)
    assert "wgmma never waited for" in report and calling(source) in report
    report = fault(source.replace("commit();\n", "\n"), marked=False)  # not even committed
    assert "wgmma never waited for" in report


def test_no_fence() -> None:
    source = filled(FENCE="")
    report = fault(source, marked=False)
    assert "missing wgmma.fence: no wgmma.fence stands before the first" in report
    assert calling(source) in report


@pytest.mark.parametrize("loop", ["for (int j = 0; j < 3; ++j) ", ""])
def test_no_fence_after_a_change(loop: str) -> None:
    change = f"{loop}{{ wait<0>(); d[1] *= x;  // BUG\n mma(d, a, b, 1); commit(); }}"
    report = fault(filled(AFTER=change))
    assert "missing wgmma.fence: %f" in report and "was computed at" in report
    change = change.replace("d[1] *= x;", "d[1] *= x; fence();")
    run(compile_ptx(filled(AFTER=change), "compute_90a", NAME), "k", 2, 128, arguments())


def test_a_fence_before_which_the_compiler_computes_nothing_is_enough() -> None:
    """d is computed before the fence in the source, and after it in the PTX."""
    change = "wait<0>(); float f[4]; for (int i = 0; i < 4; ++i) f[i] = d[i] * x + i;\n"
    change += "fence(); mma(d, a, b, 1); commit(); mma(f, a, b, 1); commit(); wait<0>();"
    change += "for (int i = 0; i < 4; ++i) d[i] += f[i];"
    run(compile_ptx(filled(AFTER=change), "compute_90a", NAME), "k", 2, 128, arguments())


def test_accumulating_on_another_shape_in_flight() -> None:
    source = filled(AFTER="for (int i = 0; i < 4; ++i) { e[i] = d[i]; e[i + 4] = 0; }\n"
                    "wider(e, a, b, 1);  // BUG\ncommit();",
                    LATER="d[0] += e[0] + e[7];")  # fmt: skip
    assert "register of a wgmma in flight" in fault(source)
    swapped = filled(AFTER="{ float t = d[0]; d[0] = d[1]; d[1] = t; }\nmma(d, a, b, 1);  // BUG\n"
                     "commit();")  # fmt: skip
    assert "register of a wgmma in flight" in fault(swapped)


@pytest.mark.parametrize("block", [96, 160])
def test_a_block_that_is_no_multiple_of_a_warpgroup(block: int) -> None:
    report = fault(filled(), block, marked=False)
    assert "incomplete warpgroup" in report and "all 128 threads" in report
    assert f"thread ({block // 128 * 128}, 0, 0)" in report


def test_threads_that_do_not_take_part() -> None:
    for condition in ("threadIdx.x < 96", "threadIdx.x != 5"):
        source = filled(WHERE=f"if ({condition})")
        assert "incomplete warpgroup" in fault(source.replace("wait<0>();", ""), marked=False)


def test_threads_that_disagree() -> None:
    for word, name in (("A", "a descriptor"), ("B", "a descriptor"), ("SCALE", "scale-d")):
        source = filled(**{f"{word}_CHANGE": "- (threadIdx.x == 77)"})
        report = fault(source, marked=False)
        assert f"the threads of a warpgroup give different values of {name}" in report
        assert calling(source) in report


def test_a_tile_that_is_too_small() -> None:
    source = filled(FEWER="- 8 * 9", COPY="if (i < 568) tile[i] = in[i];")
    report = fault(source, marked=False)
    assert "out-of-bounds shared read: 16-byte access at byte 9,200 of" in report
    assert "tile (static shared, 9,088 bytes)" in report and calling(source) in report


def test_wrong_strides() -> None:
    """Without a swizzle the leading offset counts: the second half of a row is that far off."""
    leading = "& ~(3ull << 62) & ~(0x3fffull << 16) | 1000ull << 16"
    report = fault(filled(A_CHANGE=leading), marked=False)
    assert "out-of-bounds shared read: 16-byte access at byte 16,000 of" in report
    source = filled(A_CHANGE=leading, FEWER="+ 2048")
    report = fault(source, marked=False)
    assert "uninitialised shared read: 16-byte read at byte 16,000 of" in report
    assert calling(source) in report


def test_an_operand_that_was_never_written() -> None:
    source = filled(COPY="if (i < 519 || i > 527) tile[i] = in[i];")
    report = fault(source, marked=False)
    assert "uninitialised shared read: 16-byte read at byte 8,336 of" in report
    assert calling(source) in report


def test_a_wrong_swizzle_gives_wrong_numbers() -> None:
    right, wrong = arguments(), arguments()
    wrong[0] = right[0]
    run(compile_ptx(filled(), "compute_90a", NAME), "k", 1, 128, right)
    source = filled(B_CHANGE="^ (3ull << 62)")
    run(compile_ptx(source, "compute_90a", NAME), "k", 1, 128, wrong)
    assert (np.asarray(right[1].value) != np.asarray(wrong[1].value)).any()


def test_an_operand_still_on_its_way() -> None:
    source = filled(COPY="copy(shared_address(tile + i), in + i);", COPIED="")
    report = fault(source, marked=False)
    assert "cp.async to it is in flight" in report and calling(source) in report
    ready = source.replace("cp.async.commit_group; ", "cp.async.wait_all; ")
    run(compile_ptx(ready, "compute_90a", NAME), "k", 2, 128, arguments())


def test_an_operand_overwritten_by_a_copy_before_the_wait() -> None:
    source = filled(AFTER="copy(shared_address(tile + threadIdx.x), in);")
    report = fault(source, marked=False)
    assert "operand of a wgmma in flight overwritten" in report and calling(source) in report
