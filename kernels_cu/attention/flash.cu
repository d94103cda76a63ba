/* Attention forward, one pass over the keys, on tensor cores (mma.sync; sm_80 and newer).

   o = softmax(softmax_scale * q k^T + causal mask) v         lse = log(sum(exp(scores)))

   A block owns BLOCK_Q query rows of one head and walks over the keys in tiles of BLOCK_K, from the
   last tile to the first, so that the tiles which need a mask (ragged end, causal diagonal) come
   first and the rest of the loop has none. Each warp owns ROWS_A_WARP rows: its scores, its
   probabilities and its output never leave its registers.

     for each tile:   S  = Q K^T                       mma, K by ldmatrix
                      m' = max(m, rowmax S)            quad shuffles
                      P  = exp2(S * c - m' * c)        FMA + ex2; rounded to 16 bits in place
                      O  = O * exp2((m - m') * c) + P V     the rescaling almost never runs
     at the end:      o  = O / rowsum P,  lse = (m * c + log2(rowsum P)) * ln(2)

   with c = softmax_scale * log2(e). K and V travel through a ring of STAGES tiles filled by
   cp.async: while one tile is being multiplied the next is on its way, and one barrier a tile keeps
   the ring.

   Two 16-row blocks a warp (ROWS_A_WARP = 32) use every K and V fragment twice. With one, an SM's
   four quadrants would each load a 16x16 fragment, 4 cycles of shared-memory bandwidth apiece and
   16 together, for two products that keep a quadrant's tensor core busy for 8 cycles at sm_90's
   peak, 16 on A100: sm_90 would be bound by shared memory, A100 just balanced.

   Forms of attention (attention/features.cuh) are rendered in: a band of keys in place of the
   causal mask, rules for the scores (attention/score.cuh), which are final ones in natural units then,
   sinks, packed sequences, keys in pages (k and v [pages, heads_kv, page tokens, dim], see
   attention/pages.cuh). A kernel without is what it would be if there were none.

   Head dimensions above 256: a block makes HEAD_DIM_V columns of the output, V_PARTS neighbours all
   of them, each with scores of its own.

   Source: Dao, "FlashAttention-2" (2023), for the algorithm. */
#include "prelude.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"
#include "attention/mma.cuh"
#include "attention/query_block.cuh"
//% if resumed
#include "attention/row_state.cuh"
//% endif
//% if form
#include "attention/features.cuh"
//% if paged
#include "attention/paged_copy.cuh"
//% endif
//% if codes == "fp8"
#include "kv/e4m3.cuh"
//% endif
//% endif

using elem_t = ${dtype};
using kept_t = ${kept_keys};  // k and v: elem_t, or codes in pages that a head's scale belongs to
constexpr int BLOCK_Q = ${block_q};  // query rows of a block
constexpr int BLOCK_K = ${block_k};  // keys of a tile
constexpr int NUM_WARPS = ${num_warps};
constexpr int HEAD_DIM = ${head_dim};      // of q and k, padded with zeros
constexpr int HEAD_DIM_V = ${head_dim_v};  // of v and o, padded
constexpr int V_PARTS = ${v_parts};        // blocks that share the columns of v and o
constexpr int STAGES = ${stages};          // tiles of K and V in shared memory
constexpr int MIN_BLOCKS = ${min_blocks};  // blocks an SM should hold: caps the registers
constexpr bool ALIGNED = ${aligned};       // rows of q, k, v, o start on 16-byte boundaries
constexpr bool Q_IN_REGISTERS = ${q_in_registers};
constexpr int GUARD = ${guard};       // bytes between tiles: 0 except where memory is checked
constexpr bool RESUMED = ${resumed};  // rows begin with what other keys left (row_state.cuh)
//% if form
using bias_t = ${bias_dtype};
constexpr bool VARLEN = ${varlen};  // packed sequences
constexpr bool MIXED = ${mixed};    // those of one row are left to decoding's kernel
constexpr bool SOFTCAP = ${softcap}, ALIBI = ${alibi}, SINKS = ${sinks}, SCORE_MOD = ${has_mod};
constexpr bool BIAS = ${bias}, BIAS_PAIRED = ${bias_paired};  // paired: see attention/score.cuh
constexpr bool MASK = ${mask}, MASK_PAIRED = ${mask_paired};
constexpr bool HELD = HEAD_DIM <= 128 && (BIAS_PAIRED || MASK_PAIRED);  // read a tile ahead
constexpr bool RULES = SOFTCAP || ALIBI || SINKS || SCORE_MOD || BIAS || MASK;

