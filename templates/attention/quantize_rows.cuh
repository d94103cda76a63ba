// Rows of Q, K and V on their way to codes: ROWS rows of a head a block, eight columns a lane.
#pragma once
#include "attention/packed_codes.cuh"
#include "quantize/scale.cuh"
#include "quantize/sixteen_rows.cuh"

// The rows of a block: which head's, from which on, and this thread's part of each. Of packed sequences
// there is a head for each, whose rows begin at `start` in q, k or v.
template <int HEAD_DIM, int ROWS, int THREADS, bool PACKED>
struct RowTile {
  static constexpr int LANES = HEAD_DIM / 8, TEAM = THREADS / LANES, PASSES = ROWS / TEAM;
  static_assert(LANES <= WARP_SIZE && ROWS % TEAM == 0, "whole passes of rows within a warp");
  int head, sequence, of_sequence;  // of all, whose, and which of its heads
  int start, length;                // of the sequence
  int first, team, column;

  // `blocks`: of a head. `longest`: rows of a sequence, at most.
  __device__ __forceinline__ RowTile(int index, int blocks, int heads, const int* cu_seqlens,
                                     int longest)
      : head(index / blocks),
        sequence(head / heads),
        of_sequence(head % heads),
        first(index % blocks * ROWS),
        team(threadIdx.x / LANES),
        column(threadIdx.x % LANES * 8) {
    const SequenceRows<PACKED> rows(cu_seqlens, sequence, longest);
    start = rows.start, length = rows.length;
  }

  __device__ __forceinline__ int row(int pass) const { return first + pass * TEAM + team; }

  // Of codes and of what a head has one of: a head of one sequence or of all that are packed.
  __device__ __forceinline__ i64 code_head() const { return PACKED ? of_sequence : head; }
  // Of a row among the rows of codes; `total`: of a head.
  __device__ __forceinline__ i64 place(int row, int total) const {
    return code_head() * total + start + row;
  }

  // Zeros behind the last row and the last column.
  template <typename T>
  __device__ __forceinline__ Eight load(const T* x, const Strides& strides, int row,
                                        int columns) const {
    x += sequence * strides.batch + of_sequence * strides.head;
    return load_eight<true>(x + (start + row) * strides.row, column, row < length ? columns : 0);
  }
};

// A mean of K as SixteenRows takes it off, in shared memory: HEAD_DIM floats. The lane's first; by a
// whole block.
template <int HEAD_DIM, bool ROTATE>
__device__ __forceinline__ u32 means_of_rows(float* means, const float* mean, int head_dim) {
  constexpr int LANES = HEAD_DIM / 8;
  const int lane = threadIdx.x % WARP_SIZE;
  if (threadIdx.x < WARP_SIZE) {
    Eight own = load_eight<true>(mean, lane % LANES * 8, head_dim);
    if (ROTATE) rotate_row<LANES>(own);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (lane < LANES) means[lane * 8 + i] = own[i];
  }
  __syncthreads();
  return shared_address(means) + lane % 4 * 32;
}

// A block's rows, sixteen a warp: the lane's are `row` and eight further on. Zeros behind the last row
// and the last column.
template <typename T, int HEAD_DIM, bool ROTATE>
struct BlockRows : SixteenRows<T, HEAD_DIM, ROTATE> {
  int row;

  template <typename Tile>
  __device__ __forceinline__ void load(const Tile& tile, const T* x, const Strides& strides,
                                       int columns) {
    const int lane = threadIdx.x % WARP_SIZE;
    row = tile.first + threadIdx.x / WARP_SIZE * 16 + lane / 4;
    x += tile.sequence * strides.batch + tile.of_sequence * strides.head;
    this->take([&](int half, int j) {
      const int own_row = row + half * 8, column = j * 32 + lane % 4 * 8;
      uint4 own = make_uint4(0, 0, 0, 0);
      load_chunk_if(own, x + (tile.start + own_row) * strides.row + column,
                    own_row < tile.length && column < columns);
      return own;
    });
  }
  // Normalized, and LESS the mean at `means` those rows that there are.
  template <bool LESS>
  __device__ __forceinline__ void finish(u32 means, int length) {
    this->template normalize<LESS>(means, row < length, row + 8 < length);
  }
  __device__ __forceinline__ u32 most(int half) const {
    u32 found = 0;
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 32; ++j) found = max(found, magnitude(this->row_of(half, j)));
    return found;
  }
};
