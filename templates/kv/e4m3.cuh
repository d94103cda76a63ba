// fp8 (e4m3) in a KV cache: 4 bits of exponent, 3 of mantissa; the greatest number is 448.
#pragma once
#include <cuda_fp8.h>

#include "kv/storage.cuh"

struct e4m3 {
  __nv_fp8_storage_t bits;
};

// Rounded to the nearest, ties to even; the greatest number, whatever is beyond; NaN stays NaN.
template <typename Code, __nv_fp8_interpretation_t KIND>
struct Fp8Encoder {
  template <typename T, int SIZE>
  static __device__ __forceinline__ Elements<Code, SIZE> encode(const Elements<T, SIZE>& x,
                                                                const Divisor& scaled) {
    Elements<Code, SIZE> codes;
#pragma unroll
    for (int i = 0; i + 1 < SIZE; i += 2) {  // one conversion for two
      const float2 pair{scaled(static_cast<float>(x[i])), scaled(static_cast<float>(x[i + 1]))};
      const u16 both = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, KIND);
      codes[i].bits = both & 0xff;
      codes[i + 1].bits = both >> 8;
    }
    if (SIZE % 2) {
      const float last = scaled(static_cast<float>(x[SIZE - 1]));
      codes[SIZE - 1].bits = __nv_cvt_float_to_fp8(last, __NV_SATFINITE, KIND);
    }
    return codes;
  }
};

template <>
struct Quantized<e4m3> : Fp8Encoder<e4m3, __NV_E4M3> {
  template <typename T, int SIZE>
  static __device__ __forceinline__ Elements<T, SIZE> decode(const Elements<e4m3, SIZE>& codes,
                                                             float scale) {
    Elements<T, SIZE> x;
#pragma unroll
    for (int i = 0; i + 1 < SIZE; i += 2) {
      const u16 both = codes[i].bits | codes[i + 1].bits << 8;
      const float2 pair = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(both, __NV_E4M3)));
      x[i] = static_cast<T>(pair.x * scale);
      x[i + 1] = static_cast<T>(pair.y * scale);
    }
    if (SIZE % 2) {
      const __half last(__nv_cvt_fp8_to_halfraw(codes[SIZE - 1].bits, __NV_E4M3));
      x[SIZE - 1] = static_cast<T>(__half2float(last) * scale);
    }
    return x;
  }
};
