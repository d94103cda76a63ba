/* out = act(scale * x . weight + bias) + residual for few rows of x and a weight of int4 or int8 codes,
   with a scale for 128 of k. The weight is the side of sixteen rows of mma.sync, x that of eight
   columns.

   A block has ROWS outputs of the weight, WARP_ROWS a warp, all rows of x, and a part of k in groups
   of 128. Both come through a ring of DEPTH stages in shared memory by cp.async: x for all warps, and
   for each lane the codes that it will multiply (quantize/coded_weight.cuh), which become numbers in
   its registers. A group's sums are multiplied with its scale in fp32.

   Where gridDim.y blocks share a tile, each leaves its sums in `workspace`, and the last one adds them
   up in order: the same bits every time.

   sm_80 and later. */
//% if has_mod
#define EPILOGUE_EXPRESSION (${epilogue_mod})
#define EPILOGUE_DERIVATIVE (${epilogue_mod_grad})
//% endif
#include "prelude.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/gemv.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/pdl.cuh"
#include "ptx/register_fence.cuh"
#include "tile/last_block.cuh"
#include "quantize/coded_weight.cuh"

using elem_t = ${dtype};
using out_t = ${out_dtype};
using Activation = ${activation};
using Weights = ${weights};
constexpr bool GATE = ${gate};
constexpr int COLUMNS = ${tokens};     // rows of x, padded
constexpr int DEPTH = ${depth};        // groups of k under way
constexpr int RESIDENT = ${resident};  // blocks of a multiprocessor, at least

constexpr int WARP_ROWS = ${warp_rows};
constexpr int PARTS = ${parts};  // of the rows of x, each with warps of its own
constexpr int ROW_WARPS = 8, WARPS = ROW_WARPS * PARTS, THREADS = 32 * WARPS;
constexpr int ROWS = WARP_ROWS * ROW_WARPS;
constexpr int HALVES = GATE ? 2 : 1, OUTPUTS = ROWS / HALVES, COLUMN_BLOCKS = COLUMNS / 8 / PARTS;
constexpr int EIGHTS = WARP_ROWS / 8, PRODUCTS = WARP_ROWS / 16;
using Rows = CodedRows<Weights, elem_t, EIGHTS>;
using Scales = RowScales16<elem_t, EIGHTS, 1>;
constexpr int SPANS = Rows::SPANS, X_BYTES = COLUMNS * GROUP * 2;
constexpr int STAGE_BYTES = X_BYTES + ROW_WARPS * Rows::SLOT_BYTES;
constexpr int PITCH = ROWS + 4;  // of sums, where the ring was: lanes of a fragment meet 32 banks
static_assert(WARP_ROWS % 16 == 0, "whole operands of sixteen rows");

using Sums = float[PRODUCTS][COLUMN_BLOCKS][4];

// Where chunk `chunk` (8 numbers) of a row of a stage is. Of eight lanes that read together two rows
// g and four t are: int4 asks for chunks 4t + j, int8 for 2t + j; all are in different banks.
__device__ __forceinline__ u32 place(int row, int chunk) {
  const int turn = (chunk >> 3 & 1) ^ (row & 1) << (Weights::BITS == 4 ? 1 : 0);
  return row * (GROUP * 2) + ((chunk ^ turn) << 4);
}

// A thread's chunks of x on their way to stages; zeros where x has no such row, and beyond its end.
struct RowsOfX {
  static constexpr int CHUNKS = GROUP / 8, ROWS_AT_ONCE = THREADS / CHUNKS;
  static constexpr int PASSES = ceil_div(COLUMNS, ROWS_AT_ONCE);
  const elem_t* from;
  i64 stride;  // from one pass to the next
  u32 to;
  int rows, left;

  __device__ __forceinline__ RowsOfX(const elem_t* x, i64 x_stride, int m, int first, int k)
      : stride(ROWS_AT_ONCE * x_stride) {
    const int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    from = x + row * x_stride + first + chunk * 8;
    to = place(row, chunk);
    rows = m - row, left = k - first - chunk * 8;
  }
  __device__ __forceinline__ void copy(u32 stage) {
#pragma unroll
    for (int i = 0; i < PASSES; ++i)
      if (COLUMNS % ROWS_AT_ONCE == 0 || threadIdx.x / CHUNKS < COLUMNS)
        cp_async_16(stage + to + i * (ROWS_AT_ONCE * GROUP * 2), from + i * stride,
                    i * ROWS_AT_ONCE < rows && left > 0 ? 16 : 0);
    from += GROUP, left -= GROUP;
  }
};

