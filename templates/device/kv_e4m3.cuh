// fp8 (e4m3) in a KV cache: 4 bits of exponent, 3 of mantissa; the greatest number is 448.
#pragma once
#include <cuda_fp8.h>

#include "device/kv_storage.cuh"

struct e4m3 {
  __nv_fp8_storage_t bits;
};

// Rounded to the nearest, ties to even; -448 to 448, whatever is beyond; NaN stays NaN.
template <>
struct Kept<e4m3> {
  template <typename T, int SIZE>
  static __device__ __forceinline__ Elements<e4m3, SIZE> encode(const Elements<T, SIZE>& x,
                                                                float inverse) {
    Elements<e4m3, SIZE> codes;
#pragma unroll
    for (int i = 0; i < SIZE; ++i) {
      const float scaled = static_cast<float>(x[i]) * inverse;
      codes[i].bits = __nv_cvt_float_to_fp8(scaled, __NV_SATFINITE, __NV_E4M3);
    }
    return codes;
  }
  template <typename T, int SIZE>
  static __device__ __forceinline__ Elements<T, SIZE> decode(const Elements<e4m3, SIZE>& codes,
                                                             float scale) {
    Elements<T, SIZE> x;
#pragma unroll
    for (int i = 0; i < SIZE; ++i) {
      const __half wide(__nv_cvt_fp8_to_halfraw(codes[i].bits, __NV_E4M3));
      x[i] = static_cast<T>(__half2float(wide) * scale);
    }
    return x;
  }
};
