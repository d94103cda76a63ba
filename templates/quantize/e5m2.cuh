// fp8 with 5 bits of exponent and 2 of mantissa: numbers by a scale of e4m3, so that 448 is the
// greatest, and 2^-16 the least that is no zero.
#pragma once
#include "quantize/codes.cuh"

struct e5m2 {
  __nv_fp8_storage_t bits;
};

template <>
struct Quantized<e5m2> : Fp8Encoder<e5m2, __NV_E5M2> {};

using E5m2Codes = FloatCodes<e5m2, __NV_E5M2>;
