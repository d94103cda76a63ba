/* Products with a weight for each expert on sm_90 (sm_90a), whose tiles have as many rows as experts
   have: rows of x are columns of wgmma, which come by 8 and not by 64.

     out = act(x weight[expert]^T + bias[expert]) [* up]           [places, n], rows sorted by expert

   The weight stands where x does in gemm/wgmma.cu, and what comes out is out's transpose
   (gemm/sm90/ragged_store.cuh). A tile has 128 rows of an expert's weight. How many rows of x it has shows
   when the kernel runs (gemm/sm90/ragged_tiles.cuh); there are products of each number, and a consumer
   goes through the loop over k that is of its own (gemm/sm90/ragged_products.cuh).

   The grid is as large as the GPU; a block works through one tile after another. Two warps of the
   first warpgroup ask TMA for 128 bytes of k of both operands, stage after stage of a ring. Two
   warpgroups are consumers, of 2 x 64 x 160 sums at most each:

     PINGPONG   a tile of 128 x 160 at most is one consumer's; they take turns: one multiplies, the
                other is at its epilogue
     else       of a tile of 128 x 304 at most each has 64 rows of the weight, and halves of columns

   With GATE rows of gate and of up lie by eights in turns, so that a thread has both sums of an element:
   a map whose dimensions are k, 8 rows, gate or up, and eights of rows brings them so.

   With CODES x and the weight are e4m3 with a scale for each row, and what they are summed to is
   multiplied with both at the end: the tensor core's sums of e4m3 have 13 bits of fraction. */
#include "prelude.cuh"
#include "ptx/elect.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/pdl.cuh"
#include "ptx/register_fence.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "tile/pingpong.cuh"
#include "tile/ring.cuh"
//% if has_mod
#define EPILOGUE_EXPRESSION (${epilogue_mod})
#define EPILOGUE_DERIVATIVE (${epilogue_mod_grad})
//% endif
#include "gemm/pairs.cuh"
#include "gemm/sm90/ragged_products.cuh"
#include "gemm/sm90/ragged_store.cuh"
#include "gemm/sm90/ragged_tiles.cuh"

using code_t = ${code};   // of x and of weight
using elem_t = ${dtype};  // of bias and of out
using Activation = ${activation};
constexpr bool CODES = ${codes};  // x and weight are e4m3 with scales
constexpr bool GATE = ${gate}, PRE = ${pre};
constexpr bool KN = ${kn};              // rows of the weight are contiguous in n
constexpr bool PINGPONG = ${pingpong};  // consumers take turns
constexpr int STAGES = ${stages};
constexpr int GUARD = ${guard};  // bytes between tiles: 0 except where memory is checked

constexpr int WARPGROUP = 128, CONSUMERS = 2, THREADS = WARPGROUP * (1 + CONSUMERS);
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
static_assert(!KN || !(GATE || CODES), "panels hold 16-bit columns of one kind");
constexpr int OUTPUTS = 128;  // rows of the weight in a tile
constexpr int OUT_COLUMNS = GATE ? OUTPUTS / 2 : OUTPUTS;
constexpr int PARTS = PINGPONG ? 1 : 2;                 // of a tile's rows of x
constexpr int RELEASES = PINGPONG ? 4 : 4 * CONSUMERS;  // of a stage, by warps
constexpr int BLOCK_K = STEP_BYTES / sizeof(code_t);
constexpr int BOX = 64, SMALL_BOX = 16;  // rows of x
using Order = RaggedOrder<PARTS>;
using Place = RingPlace<STAGES>;
using Pairs = EpiloguePairs<Activation, GATE, false, false, elem_t, elem_t>;
static_assert(PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <=
                  (1 + CONSUMERS) * registers_at_start(THREADS),
              "more would be waited for forever");