// The caller's expression of one score, its derivative, and what they read.
#define SCORE_FIELDS int b, h, seqlen_q, seqlen_k${score_fields};
#define SCORE_EXPRESSION (${score_mod})
#define SCORE_DERIVATIVE (${score_mod_grad})
#include "attention/score_mod.cuh"
//% endif

constexpr int THREADS = NUM_WARPS * WARP_SIZE;
constexpr int ROWS_A_WARP = BLOCK_Q / NUM_WARPS;
constexpr int M_BLOCKS = ROWS_A_WARP / 16;  // 16-row mma blocks of a warp
constexpr int QK_STEPS = HEAD_DIM / 16;
constexpr int MMA_K = 16;

static_assert(ROWS_A_WARP == 16 || ROWS_A_WARP == 32, "a warp owns one or two mma row blocks");
static_assert(BLOCK_K % 16 == 0, "the PV product takes keys 16 at a time");
static_assert(HEAD_DIM % 32 == 0 && HEAD_DIM_V % 32 == 0,
              "tiles are made of 32- or 64-wide panels");
static_assert(HEAD_DIM_V <= HEAD_DIM, "the output is staged where Q was");

using QTile = SwizzledTile<BLOCK_Q, HEAD_DIM>;
using KTile = SwizzledTile<BLOCK_K, HEAD_DIM>;
using VTile = SwizzledTile<BLOCK_K, HEAD_DIM_V>;
using OTile = SwizzledTile<BLOCK_Q, HEAD_DIM_V>;
constexpr int V_OFFSET = KTile::BYTES + GUARD;  // in a stage
constexpr int STAGE_BYTES = V_OFFSET + VTile::BYTES + GUARD;

