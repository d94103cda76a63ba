// Rows of codes on the way into and out of attention by wgmma: where tiles of bytes lie in shared memory,
// how V^T comes there with the scales of its columns, and what becomes of a warp's rows in the end.
#pragma once
#include "ptx/bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma_bytes.cuh"
#include "tile/ring.cuh"
#include "tile/swizzle.cuh"
#include "attention/mma.cuh"
#include "attention/packed_codes.cuh"
#include "attention/sm90/products.cuh"
#include "attention/sm90/span.cuh"

// ROWS rows of BYTES codes in panels as wide as a swizzle: a row of a panel has 128, 64 or 32 bytes.
template <int ROWS_, int BYTES_>
struct CodeTile {
  static constexpr int ROWS = ROWS_;
  static constexpr int PANEL_COLUMNS = BYTES_ % 128 == 0 ? 128 : BYTES_ % 64 == 0 ? 64 : 32;
  static constexpr int PANELS = BYTES_ / PANEL_COLUMNS, PANEL_BYTES = ROWS * PANEL_COLUMNS;
  static constexpr int ROW_BYTES = PANEL_COLUMNS, BYTES = ROWS * BYTES_;
  static constexpr int CHUNKS = ROW_BYTES / 16;
  static_assert(BYTES_ % 32 == 0 && ROWS % 8 == 0, "whole products, whole swizzles");

  // Descriptor of the k-th 32 columns, in units of 16 bytes from that of the first.
  static constexpr int step(int k) {
    return (k * 32 / PANEL_COLUMNS * PANEL_BYTES + k * 32 % PANEL_COLUMNS) >> 4;
  }
  __device__ static __forceinline__ u64 operand(u32 address) {
    return wgmma_bytes_tile<PANEL_COLUMNS>(address);
  }
};

// V^T in codes, or V in 16 bits.
template <bool CODES, int BLOCK_K, int HEAD_DIM>
struct ValueTile : CodeTile<HEAD_DIM, BLOCK_K> {};
template <int BLOCK_K, int HEAD_DIM>
struct ValueTile<false, BLOCK_K, HEAD_DIM> : SwizzledTile<BLOCK_K, HEAD_DIM> {
  __device__ static __forceinline__ u64 operand(u32 address) {
    return wgmma_tile(address, SwizzledTile<BLOCK_K, HEAD_DIM>::PANEL_BYTES);
  }
};

// Rings of Q, K and V, each warp's staged output or (ASIDE) its sums in fp32, barriers.
template <int BLOCK_Q_, int BLOCK_K_, int HEAD_DIM, bool V_CODES, bool ASIDE, int Q_STAGES_,
          int STAGES_, int GUARD>
struct CodeRings {
  static constexpr int BLOCK_Q = BLOCK_Q_, BLOCK_K = BLOCK_K_, COLUMNS = HEAD_DIM;
  static constexpr int Q_STAGES = Q_STAGES_, STAGES = STAGES_;
  static constexpr int K_STAGES = STAGES, V_STAGES = STAGES, SCORE_STAGES = 1;
  using QTile = CodeTile<BLOCK_Q, HEAD_DIM>;
  using KTile = CodeTile<BLOCK_K, HEAD_DIM>;
  using VTile = ValueTile<V_CODES, BLOCK_K, HEAD_DIM>;
  using OTile = SwizzledTile<16, HEAD_DIM>;  // of a warp
  static constexpr int O_WARP = 16 * HEAD_DIM * (ASIDE ? 4 : 2);

  static constexpr int Q_STAGE = QTile::BYTES + GUARD, K_STAGE = KTile::BYTES + GUARD;
  static constexpr int V_SCALES = VTile::BYTES;  // of a stage: scales of columns come with a tile
  static constexpr int V_STAGE = VTile::BYTES + (V_CODES ? 1024 : 0) + GUARD;
  static constexpr int K = Q_STAGES * Q_STAGE, V = K + K_STAGES * K_STAGE;
  static constexpr int O = V + V_STAGES * V_STAGE, BARRIERS = O + BLOCK_Q / 16 * O_WARP + GUARD;
};

