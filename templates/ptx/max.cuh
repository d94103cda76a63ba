// Maxima of which NaN is part: fmaxf would drop it.
#pragma once
#include "prelude.cuh"

// The greater of two; NaN if one is.
// PTX ISA: max.NaN.f32 (sm_80)
__device__ __forceinline__ float max_or_nan(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
#else
  return a > b || a != a ? a : b;
#endif
}
