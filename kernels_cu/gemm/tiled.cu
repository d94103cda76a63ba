/* A product in tiles of shared memory, with the epilogue in registers: every type, layout, alignment.

   out = act(scale * x . weight + bias) + residual             z = scale * x . weight + bias -> pre

   A thread that computed one element by itself would read 2 k elements of memory for k FMAs. Here a
   block owns BLOCK x BLOCK elements of out and takes the sum over k DEPTH at a time:

     1. a [BLOCK, DEPTH] tile of x and one of weight -> shared memory, as fp32, zeros outside
     2. sums += x_tile . weight_tile, each thread ROWS x ROWS of them

   What a step costs, for e bytes an element (with GATE weight counts twice):
     memory   2 * BLOCK * DEPTH * e bytes for 2 * BLOCK^2 * DEPTH flops: BLOCK / e flops a byte
     shared   a thread reads ROWS + ROWS floats for ROWS^2 FMAs: register tiles are to shared memory
              what the block's tiles are to device memory

   Threads form 16 x 16; thread (y, x) has rows 4y .. 4y + 3 and columns x, x + 16, ...: a warp reads
   sixteen neighbouring columns, and two groups of rows, each in one piece for all. Tiles stand with k
   outside, rows inside, whatever the layout in memory: neighbouring threads fetch what are neighbours
   in memory, and an odd pitch spreads over the banks what they store.

   What the next steps change: fma.cu reads shared memory four floats at a time and fetches the next
   tile under the products of this one; mma.cu and wgmma.cu leave the products to tensor cores.

   Sums run over k in ascending order, in fp32 FMAs: the same bits at every call. All architectures. */
#include "prelude.cuh"
//% if has_mod
#define EPILOGUE_EXPRESSION (${epilogue_mod})
#define EPILOGUE_DERIVATIVE (${epilogue_mod_grad})
//% endif
#include "gemm/epilogue.cuh"

using elem_t = ${dtype};
using out_t = ${out_dtype};
using activation_t = ${activation};
constexpr bool GATE = ${gate};          // weight holds gate, then up
constexpr bool X_KM = ${x_km};          // x lies as [k, m]
constexpr bool WEIGHT_KN = ${weight_kn};  // weight lies as [k, n], or [k, 2 n] with GATE
constexpr int BLOCK = ${block};         // rows and columns of a tile of out

constexpr int LANES = 16;            // threads beside each other, and rows of threads
constexpr int ROWS = BLOCK / LANES;  // rows, and columns, of a thread
constexpr int DEPTH = 16;            // of k in a step
constexpr int PITCH = BLOCK + 1;     // floats from one k to the next in a tile
constexpr int THREADS = LANES * LANES;

static_assert(BLOCK % LANES == 0, "threads share rows and columns evenly");
static_assert(BLOCK * DEPTH % THREADS == 0, "threads share the elements of a tile evenly");

using Tile = float[DEPTH][PITCH];
using Sums = float[ROWS][ROWS];

// Rows `row0` … of a matrix [rows, depth] from k0 on -> a tile. DEPTH_OUTSIDE: it lies as
// [depth, rows]. `rows` and `depth` are what is left of it; beyond it there are zeros.
template <bool DEPTH_OUTSIDE>
__device__ __forceinline__ void load_tile(Tile& tile, const elem_t* __restrict__ matrix, i64 stride,
                                          int rows, int depth) {
#pragma unroll
  for (int i = threadIdx.x; i < BLOCK * DEPTH; i += THREADS) {
    const int row = DEPTH_OUTSIDE ? i % BLOCK : i / DEPTH;
    const int d = DEPTH_OUTSIDE ? i / BLOCK : i % DEPTH;
    const i64 place = DEPTH_OUTSIDE ? d * stride + row : row * stride + d;
    tile[d][row] = row < rows && d < depth ? static_cast<float>(matrix[place]) : 0.f;
  }
}

// sums += x_tile^T . weight_tile of this thread's rows and columns.
__device__ __forceinline__ void multiply(Sums& sums, const Tile& x_tile, const Tile& weight_tile,
                                         int row0, int column0) {
#pragma unroll
  for (int d = 0; d < DEPTH; ++d) {
    float x[ROWS], w[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) x[i] = x_tile[d][row0 + i];
#pragma unroll
    for (int j = 0; j < ROWS; ++j) w[j] = weight_tile[d][column0 + j * LANES];
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
      for (int j = 0; j < ROWS; ++j) sums[i][j] = fmaf(x[i], w[j], sums[i][j]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) linear_tiled(
    const elem_t* __restrict__ x,       // [m, k], or [k, m] if X_KM    strides from row to row
    const elem_t* __restrict__ weight,  // [n, k], or [k, n] if WEIGHT_KN; 2 n for n with GATE
    const elem_t* __restrict__ bias,    // [n] ([2 n]), or null
    const out_t* residual,              // [m, n], or null; may be out
    out_t* out,                         // [m, n]
    elem_t* __restrict__ pre,           // [m, n] ([m, 2 n]) contiguous, or null
    const int m, const int n, const int k, const i64 x_stride, const i64 weight_stride,
    const i64 out_stride, const i64 residual_stride, const float scale) {
  __shared__ Tile x_tile, weight_tile, up_tile;
  const int tiles_n = ceil_div(n, BLOCK);
  const int row0 = blockIdx.x / tiles_n * BLOCK, column0 = blockIdx.x % tiles_n * BLOCK;
  const int lane = threadIdx.x % LANES, thread_row = threadIdx.x / LANES * ROWS;
  const i64 x_step = X_KM ? x_stride : 1, weight_step = WEIGHT_KN ? weight_stride : 1;  // along k
  x += X_KM ? row0 : row0 * x_stride;
  weight += WEIGHT_KN ? column0 : column0 * weight_stride;
  const elem_t* up = weight + (WEIGHT_KN ? n : n * weight_stride);

  Sums sums = {}, up_sums = {};
  for (int k0 = 0; k0 < k; k0 += DEPTH) {
    // 1. Tiles to shared memory, where those before are used up.
    __syncthreads();
    load_tile<X_KM>(x_tile, x + k0 * x_step, x_stride, m - row0, k - k0);
    load_tile<WEIGHT_KN>(weight_tile, weight + k0 * weight_step, weight_stride, n - column0, k - k0);
    if (GATE) load_tile<WEIGHT_KN>(up_tile, up + k0 * weight_step, weight_stride, n - column0, k - k0);
    // 2. Their products.
    __syncthreads();
    multiply(sums, x_tile, weight_tile, thread_row, lane);
    if (GATE) multiply(up_sums, x_tile, up_tile, thread_row, lane);
  }

  const Epilogue<activation_t, GATE, elem_t, out_t> epilogue{bias, residual, pre, residual_stride,
                                                             scale, n};
#pragma unroll
  for (int i = 0; i < ROWS; ++i)
#pragma unroll
    for (int j = 0; j < ROWS; ++j) {
      const int row = row0 + thread_row + i, column = column0 + lane + j * LANES;
      if (row < m && column < n)
        out[row * out_stride + column] =
            static_cast<out_t>(epilogue(sums[i][j], up_sums[i][j], row, column));
    }
}
