/* out = act(scale * x . weight + bias) + residual for few rows of x, on tensor cores with the
   operands swapped: the weight is the side of sixteen rows, x that of eight columns, so that no
   product is wasted on rows that x has not.

   A block has ROWS outputs of the weight (with GATE half of them gate, half up), all rows of x, and
   a part of k. Tiles of both come through a ring of STAGES in shared memory by cp.async; of each
   stage the warps multiply ROWS / WARP_ROWS pieces of the weight, each in WARPS_K parts of k. The
   parts are added up in shared memory. Where gridDim.y blocks share a tile, each leaves its sums in
   `workspace`, and the last one adds them up; as a CLUSTER they read them in one another's shared
   memory (sm_90), and each has some rows of out. All in a fixed order: the same bits every time.

   Before the previous kernel is over a block asks for lines of its weight, to L2: that reads nothing.

   sm_80 and later. */
//% if has_mod
#define EPILOGUE_EXPRESSION (${epilogue_mod})
#define EPILOGUE_DERIVATIVE (${epilogue_mod_grad})
//% endif
#include "prelude.cuh"
#include "gemm/epilogue.cuh"
#include "ptx/cluster.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/pdl.cuh"
#include "tile/fragment.cuh"
#include "tile/last_block.cuh"
#include "tile/tile_copy.cuh"

using elem_t = ${dtype};
using out_t = ${out_dtype};
using Activation = ${activation};
constexpr bool GATE = ${gate};
constexpr bool ROWS_OF_K = ${rows_of_k};         // weight_layout "nk": rows are contiguous in k
constexpr bool ALIGNED = ${aligned};             // 16-byte copies
constexpr bool PREFETCH = __CUDA_ARCH__ >= 900;  // where launches overlap
constexpr int TOKENS = ${tokens};                // rows of x, padded
constexpr int ROWS = ${rows};                    // of the weight
constexpr int BLOCK_K = ${block_k};
constexpr int STAGES = ${stages};
constexpr int CLUSTER = ${cluster};    // blocks that share a tile in a cluster; 1: none
constexpr int RESIDENT = ${resident};  // blocks of a multiprocessor, at least

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int WARP_ROWS = ROWS < 64 ? 16 : ROWS / 4, WARPS_K = WARPS / (ROWS / WARP_ROWS);
constexpr int HALVES = GATE ? 2 : 1, OUTPUTS = ROWS / HALVES;
constexpr int PITCH = ROWS + 4;  // of sums: lanes of a fragment meet 32 banks
static_assert(WARP_ROWS % 16 == 0, "whole fragments");
static_assert(BLOCK_K % 64 == 0 && BLOCK_K % (16 * WARPS_K) == 0,
              "whole panels, and whole steps of mma for each part of k");
static_assert(ROWS_OF_K || OUTPUTS % 64 == 0, "gate and up have panels of their own");

using XTile = SwizzledTile<TOKENS, BLOCK_K>;
using WeightTile = SwizzledTile<ROWS_OF_K ? ROWS : BLOCK_K, ROWS_OF_K ? BLOCK_K : ROWS>;
// What is copied at a time: all of a tile, or with GATE a panel of gate or up.
constexpr bool IN_PANELS = GATE && ROWS_OF_K;
using HalfTile = SwizzledTile<ROWS_OF_K ? OUTPUTS : BLOCK_K, IN_PANELS   ? 64
                                                             : ROWS_OF_K ? BLOCK_K
                                                                         : OUTPUTS>;
constexpr int PANELS = IN_PANELS ? BLOCK_K / 64 : 1;
constexpr int HALF_BYTES = ROWS_OF_K ? OUTPUTS * WeightTile::ROW_BYTES : HalfTile::BYTES;
using WeightReader =
    FragmentReader<WeightTile, ROWS_OF_K ? BlockOrder::ROW_MAJOR : BlockOrder::COL_MAJOR>;
constexpr int STAGE_BYTES = WeightTile::BYTES + XTile::BYTES;
static_assert(WARPS_K * TOKENS * PITCH * 4 <= STAGES * STAGE_BYTES, "sums are where the ring was");

// What a block reads: outputs from `first` on, a part of k.
struct Source {
  const elem_t *x, *weight;
  i64 x_stride, weight_stride;
  int first, m, n, k;

