// Where the arrays of a model's layers are, for a kernel that goes through all of them: a table of how
// many elements behind one address each begins.
#pragma once
#include "ptx/memory.cuh"

// The products of a layer in their order, and the last of all.
enum : int { QKV, OUT, UP, DOWN, HEAD };

// Of a layer: elements behind `weights`, NONE: there is no such array. Window: keys that a token sees;
// 0: all. Scales: of a product whose weight is codes of int4, a scale for 128 of them; rows of scales
// are as many as fill 16 bytes.
struct LayerWeights {
  static constexpr i64 NONE = -1ll << 62;
  struct Affine {
    i64 weight, bias;
  };
  Affine norm, qkv, out, mlp_norm, up, down;
  i64 window;
  i64 scales[4];  // of qkv, out, up, down

  __device__ __forceinline__ const Affine& product(int kind) const {
    return kind == QKV ? qkv : kind == OUT ? out : kind == UP ? up : down;
  }
};

// What a block has of one product of the step. All that takes divisions and trips to memory is worked
// out once, when the kernel begins, to a list in shared memory.
template <typename T>
struct Product {
  const T *bias, *norm, *norm_bias;  // null: there is none
  int begin, outputs;                // of this block
  int window;
  bool coded;  // the weight is codes of int4
};

template <typename T>
__device__ __forceinline__ const T* array_at(const T* weights, i64 offset) {
  return offset == LayerWeights::NONE ? nullptr : weights + offset;
}

// A layer's product, without what the block has of it. Its norm is that of the rows that it takes.
template <typename T>
__device__ __forceinline__ Product<T> product_of(const T* weights, const LayerWeights& layer,
                                                 int kind) {
  const LayerWeights::Affine &own = layer.product(kind),
                             &norm = kind == UP ? layer.mlp_norm : layer.norm;
  const bool normed = kind == QKV || kind == UP;
  return {array_at(weights, own.bias),
          normed ? array_at(weights, norm.weight) : nullptr,
          normed ? array_at(weights, norm.bias) : nullptr,
          0,
          0,
          static_cast<int>(layer.window),
          layer.scales[kind] != LayerWeights::NONE};
}

// Outputs that a block has of a product. Where they do not divide, some blocks have one more: others by
// each `turn`, so that all of them read as much in the end.
template <typename T>
__device__ __forceinline__ void share_out(Product<T>& product, int n, int turn) {
  const int blocks = gridDim.x, at = (blockIdx.x + turn * 29) % blocks;
  product.begin = static_cast<int>(static_cast<i64>(n) * at / blocks);
  product.outputs = static_cast<int>(static_cast<i64>(n) * (at + 1) / blocks) - product.begin;
}

// `count` elements come to L2, a part of the lines by each block. By one warp.
template <typename T>
__device__ __forceinline__ void prefetch_small(const T* array, int count) {
  constexpr int LINE = 128 / sizeof(T);
  if (array == nullptr) return;
#pragma unroll 1
  for (int at = (blockIdx.x + gridDim.x * (threadIdx.x % WARP_SIZE)) * LINE; at < count;
       at += gridDim.x * WARP_SIZE * LINE)
    prefetch_l2(array + at);
}
