/* A product with its epilogue on sm_90 (sm_90a): TMA brings tiles of both operands, wgmma
   multiplies them, and the sums go through the epilogue in registers.

     out = activation(scale * x weight^T + bias) [* up] + residual           [m, n]

   The grid is as large as the GPU; a block (or a cluster of two) works through one tile after
   another, in an order that keeps operands in L2 (gemm/tile_order.cuh). Its first warpgroup is the
   producer: two of its warps, one for each operand, ask TMA for 64 of k, stage after stage of a ring
   (gemm/sm90/stages.cuh), and are tiles ahead of the others. Two warpgroups are consumers:

     COOPERATIVE   each takes half of a tile's rows.
     else          each takes every other tile, whole, and they take turns: one multiplies, the other
                   is at its epilogue. (Only who has seen the round before may wait by its parity.)

   With SHARES the last tiles, which would leave blocks idle, are cut along k into equal shares
   (gemm/pieces.cuh), and their sums added up in order (gemm/sm90/partials.cuh). With SPLIT > 1 as
   many blocks share the k of one tile, where most of the GPU would be idle: those of a cluster
   (gemm/sm90/split_k.cuh), or with SHARES any, whose sums meet in memory. Otherwise blocks of a
   cluster have tiles below one another; each fetches half of the weight's tile and has TMA write it
   into both, so that L2 is asked once.

   With SWAPPED the weight stands where x does elsewhere in this file, and x where the weight does: the
   product is out's transpose (gemm/sm90/store_transposed.cuh). Rows of x are columns of wgmma then,
   which come by 16 and not by 64, so that 140 rows are no 192; consumers are COOPERATIVE.

   With groups there is a weight, or an output, for each expert (gemm/groups.cuh). Rows of a weight with
   GATE: a tile has as many of gate as of up, so that a thread has both sums of an element.

   Source: the schedules of CUTLASS 3 (warp-specialised, cooperative and ping-pong). */
#include "prelude.cuh"
#include "ptx/cluster.cuh"
#include "ptx/elect.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/pdl.cuh"
#include "ptx/register_fence.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/tma.cuh"
#include "tile/pingpong.cuh"
#include "tile/ring.cuh"
//% if has_mod
#define EPILOGUE_EXPRESSION (${epilogue_mod})
#define EPILOGUE_DERIVATIVE (${epilogue_mod_grad})
//% endif
#include "gemm/groups.cuh"
#include "gemm/pairs.cuh"
#include "gemm/sm90/arrivals.cuh"
#include "gemm/sm90/consume.cuh"
#include "gemm/sm90/gathered_rows.cuh"
#include "gemm/sm90/operands.cuh"
#include "gemm/sm90/partials.cuh"
#include "gemm/sm90/produce.cuh"
#include "gemm/sm90/split_k.cuh"
#include "gemm/sm90/stages.cuh"
#include "gemm/sm90/store.cuh"
//% if swapped
#include "gemm/sm90/store_transposed.cuh"
//% endif
#include "gemm/sm90/weight_parts.cuh"

