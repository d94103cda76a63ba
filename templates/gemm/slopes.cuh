// The epilogue of the product behind a gated activation's gradients: the sums are dy of
// y = act(gate) * up, and memory has gate | up.
//
//   d_gate = dy * up * act'(gate)     d_up = dy * act(gate)     out = y, made again
//
// A thread reads the pairs of gate and up that belong to its sums, and writes d_gate | d_up, which
// may be where gate | up was.
#pragma once
#include "gemm/pairs.cuh"

template <typename Activation_, typename T>
struct SlopePairs {
  using Activation = Activation_;
  static constexpr bool GATE = false, PRE = true, RESIDUAL = false, TOUCHES_ROWS = true;
  const T* pre;  // [m, 2 n], contiguous
  T* dz;         // as pre
  int n;         // columns of out
  bool whole;

  __device__ __forceinline__ SlopePairs(const T* seen, T* made, int columns)
      : pre(seen), dz(made), n(columns), whole(has_whole_pairs(seen, columns)) {}

  __device__ __forceinline__ float2 operator()(float2 sums, float2 bias, float2 up, float2 bias_up,
                                               i64 row, int column) const {
    return activated(sums, bias, up, bias_up, row, column);
  }

  // out of one row that there is, at `column` and the next one, some of which there are.
  __device__ __forceinline__ float2 activated(float2 dy, float2, float2, float2, i64 row,
                                              int column) const {
    const i64 place = row * 2 * n + column;
    const int left = n - column;
    const float2 gate = load_pair(pre + place, whole, left);
    const float2 up = load_pair(pre + place + n, whole, left);
    const float2 value = {Activation::value(gate.x), Activation::value(gate.y)};
    store_pair(dz + place,
               {dy.x * up.x * Activation::slope(gate.x), dy.y * up.y * Activation::slope(gate.y)},
               whole, left);
    store_pair(dz + place + n, {dy.x * value.x, dy.y * value.y}, whole, left);
    return {value.x * up.x, value.y * up.y};
  }
};
