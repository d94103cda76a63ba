// fp8 with 5 bits of exponent and 2 of mantissa: numbers by a scale of e4m3, so that 448 is the
// greatest, and 2^-16 the least that is no zero.
#pragma once
#include "quantize/codes.cuh"

struct e5m2 {
  __nv_fp8_storage_t bits;
};

// Rounded to the nearest, ties to even; NaN stays NaN.
template <>
struct Quantized<e5m2> {
  template <typename T, int SIZE>
  static __device__ __forceinline__ Elements<e5m2, SIZE> encode(const Elements<T, SIZE>& x,
                                                                const Divisor& scaled) {
    Elements<e5m2, SIZE> codes;
#pragma unroll
    for (int i = 0; i < SIZE; i += 2) {
      const float2 pair{scaled(static_cast<float>(x[i])), scaled(static_cast<float>(x[i + 1]))};
      const u16 both = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E5M2);
      codes[i].bits = both & 0xff;
      codes[i + 1].bits = both >> 8;
    }
    return codes;
  }
};

struct E5m2Codes : ByteCodes<e5m2> {
  static constexpr float GREATEST = 448.f;

  // Of numbers that are divided already.
  static __device__ __forceinline__ uint2 encode_scaled(Eight x) {
    u32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      pairs[i] = __nv_cvt_float2_to_fp8x2({x[2 * i], x[2 * i + 1]}, __NV_SATFINITE, __NV_E5M2);
    return make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
  }
};
