/* out = act(scale * x . weight + bias) + residual for few rows of x and a weight of int4 or int8 codes,
   with a scale for 128 of k. The weight is the side of sixteen rows of mma.sync, x that of eight
   columns.

   A block has ROWS outputs of the weight, sixteen a warp, all rows of x, and a part of k in groups of
   128. A warp's codes go from global memory into its registers, DEPTH - 1 groups ahead, and become
   numbers there (quantize/weights.cuh): nobody else wants them. x comes through a ring of DEPTH stages
   in shared memory by cp.async, for all warps. A group's sums are multiplied with its scale in fp32.

   Where gridDim.y blocks share a tile, each leaves its sums in `workspace`, and the last one adds them
   up in order: the same bits every time.

   sm_80 and later. */
//% if has_mod
#define EPILOGUE_EXPRESSION (${epilogue_mod})
#define EPILOGUE_DERIVATIVE (${epilogue_mod_grad})
//% endif
#include "prelude.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/gemv.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/pdl.cuh"
#include "ptx/register_fence.cuh"
#include "tile/last_block.cuh"
#include "quantize/weights.cuh"

using elem_t = ${dtype};
using out_t = ${out_dtype};
using Activation = ${activation};
using Weights = ${weights};
constexpr bool GATE = ${gate};
constexpr int COLUMNS = ${tokens};     // rows of x, padded
constexpr int DEPTH = ${depth};        // groups of k under way
constexpr int RESIDENT = ${resident};  // blocks of a multiprocessor, at least

constexpr int WARPS = 8, THREADS = 32 * WARPS, ROWS = 16 * WARPS, GROUP = 128;
constexpr int HALVES = GATE ? 2 : 1, OUTPUTS = ROWS / HALVES, EIGHTS = COLUMNS / 8;
constexpr int SPANS = GROUP / Weights::SPAN;  // of a group
constexpr int STAGE_BYTES = COLUMNS * GROUP * 2;
constexpr int PITCH = ROWS + 4;  // of sums: lanes of a fragment meet 32 banks
static_assert(COLUMNS * PITCH * 4 <= DEPTH * STAGE_BYTES, "sums are where the ring was");

// Where chunk `chunk` (8 numbers) of a row of a stage is. Of eight lanes that read together two rows
// g and four t are: int4 asks for chunks 4t + j, int8 for 2t + j; all are in different banks.
__device__ __forceinline__ u32 place(int row, int chunk) {
  const int turn = (chunk >> 3 & 1) ^ (row & 1) << (Weights::BITS == 4 ? 1 : 0);
  return row * (GROUP * 2) + ((chunk ^ turn) << 4);
}

// A warp's codes of a group: rows g and g + 8.
struct Codes {
  uint4 low[SPANS], high[SPANS];
  elem_t scales[2];
};

struct Source {
  const u8 *low, *high;
  const elem_t *low_scales, *high_scales;
  const int k;

  __device__ __forceinline__ Source(const u8* weight, const elem_t* scales, int first, int n, int k)
      : k(k) {
    const int lane = threadIdx.x % WARP_SIZE, row = threadIdx.x / WARP_SIZE * 16 + lane / 4;
    const i64 bytes = static_cast<i64>(k) * Weights::BITS / 8;
    const i64 at = weight_output<ROWS, HALVES>(first, row, n);
    const i64 below = weight_output<ROWS, HALVES>(first, row + 8, n);
    low = weight + at * bytes + lane % 4 * 16, high = weight + below * bytes + lane % 4 * 16;
    low_scales = scales + at * ceil_div(k, GROUP),
    high_scales = scales + below * ceil_div(k, GROUP);
  }
  __device__ __forceinline__ void load(Codes& codes, int group) const {
#pragma unroll
    for (int i = 0; i < SPANS; ++i) {
      const int span = group * SPANS + i, chunk = threadIdx.x % 4;
      const bool there = span * Weights::SPAN + chunk * Weights::CHUNK_K < k;
      codes.low[i] = load_streamed_chunk_if(low + span * (4 * 16), there);
      codes.high[i] = load_streamed_chunk_if(high + span * (4 * 16), there);
    }
    codes.scales[0] = low_scales[group], codes.scales[1] = high_scales[group];
  }
};

// A group of all rows of x to a stage; zeros where x has none.
__device__ __forceinline__ void load_x(u32 stage, const elem_t* x, i64 stride, int m, int k0,
                                       int k) {
  constexpr int CHUNKS = GROUP / 8;
#pragma unroll
  for (int i = threadIdx.x; i < COLUMNS * CHUNKS; i += THREADS) {
    const int row = i / CHUNKS, chunk = i % CHUNKS, at = k0 + chunk * 8;
    const bool there = row < m && at < k;
    cp_async_16(stage + place(row, chunk), there ? x + row * stride + at : x, there ? 16 : 0);
  }
}

