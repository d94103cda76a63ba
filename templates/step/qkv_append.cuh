// Where the columns of a product with q's, k's and v's weights go, two of a head at a time: turned by
// the token's position, q to an array of its own, k and v to the token's slot in a paged KV cache.
//
// Pairs are columns i and head_dim / 2 + i of a head, as RoPE turns them.
#pragma once
#include "kv/place.cuh"

// ROPE: whether q and k turn.
template <typename T, bool ROPE>
struct QkvAppend {
  T *out_q, *k_pages, *v_pages;  // [m, heads_q, head_dim]; pages: see PagedPool
  const int *slots, *positions;  // [m]; positions: of `position_words` words each
  const float* table;            // [table_rows, head_dim]: cosines, then sines
  PagedPool k_pool, v_pool;
  int position_words, table_rows, heads_q, heads_kv, head_dim;

  __device__ __forceinline__ bool turns(int head) const {
    return ROPE && head < heads_q + heads_kv;
  }

  // The token's cosines, head_dim / 2 further its sines; null where the table has not its position.
  __device__ __forceinline__ const float* entry(int token) const {
    const int position = positions[token * position_words];
    return position >= 0 && position < table_rows ? table + wide(position, head_dim) : nullptr;
  }

  // a: column `pair` of head `head` of all, b: that of the other half. A position that the table has
  // not makes NaN.
  __device__ __forceinline__ void operator()(float a, float b, int token, int head,
                                             int pair) const {
    const int half = head_dim / 2;
    if (turns(head)) {
      const float* const at = entry(token);
      const float cosine = at != nullptr ? at[pair] : __int_as_float(0x7fffffff),
                  sine = at != nullptr ? at[pair + half] : 0.f, turned = a * cosine - b * sine;
      b = b * cosine + a * sine, a = turned;
    }
    T* const target = place(token, head);
    if (target == nullptr) return;
    target[pair] = static_cast<T>(a);
    target[pair + half] = static_cast<T>(b);
  }

  // The head's first column; null where a token has no slot.
  __device__ __forceinline__ T* place(int token, int head) const {
    if (head < heads_q) return out_q + wide(token * heads_q + head, head_dim);
    const int slot = slots[token];
    const bool values = head >= heads_q + heads_kv;
    const PagedPool pool{
        values ? v_pool.page_step : k_pool.page_step, values ? v_pool.head_step : k_pool.head_step,
        values ? v_pool.token_step : k_pool.token_step, k_pool.slots, k_pool.page_log2};
    if (!pool.has(slot)) return nullptr;
    return (values ? v_pages : k_pages) + pool.offset(slot, head - heads_q - values * heads_kv);
  }
};
