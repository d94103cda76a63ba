// The pairs of columns that a rotary embedding turns: which of them a thread has, and how it reads,
// turns and writes them.
#pragma once
#include "tile/vector.cuh"

// One element, with the interface of Vector.
template <typename T>
struct Element {
  static constexpr int SIZE = 1;
  T value;

  __device__ __forceinline__ float get(int) const { return static_cast<float>(value); }
  __device__ __forceinline__ void set(int, float x) { value = static_cast<T>(x); }
};

template <typename T>
__device__ __forceinline__ void read(Vector<T>& x, const T* source) {
  x = load_vector(source);
}
template <typename T>
__device__ __forceinline__ void read(Element<T>& x, const T* source) {
  x.value = *source;
}
template <typename T>
__device__ __forceinline__ void write(T* target, const Vector<T>& x) {
  store_vector(target, x);
}
template <typename T>
__device__ __forceinline__ void write(T* target, const Element<T>& x) {
  *target = x.value;
}

template <typename T, bool VECTOR>
struct AccessOf {
  using type = Vector<T>;
};
template <typename T>
struct AccessOf<T, false> {
  using type = Element<T>;
};

// A thread's pairs of one head: WIDTH of them, in two accesses x and y.
//
//   halves (NeoX)   columns i and i + rotary_dim / 2 are a pair: x[i] and y[i].
//   INTERLEAVED     columns 2i and 2i + 1 are a pair: x and y hold WIDTH / 2 whole ones each. A
//                   single element holds none, so there x and y are neighbours.
//
//   columns    0    lane * WIDTH    rotary_dim / 2    rotary_dim / 2 + lane * WIDTH    rotary_dim
//              |----[x x x x]-------|-----------------[y y y y]------------------------|
//
// Either way a warp's accesses are neighbours.
template <typename T, bool VECTOR, bool INTERLEAVED>
struct RopePairs {
  using Access = typename AccessOf<T, VECTOR>::type;
  static constexpr int WIDTH = Access::SIZE;
  static constexpr bool INSIDE = INTERLEAVED && WIDTH > 1;  // a pair lies in one access
  static constexpr int GROUP = INSIDE ? WIDTH / 2 : WIDTH;  // pairs with neighbouring numbers
  static constexpr int GROUPS = WIDTH / GROUP;
  Access x, y;

  // Number of the first pair of a group, a multiple of GROUP.
  static __device__ __forceinline__ int first(int group, int lane, int rotary_dim) {
    return lane * GROUP + group * (rotary_dim / 4);
  }
  static __device__ __forceinline__ int column(int access, int lane, int rotary_dim) {
    if (INTERLEAVED && !INSIDE) return 2 * lane + access;
    return lane * WIDTH + access * (rotary_dim / 2);
  }

  __device__ __forceinline__ void load(const T* row, int lane, int rotary_dim) {
    read(x, row + column(0, lane, rotary_dim));
    read(y, row + column(1, lane, rotary_dim));
  }
  __device__ __forceinline__ void store(T* row, int lane, int rotary_dim) const {
    write(row + column(0, lane, rotary_dim), x);
    write(row + column(1, lane, rotary_dim), y);
  }

  // By angles of pairs first(0) and on, then first(1) and on.
  __device__ __forceinline__ void turn(const float (&cosine)[WIDTH], const float (&sine)[WIDTH]) {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      Access& a = INSIDE && i >= GROUP ? y : x;
      Access& b = INSIDE && i < GROUP ? x : y;
      const int left = INSIDE ? 2 * (i % GROUP) : i, right = INSIDE ? left + 1 : i;
      const float u = a.get(left), v = b.get(right);
      a.set(left, u * cosine[i] - v * sine[i]);
      b.set(right, v * cosine[i] + u * sine[i]);
    }
  }
};
