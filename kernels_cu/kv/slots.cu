/* The slots of the tokens of some sequences, from page tables and lengths on the device; so that
   what they are is known only when a CUDA graph is replayed.

   A block has a sequence: `append`: tokens that come after those which are there; they are counted
   in `lengths`, and those beyond what was reserved for the sequence have no slot (-1). Else the
   sequence's first tokens, as far as there are any. A row below 0 is no sequence, and has no slots.
   Every architecture. */
#include "prelude.cuh"
#include "ptx/pdl.cuh"

constexpr int THREADS = ${threads};

extern "C" __global__ void __launch_bounds__(THREADS) kv_slots(
    const int* __restrict__ rows,        // [sequences]: rows of the tables
    const int* __restrict__ cu_seqlens,  // [sequences + 1]: their first tokens; null: one each
    const int* __restrict__ page_table,  // [max_sequences, max_pages]
    int* __restrict__ lengths,           // [max_sequences]
    const int* __restrict__ capacities,  // [max_sequences]
    int* __restrict__ slot_mapping,      // [tokens]
    const int tokens, const int max_sequences, const int max_pages, const int page_log2,
    const bool append) {
  after_previous_kernel();
  const int i = blockIdx.x, row = rows[i];
  const int first = cu_seqlens == nullptr ? i : cu_seqlens[i];
  const int count = min(cu_seqlens == nullptr ? 1 : cu_seqlens[i + 1] - first, tokens - first);
  const bool known = row >= 0 && row < max_sequences;
  const int length = known ? lengths[row] : 0;
  const int begin = append ? length : 0;
  const int end = known && append ? capacities[row] : length;  // what lies there has no slot
  const int* const pages = page_table + static_cast<i64>(row) * max_pages;

#pragma unroll 4
  for (int t = threadIdx.x; t < count; t += THREADS) {
    const int position = begin + t;
    int slot = -1;
    if (position < end) {
      const int page = pages[position >> page_log2];
      slot = page < 0 ? -1 : (page << page_log2) + (position & ((1 << page_log2) - 1));
    }
    slot_mapping[first + t] = slot;
  }

  __syncthreads();  // everybody has read the length
  if (known && append && threadIdx.x == 0 && count > 0) lengths[row] = min(begin + count, end);
}
