// The way out of a product on sm_90: a warp's 16 rows of sums go through the epilogue, then to
// memory by TMA, 64 columns at a time, or pair by pair where rows have no 16-byte boundaries.
#pragma once
#include "ptx/bulk.cuh"
#include "ptx/memory.cuh"
#include "ptx/proxy_fence.cuh"
#include "ptx/register_fence.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "tile/fragment.cuh"
#include "tile/tile_copy.cuh"
#include "gemm/pairs.cuh"

// Bias of a tile's columns to shared memory, by the 128 threads of a warpgroup: of columns `first`
// and on of the weight's rows, with GATE half of them, then as many of `second` and on. Zeros for
// what is not there.
template <int COLUMNS, typename T>
__device__ __forceinline__ void stage_bias(T* shared, const T* bias, int thread, int first,
                                           int second, int most) {
#pragma unroll
  for (int i = 0; i < COLUMNS; i += 128) {
    const int place = i + thread, half = place / (COLUMNS / 2) * (COLUMNS / 2);
    const int column = (half ? second : first) + place - half;
    if (place < COLUMNS)
      shared[place] = bias != nullptr && column < most ? bias[column] : static_cast<T>(0.f);
  }
}

// out of columns 8 n + 2 (lane % 4) and the next one, of both rows of a lane: [0] of row lane / 4,
// [1] of that + 8. With GATE the second half of `acc` and of `bias` is that of up.
template <int N, typename T, typename Pairs>
__device__ __forceinline__ void finish_fragment(float2 (&out)[2], const float (&acc)[N][4], int n,
                                                const Pairs& epilogue, const T* bias, int lane,
                                                i64 row, int rows_left, int column) {
  const int up = Pairs::GATE ? n + N / 2 : n, pair = lane % 4 * 2;
  const auto bias_of = [&](int block) {
    return unpack2<T>(*reinterpret_cast<const u32*>(bias + block * 8 + pair));
  };
  const float2 own = bias_of(n), own_up = bias_of(up);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    out[half] = {0.f, 0.f};
    if (half * 8 < rows_left || !Pairs::TOUCHES_ROWS)
      out[half] = epilogue({acc[n][2 * half], acc[n][2 * half + 1]}, own,
                           {acc[up][2 * half], acc[up][2 * half + 1]}, own_up, row + half * 8,
                           column + n * 8 + pair);
  }
}

// A box of 16 rows and COLUMNS columns of the tile, from `first` on, to shared memory.
template <typename Staged, int COLUMNS, typename Out, int N, typename T, typename Pairs>
__device__ __forceinline__ void stage_box(const float (&acc)[N][4], const Pairs& epilogue,
                                          const T* bias, u32 box, int lane, i64 row, int rows_left,
                                          int first, int column) {
  const FragmentReader<Staged, BlockOrder::ROW_MAJOR> place(lane);
#pragma unroll
  for (int n = 0; n < COLUMNS / 8; n += 2) {
    float2 low[2], high[2];
    const int at = first / 8 + n;
    finish_fragment(low, acc, at, epilogue, bias, lane, row, rows_left, column);
    finish_fragment(high, acc, at + 1, epilogue, bias, lane, row, rows_left, column);
    const u32 r[4] = {pack2<Out>(low[0].x, low[0].y), pack2<Out>(low[1].x, low[1].y),
                      pack2<Out>(high[0].x, high[0].y), pack2<Out>(high[1].x, high[1].y)};
    stmatrix_x4(place.address(box, 0, n / 2), r);
  }
  proxy_fence();
  __syncwarp();
}

// Through shared memory: `staged` has room for two boxes of 16 rows and 64 columns, of which one,
// `box_number`, is filled while TMA reads the other. `column`: of the tile, OUT: how many it has;
// what is left over, less than a box, goes by ordinary stores.
template <typename Staged, int OUT, int N, typename T, typename Pairs, typename Out>
__device__ __forceinline__ void store_by_tma(const float (&acc)[N][4], const Pairs& epilogue,
                                             const T* bias, const TensorMap& out_map, Out* out,
                                             i64 out_stride, u32 staged, int& box_number, int lane,
                                             int row, int rows, int column) {
  constexpr int BOX = 64, WHOLE = OUT / BOX * BOX, REST = OUT - WHOLE;
  const int lane_row = row + lane / 4, rows_left = rows - lane_row;
  const auto next_box = [&] {
    if (lane == 0) bulk_wait_read<1>();
    __syncwarp();
    box_number ^= 1;
    return staged + box_number * Staged::BYTES;
  };
#pragma unroll
  for (int first = 0; first < WHOLE; first += BOX) {
    const u32 box = next_box();
    stage_box<Staged, BOX, Out>(acc, epilogue, bias, box, lane, lane_row, rows_left, first, column);
    if (lane == 0) {
      tma_store(out_map, box, column + first, row, 0, 0);
      bulk_commit();
    }
  }
  if constexpr (REST > 0) {
    const u32 box = next_box();
    stage_box<Staged, REST, Out>(acc, epilogue, bias, box, lane, lane_row, rows_left, WHOLE,
                                 column);
    store_tile<Staged, 16, true>(out + row * out_stride + column + WHOLE, out_stride, box, lane,
                                 rows - row, min(REST, epilogue.n - column - WHOLE));
    __syncwarp();
    if (lane == 0) bulk_commit();  // of nothing: a group for each box
  }
}

// Straight from registers.
template <int OUT, int N, typename T, typename Pairs, typename Out>
__device__ __forceinline__ void store_pairs(const float (&acc)[N][4], const Pairs& epilogue,
                                            const T* bias, Out* out, i64 out_stride, int lane,
                                            int row, int rows, int column) {
  const bool whole = has_whole_pairs(out, out_stride);
  const int lane_row = row + lane / 4, rows_left = rows - lane_row;
#pragma unroll
  for (int n = 0; n < OUT / 8; ++n) {
    float2 found[2];
    const int first = column + n * 8 + lane % 4 * 2;
    finish_fragment(found, acc, n, epilogue, bias, lane, lane_row, rows_left, column);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (half * 8 < rows_left)
        store_pair(out + (lane_row + half * 8) * out_stride + first, found[half], whole,
                   epilogue.n - first);
    compiler_fence();  // else it begins with more columns than it has registers for
  }
}
