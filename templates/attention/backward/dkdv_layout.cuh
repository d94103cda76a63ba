// Where a block that makes dK and dV has its tiles in shared memory, each GUARD bytes from the
// next:
//
//   K   V   P (EXCHANGE)   dS (SHARES_DS)   then STAGES of:  Q  dO  lse  delta  of a tile's rows
//
// dK and dV are staged where K and V were. P and dS have keys as rows; they lie there where warps
// share them. Below that what such blocks do alike, whether dQ is made in order or not.
#pragma once
#include "ptx/cp_async.cuh"
#include "ptx/special_registers.cuh"
#include "tile/tile_copy.cuh"
#include "attention/backward/mma.cuh"
#include "attention/key_block.cuh"

template <int BLOCK_K_, int BLOCK_Q_, int HEAD_DIM, int HEAD_DIM_V, int STAGES_, bool EXCHANGE,
          bool SHARES_DS, int GUARD>
struct DkDvLayout {
  static constexpr int BLOCK_K = BLOCK_K_, BLOCK_Q = BLOCK_Q_, STAGES = STAGES_;
  static_assert(STAGES == 1 || STAGES == 2, "the next tile is the only one under way");
  static_assert(ROW_STEP % BLOCK_Q == 0, "lse and delta are padded to whole tiles");
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

// The keys of a block, of K or V, to shared memory.
template <typename Tile, int THREADS, bool ALIGNED, typename Order, typename T>
__device__ __forceinline__ void copy_keys(u32 shared, const T* array, const Strides& strides,
                                          const KeyBlock<Tile::ROWS>& place, int seqlen_k,
                                          int columns) {
  copy_tile<Tile, THREADS, ALIGNED, Order>(
      shared,
      array + place.batch * strides.batch + place.head * strides.head + place.k0 * strides.row,
      strides.row, seqlen_k - place.k0, columns);
}

// What the rows of a tile of queries, from `row` on, bring along, to `stage`.
template <typename Layout>
__device__ __forceinline__ void fetch_statistics(u32 stage, const float* lse_log2,
                                                 const float* delta, i64 row) {
  if (threadIdx.x < Layout::BLOCK_Q / 4) {
    cp_async_16(stage + Layout::LSE + threadIdx.x * 16, lse_log2 + row + threadIdx.x * 4);
    cp_async_16(stage + Layout::DELTA + threadIdx.x * 16, delta + row + threadIdx.x * 4);
  }
}

// A tile of queries, the rows of one head from `row` on, of Q and dO, to `stage`.
template <typename Layout, int THREADS, bool ALIGNED, typename T>
__device__ __forceinline__ void fetch_queries(u32 stage, const T* q, const Strides& q_strides,
                                              int head_dim, const T* dout,
                                              const Strides& dout_strides, int head_dim_v,
                                              int batch, int head, i64 row, int rows_left) {
  copy_tile<typename Layout::QTile, THREADS, ALIGNED>(
      stage, q + batch * q_strides.batch + head * q_strides.head + row * q_strides.row,
      q_strides.row, rows_left, head_dim);
  copy_tile<typename Layout::DoTile, THREADS, ALIGNED>(
      stage + Layout::DO,
      dout + batch * dout_strides.batch + head * dout_strides.head + row * dout_strides.row,
      dout_strides.row, rows_left, head_dim_v);
}

// What a warp reads: its keys of K, V, P and dS, all queries of Q and dO as columns of scores, and
// its share of the columns of Q and dO as rows of the products that follow (`turn`: see my_turn).
template <typename Layout>
struct DkDvReaders {
  using KTile = typename Layout::KTile;
  using VTile = typename Layout::VTile;
  using PTile = typename Layout::PTile;
  RowReader<KTile> k;
  RowReader<VTile> v;
  ColumnReader<typename Layout::QTile> q;
  ColumnReader<typename Layout::DoTile> dout;
  RowReader<typename Layout::QTile> q_rows;
  RowReader<typename Layout::DoTile> do_rows;
  RowReader<PTile> p;

  __device__ __forceinline__ DkDvReaders(int lane, int turn)
      : k(lane),
        v(lane),
        q(lane),
        dout(lane),
        q_rows(my_turn<RowReader<typename Layout::QTile>>(lane, turn)),
        do_rows(my_turn<RowReader<typename Layout::DoTile>>(lane, turn)),
        p(lane) {}
};

// dV += P' dO, dK += dS' Q for all queries of a tile at `stage`, P' and dS' from shared memory.
template <typename T, int WARPS_C, typename Layout, int M, int K_COLUMNS, int V_COLUMNS>
__device__ __forceinline__ void accumulate_exchanged(float (&dk_acc)[M][K_COLUMNS][4],
                                                     float (&dv_acc)[M][V_COLUMNS][4],
                                                     const DkDvReaders<Layout>& from, u32 p_tile,
                                                     u32 ds_tile, u32 stage) {
  constexpr int STEPS = Layout::BLOCK_Q / 16;
  accumulate_shared<T, STEPS, WARPS_C>(dv_acc, p_tile, from.p, stage + Layout::DO, from.do_rows);
  accumulate_shared<T, STEPS, WARPS_C>(dk_acc, ds_tile, from.p, stage, from.q_rows);
}

// The sums of a block's warps become dK and dV: staged, then stored in whole chunks. WARPS_K warps
// share the keys, WARPS_C the columns. Threads are asked for their place again, so that it need not
// stay in registers until here.
template <typename Layout, int WARPS_K, int WARPS_C, bool ALIGNED, typename Order, typename T,
          int M, int K_COLUMNS, int V_COLUMNS>
__device__ __forceinline__ void store_dk_dv(u32 shared, const float (&dk_acc)[M][K_COLUMNS][4],
                                            const float (&dv_acc)[M][V_COLUMNS][4], float scale,
                                            const KeyBlock<Layout::BLOCK_K>& place, T* dk,
                                            const Strides& dk_strides, int head_dim, T* dv,
                                            const Strides& dv_strides, int head_dim_v,
                                            int seqlen_k) {
  using KTile = typename Layout::KTile;
  using VTile = typename Layout::VTile;
  constexpr int ROWS_A_WARP = 16 * M, STORED = ROWS_A_WARP / WARPS_C;  // rows that a warp stores
  const int lane = thread_index_again() % WARP_SIZE;
  const int warp = thread_index_again() / WARP_SIZE, turn = warp / WARPS_K;
  const int row0 = warp % WARPS_K * ROWS_A_WARP;
  const u32 dk_tile = shared, dv_tile = shared + Layout::V;
  stage_rows<T, KTile, WARPS_C>(dk_acc, scale, lane, turn, dk_tile + row0 * KTile::ROW_BYTES);
  stage_rows<T, VTile, WARPS_C>(dv_acc, 1.f, lane, turn, dv_tile + row0 * VTile::ROW_BYTES);
  __syncthreads();
  const int row = row0 + turn * STORED;
  const int first = place.k0 + row0 + Order::row(turn * STORED);
  dk += place.batch * dk_strides.batch + place.head * dk_strides.head + first * dk_strides.row;
  dv += place.batch * dv_strides.batch + place.head * dv_strides.head + first * dv_strides.row;
  store_tile<KTile, STORED, ALIGNED, Order>(dk, dk_strides.row, dk_tile + row * KTile::ROW_BYTES,
                                            lane, seqlen_k - first, head_dim);
  store_tile<VTile, STORED, ALIGNED, Order>(dv, dv_strides.row, dv_tile + row * VTile::ROW_BYTES,
                                            lane, seqlen_k - first, head_dim_v);
}
