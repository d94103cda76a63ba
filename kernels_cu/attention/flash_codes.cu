/* Attention forward on codes, by mma.sync: attention/flash.cu with Q and K of int8 or e4m3, and V of 16
   bits, e4m3 or e5m2.

   o = softmax(softmax_scale * q k^T + mask) v         q, k = codes * scales

   A row of Q has a scale, and so have SCALE_KEYS keys of a head, and a column of V. Both come to the
   scores, which are those of flash.cu from there on: tiles from the last to the first, online softmax,
   a band of keys where a tile has an end of it.

     V of 16 bits    P is rounded to 16 bits, and V is as the caller has it
     V of 8 bits     V^T [head_dim_v, keys] lies with its keys in the order of attention/codes.cuh. P is
                     e4m3 up to 256; PROMOTE: sums of so many keys are added up in fp32. Or P is
                     fp16, and V becomes fp16 on the way: Hopper's mma.sync has no e4m3 of its own

   K may have lost its mean over all keys, which changes no probability: the same number is missing in
   all scores of a row, and `shift` gives it back to the lse.

   PACKED: sequences one behind the other, in codes as attention/packed_codes.cuh has them.

   Source: Zhang et al., "SageAttention2" (2024); Shah et al., "FlashAttention-3" (2024). */
#include "prelude.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"
#include "attention/codes.cuh"
#include "attention/features.cuh"
#include "attention/mma.cuh"
#include "attention/packed_codes.cuh"
#include "attention/query_block.cuh"

using elem_t = ${dtype};     // of o, and of V that is no codes
using pair_t = ${pair};      // two codes of Q and K: i8_pair, e4m3_pair
using v_pair_t = ${v_pair};  // of P and V: e4m3_pair, e4m3_e5m2
constexpr bool V_CODES = ${v_codes}, P_CODES = ${p_codes}, E5M2 = ${e5m2};  // V is
constexpr int BLOCK_Q = ${block_q};                                         // query rows of a block
constexpr int BLOCK_K = ${block_k};                                         // keys of a tile
constexpr int NUM_WARPS = ${num_warps};
constexpr int HEAD_DIM = ${head_dim};  // of q, k, v and o, padded with zeros
// Keys of a tile whose scores are in registers at a time; Blackwell's code has room for fewer.
constexpr int SCORE_KEYS = ${score_keys} < BLOCK_K && __CUDA_ARCH__ >= 1000 ? 16 : ${score_keys};
constexpr int SCALE_KEYS = ${scale_keys};
constexpr int PROMOTE = ${promote};  // keys whose sum is made apart, or 0
constexpr bool PACKED = ${packed};   // sequences
constexpr int GUARD = ${guard};      // bytes between tiles: 0 except where memory is checked

constexpr int THREADS = NUM_WARPS * WARP_SIZE, STAGES = 2;
constexpr int ROWS_A_WARP = BLOCK_Q / NUM_WARPS, M_BLOCKS = ROWS_A_WARP / 16;
constexpr int QK_STEPS = HEAD_DIM / 32;
constexpr bool Q_IN_REGISTERS = M_BLOCKS == 1 && HEAD_DIM <= 128;
static_assert(SCALE_KEYS % BLOCK_K == 0, "a tile of keys has one scale");
static_assert(SCALE_KEYS == 1 << SCALE_KEYS_LOG2, "packed sequences begin with a scale");
static_assert(SCORE_KEYS == BLOCK_K || !V_CODES, "keys of V^T are columns, which are swizzled");
static_assert(!V_CODES || BLOCK_K % 64 == 0, "rows of V^T in shared memory have 64 bytes");
static_assert(PROMOTE == 0 || BLOCK_K % PROMOTE == 0, "whole sums in a tile");

using QTile = SwizzledTile<BLOCK_Q, HEAD_DIM / 2>;  // of pairs
using KTile = SwizzledTile<BLOCK_K, HEAD_DIM / 2>;
using VTile = SwizzledTile<V_CODES ? HEAD_DIM : BLOCK_K, V_CODES ? BLOCK_K / 2 : HEAD_DIM>;
using OTile = SwizzledTile<BLOCK_Q, HEAD_DIM>;  // where Q was
constexpr int V_OFFSET = KTile::BYTES + GUARD;  // in a stage
constexpr int STAGE_BYTES = V_OFFSET + VTile::BYTES + GUARD;

