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
