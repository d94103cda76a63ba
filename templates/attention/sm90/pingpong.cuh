// Consumers of attention on sm_90 that take turns at the tensor cores: one multiplies while another
// is at its exponentials.
//
// They fall into step by themselves in the long run, and draw less power than if they were made to.
// Where each block has one tile of queries only, it is done sooner if they are.
#pragma once
#include "ptx/named_barrier.cuh"

template <int CONSUMERS>
struct PingPong {
  static constexpr int BOTH = 2 * 128;  // threads: who waits and who passes
  int consumer;
  bool taken;

  __device__ __forceinline__ PingPong(int number, bool one_tile_each)
      : consumer(number), taken(CONSUMERS > 1 && one_tile_each) {
    if (consumer == CONSUMERS - 1) pass();
  }

  __device__ __forceinline__ void wait() const {
    if (taken) named_barrier_wait<BOTH>(1 + consumer);
  }

  __device__ __forceinline__ void pass() const {
    if (taken) named_barrier_arrive<BOTH>(1 + (consumer + 1) % CONSUMERS);
  }

  // What the last one has arrived at is not left over.
  __device__ __forceinline__ void end() const {
    if (consumer == 0) wait();
  }
};
