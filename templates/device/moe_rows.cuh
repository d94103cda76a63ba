// Rows of tokens and of their choices, 16 bytes or one element an access; a block has a token.
#pragma once
#include "device/piece.cuh"
#include "device/reduce.cuh"

constexpr int MOST_CHOICES = 32;  // of a token

// Where a token's choices are, -1: nowhere; and their weights, 1 where there are none.
struct Choices {
  int place[MOST_CHOICES];
  float weight[MOST_CHOICES];

  // By every thread of the block; `weights` may be null.
  __device__ __forceinline__ void load(const int* inverse, const float* weights, i64 token,
                                       int top_k) {
    if (threadIdx.x < top_k) {
      place[threadIdx.x] = inverse[token * top_k + threadIdx.x];
      weight[threadIdx.x] = weights == nullptr ? 1.f : weights[token * top_k + threadIdx.x];
    }
    __syncthreads();
  }
};

// Zeros into the rows of group `group` that nobody has, and into some of those behind all groups.
template <typename T, bool WIDE>
__device__ __forceinline__ void clear_rows(T* rows, i64 stride, int pieces, const int* offsets,
                                           const int* counts, int group, int groups, int places) {
  const Piece<T, WIDE> nothing = {};
  for (int row = offsets[group] + counts[group]; row < offsets[group + 1]; ++row)
    for (int i = threadIdx.x; i < pieces; i += blockDim.x) nothing.store(rows + row * stride, i);
  for (int row = offsets[groups] + group; row < places; row += groups)
    for (int i = threadIdx.x; i < pieces; i += blockDim.x) nothing.store(rows + row * stride, i);
}
