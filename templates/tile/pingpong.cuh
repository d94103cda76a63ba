// Consumers (warpgroups) on sm_90 that take turns at the tensor cores: one multiplies while another
// is at its exponentials or its epilogue.
//
//   consumer 0    wait  multiply  pass              wait  multiply  pass      ...
//   consumer 1                          wait  multiply  pass                  ...
#pragma once
#include "ptx/named_barrier.cuh"

template <int CONSUMERS>
struct PingPong {
  static constexpr int BOTH = 2 * 128;  // threads: who waits and who passes
  int consumer;
  bool taken;

  // Turns are taken if there is more than one consumer and `wanted`; consumer 0 is the first.
  __device__ __forceinline__ PingPong(int number, bool wanted)
      : consumer(number), taken(CONSUMERS > 1 && wanted) {
    if (consumer == CONSUMERS - 1) pass();
  }

  __device__ __forceinline__ void wait() const {
    if (taken) named_barrier_wait<BOTH>(1 + consumer);
  }

  __device__ __forceinline__ void pass() const {
    if (taken) named_barrier_arrive<BOTH>(1 + (consumer + 1) % CONSUMERS);
  }

  // What the last one has arrived at is not left over. `next`: whose turn it would be.
  __device__ __forceinline__ void end(int next = 0) const {
    if (consumer == next) wait();
  }
};
