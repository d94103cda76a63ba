/* Attention forward in tiles: naive.cu with every element that is fetched used BLOCK_Q times.

   o = softmax(softmax_scale * q k^T + causal mask) v         lse = log(sum(exp(scores)))

   A block owns BLOCK_Q query rows of one head and takes the keys BLOCK_K at a time through shared
   memory. Still two passes, because a probability needs the whole row's maximum and sum:

     pass 1, each tile:   S = c Q K^T;   m' = max(m, rowmax S)
                          l = l * 2^(m - m') + rowsum 2^(S - m')
     pass 2, each tile:   S = c Q K^T;   P = 2^(S - m) / l;   O += P V
     at the end:          lse = (m + log2 l) * ln(2)          with c = softmax_scale * log2(e)

   What a tile costs, for head dimension D of q, k, v and e bytes an element:
     memory   K twice, V once: 3 * BLOCK_K * D * e bytes
     flops    S twice, P V once: 6 * BLOCK_Q * BLOCK_K * D, so 2 * BLOCK_Q / e a byte; naive has
              2 / e
     shared   a thread of S reads ROWS + KEYS elements for ROWS * KEYS FMAs (4 + 4 for 16), a thread
              of P V reads ROWS + COLUMNS for ROWS * COLUMNS: register tiles are to shared memory
              what the block's tiles are to device memory

   Threads form BLOCK_Q / 4 rows of LANES = 16; thread (y, x) does rows 4y .. 4y + 3, keys x,
   x + 16, ... of S and columns x, x + 16, ... of the output: sixteen neighbours read sixteen
   neighbouring elements of V, and sixteen rows of K, which a padding word spreads over sixteen
   banks. Q and P have no padding: a warp's two row groups read words of one bank there, in two
   turns.

   What the next step changes: flash.cu rescales O whenever a maximum grows, so that one pass does
   (4 flops for 6, K read once), and hands S and P V to the tensor cores. Every architecture.

   Source: Milakov, Gimelshein, "Online normalizer calculation for softmax" (2018), for pass 1. */
#include "prelude.cuh"
#include "ptx/math.cuh"
#include "tile/reduce.cuh"
#include "attention/query_block.cuh"

using elem_t = ${dtype};
constexpr int BLOCK_Q = ${block_q};        // query rows of a block
constexpr int BLOCK_K = ${block_k};        // keys of a tile
constexpr int HEAD_DIM = ${head_dim};      // of q and k, padded with zeros
constexpr int HEAD_DIM_V = ${head_dim_v};  // of v and o, padded
// Elements between tiles: 0 except where memory is checked.
constexpr int GUARD = ${guard} / sizeof(elem_t);

constexpr int LANES = 16;                    // threads that share rows
constexpr int ROWS = 4;                      // of a thread
constexpr int KEYS = BLOCK_K / LANES;        // of a thread, in S
constexpr int COLUMNS = HEAD_DIM_V / LANES;  // of a thread, in O
constexpr int THREADS = BLOCK_Q / ROWS * LANES;
constexpr int K_PITCH = HEAD_DIM + 4 / sizeof(elem_t);  // elements from row to row of K

static_assert(BLOCK_Q % 8 == 0, "a warp holds two groups of lanes, four rows each");
static_assert(BLOCK_K % LANES == 0 && HEAD_DIM_V % LANES == 0,
              "lanes share keys and columns evenly");
static_assert(HEAD_DIM % 4 == 0,
              "with an odd number of words, K_PITCH spreads rows over the banks");

// Shared memory: Q, then one tile that is K at first and V later, then the probabilities. In bytes
// BLOCK_Q * HEAD_DIM * e + BLOCK_K * max(K_PITCH, HEAD_DIM_V) * e + BLOCK_Q * BLOCK_K * 4.
constexpr int Q_ELEMENTS = BLOCK_Q * HEAD_DIM;
constexpr int KV_ELEMENTS = BLOCK_K * (K_PITCH > HEAD_DIM_V ? K_PITCH : HEAD_DIM_V);

