// Weights on their way through a block's shared memory, product after product, in one order that both
// ends know: a producer warp asks for them as soon as there is room, also past the barriers at which
// the others wait for what the next product is to be multiplied with.
//
// A stage is multiplied by all warps that compute, each of which has a part of its columns
// (step/tile_sums.cuh).
//
// A product [n, k] has its outputs shared out over the blocks, and a block takes its own by tiles of
// 16 rows of the weight (halves: 8 of the gate and the same 8 of up). A stage has 8 of them, COLUMNS at a
// time: large copies, since a copy takes as long to start whatever its size, and few bytes a stage.
//
//   stage   [8 rows][COLUMNS + a gap of 16 bytes]: 16 bytes of eight rows meet all banks (ldmatrix)
//   order   tile 0: columns 0 ... COLUMNS - 1 of its first 8 rows, of the others if it has them, then
//           the next columns up to k; tile 1; ...; next product
//
// Of a weight of int4 codes a stage has four times as many columns, behind each row its scales, one of
// 128 codes (step/coded_part.cuh).
//
// Rows that a tile has not are not copied; the last one stands for them, and sums go nowhere. A row's
// piece is one bulk copy, and a warp starts one after the other, so FETCHERS warps take turns. No more
// than FLIGHT stages of each are asked for and not there yet: what is asked for beyond what memory
// needs to be busy stands in its queues, and what the others read and write waits behind it.
#pragma once
#include "ptx/bulk.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "step/coded_part.cuh"
#include "step/layers.cuh"
#include "tile/ring.cuh"

template <typename T, int COLUMNS, int STAGES, int FLIGHT, int WARPS, int FETCHERS, bool CODES>
struct WeightRing {
  static constexpr int TILE = 16, ROWS = 8, SPAN = 32;          // rows of a tile, of a stage
  static constexpr int WIDE = COLUMNS, PART = COLUMNS / WARPS;  // of a stage, of a warp in it
  static constexpr int BYTES = COLUMNS * sizeof(T);             // of a row in a stage
  static constexpr int PITCH = BYTES + 16;                      // of numbers
  static constexpr int CODED = 4 * COLUMNS;                     // columns of a stage of codes
  static constexpr int SCALES = CODED / 128 * sizeof(T);        // bytes of a row's scales there
  static constexpr int CODED_PITCH = BYTES + 64;
  static constexpr int STAGE = ROWS * (CODES ? CODED_PITCH : PITCH);
  static constexpr int CODED_PART = CODED / WARPS;
  static constexpr bool HAS_CODES = CODES;
  // Of a warp: stages that may come to L2 before they have room in the ring.
  static constexpr int AHEAD = 14 * 1024 / COLUMNS / FETCHERS;
  static constexpr int PAUSES = 4, PAUSE = 256;  // between two of these; nanoseconds
  static constexpr int NEAR = FLIGHT + 1;        // under way, of those
  static_assert(PART % SPAN == 0, "whole spans; eight rows meet all banks");
  static_assert(!CODES || (CODED_PART % 128 == 0 && SCALES % 16 == 0 && SCALES < 64),
                "whole groups");
  static_assert(NEAR * FETCHERS <= STAGES, "stages under way");
  static_assert(STAGES % FETCHERS == 0, "a stage is one warp's, so that it is waited for in time");
  const u32 stages;       // shared memory
  const u32 full, empty;  // mbarriers, 8 bytes each
  RingPlace<STAGES> place,
      landing;  // the next stage; the first one that may be under way (fetching)
  // Stages that were asked to come to L2, from the next one of the ring on, and the one behind them.
  int lead = 0, next_product = 0, next_stage = 0;

  __device__ __forceinline__ WeightRing(u32 stages, u32 barriers)
      : stages(stages), full(barriers), empty(barriers + 8 * STAGES) {}