using QReader = RowReader<QTile>;
using KReader = ColumnReader<KTile>;
using VReader = FragmentReader<VTile, V_CODES ? BlockOrder::COL_MAJOR : BlockOrder::ROW_MAJOR>;

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_flash_codes(
    //% if packed
    // Packed: q and k have one batch, of total_q and total_k rows a head, and so have k_scales, q_scales,
    // codes of v, shift and lse; o is [total_q, heads_q, head_dim_v], a v that is no codes alike.
    const int* __restrict__ cu_seqlens_q,  // [batch + 1]
    const int* __restrict__ cu_seqlens_k,  // [batch + 1]
    //% endif
    const u8* __restrict__ q,            // [batch, heads_q, seqlen_q, head_dim] codes, no gaps
    const u8* __restrict__ k,            // [batch, heads_kv, seqlen_k, head_dim] codes, no gaps
    const float* __restrict__ q_scales,  // [batch, heads_q, seqlen_q]
    const float* __restrict__ k_scales,  // [batch, heads_kv, v_keys / SCALE_KEYS]
    //% if v_codes
    const u8* __restrict__ v,            // [batch, heads_kv, head_dim_v, v_keys] codes, no gaps
    const float* __restrict__ v_scales,  // [batch, heads_kv, head_dim_v]
    //% else
    const elem_t* __restrict__ v,  // [batch, heads_kv, seqlen_k, head_dim_v]
    //% endif
    const float* __restrict__ shift,  // [batch, heads_q, seqlen_q], or null
    elem_t* __restrict__ o,           // [batch, heads_q, seqlen_q, head_dim_v]
    float* __restrict__ lse,          // [batch, heads_q, seqlen_q], or null
    const Strides v_strides,          // of V that is no codes
    //% if packed
    const int total_q, const int total_k,
    //% endif
    const int v_keys,  // places of a head's keys: a multiple of 64, zeros behind the last
    const Strides o_strides, const int heads_q, const int group_size,  // query heads a KV head
    const int max_seqlen_q, const int max_seqlen_k,
    const int head_dim,                             // a multiple of 16
    const int head_dim_v,                           // a multiple of 8
    const int window_left, const int window_right,  // keys before and behind its own a query sees
    const float softmax_scale) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 q_tile = shared_address(shared_memory), ring = q_tile + OTile::BYTES + GUARD;
  const u32 q_scale = ring + STAGES * STAGE_BYTES;  // [BLOCK_Q] floats
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  const QueryBlock<BLOCK_Q> place(blockIdx.x, max_seqlen_q, heads_q);
  //% if packed
  const SequenceRows<true> queries(cu_seqlens_q, place.batch, max_seqlen_q);
  const SequenceRows<true> held(cu_seqlens_k, place.batch, max_seqlen_k);
  const int first_key = first_place<true>(cu_seqlens_k, place.batch), batch = 0;
  if (place.q0 >= queries.length) return;
  //% else
  const SequenceRows<false> queries(0, max_seqlen_q), held(0, max_seqlen_k);
  const int total_q = max_seqlen_q, total_k = max_seqlen_k, first_key = 0, batch = place.batch;
  //% endif
  const int seqlen_q = queries.length, seqlen_k = held.length;
  const int q0 = place.q0, warp_q0 = q0 + warp * ROWS_A_WARP;
  const int heads_kv = heads_q / group_size, kv_head = place.head / group_size;
  const i64 query_head = static_cast<i64>(batch) * heads_q + place.head;
  const i64 key_head = static_cast<i64>(batch) * heads_kv + kv_head;
  const i64 first_row = query_head * total_q + queries.start;
  const pair_t* const q_rows = reinterpret_cast<const pair_t*>(q + (first_row + q0) * head_dim);
  const pair_t* const k_rows =
      reinterpret_cast<const pair_t*>(k + (key_head * total_k + held.start) * head_dim);
  k_scales += (key_head * v_keys + first_key) / SCALE_KEYS;
  //% if v_codes
  const pair_t* const v_rows =
      reinterpret_cast<const pair_t*>(v + key_head * head_dim_v * v_keys + first_key);
  //% else
  v += batch * v_strides.batch + kv_head * v_strides.head + held.start * v_strides.row;
  //% endif

  KeyBand band(seqlen_q, seqlen_k, window_left, window_right);
  const BandTiles<BLOCK_K> tiles(band, q0, min(q0 + BLOCK_Q, seqlen_q) - 1);
  const int first_tile = tiles.first;
  int tile = tiles.end - 1;
  const auto fetch = [&](int t) {
    const u32 stage = ring + (t % STAGES) * STAGE_BYTES;
    const i64 key = static_cast<i64>(t) * BLOCK_K;
    const int keys_left = seqlen_k - t * BLOCK_K;
    copy_tile<KTile, THREADS, true>(stage, k_rows + key * (head_dim / 2), head_dim / 2, keys_left,
                                    head_dim / 2);
    //% if v_codes
    copy_tile<VTile, THREADS, true>(stage + V_OFFSET, v_rows + key / 2, v_keys / 2, head_dim_v,
                                    (v_keys - first_key) / 2 - t * (BLOCK_K / 2));
    //% else
    copy_tile<VTile, THREADS, true>(stage + V_OFFSET, v + key * v_strides.row, v_strides.row,
                                    keys_left, head_dim_v);
    //% endif
  };

  // 1. Q and the first tile are on their way; scales of this lane's rows.
  copy_tile<QTile, THREADS, true>(q_tile, q_rows, head_dim / 2, seqlen_q - q0, head_dim / 2);
  if (tile >= first_tile) fetch(tile);
  cp_async_commit();
  // A negative scale would turn maxima into minima: its sign goes into Q, or into the sums.
  if (threadIdx.x < BLOCK_Q) {
    const int row = min(q0 + static_cast<int>(threadIdx.x), seqlen_q - 1);
    const float by = copysignf(q_scales[first_row + row], V_CODES ? softmax_scale : 1.f);
    store_shared_word(q_scale + threadIdx.x * 4, __float_as_uint(by));
  }
  const float scale_log2 = fabsf(softmax_scale) * LOG2E;

  const QReader q_reader(lane);
  const KReader k_reader(lane);
  const VReader v_reader(lane);
  const u32 lane_scales = q_scale + (warp * ROWS_A_WARP + lane / 4) * 4;
  const u32 warp_q_tile = q_tile + warp * ROWS_A_WARP * QTile::ROW_BYTES;
  u32 q_fragments[QK_STEPS][M_BLOCKS][4];
  //% if v_codes
  OnlineSoftmax<M_BLOCKS, false, P_CODES ? 0 : 8> softmax;
  //% else
  FoldedSoftmax<M_BLOCKS, 0> softmax;  // there are registers for scales in it
  //% endif
  float acc[M_BLOCKS][HEAD_DIM / 8][4] = {};
  if (Q_IN_REGISTERS) {
    cp_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int step = 0; step < QK_STEPS; ++step)
