// What codes of a tensor are multiplied with: the greatest magnitude of a span of numbers, divided by
// the greatest that a code stands for.
//
// Magnitudes are compared as the bits of |x|, whose order as whole numbers is that of the numbers,
// with infinity and every NaN above them all: neither is lost, as it would be in fmaxf.
#pragma once
#include "tile/reduce.cuh"
#include "quantize/codes.cuh"

constexpr u32 INFINITE_BITS = 0x7f800000;

__device__ __forceinline__ u32 magnitude(Eight x) {
  u32 most = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) most = max(most, __float_as_uint(x[i]) & 0x7fffffffu);
  return most;
}

// Over groups of LANES neighbouring lanes, by whole warps.           PTX ISA: shfl.sync.bfly.b32
template <int LANES>
__device__ __forceinline__ u32 lanes_most(u32 most) {
#pragma unroll
  for (int distance = LANES / 2; distance > 0; distance /= 2)
    most = max(most, __shfl_xor_sync(FULL_MASK, most, distance));
  return most;
}

// Over a block. `warps`: shared memory for THREADS / 32 words.
template <int THREADS>
__device__ __forceinline__ u32 block_most(u32 most, u32* warps) {
  constexpr int NUM_WARPS = THREADS / WARP_SIZE;
  most = lanes_most<WARP_SIZE>(most);
  if (threadIdx.x % WARP_SIZE == 0) warps[threadIdx.x / WARP_SIZE] = most;
  __syncthreads();
  const int lane = threadIdx.x % WARP_SIZE;
  return lanes_most<WARP_SIZE>(lane < NUM_WARPS ? warps[lane] : 0);
}

// The least scale: one whose inverse is a number, and which T has.
template <typename T>
constexpr float LEAST_SCALE = 0x1p-126f;
template <>
constexpr float LEAST_SCALE<fp16> = 0x1p-24f;

// Of numbers up to the magnitude `most`, as T keeps it: 1 of zeros, NaN where one is not finite.
template <typename T, typename Codes>
__device__ __forceinline__ T scale_of(u32 most) {
  float scale = 1.f;
  if (most > 0) scale = fmaxf(__uint_as_float(most) / Codes::GREATEST, LEAST_SCALE<T>);
  if (most >= INFINITE_BITS) scale = __uint_as_float(0x7fffffff);
  return static_cast<T>(scale);
}

// x / by rounded once (`Divisor` of kv/storage.cuh), of quotients that are no greater than a code: by a
// scale of their own, so that nothing is to be cut off.
struct Quotient {
  float by, inverse;
  __device__ __forceinline__ explicit Quotient(float divisor)
      : by(divisor), inverse(1.f / divisor) {}
  __device__ __forceinline__ float operator()(float x) const {
    const float quotient = x * inverse;
    return fmaf(-fmaf(quotient, by, -x), inverse, quotient);
  }
};

// Eight codes of such quotients. NaN becomes some code: its scale is NaN.
template <typename Codes>
__device__ __forceinline__ uint2 encode_quotients(const Eight& numbers, const Quotient& scaled) {
  Eight x = numbers;
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = scaled(x[i]);
  if constexpr (Codes::GREATEST == Int8Codes::GREATEST) {
    u32 word[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) word[i] = __float_as_uint(x[i] + ROUNDER);
#pragma unroll
    for (int i = 0; i < 8; i += 2) word[i] = __byte_perm(word[i], word[i + 1], 0x0040);
    return make_uint2(__byte_perm(word[0], word[2], 0x5410), __byte_perm(word[4], word[6], 0x5410));
  } else {
    return Codes::encode_scaled(x);
  }
}
