/* What attention/quantize_codes.cu wants to know of all keys of a head: the mean of each column of K,
   and the scale of each column of V.

   A block has CHUNK keys of K or of V. The last one of a head to end puts the chunks' results together,
   first to last: same bits each time, on every GPU. PACKED: each sequence has heads of its own. From
   sm_80 on. */
#include "prelude.cuh"
#include "ptx/pdl.cuh"
#include "tile/last_block.cuh"
#include "attention/sequence_rows.cuh"
#include "quantize/scale.cuh"

using elem_t = ${dtype};
constexpr bool MEANS = ${means}, MOSTS = ${mosts}, PACKED = ${packed};
constexpr int HEAD_DIM = ${head_dim};  // of k and v, at most
constexpr int CHUNK = ${chunk};        // keys of a block
constexpr int THREADS = ${threads};

constexpr int LANES = HEAD_DIM / 8, TEAM = THREADS / LANES;  // of a key; keys at a time
static_assert(CHUNK % TEAM == 0 && THREADS % HEAD_DIM == 0, "whole passes, columns, runs");

// Greatest magnitudes are compared as bits (quantize/scale.cuh), sums added.
__device__ __forceinline__ float join(bool sums, float a, float b) {
  return sums ? a + b : __uint_as_float(max(__float_as_uint(a), __float_as_uint(b)));
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_quantize_channels(
    const elem_t* __restrict__ k,  // [batch, heads_kv, seqlen_k, dim]; packed: [total_k,
    const elem_t* __restrict__ v,  // heads_kv, dim]; v the same with head_dim_v
    //% if packed
    const int* __restrict__ cu_seqlens_k,  // [batch + 1]
    //% endif
    float* __restrict__ k_means,   // [batch, heads_kv, head_dim]
    float* __restrict__ v_scales,  // [batch, heads_kv, head_dim_v]
    float* workspace,              // [gridDim.y, heads of all, chunks, HEAD_DIM]
    u32* counters,                 // [gridDim.y, heads of all], 0 before and after
    const Strides k_strides, const Strides v_strides, const int heads_kv, const int seqlen_k,
    const int chunks, const int head_dim, const int head_dim_v) {
  after_previous_kernel();
  __shared__ float parts[TEAM][HEAD_DIM];
  const bool of_k = MEANS && (!MOSTS || blockIdx.y == 0);
  const int head = blockIdx.x / chunks, chunk = blockIdx.x % chunks;
  const Strides strides = of_k ? k_strides : v_strides;
  const int columns = of_k ? head_dim : head_dim_v;
  //% if not packed
  const int* const cu_seqlens_k = nullptr;
  //% endif
  const SequenceRows<PACKED> held(cu_seqlens_k, head / heads_kv, seqlen_k);
  const elem_t* const rows = (of_k ? k : v) + head / heads_kv * strides.batch +
                             head % heads_kv * strides.head + held.start * strides.row;
  const int team = threadIdx.x / LANES, column = threadIdx.x % LANES * 8;

  // 1. A thread's keys, then those of the block.
  Eight most = {};
#pragma unroll 8
  for (int i = team; i < CHUNK; i += TEAM) {
    const int key = chunk * CHUNK + i;
    Eight x = load_eight<true>(rows + key * strides.row, column, key < held.length ? columns : 0);
#pragma unroll
    for (int j = 0; j < 8; ++j) most[j] = join(of_k, most[j], of_k ? x[j] : fabsf(x[j]));
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) parts[team][column + j] = most[j];
  __syncthreads();
  const int heads = gridDim.x / chunks;
  float* const chunk_results =
      workspace + (static_cast<i64>(blockIdx.y) * heads + head) * chunks * HEAD_DIM;
  float total = 0.f;
  if (threadIdx.x < HEAD_DIM) {
    for (int i = 0; i < TEAM; ++i) total = join(of_k, total, parts[i][threadIdx.x]);
    chunk_results[chunk * HEAD_DIM + threadIdx.x] = total;
  }
  __syncthreads();
  if (!last_block(counters + blockIdx.y * heads + head, chunks)) return;

  // 2. Of all chunks, in as many runs as there are threads for, each first to last.
  constexpr int RUNS = THREADS / HEAD_DIM;
  const int run = threadIdx.x / HEAD_DIM, at = threadIdx.x % HEAD_DIM;
  total = 0.f;
#pragma unroll 8
  for (int i = run; i < chunks; i += RUNS)
    total = join(of_k, total, __ldcg(chunk_results + i * HEAD_DIM + at));
  parts[run][at] = total;
  __syncthreads();
  if (threadIdx.x >= columns) return;
  total = 0.f;
#pragma unroll
  for (int i = 0; i < RUNS; ++i) total = join(of_k, total, parts[i][threadIdx.x]);
  if (of_k)
    k_means[head * head_dim + threadIdx.x] = total / max(held.length, 1);
  else
    v_scales[head * head_dim_v + threadIdx.x] = scale_of<float, Fp8Codes>(__float_as_uint(total));
}
