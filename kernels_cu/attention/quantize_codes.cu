/* Codes of Q, K and V for attention (attention/flash_codes.cu), ROWS rows of a head a block, each
   number read once.

     Q    a scale a row; with SMOOTH also shift = q . mean of K, which the lse lacks otherwise
     K    a scale for ROWS keys; SMOOTH: of K less its mean over all keys
          GIVEN: the scales of Q and K are those of attention/quantize_spans.cu
     V    V_CODES: e4m3 or e5m2 by scales of columns (attention/quantize_channels.cu), transposed: [head_dim_v,
          v_keys], zeros behind the last key. Keys of each sixteen are in the order of
          attention/codes.cuh: key 8 j + 2 t + i at 4 t + 2 j + i

   ROTATE: rows of Q and K are rotated first (quantize/hadamard.cuh), which changes no score.

   Source: Zhang et al., "SageAttention" (2024), for smooth keys. */
#include "prelude.cuh"
#include "ptx/pdl.cuh"
#include "attention/quantize_rows.cuh"
#include "quantize/e5m2.cuh"

using elem_t = ${dtype};
using Codes = ${codes};         // of q and k
using ValueCodes = ${value_codes};
constexpr bool SMOOTH = ${smooth}, ROTATE = ${rotate}, V_CODES = ${v_codes};
constexpr bool GIVEN = ${given};
constexpr int HEAD_DIM = ${head_dim};  // at most
constexpr int ROWS = ${rows};          // of a block; keys that share a scale
constexpr int THREADS = ${threads};

using Tile = RowTile<HEAD_DIM, ROWS, THREADS>;
constexpr int LANES = Tile::LANES, PASSES = Tile::PASSES;
constexpr int V_PITCH = ROWS + 16;  // bytes of a column of V in shared memory
static_assert(ROWS == 64, "keys of V^T are padded to what a tile of attention/flash_codes.cu has");

__device__ __forceinline__ void quantize_queries(const Tile& tile, const elem_t* q,
                                                 const Strides& strides, const float* k_means,
                                                 const float* given, u8* codes, float* scales,
                                                 float* shift, int heads_q, int group_size,
                                                 int seqlen, int head_dim) {
  const int kv_head =
      tile.head / heads_q * (heads_q / group_size) + tile.head % heads_q / group_size;
#pragma unroll 2
  for (int pass = 0; pass < PASSES; ++pass) {
    const int row = tile.row(pass);
    const i64 place = static_cast<i64>(tile.head) * seqlen + row;
    Eight x = tile.load(q, strides, heads_q, pass, seqlen, head_dim);
    if (SMOOTH) {
      Eight mean = load_eight<true>(k_means + kv_head * head_dim, tile.column, head_dim);
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < 8; ++i) sum = fmaf(x[i], mean[i], sum);
      sum = lanes_sum<LANES>(sum);
      if (tile.column == 0 && row < seqlen) shift[place] = sum;
    }
    if (ROTATE) rotate_row<LANES>(x);
    const float scale = GIVEN ? *given : scale_of<float, Codes>(lanes_most<LANES>(magnitude(x)));
    const auto word = Codes::encode(x, Divisor(scale));
    if (row < seqlen) {
      if (tile.column == 0) scales[place] = scale;
      store_codes<Codes, true>(codes + place * head_dim, tile.column, head_dim, word);
    }
  }
}

__device__ __forceinline__ void quantize_keys(const Tile& tile, const elem_t* k,
                                              const Strides& strides, const float* k_means,
                                              const float* given, u8* codes, float* scales,
                                              u32* warps, int heads_kv, int seqlen, int head_dim) {
  Eight x[PASSES], mean = {};
  u32 most = 0;
  if (SMOOTH) mean = load_eight<true>(k_means + tile.head * head_dim, tile.column, head_dim);
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass)
    x[pass] = tile.load_key<SMOOTH, ROTATE>(k, strides, heads_kv, pass, seqlen, head_dim, mean);
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) most = max(most, magnitude(x[pass]));
  const float scale = GIVEN ? *given : scale_of<float, Codes>(block_most<THREADS>(most, warps));
  if (threadIdx.x == 0) scales[tile.head * ceil_div(seqlen, ROWS) + tile.first / ROWS] = scale;
  const Divisor scaled(scale);
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    const i64 place = static_cast<i64>(tile.head) * seqlen + tile.row(pass);
    if (tile.row(pass) < seqlen)
      store_codes<Codes, true>(codes + place * head_dim, tile.column, head_dim,
                               Codes::encode(x[pass], scaled));
  }
}

