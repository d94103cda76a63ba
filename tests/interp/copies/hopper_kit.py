"""What the tests of Hopper's asynchronous copies share: inline PTX in CUDA, compiled for sm_90a."""

from __future__ import annotations

import numpy as np
import pytest

from fkjit.errors import SanitizerError
from fkjit.interp import Arg, Checks, run
from tests.interp.interp_kit import compile_ptx, line_of

NAME = "kernels_cu/test/hopper.cu"
HELPERS = r"""
typedef unsigned u32;
typedef unsigned long long u64;
struct alignas(64) Map { unsigned char opaque[128]; };
#define ASM asm volatile
__device__ u32 at(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ void init(u64* b, u32 n) {
  ASM("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at(b)), "r"(n) : "memory");
}
__device__ void ready() { ASM("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ void proxy() { ASM("fence.proxy.async;" ::: "memory"); }
__device__ void arrive(u64* b) {
  ASM("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(at(b)) : "memory");
}
__device__ void expect(u64* b, u32 n) {
  ASM("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(at(b)), "r"(n)
      : "memory");
}
__device__ void wait(u64* b, u32 parity) {
  ASM("{\n.reg .pred P;\nAGAIN: mbarrier.try_wait.parity.shared::cta.b64 P, [%0], %1;\n"
      "@P bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(at(b)), "r"(parity) : "memory");
}
__device__ void load2(void* d, const Map* m, int x, int y, u64* b) {
  ASM("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(at(d)), "l"(m), "r"(x), "r"(y), "r"(at(b)) : "memory");
}
__device__ void store2(const Map* m, int x, int y, const void* s) {
  ASM("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(m),
      "r"(x), "r"(y), "r"(at(s)) : "memory");
}
__device__ void commit() { ASM("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N> __device__ void waited() {
  ASM("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}
template <int N> __device__ void was_read() {
  ASM("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
__device__ u32 rank() { u32 r; ASM("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
__device__ u32 mapped(const void* p, u32 r) {
  u32 d;
  ASM("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(d) : "r"(at(p)), "r"(r));
  return d;
}
__device__ void cluster_sync() {
  ASM("barrier.cluster.arrive.release.aligned;" ::: "memory");
  ASM("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
"""


def compiled(source: str) -> str:
    """PTX of a kernel that may use HELPERS; its own lines count from 1."""
    return compile_ptx(f'{HELPERS}\n#line 1 "{NAME}"\n{source}', "compute_90a", "helpers.cu")


def launch(
    source: str, *arguments: Arg, grid: object = 1, block: int = 128, shared: int = 0,
    cluster: object = 1, checks: Checks = Checks(race=True),
) -> None:  # fmt: skip
    """Run the kernel `k`; races are looked for unless said otherwise."""
    run(compiled(source), "k", grid, block, list(arguments), shared, checks, cluster=cluster)  # type: ignore[arg-type]


def fault(source: str, *arguments: Arg, line: str = "BUG", **options: object) -> str:
    """The report of a kernel whose bug stands in the line marked BUG (line "": anywhere)."""
    with pytest.raises(SanitizerError) as caught:
        launch(source, *arguments, **options)  # type: ignore[arg-type]
    report = str(caught.value)
    if line:
        assert f"{NAME}:{line_of(source, line)}" in report, report
    return report


def random_bytes(rng: np.random.Generator, shape: tuple[int, ...], dtype: object) -> np.ndarray:
    """Random bits of a type, none of them NaN."""
    if np.dtype(dtype).kind == "f":  # type: ignore[call-overload]
        return rng.standard_normal(shape).astype(dtype)  # type: ignore[call-overload]
    return rng.integers(0, 1 << 62, shape, np.int64).astype(dtype)  # type: ignore[call-overload]
