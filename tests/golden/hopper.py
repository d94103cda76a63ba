"""Pieces that the kernels for sm_90 share: barriers in shared memory and the way out."""

from __future__ import annotations

import numpy as np

from tests.golden.case import PREAMBLE, Case, Dim3, Map
from tests.golden.forms import random_result
from tests.golden.values import Make, Random, random_bits

ARCH = "compute_90a"

PIECES = (
    PREAMBLE
    + r"""
__device__ __forceinline__ void init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void publish_init() {  // to the asynchronous proxy and the cluster
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
}
__device__ __forceinline__ void expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void complete(u32 bar, u32 bytes) {  // as a copy does
  asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], %1;"
               ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ u32 try_wait(u32 bar, u32 parity) {
  u32 done;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
               " selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  return done;
}
__device__ __forceinline__ u32 test_wait(u32 bar, u32 parity) {
  u32 done;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;"
               " selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  return done;
}
__device__ __forceinline__ void wait(u32 bar, u32 parity) {
  for (u32 tries = 0; !try_wait(bar, parity); ++tries)
    if (tries == 1 << 14) __trap();  // rather than hang, where the phase cannot end
}
__device__ __forceinline__ void fence_async() {
  asm volatile("fence.proxy.async;" ::: "memory");
}
__device__ __forceinline__ void commit_and_wait() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}
__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ u32 mapa(u32 address, u32 rank) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
"""
)


def block_case(
    name: str,
    body: str,
    words: int,
    result: int,
    x: Make | None = None,
    outputs: dict[str, str] | None = None,
    **launch: object,
) -> Case:
    """A kernel of `body` over x[words] and result[result], all u32; `i` is the thread.

    launch: block, grid, cluster, shared, maps. `body` may write x too if `outputs` says so.
    """
    cluster = launch.get("cluster", 1)
    attribute = f" __cluster_dims__({cluster}, 1, 1)" if cluster != 1 else ""
    maps = launch.get("maps", ())
    assert isinstance(maps, tuple)
    extra = "".join(f", const __grid_constant__ TensorMap map{n}" for n in range(len(maps)))
    source = f"""{PIECES}
extern "C" __global__ void{attribute} k(u32* x, u32* result{extra}) {{
  const u32 i = threadIdx.x;
{body}
}}
"""

    def arrays(rng: Random) -> dict[str, np.ndarray]:
        given = x(rng) if x else random_bits(rng, "u32", words)
        return {"x": given, "result": random_result(rng, (result,), "u4")}

    return Case(name, source, arrays, outputs or {"result": "u32"}, ARCH, **launch)  # type: ignore


__all__ = ["ARCH", "PIECES", "Dim3", "Map", "block_case"]
