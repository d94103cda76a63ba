// Blocks of a cluster (sm_90+): their barrier, and writing into each other's shared memory.
//
//   block 0    store to 1   arrive ---+            wait   ... reads what 1 has stored
//   block 1    store to 0   arrive ---+-- all -->  wait   ... reads what 0 has stored
#pragma once
#include "prelude.cuh"

// Which of its cluster's blocks this one is.                    PTX ISA: %cluster_ctarank
__device__ __forceinline__ int cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// What this block wrote so far, all of the cluster sees after its wait.
// PTX ISA: barrier.cluster.arrive, barrier.cluster.wait
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// One float into the same place of block `rank`'s shared memory.
// PTX ISA: mapa, st.shared::cluster
__device__ __forceinline__ void cluster_store(float* shared, int rank, float value) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(there)
      : "r"(static_cast<u32>(__cvta_generic_to_shared(shared))), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
}

// An arrival at the mbarrier in the same place of block `rank`'s shared memory.
// PTX ISA: mapa, mbarrier.arrive
__device__ __forceinline__ void cluster_arrive_at(u32 barrier, int rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
