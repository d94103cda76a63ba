// Activations of a product's epilogue and their derivatives, in fp32.
//
// Of x far from 0 the sigmoids and exponentials are 0, 1 or inf, and each quotient still comes out
// as its limit: no case is taken apart.
#pragma once
#include "ptx/math.cuh"

// 1 / (1 + exp(-x)), about 2 ulp.
__device__ __forceinline__ float sigmoid(float x) {
  return inverse_fast(1.f + exp2_fast(-LOG2E * x));
}

struct Identity {
  __device__ __forceinline__ static float value(float x) { return x; }
  __device__ __forceinline__ static float slope(float) { return 1.f; }
};

struct Relu {
  // As PyTorch's: NaN stays NaN.
  __device__ __forceinline__ static float value(float x) { return x < 0.f ? 0.f : x; }
  __device__ __forceinline__ static float slope(float x) { return x > 0.f ? 1.f : 0.f; }
};

// x * sigmoid(x)
struct Silu {
  __device__ __forceinline__ static float value(float x) { return x * sigmoid(x); }
  __device__ __forceinline__ static float slope(float x) {
    const float s = sigmoid(x);
    return s * (1.f + x * (1.f - s));
  }
};

// x * Phi(x), the normal distribution's.                      Hendrycks, Gimpel (2016)
struct Gelu {
  __device__ __forceinline__ static float phi(float x) {
    return 0.5f + 0.5f * erff(x * 0.70710678f);
  }
  __device__ __forceinline__ static float value(float x) { return x * phi(x); }
  __device__ __forceinline__ static float slope(float x) {
    return phi(x) + x * 0.39894228f * exp2_fast(-0.5f * LOG2E * x * x);
  }
};

// x / 2 * (1 + tanh(u)) = x * sigmoid(2 u) with u = sqrt(2 / pi) * (x + 0.044715 x^3). The sigmoid
// keeps its relative precision where 1 + tanh(u) cancels.
struct GeluTanh {
  static constexpr float A = 1.59576912f, B = 0.0713548162f;  // 2 sqrt(2 / pi), that * 0.044715
  __device__ __forceinline__ static float sigmoid_of(float x) {
    return inverse_fast(1.f + exp2_fast(x * (-LOG2E * A - LOG2E * B * x * x)));
  }
  __device__ __forceinline__ static float value(float x) { return x * sigmoid_of(x); }
  __device__ __forceinline__ static float slope(float x) {
    const float s = sigmoid_of(x);
    return s + x * s * (1.f - s) * (A + 3.f * B * x * x);
  }
};

// The caller's expression of `x`, and its derivative. Of `x` = inf it is whatever he wrote.
#ifdef EPILOGUE_EXPRESSION
struct Mod {
  __device__ __forceinline__ static float value(float x) { return EPILOGUE_EXPRESSION; }
  __device__ __forceinline__ static float slope(float x) { return EPILOGUE_DERIVATIVE; }
};
#endif
