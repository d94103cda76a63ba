// The way out of a tile of attention on sm_90.
#pragma once
#include "ptx/bulk.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/proxy_fence.cuh"
#include "ptx/stmatrix.cuh"
#include "tile/fragment.cuh"
#include "tile/tile_copy.cuh"
#include "attention/online_softmax.cuh"

// What a warp's 16 rows are multiplied by at the end, the scale of values too, and their lse, if
// anyone wants it.
template <bool FRAMED>
__device__ __forceinline__ void finish_sums(float (&inverse)[2],
                                            const OnlineSoftmax<1, FRAMED>& softmax,
                                            float scale_log2, int lane, float* lse, int rows_left,
                                            float value_scale = 1.f) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane / 4 + half * 8;
    const float sum = softmax.total(0, half);
    inverse[half] = sum == 0.f ? 0.f : value_scale / sum;
    if (lse != nullptr && lane % 4 == 0 && row < rows_left)
      lse[row] = softmax.lse(0, half, sum, scale_log2);
  }
}

// A warp's 16 rows into its part of a tile by stmatrix: an instruction for every sixteen columns
// instead of four. Its first lane may have TMA store them.
template <typename T, typename OTile, int COLUMNS>
__device__ __forceinline__ void stage_rows(const float (&acc)[1][COLUMNS][4],
                                           const float (&inverse)[2], int lane, u32 warp_o_tile) {
  const FragmentReader<OTile, BlockOrder::ROW_MAJOR> place(lane);
#pragma unroll
  for (int n = 0; n < COLUMNS; n += 2) {
    u32 r[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = &acc[0][n + i / 2][2 * (i % 2)];
      r[i] = pack2<T>(pair[0] * inverse[i % 2], pair[1] * inverse[i % 2]);
    }
    stmatrix_x4(place.address(warp_o_tile, 0, n / 2), r);
  }
  proxy_fence();
  __syncwarp();
}

// The staged rows of a packed sequence's last tile: what follows them in o is the next sequence's.
template <typename OTile, typename T>
__device__ __forceinline__ void store_rows(T* o, const Strides& strides, int head, i64 row,
                                           u32 warp_o_tile, int lane, int rows, int columns) {
  store_tile<OTile, 16, true>(o + head * strides.head + row * strides.row, strides.row, warp_o_tile,
                              lane, rows, columns);
  __syncwarp();
}

// The same a chunk at a time, where scores of the next tile are in registers meanwhile.
template <typename OTile, typename T>
__device__ __forceinline__ void store_staged_rows(T* o, i64 stride, u32 warp_o_tile, int lane,
                                                  int rows, int columns) {
  constexpr int CHUNKS = OTile::COLUMNS / 8;
#pragma unroll 1
  for (int i = lane; i < rows * CHUNKS; i += WARP_SIZE) {
    const int row = i / CHUNKS, chunk = i % CHUNKS;
    if (chunk * 8 >= columns) continue;
    const u32 at = warp_o_tile + chunk / OTile::CHUNKS * OTile::PANEL_BYTES +
                   OTile::offset(row, chunk % OTile::CHUNKS);
    *reinterpret_cast<uint4*>(o + row * stride + chunk * 8) = load_shared_chunk(at);
  }
  __syncwarp();
}

// What this thread's stores read from a tile has been read: the tile may be written again.
__device__ __forceinline__ void release_staged(u32 empty) {
  bulk_wait_read();
  mbarrier_arrive(empty);
}