//% if v_codes
__device__ __forceinline__ void quantize_values(const Tile& tile, const elem_t* v,
                                                const Strides& strides, const float* v_scales,
                                                u8* codes, u8 (*columns)[V_PITCH], int heads_kv,
                                                int seqlen, int head_dim_v) {
  Eight by = load_eight<true>(v_scales + tile.head * head_dim_v, tile.column, head_dim_v);
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    Eight x = tile.load(v, strides, heads_kv, pass, seqlen, head_dim_v);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = Divisor(tile.column < head_dim_v ? by[i] : 1.f)(x[i]);
    const uint2 word = ValueCodes::encode(x, Divisor(1.f));
    const int key = tile.row(pass) - tile.first;
    const int place = key / 16 * 16 + key / 2 % 4 * 4 + key / 8 % 2 * 2 + key % 2;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      columns[tile.column + i][place] = (i < 4 ? word.x : word.y) >> i % 4 * 8;
  }
  __syncthreads();
  const int v_keys = round_up(seqlen, ROWS);
  for (int i = threadIdx.x; i < head_dim_v * (ROWS / 16); i += THREADS) {
    const int column = i / (ROWS / 16), chunk = i % (ROWS / 16) * 16;
    u8* const to =
        codes + (static_cast<i64>(tile.head) * head_dim_v + column) * v_keys + tile.first;
    *reinterpret_cast<uint4*>(to + chunk) =
        *reinterpret_cast<const uint4*>(&columns[column][chunk]);
  }
}
//% endif

extern "C" __global__ void __launch_bounds__(THREADS, HEAD_DIM > 128 ? 1 : 2)
    attention_quantize_codes(
        const elem_t* __restrict__ q,           // [batch, heads_q, seqlen_q, head_dim]
        const elem_t* __restrict__ k,           // [batch, heads_kv, seqlen_k, head_dim]
        const elem_t* __restrict__ v,           // [batch, heads_kv, seqlen_k, head_dim_v]
        const float* __restrict__ k_means,      // [batch, heads_kv, head_dim], or null
        const float* __restrict__ v_scales,     // [batch, heads_kv, head_dim_v], or null
        const float* __restrict__ span_scales,  // [q_spans + k_spans], or null
        u8* __restrict__ q_codes,               // [batch, heads_q, seqlen_q, head_dim]
        u8* __restrict__ k_codes,               // [batch, heads_kv, seqlen_k, head_dim]
        u8* __restrict__ v_codes,               // [batch, heads_kv, head_dim_v, v_keys], or null
        float* __restrict__ q_scales,           // [batch, heads_q, seqlen_q]
        float* __restrict__ k_scales,           // [batch, heads_kv, ceil(seqlen_k / ROWS)]
        float* __restrict__ shift,              // [batch, heads_q, seqlen_q], or null
        const Strides q_strides, const Strides k_strides, const Strides v_strides,
        const int heads_q,
        const int group_size,                    // query heads a KV head
        const int q_blocks, const int k_blocks,  // of all heads; those of V follow
        const int q_spans, const int k_spans,    // heads of all, or 1
        const int seqlen_q, const int seqlen_k, const int head_dim, const int head_dim_v) {
  after_previous_kernel();
  __shared__ u32 warps[THREADS / WARP_SIZE];
  const int heads_kv = heads_q / group_size, block = blockIdx.x;
  if (block < q_blocks) {
    const Tile tile(block, seqlen_q);
    const float* const given = span_scales + min(tile.head, q_spans - 1);
    quantize_queries(tile, q, q_strides, k_means, given, q_codes, q_scales, shift, heads_q,
                     group_size, seqlen_q, head_dim);
  } else if (!V_CODES || block < q_blocks + k_blocks) {
    const Tile tile(block - q_blocks, seqlen_k);
    const float* const given = span_scales + q_spans + min(tile.head, k_spans - 1);
    quantize_keys(tile, k, k_strides, k_means, given, k_codes, k_scales, warps, heads_kv, seqlen_k,
                  head_dim);
  }
  //% if v_codes
  else {
    __shared__ __align__(16) u8 columns[HEAD_DIM][V_PITCH];
    quantize_values(Tile(block - q_blocks - k_blocks, seqlen_k), v, v_strides, v_scales, v_codes,
                    columns, heads_kv, seqlen_k, head_dim_v);
  }
  //% endif
}
