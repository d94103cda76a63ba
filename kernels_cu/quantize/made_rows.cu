/* Codes of rows that are made here, so that no 16-bit numbers go to memory and come back:

     RMS_NORM     y = s * rstd * weight                           s = x + residual, rounded to x's type
     LAYER_NORM   y = (s - mean) * rstd * weight + bias           (s = x without a residual)
     GATED        y = activation(x) * up

   A number y is code * scale, with a scale a row or (GROUPS) for 128 neighbours of a row. y stays in
   fp32 until it is a code; statistics and the residual stream are those of norm/rows.cu.

   A block has a row, a thread eight neighbours at a time, HELD times: these stay in registers, so that
   x is read once. What a wider row has beyond is made again from memory. Every architecture. */
#include "prelude.cuh"
#include "ptx/pdl.cuh"
#include "gemm/activation.cuh"
#include "quantize/scale.cuh"

enum class Source { RMS_NORM, LAYER_NORM, GATED };

using elem_t = ${dtype};
using weight_t = ${weight_dtype};
using Codes = ${codes};
using Activation = ${activation};  // of GATED
constexpr Source SOURCE = Source::${source};
constexpr bool GROUPS = ${groups};  // a scale for 128 columns, else a row
constexpr int THREADS = ${threads};

constexpr bool GATED = SOURCE == Source::GATED, CENTERED = SOURCE == Source::LAYER_NORM;
constexpr int HELD = ${held}, GROUP_LANES = 16;  // eights of a thread in registers
// Blocks of an SM, at least; Blackwell's code does not fit into as few registers.
constexpr int RESIDENT = __CUDA_ARCH__ < 1000 ? ${resident} : 1;
static_assert(GROUP_LANES * 8 == 128, "a group is sixteen lanes");

// Over a block; every thread gets it. `warps`: shared memory that no other sum uses.
__device__ __forceinline__ float block_sum(float x, float* warps) {
  x = lanes_sum<WARP_SIZE>(x);
  if (threadIdx.x % WARP_SIZE == 0) warps[threadIdx.x / WARP_SIZE] = x;
  __syncthreads();
  const int lane = threadIdx.x % WARP_SIZE;
  return lanes_sum<WARP_SIZE>(lane < THREADS / WARP_SIZE ? warps[lane] : 0.f);
}

