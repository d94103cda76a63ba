// What sorting items by group (groups.cuh) is asked for, and which warp has what of it.
#pragma once
#include "prelude.cuh"

struct Grouping {
  int experts;        // ids from 0 to here are looked up in the map
  int groups;         // experts here: ids after the map
  int block_size;     // a group's places are a multiple of it
  u32 inverse;        // of block_size: 1 << (31 + shift) divided by it, rounded up
  int shift;          // 1 << shift is the first power of two that is no less than block_size
  int capacity;       // items of a group, at most; later ones are dropped
  int places;         // of sorted_token_ids
  int sentinel;       // what stands in places of nobody
  u32 piece_inverse;  // as above, of what share_of_warp divides by
  int piece_shift;
  int keeps_remote;  // experts elsewhere have groups, too: ids are not mapped, tiles alone are
};

// Of a launch, all on the device.
struct Groups {
  const int* expert_map;  // [experts] or null: as they are
  int* sorted_token_ids;  // [places]
  int* expert_ids;        // [places / block_size]
  int* num_post_padded;   // [1]
  int* inverse;           // [items], -1: dropped
  int* offsets;           // [groups + 1]
  int* counts;            // [groups]
  u32* counters;          // of GridSums

  // What a tile of a group says whose it is: a group kept for an expert elsewhere -1.
  __device__ __forceinline__ int name(int group, const Grouping& how) const {
    return how.keeps_remote ? expert_map[group] : group;
  }
};

// The group of an expert's id, or -1.
__device__ __forceinline__ int group_of(i64 id, const int* map, const Grouping& how) {
  if (id < 0 || id >= how.experts) return -1;
  const int group = map == nullptr || how.keeps_remote ? static_cast<int>(id) : map[id];
  return group >= 0 && group < how.groups ? group : -1;
}

// x divided by what `inverse` and `shift` stand for, as in Grouping.        PTX ISA: mul.hi.u32
__device__ __forceinline__ int divided(int x, u32 inverse, int shift) {
  return static_cast<int>(__umulhi(2u * x, inverse) >> shift);
}

// The tile that a place is in.
__device__ __forceinline__ int tile_of(int place, const Grouping& how) {
  return divided(place, how.inverse, how.shift);
}

// Sums over the lanes up to this one, of which LANES count.               PTX ISA: shfl.sync.up.b32
template <int LANES = WARP_SIZE>
__device__ __forceinline__ int warp_scan(int x) {
  const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
  for (int distance = 1; distance < LANES; distance *= 2) {
    const int other = __shfl_up_sync(FULL_MASK, x, distance);
    if (lane >= distance) x += other;
  }
  return x;
}

// The items of this warp: the `number` of all in equal pieces, each a multiple of `step`.
struct Share {
  int begin, end;
  int each;  // items of a warp, but for the last ones
};
__device__ __forceinline__ Share share_of_warp(int number, int step, int warps,
                                               const Grouping& how) {
  const int warp = blockIdx.x * warps + threadIdx.x / WARP_SIZE, pieces = gridDim.x * warps * step;
  const int each = divided(number + pieces - 1, how.piece_inverse, how.piece_shift) * step;
  const i64 begin = static_cast<i64>(warp) * each;
  return {static_cast<int>(min(begin, static_cast<i64>(number))),
          static_cast<int>(min(begin + each, static_cast<i64>(number))), each};
}

// Tokens there are: what the device says, within what the host knows.
__device__ __forceinline__ int real_tokens(const int* num_tokens, int tokens) {
  return num_tokens == nullptr ? tokens : max(0, min(*num_tokens, tokens));
}
