// Scalars: the special-function unit's approximations, and 16 bits packed in pairs.
#pragma once
#include "prelude.cuh"

// 2^x, about 2 ulp; 2^-inf = +0.                                  PTX ISA: ex2.approx.ftz.f32
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(x), within 2^-22 about 1; of +0 -inf.                        PTX ISA: lg2.approx.ftz.f32
__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, about 1 ulp; 1 / inf = +0.                               PTX ISA: rcp.approx.ftz.f32
__device__ __forceinline__ float inverse_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats rounded to nearest-even into one register; `low` takes bits 0..15.
template <typename T>
__device__ __forceinline__ u32 pack2(float low, float high);

template <>
__device__ __forceinline__ u32 pack2<fp16>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const u32*>(&pair);
}
template <>
__device__ __forceinline__ u32 pack2<bf16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const u32*>(&pair);
}

// The other way: bits 0..15 as x, bits 16..31 as y.
template <typename T>
__device__ __forceinline__ float2 unpack2(u32 pair);

template <>
__device__ __forceinline__ float2 unpack2<fp16>(u32 pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}
template <>
__device__ __forceinline__ float2 unpack2<bf16>(u32 pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

// a * b of two pairs of 16 bits.
template <typename T>
__device__ __forceinline__ u32 multiply_pairs(u32 a, u32 b);
template <>
__device__ __forceinline__ u32 multiply_pairs<fp16>(u32 a, u32 b) {
  const __half2 y = __hmul2(reinterpret_cast<__half2&>(a), reinterpret_cast<__half2&>(b));
  return reinterpret_cast<const u32&>(y);
}
template <>
__device__ __forceinline__ u32 multiply_pairs<bf16>(u32 a, u32 b) {
  const __nv_bfloat162 y =
      __hmul2(reinterpret_cast<__nv_bfloat162&>(a), reinterpret_cast<__nv_bfloat162&>(b));
  return reinterpret_cast<const u32&>(y);
}

// a - b of two pairs of 16 bits.
template <typename T>
__device__ __forceinline__ u32 subtract_pairs(u32 a, u32 b);
template <>
__device__ __forceinline__ u32 subtract_pairs<fp16>(u32 a, u32 b) {
  const __half2 y = __hsub2(reinterpret_cast<__half2&>(a), reinterpret_cast<__half2&>(b));
  return reinterpret_cast<const u32&>(y);
}
template <>
__device__ __forceinline__ u32 subtract_pairs<bf16>(u32 a, u32 b) {
  const auto y =
      __hsub2(reinterpret_cast<__nv_bfloat162&>(a), reinterpret_cast<__nv_bfloat162&>(b));
  return reinterpret_cast<const u32&>(y);
}

// (x & mask) ^ turned in one instruction, of which the compiler makes two where both are constants.
// PTX ISA: lop3.b32
__device__ __forceinline__ u32 and_xor(u32 x, u32 mask, u32 turned) {
  u32 made;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(made) : "r"(x), "r"(mask), "r"(turned));
  return made;
}