  // To L2, lines of the weight that the first stages will want, from k0 on.
  __device__ __forceinline__ void prefetch(int k0) const {
    constexpr int LINE = 128 / sizeof(elem_t), K = STAGES * BLOCK_K;
    constexpr int LINES = (ROWS_OF_K ? K : ROWS) / LINE;  // of a row
#pragma unroll 1
    for (int i = threadIdx.x; i < (ROWS_OF_K ? ROWS : K) * LINES; i += THREADS) {
      const int row = i / LINES, column = i % LINES * LINE;
      const int output = ROWS_OF_K ? row : column, at = k0 + (ROWS_OF_K ? column : row);
      const int place = first + output % OUTPUTS, line = place + output / OUTPUTS * n;
      if (place < n && at < k)
        prefetch_l2(weight + (ROWS_OF_K ? line * weight_stride + at : at * weight_stride + line));
    }
  }
  __device__ __forceinline__ void load_weight(u32 tile, int k0) const {
#pragma unroll
    for (int half = 0; half < HALVES; ++half)
#pragma unroll
      for (int panel = 0; panel < PANELS; ++panel)
        load_panel(tile + half * HALF_BYTES + panel * WeightTile::PANEL_BYTES, half, panel, k0);
  }
  // One of gate or up where there are both, and then 64 columns of it.
  __device__ __forceinline__ void load_panel(u32 tile, int half, int panel, int k0) const {
    const int output = first + half * n, column = panel * 64;
    if (ROWS_OF_K)
      copy_tile<HalfTile, THREADS, ALIGNED>(tile, weight + output * weight_stride + k0 + column,
                                            weight_stride, n - first, k - k0 - column);
    else
      copy_tile<HalfTile, THREADS, ALIGNED>(tile, weight + k0 * weight_stride + output,
                                            weight_stride, k - k0, n - first);
  }
  __device__ __forceinline__ void load_x(u32 tile, int k0) const {
    copy_tile<XTile, THREADS, ALIGNED>(tile, x + k0, x_stride, m, k - k0);
  }
};

// A warp's sums: WARP_ROWS rows of the weight, all tokens.
struct Sums {
  float d[WARP_ROWS / 16][TOKENS / 8][4] = {};

  __device__ __forceinline__ static void weight_fragment(u32 (&a)[4], const WeightReader& reader,
                                                         u32 tile, int row_block, int k_block) {
    if (ROWS_OF_K)
      ldmatrix_x4(a, reader.address(tile, row_block, k_block));
    else
      ldmatrix_x4_trans(a, reader.address(tile, k_block, row_block));
  }

  // The part `warp_k` of a stage's k.
  __device__ __forceinline__ void multiply(u32 stage, const WeightReader& of_weight,
                                           const ColumnReader<XTile>& of_x, int warp_row,
                                           int warp_k) {
    constexpr int STEPS = BLOCK_K / 16 / WARPS_K;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const int k_block = warp_k * STEPS + step;
      u32 a[WARP_ROWS / 16][4];
#pragma unroll
      for (int i = 0; i < WARP_ROWS / 16; ++i)
        weight_fragment(a[i], of_weight, stage, warp_row * (WARP_ROWS / 16) + i, k_block);
#pragma unroll
      for (int block = 0; block < TOKENS / 16; ++block) {
        u32 b[4];
        ldmatrix_x4(b, of_x.address(stage + WeightTile::BYTES, block, k_block));
#pragma unroll
        for (int i = 0; i < WARP_ROWS / 16; ++i)
          mma_16x16x16<elem_t, 16>(d[i][2 * block], d[i][2 * block + 1], a[i], b);
      }
    }
  }

  // To [TOKENS][PITCH].
  __device__ __forceinline__ void store(float* sums, int warp_row, int lane) const {
    float* const at = sums + lane % 4 * 2 * PITCH + warp_row * WARP_ROWS + lane / 4;
#pragma unroll
    for (int i = 0; i < WARP_ROWS / 16; ++i)
#pragma unroll
      for (int block = 0; block < TOKENS / 8; ++block)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          at[(block * 8 + j % 2) * PITCH + i * 16 + j / 2 * 8] = d[i][block][j];
  }
};

// Sums of a tile in the workspace: [TOKENS][ROWS] in fours; those of rows below m are there.
constexpr int FOURS = TOKENS * ROWS / 4, OF_THREAD = ceil_div(FOURS, THREADS);
constexpr int PASS = THREADS / OUTPUTS;  // rows of out that a block writes at a time
static_assert(THREADS % OUTPUTS == 0, "a thread has one column of out");

__device__ __forceinline__ float4 add_fours(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
// Where in the sums of a block four `i` of a tile are.
__device__ __forceinline__ float4* four_of(float* parts, int i) {
  return reinterpret_cast<float4*>(parts + i / (ROWS / 4) * PITCH) + i % (ROWS / 4);
}

// The parts of k that a block's warps have, to the workspace.
__device__ __forceinline__ void add_parts(float* parts, float4* mine, int m) {
#pragma unroll
  for (int j = 0; j < OF_THREAD; ++j) {
    const int i = j * THREADS + threadIdx.x;
    if (i >= m * (ROWS / 4)) continue;
    float4 total = *four_of(parts, i);
#pragma unroll
    for (int part = 1; part < WARPS_K; ++part)
      total = add_fours(total, *four_of(parts + part * TOKENS * PITCH, i));
    mine[i] = total;
  }
}

// The sums of all blocks of a tile, to where this block's first part was. A block's sums are asked
// for all at once.
__device__ __forceinline__ void add_blocks(float* parts, const float4* tile, int split, int m) {
  float4 total[OF_THREAD] = {};
  for (int s = 0; s < split; ++s, tile += FOURS) {
#pragma unroll
    for (int j = 0; j < OF_THREAD; ++j) {
      const int i = j * THREADS + threadIdx.x;
      if (i < m * (ROWS / 4)) total[j] = add_fours(total[j], __ldcg(tile + i));
    }
  }
#pragma unroll
  for (int j = 0; j < OF_THREAD; ++j)
    if (const int i = j * THREADS + threadIdx.x; i < FOURS) *four_of(parts, i) = total[j];
}

// Of an element, what lies `at` and in the places of the other parts of k: of this block, or of all
// of its cluster.
__device__ __forceinline__ float sum_parts(const float* at) {
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < CLUSTER * WARPS_K; ++i) {
    const float* const part = at + i % WARPS_K * TOKENS * PITCH;
    total += CLUSTER > 1 ? cluster_load(part, i / WARPS_K) : *part;
  }
  return total;
}

