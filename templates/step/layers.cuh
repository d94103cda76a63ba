// Where the arrays of a model's layers are, for a kernel that goes through all of them: a table of how
// many elements behind one address each begins.
#pragma once
#include "ptx/memory.cuh"

// The products of a layer in their order, and the last of all.
enum : int { QKV, OUT, UP, DOWN, HEAD };

// Of a layer: elements behind `weights`, NONE: there is no such array. Window: keys that a token sees;
// 0: all.
struct LayerWeights {
  static constexpr i64 NONE = -1ll << 62;
  struct Affine {
    i64 weight, bias;
  };
  Affine norm, qkv, out, mlp_norm, up, down;
  i64 window;

  __device__ __forceinline__ const Affine& product(int kind) const {
    return kind == QKV ? qkv : kind == OUT ? out : kind == UP ? up : down;
  }
};

template <typename T>
struct Arrays {
  const T *weight, *bias;
};

template <typename T>
__device__ __forceinline__ Arrays<T> arrays_at(const T* weights, const LayerWeights::Affine& at) {
  return {weights + at.weight, at.bias == LayerWeights::NONE ? nullptr : weights + at.bias};
}

// To shared memory. By all threads, who meet before they read it.
__device__ __forceinline__ void copy_table(LayerWeights* target, const LayerWeights* source,
                                           int layers) {
  const int words = layers * sizeof(LayerWeights) / sizeof(i64);
  for (int i = threadIdx.x; i < words; i += blockDim.x)
    reinterpret_cast<i64*>(target)[i] = reinterpret_cast<const i64*>(source)[i];
}

// Norms' weights and biases of a layer come to L2, a part of the lines by each block. By one warp.
template <bool GATE, typename T>
__device__ __forceinline__ void prefetch_small(const T* weights, const LayerWeights& layer,
                                               int hidden, int heads, int mlp) {
  const i64 offsets[] = {layer.norm.weight,   layer.norm.bias, layer.mlp_norm.weight,
                         layer.mlp_norm.bias, layer.qkv.bias,  layer.out.bias,
                         layer.up.bias,       layer.down.bias};
  const int sizes[] = {hidden, hidden, hidden, hidden, heads, hidden, GATE ? 2 * mlp : mlp, hidden};
  constexpr int LINE = 128 / sizeof(T);
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (offsets[i] != LayerWeights::NONE)
#pragma unroll 1
      for (int at = (blockIdx.x + gridDim.x * (threadIdx.x % WARP_SIZE)) * LINE; at < sizes[i];
           at += gridDim.x * WARP_SIZE * LINE)
        prefetch_l2(weights + offsets[i] + at);
}
