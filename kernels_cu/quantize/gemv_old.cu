/* out = act(scale * x . weight + bias) + residual for up to eight rows of x and a weight of int4 or
   int8 codes, with a scale for 128 of k: codes are streamed once, 16 bytes a lane, and become numbers
   in the registers in which they are multiplied (quantize/weights.cuh).

   A block has OUTPUTS columns of out; its warps take spans of k in turns, UNROLL of them under way at
   any time. Products of codes are exact; a span's sums are multiplied with its scale in fp32. What the
   warps have is added up in shared memory in their order: the same bits every time. x is small and
   stays in L1.

   Before the previous kernel is over a block asks for lines of its weight, to L2: that reads nothing.

   sm_80 and later. */
//% if has_mod
#define EPILOGUE_EXPRESSION (${epilogue_mod})
#define EPILOGUE_DERIVATIVE (${epilogue_mod_grad})
//% endif
#include "prelude.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/gemv.cuh"
#include "ptx/pdl.cuh"
#include "ptx/register_fence.cuh"
#include "quantize/weights.cuh"

using elem_t = ${dtype};
using out_t = ${out_dtype};
using Activation = ${activation};
using Weights = ${weights};
constexpr bool GATE = ${gate};
constexpr bool PREFETCH = __CUDA_ARCH__ >= 900;  // where launches overlap
constexpr int TILE = ${tile_rows};               // outputs of the weight
constexpr int WARPS = ${warps};
constexpr int UNROLL = ${unroll};      // spans of a warp under way
constexpr int RESIDENT = ${resident};  // blocks of a multiprocessor, at least

constexpr int HALVES = GATE ? 2 : 1, OUTPUTS = TILE / HALVES, THREADS = 32 * WARPS;
constexpr int EIGHTS = TILE / 8, PRODUCTS = TILE / 16, GROUP = 128;
static_assert(TILE % 16 == 0, "whole operands of sixteen rows");
static_assert(GROUP % Weights::SPAN == 0, "a span has one scale");

// A lane's codes of a span, and the scales of their rows.
struct Step {
  uint4 codes[EIGHTS];
  elem_t scales[EIGHTS];
};

struct Source {
  const u8* rows[EIGHTS];
  const elem_t* scales[EIGHTS];
  const int k;

  __device__ __forceinline__ Source(const u8* weight, const elem_t* of, int first, int n, int k)
      : k(k) {
    const int lane = threadIdx.x % WARP_SIZE, groups = ceil_div(k, GROUP);
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i) {
      const i64 row = weight_output<TILE, HALVES>(first, i * 8 + lane / 4, n);
      rows[i] = weight + row * (static_cast<i64>(k) * Weights::BITS / 8) + lane % 4 * 16;
      scales[i] = of + row * groups;
    }
  }
  __device__ __forceinline__ bool has(int span) const {
    return span * Weights::SPAN + static_cast<int>(threadIdx.x % 4) * Weights::CHUNK_K < k;
  }
  // Scales are wanted by all lanes, whose sums are of all k of the span.
  __device__ __forceinline__ void load(Step& step, int span) const {
    const bool there = has(span), some = span * Weights::SPAN < k;
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i) {
      step.codes[i] = load_streamed_chunk_if(rows[i] + span * (4 * 16), there);
      step.scales[i] = some ? scales[i][span * Weights::SPAN / GROUP] : elem_t(0.f);
    }
  }
};

// The lane's numbers of row g of x in a span; zeros where x has no such row.
struct Token {
  static constexpr int CHUNKS = 2;  // at a time
  const elem_t* const row;
  const bool exists;
  uint4 x[CHUNKS];

  __device__ __forceinline__ Token(const elem_t* from, i64 stride, int m)
      : row(from + min(static_cast<int>(threadIdx.x) % WARP_SIZE / 4, m - 1) * stride +
            threadIdx.x % 4 * Weights::CHUNK_K),
        exists(threadIdx.x % WARP_SIZE / 4 < m) {}
  __device__ __forceinline__ void load(int span, int first, bool there) {
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      x[i] = make_uint4(0, 0, 0, 0);
      load_chunk_if(x[i], row + span * Weights::SPAN + (first + i) * 8, exists && there);
    }
  }
};