using QReader = FragmentReader<QTile, BlockOrder::ROW_MAJOR>;
using KReader = FragmentReader<KTile, BlockOrder::COL_MAJOR>;
using VReader = FragmentReader<VTile, BlockOrder::ROW_MAJOR>;

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention_flash(
    //% if form
    // Null where the form has no such thing. Packed: q and o are [total_q, heads_q, dim], k and v
    // [total_k, heads_kv, dim], lse [heads_q, total_q].
    const int* __restrict__ cu_seqlens_q,    // [batch + 1]
    const int* __restrict__ cu_seqlens_k,    // [batch + 1]
    const float* __restrict__ alibi_slopes,  // [batch or 1, heads_q]
    const bias_t* __restrict__ bias,         // [batch, heads_q, seqlen_q, seqlen_k], broadcast
    const u8* __restrict__ mask,             // the same; 0 hides the key
    const float* __restrict__ sinks /* [heads_q] */ ${score_arrays} ${page_arrays},
    //% endif
    const elem_t* __restrict__ q,  // [batch, heads_q, seqlen_q, head_dim]    strides in elements,
    const kept_t* __restrict__ k,  // [batch, heads_kv, seqlen_k, head_dim]   last dimension
    const kept_t* __restrict__ v,  // [batch, heads_kv, seqlen_k, head_dim_v] contiguous
    elem_t* __restrict__ o,        // [batch, heads_q, seqlen_q, head_dim_v]
    float* __restrict__ lse ${state_array},  // [batch, heads_q, seqlen_q] contiguous, or null
    const Strides q_strides, const Strides k_strides, const Strides v_strides,
    const Strides o_strides ${state_numbers}, const int heads_q,
    const int group_size,  // query heads a KV head
    const int ${seqlen_q}, const int ${seqlen_k}, const int head_dim, const int head_dim_v,
    //% if form
    const AttentionForm form${score_scalars} ${page_numbers},
    //% endif
    const float softmax_scale_log2,  // softmax_scale * log2(e), not 0
    const int causal) {              // query i sees keys up to i + seqlen_k - seqlen_q
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 q_tile = shared_address(shared_memory), ring = q_tile + QTile::BYTES + GUARD;
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  const int block = blockIdx.x / V_PARTS, first_column = blockIdx.x % V_PARTS * HEAD_DIM_V;
  if (V_PARTS > 1 && first_column >= head_dim_v) return;

  //% if form
  const QueryBlock<BLOCK_Q> place(block, max_seqlen_q, heads_q);
  const SequenceRows<VARLEN> queries(cu_seqlens_q, place.batch, max_seqlen_q);
  //% if paged
  const SequencePages pages = PagedKeys{page_table, seq_lens,  rows,        table_width,
                                        page_log2,  num_pages, max_seqlen_k}(place.batch);
  const SequenceRows<VARLEN> held(0, pages.length);
  //% else
  const SequenceRows<VARLEN> held(cu_seqlens_k, place.batch, max_seqlen_k);
  //% endif
  const int seqlen_q = queries.length, seqlen_k = held.length;
  if (VARLEN && (place.q0 >= seqlen_q || (MIXED && seqlen_q == 1))) return;
  q += queries.start * q_strides.row;
  k += held.start * k_strides.row;
  v += held.start * v_strides.row;
  //% else
  const QueryBlock<BLOCK_Q> place(block, seqlen_q, heads_q);
  //% endif
  const int q0 = place.q0, kv_head = place.head / group_size;
  v += first_column;
  q += place.batch * q_strides.batch + place.head * q_strides.head + q0 * q_strides.row;
  //% if paged
  k += kv_head * k_strides.head;
  v += kv_head * v_strides.head;
  //% else
  k += place.batch * k_strides.batch + kv_head * k_strides.head;
  v += place.batch * v_strides.batch + kv_head * v_strides.head;
  //% endif

  //% if form
  KeyBand band(seqlen_q, seqlen_k, form.window_left, form.window_right);
  const BandTiles<BLOCK_K> tiles(band, q0, min(q0 + BLOCK_Q, seqlen_q) - 1);
  const int first_tile = tiles.first;
  int tile = tiles.end - 1;
  //% else
  // Query row i of the block sees keys 0 .. min(seqlen_k, first_hidden + i) - 1.
  const int first_hidden = causal ? q0 + seqlen_k - seqlen_q + 1 : seqlen_k;
  const int last_row = min(BLOCK_Q, seqlen_q - q0) - 1;
  const int keys = min(seqlen_k, causal ? first_hidden + last_row : seqlen_k);
  const int unmasked_tiles = max(min(seqlen_k, first_hidden), 0) / BLOCK_K;
  const int first_tile = 0;
  int tile = ceil_div(max(keys, 0), BLOCK_K) - 1;
  //% endif

  const int columns_v = V_PARTS > 1 ? min(head_dim_v - first_column, HEAD_DIM_V) : head_dim_v;
  const auto fetch = [&](int t) {
    const u32 stage = ring + (t % STAGES) * STAGE_BYTES;
    //% if paged
    copy_paged_tile<elem_t, KTile, THREADS, ALIGNED>(stage, k, k_strides, pages, t * BLOCK_K,
                                                     head_dim);
    copy_paged_tile<elem_t, VTile, THREADS, ALIGNED>(stage + V_OFFSET, v, v_strides, pages,
                                                     t * BLOCK_K, columns_v);
    //% else
    const i64 row = static_cast<i64>(t) * BLOCK_K;
    const int rows_left = seqlen_k - t * BLOCK_K;
    copy_tile<KTile, THREADS, ALIGNED>(stage, k + row * k_strides.row, k_strides.row, rows_left,
                                       head_dim);
    copy_tile<VTile, THREADS, ALIGNED>(stage + V_OFFSET, v + row * v_strides.row, v_strides.row,
                                       rows_left, columns_v);
    //% endif
  };

  // 1. Q and the first tiles are on their way.
  copy_tile<QTile, THREADS, ALIGNED>(q_tile, q, q_strides.row, seqlen_q - q0, head_dim);
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    if (tile - stage >= first_tile) fetch(tile - stage);
    cp_async_commit();
  }
  //% if form
  const int warp_q0 = q0 + warp * ROWS_A_WARP;
  auto rules = score_rules(
      RuleIf<SOFTCAP, SoftCap<false>>(form.softcap),
      PerScore<ScoreMod>({place.batch, place.head, seqlen_q, seqlen_k${score_values}}, seqlen_q,
                         seqlen_k),
      RuleIf<ALIBI, Alibi>(alibi_slopes, form.alibi_batch_stride, place.batch, place.head, seqlen_q,
                           seqlen_k),
      RuleIf<BIAS, HeldIf<HELD && BIAS_PAIRED, Bias<bias_t, BIAS_PAIRED>, M_BLOCKS, BLOCK_K / 8>>(
          bias, form.bias, place.batch, place.head, seqlen_q, seqlen_k),
      RuleIf<MASK, HeldIf<HELD && MASK_PAIRED, Where<u8, MASK_PAIRED>, M_BLOCKS, BLOCK_K / 8>>(
          mask, form.mask, place.batch, place.head, seqlen_q, seqlen_k));
  if (HELD && tile >= first_tile) rules.fetch(lane, warp_q0, tile * BLOCK_K);
  //% else
  constexpr bool RULES = false;
  //% endif
  //% if codes
  const float key_scale = k_scale[kv_head];
  //% else
  constexpr float key_scale = 1.f;
  //% endif
  // A negative scale would turn maxima into minima: its sign goes into Q.
  const float scale_log2 = RULES ? LOG2E : fabsf(softmax_scale_log2) * key_scale;
  if (!RULES && softmax_scale_log2 < 0.f) {
    cp_async_wait<0>();
    __syncthreads();
    for (int i = threadIdx.x * 16; i < QTile::BYTES; i += THREADS * 16) {
      uint4 bits = load_shared_chunk(q_tile + i);
      bits.x ^= 0x80008000u, bits.y ^= 0x80008000u, bits.z ^= 0x80008000u, bits.w ^= 0x80008000u;
      store_shared_chunk(q_tile + i, bits);
    }
  }

  const QReader q_reader(lane);
  const KReader k_reader(lane);
  const VReader v_reader(lane);
  const u32 warp_q_tile = q_tile + warp * ROWS_A_WARP * QTile::ROW_BYTES;
  u32 q_fragments[QK_STEPS][M_BLOCKS][4];
  OnlineSoftmax<M_BLOCKS> softmax;
  float acc[M_BLOCKS][HEAD_DIM_V / 8][4] = {};
  //% if form
  if (SINKS) softmax.begin_with(sinks[place.head], lane);
  //% endif

  //% if resumed
  const RowState<elem_t> rows(sums, sums_strides, o, o_strides, lse, heads_q, lse_rows, head_dim_v,
                              place.batch, place.head, q0 + warp * ROWS_A_WARP, seqlen_q,
                              done_first, done_end);
  rows.prefetch<ROWS_A_WARP>(lane);
  //% endif

  if (Q_IN_REGISTERS) {
    cp_async_wait<STAGES - 2>();
    __syncthreads();
#pragma unroll
    for (int step = 0; step < QK_STEPS; ++step)
#pragma unroll
      for (int m = 0; m < M_BLOCKS; ++m)
        ldmatrix_x4(q_fragments[step][m], q_reader.address(warp_q_tile, m, step));
  }

  for (; tile >= first_tile; --tile) {
    // 2. This tile has arrived, and every warp is done with the one before: its stage is free.
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    if (tile - (STAGES - 1) >= first_tile) fetch(tile - (STAGES - 1));
    cp_async_commit();
    const u32 stage = ring + (tile % STAGES) * STAGE_BYTES;

    float s[M_BLOCKS][BLOCK_K / 8][4] = {};
    multiply_qk<elem_t, MMA_K, Q_IN_REGISTERS>(s, q_fragments, warp_q_tile, q_reader, stage,
                                               k_reader);

    //% if form
    if (RULES)
      rules_on_fragments(s, lane, rules, form.softmax_scale * key_scale, warp_q0, tile * BLOCK_K);
    if (HELD && tile > first_tile) rules.fetch(lane, warp_q0, (tile - 1) * BLOCK_K);
    if (!tiles.is_whole(tile)) rules_on_fragments(s, lane, band, 1.f, warp_q0, tile * BLOCK_K);
    //% else
    if (tile >= unmasked_tiles)
      mask_scores(s, lane, [&](int row) {
        const int row_in_block = warp * ROWS_A_WARP + row;
        return min(seqlen_k, causal ? first_hidden + row_in_block : seqlen_k) - tile * BLOCK_K;
      });
    //% endif

    float correction[M_BLOCKS][2];
    if (softmax.raise_max(s, scale_log2, correction)) scale_rows(acc, correction);
    multiply_pv<elem_t, MMA_K>(acc, s, softmax, scale_log2, stage + V_OFFSET, v_reader);
  }

  //% if resumed
