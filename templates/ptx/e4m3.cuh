// Numbers as e4m3 (sm_89): four in a register, the first one in bits 0..7. What is above 448 becomes
// 448, NaN stays NaN.
#pragma once
#include "prelude.cuh"

// PTX ISA: cvt.rn.satfinite.e4m3x2.f32 d, high, low
__device__ __forceinline__ u32 pack4_e4m3(float a, float b, float c, float d) {
  u32 four;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}"
      : "=r"(four)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return four;
}
