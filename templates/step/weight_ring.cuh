// Weights on their way through a block's shared memory, product after product, in one order that both
// ends know: a producer warp asks for them as soon as there is room, also past the barriers at which
// the others wait for what the next product is to be multiplied with.
//
// A stage is multiplied by all warps that compute, each of which has a part of its columns
// (step/tile_sums.cuh).
//
// A product [n, k] has its outputs shared out over the blocks, and a block takes its own by tiles of
// 16 rows of the weight (halves: 8 of the gate and the same 8 of up), COLUMNS at a time:
//
//   stage   [16 rows][COLUMNS + a gap of 16 bytes]: 16 bytes of eight rows meet all banks (ldmatrix)
//   order   tile 0: columns 0 ... COLUMNS - 1, then the next ones up to k; tile 1; ...; next product
//
// Of a weight of int4 codes a stage has four times as many columns, behind each row its scales, one of
// 128 codes (step/coded_part.cuh).
//
// Rows that a tile has not are not copied; the last one stands for them, and sums go nowhere. A row's
// piece is one bulk copy, and a warp starts one after the other, so FETCHERS warps share the rows. No more than FLIGHT stages
// are asked for and not there yet: what is asked for beyond what memory needs to be busy stands in
// its queues, and what the others read and write waits behind it.
#pragma once
#include "ptx/bulk.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "step/coded_part.cuh"
#include "step/layers.cuh"
#include "tile/ring.cuh"

template <typename T, int COLUMNS, int STAGES, int FLIGHT, int WARPS, int FETCHERS, bool CODES>
struct WeightRing {
  static constexpr int ROWS = 16, SPAN = 32, SIZE = STAGES;
  static constexpr int PART = COLUMNS / WARPS;            // columns of a warp in a stage
  static constexpr int BYTES = COLUMNS * sizeof(T);       // of a row in a stage
  static constexpr int PITCH = BYTES + 16;                // of numbers
  static constexpr int CODED = 4 * COLUMNS;               // columns of a stage of codes
  static constexpr int SCALES = CODED / 128 * sizeof(T);  // bytes of a row's scales there
  static constexpr int CODED_PITCH = BYTES + 64;
  static constexpr int STAGE = ROWS * (CODES ? CODED_PITCH : PITCH);
  static constexpr int CODED_PART = CODED / WARPS;
  // Stages that may come to L2 before they have room in the ring.
  static constexpr int AHEAD = 14 * 512 / COLUMNS;
  static constexpr int PAUSES = 2, PAUSE = 256;  // between two of these; nanoseconds
  static constexpr int NEAR = FLIGHT + 2 < STAGES ? FLIGHT + 2 : FLIGHT;  // under way, of those
  static_assert(PART % SPAN == 0, "whole spans; eight rows meet all banks");
  static_assert(!CODES || (CODED_PART % 128 == 0 && SCALES % 16 == 0 && SCALES < 64),
                "whole groups");
  static_assert(NEAR < STAGES && ROWS % FETCHERS == 0, "stages under way; equal shares of rows");
  const u32 stages;       // shared memory
  const u32 full, empty;  // mbarriers, 8 bytes each
  RingPlace<STAGES> place,
      landing;  // the next stage; the first one that may be under way (fetching)
  int under_way = 0;
  // Stages that were asked to come to L2, from the next one of the ring on, and the one behind them.
  int lead = 0, next_product = 0, next_stage = 0;

  __device__ __forceinline__ WeightRing(u32 stages, u32 barriers)
      : stages(stages), full(barriers), empty(barriers + 8 * STAGES) {}