using elem_t = ${dtype};
using out_t = ${out_dtype};
constexpr int BLOCK_M = ${block_m};  // rows of x in a tile of a block
constexpr int BLOCK_N = ${block_n};  // rows of weight in a tile
constexpr int STAGES = ${stages};    // of 64 k in shared memory
constexpr int CLUSTER = ${cluster};  // blocks that share a tile of the weight
constexpr int SPLIT = ${split};      // blocks that share the k of a tile, which is their only one
constexpr bool MEETS = ${split > 1 and not shares};  // they are a cluster
constexpr int BOXES = ${boxes};                      // of output that a warp stages
constexpr bool COOPERATIVE = ${cooperative};
constexpr bool SWAPPED = ${swapped};  // x is the weight, m is n, and the other way around
constexpr bool SHARES = ${shares};    // blocks share the k of some tiles
constexpr bool GATHER = ${gather};    // x has rows of tokens (gemm/sm90/gathered_rows.cuh)
constexpr bool WAITS = ${waits}, TELLS = ${tells};  // of rows (gemm/sm90/arrivals.cuh)
constexpr bool GATE = ${gate}, RESIDUAL = ${residual}, PRE = ${pre};
constexpr bool FETCHED = RESIDUAL && ${tma_store};  // the residual comes while products run
constexpr bool X_K_MAJOR = ${x_k_major}, WEIGHT_K_MAJOR = ${weight_k_major};
constexpr int GUARD = ${guard};  // bytes between tiles: 0 except where memory is checked
using Activation = ${activation};
constexpr int WARPGROUP = 128, CONSUMERS = 2, THREADS = WARPGROUP * (1 + CONSUMERS);
constexpr int PRODUCER_REGISTERS = GATHER ? 56 : 40, CONSUMER_REGISTERS = GATHER ? 224 : 232;
constexpr int ROWS = COOPERATIVE ? BLOCK_M / CONSUMERS : BLOCK_M;  // of a consumer
constexpr int OUT_COLUMNS = GATE ? BLOCK_N / 2 : BLOCK_N;
constexpr int BOXES_OF_BLOCK = BOXES / (ROWS / 64);                    // of 64 rows
constexpr int RELEASES = CLUSTER * 4 * (COOPERATIVE ? CONSUMERS : 1);  // of a stage, by warps
static_assert(CLUSTER <= 2, "a tile of the weight has two parts at most");
static_assert(SPLIT == 1 || CLUSTER == 1, "one reason to be a cluster");
static_assert(!SWAPPED || (COOPERATIVE && CLUSTER == 1 && SHARES <= (SPLIT > 1) && !GATE && !PRE),
              "what the transposed way out can do");
static_assert(!FETCHED || BOXES_OF_BLOCK * 64 >= (SWAPPED ? BLOCK_N : OUT_COLUMNS), "room for it");
static_assert(ROWS % 64 == 0 && OUT_COLUMNS % 16 == 0, "wgmma's rows, columns staged at a time");
static_assert(PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <=
                  (1 + CONSUMERS) * registers_at_start(THREADS),
              "more would be waited for forever");

using Stages = GemmStages<OperandTile<BLOCK_M, X_K_MAJOR>, OperandTile<BLOCK_N, WEIGHT_K_MAJOR>,
                          STAGES, CONSUMERS, BOXES, GUARD>;
using Place = RingPlace<STAGES>;
using Work = Pieces<SHARES && SPLIT == 1>;
using Order = GroupedOrder<Groups::${groups}, BLOCK_M * CLUSTER, WAITS || TELLS>;
using Parts = WeightParts<Stages::B, GATE, CLUSTER>;
using Pairs = EpiloguePairs<Activation, GATE, PRE, RESIDUAL, elem_t, out_t>;
using Added = Residual<out_t>;
static_assert(!Order::GROUPED || (SPLIT == 1 && CLUSTER == 1 && !SHARES && !SWAPPED),
              "tiles of experts have one block each");

// What this block does of a tile that others share, or which has its expert's k alone.
__device__ __forceinline__ Piece own_part(const Piece& whole, const Order& order) {
  if (Order::OF_K) {
    const Depth depth = order.depth(whole.tile, 0);
    if (depth.count == 0) return {whole.tile, whole.steps * SLICES, 1};  // zeros, behind all of k
    return {whole.tile, depth.first / Order::STEP_OF_FIRST, ceil_div(depth.count, BLOCK_K)};
  }
  if (SPLIT == 1) return whole;
  const KPart part(MEETS ? cluster_rank() : block_index_again() % SPLIT, SPLIT, whole.steps);
  return {whole.tile, part.first, part.steps};
}

