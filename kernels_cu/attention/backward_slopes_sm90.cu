/* What rows of queries add to the gradient of their head's ALiBi slope, on sm_90 (sm_90a): TMA and
   wgmma. backward_sm90.cu makes all other gradients; with keys as rows it has no sums over a row.

     dalibi_rows[row] = -sum over keys of dS * distance      dS = P (dP - delta)

   with the correction of DistanceSum (attention/backward/features.cuh). A block owns 128 queries of
   a head, 64 for each of two warpgroups, and walks over the keys that they see:

     for each tile:   S = Q K^T, dP = dO V^T      issued together
                      final scores                 while dP is multiplied
                      sums of a row                a lane has parts of two rows

   A thread of a third one loads: Q and dO once, K and V two tiles ahead. Nobody else has these rows, so the
   result is the same at every call. These are two products beside the five of backward_sm90.cu; the
   portable kernels make seven. */
#include "prelude.cuh"
#include "ptx/elect.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/register_fence.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/ring.cuh"
#include "tile/tma_tile.cuh"
#include "attention/query_block.cuh"
#include "attention/backward_sm90/distances.cuh"
#include "attention/backward_sm90/tensor_rows.cuh"
#include "attention/sm90/products.cuh"
#include "attention/sm90/rings.cuh"

using elem_t = ${dtype};
constexpr int HEAD_DIM = ${head_dim};  // of all arrays, padded with zeros; of tiles whole panels
constexpr int GUARD = ${guard};        // bytes between tiles: 0 except where memory is checked
using bias_t = ${bias_dtype};
constexpr bool VARLEN = ${varlen};                            // packed sequences
constexpr bool BIAS = ${bias}, BIAS_PAIRED = ${bias_paired};  // paired: see attention/score.cuh
constexpr bool MASK = ${mask}, MASK_PAIRED = ${mask_paired};

constexpr int BLOCK_Q = 128, BLOCK_K = 128, STAGES = 2, WARPGROUP = 128;
constexpr int CONSUMERS = 2 * WARPGROUP, THREADS = CONSUMERS + WARPGROUP;
constexpr int STEPS = HEAD_DIM / 16;

static_assert(${alibi}, "there is a slope");
static_assert(BLOCK_Q <= RAGGED_ROWS && BLOCK_K <= RAGGED_ROWS, "rows of a box");

// The second tile of Q is dO.
using Rings = AttentionRings<BLOCK_Q, BLOCK_K, HEAD_DIM, HEAD_DIM, 2, STAGES, STAGES, GUARD>;

struct SlopeBarriers {
  u32 base;
  __device__ __forceinline__ u32 queries() const { return base; }
  __device__ __forceinline__ u32 full(int stage) const { return base + 8 + stage * 8; }
  __device__ __forceinline__ u32 empty(int stage) const { return base + 8 + (STAGES + stage) * 8; }

  __device__ __forceinline__ void init() const {
    mbarrier_init(queries(), 2);  // Q and dO
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(full(stage), 2);  // K and V
      mbarrier_init(empty(stage), CONSUMERS / WARP_SIZE);
    }
    mbarrier_init_fence();
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_backward_slopes_sm90(
    const __grid_constant__ TensorMap q_map,     // q, dout [batch, heads_q, seqlen_q, head_dim],
    const __grid_constant__ TensorMap dout_map,  // k, v [batch, heads_kv, seqlen_k, head_dim]: all
    const __grid_constant__ TensorMap k_map,     // in boxes of 128 rows and 64 columns; packed as
    const __grid_constant__ TensorMap v_map,     // attention/backward_sm90/tensor_rows.cuh says
    // Null where the form has no such thing.
    const int* __restrict__ cu_seqlens_q,     // [batch + 1]
    const int* __restrict__ cu_seqlens_k,     // [batch + 1]
    const float* __restrict__ alibi_slopes,   // [batch or 1, heads_q]
    const bias_t* __restrict__ bias,          // [batch, heads_q, seqlen_q, seqlen_k], broadcast
    const u8* __restrict__ mask,              // the same; 0 hides the key
    const float* __restrict__ dlse,           // as lse of the forward; or null
    const float* __restrict__ lse_log2,       // [batch, heads_q, rows_padded] or packed, see
    const float* __restrict__ delta,          //   attention/backward/padded_rows.cuh
    float* __restrict__ dalibi_rows,          // the same
    const int heads_q, const int group_size,  // query heads a KV head
    const int max_seqlen_q, const int max_seqlen_k, const AttentionForm form, const int rows_padded,
    const float softmax_scale) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 shared = shared_address(shared_memory);
  const SlopeBarriers barriers{shared + Rings::BARRIERS};
  const QueryBlock<BLOCK_Q> place(blockIdx.x, max_seqlen_q, heads_q);
  const SequenceRows<VARLEN> queries(cu_seqlens_q, place.batch, max_seqlen_q);
  const SequenceRows<VARLEN> keys(cu_seqlens_k, place.batch, max_seqlen_k);
  const int q0 = place.q0;
  if (VARLEN && q0 >= queries.length) return;
  const KeyBand band(queries.length, keys.length, form.window_left, form.window_right);
  const BandTiles<BLOCK_K> tiles(band, q0, min(q0 + BLOCK_Q, queries.length) - 1);

