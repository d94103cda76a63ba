/* permute.cu by the copy engine, for rows that are long and written often: a block is a warp and has
   a row, or an equal part of a long one. One lane has it fetched into shared memory, and lane k has it
   written to the place of choice k: no data goes through registers, and what is written next to each
   other comes from one engine, one after the other. sm_90. */
#include "prelude.cuh"
#include "device/bulk_rows.cuh"
#include "device/moe_rows.cuh"

using elem_t = ${dtype};
constexpr int PART_BYTES = ${part_bytes};  // of a row, at most

constexpr int SIZE = 16 / sizeof(elem_t);  // elements that are moved at least
constexpr int PART = PART_BYTES / sizeof(elem_t);

extern "C" __global__ void __launch_bounds__(WARP_SIZE)
    moe_permute_sm90(const elem_t* __restrict__ x,     // [tokens, columns]
                     const int* __restrict__ inverse,  // [tokens, top_k], -1: nowhere
                     const int* __restrict__ offsets,  // [groups + 1]
                     const int* __restrict__ counts,   // [groups]
                     elem_t* __restrict__ out,         // [places, columns]
                     const i64 x_stride, const int tokens, const int top_k, const int groups,
                     const int places, const int columns) {
  __shared__ alignas(128) elem_t row[PART];
  __shared__ alignas(8) u64 fetched;
  const int parts = ceil_div(columns, PART);
  const int token = blockIdx.x / parts;
  if (token >= tokens) {
    clear_rows<elem_t, true>(out, columns, columns / SIZE, offsets, counts,
                             blockIdx.x - tokens * parts, groups, places);
    return;
  }
  const int each = round_up(ceil_div(columns, parts), SIZE);
  const int first = (blockIdx.x - token * parts) * each;
  const int bytes = min(each, columns - first) * static_cast<int>(sizeof(elem_t));
  const u32 source = static_cast<u32>(__cvta_generic_to_shared(row));
  const u32 barrier = static_cast<u32>(__cvta_generic_to_shared(&fetched));
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    mbarrier_init_fence();
    mbarrier_expect(barrier, bytes);
    row_fetch(source, x + token * x_stride + first, bytes, barrier);
  }
  const Choices choices(inverse, nullptr, token, top_k);
  __syncwarp();
  mbarrier_wait(barrier, 0);
  if (choices.place < 0) return;
  row_write(out + static_cast<i64>(choices.place) * columns + first, source, bytes);
  row_written();
}
