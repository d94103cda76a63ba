/* Keys and values of tokens out of the pages of a KV cache, one behind the other: token t comes
   from slot_mapping[t]; where that is below 0 it is 0. What was kept as e4m3 or int8 is multiplied by the
   scale of its head.

   Blocks of even y have the keys, those of odd y the values. A thread has the same SIZE elements of up
   to UNROLL tokens, all under way at once. Strides and SIZE are as in append.cu. Every architecture.
 */
#include "prelude.cuh"
#include "ptx/pdl.cuh"
#include "kv/place.cuh"
#include "kv/storage.cuh"
//% if storage == "fp8"
#include "kv/e4m3.cuh"
//% endif

using elem_t = ${dtype};
using stored_t = ${kept};
constexpr bool SCALED = ${scaled};
constexpr int SIZE = ${size};  // elements of an access
constexpr int THREADS = ${threads};
constexpr int UNROLL = ${unroll};  // tokens of a thread

static_assert(THREADS % WARP_SIZE == 0, "whole warps");

extern "C" __global__ void __launch_bounds__(THREADS) kv_read(
    const stored_t* __restrict__ k_pages,  // [pages, page_size, heads, head_dim], in any order
    const stored_t* __restrict__ v_pages,  // the same
    const float* __restrict__ k_scale,     // [heads], where SCALED
    const float* __restrict__ v_scale,     // [heads]
    const int* __restrict__ slot_mapping,  // [tokens], or [tokens, 2]: low and high half of an i64
    elem_t* __restrict__ k,                // [tokens, heads, head_dim]    strides in elements
    elem_t* __restrict__ v,                // [tokens, heads, head_dim]
    const int slot_step,                   // 1 or 2
    const int tokens, const int k_token, const int k_head, const int v_token, const int v_head,
    const int k_page_step, const int k_head_step, const int k_token_step,  // within k_pages
    const int v_page_step, const int v_head_step, const int v_token_step, const u32 num_slots,
    const int page_log2, const int columns,
    const int head_columns,  // accesses of a token, of a head
    const int lanes, const int group, const float lanes_inverse, const float head_inverse) {
  after_previous_kernel();
  const Lanes here(lanes, lanes_inverse, head_inverse, group, UNROLL);
  if (here.member >= group || here.column >= columns) return;
  const int head = here.head;
  const int dim = (here.column - head * head_columns) * SIZE;
  const bool values = here.values();
  const stored_t* const pages = (values ? v_pages : k_pages) + dim;
  const PagedPool pool{values ? v_page_step : k_page_step, values ? v_head_step : k_head_step,
                       values ? v_token_step : k_token_step, num_slots, page_log2};

  int slot[UNROLL];
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    const int token = here.first + i * group;
    slot[i] = token < tokens ? slot_mapping[wide(token, slot_step)] : -1;
  }
  Elements<stored_t, SIZE> x[UNROLL];
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    x[i] = {};
    if (pool.has(slot[i])) x[i] = load_elements<SIZE>(pages + pool.offset(slot[i], head));
  }

  const float scale = SCALED ? (values ? v_scale : k_scale)[head] : 1.f;
  const int token_step = values ? v_token : k_token;
  elem_t* const target = (values ? v + wide(head, v_head) : k + wide(head, k_head)) + dim;
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    const int token = here.first + i * group;
    if (token >= tokens) continue;
    store_elements(target + wide(token, token_step),
                   Quantized<stored_t>::template decode<elem_t>(x[i], scale));
  }
}