// Shared memory: tiles of the weight, tiles of x, rows of out that consumers stage, scales of their
// tiles' rows of x, barriers.
struct Ring : RingBarriers<Ring, STAGES> {
  static constexpr int A_BYTES = OUTPUTS * STEP_BYTES, B_BYTES = Order::MOST * STEP_BYTES;
  static constexpr int OF_SCALES = (Order::MOST + STAGED_ROWS) * 4;  // and of rows behind a tile's
  static constexpr int STAGED = STAGES * (A_BYTES + B_BYTES + 2 * GUARD);
  static constexpr int SCALES = STAGED + CONSUMERS * (STAGED_BYTES + GUARD);
  static constexpr int BARRIERS = SCALES + (CODES ? CONSUMERS * OF_SCALES + GUARD : 0);
  __device__ __forceinline__ u32 staged(int consumer) const {
    return base + STAGED + consumer * (STAGED_BYTES + GUARD);
  }
  __device__ __forceinline__ u32 scales(int consumer) const {
    return base + SCALES + consumer * OF_SCALES;
  }
  __device__ __forceinline__ u32 a(int stage) const { return base + stage * (A_BYTES + GUARD); }
  __device__ __forceinline__ u32 b(int stage) const {
    return base + STAGES * (A_BYTES + GUARD) + stage * (B_BYTES + GUARD);
  }
  // This warp needs a stage no more.
  __device__ __forceinline__ void release(int stage, int lane) const {
    if (lane == 0) mbarrier_arrive(empty(stage));
  }
};

// The tile's rows of x, and those behind them up to a whole box. By one thread.
__device__ __forceinline__ void fetch_x(const Ring& ring, int stage, const TensorMap& x_map,
                                        const TensorMap& x_map_last, const RaggedTile& tile,
                                        int k) {
  const u32 full = ring.full(stage), b = ring.b(stage);
  const int rows = round_up(tile.rows, SMALL_BOX);
  mbarrier_expect(full, rows * STEP_BYTES);
  int row = 0;
  for (; row + BOX <= rows; row += BOX)
    tma_load(b + row * STEP_BYTES, x_map, full, k, tile.row + row, 0, 0);
  for (; row < rows; row += SMALL_BOX)
    tma_load(b + row * STEP_BYTES, x_map_last, full, k, tile.row + row, 0, 0);
}