// The span's products, with its scales.
__device__ __forceinline__ void multiply(float (&d)[PRODUCTS][4], const Step& step, Token& token,
                                         int span, bool there) {
  float sums[PRODUCTS][4] = {};
#pragma unroll
  for (int s = 0; s < Weights::STEPS; ++s) {
    if (s % (2 * Token::CHUNKS) == 0) token.load(span, s / 2, there);
    const uint4& x = token.x[s / 2 % Token::CHUNKS];
#pragma unroll
    for (int i = 0; i < PRODUCTS; ++i) {
      u32 a[4];
      weight_fragment<Weights>(a, step.codes[2 * i], step.codes[2 * i + 1], s);
      mma_m16n8k16<elem_t>(sums[i], a, s % 2 == 0 ? x.x : x.z, s % 2 == 0 ? x.y : x.w);
    }
  }
#pragma unroll
  for (int i = 0; i < PRODUCTS * 4; ++i)
    d[i / 4][i % 4] += static_cast<float>(step.scales[i / 2]) * sums[i / 4][i % 4];
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    quantized_gemv(const elem_t* __restrict__ x,        // [m, k]
                   const u8* __restrict__ weight,       // [n, k] codes; with GATE 2 n for n
                   const elem_t* __restrict__ scales,   // [n, ceil(k / 128)], the same
                   const elem_t* __restrict__ bias,     // [n], with GATE [2 n], or null
                   const out_t* __restrict__ residual,  // [m, n] or null
                   out_t* __restrict__ out,             // [m, n]
                   const int m,                         // 1..8
                   const int n, const int k, const i64 x_stride, const i64 out_stride,
                   const i64 residual_stride, const float scale) {
  const int first = blockIdx.x * OUTPUTS;
  if (PREFETCH)
    prefetch_rows<TILE, HALVES, THREADS>(weight, static_cast<i64>(k) * Weights::BITS / 8, first, n,
                                         k * Weights::BITS / 8);
  after_previous_kernel();
  __shared__ float sums[WARPS][TOKENS][TILE];
  const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
  const int spans = ceil_div(k, Weights::SPAN);

  // 1. Spans of this warp; beyond the end they are zeros.
  const Source source(weight, scales, first, n, k);
  Token token(x, x_stride, m);
  Step ring[UNROLL];
  float d[PRODUCTS][4] = {};
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) source.load(ring[i], warp * UNROLL + i);
#pragma unroll 1
  for (int span = warp * UNROLL; span < spans; span += WARPS * UNROLL) {
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      multiply(d, ring[i], token, span + i, source.has(span + i));
      register_fence(d);  // one span's x at a time
      source.load(ring[i], span + WARPS * UNROLL + i);
    }
  }
  float* const at = sums[warp][lane % 4 * 2] + lane / 4;
#pragma unroll
  for (int i = 0; i < PRODUCTS * 4; ++i)
    at[i % 2 * TILE + i / 4 * 16 + i / 2 % 2 * 8] = d[i / 4][i % 4];
  __syncthreads();

  // 2. The warps' sums in their order, and the epilogue.
  const Epilogue<Activation, GATE, elem_t, out_t> epilogue = {
      bias, residual, nullptr, residual_stride, scale, n};
#pragma unroll 1
  for (int i = threadIdx.x; i < m * OUTPUTS; i += THREADS) {
    const int row = i / OUTPUTS, column = i % OUTPUTS;
    float total[2] = {};
#pragma unroll
    for (int half = 0; half < HALVES; ++half)
#pragma unroll
      for (int w = 0; w < WARPS; ++w) total[half] += sums[w][row][column + half * OUTPUTS];
    if (first + column < n)
      out[row * out_stride + first + column] =
          static_cast<out_t>(epilogue(total[0], total[1], row, first + column));
  }
}
