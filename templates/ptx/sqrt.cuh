// Square roots without a branch.
#pragma once
#include "prelude.cuh"

// About 1 ulp; denormals as they are.                              PTX ISA: sqrt.approx.f32
__device__ __forceinline__ float sqrt_fast(float x) {
  float y;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
