/* Attention forward, one pass over the keys, on the tensor cores of Turing (sm_75).

   o = softmax(softmax_scale * q k^T + causal mask) v         lse = log(sum(exp(scores)))

   The algorithm, the tiling and the device functions are those of flash.cu; read that one first.
   This kernel is compiled for GPUs without cp.async only: where there is cp.async, flash.cu runs.
   What Turing has not, and what is done instead:

     mma.m16n8k16     two mma.m16n8k8 on the same fragments, each half of k on its own
     bf16             fp16 only; bf16 goes to flash_fp32.cu
     cp.async         the next tile travels in registers: its loads are issued before a product and
                      stored to shared memory after it, so the product hides their way
     160 KB a block   64 KB: one tile of K and one of V, no ring

   K and V take turns, so that only one of them is in registers at a time, and two barriers a tile
   keep them apart:

     tensor cores    S = Q K(t)   softmax         O += P V(t)            S = Q K(t-1) ...
     in flight       V(t) .............. store    K(t-1) ....... store   V(t-1) ...
     barriers                                  |                      |
                                     V(t) is there, K free    K(t-1) is there, V free

   Source: Dao, "FlashAttention-2" (2023), for the algorithm. */
#include "prelude.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"
#include "tile/register_copy.cuh"
#include "attention/mma.cuh"
#include "attention/query_block.cuh"

using elem_t = ${dtype};
constexpr int BLOCK_Q = ${block_q};  // query rows of a block
constexpr int BLOCK_K = ${block_k};  // keys of a tile
constexpr int NUM_WARPS = ${num_warps};
constexpr int HEAD_DIM = ${head_dim};      // of q and k, padded with zeros
constexpr int HEAD_DIM_V = ${head_dim_v};  // of v and o, padded
constexpr int MIN_BLOCKS = ${min_blocks};  // blocks an SM should hold: caps the registers
constexpr bool ALIGNED = ${aligned};       // rows of q, k, v, o start on 16-byte boundaries
constexpr bool Q_IN_REGISTERS = ${q_in_registers};
constexpr int GUARD = ${guard};  // bytes between tiles: 0 except where memory is checked

constexpr int THREADS = NUM_WARPS * WARP_SIZE;
constexpr int ROWS_A_WARP = BLOCK_Q / NUM_WARPS;
constexpr int M_BLOCKS = ROWS_A_WARP / 16;  // 16-row mma blocks of a warp
constexpr int QK_STEPS = HEAD_DIM / 16;
constexpr int MMA_K = 8;

static_assert(ROWS_A_WARP == 16 || ROWS_A_WARP == 32, "a warp owns one or two mma row blocks");
static_assert(BLOCK_K % 16 == 0, "the PV product takes keys 16 at a time");
static_assert(HEAD_DIM % 32 == 0 && HEAD_DIM_V % 32 == 0,
              "tiles are made of 32- or 64-wide panels");
static_assert(HEAD_DIM_V <= HEAD_DIM, "the output is staged where Q was");

using QTile = SwizzledTile<BLOCK_Q, HEAD_DIM>;
using KTile = SwizzledTile<BLOCK_K, HEAD_DIM>;
using VTile = SwizzledTile<BLOCK_K, HEAD_DIM_V>;
using OTile = SwizzledTile<BLOCK_Q, HEAD_DIM_V>;

using QCopy = RegisterTile<QTile, THREADS, ALIGNED>;
using KCopy = RegisterTile<KTile, THREADS, ALIGNED>;
using VCopy = RegisterTile<VTile, THREADS, ALIGNED>;

// A tile in flight needs registers beside output and scores. Where there are too few, and where
// elements come one by one, it is copied at once instead: before the product rather than behind it.
constexpr int BUSY_REGISTERS = M_BLOCKS * (HEAD_DIM_V + BLOCK_K) / 2;
constexpr bool PREFETCH = ALIGNED && BUSY_REGISTERS + KCopy::REGISTERS <= 140;