  __device__ __forceinline__ void make_barriers() const {  // by one thread
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(full + 8 * i, 1);
      mbarrier_init(empty + 8 * i, WARPS);
    }
    mbarrier_init_fence();
  }

  static __device__ __forceinline__ int columns_of(bool coded) {
    return CODES && coded ? CODED : COLUMNS;
  }

  // Whether a tile with so many outputs has more rows than a stage.
  static __device__ __forceinline__ bool has_both(int outputs, bool halves) {
    return halves || outputs > ROWS;
  }

  // A block's rows of a weight [n, k], or with `halves` of both parts of one of [2 n, k].
  struct Source {
    const Product<T>* product;
    int n, k, log2, pieces, all;  // log2 of a tile's outputs; stages of a row, of all
    int single;                   // the tile that has one stage for each piece of a row
    bool coded;

    __device__ __forceinline__ Source(const Product<T>& product, int n, int k, bool halves)
        : product(&product),
          n(n),
          k(k),
          log2(halves ? 3 : 4),
          coded(CODES && product.scales != nullptr) {
      pieces = ceil_div(k, columns_of(coded));
      const int tiles = (product.outputs + (1 << log2) - 1) >> log2;
      single = has_both(product.outputs - ((tiles - 1) << log2), halves) ? -1 : tiles - 1;
      all = (2 * tiles - (single >= 0)) * pieces;
    }
  };

  // All stages of so many products, one after the other. source_of(p): a product's Source. enter(p): what
  // else a warp does when it comes to one. By the warps that fetch, each of which has every FETCHERS-th
  // stage, whatever product it is of.
  template <typename SourceOf, typename Enter>
  __device__ __forceinline__ void fetch(int products, const SourceOf& source_of,
                                        const Enter& enter) {
    const int lane = threadIdx.x % WARP_SIZE;
    int i = threadIdx.x / WARP_SIZE - WARPS, under_way = 0;
    place.stage = landing.stage = i;
#pragma unroll 1
    for (int p = 0; p < products; ++p) {
      enter(p);
      const Source source = source_of(p);
#pragma unroll 1
      for (; i < source.all; i += FETCHERS) {
        const Piece piece(source, i);
        const int rows = __popc(__ballot_sync(FULL_MASK, piece.has));
        wait_for_place(p, i, products, source_of);
        const int most = lead > 0 ? NEAR : FLIGHT;
        lead = max(lead - 1, 0);
#pragma unroll 1
        for (; under_way >= most; --under_way) {
          mbarrier_wait(full + 8 * landing.stage, landing.parity);
          landing.advance(FETCHERS);
        }
        ++under_way;
        const u32 barrier = full + 8 * place.stage;
        if (lane == 0) mbarrier_expect(barrier, (piece.bytes + piece.scale_bytes) * rows);
        __syncwarp();
        const u32 target =
            stages + place.stage * STAGE + lane * (source.coded ? CODED_PITCH : PITCH);
        if (piece.has) bulk_load(target, piece.source, piece.bytes, barrier);
        if (source.coded && piece.has)
          bulk_load(target + BYTES, piece.scales, piece.scale_bytes, barrier);
        place.advance(FETCHERS);
      }
      i -= source.all;
    }
  }

  // The next stage, when it is there. By the warps that compute.
  __device__ __forceinline__ int arrived() {
    const int stage = place.stage;
    mbarrier_wait(full + 8 * stage, place.parity);
    place.advance();
    return stage;
  }
  __device__ __forceinline__ void release(int stage) const { mbarrier_arrive(empty + 8 * stage); }

  // Of a warp and one tile; of numbers four, none of which waits for another.
  struct Sums {
    float d[4][4];
    __device__ __forceinline__ float total(int i) const {
      return (d[0][i] + d[1][i]) + (d[2][i] + d[3][i]);
    }
  };

  // Where a row of a tile is: in one of two stages (both the same, of a tile that has one). Rows that
  // the tile has not are the last one's.
  struct Tile {
    u32 low, high;
    int last_low, last_high;
    __device__ __forceinline__ u32 row(int i, int pitch) const {
      return i < ROWS ? low + min(i, last_low) * pitch : high + min(i - ROWS, last_high) * pitch;
    }
  };
  __device__ __forceinline__ Tile tile_at(int low, int high, int outputs, bool halves) const {
    const int rest = halves ? outputs : outputs - ROWS;
    return {stages + low * STAGE, stages + high * STAGE, outputs - 1,
            (low == high ? outputs : rest) - 1};
  }

  // sums += this warp's part of a tile's stages, of so many columns, times up to eight rows of x.
  // x: where the part begins in the lane's row: of numbers lane % 8's, of codes lane / 4's.
  static __device__ __forceinline__ void multiply(Sums& sums, const Tile& tile, bool coded, u32 x,
                                                  int columns) {
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    if constexpr (CODES) {
      if (coded) {
        const u32 low = tile.row(lane / 4, CODED_PITCH),
                  high = tile.row(lane / 4 + ROWS, CODED_PITCH);
        const u32 codes = warp * CODED_PART / 2 + lane % 4 * 16,
                  scales = BYTES + warp * CODED_PART / 64;
        const CodedPart<T> part = {low + codes,   high + codes,      low + scales,
                                   high + scales, x + lane % 4 * 64, lane % 4 >= 2};
        part.multiply(sums.d[0], columns);
        return;
      }
    }
    const u32 part = warp * PART * sizeof(T), own_x = x + lane / 8 * 16;
    if (tile.low != tile.high)
      multiply_numbers<true>(sums, tile.row(lane % TILE, PITCH) + lane / TILE * 16 + part, own_x,
                             columns);
    else
      multiply_numbers<false>(sums, tile.row(lane % ROWS, PITCH) + lane / ROWS * 16 + part, own_x,
                              columns);
  }

 private:
  // weights, x: the lane's addresses for ldmatrix: of 16 columns of 16 rows, or of 32 columns of the
  // eight that there are; of x of 32 columns of eight rows.
  template <bool BOTH>
  static __device__ __forceinline__ void multiply_numbers(Sums& sums, u32 weights, u32 x,
                                                          int columns) {
    const auto span = [&](int i, float (&first)[4], float (&second)[4]) {
      u32 a[4], b[4], own[4];
      ldmatrix_x4(a, weights + i * 2 * SPAN);
      if (BOTH) ldmatrix_x4(b, weights + i * 2 * SPAN + SPAN);
      ldmatrix_x4(own, x + i * 2 * SPAN);
      if (!BOTH) b[0] = a[2], b[2] = a[3], a[2] = a[1], a[1] = a[3] = b[1] = b[3] = 0;
      mma_m16n8k16<T>(first, a, own[0], own[1]);
      mma_m16n8k16<T>(second, b, own[2], own[3]);
    };
    if (columns == PART) {
#pragma unroll
      for (int i = 0; i < PART / SPAN; ++i) span(i, sums.d[i % 2 * 2], sums.d[i % 2 * 2 + 1]);
    } else {
#pragma unroll 1
      for (int i = 0; i < columns / SPAN; ++i) span(i, sums.d[0], sums.d[1]);
    }
  }

  // What this lane copies of a product's i-th stage.
  struct Piece {
    bool has;
    int bytes, scale_bytes = 0;
    const void *source, *scales = nullptr;
    __device__ __forceinline__ Piece(const Source& of, int i) {
      const Product<T>& product = *of.product;
      const int lane = threadIdx.x % WARP_SIZE;  // and row of the stage
      const int tile = Quotient::of(i, product.inverse), rest = i - tile * 2 * of.pieces;
      const bool both = tile != of.single, second = both && rest % 2;
      const int at = (both ? rest / 2 : rest) * columns_of(of.coded);
      const bool halves = 1 << of.log2 == ROWS;
      const int output = (tile << of.log2) + lane + (second && !halves ? ROWS : 0);
      has = lane < ROWS && output < product.outputs;
      const int columns = min(columns_of(of.coded), of.k - at);
      const i64 row = has ? product.begin + output + (second && halves ? of.n : 0) : 0;
      const i64 first = row * of.k + at;
      bytes = of.coded ? columns / 2 : columns * static_cast<int>(sizeof(T));
      source = product.weight + (of.coded ? first / 4 : first);  // a T is as large as four codes
      if (!of.coded) return;
      const int groups = ceil_div(of.k, 1024) * 8;  // of a row, with what fills it
      scale_bytes = ceil_div(columns, 1024) * 16;
      scales = product.scales + row * groups + at / 128;
    }
    __device__ __forceinline__ void prefetch() const {
      if (!has) return;
      bulk_prefetch(source, bytes);
      if (scale_bytes > 0) bulk_prefetch(scales, scale_bytes);
    }
  };

  // While there is no room in the ring memory has nothing to do, since the others wait for one another's
  // numbers: what comes behind is asked to come to L2, stage by stage, slowly, so that what the others
  // read and write does not stand behind it. p, i: the stage that there shall be room for.
  template <typename SourceOf>
  __device__ __forceinline__ void wait_for_place(int p, int i, int products,
                                                 const SourceOf& source_of) {
    const u32 barrier = empty + 8 * place.stage;
    const int parity = place.parity ^ 1;
    if (AHEAD == 0) return mbarrier_wait(barrier, parity);
    if (__all_sync(FULL_MASK, mbarrier_test(barrier, parity))) return;
    if (lead == 0) next_product = p, next_stage = i;
#pragma unroll 1
    while (lead < AHEAD && next_product < products) {
      const Source next = source_of(next_product);
      if (next_stage >= next.all) {
        next_stage -= next.all, ++next_product;
        continue;
      }
      Piece(next, next_stage).prefetch();
      ++lead, next_stage += FETCHERS;
#pragma unroll 1
      for (int pause = 0; pause < PAUSES; ++pause) {
        if (__all_sync(FULL_MASK, mbarrier_test(barrier, parity))) return;
        __nanosleep(PAUSE);
      }
    }
    mbarrier_wait(barrier, parity);
  }
};