__device__ __forceinline__ void produce_x(const Stages& stages, const OperandMaps& maps,
                                          const Order& order, const Work& work, int rank,
                                          const Arrivals& arrivals) {
  using X = Stages::A;
  if (elect_one()) maps.prefetch();
  produce(stages, order, work, own_part, [&](const GroupedTile& tile, int stage, int k) {
    const int row = tile.row + rank * BLOCK_M, rows = X::asked<BLOCK_M>(tile.end - row);
    if (WAITS && k == 0) arrivals.wait(row);
    mbarrier_expect(stages.full(stage), rows * (BLOCK_K * 2));
    X::load<0, BLOCK_M>(stages.a(stage), maps, stages.full(stage), row, rows, k, 0, 0);
  });
}

__device__ __forceinline__ void produce_weight(const Stages& stages, const OperandMaps& maps,
                                               const Order& order, const Work& work, int n,
                                               int rank) {
  if (elect_one()) maps.prefetch();
  produce(stages, order, work, own_part, [&](const GroupedTile& tile, int stage, int k) {
    Parts{n}.load(stages.b(stage), maps, stages.full(stage), tile.column * OUT_COLUMNS, k,
                  Order::OF_K ? 0 : tile.expert, rank);
  });
}

//% if cluster > 1 or split > 1 and not shares
extern "C" __global__ void __cluster_dims__(CLUSTER* SPLIT) __launch_bounds__(THREADS, 1) linear_wgmma(
    //% else
extern "C" __global__ void __launch_bounds__(THREADS, 1) linear_wgmma(
    //% endif
    //% if not gather
    const __grid_constant__ TensorMap x_map,       // [m, k] as it lies, boxes of 64 k
    const __grid_constant__ TensorMap x_map_last,  // the same, boxes of the last tile's rows
    //% endif
    const __grid_constant__ TensorMap weight_map,  // [n, k] (with gate [2 n, k]) as it lies
    const __grid_constant__ TensorMap weight_map_last,
    //% if tma_store and not swapped
    const __grid_constant__ TensorMap out_map,  // [m, n], boxes of 16 rows and 64 columns
    //% endif
    const elem_t* __restrict__ bias,               // [n] or [2 n], or null
    out_t* __restrict__ out ${flags},              // [m, n]
    const out_t* __restrict__ residual,            // [m, n], or null
    elem_t* __restrict__ pre,                      // [m, n] or [m, 2 n], or null
    //% if shares
    float4* __restrict__ workspace,  // of PartialSums: a group of each consumer's rows
    u32* __restrict__ counters,
    const int shared_tiles,  // the last ones, whose k blocks share
    //% endif
    //% if gather
    const elem_t* __restrict__ x,              // [tokens, k]
    const int* __restrict__ sorted_token_ids,  // [m], token * top_k + choice
    //% endif
    //% if groups != "NONE"
    const int* __restrict__ offsets,  // [experts + 1], see gemm/groups.cuh
    const int experts,
    //% endif
    //% if gather
    const int tokens, const int top_k, const i64 x_stride,
    //% endif
    const int m, const int n, const int k ${flag_numbers}, const i64 out_stride,
    const i64 residual_stride, const float scale,
    const int group_rows) {  // rows of tiles that are taken together
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const Stages stages{static_cast<u32>(__cvta_generic_to_shared(shared_memory))};
  const int warpgroup = __shfl_sync(FULL_MASK, threadIdx.x / WARPGROUP, 0);
  const int rank = CLUSTER == 1 ? 0 : cluster_rank();
  if (threadIdx.x == 0) stages.begin(RELEASES, GATHER ? 3 : 2);
  if (GUARD > 0)
    mark_rows_that_are_not_there<CLUSTER, OUT_COLUMNS>(stages, Parts{n},
                                                       Order::OF_ROWS ? LEAST_ROWS : m);
  __syncthreads();
  if (CLUSTER > 1) meet_cluster();  // both blocks' barriers are there
  after_previous_kernel();
  Order order{m, ceil_div(n, OUT_COLUMNS), group_rows};
  order.first_row = ${first_row};
  //% if groups != "NONE"
  order.offsets = offsets, order.experts = experts;
  //% endif
  //% if not shares
  constexpr int shared_tiles = 0;
  //% endif
  // Made anew by those who need it: what both would share takes the producer's few registers.
  const auto work_of_block = [&] {
    return Work(block_index_again() / (CLUSTER * SPLIT), gridDim.x / (CLUSTER * SPLIT),
                order.count(), shared_tiles, ceil_div(anew(k), BLOCK_K));
  };

  if (warpgroup == 0) {
    // ---- producers
    fewer_registers<PRODUCER_REGISTERS>();
    const int warp = __shfl_sync(FULL_MASK, threadIdx.x / WARP_SIZE, 0);
    if (GATHER ? warp % 2 == 0 : warp == 0) {
      //% if gather
      const TokenRows<elem_t> rows = {x, x_stride, sorted_token_ids, tokens, top_k, k};
      GatheredRows<elem_t, Stages, BLOCK_M>(stages, rows, warp / 2).produce(order, work_of_block());
      //% else
      produce_x(stages, {x_map, x_map_last}, order, work_of_block(), rank, {${arrived}});
      //% endif
    } else if (warp == 1) {
      produce_weight(stages, {weight_map, weight_map_last}, order, work_of_block(), n, rank);
    }
    __syncwarp();
    if (MEETS) meet_cluster(), meet_cluster();
  } else {
    // ---- consumers
    more_registers<CONSUMER_REGISTERS>();
    const int consumer = warpgroup - 1, lane = threadIdx.x % WARP_SIZE;
    const int warp = threadIdx.x / WARP_SIZE - 4, warp_row = warp % 4 * 16;
    const int consumer_row = COOPERATIVE ? consumer * ROWS : 0;
    const Pairs epilogue(residual, pre, residual_stride, scale, n);
    elem_t* const consumer_bias =
        reinterpret_cast<elem_t*>(shared_memory + Stages::BIAS) + consumer * 2 * BLOCK_N;
    float acc[ROWS / 64][BLOCK_N / 8][4];

    const PingPong<CONSUMERS> pingpong(consumer, !COOPERATIVE);
    Place place;
    //% if shares
    constexpr int GROUPS = CLUSTER * (COOPERATIVE ? CONSUMERS : 1);
    const PartialSums partials{workspace, counters, GROUPS,
                               COOPERATIVE ? rank * CONSUMERS + consumer : rank};
    //% endif
    Finished finished{${finished}};
    int position = 0, turn = 0, taken = 0, box = 0;  // in the ring; pieces; of its own; of output
    Work work = work_of_block();
    for (Piece piece; work.take(piece); ++turn) {
      GroupedTile tile;
      if (Order::GROUPED) tile = order(piece.tile), piece = own_part(piece, order);
      if (order.is_beyond(tile)) break;
      if (!COOPERATIVE) {
        place = ring_place<STAGES>(position);
        position += piece.steps;
        if (turn % CONSUMERS != consumer) {
          if (MEETS) meet_cluster(), meet_cluster();
          continue;
        }
        pingpong.wait();
      }
      if (!Order::GROUPED) tile = order(piece.tile);
      if (SPLIT > 1) piece = own_part(piece, order);
      const int column = tile.column * OUT_COLUMNS;
      elem_t* const tile_bias = consumer_bias + taken % 2 * BLOCK_N;
      if (!SWAPPED)
        stage_bias<BLOCK_N>(tile_bias, Order::own(bias, tile.expert, GATE ? 2 * n : n),
                            threadIdx.x % WARPGROUP, column,
                            GATE ? n + column : column + BLOCK_N / 2, GATE ? 2 * n : n);
      ++taken;
      if (Order::OF_ROWS && COOPERATIVE && tile.row + consumer_row >= tile.end) {
        pass_by<CLUSTER>(stages, place, piece.steps, lane);
        continue;
      }
#pragma unroll
      for (int block = 0; block < ROWS / 64; ++block) register_fence(acc[block]);
      const int first_row = tile.row + rank * BLOCK_M + consumer_row + warp_row;
      const auto boxes_of = [&](int block) {
        return stages.staged(warp) + block * (BOXES_OF_BLOCK * Stages::Staged::BYTES);
      };
      const auto fetch_residual = [&] {
        const int own_lane = lane_index_again();  // not a register through all products
        if (own_lane == 0) bulk_wait_read();
        __syncwarp();
#pragma unroll
        for (int block = 0; block < ROWS / 64; ++block) {
          const int row = first_row + block * 64;
          //% if swapped
          Added{residual, residual_stride, n, m}.fetch_narrow<BLOCK_N>(boxes_of(block), own_lane,
                                                                       column, row);
          //% else
          Added{residual, residual_stride, tile.end, n}.fetch<Stages::Staged, OUT_COLUMNS>(
              boxes_of(block), own_lane, row, column);
          //% endif
        }
        cp_async_commit();
      };
      // Of parts of a tile only who comes to the epilogue has a use for the residual.
      const bool ahead = SPLIT == 1 ? !SHARES || piece.steps == work.steps
                                    : MEETS && piece.steps > 0 && cluster_rank() == 0;
      const auto meanwhile = [&] {
        if (FETCHED && ahead) fetch_residual();
        if (TELLS) finished.tell(lane);
      };
      const int tail = order.last_slices(piece.tile);
      multiply<elem_t, CLUSTER>(acc, stages, place, piece.steps - (tail > 0), tail, consumer_row,
                                lane, pingpong, meanwhile);
      named_barrier_wait_aligned<WARPGROUP>(3 + consumer);  // all of its bias is there
      if (SPLIT > 1 && piece.steps == 0) zero(acc);
      //% if shares and split > 1
      if (!partials.add_split<SPLIT>(acc, piece.tile, blockIdx.x % SPLIT, threadIdx.x % WARPGROUP,
                                     3 + consumer, stages.flag(shared_memory, consumer)))
        continue;
      //% elif shares
      if (piece.steps < work.steps &&
          !partials.add(acc, work.sharers(piece.tile), piece.tile - work.whole,
                        blockIdx.x / CLUSTER, threadIdx.x % WARPGROUP, 3 + consumer,
                        stages.flag(shared_memory, consumer)))
        continue;
      //% endif
      if constexpr (MEETS) {
        if (!add_parts<Stages, SPLIT, COOPERATIVE ? CONSUMERS : 1>(
                acc, stages, cluster_rank(), COOPERATIVE ? consumer : 0, threadIdx.x % WARPGROUP))
          continue;
      }
      if (FETCHED) {
        if (!ahead) fetch_residual();
        cp_async_wait<0>();
        __syncwarp();
        box = 0;
      }
#pragma unroll
      for (int block = 0; block < ROWS / 64; ++block) {
        const int row = first_row + block * 64;
        if (row >= tile.end) continue;
        const int before = Order::OF_K ? tile.expert * m : 0;  // rows of out
        //% if swapped
        store_transposed(acc[block], epilogue, bias, out, out_stride, boxes_of(block), lane, row, m,
                         column);
        //% elif tma_store
        store_by_tma<Stages::Staged, OUT_COLUMNS>(acc[block], epilogue, tile_bias, out_map, out,
                                                  out_stride, stages.staged(warp), box, lane,
                                                  before + row, before + tile.end, column);
        //% else
        store_pairs<OUT_COLUMNS>(acc[block], epilogue, tile_bias, out, out_stride, lane,
                                 before + row, before + tile.end, column);
        //% endif
      }
      finished.row = first_row;
    }
    if (TELLS) finished.tell(lane);
    pingpong.end(turn % CONSUMERS);
    if (lane == 0) bulk_wait_read();
  }
  __syncwarp();
  if (CLUSTER > 1) meet_cluster();  // the other one writes here no more
}