using QReader = FragmentReader<QTile, BlockOrder::ROW_MAJOR>;
using KReader = FragmentReader<KTile, BlockOrder::COL_MAJOR>;
using VReader = FragmentReader<VTile, BlockOrder::ROW_MAJOR>;

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention_flash_sm75(
    const elem_t* __restrict__ q,  // [batch, heads_q, seqlen_q, head_dim]    strides in elements,
    const elem_t* __restrict__ k,  // [batch, heads_kv, seqlen_k, head_dim]   last dimension
    const elem_t* __restrict__ v,  // [batch, heads_kv, seqlen_k, head_dim_v] contiguous
    elem_t* __restrict__ o,        // [batch, heads_q, seqlen_q, head_dim_v]
    float* __restrict__ lse,       // [batch, heads_q, seqlen_q] contiguous, or null
    const Strides q_strides, const Strides k_strides, const Strides v_strides,
    const Strides o_strides, const int heads_q, const int group_size,  // query heads a KV head
    const int seqlen_q, const int seqlen_k, const int head_dim, const int head_dim_v,
    const float softmax_scale_log2,  // softmax_scale * log2(e), not 0
    const int causal) {              // query i sees keys up to i + seqlen_k - seqlen_q
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 q_tile = shared_address(shared_memory);
  const u32 k_tile = q_tile + QTile::BYTES + GUARD, v_tile = k_tile + KTile::BYTES + GUARD;
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  const int warp_row = warp * ROWS_A_WARP;

  const QueryBlock<BLOCK_Q> place(blockIdx.x, seqlen_q, heads_q);
  const int q0 = place.q0, kv_head = place.head / group_size;
  q += place.batch * q_strides.batch + place.head * q_strides.head + q0 * q_strides.row;
  k += place.batch * k_strides.batch + kv_head * k_strides.head;
  v += place.batch * v_strides.batch + kv_head * v_strides.head;

  // Query row i of the block sees keys 0 .. min(seqlen_k, first_hidden + i) - 1.
  const int first_hidden = causal ? q0 + seqlen_k - seqlen_q + 1 : seqlen_k;
  const int last_row = min(BLOCK_Q, seqlen_q - q0) - 1;
  const int keys = min(seqlen_k, causal ? first_hidden + last_row : seqlen_k);
  const int unmasked_tiles = max(min(seqlen_k, first_hidden), 0) / BLOCK_K;
  int tile = ceil_div(max(keys, 0), BLOCK_K) - 1;

  KCopy next_k;
  VCopy next_v;
  const auto fetch_k = [&](int t) {
    const elem_t* rows = k + static_cast<i64>(t) * BLOCK_K * k_strides.row;
    const int rows_left = seqlen_k - t * BLOCK_K;
    if constexpr (PREFETCH) {
      next_k.fetch(rows, k_strides.row, rows_left, head_dim);
    } else {
      KCopy::copy(k_tile, rows, k_strides.row, rows_left, head_dim);
    }
  };
  const auto fetch_v = [&](int t) {
    const elem_t* rows = v + static_cast<i64>(t) * BLOCK_K * v_strides.row;
    const int rows_left = seqlen_k - t * BLOCK_K;
    if constexpr (PREFETCH) {
      next_v.fetch(rows, v_strides.row, rows_left, head_dim_v);
    } else {
      VCopy::copy(v_tile, rows, v_strides.row, rows_left, head_dim_v);
    }
  };

  // 1. Q and the first tile of K. A negative scale would turn maxima into minima: its sign goes
  //    into Q.
  const float scale_log2 = fabsf(softmax_scale_log2);
  QCopy::copy(q_tile, q, q_strides.row, seqlen_q - q0, head_dim,
              softmax_scale_log2 < 0.f ? 0x80008000u : 0u);
  if (tile >= 0) fetch_k(tile);
  if (PREFETCH && tile >= 0) next_k.store(k_tile);
  __syncthreads();

  const QReader q_reader(lane);
  const KReader k_reader(lane);
  const VReader v_reader(lane);
  const u32 warp_q_tile = q_tile + warp_row * QTile::ROW_BYTES;
  u32 q_fragments[QK_STEPS][M_BLOCKS][4];
  OnlineSoftmax<M_BLOCKS> softmax;
  float acc[M_BLOCKS][HEAD_DIM_V / 8][4] = {};

  if (Q_IN_REGISTERS) {
#pragma unroll
    for (int step = 0; step < QK_STEPS; ++step)
#pragma unroll
      for (int m = 0; m < M_BLOCKS; ++m)
        ldmatrix_x4(q_fragments[step][m], q_reader.address(warp_q_tile, m, step));
  }

  for (; tile >= 0; --tile) {
    // 2. V travels while K is multiplied.
    fetch_v(tile);
    float s[M_BLOCKS][BLOCK_K / 8][4] = {};
    multiply_qk<elem_t, MMA_K, Q_IN_REGISTERS>(s, q_fragments, warp_q_tile, q_reader, k_tile,
                                               k_reader);
    if (tile >= unmasked_tiles)
      mask_scores(s, lane, [&](int row) {
        return min(seqlen_k, causal ? first_hidden + warp_row + row : seqlen_k) - tile * BLOCK_K;
      });
    float correction[M_BLOCKS][2];
    if (softmax.raise_max(s, scale_log2, correction)) scale_rows(acc, correction);
    if (PREFETCH) next_v.store(v_tile);

    // 3. V is there, and every warp is done with K: the next K travels while V is multiplied.
    __syncthreads();
    if (tile > 0) fetch_k(tile - 1);
    multiply_pv<elem_t, MMA_K>(acc, s, softmax, scale_log2, v_tile, v_reader);
    if (PREFETCH && tile > 0) next_k.store(k_tile);

    // 4. The next K is there, and every warp is done with V.
    __syncthreads();
  }

  // 5. Normalise; the output is staged over this warp's own rows of Q, then stored in whole chunks.
  //    Where and whose rows is worked out again, so that it held no registers in the loop.
  const QueryBlock<BLOCK_Q> again(block_index_again(), seqlen_q, heads_q);
  const i64 head_index = static_cast<i64>(again.batch) * heads_q + again.head;
  const int end_lane = thread_index_again() % WARP_SIZE;
  const int end_warp_row = thread_index_again() / WARP_SIZE * ROWS_A_WARP;
  const int row0 = again.q0 + end_warp_row, rows_left = min(ROWS_A_WARP, seqlen_q - row0);
  const u32 warp_o_tile = shared_address(shared_memory) + end_warp_row * OTile::ROW_BYTES;
  finish_rows<elem_t, OTile>(acc, softmax, scale_log2, end_lane, warp_o_tile,
                             lse == nullptr ? nullptr : lse + head_index * seqlen_q + row0,
                             rows_left);
  __syncwarp();
  o += again.batch * o_strides.batch + again.head * o_strides.head + row0 * o_strides.row;
  store_tile<OTile, ROWS_A_WARP, ALIGNED>(o, o_strides.row, warp_o_tile, end_lane, rows_left,
                                          head_dim_v);
}
