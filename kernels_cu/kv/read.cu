/* Keys and values of tokens out of the pages of a KV cache, one behind the other: token t comes
   from slot_mapping[t]; where that is below 0 it is 0. What was kept as e4m3 or int8 is multiplied by the
   scale of its head.

   A thread has the same SIZE elements of up to UNROLL tokens, of k and of v, all under way at once.
   Strides and SIZE are as in append.cu. Every architecture. */
#include "prelude.cuh"
#include "device/kv_place.cuh"
#include "device/kv_storage.cuh"
//% if storage == "fp8"
#include "device/kv_e4m3.cuh"
//% endif

using elem_t = ${dtype};
using kept_t = ${kept};
constexpr bool SCALED = ${scaled};
constexpr int SIZE = ${size};  // elements of an access
constexpr int THREADS = ${threads};
constexpr int UNROLL = ${unroll};  // tokens of a thread

static_assert(THREADS % WARP_SIZE == 0, "whole warps");

extern "C" __global__ void __launch_bounds__(THREADS) kv_read(
    const kept_t* __restrict__ k_pages,    // [pages, page_size, heads, head_dim], in any order
    const kept_t* __restrict__ v_pages,    // the same
    const float* __restrict__ k_scale,     // [heads], where SCALED
    const float* __restrict__ v_scale,     // [heads]
    const int* __restrict__ slot_mapping,  // [tokens], or [tokens, 2]: low and high half of an i64
    elem_t* __restrict__ k,                // [tokens, heads, head_dim]    strides in elements
    elem_t* __restrict__ v,                // [tokens, heads, head_dim]
    const int slot_step,                   // 1 or 2
    const i64 tokens, const i64 k_token, const i64 k_head, const i64 v_token, const i64 v_head,
    const Strides k_strides, const Strides v_strides,  // of the pages
    const u32 num_slots, const int page_log2, const int columns,
    const int head_columns,  // accesses of a token, of a head
    const int lanes, const int pieces, const int group) {
  const Lanes here(lanes, pieces, group, UNROLL);
  if (here.member >= group || here.column >= columns) return;
  const int head = here.column / head_columns;
  const int dim = (here.column - head * head_columns) * SIZE;
  const PagedPool k_pool{k_strides, num_slots, page_log2};
  const PagedPool v_pool{v_strides, num_slots, page_log2};

  int slot[UNROLL];
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    const i64 token = here.first + static_cast<i64>(i) * group;
    slot[i] = token < tokens ? slot_mapping[token * slot_step] : -1;
  }
  Elements<kept_t, SIZE> x[UNROLL], y[UNROLL];
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    x[i] = {}, y[i] = {};
    if (!k_pool.has(slot[i])) continue;
    x[i] = load_elements<SIZE>(k_pages + k_pool.offset(slot[i], head) + dim);
    y[i] = load_elements<SIZE>(v_pages + v_pool.offset(slot[i], head) + dim);
  }

  const float k_factor = SCALED ? k_scale[head] : 1.f, v_factor = SCALED ? v_scale[head] : 1.f;
  k += head * k_head + dim, v += head * v_head + dim;
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    const i64 token = here.first + static_cast<i64>(i) * group;
    if (token >= tokens) continue;
    store_elements(k + token * k_token, Kept<kept_t>::template decode<elem_t>(x[i], k_factor));
    store_elements(v + token * v_token, Kept<kept_t>::template decode<elem_t>(y[i], v_factor));
  }
}
