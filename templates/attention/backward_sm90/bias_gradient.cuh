// The gradient of a bias in attention's backward on sm_90, by the warpgroup that makes dQ: dS^T of a
// tile is in shared memory, keys as rows, in 16 bits.
//
//   BiasRows    the bias has a row for each query of each head: dS, turned over, is its gradient
//   BiasSums    it has one row for all queries: sums of dS over queries, one for each head, which
//               backward_bias_sum.cu rounds
//
// Both are handed each tile, its notes (loads.cuh) and where its dS^T is, and told when a piece ends.
#pragma once
#include "ptx/atomic.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"
#include "tile/tile_copy.cuh"

struct NoBiasGradient {
  __device__ __forceinline__ void add(u32, u32) {}
  __device__ __forceinline__ void end() {}
};

// Where a tile is: its batch, query head, first row and first key.
struct ScoreTilePlace {
  int batch, head, row, key;

  __device__ __forceinline__ explicit ScoreTilePlace(u32 about)
      : batch(load_shared_word(about + 32)),
        head(load_shared_word(about + 28)),
        row(load_shared_word(about + 24)),
        key(load_shared_word(about + 36)) {}
};

// dbias: [batches, heads_q, seqlen_q, seqlen_k], seqlen_k a multiple of 4, zeros where nobody comes.
// Two batches may share one: from zeros, two numbers have the same sum in either order. A warp has 32 keys and
// eight queries at a time; the rows of its four matrices are keys in an order that leaves a lane
// with four neighbours:
//
//   row r of matrix m     key 16 * (m / 2) + 4 * (r / 2) + 2 * (m % 2) + r % 2
//   lane (g, t)           query g, keys 4t .. 4t + 3, of each 16
template <typename T, typename DSTile>
struct BiasRows {
  T* dbias;
  int heads_q, seqlen_q, seqlen_k;
  bool shared;  // by two batches

  __device__ __forceinline__ void add(u32 about, u32 ds_tile) const {
    const int lane = thread_index_again() % WARP_SIZE, warp = thread_index_again() / WARP_SIZE % 4;
    const int r = lane % 8, matrix = lane / 8;
    const int from = warp * 32 + matrix / 2 * 16 + r / 2 * 4 + matrix % 2 * 2 + r % 2;
    const ScoreTilePlace at(about);
    const int row = at.row + lane / 4, key = at.key + warp * 32 + lane % 4 * 4;
    const i64 batch = shared ? 0 : at.batch;
    T* to = dbias + ((batch * heads_q + at.head) * seqlen_q + row) * seqlen_k;
#pragma unroll 2
    for (int chunk = 0; chunk < DSTile::COLUMNS / 8; ++chunk) {
      u32 ds[4];
      ldmatrix_x4_trans(
          ds, ds_tile + chunk / 8 * DSTile::PANEL_BYTES + DSTile::offset(from, chunk % 8));
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (row + chunk * 8 < seqlen_q && key + half * 16 < seqlen_k) {
          const uint2 four = make_uint2(ds[2 * half], ds[2 * half + 1]);
          if (shared)
            red_add_halves(to + key + half * 16, four);
          else
            *reinterpret_cast<uint2*>(to + key + half * 16) = four;
        }
      to += static_cast<i64>(8) * seqlen_k;
    }
  }
  __device__ __forceinline__ void end() {}
};

// dbias_parts: [batch, heads_q, seqlen_k]. A thread has a key, whose chunks it reads beginning with
// one of its own, so that neighbours meet different banks.
template <typename T, typename DSTile>
struct BiasSums {
  float* dbias_parts;
  int heads_q, seqlen_k;
  int end_key = 0;  // behind this thread's key, 0 before the first tile
  i64 place = 0;    // the head
  float sum = 0.f;

  __device__ __forceinline__ BiasSums(float* parts, int heads, int keys)
      : dbias_parts(parts), heads_q(heads), seqlen_k(keys) {}

  __device__ __forceinline__ void add(u32 about, u32 ds_tile) {
    const int key = thread_index_again() % DSTile::ROWS;
    const ScoreTilePlace at(about);
    const i64 row = static_cast<i64>(at.batch) * heads_q + at.head;
    if (row != place) end();
    place = row, end_key = at.key + key + 1;
#pragma unroll
    for (int panel = 0; panel < DSTile::PANELS; ++panel)
#pragma unroll 2
      for (int chunk = 0; chunk < 8; ++chunk) {
        const uint4 some = load_shared_chunk(ds_tile + panel * DSTile::PANEL_BYTES +
                                             key * DSTile::ROW_BYTES + (chunk + key) % 8 * 16);
        const u32 pairs[4] = {some.x, some.y, some.z, some.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 two = unpack2<T>(pairs[i]);
          sum += two.x + two.y;
        }
      }
  }
  // Of a head: its sums, where there is such a key.
  __device__ __forceinline__ void end() {
    if (end_key > 0 && end_key <= seqlen_k) dbias_parts[place * seqlen_k + end_key - 1] = sum;
    sum = 0.f, end_key = 0;
  }
};
