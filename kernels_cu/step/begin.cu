/* The beginning of a decode step, a block for each sequence: the slot of its token in a paged KV
   cache, whose lengths count it (as kv/slots.cu does); the token's embedding, perhaps with its
   position's, which is the residual stream; and what the first product takes of the norm before it:
   the stream times the norm's weight, and its sum of squares, or of LayerNorm (CENTERED) its sum
   and squares of distances from its mean (step/stream.cu).

   A token or a position that the tables have not makes NaN. sm_80 and later. */
#include "prelude.cuh"
#include "ptx/pdl.cuh"
#include "tile/reduce.cuh"
#include "tile/vector.cuh"

using elem_t = ${dtype};
constexpr bool CENTERED = ${norm == "layer"};
constexpr bool LEARNED = ${learned};  // positions have an embedding
constexpr int THREADS = ${threads}, SIZE = Vector<elem_t>::SIZE;

struct Begin {
  const elem_t *embedding, *position_embedding;  // of the block's token; null: NaN
  elem_t* stream;

  // Columns i to i + SIZE - 1, as they are in the stream.
  __device__ __forceinline__ Vector<elem_t> load(int i) const {
    Vector<elem_t> made;
    if (embedding == nullptr) {
#pragma unroll
      for (int j = 0; j < SIZE; ++j) made.set(j, __int_as_float(0x7fffffff));
      return made;
    }
    made = load_vector(embedding + i);
    if (!LEARNED) return made;
    const Vector<elem_t> other = load_vector(position_embedding + i);
#pragma unroll
    for (int j = 0; j < SIZE; ++j) made.set(j, made.get(j) + other.get(j));
    return made;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    step_begin(const i64* tokens,                     // [m]
               const int* positions,                  // [m]
               const int* rows,                       // [m]: rows of the tables, or -1: no sequence
               const elem_t* __restrict__ embedding,  // [vocabulary, k]
               const elem_t* __restrict__ position_embedding,  // [max_positions, k], or null
               const elem_t* __restrict__ norm_weight,         // [k]
               const int* __restrict__ page_table,             // [max_sequences, max_pages]
               const int* __restrict__ capacities,             // [max_sequences]
               int* __restrict__ lengths,                      // [max_sequences]
               int* __restrict__ slot_mapping,                 // [m]
               elem_t* __restrict__ stream,                    // [m, k]
               elem_t* __restrict__ scaled,                    // [m, k]
               float* __restrict__ moments,                    // [1, m], with CENTERED [1, m, 2]
               const int k, const int vocabulary, const int max_positions, const int max_sequences,
               const int max_pages, const int page_log2) {
  after_previous_kernel();
  __shared__ float warps[2][THREADS / WARP_SIZE];
  const int m = blockIdx.x;

  // 1. The slot.
  if (threadIdx.x == 0) {
    const int row = rows[m];
    const bool known = row >= 0 && row < max_sequences;
    const int length = known ? lengths[row] : 0, end = known ? capacities[row] : 0;
    int slot = -1;
    if (length < end) {
      const int page = page_table[static_cast<i64>(row) * max_pages + (length >> page_log2)];
      slot = page < 0 ? -1 : (page << page_log2) + (length & ((1 << page_log2) - 1));
    }
    slot_mapping[m] = slot;
    if (known) lengths[row] = min(length + 1, end);
  }

  // 2. The stream. A thread keeps its first columns.
  const i64 token = tokens[m];
  const int position = LEARNED ? positions[m] : 0;
  const bool inside =
      token >= 0 && token < vocabulary && (!LEARNED || (position >= 0 && position < max_positions));
  const elem_t* const of_position =
      LEARNED && inside ? position_embedding + static_cast<i64>(position) * k : nullptr;
  const Begin row = {inside ? embedding + token * k : nullptr, of_position,
                     stream + static_cast<i64>(m) * k};
  const int first = threadIdx.x * SIZE;
  Vector<elem_t> held = {};
  if (first < k) held = row.load(first);
  const auto each = [&](const auto& act) {
    if (first < k) act(held, first);
    for (int i = first + THREADS * SIZE; i < k; i += THREADS * SIZE) act(row.load(i), i);
  };
  float sum = 0.f, squares = 0.f;
  each([&](const Vector<elem_t>& x, int i) {
    Vector<elem_t> made;
    const Vector<elem_t> weight = load_vector(norm_weight + i);
#pragma unroll
    for (int j = 0; j < SIZE; ++j) made.set(j, x.get(j) * weight.get(j)), sum += x.get(j);
    store_vector(row.stream + i, x);
    store_vector(scaled + static_cast<i64>(m) * k + i, made);
  });

  // 3. Its moments.
  float mean = 0.f;
  if (CENTERED) sum = block_reduce<THREADS>(sum, warps[0], Sum()), mean = sum / k;
  each([&](const Vector<elem_t>& x, int) {
#pragma unroll
    for (int j = 0; j < SIZE; ++j) squares += (x.get(j) - mean) * (x.get(j) - mean);
  });
  squares = block_reduce<THREADS>(squares, warps[1], Sum());
  if (threadIdx.x > 0) return;
  if (CENTERED) {
    moments[2 * m] = sum, moments[2 * m + 1] = squares;
  } else {
    moments[m] = squares;
  }
}
