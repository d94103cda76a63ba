// The way out of a product on sm_90: a warp's 16 rows of sums go through the epilogue, then to
// memory by TMA, 64 columns at a time, or pair by pair where rows have no 16-byte boundaries.
#pragma once
#include "ptx/bulk.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/memory.cuh"
#include "ptx/proxy_fence.cuh"
#include "ptx/register_fence.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "tile/fragment.cuh"
#include "tile/tile_copy.cuh"
#include "gemm/pairs.cuh"
#include "gemm/sm90/residual.cuh"

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

// out before the residual, of columns 8 n + 2 (lane % 4) and the next one, of both rows of a lane:
// [0] of row lane / 4, [1] of that + 8. With GATE the second half of `acc` and of `bias` is up's.
template <int N, typename T, typename Pairs>
__device__ __forceinline__ void finish_fragment(float2* out, const float (&acc)[N][4], int n,
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
    if (half * 8 < rows_left || !Pairs::PRE)
      out[half] = epilogue.activated({acc[n][2 * half], acc[n][2 * half + 1]}, own,
                                     {acc[up][2 * half], acc[up][2 * half + 1]}, own_up,
                                     row + half * 8, column + n * 8 + pair);
  }
}

// A box of 16 rows and COLUMNS columns of the tile, from `first` on, to shared memory. With a
// residual the box holds it, fragments like those of the sums.
template <typename Staged, int COLUMNS, typename Out, int N, typename T, typename Pairs>
__device__ __forceinline__ void stage_box(const float (&acc)[N][4], const Pairs& epilogue,
                                          const T* bias, u32 box, int lane, i64 row, int rows_left,
                                          int first, int column) {
  const FragmentReader<Staged, BlockOrder::ROW_MAJOR> place(lane);
  u32 residual[2][4];  // of these 16 columns, and of the next ones
  if (Pairs::RESIDUAL) ldmatrix_x4(residual[0], place.address(box, 0, 0));
#pragma unroll
  for (int n = 0; n < COLUMNS / 8; n += 2) {
    float2 y[4];  // both rows of block n, both rows of the next one
    const int at = first / 8 + n, next = n / 2 + 1;
    if (Pairs::RESIDUAL && next < COLUMNS / 16)
      ldmatrix_x4(residual[next % 2], place.address(box, 0, next));
    finish_fragment(y, acc, at, epilogue, bias, lane, row, rows_left, column);
    finish_fragment(y + 2, acc, at + 1, epilogue, bias, lane, row, rows_left, column);
    u32 r[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (Pairs::RESIDUAL) y[i] = added(y[i], unpack2<Out>(residual[n / 2 % 2][i]));
      r[i] = pack2<Out>(y[i].x, y[i].y);
    }
    if (Pairs::RESIDUAL) __syncwarp();  // all lanes have what they overwrite
    stmatrix_x4(place.address(box, 0, n / 2), r);
  }
  proxy_fence();
  __syncwarp();
}

// Through shared memory: `staged` has room for boxes of 16 rows and 64 columns. With a residual they
// hold it, each box of a tile has its own, and `box` counts them. Else there are two, of which one,
// `box`, is filled while TMA reads the other. `column`: of the tile, OUT: how many it has; what is
// left over, less than a box, goes by ordinary stores.
template <typename Staged, int OUT, int N, typename T, typename Pairs, typename Out>
__device__ __forceinline__ void store_by_tma(const float (&acc)[N][4], const Pairs& epilogue,
                                             const T* bias, const TensorMap& out_map, Out* out,
                                             i64 out_stride, u32 staged, int& box, int lane,
                                             int row, int rows, int column) {
  constexpr int BOX = Staged::COLUMNS, WHOLE = OUT / BOX * BOX, REST = OUT - WHOLE;
  const int lane_row = row + lane / 4, rows_left = rows - lane_row;
  const auto next_box = [&] {
    if (Pairs::RESIDUAL) return staged + box++ * Staged::BYTES;
    if (lane == 0) bulk_wait_read<1>();
    __syncwarp();
    box ^= 1;
    return staged + box * Staged::BYTES;
  };
#pragma unroll
  for (int first = 0; first < WHOLE; first += BOX) {
    const u32 place = next_box();
    stage_box<Staged, BOX, Out>(acc, epilogue, bias, place, lane, lane_row, rows_left, first,
                                column);
    if (lane == 0) {
      tma_store(out_map, place, column + first, row, 0, 0);
      bulk_commit();
    }
  }
  if constexpr (REST > 0) {
    const u32 place = next_box();
    stage_box<Staged, REST, Out>(acc, epilogue, bias, place, lane, lane_row, rows_left, WHOLE,
                                 column);
    store_tile<Staged, 16, true>(out + row * out_stride + column + WHOLE, out_stride, place, lane,
                                 rows - row, min(REST, epilogue.n - column - WHOLE));
    __syncwarp();
    if (lane == 0) bulk_commit();  // of nothing: a group for each box
  }
}

// Straight from registers. A residual's pairs come AT_ONCE fragments' at a time.
template <int OUT, int N, typename T, typename Pairs, typename Out>
__device__ __forceinline__ void store_pairs(const float (&acc)[N][4], const Pairs& epilogue,
                                            const T* bias, Out* out, i64 out_stride, int lane,
                                            int row, int rows, int column) {
  constexpr int AT_ONCE = Pairs::RESIDUAL ? 4 : 1;
  const bool whole = has_whole_pairs(out, out_stride);
  const int lane_row = row + lane / 4, rows_left = rows - lane_row;
#pragma unroll
  for (int group = 0; group < OUT / 8; group += AT_ONCE) {
    Pair<Out> residual[AT_ONCE][2];
#pragma unroll
    for (int i = 0; i < 2 * AT_ONCE; ++i) {
      const int n = group + i / 2, half = i % 2;
      if (Pairs::RESIDUAL && n < OUT / 8 && half * 8 < rows_left)
        residual[i / 2][half] =
            epilogue.residual_pair(lane_row + half * 8, column + n * 8 + lane % 4 * 2);
    }
#pragma unroll
    for (int n = group; n < min_of(group + AT_ONCE, OUT / 8); ++n) {
      float2 found[2];
      const int first = column + n * 8 + lane % 4 * 2;
      finish_fragment(found, acc, n, epilogue, bias, lane, lane_row, rows_left, column);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (half * 8 >= rows_left) continue;
        if (Pairs::RESIDUAL) found[half] = added(found[half], residual[n - group][half].get());
        store_pair(out + (lane_row + half * 8) * out_stride + first, found[half], whole,
                   epilogue.n - first);
      }
    }
    compiler_fence();  // else it begins with more columns than it has registers for
  }
}