// A [rows, columns] piece of a strided tensor -> shared memory, neighbouring threads taking
// neighbouring elements. Rows at or past rows_left and columns at or past columns_left become zero.
template <int TILE_ROWS, int TILE_COLUMNS, int TILE_PITCH>
__device__ __forceinline__ void load_tile(elem_t* tile, const elem_t* __restrict__ global,
                                          i64 row_stride, int rows_left, int columns_left) {
#pragma unroll 4
  for (int i = threadIdx.x; i < TILE_ROWS * TILE_COLUMNS; i += THREADS) {
    const int row = i / TILE_COLUMNS, column = i % TILE_COLUMNS;
    tile[row * TILE_PITCH + column] = row < rows_left && column < columns_left
                                          ? global[row * row_stride + column]
                                          : static_cast<elem_t>(0.f);
  }
}

// S = scale_log2 * Q K^T of this thread's rows and keys; -inf where row i may not see the key.
__device__ __forceinline__ void scores(float (&s)[ROWS][KEYS], const elem_t* q_rows,
                                       const elem_t* k_rows, const int (&visible)[ROWS],
                                       float scale_log2) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i)
#pragma unroll
    for (int j = 0; j < KEYS; ++j) s[i][j] = 0.f;
#pragma unroll 4
  for (int d = 0; d < HEAD_DIM; ++d) {
    float query[ROWS], key[KEYS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) query[i] = static_cast<float>(q_rows[i * HEAD_DIM + d]);
#pragma unroll
    for (int j = 0; j < KEYS; ++j) key[j] = static_cast<float>(k_rows[j * LANES * K_PITCH + d]);
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
      for (int j = 0; j < KEYS; ++j) s[i][j] = fmaf(query[i], key[j], s[i][j]);
  }
#pragma unroll
  for (int i = 0; i < ROWS; ++i)
#pragma unroll
    for (int j = 0; j < KEYS; ++j)
      s[i][j] = j * LANES < visible[i] ? s[i][j] * scale_log2 : NEG_INFINITY;
}

// The running maximum and sum of one row, taken in for this thread's keys of a tile.
__device__ __forceinline__ void take_in(float& row_max, float& row_sum, const float (&s)[KEYS]) {
  float new_max = row_max;
#pragma unroll
  for (int j = 0; j < KEYS; ++j) new_max = fmaxf(new_max, s[j]);
  // No key yet: 2^(-inf - 0) = 0. Nor a maximum where all scores are NaN (fmaxf drops those), but
  // the sum takes them in.
  const float offset = new_max == NEG_INFINITY ? 0.f : new_max;
  row_sum *= exp2_fast(row_max - offset);
#pragma unroll
  for (int j = 0; j < KEYS; ++j) row_sum += exp2_fast(s[j] - offset);
  row_max = new_max;
}

