// How the work items of a thread block go from the thread that loads tiles to all others: their
// numbers, two at a time (see barriers.cuh).
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "tile/ring.cuh"
#include "tile/tile_copy.cuh"
#include "attention/backward_sm90/schedule.cuh"

// The thread that loads notes for itself, for want of registers: its work item, how many pieces
// there were and the last one's number, and where it is.
template <typename Barriers>
__device__ __forceinline__ void start_notes(const Barriers& barriers) {
  store_shared_pair(barriers.note() + 16, 0, -1);
}

// By that thread: the next piece of this thread block, also for all others.
template <typename Work, typename Barriers, typename Sizes>
__device__ __forceinline__ int announce_next(const Barriers& barriers, u32* counters,
                                             const Sizes& sizes) {
  const int begun = load_shared_word(barriers.note() + 16);
  int number = load_shared_word(barriers.note() + 20);
  number = Work::next(number, counters, sizes.again());
  const RingPlace<Barriers::SLOTS> slot = ring_place<Barriers::SLOTS>(begun);
  mbarrier_wait(barriers.work_empty(slot.stage), slot.parity ^ 1);
  store_shared_word(barriers.work(slot.stage), number);
  mbarrier_arrive(barriers.work_full(slot.stage));
  store_shared_pair(barriers.note() + 16, begun + 1, number);
  return number;
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

template <typename Barriers>
__device__ __forceinline__ void note_walk(const Barriers& barriers, const BackwardWalk& at) {
  store_shared_chunk(barriers.note() + 32, at.words());
}
template <typename Barriers>
__device__ __forceinline__ BackwardWalk noted_walk(const Barriers& barriers) {
  return BackwardWalk(load_shared_chunk(barriers.note() + 32));
}
template <typename Barriers, typename Sizes>
__device__ __forceinline__ void note_work(const Barriers& barriers, int number,
                                          const Sizes& sizes) {
  const BackwardWorkItem work(number, sizes);
  store_shared_chunk(barriers.note(), work.words());
  note_walk(barriers, BackwardWalk(work, sizes));
}
template <typename Barriers>
__device__ __forceinline__ BackwardWorkItem noted_work(const Barriers& barriers) {
  return BackwardWorkItem(load_shared_chunk(barriers.note()));
}
