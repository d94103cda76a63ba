// Where the warpgroups of attention's backward meet: who waits for what, as addresses in shared
// memory.
//
//   kv        K and V of a piece of work; empty when dK and dV, staged there, have been stored
//   work      which piece comes next, announced by the thread that loads
//   ds        dS of a tile, from two warpgroups for the third
//   q, do     tiles of Q (with lse and delta) and dO; empty when dK has been multiplied
#pragma once
#include "device/mbarrier.cuh"

template <int STAGES, int DS_STAGES>
struct BackwardBarriers {
  static constexpr int SLOTS = 2;  // pieces of work that have been announced
  static constexpr int TILES =
      8;  // descriptions of tiles: from two steps ahead to where the slowest warp is
  static constexpr int TILE_BYTES = 48;
  static_assert(STAGES == 3 && DS_STAGES == 2, "the offsets below");
  u32 base;

  __device__ __forceinline__ u32 kv_full() const { return base; }
  __device__ __forceinline__ u32 kv_empty() const { return base + 8; }
  __device__ __forceinline__ u32 work_full(int slot) const { return base + 16 + slot * 16; }
  __device__ __forceinline__ u32 work_empty(int slot) const { return base + 24 + slot * 16; }
  __device__ __forceinline__ u32 work(int slot) const { return base + 48 + slot * 4; }
  __device__ __forceinline__ u32 ds_full(int stage) const { return base + 56 + stage * 16; }
  __device__ __forceinline__ u32 ds_empty(int stage) const { return base + 64 + stage * 16; }
  __device__ __forceinline__ u32 q_full(int stage) const { return base + 88 + stage * 24; }
  __device__ __forceinline__ u32 do_full(int stage) const { return base + 96 + stage * 24; }
  __device__ __forceinline__ u32 empty(int stage) const { return base + 104 + stage * 24; }
  // What the thread that loads tells the others of a tile, and what it notes for itself.
  __device__ __forceinline__ u32 tile(int number) const {
    return base + 160 + number % TILES * TILE_BYTES;
  }
  __device__ __forceinline__ u32 note_work() const { return base + 160 + TILES * TILE_BYTES; }
  __device__ __forceinline__ u32 note_walk() const { return note_work() + 16; }
  __device__ __forceinline__ u32 note_number() const { return note_work() + 32; }

  // By one thread, before all meet.
  __device__ __forceinline__ void init() const {
    mbarrier_init(kv_full(), 2);
    mbarrier_init(kv_empty(), 8);
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
      mbarrier_init(work_full(slot), 1);
      mbarrier_init(work_empty(slot), 12);
    }
#pragma unroll
    for (int stage = 0; stage < DS_STAGES; ++stage) {
      mbarrier_init(ds_full(stage), 8);
      mbarrier_init(ds_empty(stage), 4);
    }
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(q_full(stage), 2);
      mbarrier_init(do_full(stage), 1);
      mbarrier_init(empty(stage), 8);
    }
    mbarrier_init_fence();
  }
};
