// How the pieces of work of a thread block go from the thread that loads to all others: their
// numbers, two at a time, with notes in shared memory (see backward_barriers.cuh).
#pragma once
#include "device/backward_schedule.cuh"
#include "device/tile_copy.cuh"

// By the thread that loads, before anything else.
template <typename Barriers, typename Sizes>
__device__ __forceinline__ void first_work(const Barriers& barriers, u32* counter,
                                           const Sizes& sizes) {
  store_shared_pair(barriers.note_number(), BackwardWork::next(-1, counter, sizes), 0);
  store_shared_chunk(barriers.note_walk(), BackwardWalk().words());
}

// By the same: announces the next piece. Its tiles; left is -1 where there is none.
template <typename Barriers, typename Sizes>
__device__ __forceinline__ BackwardWalk begin_work(const Barriers& barriers, u32* counter,
                                                   const Sizes& sizes) {
  const int number = load_shared_word(barriers.note_number());
  const int begun = load_shared_word(barriers.note_number() + 4);
  const RingPlace<Barriers::SLOTS> slot = ring_place<Barriers::SLOTS>(begun);
  mbarrier_wait(barriers.work_empty(slot.stage), slot.parity ^ 1);
  store_shared_word(barriers.work(slot.stage), number);
  mbarrier_arrive(barriers.work_full(slot.stage));
  BackwardWalk walk;
  walk.left = -1;
  if (number >= sizes.works()) return walk;
  const BackwardWork work(number, sizes);
  store_shared_chunk(barriers.note_work(), work.words());
  store_shared_pair(barriers.note_number(), BackwardWork::next(number, counter, sizes), begun + 1);
  return BackwardWalk(work, sizes);
}

// The number of the next piece, by whole warps; `taken`: how many before.
template <typename Barriers>
__device__ __forceinline__ int take_work(const Barriers& barriers, int taken, bool signals) {
  const RingPlace<Barriers::SLOTS> slot = ring_place<Barriers::SLOTS>(taken);
  int number = 0;
  if (signals) {
    mbarrier_wait(barriers.work_full(slot.stage), slot.parity);
    number = load_shared_word(barriers.work(slot.stage));
    mbarrier_arrive(barriers.work_empty(slot.stage));
  }
  return __shfl_sync(FULL_MASK, number, 0);
}