#pragma unroll
  for (int m = 0; m < M_BLOCKS; ++m) rows.finish(acc[m], softmax, m, scale_log2, lane);
  if (RESUMED) return;
  //% endif
  // 3. Normalise; the output is staged over this warp's own rows of Q, then stored in whole chunks.
  //    The block's place is computed again rather than kept in registers through the loop.
  cp_async_wait<0>();
  __syncthreads();
  const int index_again = block_index_again(), block_again = index_again / V_PARTS;
  const int column = index_again % V_PARTS * HEAD_DIM_V;
  if (V_PARTS > 1 && column > 0) lse = nullptr;
  //% if form
  const QueryBlock<BLOCK_Q> again(block_again, max_seqlen_q, heads_q);
  const SequenceRows<VARLEN> mine(cu_seqlens_q, again.batch, max_seqlen_q);
  const int length = mine.length, lse_length = VARLEN ? form.total_q : length;
  const i64 head_index = VARLEN ? again.head : static_cast<i64>(again.batch) * heads_q + again.head;
  o += mine.start * o_strides.row;
  if (VARLEN && lse != nullptr) lse += mine.start;
  //% else
  const QueryBlock<BLOCK_Q> again(block_again, seqlen_q, heads_q);
  const int length = seqlen_q, lse_length = seqlen_q;
  const i64 head_index = static_cast<i64>(again.batch) * heads_q + again.head;
  //% endif
  //% if codes
  scale_all(acc, v_scale[again.head / group_size]);
  //% endif
  const int end_lane = thread_index_again() % WARP_SIZE;
  const int warp_row = thread_index_again() / WARP_SIZE * ROWS_A_WARP, row0 = again.q0 + warp_row;
  const int rows_left = min(ROWS_A_WARP, length - row0);
  const u32 warp_o_tile = shared_address(shared_memory) + warp_row * OTile::ROW_BYTES;
  finish_rows<elem_t, OTile>(acc, softmax, scale_log2, end_lane, warp_o_tile,
                             lse == nullptr ? nullptr : lse + head_index * lse_length + row0,
                             rows_left);
  __syncwarp();
  o += again.batch * o_strides.batch + again.head * o_strides.head + row0 * o_strides.row + column;
  store_tile<OTile, ROWS_A_WARP, ALIGNED>(
      o, o_strides.row, warp_o_tile, end_lane, rows_left,
      V_PARTS > 1 ? min(head_dim_v - column, HEAD_DIM_V) : head_dim_v);
}