  __device__ __forceinline__ void make_barriers() const {  // by one thread
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(full + 8 * i, FETCHERS);
      mbarrier_init(empty + 8 * i, WARPS);
    }
    mbarrier_init_fence();
  }

  static __device__ __forceinline__ int columns_of(bool coded) {
    return CODES && coded ? CODED : COLUMNS;
  }

  // A block's rows of a weight [n, k], or with `halves` of both parts of one of [2 n, k].
  struct Source {
    const Product<T>* product;
    int n, k, log2, parts, all;  // log2 of a tile's outputs; stages of a tile, of all
    bool coded;

    __device__ __forceinline__ Source(const Product<T>& product, int n, int k, bool halves)
        : product(&product),
          n(n),
          k(k),
          log2(halves ? 3 : 4),
          coded(CODES && product.scales != nullptr) {
      parts = ceil_div(k, columns_of(coded));
      all = ((product.outputs + (1 << log2) - 1) >> log2) * parts;
    }
  };

  // The p-th of so many products, all of which are fetched one after the other. source_of(p): its
  // Source. By the warps that fetch.
  template <typename SourceOf>
  __device__ __forceinline__ void fetch(int p, int products, const SourceOf& source_of) {
    const int lane = threadIdx.x % WARP_SIZE;
    const Source source = source_of(p);
#pragma unroll 1
    for (int i = 0; i < source.all; ++i) {
      const Piece piece(source, i);
      if (lead == 0) next_product = p, next_stage = i;
      wait_for_place(empty + 8 * place.stage, place.parity ^ 1, [&] {
        if (next_product == products) return false;
        const Source next = source_of(next_product);
        Piece(next, next_stage).prefetch();
        ++lead;
        if (++next_stage == next.all) next_stage = 0, ++next_product;
        return lead < AHEAD;
      });
      const int most = lead > 0 ? NEAR : FLIGHT;
      lead = max(lead - 1, 0);
#pragma unroll 1
      for (; under_way >= most; --under_way) {
        mbarrier_wait(full + 8 * landing.stage, landing.parity);
        landing.advance();
      }
      ++under_way;
      const u32 barrier = full + 8 * place.stage;
      const int rows = __popc(__ballot_sync(FULL_MASK, piece.has));
      if (lane == 0) mbarrier_expect(barrier, (piece.bytes + piece.scale_bytes) * rows);
      __syncwarp();
      const u32 target =
          stages + place.stage * STAGE + piece.own * (source.coded ? CODED_PITCH : PITCH);
      if (piece.has) bulk_load(target, piece.source, piece.bytes, barrier);
      if (source.coded && piece.has)
        bulk_load(target + BYTES, piece.scales, piece.scale_bytes, barrier);
      place.advance();
    }
  }

  // Of a warp and one tile; of numbers four, none of which waits for another.
  struct Sums {
    float d[4][4];
    __device__ __forceinline__ float total(int i) const {
      return (d[0][i] + d[1][i]) + (d[2][i] + d[3][i]);
    }
  };

  // sums += this warp's part of the stage, of so many outputs and columns, times up to eight rows of x.
  // x: where the part begins in the lane's row: of numbers lane % 8's, of codes lane / 4's.
  __device__ __forceinline__ void multiply(Sums& sums, int outputs, bool halves, bool coded, u32 x,
                                           int columns) const {
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, last = outputs - 1;
    const u32 tile = stages + place.stage * STAGE;
    const auto row = [&](int i) {  // rows that the tile has not are the last one's
      return halves ? min(i % 8, last) + i / 8 * 8 : min(i, last);
    };
    if constexpr (CODES) {
      if (coded) {
        const u32 low = tile + row(lane / 4) * CODED_PITCH,
                  high = tile + row(lane / 4 + 8) * CODED_PITCH;
        const u32 codes = warp * CODED_PART / 2 + lane % 4 * 16,
                  scales = BYTES + warp * CODED_PART / 64;
        const CodedPart<T> part = {low + codes,   high + codes,      low + scales,
                                   high + scales, x + lane % 4 * 64, lane % 4 >= 2};
        part.multiply(sums.d[0], columns);
        return;
      }
    }
    const u32 own = tile + row(lane % ROWS) * PITCH + lane / ROWS * 16;
    multiply_numbers(sums, own + warp * PART * sizeof(T), x + lane / 8 * 16, columns);
  }

 private:
  // weights, x: the lane's addresses for ldmatrix, the latter of 32 columns of eight rows.
  static __device__ __forceinline__ void multiply_numbers(Sums& sums, u32 weights, u32 x,
                                                          int columns) {
    const auto span = [&](int i, float (&first)[4], float (&second)[4]) {
      u32 low[4], high[4], own[4];
      ldmatrix_x4(low, weights + i * 2 * SPAN);
      ldmatrix_x4(high, weights + i * 2 * SPAN + SPAN);
      ldmatrix_x4(own, x + i * 2 * SPAN);
      mma_m16n8k16<T>(first, low, own[0], own[1]);
      mma_m16n8k16<T>(second, high, own[2], own[3]);
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
    int own;  // row of a tile
    bool has;
    int bytes, scale_bytes = 0;
    const void *source, *scales = nullptr;
    __device__ __forceinline__ Piece(const Source& of, int i) {
      const Product<T>& product = *of.product;
      const int lane = threadIdx.x % WARP_SIZE, fetcher = threadIdx.x / WARP_SIZE - WARPS;
      const int tile = Quotient::of(i, product.inverse),
                at = (i - tile * of.parts) * columns_of(of.coded);
      own = lane * FETCHERS + fetcher;
      const int output = (tile << of.log2) + (own & ((1 << of.log2) - 1));
      has = own < ROWS && output < product.outputs;
      const int columns = min(columns_of(of.coded), of.k - at);
      const i64 row = has ? product.begin + output + (own >> of.log2 ? of.n : 0) : 0;
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
  // read and write does not stand behind it. ask(): the next stage; whether there is another one.
  template <typename Ask>
  static __device__ __forceinline__ void wait_for_place(u32 barrier, int parity, const Ask& ask) {
    if (__all_sync(FULL_MASK, mbarrier_test(barrier, parity))) return;
    bool more = true;
#pragma unroll 1
    while (more) {
      more = ask();
#pragma unroll 1
      for (int i = 0; i < PAUSES; ++i) {
        if (__all_sync(FULL_MASK, mbarrier_test(barrier, parity))) return;
        __nanosleep(PAUSE);
      }
    }
    mbarrier_wait(barrier, parity);
  }
};
