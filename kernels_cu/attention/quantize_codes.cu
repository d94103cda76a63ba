/* Codes of Q, K and V for attention (attention/flash_codes.cu), ROWS rows of a head a block, each
   number read once.

     Q    a scale a row, or (SHARED) for ROWS rows; with SMOOTH also shift = q . mean of K, which the
          lse lacks otherwise
     K    a scale for ROWS keys, which stands once for each SCALE_KEYS; SMOOTH: of K less its mean
          over all keys
          GIVEN: the scales of Q and K are those of attention/quantize_spans.cu
     V    V_CODES: e4m3 or e5m2 by scales of columns (attention/quantize_channels.cu), transposed: [head_dim_v,
          v_keys], zeros behind the last key. Keys of each sixteen are in the order of
          attention/codes.cuh: key 8 j + 2 t + i at 4 t + 2 j + i

   ROTATE: rows of Q and K are rotated first (quantize/hadamard.cuh), which changes no score.
   PACKED: sequences one behind the other, at places of attention/packed_codes.cuh in the codes.

   Source: Zhang et al., "SageAttention" (2024), for smooth keys. */
#include "prelude.cuh"
#include "ptx/pdl.cuh"
#include "attention/quantize_rows.cuh"
#include "quantize/e5m2.cuh"

using elem_t = ${dtype};
using Codes = ${codes};  // of q and k
using ValueCodes = ${value_codes};
constexpr bool SMOOTH = ${smooth}, ROTATE = ${rotate}, V_CODES = ${v_codes};
constexpr bool GIVEN = ${given}, PACKED = ${packed};
constexpr bool SHARED = ${shared} > 1;     // a scale is: by the rows of Q of a block
constexpr int HEAD_DIM = ${head_dim};      // at most
constexpr int ROWS = ${rows};              // of a block of Q or K; keys that share a scale
constexpr int VALUE_ROWS = ${value_rows};  // of a block of V
constexpr int THREADS = ${threads};

using Tile = RowTile<HEAD_DIM, ROWS, THREADS, PACKED>;
using ValueTile = RowTile<HEAD_DIM, VALUE_ROWS, THREADS, PACKED>;
constexpr int LANES = ValueTile::LANES, SCALE_KEYS = 1 << SCALE_KEYS_LOG2;
static_assert(ROWS % SCALE_KEYS == 0 && VALUE_ROWS == SCALE_KEYS, "whole places of scales");
static_assert(!GIVEN || !SHARED, "one or the other");
// Blocks of a head of V: a tile of packed keys may end so far behind the last one.
constexpr int MORE_BLOCKS = PACKED ? ceil_div(MAX_TILE, VALUE_ROWS) : 0;

// Of sixteen rows of a warp at a time.
using Rows = BlockRows<elem_t, HEAD_DIM, ROTATE>;
static_assert(ROWS == THREADS / 2, "sixteen rows a warp");

// Codes of a block's rows of Q or of K, which share a scale (`together`) or not. `mean`: of K, or null.
// A scale of keys is stored for ROWS, another one for each row.
template <bool OF_KEYS>
__device__ __forceinline__ void quantize_rows(const Tile& tile, const elem_t* x,
                                              const Strides& strides, const float* mean,
                                              const float* given, u8* codes, float* scales,
                                              float* shift, u32* warps, int total, int head_dim) {
  constexpr bool TOGETHER = OF_KEYS || SHARED;
  __shared__ __align__(16) float means[HEAD_DIM];
  const u32 own_means = SMOOTH ? means_of_rows<HEAD_DIM, ROTATE>(means, mean, head_dim) : 0;
  const int lane = threadIdx.x % WARP_SIZE;

  // 1. The rows as they become codes.
  Rows rows;
  rows.load(tile, x, strides, head_dim);
  const int row = rows.row;
  if (SMOOTH && !OF_KEYS) {
    const float2 sums = rows.products(own_means);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = lanes_sum<4>(half == 0 ? sums.x : sums.y);
      if (lane % 4 == 0 && row + half * 8 < tile.length)
        shift[tile.place(row + half * 8, total)] = sum;
    }
  }
  rows.template finish<SMOOTH && OF_KEYS>(own_means, tile.length);

  // 2. Their scales.
  const u32 most[2] = {rows.most(0), rows.most(1)};
  float own_scales[2];
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if (!TOGETHER) own_scales[half] = scale_of<float, Codes>(lanes_most<4>(most[half]));
  if (TOGETHER) {
    const u32 all = GIVEN ? 0 : block_most<THREADS>(max(most[0], most[1]), warps);
    own_scales[0] = own_scales[1] = scale_of<float, Codes>(all);
  }
  if (GIVEN) own_scales[0] = own_scales[1] = *given;

  // 3. Codes.
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int own_row = row + half * 8;
    const i64 place = tile.place(own_row, total);
    const Divisor scaled(own_scales[half]);
