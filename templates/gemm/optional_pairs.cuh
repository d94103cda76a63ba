// The epilogue of pairs.cuh where null pointers stand for what is not there.
//
//   OptionalPairs<Activation, GATE, T, Out> epilogue(arguments ...);
//   const ColumnPair columns = epilogue.columns(column);        bias of a pair, once for all rows
//   float2 y = epilogue(columns, sums, sums_up, row);
#pragma once
#include "gemm/epilogue.cuh"
#include "gemm/pairs.cuh"

struct ColumnPair {
  int column, left;  // of the first one; how many columns there are from it on, maybe none
  float2 bias, bias_up;
};

template <typename Activation, bool GATE, typename T, typename Out>
struct OptionalPairs {
  Epilogue<Activation, GATE, T, Out> each;
  bool bias_whole, residual_whole, pre_whole;

  __device__ __forceinline__ OptionalPairs(const T* bias, const Out* residual, T* pre,
                                           i64 residual_stride, float scale, int n)
      : each{bias, residual, pre, residual_stride, scale, n},
        bias_whole(has_whole_pairs(bias, GATE ? n : 0)),
        residual_whole(has_whole_pairs(residual, residual_stride)),
        pre_whole(has_whole_pairs(pre, n)) {}

  __device__ __forceinline__ ColumnPair columns(int column) const {
    ColumnPair found{column, each.n - column, {0.f, 0.f}, {0.f, 0.f}};
    if (each.bias == nullptr) return found;
    found.bias = load_pair(each.bias + column, bias_whole, found.left);
    if (GATE) found.bias_up = load_pair(each.bias + each.n + column, bias_whole, found.left);
    return found;
  }

  // out of one row that there is. `up` is not looked at without GATE.
  __device__ __forceinline__ float2 operator()(const ColumnPair& columns, float2 sums, float2 up,
                                               i64 row) const {
    const float2 z = before(sums, columns.bias);
    float2 y = {Activation::value(z.x), Activation::value(z.y)};
    keep(z, row, columns.column, columns.left);
    if (GATE) {
      const float2 z_up = before(up, columns.bias_up);
      keep(z_up, row, each.n + columns.column, columns.left);
      y.x *= z_up.x, y.y *= z_up.y;
    }
    if (each.residual == nullptr) return y;
    const float2 added = load_pair(each.residual + row * each.residual_stride + columns.column,
                                   residual_whole, columns.left);
    return {y.x + added.x, y.y + added.y};
  }

 private:
  __device__ __forceinline__ float2 before(float2 sums, float2 bias) const {
    return {each.scale * sums.x + bias.x, each.scale * sums.y + bias.y};
  }

  __device__ __forceinline__ void keep(float2 z, i64 row, int column, int left) const {
    if (each.pre == nullptr) return;
    const i64 stride = (GATE ? 2 : 1) * static_cast<i64>(each.n);
    store_pair(each.pre + row * stride + column, z, pre_whole, left);
  }
};