//% if cluster > 1
extern "C" __global__ void __cluster_dims__(1, CLUSTER) __launch_bounds__(THREADS, RESIDENT)
    //% else
    extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    //% endif
    linear_skinny(const elem_t* __restrict__ x,        // [m, k]
                  const elem_t* __restrict__ weight,   // [n, k] or [k, n]; with GATE 2 n for n
                  const elem_t* __restrict__ bias,     // [n], with GATE [2 n], or null
                  const out_t* __restrict__ residual,  // [m, n] or null
                  out_t* __restrict__ out,             // [m, n]
                  elem_t* __restrict__ pre,            // [m, n], with GATE [m, 2 n], or null
                  float* __restrict__ workspace,       // [gridDim.x, gridDim.y, TOKENS, ROWS]
                  u32* __restrict__ counters,          // [gridDim.x], 0 before and after
                  const int m,                         // 1..TOKENS
                  const int n, const int k, const i64 x_stride, const i64 weight_stride,
                  const i64 out_stride, const i64 residual_stride, const float scale) {
  const int first = blockIdx.x * OUTPUTS, split = gridDim.y;
  const i64 all = ceil_div(k, BLOCK_K);
  const int begin = static_cast<int>(all * blockIdx.y / split);
  const int steps = static_cast<int>(all * (blockIdx.y + 1) / split) - begin;
  const Source source = {x, weight, x_stride, weight_stride, first, m, n, k};
  if (PREFETCH) source.prefetch(begin * BLOCK_K);
  after_previous_kernel();
  extern __shared__ __align__(128) char dynamic[];
  const u32 ring = shared_address(dynamic);
  const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
  const int warp_row = warp % (ROWS / WARP_ROWS), warp_k = warp / (ROWS / WARP_ROWS);

  // 1. The first stages.
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    const u32 stage = ring + i * STAGE_BYTES;
    if (i < steps) source.load_weight(stage, (begin + i) * BLOCK_K);
    if (i < steps) source.load_x(stage + WeightTile::BYTES, (begin + i) * BLOCK_K);
    cp_async_commit();
  }

  // 2. Products; a stage is filled again behind the barrier that says all warps are done with it.
  Sums sums;
  const WeightReader of_weight(lane);
  const ColumnReader<XTile> of_x(lane);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    if (const int next = step + STAGES - 1; next < steps) {
      const u32 stage = ring + next % STAGES * STAGE_BYTES;
      source.load_weight(stage, (begin + next) * BLOCK_K);
      source.load_x(stage + WeightTile::BYTES, (begin + next) * BLOCK_K);
    }
    cp_async_commit();
    sums.multiply(ring + step % STAGES * STAGE_BYTES, of_weight, of_x, warp_row, warp_k);
  }
  cp_async_wait<0>();
  __syncthreads();

  // 3. The parts of k of this block.
  float* const parts = reinterpret_cast<float*>(dynamic);
  sums.store(parts + warp_k * TOKENS * PITCH, warp_row, lane);
  if (CLUSTER > 1) {
    meet_cluster();
  } else {
    __syncthreads();
  }

  // 4. Those of all blocks of the tile.
  const bool by_memory = CLUSTER == 1 && split > 1;
  if (by_memory) {
    float4* const tile = reinterpret_cast<float4*>(workspace) + blockIdx.x * split * FOURS;
    add_parts(parts, tile + blockIdx.y * FOURS, m);
    __syncthreads();
    if (!last_block(counters + blockIdx.x, split)) return;
    add_blocks(parts, tile, split, m);
    __syncthreads();
  }

  // 5. The epilogue: neighbouring threads have neighbouring columns.
  const Epilogue<Activation, GATE, elem_t, out_t> epilogue = {bias,  residual, pre, residual_stride,
                                                              scale, n};
  const int place = threadIdx.x % OUTPUTS, column = first + place;
  const int rank = CLUSTER > 1 ? cluster_rank() : 0;
  for (int row = rank * PASS + threadIdx.x / OUTPUTS; row < m; row += CLUSTER * PASS) {
    if (column >= n) break;
    const float* const at = parts + row * PITCH + place;
    float total[2] = {};
#pragma unroll
    for (int half = 0; half < HALVES; ++half)
      total[half] = by_memory ? at[half * OUTPUTS] : sum_parts(at + half * OUTPUTS);
    out[row * out_stride + column] = static_cast<out_t>(epilogue(total[0], total[1], row, column));
  }
  if (CLUSTER > 1) meet_cluster();  // the others have read this one's sums
}