__device__ __forceinline__ void multiply(float (&d)[EIGHTS][4], const Codes& codes, u32 stage,
                                         int lane) {
  float sums[EIGHTS][4] = {};
#pragma unroll
  for (int step = 0; step < SPANS * Weights::STEPS; step += 2) {
    const int span = step / Weights::STEPS, s = step % Weights::STEPS;
    u32 a[2][4];
    weight_fragment<Weights>(a[0], codes.low[span], codes.high[span], s);
    weight_fragment<Weights>(a[1], codes.low[span], codes.high[span], s + 1);
    const int chunk = (span * Weights::SPAN + lane % 4 * Weights::CHUNK_K) / 8 + s / 2;
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i) {
      const uint4 x = load_shared_chunk(stage + place(i * 8 + lane / 4, chunk));
      mma_m16n8k16<elem_t>(sums[i], a[0], x.x, x.y);
      mma_m16n8k16<elem_t>(sums[i], a[1], x.z, x.w);
    }
  }
#pragma unroll
  for (int i = 0; i < EIGHTS * 4; ++i)
    d[i / 4][i % 4] += static_cast<float>(codes.scales[i % 4 / 2]) * sums[i / 4][i % 4];
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    quantized_skinny(const elem_t* __restrict__ x,        // [m, k]
                     const u8* __restrict__ weight,       // [n, k] codes; with GATE 2 n for n
                     const elem_t* __restrict__ scales,   // [n, ceil(k / 128)], the same
                     const elem_t* __restrict__ bias,     // [n], with GATE [2 n], or null
                     const out_t* __restrict__ residual,  // [m, n] or null
                     out_t* __restrict__ out,             // [m, n]
                     float* __restrict__ workspace,       // [gridDim.x, gridDim.y, COLUMNS, ROWS]
                     u32* __restrict__ counters,          // [gridDim.x], 0 before and after
                     const int m,                         // 1..COLUMNS
                     const int n, const int k, const i64 x_stride, const i64 out_stride,
                     const i64 residual_stride, const float scale) {
  after_previous_kernel();
  extern __shared__ __align__(128) char dynamic[];
  const u32 ring = shared_address(dynamic);
  const int first = blockIdx.x * OUTPUTS, split = gridDim.y;
  const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
  const i64 all = ceil_div(k, GROUP);
  const int begin = static_cast<int>(all * blockIdx.y / split);
  const int end = static_cast<int>(all * (blockIdx.y + 1) / split);
  const Source source(weight, scales, first, n, k);

  // 1. The first groups.
  Codes codes[DEPTH];
#pragma unroll
  for (int i = 0; i < DEPTH - 1; ++i) {
    if (begin + i < end) {
      source.load(codes[i], begin + i);
      load_x(ring + i * STAGE_BYTES, x, x_stride, m, (begin + i) * GROUP, k);
    }
    cp_async_commit();
  }

  // 2. Products; a stage is filled again behind the barrier that says all warps are done with it.
  float d[EIGHTS][4] = {};
#pragma unroll 1
  for (int group = begin; group < end; group += DEPTH) {
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      if (group + i >= end) break;
      cp_async_wait<DEPTH - 2>();
      __syncthreads();
      constexpr int AHEAD = DEPTH - 1;
      if (group + i + AHEAD < end) {
        source.load(codes[(i + AHEAD) % DEPTH], group + i + AHEAD);
        load_x(ring + (i + AHEAD) % DEPTH * STAGE_BYTES, x, x_stride, m,
               (group + i + AHEAD) * GROUP, k);
      }
      cp_async_commit();
      multiply(d, codes[i], ring + i * STAGE_BYTES, lane);
      register_fence(d);  // one group's numbers at a time
    }
  }
  cp_async_wait<0>();
  __syncthreads();

  // 3. The sums of this block, and those of all blocks of the tile.
  float* const sums = reinterpret_cast<float*>(dynamic);
#pragma unroll
  for (int i = 0; i < EIGHTS * 4; ++i)
    sums[(i / 4 * 8 + lane % 4 * 2 + i % 2) * PITCH + warp * 16 + lane / 4 + i % 4 / 2 * 8] =
        d[i / 4][i % 4];
  __syncthreads();
  float* const tile = workspace + static_cast<i64>(blockIdx.x) * split * (COLUMNS * ROWS);
  if (split > 1) {
    for (int i = threadIdx.x; i < m * ROWS; i += THREADS)
      tile[blockIdx.y * (COLUMNS * ROWS) + i] = sums[i / ROWS * PITCH + i % ROWS];
    __syncthreads();
    if (!last_block(counters + blockIdx.x, split)) return;
  }

  // 4. The epilogue: neighbouring threads have neighbouring columns.
  const Epilogue<Activation, GATE, elem_t, out_t> epilogue = {
      bias, residual, nullptr, residual_stride, scale, n};
  for (int i = threadIdx.x; i < m * OUTPUTS; i += THREADS) {
    const int row = i / OUTPUTS, column = i % OUTPUTS;
    if (first + column >= n) continue;
    float total[2] = {};
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      const int at = column + half * OUTPUTS;
      if (split == 1) total[half] = sums[row * PITCH + at];
      for (int part = 0; split > 1 && part < split; ++part)
        total[half] += __ldcg(tile + (part * COLUMNS + row) * ROWS + at);
    }
    out[row * out_stride + first + column] =
        static_cast<out_t>(epilogue(total[0], total[1], row, first + column));
  }
}
