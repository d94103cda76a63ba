// What every kernel starts from: names for element types and fixed-width integers, the strides
// struct, and the few constants and one-line functions used everywhere.
//
// NVRTC has no stdint.h and kernels are compiled for 64-bit Linux and Windows alike, so the integer
// names are spelled from types whose width is the same on both.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

using fp16 = __half;
using bf16 = __nv_bfloat16;
using fp32 = float;

using i8 = signed char;
using i16 = short;
using i32 = int;
using i64 = long long;
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

static_assert(sizeof(i16) == 2 && sizeof(i32) == 4 && sizeof(i64) == 8, "fixed-width integers");
static_assert(sizeof(void*) == 8, "fkjit passes 64-bit pointers");

// Strides of a [batch, head, row, column] tensor whose columns are contiguous, in elements.
struct Strides {
  i64 batch;
  i64 head;
  i64 row;
};

constexpr i32 WARP_SIZE = 32;
constexpr u32 FULL_MASK = 0xffffffffu;  // every lane of a warp, for *_sync intrinsics

constexpr fp32 LOG2E = 1.4426950408889634f;  // exp(x) = exp2(x * LOG2E)
constexpr fp32 LN2 = 0.6931471805599453f;    // log(x) = log2(x) * LN2

// IEEE minus infinity: the maximum of nothing. Beware that NEG_INFINITY - NEG_INFINITY is NaN.
#ifdef __clang__  // editors: clang's constants have no division by zero, NVRTC's no other spelling
constexpr fp32 NEG_INFINITY = -__builtin_huge_valf();
#else
constexpr fp32 NEG_INFINITY = -(1.0f / 0.0f);
#endif

// The least number of pieces of `size` that cover `total`; total >= 0, size > 0.
template <typename T>
__host__ __device__ constexpr T ceil_div(T total, T size) {
  return (total + size - 1) / size;
}

// `value` rounded up to a multiple of `step`; both are positive.
template <typename T>
__host__ __device__ constexpr T round_up(T value, T step) {
  return ceil_div(value, step) * step;
}

template <typename T>
__host__ __device__ constexpr T min_of(T a, T b) {
  return b < a ? b : a;
}
