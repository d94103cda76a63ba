// Blocks of a cluster (sm_90+): their barrier, writing into each other's shared memory, arriving at
// each other's mbarriers.
//
//   block 0    store to 1   arrive ---+            wait   ... reads what 1 has stored
//   block 1    store to 0   arrive ---+-- all -->  wait   ... reads what 0 has stored
//
// No block may end while another one still writes to its shared memory or arrives at its barriers:
// the last thing they do is to arrive and wait.
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
// Of what it wrote nothing is said: that costs no look at memory.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// All threads of a cluster come here, each as often.
__device__ __forceinline__ void meet_cluster() {
  cluster_arrive();
  cluster_wait();
}

// The address of the same byte of shared memory in block `rank`.           PTX ISA: mapa
__device__ __forceinline__ u32 cluster_address(u32 shared, int rank) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared), "r"(rank));
  return there;
}

// One float into the same place of block `rank`'s shared memory.    PTX ISA: st.shared::cluster
__device__ __forceinline__ void cluster_store(float* shared, int rank, float value) {
  const u32 there = cluster_address(static_cast<u32>(__cvta_generic_to_shared(shared)), rank);
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
}

// The float of block `rank` that lies where `shared` lies in this block.  PTX ISA: ld.shared::cluster
__device__ __forceinline__ float cluster_load(const float* shared, int rank) {
  const u32 there = cluster_address(static_cast<u32>(__cvta_generic_to_shared(shared)), rank);
  float value;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there) : "memory");
  return value;
}

// Arrives at block `rank`'s mbarrier, which lies where `barrier` lies in this block. Who waits there
// knows that products that this thread has waited for are done; for ordinary stores it is no fence
// (with .release.cluster a ring of two blocks took 1.3 times as long).
// PTX ISA: mbarrier.arrive, .shared::cluster
__device__ __forceinline__ void cluster_arrive_at(u32 barrier, int rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(cluster_address(barrier, rank))
               : "memory");
}

// Which cluster of the grid this block is of, of how many: where none was asked for, each is its
// own. PTX ISA: %clusterid, %nclusterid
__device__ __forceinline__ int cluster_index() {
  u32 index;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return index;
}
__device__ __forceinline__ int cluster_count() {
  u32 count;
  asm("mov.u32 %0, %%nclusterid.x;" : "=r"(count));
  return count;
}

// Four floats to 16 bytes of a block's shared memory, which count on an mbarrier there; both are
// addresses of the cluster.                 PTX ISA: st.async, .mbarrier::complete_tx::bytes, .v4
__device__ __forceinline__ void cluster_send_floats(u32 there, const float (&x)[4], u32 barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(there),
      "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(barrier)
      : "memory");
}

// Four floats to the 16 bytes of block `rank` that lie where `shared` lies in this block.
// PTX ISA: st.shared::cluster, .v4
__device__ __forceinline__ void cluster_store_floats(u32 shared, int rank, const float (&x)[4]) {
  asm volatile(
      "st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(cluster_address(shared, rank)),
      "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
      : "memory");
}
