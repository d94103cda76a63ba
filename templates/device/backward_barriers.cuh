// Where the warpgroups of attention's backward meet: who waits for what, as addresses in shared
// memory.
//
//   work      which piece comes next, announced by the thread that loads tiles
//   k, v      K and V of a piece of work; empty when dK and dV, staged there, have been stored
//   q, do     tiles of Q (with lse and delta) and dO; empty when dK, or dV, has been multiplied
//   ds        dS of a tile, from two warpgroups for the third
//   begun     the third is at the next tile
//   dq        parts of dQ in shared memory; ready when the copies before have been read, and the
//             sums of others are there if this thread block is the last one to add
#pragma once
#include "device/mbarrier.cuh"

template <int Q_STAGES, int DO_STAGES, int DS_STAGES, int DQ_PARTS>
struct BackwardBarriers {
  static constexpr int SLOTS = 2;  // pieces of work that have been announced
  static constexpr int TILES = 8;  // descriptions of tiles: more than are under way
  static constexpr int TILE_BYTES = 48;
  static constexpr int Q = 80, DO = Q + Q_STAGES * 16, DS = DO + DO_STAGES * 16;
  static constexpr int DQ = DS + DS_STAGES * 16, NOTES = 256;
  static_assert(DQ + DQ_PARTS * 16 <= NOTES, "barriers before notes");
  u32 base;

  __device__ __forceinline__ u32 k_full() const { return base; }
  __device__ __forceinline__ u32 k_empty() const { return base + 8; }
  __device__ __forceinline__ u32 v_full() const { return base + 16; }
  __device__ __forceinline__ u32 v_empty() const { return base + 24; }
  __device__ __forceinline__ u32 begun() const { return base + 32; }
  __device__ __forceinline__ u32 work(int slot) const { return base + 40 + slot * 4; }
  __device__ __forceinline__ u32 work_full(int slot) const { return base + 48 + slot * 16; }
  __device__ __forceinline__ u32 work_empty(int slot) const { return base + 56 + slot * 16; }
  __device__ __forceinline__ u32 q_full(int stage) const { return base + Q + stage * 16; }
  __device__ __forceinline__ u32 q_empty(int stage) const { return base + Q + 8 + stage * 16; }
  __device__ __forceinline__ u32 do_full(int stage) const { return base + DO + stage * 16; }
  __device__ __forceinline__ u32 do_empty(int stage) const { return base + DO + 8 + stage * 16; }
  __device__ __forceinline__ u32 ds_full(int stage) const { return base + DS + stage * 16; }
  __device__ __forceinline__ u32 ds_empty(int stage) const { return base + DS + 8 + stage * 16; }
  __device__ __forceinline__ u32 dq_full(int part) const { return base + DQ + part * 16; }
  __device__ __forceinline__ u32 dq_ready(int part) const { return base + DQ + 8 + part * 16; }
  // What the thread that loads tells the others of a tile.
  __device__ __forceinline__ u32 tile(int number) const {
    return base + NOTES + number % TILES * TILE_BYTES;
  }
  __device__ __forceinline__ u32 note() const { return base + NOTES + TILES * TILE_BYTES; }
  // With a form (backward_form.cuh) three chunks, and one for each piece that is announced.
  __device__ __forceinline__ u32 keys(int slot) const { return note() + 48 + slot * 16; }

  // By one thread, before all meet.
  __device__ __forceinline__ void init() const {
    mbarrier_init(k_full(), 1), mbarrier_init(k_empty(), 8);
    mbarrier_init(v_full(), 1), mbarrier_init(v_empty(), 8);
    mbarrier_init(begun(), 1);
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
      mbarrier_init(work_full(slot), 1);
      mbarrier_init(work_empty(slot), 14);
    }
#pragma unroll
    for (int stage = 0; stage < Q_STAGES; ++stage)
      mbarrier_init(q_full(stage), 2), mbarrier_init(q_empty(stage), 8);
#pragma unroll
    for (int stage = 0; stage < DO_STAGES; ++stage)
      mbarrier_init(do_full(stage), 1), mbarrier_init(do_empty(stage), 8);
#pragma unroll
    for (int stage = 0; stage < DS_STAGES; ++stage)
      mbarrier_init(ds_full(stage), 8), mbarrier_init(ds_empty(stage), 4);
#pragma unroll
    for (int part = 0; part < DQ_PARTS; ++part)
      mbarrier_init(dq_full(part), 4), mbarrier_init(dq_ready(part), 1);
    mbarrier_init_fence();
  }
};
