// Rows of tokens and of their choices, 16 bytes or one element an access; a warp has one token.
#pragma once
#include "ptx/memory.cuh"
#include "tile/chunk.cuh"
#include "tile/reduce.cuh"

// Where a token's choices are, -1: nowhere, with weight 0; and their weights, 1 where none are
// given: lane k of a warp has choice k.
struct Choices {
  int place;
  float weight;

  // By every lane of the warp; `weights` may be null. There are up to 32 choices.
  __device__ __forceinline__ Choices(const int* inverse, const float* weights, i64 token,
                                     int top_k) {
    const int lane = threadIdx.x % WARP_SIZE;
    place = -1, weight = 1.f;
    if (lane < top_k) place = inverse[token * top_k + lane];
    if (lane < top_k && weights != nullptr) weight = weights[token * top_k + lane];
    if (place < 0) weight = 0.f;
  }
  // Of choice k, from 32 on none.
  // PTX ISA: shfl.sync.idx.b32
  __device__ __forceinline__ int place_of(int k) const {
    return k < WARP_SIZE ? __shfl_sync(FULL_MASK, place, k) : -1;
  }
  __device__ __forceinline__ float weight_of(int k) const {
    return __shfl_sync(FULL_MASK, weight, k % WARP_SIZE);
  }
};

// Piece `i` of a row, or zeros.
template <typename Part, typename T>
__device__ __forceinline__ Part load_or_zero(const T* row, int i, bool there) {
  Part made = {};
  if constexpr (Part::SIZE == 1) {
    if (there) made = Part::load(row, i);
  } else {
    load_chunk_if(made.bits.bits, row + i * Part::SIZE, there);
  }
  return made;
}

// Zeros into the rows of group `group` that nobody has, and into some of those behind all groups.
template <typename T, bool WIDE>
__device__ __forceinline__ void clear_rows(T* rows, i64 stride, int pieces, const int* offsets,
                                           const int* counts, int group, int groups, int places) {
  const Chunk<T, WIDE> nothing = {};
  const int begin = offsets[group], used = counts[group], end = min(offsets[group + 1], places);
  const int behind = offsets[groups];
  for (int row = begin + used; row < end; ++row)
    for (int i = threadIdx.x; i < pieces; i += blockDim.x) nothing.store(rows + row * stride, i);
  for (int row = behind + group; row < places; row += groups)
    for (int i = threadIdx.x; i < pieces; i += blockDim.x) nothing.store(rows + row * stride, i);
}
