/* Keys and values of new tokens go into the pages of a KV cache: token t of k and v to slot_mapping[t],
   nowhere where that is below 0. With other storage than the tokens' own they are divided by the
   scale of their head and rounded to e4m3 or int8.

   A thread has the same SIZE elements of up to UNROLL tokens, of k and of v: it asks for all of
   them before it knows the slots, so that the two do not wait for each other. Two tokens of the
   same slot are written in no order, mixed: the caller sees to it that there are none.

   Any strides of tokens, heads and pages; a head's elements lie beside each other. SIZE elements
   are 16 bytes where every head begins on a multiple of them, else one. Every architecture. */
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

extern "C" __global__ void __launch_bounds__(THREADS) kv_append(
    const elem_t* __restrict__ k,          // [tokens, heads, head_dim]    strides in elements
    const elem_t* __restrict__ v,          // [tokens, heads, head_dim]
    kept_t* __restrict__ k_pages,          // [pages, page_size, heads, head_dim], in any order
    kept_t* __restrict__ v_pages,          // the same
    const float* __restrict__ k_scale,     // [heads], where SCALED
    const float* __restrict__ v_scale,     // [heads]
    const int* __restrict__ slot_mapping,  // [tokens], or [tokens, 2]: low and high half of an i64
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
  k += head * k_head + dim, v += head * v_head + dim;

  Elements<elem_t, SIZE> x[UNROLL], y[UNROLL];
  int slot[UNROLL];
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    const i64 token = here.first + static_cast<i64>(i) * group;
    slot[i] = -1;
    if (token >= tokens) continue;
    slot[i] = slot_mapping[token * slot_step];
    x[i] = load_elements<SIZE>(k + token * k_token);
    y[i] = load_elements<SIZE>(v + token * v_token);
  }

  const float k_inverse = SCALED ? 1.f / k_scale[head] : 1.f;
  const float v_inverse = SCALED ? 1.f / v_scale[head] : 1.f;
  const PagedPool k_pool{k_strides, num_slots, page_log2};
  const PagedPool v_pool{v_strides, num_slots, page_log2};
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    if (!k_pool.has(slot[i])) continue;
    store_elements(k_pages + k_pool.offset(slot[i], head) + dim,
                   Kept<kept_t>::encode(x[i], k_inverse));
    store_elements(v_pages + v_pool.offset(slot[i], head) + dim,
                   Kept<kept_t>::encode(y[i], v_inverse));
  }
}
