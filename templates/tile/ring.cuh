// Places of a ring of stages in shared memory, and how often it has gone round: the parity of that
// is the phase that its mbarriers are waited for with (ptx/mbarrier.cuh).
//
//   step     0  1  2  3  4  5  6 ...      SIZE 3
//   stage    0  1  2  0  1  2  0
//   parity   0  0  0  1  1  1  0
#pragma once
#include "ptx/mbarrier.cuh"

template <int SIZE>
struct RingPlace {
  int stage = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == SIZE) stage = 0, parity ^= 1;
  }
};

// The mbarriers of a ring, two of each stage, Own::BARRIERS bytes behind `base`. full(stage): what
// was asked for has come; empty(stage): nobody needs it any more.
template <typename Own, int STAGES>
struct RingBarriers {
  u32 base;  // of all that Own has in shared memory
  __device__ __forceinline__ u32 full(int stage) const { return base + Own::BARRIERS + stage * 16; }
  __device__ __forceinline__ u32 empty(int stage) const { return full(stage) + 8; }
  // By one thread; the others wait for it. `arrivals`: of those who fill a stage, `releases`: of
  // those who are done with it.
  __device__ __forceinline__ void begin(int releases, int arrivals) const {
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(full(stage), arrivals);
      mbarrier_init(empty(stage), releases);
    }
    mbarrier_init_fence();
  }
};

// Where a ring stands after `count` steps.
template <int SIZE>
__device__ __forceinline__ RingPlace<SIZE> ring_place(int count) {
  RingPlace<SIZE> place;
  place.stage = count % SIZE, place.parity = count / SIZE % 2;
  return place;
}

// A warp is done with what is there: who arrives for it says so. And on to the next place.
template <int SIZE>
__device__ __forceinline__ void release(RingPlace<SIZE>& place, u32 empty, bool arrives) {
  if (arrives) mbarrier_arrive(empty);
  place.advance();
}
