/* Gradients of LayerNorm (CENTERED) or RMSNorm in one pass (norm/backward.cu says what they are) for rows
   that do not fit into registers twice, but into shared memory: the next row travels there while one is
   worked on. The weight stays there. A thread reads what it has copied itself, so only the sums of a row
   meet in a barrier.

   dx may be dy or dsum. sm_90 and newer with 225 KB of shared memory a block. */
#include "prelude.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/memory.cuh"
#include "ptx/pdl.cuh"
#include "tile/row.cuh"
#include "tile/tile_copy.cuh"
#include "tile/warp_sums.cuh"

using elem_t = ${dtype};
constexpr bool CENTERED = ${centered};
constexpr int LANES = ${lanes};      // threads on one row: a block
constexpr int VECTORS = ${vectors};  // 16-byte vectors of a thread
constexpr int GUARD = ${guard};      // bytes between rows: 0 except where memory is checked

constexpr int SIZE = 16 / sizeof(elem_t), PAIRS = SIZE / 2;
constexpr int ROW_BYTES = LANES * VECTORS * 16 + GUARD, STAGE_BYTES = 3 * ROW_BYTES;

using Elements = Row<elem_t, LANES, 1, SIZE, true>;
using Sums = Row<float, LANES, VECTORS, SIZE, true>;

// A row -> this thread's vectors of a stage. Zeros past its end.
__device__ __forceinline__ void fetch(u32 to, const elem_t* row, int columns) {
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int column = (i * LANES + threadIdx.x) * SIZE;
    const bool has = column < columns;
    cp_async_16(to + (i * LANES + threadIdx.x) * 16, row + (has ? column : 0), has ? 16 : 0);
  }
}

__device__ __forceinline__ Elements fetched(u32 from, int i) {
  Elements made;
  made.bits[0][0] = load_shared_chunk(from + (i * LANES + threadIdx.x) * 16);
  return made;
}

extern "C" __global__ void __launch_bounds__(LANES, 1)
    norm_backward_staged(const elem_t* dy,                   // [rows, columns]
                         const elem_t* dsum,                 // [rows, columns] or null: 0
                         const elem_t* __restrict__ x,       // [rows, columns]
                         const elem_t* __restrict__ weight,  // [columns] or null: 1
                         const float* __restrict__ mean,     // [rows] where CENTERED
                         const float* __restrict__ rstd,     // [rows]
                         elem_t* dx,                         // [rows, columns]
                         float* __restrict__ dweight_parts,  // [gridDim.x, columns] or null
                         float* __restrict__ dbias_parts,    // the same
                         const i64 dy_stride, const i64 dsum_stride, const i64 x_stride,
                         const i64 dx_stride, const i64 rows, const int columns) {
  after_previous_kernel();
  extern __shared__ __align__(16) unsigned char shared_memory[];
  __shared__ WarpSums<LANES / WARP_SIZE, 2> reduction;
  const u32 weights = shared_address(shared_memory), stages = weights + ROW_BYTES;
  const int thread = threadIdx.x, step = gridDim.x;
  const float inverse = 1.f / columns;

  float next_center = 0.f, next_factor = 0.f;
  const auto fetch_row = [&](i64 row, int turn) {
    const u32 stage = stages + turn * STAGE_BYTES;
    fetch(stage, dy + row * dy_stride, columns);
    fetch(stage + ROW_BYTES, x + row * x_stride, columns);
    if (dsum != nullptr) fetch(stage + 2 * ROW_BYTES, dsum + row * dsum_stride, columns);
    next_center = CENTERED ? mean[row] : 0.f, next_factor = rstd[row];
  };
  if (blockIdx.x < rows) fetch_row(blockIdx.x, 0);
  if (weight != nullptr) {
    fetch(weights, weight, columns);
  } else {
    Elements ones;
    ones.fill(1.f);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
      store_shared_chunk(weights + (i * LANES + thread) * 16, ones.bits[0][0]);
  }
  cp_async_commit();
  Sums dweight, dbias;
  dweight.fill(0.f), dbias.fill(0.f);

  int turn = 0;
  for (i64 row = blockIdx.x; row < rows; row += step, turn ^= 1) {
    const float center = next_center, factor = next_factor;
    if (row + step < rows) fetch_row(row + step, turn ^ 1);
    cp_async_commit();
    cp_async_wait<1>();
    const u32 stage = stages + turn * STAGE_BYTES;

    float sums[2] = {0.f, 0.f};  // of g and of g h
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      Elements given = fetched(stage, i), seen = fetched(stage + ROW_BYTES, i);
      Elements scale = fetched(weights, i);
#pragma unroll
      for (int pair = 0; pair < PAIRS; ++pair) {
        const float2 d = given.get(0, pair), v = seen.get(0, pair), w = scale.get(0, pair);
        const float h0 = (v.x - center) * factor, h1 = (v.y - center) * factor;
        if (CENTERED) sums[0] += d.x * w.x, sums[0] += d.y * w.y;
        sums[1] += d.x * w.x * h0, sums[1] += d.y * w.y * h1;
      }
    }

    // One barrier a row.
    reduction.join(sums, turn);
    const float average = CENTERED ? sums[0] * inverse : 0.f, slope = sums[1] * inverse;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      Elements given = fetched(stage, i), seen = fetched(stage + ROW_BYTES, i), stream;
      Elements scale = fetched(weights, i);
      stream.fill(0.f);
      if (dsum != nullptr) stream = fetched(stage + 2 * ROW_BYTES, i);
#pragma unroll
      for (int pair = 0; pair < PAIRS; ++pair) {
        const float2 d = given.get(0, pair), v = seen.get(0, pair), w = scale.get(0, pair);
        const float h0 = (v.x - center) * factor, h1 = (v.y - center) * factor;
        const float2 r = stream.get(0, pair), db = dbias.get(i, pair);
        const float2 dw = dweight.get(i, pair);
        dweight.set(i, pair, dw.x + d.x * h0, dw.y + d.y * h1);
        if (CENTERED) dbias.set(i, pair, db.x + d.x, db.y + d.y);
        given.set(0, pair, (d.x * w.x - average - h0 * slope) * factor + r.x,
                  (d.y * w.y - average - h1 * slope) * factor + r.y);
      }
      const int skip = i * Elements::CAPACITY;
      given.store(dx + row * dx_stride + skip, thread, columns - skip);
    }
  }
  const i64 part = static_cast<i64>(blockIdx.x) * columns;
  if (dweight_parts != nullptr) dweight.store(dweight_parts + part, thread, columns);
  if (CENTERED && dbias_parts != nullptr) dbias.store(dbias_parts + part, thread, columns);
}