__device__ __forceinline__ void fetch_weight(const Ring& ring, int stage,
                                             const TensorMap& weight_map, const RaggedTile& tile,
                                             int n, int k) {
  const u32 full = ring.full(stage);
  mbarrier_expect(full, Ring::A_BYTES);
  const int column = tile.column * OUT_COLUMNS;
  if (GATE) {
    tma_load(ring.a(stage), weight_map, full, k, 0, 0, (tile.expert * 2 * n + column) / 8);
  } else if (KN) {
    tma_load(ring.a(stage), weight_map, full, column, k, tile.expert, 0);
    tma_load(ring.a(stage) + PANEL_OF_64, weight_map, full, column + 64, k, tile.expert, 0);
  } else {
    tma_load(ring.a(stage), weight_map, full, k, column, tile.expert, 0);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) grouped_linear_ragged(
    const __grid_constant__ TensorMap x_map,       // [places, k], boxes of 64 rows
    const __grid_constant__ TensorMap x_map_last,  // the same, boxes of 16 rows
    const __grid_constant__ TensorMap weight_map,  // [experts, n, k], with GATE by eights of rows,
                                                   // with KN [experts, k, n] by panels
    //% if codes
    const float* __restrict__ x_scales,  // [places]
    const float* __restrict__ scales,    // [experts, n], with GATE [experts, 2 n]
    //% endif
    const elem_t* __restrict__ bias,  // [experts, n], with GATE [experts, 2 n], or null
    elem_t* __restrict__ out,         // [places, n]
    const int* __restrict__ offsets,  // [experts + 1], see gemm/groups.cuh
    elem_t* __restrict__ pre,         // [places, n], with GATE [places, 2 n], or null
    const int experts, const int m, const int n, const int k,
    const int group_rows) {  // of tiles that are taken together
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const Ring ring{shared_address(shared_memory)};
  const int warpgroup = __shfl_sync(FULL_MASK, threadIdx.x / WARPGROUP, 0);
  if (threadIdx.x == 0) ring.begin(RELEASES, 2);
  __syncthreads();
  after_previous_kernel();
  Order order;
  order.order = {m, ceil_div(n, OUT_COLUMNS), group_rows, offsets, experts};
  const int steps = ceil_div(k, BLOCK_K);
  Place place;
  RaggedTile tile;

  if (warpgroup == 0) {
    // ---- producers
    fewer_registers<PRODUCER_REGISTERS>();
    const int warp = __shfl_sync(FULL_MASK, threadIdx.x / WARP_SIZE, 0);
    if (warp < 2) {
      if (elect_one()) tma_prefetch(x_map), tma_prefetch(x_map_last), tma_prefetch(weight_map);
      for (int number = blockIdx.x; order.take(number, tile); number += gridDim.x) {
        for (int step = 0; step < steps; ++step, place.advance()) {
          mbarrier_wait(ring.empty(place.stage), place.parity ^ 1);
          if (elect_one()) {
            if (warp == 0)
              fetch_x(ring, place.stage, x_map, x_map_last, tile, step * BLOCK_K);
            else
              fetch_weight(ring, place.stage, weight_map, tile, n, step * BLOCK_K);
          }
        }
      }
    }
    __syncwarp();
  } else {
    // ---- consumers
    more_registers<CONSUMER_REGISTERS>();
    const int consumer = warpgroup - 1, lane = threadIdx.x % WARP_SIZE;
    const int first_row = PINGPONG ? 0 : consumer * 64;  // of the weight's tile
    const int thread = threadIdx.x % WARPGROUP, barrier = 3 + consumer;
    const int outputs = GATE ? 2 * n : n;
    const Pairs epilogue(nullptr, nullptr, 0, 1.f, n);
    const PingPong<CONSUMERS> turns(consumer, PINGPONG);
    RaggedSums acc = {};
    int position = 0, turn = 0;  // in the ring; tiles
    for (int number = blockIdx.x; order.take(number, tile); number += gridDim.x, ++turn) {
      if (PINGPONG) {
        place = ring_place<STAGES>(position);
        position += steps;
        if (turn % CONSUMERS != consumer) continue;
      }
      // 1. What sums will be multiplied with, and added to them.
      const int tile_column = tile.column * OUT_COLUMNS;
      RaggedOutputs<CODES> of[2];
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const int row = first_row + (PINGPONG ? part * 64 : 0) + thread / WARP_SIZE * 16;
        const int own = tile_column + (GATE ? row / 2 : row) + lane / 4;
        const int other = GATE ? n + own : own + 8;
        const auto of_output = [&](const auto* array) -> float2 {
          if (array == nullptr) return {0.f, 0.f};
          array += static_cast<i64>(tile.expert) * outputs;
          return {own < n ? static_cast<float>(array[own]) : 0.f,
                  own < n && other < outputs ? static_cast<float>(array[other]) : 0.f};
        };
        of[part].bias = of_output(bias);
        //% if codes
        of[part].scales = of_output(scales);
        of[part].x_scales = ring.scales(consumer) + (PINGPONG ? 0 : part * tile.rows / PARTS * 4);
        //% endif
      }
      //% if codes
      for (int row = thread; row < tile.rows + STAGED_ROWS; row += WARPGROUP)
        store_shared_word(ring.scales(consumer) + row * 4,
                          __float_as_uint(__ldg(x_scales + min(tile.row + row, m - 1))));
      //% endif

      // 2. Products, 128 bytes of k after the other.
      if (PINGPONG) turns.wait();
      register_fence(acc[0]), register_fence(acc[1]);
      const int columns = tile.rows / PARTS;
      multiply_ragged<code_t, PINGPONG, KN>(acc, columns, ring, place, steps, first_row, lane,
                                            turns);
      register_fence(acc[0]), register_fence(acc[1]);

      // 3. The way out.
      if (CODES) named_barrier_wait_aligned<WARPGROUP>(barrier);  // all scales of x are there
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const int weight_row = first_row + (PINGPONG ? part * 64 : 0);
        const int column = tile_column + (GATE ? weight_row / 2 : weight_row);
        const i64 row = tile.row + (PINGPONG ? 0 : part * columns);
        const int end = PINGPONG ? tile.end : min(tile.end, tile.row + (part + 1) * columns);
        const RaggedPart<elem_t> to = {out + row * n + column,
                                       pre + row * outputs + column,
                                       n,
                                       outputs,
                                       n,
                                       end - static_cast<int>(row),
                                       n - column};
        store_ragged<CODES, PRE>(acc[part], epilogue, of[part], to, ring.staged(consumer), barrier);
      }
    }
    turns.end(turn % CONSUMERS);
  }
  __syncwarp();
}
