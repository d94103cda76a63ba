// What the sums of a product become, while they are still in registers:
//
//   z   = scale * sum + bias                       `pre`, for a backward that wants it
//   y   = activation(z)         or, with GATE,     activation(z) * z_up
//   out = y + residual
//
// With GATE a weight holds the rows of gate and, behind them, those of up: z has 2 n columns, y n.
// Null pointers stand for what is not there.
#pragma once
#include "prelude.cuh"
#include "gemm/activation.cuh"

// T: of bias and pre. Out: of residual (and of out, which is the kernel's to store).
template <typename Activation, bool GATE, typename T, typename Out>
struct Epilogue {
  const T* bias;        // [n], or [2 n] with GATE
  const Out* residual;  // [m, n]
  T* pre;               // [m, n], or [m, 2 n] with GATE: contiguous
  i64 residual_stride;  // elements
  float scale;
  int n;  // columns of out

  // z of one element; `column` counts to 2 n with GATE.
  __device__ __forceinline__ float before(float sum, i64 row, int column) const {
    float z = scale * sum;
    if (bias != nullptr) z += static_cast<float>(bias[column]);
    if (pre != nullptr)
      pre[row * ((GATE ? 2 : 1) * static_cast<i64>(n)) + column] = static_cast<T>(z);
    return z;
  }

  __device__ __forceinline__ float after(float y, i64 row, int column) const {
    return residual == nullptr ? y
                               : y + static_cast<float>(residual[row * residual_stride + column]);
  }

  // One element of out, inside it. Without GATE `up` is not looked at.
  __device__ __forceinline__ float operator()(float sum, float up, i64 row, int column) const {
    float y = Activation::value(before(sum, row, column));
    if (GATE) y *= before(up, row, n + column);
    return after(y, row, column);
  }
};