#pragma unroll
    for (int j = 0; j < Rows::CHUNKS; ++j) {
      const auto word = Codes::encode(rows.row_of(half, j), scaled);
      if (own_row < tile.length)
        store_codes<Codes, true>(codes + place * head_dim, j * 32 + lane % 4 * 8, head_dim, word);
    }
    if (!OF_KEYS && lane % 4 == 0 && own_row < tile.length) scales[place] = own_scales[half];
  }
  const int i = threadIdx.x;  // of no keys there is a scale, too
  if (OF_KEYS && i < ROWS / SCALE_KEYS && (i == 0 || tile.first + i * SCALE_KEYS < tile.length))
    scales[i] = own_scales[0];
}

//% if v_codes
// Four keys whose bytes are neighbours (two where a thread has no more) are a thread's, so that a column
// takes them in one store. Words of eight columns each are a place further round, for the banks' sake.
constexpr int VALUE_PASSES = ValueTile::PASSES, KEYS = VALUE_PASSES < 4 ? VALUE_PASSES : 4;

__device__ __forceinline__ int word_place(int column, int word) {
  return column * VALUE_ROWS + (word + column / 8) % (VALUE_ROWS / 4) * 4;
}

__device__ __forceinline__ void quantize_values(const ValueTile& tile, const elem_t* v,
                                                const Strides& strides, const float* v_scales,
                                                u8* codes, u8* columns, int v_keys,
                                                int head_dim_v) {
  Eight by = load_eight<true>(v_scales + tile.head * head_dim_v, tile.column, head_dim_v);
#pragma unroll
  for (int first = 0; first < VALUE_PASSES / KEYS; ++first) {
    // Keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of sixteen are word t of their four.
    const int unit = first * (THREADS / LANES) + tile.team, word = unit * KEYS / 4;
    const int half = KEYS < 4 ? unit % 2 : 0;
    const int key = tile.first + word / 4 * 16 + word % 4 * 2 + half * 8;
    uint2 made[KEYS];
#pragma unroll
    for (int i = 0; i < KEYS; ++i) {
      Eight x = tile.load(v, strides, key + i % 2 + i / 2 * 8, head_dim_v);
#pragma unroll
      for (int k = 0; k < 8; ++k) x[k] = Quotient(tile.column < head_dim_v ? by[k] : 1.f)(x[k]);
      made[i] = ValueCodes::encode_scaled(x);
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      u32 bytes = 0;
#pragma unroll
      for (int i = 0; i < KEYS; ++i) {
        const u32 four = k < 4 ? made[i].x : made[i].y;
        bytes |= (four >> k % 4 * 8 & 0xff) << i * 8;
      }
      u8* const to = columns + word_place(tile.column + k, word) + half * 2;
      if (KEYS == 4)
        *reinterpret_cast<u32*>(to) = bytes;
      else
        *reinterpret_cast<u16*>(to) = bytes;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < head_dim_v * (VALUE_ROWS / 16); i += THREADS) {
    const int column = i / (VALUE_ROWS / 16), chunk = i % (VALUE_ROWS / 16);
    u32 words[4];
#pragma unroll
    for (int k = 0; k < 4; ++k)
      words[k] = *reinterpret_cast<const u32*>(columns + word_place(column, chunk * 4 + k));
    *reinterpret_cast<uint4*>(codes + column * static_cast<i64>(v_keys) + chunk * 16) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
}
//% endif

extern "C" __global__ void __launch_bounds__(THREADS, (HEAD_DIM > 128  ? 1
                                                       : HEAD_DIM > 64 ? 2
                                                                       : 3) *
                                                          (256 / THREADS))
    attention_quantize_codes(
        //% if packed
        // Packed: q is [total_q, heads_q, head_dim], k and v alike; in what is written one batch has
        // total_q and total_k rows a head, and `batch` is how many sequences there are elsewhere.
        const int* __restrict__ cu_seqlens_q,  // [batch + 1]
        const int* __restrict__ cu_seqlens_k,  // [batch + 1]
        //% endif
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
        float* __restrict__ k_scales,           // [batch, heads_kv, v_keys / SCALE_KEYS]
        float* __restrict__ shift,              // [batch, heads_q, seqlen_q], or null
        const Strides q_strides, const Strides k_strides, const Strides v_strides,
        //% if packed
        const int total_q, const int total_k,
        //% endif
        const int heads_q,
        const int group_size,                    // query heads a KV head
        const int q_blocks, const int k_blocks,  // of all heads; those of V follow
        const int q_spans, const int k_spans,    // heads of all, or 1
        const int seqlen_q, const int seqlen_k,  // of packed sequences the longest
        const int v_keys,                        // places of a head's keys, whole SCALE_KEYS
        const int head_dim, const int head_dim_v) {
  after_previous_kernel();
  __shared__ u32 warps[THREADS / WARP_SIZE];
  //% if not packed
  const int *const cu_seqlens_q = nullptr, *const cu_seqlens_k = nullptr;
  const int total_q = seqlen_q, total_k = seqlen_k;
  //% endif
  const int heads_kv = heads_q / group_size, block = blockIdx.x;
  const int blocks_k = ceil_div(seqlen_k, ROWS);
  if (block < q_blocks) {
    const Tile tile(block, ceil_div(seqlen_q, ROWS), heads_q, cu_seqlens_q, seqlen_q);
    const float* const given = span_scales + min(tile.head, q_spans - 1);
    if (PACKED && tile.first >= tile.length) return;
    const int kv_head = tile.sequence * heads_kv + tile.of_sequence / group_size;
    quantize_rows<false>(tile, q, q_strides, k_means + kv_head * head_dim, given, q_codes, q_scales,
                         shift, warps, total_q, head_dim);
  } else if (!V_CODES || block < q_blocks + k_blocks) {
    const Tile tile(block - q_blocks, blocks_k, heads_kv, cu_seqlens_k, seqlen_k);
    const float* const given = span_scales + q_spans + min(tile.head, k_spans - 1);
    if (PACKED && tile.first >= max(tile.length, 1)) return;  // one scale at least
    const int key_block = (tile.code_head() * v_keys +
                           first_place<PACKED>(cu_seqlens_k, tile.sequence) + tile.first) /
                          SCALE_KEYS;
    quantize_rows<true>(tile, k, k_strides, k_means + tile.head * head_dim, given, k_codes,
                        k_scales + key_block, nullptr, warps, total_k, head_dim);
  }
  //% if v_codes
  else {
    __shared__ __align__(16) u8 columns[HEAD_DIM * VALUE_ROWS];
    const ValueTile tile(block - q_blocks - k_blocks, ceil_div(seqlen_k, VALUE_ROWS) + MORE_BLOCKS,
                         heads_kv, cu_seqlens_k, seqlen_k);
    const int place = first_place<PACKED>(cu_seqlens_k, tile.sequence) + tile.first;
    if (PACKED && place >= first_place<PACKED>(cu_seqlens_k, tile.sequence + 1)) return;
    quantize_values(tile, v, v_strides, v_scales,
                    v_codes + tile.code_head() * head_dim_v * v_keys + place, columns, v_keys,
                    head_dim_v);
  }
  //% endif
}