// Where a ring stands after `count` steps: ring_place of numbers that are not negative.
template <int SIZE>
__device__ __forceinline__ RingPlace<SIZE> place_of(int count) {
  return {static_cast<int>(static_cast<u32>(count) % SIZE),
          static_cast<int>(static_cast<u32>(count) / SIZE % 2)};
}

// Which keys a tile of queries sees: a band of those there are.
template <int BLOCK_Q, int BLOCK_K, bool PACKED>
struct BandSpan;
template <int BLOCK_Q, int BLOCK_K, bool PACKED>
struct SpanOf<BandSpan<BLOCK_Q, BLOCK_K, PACKED>> {
  static constexpr bool PAGED = false, PARTED = false;
  const int *cu_seqlens_q, *cu_seqlens_k;
  int max_seqlen_q, max_seqlen_k, left, right;

  __device__ __forceinline__ FormSpan<BLOCK_Q, BLOCK_K, PACKED> operator()(
      const WorkItem<BLOCK_Q>& place) const {
    return {place.q0, SequenceRows<PACKED>(cu_seqlens_q, place.batch, max_seqlen_q),
            SequenceRows<PACKED>(cu_seqlens_k, place.batch, max_seqlen_k), left, right};
  }
};

// A tile of V^T from place `key` on, and with the last one `more` bytes of scales of columns. Of a whole
// warp the lane that `asks`, or one thread.
template <typename Rings, typename Barriers, typename Place>
__device__ __forceinline__ void load_code_values(const Barriers& barriers, Place& place, u32 shared,
                                                 bool asks, const TensorMap& map, int key, int head,
                                                 int batch, const float* scales, int more) {
  using VTile = typename Rings::VTile;
  const u32 full = barriers.v_full(place.stage);
  const u32 to = shared + Rings::V + place.stage * Rings::V_STAGE;
  mbarrier_wait(barriers.v_empty(place.stage), place.parity ^ 1);
  place.advance();
  if (!asks) {
    mbarrier_arrive(full);
    return;
  }
  mbarrier_expect(full, VTile::BYTES + more);
  if (more > 0) bulk_load(to + Rings::V_SCALES, scales, more, full);
#pragma unroll
  for (int panel = 0; panel < VTile::PANELS; ++panel)
    tma_load(to + panel * VTile::PANEL_BYTES, map, full, key + panel * VTile::PANEL_COLUMNS, 0,
             head, batch);
}

// Scales of this lane's two rows, those behind the last one as the last one's.
__device__ __forceinline__ void load_row_scales(float (&of_rows)[2], const float* scales, int row,
                                                int last, float by) {
#pragma unroll
  for (int half = 0; half < 2; ++half) of_rows[half] = by * scales[min(row + 8 * half, last)];
}

// What a warp's 16 rows are multiplied by at the end, and their lse, if anyone wants it, from place
// `first` on: of the keys with their mean, which `shift` gives back.
template <typename Softmax>
__device__ __forceinline__ void finish_coded_rows(float (&inverse)[2], const Softmax& softmax,
                                                  int lane, int rows_left, float* lse,
                                                  const float* shift, i64 first,
                                                  float softmax_scale) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = quad_sum(softmax.row_sum[half]);
    const int row = lane / 4 + half * 8;
    inverse[half] = sum == 0.f ? 0.f : 1.f / sum;
    if (lse == nullptr || lane % 4 > 0 || row >= rows_left) continue;
    const float shifted = shift == nullptr ? 0.f : shift[first + row] * softmax_scale;
    lse[first + row] = softmax.lse(half, sum) + shifted;
  }
}

// Columns of the output times scales of their own, which are in shared memory; what lies behind
// `columns` (a multiple of eight) is nobody's.
template <int COLUMNS>
__device__ __forceinline__ void scale_columns(float (&acc)[1][COLUMNS][4], u32 scales, int columns,
                                              int lane) {
#pragma unroll
  for (int n = 0; n < COLUMNS; ++n) {
    const u32 at = scales + (min(n * 8, columns - 8) + lane % 4 * 2) * 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float by = __uint_as_float(load_shared_word(at + i * 4));
      acc[0][n][i] *= by, acc[0][n][i + 2] *= by;
    }
  }
}