// A group's products, with its scales. `x`: the first of the warp's rows in a stage; `slot`: of its
// codes there.
__device__ __forceinline__ void multiply(Sums& d, u32 x, u32 slot, const Scales& by, int lane) {
  Sums sums = {};
#pragma unroll
  for (int span = 0; span < SPANS; ++span) {
    uint4 codes[EIGHTS];
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i)
      codes[i] = load_shared_chunk(slot + (i * SPANS + span) * Rows::CHUNK_BYTES);
#pragma unroll
    for (int step = 0; step < Weights::STEPS; step += 2) {
      u32 a[2][PRODUCTS][4];
#pragma unroll
      for (int i = 0; i < 2 * PRODUCTS; ++i)
        weight_fragment<Weights>(a[i % 2][i / 2], codes[i / 2 * 2], codes[i / 2 * 2 + 1],
                                 step + i % 2);
      const int chunk = (span * Weights::SPAN + lane % 4 * Weights::CHUNK_K) / 8 + step / 2;
#pragma unroll
      for (int i = 0; i < COLUMN_BLOCKS; ++i) {
        const uint4 own = load_shared_chunk(x + place(i * 8 + lane / 4, chunk));
#pragma unroll
        for (int j = 0; j < PRODUCTS; ++j) mma_m16n8k16<elem_t>(sums[j][i], a[0][j], own.x, own.y);
#pragma unroll
        for (int j = 0; j < PRODUCTS; ++j) mma_m16n8k16<elem_t>(sums[j][i], a[1][j], own.z, own.w);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < PRODUCTS; ++j)
#pragma unroll
    for (int i = 0; i < COLUMN_BLOCKS * 4; ++i)
      d[j][i / 4][i % 4] +=
          static_cast<float>(by.scales[0][j * 2 + i % 4 / 2]) * sums[j][i / 4][i % 4];
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    quantized_skinny(const elem_t* __restrict__ x,        // [m, k]
                     const u8* __restrict__ weight,       // [n, k] codes; with GATE 2 n for n
                     const elem_t* __restrict__ scales,   // [n, ceil(k / 128)], the same
                     const elem_t* __restrict__ bias,     // [n], with GATE [2 n], or null
                     const out_t* __restrict__ residual,  // [m, n] or null
                     out_t* __restrict__ out,             // [m, n]
                     float* __restrict__ workspace,       // [gridDim.x, gridDim.y, COLUMNS, ROWS]
                     u32* __restrict__ counters,          // [gridDim.x], 0 before and after
                     const int m,                         // 1..COLUMNS
                     const int n, const int k, const i64 x_stride, const i64 out_stride,
                     const i64 residual_stride, const float scale) {
  after_previous_kernel();
  extern __shared__ __align__(128) char dynamic[];
  const u32 ring = shared_address(dynamic);
  const int first = blockIdx.x * OUTPUTS, split = gridDim.y;
  const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
  const i64 all = ceil_div(k, GROUP);
  const int begin = static_cast<int>(all * blockIdx.y / split);
  const int end = static_cast<int>(all * (blockIdx.y + 1) / split);
  const int groups = static_cast<int>(all), part = warp / ROW_WARPS;
  const int own_row = warp % ROW_WARPS * WARP_ROWS + lane / 4;
  const auto output = [=](int i) { return weight_output<ROWS, HALVES>(first, own_row + i * 8, n); };
  Rows rows;
  rows.place(weight, k, begin, output, k);
  RowsOfX rows_of_x(x, x_stride, m, begin * GROUP, k);
  const u32 slot = X_BYTES + warp % ROW_WARPS * Rows::SLOT_BYTES + lane * 16;
  const auto load = [&](int stage, int ahead) {
    if (begin + ahead < end) {
      rows.copy<PARTS>(ring + stage * STAGE_BYTES + slot, ahead, part);
      rows_of_x.copy(ring + stage * STAGE_BYTES);
    }
    cp_async_commit();
  };

  // 1. The first groups.
#pragma unroll
  for (int i = 0; i < DEPTH - 1; ++i) load(i, i);
  Scales next;
  next.place(scales, end, groups, begin, output);
  next.load(0);

  // 2. Products; a stage is filled again behind the barrier that says all warps are done with it.
  Sums d = {};
  int stage = 0;
#pragma unroll 1
  for (int group = 0; group < end - begin; ++group) {
    const Scales by = next;
    next.place(scales, end, groups, begin + group + 1, output);
    next.load(0);
    cp_async_wait<DEPTH - 2>();
    __syncthreads();
    load(stage == 0 ? DEPTH - 1 : stage - 1, group + DEPTH - 1);
    const u32 at = ring + stage * STAGE_BYTES;
    multiply(d, at + part * (X_BYTES / PARTS), at + slot, by, lane);
    stage = stage + 1 == DEPTH ? 0 : stage + 1;
  }
  cp_async_wait<0>();
  __syncthreads();

  // 3. The sums of this block, and those of all blocks of the tile.
  float* const sums = reinterpret_cast<float*>(dynamic);
#pragma unroll
  for (int j = 0; j < PRODUCTS; ++j)
#pragma unroll
    for (int i = 0; i < COLUMN_BLOCKS * 4; ++i)
      sums[(part * (COLUMNS / PARTS) + i / 4 * 8 + lane % 4 * 2 + i % 2) * PITCH + own_row +
           j * 16 + i % 4 / 2 * 8] = d[j][i / 4][i % 4];
  __syncthreads();
  float* const tile = workspace + static_cast<i64>(blockIdx.x) * split * (COLUMNS * ROWS);
  if (split > 1) {
    for (int i = threadIdx.x; i < m * ROWS; i += THREADS)
      tile[blockIdx.y * (COLUMNS * ROWS) + i] = sums[i / ROWS * PITCH + i % ROWS];
    __syncthreads();
    if (!last_block(counters + blockIdx.x, split)) return;
  }

  // 4. The epilogue: neighbouring threads have neighbouring columns.
  const Epilogue<Activation, GATE, elem_t, out_t> epilogue = {
      bias, residual, nullptr, residual_stride, scale, n};
  for (int i = threadIdx.x; i < m * OUTPUTS; i += THREADS) {
    const int row = i / OUTPUTS, column = i % OUTPUTS;
    if (first + column >= n) continue;
    float total[2] = {};
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      const int at = column + half * OUTPUTS;
      if (split == 1) total[half] = sums[row * PITCH + at];
      for (int part = 0; split > 1 && part < split; ++part)
        total[half] += __ldcg(tile + (part * COLUMNS + row) * ROWS + at);
    }
    out[row * out_stride + first + column] =
        static_cast<out_t>(epilogue(total[0], total[1], row, first + column));
  }
}
