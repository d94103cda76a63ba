/* Whole pages of a KV cache to other pages, in every plane (keys and values of every layer): for
   sequences that stop sharing a page, and for defragmentation. No target may be a source, nor stand
   twice. Every architecture. */
#include "prelude.cuh"
#include "ptx/pdl.cuh"

constexpr int THREADS = ${threads};
constexpr int UNROLL = ${unroll};  // accesses of a thread

extern "C" __global__ void __launch_bounds__(THREADS)
    kv_copy(uint4* storage,                 // [planes, num_pages, page_words]; a word is 16 bytes
            const int* __restrict__ pairs,  // [copies, 2]: source and target page
            const i64 num_pages, const int page_words, const int copies,
            const int pieces) {  // blocks of a page
  after_previous_kernel();
  const int piece = blockIdx.x % pieces, page = blockIdx.x / pieces;
  const int plane = page / copies, copy = page - plane * copies;
  uint4* const base = storage + plane * num_pages * page_words;
  const uint4* const source = base + static_cast<i64>(pairs[2 * copy]) * page_words;
  uint4* const target = base + static_cast<i64>(pairs[2 * copy + 1]) * page_words;

  const int first = piece * THREADS * UNROLL + threadIdx.x;
  uint4 x[UNROLL];
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    if (first + i * THREADS < page_words) x[i] = source[first + i * THREADS];
  }
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    if (first + i * THREADS < page_words) target[first + i * THREADS] = x[i];
  }
}
