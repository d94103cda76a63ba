// The epilogue of a product for tensor-core fragments: a thread holds columns in pairs.
//
//   z   = scale * sum + bias                       kept as `pre` where PRE
//   y   = activation(z)         or, with GATE,     activation(z) * z_up
//   out = y + residual                             where RESIDUAL
//
// What is not there costs nothing: PRE and RESIDUAL are compiled in.
#pragma once
#include "gemm/activation.cuh"

// Two neighbours of an array as they lie in memory. Of loads that are to be under way together all
// are asked for before the first `get`, which waits for its own.
template <typename T>
struct Pair {
  u32 bits;

  // `left`: how many more elements exist, zeros for the rest. `whole`: all pairs may be read as one.
  __device__ __forceinline__ void load(const T* source, bool whole, int left) {
    if (whole && left >= 2) {
      bits = *reinterpret_cast<const u32*>(source);
    } else {
      const unsigned short* halves = reinterpret_cast<const unsigned short*>(source);
      const u32 low = left > 0 ? halves[0] : 0, high = left > 1 ? halves[1] : 0;
      bits = low | high << 16;
    }
  }
  __device__ __forceinline__ float2 get() const { return unpack2<T>(bits); }
};

template <>
struct Pair<float> {
  float2 pair;

  __device__ __forceinline__ void load(const float* source, bool whole, int left) {
    if (whole && left >= 2) {
      pair = *reinterpret_cast<const float2*>(source);
    } else {
      pair = {left > 0 ? source[0] : 0.f, left > 1 ? source[1] : 0.f};
    }
  }
  __device__ __forceinline__ float2 get() const { return pair; }
};

template <typename T>
__device__ __forceinline__ float2 load_pair(const T* source, bool whole, int left) {
  Pair<T> pair;
  pair.load(source, whole, left);
  return pair.get();
}

__device__ __forceinline__ float2 added(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }

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

// The same of 16 bytes.
template <typename T>
__device__ __forceinline__ bool has_whole_chunks(const T* array, i64 stride) {
  return stride * sizeof(T) % 16 == 0 && reinterpret_cast<u64>(array) % 16 == 0;
}

// The bias of pairs of columns, of which some may not be there: zeros then, and where there is no
// bias.
template <typename T>
struct BiasPairs {
  const T* bias;
  int n;
  bool whole;

  __device__ __forceinline__ BiasPairs(const T* array, int columns, bool gate)
      : bias(array), n(columns), whole(has_whole_pairs(array, gate ? columns : 0)) {}

  __device__ __forceinline__ float2 operator()(int column) const {
    return at(bias + column, column);
  }
  __device__ __forceinline__ float2 up(int column) const { return at(bias + n + column, column); }

 private:
  __device__ __forceinline__ float2 at(const T* pair, int column) const {
    return bias == nullptr ? float2{0.f, 0.f} : load_pair(pair, whole, n - column);
  }
};

template <typename Activation_, bool GATE_, bool PRE_, bool RESIDUAL_, typename T, typename Out>
struct EpiloguePairs {
  using Activation = Activation_;
  static constexpr bool GATE = GATE_, PRE = PRE_, RESIDUAL = RESIDUAL_;
  static constexpr bool TOUCHES_ROWS = PRE || RESIDUAL;  // memory of a row, which has to be there
  const Out* residual;                                   // [m, n]
  T* pre;                                                // [m, n], with GATE [m, 2 n]: contiguous
  i64 residual_stride;                                   // elements
  float scale;
  int n;  // columns of out
  bool residual_whole, pre_whole;

  __device__ __forceinline__ EpiloguePairs(const Out* added, T* kept, i64 stride, float factor,
                                           int columns)
      : residual(added),
        pre(kept),
        residual_stride(stride),
        scale(factor),
        n(columns),
        residual_whole(has_whole_pairs(added, stride)),
        pre_whole(has_whole_pairs(kept, columns)) {}

  // out of one row that there is, at `column` and the next one, some of which there are. `up` and
  // its bias are not looked at without GATE.
  __device__ __forceinline__ float2 operator()(float2 sums, float2 bias, float2 up, float2 bias_up,
                                               i64 row, int column) const {
    const float2 y = activated(sums, bias, up, bias_up, row, column);
    return RESIDUAL ? added(y, residual_pair(row, column).get()) : y;
  }

  // The same before the residual; of `row` and `column` memory is touched where PRE.
  __device__ __forceinline__ float2 activated(float2 sums, float2 bias, float2 up, float2 bias_up,
                                              i64 row, int column) const {
    const float2 z = before(sums, bias);
    float2 y = {Activation::value(z.x), Activation::value(z.y)};
    if (PRE) keep(z, row, column, n - column);
    if (GATE) {
      const float2 z_up = before(up, bias_up);
      if (PRE) keep(z_up, row, n + column, n - column);
      y.x *= z_up.x, y.y *= z_up.y;
    }
    return y;
  }

  __device__ __forceinline__ Pair<Out> residual_pair(i64 row, int column) const {
    Pair<Out> pair;
    pair.load(residual + row * residual_stride + column, residual_whole, n - column);
    return pair;
  }

 private:
  __device__ __forceinline__ float2 before(float2 sums, float2 bias) const {
    return {scale * sums.x + bias.x, scale * sums.y + bias.y};
  }

  __device__ __forceinline__ void keep(float2 z, i64 row, int column, int left) const {
    const i64 stride = (GATE ? 2 : 1) * static_cast<i64>(n);
    store_pair(pre + row * stride + column, z, pre_whole, left);
  }
};