// O += P V of this thread's rows and columns.
__device__ __forceinline__ void multiply_pv(float (&acc)[ROWS][COLUMNS], const float* p_rows,
                                            const elem_t* v_columns) {
#pragma unroll 2
  for (int key = 0; key < BLOCK_K; ++key) {
    float p[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) p[i] = p_rows[i * BLOCK_K + key];
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      const float value = static_cast<float>(v_columns[key * HEAD_DIM_V + c * LANES]);
#pragma unroll
      for (int i = 0; i < ROWS; ++i) acc[i][c] = fmaf(p[i], value, acc[i][c]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_tiled(
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
  extern __shared__ __align__(16) unsigned char shared_memory[];
  elem_t* q_tile = reinterpret_cast<elem_t*>(shared_memory);  // [BLOCK_Q][HEAD_DIM]
  elem_t* kv_tile = q_tile + Q_ELEMENTS + GUARD;              // [BLOCK_K][K_PITCH or HEAD_DIM_V]
  float* p_tile = reinterpret_cast<float*>(kv_tile + KV_ELEMENTS + GUARD);  // [BLOCK_Q][BLOCK_K]
  const int x = threadIdx.x % LANES, row0 = threadIdx.x / LANES * ROWS;

  const QueryBlock<BLOCK_Q> place(blockIdx.x, seqlen_q, heads_q);
  const int q0 = place.q0, kv_head = place.head / group_size;
  q += place.batch * q_strides.batch + place.head * q_strides.head + q0 * q_strides.row;
  k += place.batch * k_strides.batch + kv_head * k_strides.head;
  v += place.batch * v_strides.batch + kv_head * v_strides.head;
  o += place.batch * o_strides.batch + place.head * o_strides.head + q0 * o_strides.row;

  // Query row i of the block sees keys 0 .. min(seqlen_k, first_hidden + i) - 1.
  const int first_hidden = causal ? q0 + seqlen_k - seqlen_q + 1 : seqlen_k;
  const int last_row = min(BLOCK_Q, seqlen_q - q0) - 1;
  const int keys = min(seqlen_k, causal ? first_hidden + last_row : seqlen_k);
  const int tiles = ceil_div(max(keys, 0), BLOCK_K);

  // 1. A tile of K to shared memory (and, behind the first barrier, Q), then its scores.
  const auto tile_scores = [&](float (&s)[ROWS][KEYS], int tile) {
    __syncthreads();  // the tile before is used up
    load_tile<BLOCK_K, HEAD_DIM, K_PITCH>(kv_tile,
                                          k + static_cast<i64>(tile) * BLOCK_K * k_strides.row,
                                          k_strides.row, seqlen_k - tile * BLOCK_K, head_dim);
    __syncthreads();
    int visible[ROWS];  // keys of the tile, counted from this thread's first
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
      visible[i] = min(seqlen_k, causal ? first_hidden + row0 + i : seqlen_k) - tile * BLOCK_K - x;
    scores(s, q_tile + row0 * HEAD_DIM, kv_tile + x * K_PITCH, visible, softmax_scale_log2);
  };
  load_tile<BLOCK_Q, HEAD_DIM, HEAD_DIM>(q_tile, q, q_strides.row, seqlen_q - q0, head_dim);

  // 2. First pass: maximum and sum over this thread's keys, then over the lanes that share the row.
  float row_max[ROWS], row_sum[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; ++i) row_max[i] = NEG_INFINITY, row_sum[i] = 0.f;
  for (int tile = 0; tile < tiles; ++tile) {
    float s[ROWS][KEYS];
    tile_scores(s, tile);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) take_in(row_max[i], row_sum[i], s[i]);
  }
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const float lane_max = row_max[i], top = lanes_max<LANES>(lane_max);
    row_max[i] = top == NEG_INFINITY ? 0.f : top;  // a row without keys: P = 2^(-inf - 0) = 0
    row_sum[i] = lanes_sum<LANES>(row_sum[i] * exp2_fast(lane_max - row_max[i]));
    const int row = q0 + row0 + i;
    if (lse != nullptr && x == 0 && row < seqlen_q)
      lse[(static_cast<i64>(place.batch) * heads_q + place.head) * seqlen_q + row] =
          (row_max[i] + log2f(row_sum[i])) * LN2;
  }

  // 3. Second pass: probabilities to shared memory (read by their own warp only), V over K.
  float acc[ROWS][COLUMNS] = {}, inverse[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; ++i) inverse[i] = row_sum[i] == 0.f ? 0.f : 1.f / row_sum[i];
  for (int tile = 0; tile < tiles; ++tile) {
    float s[ROWS][KEYS];
    tile_scores(s, tile);
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
      for (int j = 0; j < KEYS; ++j)
        p_tile[(row0 + i) * BLOCK_K + x + j * LANES] = exp2_fast(s[i][j] - row_max[i]) * inverse[i];
    __syncthreads();
    load_tile<BLOCK_K, HEAD_DIM_V, HEAD_DIM_V>(
        kv_tile, v + static_cast<i64>(tile) * BLOCK_K * v_strides.row, v_strides.row,
        seqlen_k - tile * BLOCK_K, head_dim_v);
    __syncthreads();
    multiply_pv(acc, p_tile + row0 * BLOCK_K, kv_tile + x);
  }

#pragma unroll
  for (int i = 0; i < ROWS; ++i)
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c)
      if (row0 + i <= last_row && x + c * LANES < head_dim_v)
        o[(row0 + i) * o_strides.row + x + c * LANES] = static_cast<elem_t>(acc[i][c]);
}
