// The epilogue of a product for tensor-core fragments: a thread holds columns in pairs.
//
//   EpiloguePairs<Activation, GATE, T, Out> epilogue(arguments ...);
//   const ColumnPair columns = epilogue.columns(column);        bias of a pair, once for all rows
//   float2 y = epilogue(columns, sums, sums_up, row);
#pragma once
#include "gemm/activation.cuh"
#include "gemm/epilogue.cuh"

// Two neighbours of an array of which `left` more elements exist; zeros for the rest. WHOLE: all
// such pairs may be read as one.
template <typename T>
__device__ __forceinline__ float2 load_pair(const T* source, bool whole, int left) {
  if (whole && left >= 2) {
    if constexpr (sizeof(T) == 4) {
      return *reinterpret_cast<const float2*>(source);
    } else {
      return unpack2<T>(*reinterpret_cast<const u32*>(source));
    }
  }
  float2 pair = {0.f, 0.f};
  if (left > 0) pair.x = static_cast<float>(source[0]);
  if (left > 1) pair.y = static_cast<float>(source[1]);
  return pair;
}

template <typename T>
__device__ __forceinline__ void store_pair(T* target, float2 pair, bool whole, int left) {
  if (whole && left >= 2) {
    if constexpr (sizeof(T) == 4) {
      *reinterpret_cast<float2*>(target) = pair;
    } else {
      *reinterpret_cast<u32*>(target) = pack2<T>(pair.x, pair.y);
    }
    return;
  }
  if (left > 0) target[0] = static_cast<T>(pair.x);
  if (left > 1) target[1] = static_cast<T>(pair.y);
}

// Whether all pairs of an array start on a boundary of a pair; rows `stride` elements apart.
template <typename T>
__device__ __forceinline__ bool has_whole_pairs(const T* array, i64 stride) {
  return stride % 2 == 0 && reinterpret_cast<u64>(array) % (2 * sizeof(T)) == 0;
}

struct ColumnPair {
  int column, left;  // of the first one; how many columns there are from it on, maybe none
  float2 bias, bias_up;
};

template <typename Activation, bool GATE, typename T, typename Out>
struct EpiloguePairs {
  Epilogue<Activation, GATE, T, Out> each;
  bool bias_whole, residual_whole, pre_whole;

  __device__ __forceinline__ EpiloguePairs(const T* bias, const Out* residual, T* pre,
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
