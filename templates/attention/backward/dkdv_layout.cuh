// Where a block that makes dK and dV has its tiles in shared memory, each GUARD bytes from the next:
//
//   K   V   P (EXCHANGE)   dS (SHARES_DS)   then STAGES of:  Q   dO   lse   delta     of a tile's rows
//
// dK and dV are staged where K and V were. P and dS have keys as rows; they lie there where warps share
// them.
#pragma once
#include "ptx/cp_async.cuh"
#include "tile/tile_copy.cuh"
#include "attention/backward/mma.cuh"

template <int BLOCK_K_, int BLOCK_Q_, int HEAD_DIM, int HEAD_DIM_V, int STAGES_, bool EXCHANGE,
          bool SHARES_DS, int GUARD>
struct DkDvLayout {
  static constexpr int BLOCK_K = BLOCK_K_, BLOCK_Q = BLOCK_Q_, STAGES = STAGES_;
  using KTile = SwizzledTile<BLOCK_K, HEAD_DIM>;
  using VTile = SwizzledTile<BLOCK_K, HEAD_DIM_V>;
  using QTile = SwizzledTile<BLOCK_Q, HEAD_DIM>;
  using DoTile = SwizzledTile<BLOCK_Q, HEAD_DIM_V>;
  using PTile = SwizzledTile<BLOCK_K, SHARES_DS ? BLOCK_Q : 64>;

  static constexpr int V = KTile::BYTES + GUARD, P = V + VTile::BYTES + GUARD;
  static constexpr int DS = P + (EXCHANGE ? PTile::BYTES + GUARD : 0);
  static constexpr int RING = DS + (SHARES_DS ? PTile::BYTES + GUARD : 0);
  // In a stage.
  static constexpr int DO = QTile::BYTES + GUARD, LSE = DO + DoTile::BYTES + GUARD;
  static constexpr int DELTA = LSE + BLOCK_Q * 4 + GUARD;
  static constexpr int STAGE = DELTA + BLOCK_Q * 4 + GUARD;
};

// A tile of queries to `stage`, with what its rows bring along, by all threads.
template <typename Layout, int THREADS, bool ALIGNED, typename T>
__device__ __forceinline__ void fetch_queries(u32 stage, const T* q, i64 q_stride, int head_dim,
                                              const T* dout, i64 dout_stride, int head_dim_v,
                                              int rows_left, const float* lse_log2,
                                              const float* delta) {
  copy_tile<typename Layout::QTile, THREADS, ALIGNED>(stage, q, q_stride, rows_left, head_dim);
  copy_tile<typename Layout::DoTile, THREADS, ALIGNED>(stage + Layout::DO, dout, dout_stride,
                                                       rows_left, head_dim_v);
  if (threadIdx.x < Layout::BLOCK_Q / 4) {
    cp_async_16(stage + Layout::LSE + threadIdx.x * 16, lse_log2 + threadIdx.x * 4);
    cp_async_16(stage + Layout::DELTA + threadIdx.x * 16, delta + threadIdx.x * 4);
  }
}
