// Which tiles of queries a block of keys goes through where attention has a band of keys
// (attention/features.cuh), and which block comes next.
//
// Work items, blocks of keys of a KV head, are drawn from a counter. Those that a sequence does
// not have are nobody's. A tile is added to by the blocks of keys that see it.
//
// In a fixed order (ORDERED) blocks come to a tile as they are drawn, so that a block waits only
// for such as were drawn before it: whoever has the first piece that is not done goes on. Heads are
// drawn from in two ways, which take turns:
//
//        block 3              a a a        B B B           a: the last block of keys first, each
//        block 2          a a a .              B B B          from its first tile onwards
//        block 1      a a a .                      B B B   B: the first one first, backwards from
//                 ------------> queries        <--------      its last tile
//
// Of blocks that begin at the same time none waits for another while handing on a tile takes less
// than 128 queries do; but those that begin at one tile, as where nothing is masked, follow one
// another. So several heads are drawn from abreast, and few blocks of one begin at a time. Causal
// blocks with little to do come first in a and last in B, which evens out when thread blocks end.
#pragma once
#include "ptx/register_fence.cuh"
#include "attention/backward/padded_rows.cuh"
#include "attention/features.cuh"

template <int BLOCK_Q_, int BLOCK_K_, bool ORDERED_, bool PACKED_, bool ALIBI_ = false,
          bool MASK_ = false>
struct FormSizes {
  static constexpr int BLOCK_Q = BLOCK_Q_, BLOCK_K = BLOCK_K_;
  static constexpr int INDEX_ROWS = 16;  // a tile's index counts so many rows, as turns do
  static constexpr bool ORDERED = ORDERED_, PACKED = PACKED_, ALIBI = ALIBI_;
  const int *cu_seqlens_q, *cu_seqlens_k;
  int batch, heads_q, group_size;
  int seqlen_q, seqlen_k;  // of the longest sequence
  int rows_padded;
  int heads_abreast;  // if ORDERED
  int left, right;
  int alibi_batch_stride;
  const float* alibi_slopes;
  const u32* mask_bits;
  Strides mask_strides;
  int own_key;  // see BackwardSizes

  __device__ __forceinline__ FormSizes(const int* q_ends, const int* k_ends, int batch_, int heads,
                                       int group, int longest_q, int longest_k, int rows,
                                       int abreast, const AttentionForm& form, const float* slopes,
                                       const u32* bits = nullptr, const Strides& bits_strides = {},
                                       int first_own_key = 0)
      : cu_seqlens_q(q_ends),
        cu_seqlens_k(k_ends),
        batch(batch_),
        heads_q(heads),
        group_size(group),
        seqlen_q(longest_q),
        seqlen_k(longest_k),
        rows_padded(rows),
        heads_abreast(abreast),
        left(form.window_left),
        right(form.window_right),
        alibi_batch_stride(form.alibi_batch_stride),
        alibi_slopes(slopes),
        mask_bits(bits),
        mask_strides(bits_strides),
        own_key(first_own_key) {}

  // The same, but what follows from it is computed again, and not kept in registers until then.
  __device__ __forceinline__ FormSizes again() const {
    FormSizes made = *this;
    register_fence(made.group_size, made.seqlen_k, made.seqlen_q);
    return made;
  }

  __device__ __forceinline__ int heads_kv() const { return heads_q / group_size; }
  __device__ __forceinline__ int blocks() const { return ceil_div(seqlen_k, BLOCK_K); }
  __device__ __forceinline__ int all_heads() const { return heads_kv() * batch; }
  __device__ __forceinline__ int pieces() const { return blocks() * all_heads(); }
  // What the others are told: that the number of a piece is below this, or that it is not.
  __device__ __forceinline__ int works() const { return 1; }
};

// Which block of keys of which head, batches included, a number stands for: one head after the
// other, or several of them in turns.
struct FormOrder {
  int head, block;
  bool backwards;  // blocks from the first one on, else from the last one

  template <typename Sizes>
  __device__ static __forceinline__ FormOrder one(int number, const Sizes& sizes) {
    const int blocks = sizes.blocks();
    return {number / blocks, number % blocks, true};
  }
  template <typename Sizes>
  __device__ static __forceinline__ FormOrder abreast(int number, const Sizes& sizes) {
    const int step = sizes.heads_abreast * sizes.blocks(), section = number / step;
    const int first = section * sizes.heads_abreast, within = number - section * step;
    const int width = min(sizes.heads_abreast, sizes.all_heads() - first);
    return {first + within % width, within / width, section % 2 == 1};
  }
};

// A block of keys, by the number of its work item.
template <typename Sizes>
struct FormWorkItem {
  static constexpr int BLOCK_Q = Sizes::BLOCK_Q, BLOCK_K = Sizes::BLOCK_K;
  int head, block;  // head: of keys
  bool backwards;   // it goes through its tiles
  int batch;
  SequenceRows<Sizes::PACKED> queries, keys;

  __device__ __forceinline__ FormWorkItem(int number, const Sizes& sizes)
      : FormWorkItem(
            Sizes::ORDERED ? FormOrder::abreast(number, sizes) : FormOrder::one(number, sizes),
            sizes) {}

  __device__ __forceinline__ FormWorkItem(FormOrder order, const Sizes& sizes)
      : head(order.head),
        block(order.block),
        backwards(order.backwards),
        batch(head / sizes.heads_kv()),
        queries(sizes.cu_seqlens_q, batch, sizes.seqlen_q),
        keys(sizes.cu_seqlens_k, batch, sizes.seqlen_k) {
    head -= batch * sizes.heads_kv();
    if (!backwards) block = ceil_div(keys.length, BLOCK_K) - 1 - block;
  }

  __device__ __forceinline__ bool exists() const {
    return !Sizes::PACKED || (block >= 0 && first_key() < keys.length && queries.length > 0);
  }
  __device__ __forceinline__ int first_key() const { return block * BLOCK_K; }
  // Key 0 of the block is seen by queries from here on.
  __device__ __forceinline__ int first_row(int right) const {
    return first_key() - (keys.length - queries.length) - right;
  }
  // In order, the first block adds zeros to the tiles that see no key.
  __device__ __forceinline__ int first_tile(int right) const {
    return Sizes::ORDERED && block == 0 ? 0 : max(first_row(right), 0) / BLOCK_Q;
  }
  // A block that nobody sees has the first tile, and is hidden from it.
  __device__ __forceinline__ int end_tile(int left) const {
    const int last_key = min(first_key() + BLOCK_K, keys.length) - 1;
    const int end = min(last_key - (keys.length - queries.length) + left + 1, queries.length);
    return max(ceil_div(max(end, 0), BLOCK_Q), 1);
  }
};

// How many blocks of keys come to a tile of queries before a block does, and how many in all, where
// they have an order. rows_left: of queries from the tile on. width: of the band, less one.
template <int BLOCK_Q, int BLOCK_K>
struct FormRank {
  int rank, others;

  __device__ __forceinline__ FormRank(int tile, int rows_left, int block, bool backwards,
                                      int keys_left, int first_row, int width) {
    const int q0 = tile * BLOCK_Q, last_row = q0 + min(BLOCK_Q, rows_left) - 1;
    // Keys behind the first one of this block; of all keys.
    const int last_key = min(last_row - first_row, keys_left - 1);
    const int first_key = block * BLOCK_K + q0 - first_row - width;
    rank = max(last_key, 0) / BLOCK_K;
    others = rank + 1 + block - (tile == 0 ? 0 : max(first_key, 0) / BLOCK_K);
    if (backwards) rank = others - 1 - rank;
  }
};