  if (threadIdx.x == 0) barriers.init();
  __syncthreads();
  RingPlace<STAGES> ring;
  if (threadIdx.x >= CONSUMERS) {
    // ---- tiles
    fewer_registers<24>();
    const int warp = __shfl_sync(FULL_MASK, threadIdx.x / WARP_SIZE, 0);
    if (warp > CONSUMERS / WARP_SIZE || tiles.first >= tiles.end || !elect_one()) return;
    const TensorRows<VARLEN> rows(queries.start + q0, VARLEN ? queries.length - q0 : place.batch);
    tma_load_tile<Rings::QTile>(shared, q_map, barriers.queries(), rows.row, place.head,
                                rows.batch);
    tma_load_tile<Rings::QTile>(shared + Rings::Q_STAGE, dout_map, barriers.queries(), rows.row,
                                place.head, rows.batch);
    for (int tile = tiles.first; tile < tiles.end; ++tile, ring.advance()) {
      const int k0 = tile * BLOCK_K;
      const TensorRows<VARLEN> from(keys.start + k0, VARLEN ? keys.length - k0 : place.batch);
      mbarrier_wait(barriers.empty(ring.stage), ring.parity ^ 1);
      tma_load_tile<Rings::KTile>(shared + Rings::K + ring.stage * Rings::K_STAGE, k_map,
                                  barriers.full(ring.stage), from.row, place.head / group_size,
                                  from.batch);
      tma_load_tile<Rings::VTile>(shared + Rings::V + ring.stage * Rings::V_STAGE, v_map,
                                  barriers.full(ring.stage), from.row, place.head / group_size,
                                  from.batch);
    }
    return;
  }

  // ---- sums of 64 queries a warpgroup, 16 a warp
  more_registers<240>();
  const int lane = threadIdx.x % WARP_SIZE;
  const int warpgroup = __shfl_sync(FULL_MASK, threadIdx.x / WARPGROUP, 0);
  const int row = q0 + threadIdx.x / WARP_SIZE * 16;  // the warp's first
  const i64 head_row =
      first_padded_row<VARLEN>(place.batch, place.head, heads_q, rows_padded, queries.start);
  const RowStatistics<1> statistics(lse_log2, delta, head_row + row, lane);
  auto rules =
      score_rules(Alibi(alibi_slopes, form.alibi_batch_stride, place.batch, place.head,
                        queries.length, keys.length),
                  RuleIf<BIAS, Bias<bias_t, BIAS_PAIRED>>(bias, form.bias, place.batch, place.head,
                                                          queries.length, keys.length),
                  RuleIf<MASK, Where<u8, MASK_PAIRED>>(mask, form.mask, place.batch, place.head,
                                                       queries.length, keys.length),
                  band);
  const u64 q_operand = wgmma_tile(shared + warpgroup * 64 * Rings::QTile::ROW_BYTES, 0);
  const u64 k_operand = wgmma_tile(shared + Rings::K, 0);
  const u64 v_operand = wgmma_tile(shared + Rings::V, 0);
  DistanceSum sums[1][2];
  if (tiles.first < tiles.end) mbarrier_wait(barriers.queries(), 0);
  for (int tile = tiles.first; tile < tiles.end; ++tile) {
    float s[1][BLOCK_K / 8][4], dp[1][BLOCK_K / 8][4];
    mbarrier_wait(barriers.full(ring.stage), ring.parity);
    wgmma_fence();
    issue_qk<elem_t, Rings, STEPS>(s, q_operand, k_operand + ring.stage * (Rings::K_STAGE >> 4));
    issue_qk<elem_t, Rings, STEPS>(dp, q_operand + (Rings::Q_STAGE >> 4),
                                   v_operand + ring.stage * (Rings::V_STAGE >> 4));
    wgmma_wait<1>();
    register_fence(s[0]);
    rules_on_fragments(s, lane, rules, softmax_scale, row, tile * BLOCK_K);
    wgmma_wait<0>();
    register_fence(dp[0]);
    __syncwarp();
    release(ring, barriers.empty(ring.stage), lane == 0);
    add_distances(sums, s, dp, statistics, lane, row + keys.length - queries.length,
                  tile * BLOCK_K);
  }
  const float* row_dlse = dlse;
  if (dlse != nullptr)
    row_dlse += VARLEN
                    ? static_cast<i64>(place.head) * form.total_q + queries.start + row
                    : (static_cast<i64>(place.batch) * heads_q + place.head) * queries.length + row;
  store_distances(dalibi_rows + head_row + row, sums, statistics, row_dlse, queries.length - row);
}