#pragma unroll
      for (int m = 0; m < M_BLOCKS; ++m)
        ldmatrix_x4(q_fragments[step][m], q_reader.address(warp_q_tile, m, step));
  }

  for (; tile >= first_tile; --tile) {
    // 2. This tile has arrived, and every warp is done with the one before: its stage is free.
    const float k_scale = k_scales[tile / (SCALE_KEYS / BLOCK_K)];
    cp_async_wait<0>();
    __syncthreads();
    if (tile > first_tile) fetch(tile - 1);
    cp_async_commit();
    const u32 stage = ring + (tile % STAGES) * STAGE_BYTES;

#pragma unroll 1
    for (int key = BLOCK_K - SCORE_KEYS; key >= 0; key -= SCORE_KEYS) {
      const u32 k_tile = stage + key * KTile::ROW_BYTES;
      float s[M_BLOCKS][SCORE_KEYS / 8][4];
      begin_scores<pair_t>(s);
      if (SCORE_KEYS < BLOCK_K)
        multiply_qk_step_by_step<pair_t, QK_STEPS>(s, warp_q_tile, q_reader, k_tile, k_reader);
      else
        multiply_qk<pair_t, 16, Q_IN_REGISTERS>(s, q_fragments, warp_q_tile, q_reader, k_tile,
                                                k_reader);
      //% if v_codes
      scale_scores<pair_t>(s, lane_scales, k_scale);
      //% else
      if (softmax_scale < 0.f) negate_sums<pair_t>(s);
      take_scales<pair_t>(softmax, lane_scales, k_scale * scale_log2);
      //% endif
      if (!tiles.is_whole(tile))
        rules_on_fragments(s, lane, band, 1.f, warp_q0, tile * BLOCK_K + key);

      float correction[M_BLOCKS][2];
      //% if v_codes
      if (softmax.raise_max(s, scale_log2, correction)) scale_rows(acc, correction);
      //% else
      if (softmax.raise_max(s, correction)) scale_rows(acc, correction);
      //% endif
      //% if p_codes
      u32 p[BLOCK_K / 32][M_BLOCKS][4];
      probabilities_e4m3(p, s, softmax, scale_log2);
      multiply_pv_e4m3<v_pair_t, PROMOTE>(acc, p, stage + V_OFFSET, v_reader);
      //% elif v_codes
      multiply_pv_fp16<E5M2>(acc, s, softmax, scale_log2, stage + V_OFFSET, v_reader);
      //% else
      multiply_pv_half<elem_t, (SCORE_KEYS < BLOCK_K)>(
          acc, s, softmax, stage + V_OFFSET + key * VTile::ROW_BYTES, v_reader);
      //% endif
    }
  }

  // 3. Normalise; the output is staged over Q, where other warps' codes are, too. The block's place is
  //    computed again rather than kept in registers through the loop.
  cp_async_wait<0>();
  __syncthreads();
  const QueryBlock<BLOCK_Q> again(block_index_again(), max_seqlen_q, heads_q);
  //% if v_codes
  const i64 v_head =
      static_cast<i64>(again.batch) * (heads_q / group_size) + again.head / group_size;
  const int scaled = max_seqlen_k > 0 ? head_dim_v : 0;  // no keys, no scales
  scale_columns(acc, v_scales + v_head * head_dim_v, scaled, thread_index_again() % WARP_SIZE);
  //% endif
  //% if packed
  const SequenceRows<true> mine(cu_seqlens_q, again.batch, max_seqlen_q);
  const int length = mine.length, of_head = total_q, end_batch = 0;
  //% else
  const SequenceRows<false> mine(0, max_seqlen_q);
  const int length = max_seqlen_q, of_head = max_seqlen_q, end_batch = again.batch;
  //% endif
  const int end_lane = thread_index_again() % WARP_SIZE;
  const int warp_row = thread_index_again() / WARP_SIZE * ROWS_A_WARP, row0 = again.q0 + warp_row;
  const int rows_left = min(ROWS_A_WARP, length - row0);
  const u32 warp_o_tile = shared_address(shared_memory) + warp_row * OTile::ROW_BYTES;
  const i64 head_row = (static_cast<i64>(end_batch) * heads_q + again.head) * of_head;
  const i64 lse_row = head_row + mine.start + row0;
  finish_rows<elem_t, OTile>(acc, softmax, scale_log2, end_lane, warp_o_tile,
                             lse == nullptr ? nullptr : lse + lse_row, rows_left);
  if (lse != nullptr && shift != nullptr)
    shift_lse<M_BLOCKS>(lse + lse_row, shift + lse_row, softmax_scale, end_lane, rows_left);
  __syncwarp();
  o += end_batch * o_strides.batch + again.head * o_strides.head +
       (mine.start + row0) * o_strides.row;
  store_tile<OTile, ROWS_A_WARP, true>(o, o_strides.row, warp_o_tile, end_lane, rows_left,
                                       head_dim_v);
}
