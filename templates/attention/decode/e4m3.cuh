// e4m3 in decoding: see quantized.cuh.
#pragma once
#include "attention/decode/quantized.cuh"
#include "kv/e4m3.cuh"

// Two codes in the high bytes of two halves. Moved down by one, exponent and mantissa are fp16's of
// a number 2^8 times smaller, subnormal or not; 0x7f, which is NaN, is the one that reaches 0x4000
// with 0x80 added, and misses one bit of an fp16 NaN.
__device__ __forceinline__ u32 widen_shifted(u32 codes) {
  const u32 magnitude = (codes & 0x7f007f00u) >> 1;
  const u32 bits = magnitude | (codes & 0x80008000u);
  const __half2 x = __hmul2(*reinterpret_cast<const __half2*>(&bits), __float2half2_rn(256.f));
  const u32 nan = ((magnitude + 0x00800080u) >> 1) & 0x20002000u;
  return *reinterpret_cast<const u32*>(&x) | nan;
}

// sm_89 and newer have an instruction for it.
template <>
__device__ __forceinline__ void widen<e4m3>(u32 codes, u32& low, u32& high) {
#if __CUDA_ARCH__ >= 890
  const __half2_raw x = __nv_cvt_fp8x2_to_halfraw2(static_cast<u16>(codes & 0xffff), __NV_E4M3);
  const __half2_raw y = __nv_cvt_fp8x2_to_halfraw2(static_cast<u16>(codes >> 16), __NV_E4M3);
  low = x.x | static_cast<u32>(x.y) << 16, high = y.x | static_cast<u32>(y.y) << 16;
#else
  low = widen_shifted(__byte_perm(codes, 0, 0x1404));
  high = widen_shifted(__byte_perm(codes, 0, 0x3424));
#endif
}
