// Query rows of decoding: new token i of a KV head's g-th query head is row i * group_size + g.
#pragma once
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "attention/decode/merge.cuh"
#include "attention/decode/quantized.cuh"

// The warps of a group meet: one, or the block's.
template <int WARPS>
__device__ __forceinline__ void group_sync() {
  if (WARPS == 1) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

struct QueryRows {
  int group_size, tokens, kv_heads;
  float group_inverse;  // 1 / group_size: a quotient of row + 1/2 is far enough from whole numbers
  int packed = 0;       // rows of q and o in all, where these are packed, one a sequence

  __device__ __forceinline__ int count() const { return group_size * tokens; }
  __device__ __forceinline__ int token(int row) const {
    return static_cast<int>((static_cast<float>(row) + 0.5f) * group_inverse);
  }
  __device__ __forceinline__ int head(int kv_head, int row) const {
    return (kv_head - token(row)) * group_size + row;
  }
  __device__ __forceinline__ i64 offset(const Strides& strides, int sequence, int kv_head,
                                        int row) const {
    return sequence * strides.batch + head(kv_head, row) * strides.head + token(row) * strides.row;
  }
};

// The rows from `row0` on of one sequence and KV head.
struct RowTile {
  QueryRows rows;
  int sequence, kv_head, row0, count;  // sequence: or its row of q and o, where these are packed

  __device__ __forceinline__ i64 offset(const Strides& strides, int row) const {
    return rows.offset(strides, sequence, kv_head, row0 + row);
  }

  // Four columns of a row; with the first ones its lse, unless that is null.
  template <typename T>
  __device__ __forceinline__ void store(T* __restrict__ o, const Strides& strides, float* lse,
                                        int columns, int row, int column, const Quad& quad) const {
    if (column >= columns) return;
    *reinterpret_cast<uint2*>(o + offset(strides, row) + column) =
        make_uint2(pack2<T>(quad.value.x, quad.value.y), pack2<T>(quad.value.z, quad.value.w));
    if (column != 0 || lse == nullptr) return;
    const int own = rows.head(kv_head, row0 + row);
    if (rows.packed > 0) {
      lse[static_cast<i64>(own) * rows.packed + sequence] = quad.state.lse();
      return;
    }
    const i64 head = static_cast<i64>(sequence) * rows.kv_heads * rows.group_size + own;
    lse[head * rows.tokens + rows.token(row0 + row)] = quad.state.lse();
  }
};

// The way of queries to a tile: loads first, which travel while other things are done, then stores.
template <typename Tile, int THREADS>
struct QueryCopy {
  static constexpr int CHUNKS = Tile::PANELS * Tile::CHUNKS, ALL = Tile::ROWS * CHUNKS;
  static constexpr int COUNT = ceil_div(ALL, THREADS);
  static_assert(ALL % THREADS == 0 || COUNT == 1, "every thread has as many chunks, or some none");
  uint4 chunks[COUNT];

  __device__ __forceinline__ QueryCopy() {}  // to be assigned

  // Rows and columns that there are not are zeros.
  template <typename T>
  __device__ __forceinline__ QueryCopy(const RowTile& tile, const T* __restrict__ q,
                                       const Strides& strides, int columns) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int at = threadIdx.x + i * THREADS, row = at / CHUNKS, column = at % CHUNKS * 8;
      chunks[i] = make_uint4(0, 0, 0, 0);
      if (row < tile.count && column < columns)
        chunks[i] = *reinterpret_cast<const uint4*>(q + tile.offset(strides, row) + column);
    }
  }

  // `flip` is XORed into every word. PERMUTED: in the order of columns that codes have.
  template <bool PERMUTED>
  __device__ __forceinline__ void store(u32 tile, u32 flip) const {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int at = threadIdx.x + i * THREADS, row = at / CHUNKS, chunk = at % CHUNKS;
      if (ALL % THREADS != 0 && at >= ALL) return;
      const uint4& x = chunks[i];
      const u32 words[4] = {x.x ^ flip, x.y ^ flip, x.z ^ flip, x.w ^ flip};
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const int2 to = PERMUTED ? permuted_word(chunk, word) : make_int2(chunk, word);
        store_shared_word(tile + to.x / Tile::CHUNKS * Tile::PANEL_BYTES +
                              Tile::offset(row, to.x % Tile::CHUNKS) + to.y * 4,
                          words[word]);
      }
    }
  }
};
