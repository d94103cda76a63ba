// How the pieces of work of a thread block go from the thread that loads tiles to all others: their
// numbers, two at a time (see backward_barriers.cuh).
#pragma once
#include "device/backward_schedule.cuh"
#include "device/tile_copy.cuh"

// By the thread that loads: piece `begun` of this thread block has this number.
template <typename Barriers>
__device__ __forceinline__ void announce_work(const Barriers& barriers, int begun, int number) {
  const RingPlace<Barriers::SLOTS> slot = ring_place<Barriers::SLOTS>(begun);
  mbarrier_wait(barriers.work_empty(slot.stage), slot.parity ^ 1);
  store_shared_word(barriers.work(slot.stage), number);
  mbarrier_arrive(barriers.work_full(slot.stage));
}

// The number of piece `taken`, for one thread of a warp that is counted (work_empty).
template <typename Barriers>
__device__ __forceinline__ int take_work_alone(const Barriers& barriers, int taken) {
  const RingPlace<Barriers::SLOTS> slot = ring_place<Barriers::SLOTS>(taken);
  mbarrier_wait(barriers.work_full(slot.stage), slot.parity);
  const int number = load_shared_word(barriers.work(slot.stage));
  mbarrier_arrive(barriers.work_empty(slot.stage));
  return number;
}

// The same for a whole warp.
template <typename Barriers>
__device__ __forceinline__ int take_work(const Barriers& barriers, int taken, bool signals) {
  const int number = signals ? take_work_alone(barriers, taken) : 0;
  return __shfl_sync(FULL_MASK, number, 0);
}

// What the thread that loads notes for itself, for want of registers.
template <typename Barriers, typename Sizes>
__device__ __forceinline__ BackwardWalk note_work(const Barriers& barriers, int number,
                                                  const Sizes& sizes) {
  const BackwardWork work(number, sizes);
  store_shared_chunk(barriers.note(), work.words());
  return BackwardWalk(work, sizes);
}
template <typename Barriers>
__device__ __forceinline__ BackwardWork noted_work(const Barriers& barriers) {
  return BackwardWork(load_shared_chunk(barriers.note()));
}