// Eight numbers as T rounds them, to where they belong, and as floats again.
template <typename T>
__device__ __forceinline__ void store_rounded(T* row, int column, int columns, Eight& x) {
  Elements<T, 8> made;
#pragma unroll
  for (int i = 0; i < 8; ++i) made[i] = static_cast<T>(x[i]), x[i] = static_cast<float>(made[i]);
  if (column < columns) store_elements(row + column, made);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) quantize_made_rows(
    const elem_t* __restrict__ ${first},   // [rows, columns], whole eights on 16-byte boundaries
    const elem_t* __restrict__ ${second},  // the same; a residual may be null
    u8* __restrict__ data,                 // [rows, columns] of codes, no gaps
    float* __restrict__ scales,            // [rows], or [rows, ceil(columns / 128)]
    const weight_t* __restrict__ weight,   // [columns] or null: 1
    const weight_t* __restrict__ bias,     // [columns] or null: 0
    elem_t* sum,                           // [rows, columns] no gaps; null where the residual is
    const int columns, const i64 x_stride, const i64 other_stride, const float eps,
    const float weight_offset) {
  after_previous_kernel();
  const elem_t *const given_rows = ${first}, *const other = ${second};
  __shared__ float sums[2][THREADS / WARP_SIZE];
  __shared__ u32 mosts[THREADS / WARP_SIZE];
  const i64 row = blockIdx.x;
  const int eights = ceil_div(columns, THREADS * 8);  // of a thread
  const auto column_of = [](int i) { return (i * THREADS + static_cast<int>(threadIdx.x)) * 8; };
  const auto eight_of = [&](const elem_t* rows, i64 stride, int i) {
    return load_eight<true>(rows + row * stride, column_of(i), columns);
  };

  // 1. What is made of: s, or activation(x) * up. `first`: the residual stream is not yet written.
  const auto source = [&](int i, bool first) {
    if (!GATED && other != nullptr && !first) return eight_of(sum, columns, i);
    Eight s = eight_of(given_rows, x_stride, i);
    if (GATED) {
      Eight up = eight_of(other, other_stride, i);
#pragma unroll
      for (int k = 0; k < 8; ++k) s[k] = Activation::value(s[k]) * up[k];
    } else if (other != nullptr) {
      Eight added = eight_of(other, other_stride, i);
#pragma unroll
      for (int k = 0; k < 8; ++k) s[k] += added[k];
      store_rounded(sum + row * columns, column_of(i), columns, s);
    }
    return s;
  };
  const auto add = [](Eight s, float total) {
#pragma unroll
    for (int k = 0; k < 8; ++k) total += s[k];
    return total;
  };
  Eight held[HELD];
  float total = 0.f, mean = 0.f, rstd = 1.f;
#pragma unroll
  for (int i = 0; i < HELD; ++i) held[i] = source(i, true);
  if (!GATED) {
    // 2. Statistics; of what is not held the residual stream is read again.
    const auto square = [&](Eight s, int i, float squares) {
      const bool exists = column_of(i) < columns;
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const float from_mean = exists ? s[k] - mean : 0.f;
        squares = fmaf(from_mean, from_mean, squares);
      }
      return squares;
    };
    float squares = 0.f;
    if (CENTERED) {
#pragma unroll
      for (int i = 0; i < HELD; ++i) total = add(held[i], total);
#pragma unroll 1
      for (int i = HELD; i < eights; ++i) total = add(source(i, true), total);
      mean = block_sum(total, sums[0]) / columns;
    }
#pragma unroll
    for (int i = 0; i < HELD; ++i) squares = square(held[i], i, squares);
#pragma unroll 1
    for (int i = HELD; i < eights; ++i) squares = square(source(i, !CENTERED), i, squares);
    rstd = rsqrtf(block_sum(squares, sums[1]) / columns + eps);
  }
  const auto made = [&](Eight s, int i) {
    if (GATED) return s;
    const int column = column_of(i);
    Eight by = {}, shift = {};
    if (weight != nullptr) by = load_eight<true>(weight, column, columns);
    if (CENTERED && bias != nullptr) shift = load_eight<true>(bias, column, columns);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const float scaled = (s[k] - mean) * rstd;
      s[k] = column >= columns   ? 0.f
             : weight == nullptr ? scaled
                                 : fmaf(scaled, by[k] + weight_offset, shift[k]);
    }
    return s;
  };
#pragma unroll
  for (int i = 0; i < HELD; ++i) held[i] = made(held[i], i);

  // 3. Codes by the scale of a group, which its lanes find, or of the row.
  const auto store = [&](const Eight& y, int i, float scale) {
    store_codes<Codes, true>(data + row * columns, column_of(i), columns,
                             encode_quotients<Codes>(y, Quotient(scale)));
  };
  if (GROUPS) {
    const auto store_group = [&](const Eight& y, int i) {
      const float scale = scale_of<float, Codes>(lanes_most<GROUP_LANES>(magnitude(y)));
      if (threadIdx.x % GROUP_LANES == 0 && column_of(i) < columns)
        scales[row * ceil_div(columns, 128) + column_of(i) / 128] = scale;
      store(y, i, scale);
    };
#pragma unroll
    for (int i = 0; i < HELD; ++i) store_group(held[i], i);
#pragma unroll 1
    for (int i = HELD; i < eights; ++i) store_group(made(source(i, false), i), i);
    return;
  }
  u32 most = 0;
#pragma unroll
  for (int i = 0; i < HELD; ++i) most = max(most, magnitude(held[i]));
#pragma unroll 1
  for (int i = HELD; i < eights; ++i) most = max(most, magnitude(made(source(i, false), i)));
  const float scale = scale_of<float, Codes>(block_most<THREADS>(most, mosts));
  if (threadIdx.x == 0) scales[row] = scale;
#pragma unroll
  for (int i = 0; i < HELD; ++i) store(held[i], i, scale);
#pragma unroll 1
  for (int i = HELD; i < eights; ++i) store(made(source(i, false), i), i, scale);
}
