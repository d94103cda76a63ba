// Weights on their way through a block's shared memory, product after product, in one order that both
// ends know: producer warps ask for them as soon as there is room, also past the barriers at which
// the others wait for what the next product is to be multiplied with.
//
// A product [n, k] has its outputs shared out over the blocks, and a block takes its own by tiles of
// 16 rows of the weight (halves: 8 of the gate and the same 8 of up), COLUMNS at a time:
//
//   order   tile 0: columns 0 ... COLUMNS - 1, then the next ones up to k; tile 1; ...; next product
//
// A stage is two boxes of a tensor map, of 8 rows each, which two warps ask for: one copy starts in
// 40 ns whatever its size. Dimensions of the map are 64 columns, all rows, and k / 64 such groups:
//
//   stage   [2 halves][COLUMNS / 64 groups][8 rows][64 columns], 128-byte swizzle (ptx/tma.cuh): 16
//           bytes of eight rows meet all banks (ldmatrix)
//
// All warps that compute multiply it, each of which has a part of its columns (step/tile_sums.cuh).
// Groups behind the end of k come as zeros; rows behind a block's last one come, too, and their sums go
// nowhere; a half without rows does not.
//
// Of a weight of int4 codes four codes stand where there is a number, so a stage has four times as
// many columns; their scales, one of 128 codes, come by boxes of a map of their own, [2][8 rows] behind
// all stages. They are multiplied with rows of digits (step/row_digits.cuh) or of numbers
// (step/coded_part.cuh).
//
// No more than FLIGHT stages are asked for and not there yet: what is asked for beyond what memory
// needs to be busy stands in its queues, and what the others read and write waits behind it. While they
// wait for numbers it is no more than CALM.
#pragma once
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/register_fence.cuh"
#include "ptx/tma.cuh"
#include "step/coded_part.cuh"
#include "step/layers.cuh"
#include "step/row_digits.cuh"
#include "tile/ring.cuh"

template <typename T, int COLUMNS, int STAGES, int FLIGHT, int WARPS, bool CODES, bool DIGITS>
struct WeightRing {
  static constexpr int ROWS = 16, SPAN = 32, SIZE = STAGES, FETCHERS = 2;
  static constexpr int GROUP = 64, GROUP_BYTES = 8 * GROUP * sizeof(T);
  static constexpr int GROUPS = COLUMNS / GROUP;     // of a stage
  static constexpr int PART = COLUMNS / WARPS;       // columns of a warp in a stage
  static constexpr int HALF = GROUPS * GROUP_BYTES;  // bytes of eight rows in a stage
  static constexpr int STAGE = 2 * HALF;
  static constexpr int COLUMNS_OF_STAGE = COLUMNS;
  static constexpr int CODED = CODES ? 4 * COLUMNS : 0, CODED_PART = CODED / WARPS;  // of codes
  static constexpr int SCALES = CODED / 128;  // of a row in a stage
  static constexpr int SCALE_PITCH = SCALES * sizeof(T), SCALE_HALF = 8 * SCALE_PITCH;
  static constexpr int BARRIERS = 2 * STAGES + 1;
  static constexpr int MAPS = CODES ? 2 : 1;  // of a product
  static constexpr int CALM = 1;              // stages under way while the others wait for numbers
  static_assert(COLUMNS % GROUP == 0 && PART % SPAN == 0, "whole groups and spans");
  static_assert(!CODES || (CODED_PART % 128 == 0 && SCALE_HALF % 128 == 0), "whole groups");
  static_assert(FLIGHT < STAGES, "stages under way");
  const u32 stages;       // shared memory, a multiple of 1024
  const u32 full, empty;  // mbarriers, 8 bytes each
  RingPlace<STAGES> place,
      landing;  // the next stage; the first one that may be under way (fetching)
  int under_way = 0;

  // barriers: shared memory, BARRIERS words of 8 bytes, of which the last one is the flag.
  __device__ __forceinline__ WeightRing(u32 stages, u32 barriers)
      : stages(kept(stages)), full(kept(barriers)), empty(full + 8 * STAGES) {}
  // Whether the others wait for numbers.
  __device__ __forceinline__ void calm(bool so) const { store_shared_flag(full + 16 * STAGES, so); }
  __device__ __forceinline__ bool is_calm() const {
    return load_shared_flag(full + 16 * STAGES) != 0;
  }

  __device__ __forceinline__ void make_barriers() const {  // by one thread
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(full + 8 * i, FETCHERS);
      mbarrier_init(empty + 8 * i, WARPS);
    }
    calm(false);
    mbarrier_init_fence();
  }

  // Along a block's part of all products, stage by stage, for one half of each.
  struct Way {
    const TensorMap* map;
    int tiles;           // that are left of the product, with this one
    int row, end, step;  // of the tensor, of which there are rows before `end`
    int group, groups;   // of 64 columns
    bool coded;

    // Before the first stage of product p.
    __device__ __forceinline__ void enter(const Product<T>& product, const TensorMap* maps, int at,
                                          int half, int n, int k, bool halves) {
      map = maps + at * MAPS, coded = CODES && product.coded;
      step = halves ? 8 : 16, tiles = (product.outputs + step - 1) / step;
      row = product.begin + half * (halves ? n : 8);
      end = product.begin + product.outputs + (halves ? half * n : 0);
      group = 0, groups = ceil_div(coded ? k / 4 : k, GROUP);
    }
    // To the next stage; whether there is one of the same product.
    __device__ __forceinline__ bool next() {
      group += GROUPS;
      if (group < groups) return true;
      group = 0, row += step;
      return --tiles > 0;
    }
    __device__ __forceinline__ bool has() const { return row < end; }
    __device__ __forceinline__ void load(u32 target, u32 scales, u32 barrier) const {
      if (!has()) return mbarrier_arrive(barrier);
      mbarrier_expect(barrier, HALF + (coded ? SCALE_HALF : 0));
      tma_load(target, map[0], barrier, 0, row, group);
      if (coded) tma_load(scales, map[1], barrier, group * 2, row);
    }
  };

  // The stages of a product that `own` has entered. By a thread of each warp that fetches.
  __device__ __forceinline__ void fetch(Way& own) {
    const int half = (threadIdx.x / WARP_SIZE - WARPS) & 1;
    bool more;
#pragma unroll 1
    do {
      mbarrier_wait(empty + 8 * place.stage, place.parity ^ 1);
#pragma unroll 1
      for (; under_way >= (is_calm() ? CALM : FLIGHT); --under_way) {
        mbarrier_wait(full + 8 * landing.stage, landing.parity);
        landing.advance();
      }
      ++under_way;
      own.load(stages + place.stage * STAGE + half * HALF,
               stages + STAGES * STAGE + (place.stage * 2 + half) * SCALE_HALF,
               full + 8 * place.stage);
      place.advance();
      more = own.next();
    } while (more);
  }

  // Of a warp and one tile; of numbers four, none of which waits for another.
  struct Sums {
    float d[4][4];
    __device__ __forceinline__ float total(int i) const {
      return (d[0][i] + d[1][i]) + (d[2][i] + d[3][i]);
    }
  };

  // Which of eight rows are a lane's sums: of codes, since four lanes' 16 bytes of rows r and r + 4
  // meet all banks, those of r and r + 1 do not.
  static __device__ __forceinline__ int row_of(int lane, bool coded) {
    const int row = lane / 4;
    return CODES && coded ? row % 2 * 4 + row / 2 : row;
  }

  // Where a lane finds what weights are multiplied with, shared memory: of numbers its row, lane % 8's,
  // of codes lane / 4's, or digits and factors.
  struct Lane {
    u32 row, digits, factors;
  };
  // rows: of tokens, [count][k + gap]. Rows behind the last one are the last one.
  static __device__ __forceinline__ Lane lane_of(u32 rows, int k, int row_bytes, int count,
                                                 bool coded) {
    using Digits = RowDigits<T>;
    const int lane = threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
    Lane made = {rows + min(coded ? g : lane % 8, count - 1) * row_bytes, 0, 0};
    if (DIGITS && coded) {
      const int bytes = Digits::bytes(k);
      made.digits = rows + min(g / 2, count - 1) * bytes + g % 2 * Digits::pitch(k) + t * 32;
      made.factors = rows + min(t, count - 1) * bytes + Digits::factors(k);
    }
    return made;
  }
  // Of which token and which row of the tile, behind the lane's, sums.total(i) is.
  static constexpr int NONE = 8;
  static __device__ __forceinline__ int token_of(int i, bool coded) {
    const int t = threadIdx.x % 4;
    return !(DIGITS && coded) ? t * 2 + i % 2 : i < 2 ? t : NONE;
  }
  static __device__ __forceinline__ int row_behind(int i, bool coded) {
    return (DIGITS && coded ? i : i / 2) * 8;
  }

  // sums += this warp's part of the stage, from column `first` of x on, of one half or both and so many
  // columns.
  template <bool OF_CODES>
  __device__ __forceinline__ void multiply(Sums& sums, bool both, const Lane& x, int first,
                                           int columns) const {
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const u32 tile = stages + place.stage * STAGE;
    if constexpr (OF_CODES) {
      constexpr int CHUNKS = CODED_PART / 32;  // of 16 bytes
      const int row = row_of(lane, true), chunk = warp * CHUNKS;
      const u32 low =
          tile + chunk / 8 * GROUP_BYTES + row * 128 + ((chunk % 8 + lane % 4) ^ row) * 16;
      const u32 scales = stages + STAGES * STAGE + place.stage * 2 * SCALE_HALF +
                         row * SCALE_PITCH + warp * CODED_PART / 64;
      const u32 high = low + (both ? HALF : 0), high_scales = scales + (both ? SCALE_HALF : 0);
      if constexpr (DIGITS) {
        const DigitsPart<T> part = {
            low, high, scales, high_scales, x.digits + first, x.factors + first / 32};
        part.template multiply<CODED_PART>(sums.d[0], columns);
      } else {
        const CodedPart<T> part = {low,
                                   high,
                                   scales,
                                   high_scales,
                                   static_cast<u32>(x.row + first * sizeof(T) + lane % 4 * 64),
                                   lane % 4 >= 2};
        part.multiply(sums.d[0], columns);
      }
    } else {
      const int row = lane % 8, second = both ? lane / 8 % 2 : 0;
      multiply_numbers(sums, tile + second * HALF + row * 128 + ((lane / ROWS) ^ row) * 16,
                       x.row + first * sizeof(T) + lane / 8 * 16, warp * (PART / SPAN), columns);
    }
  }

 private:
  // weights, x: the lane's addresses for ldmatrix, of 16 columns of 16 rows (first: of which span) and
  // of 32 columns of eight rows.
  static __device__ __forceinline__ void multiply_numbers(Sums& sums, u32 weights, u32 x, int first,
                                                          int columns) {
    const auto span = [&](int i, float (&one)[4], float (&two)[4]) {
      u32 low[4], high[4], own[4];
      const u32 at = (weights + (first + i) / 2 * GROUP_BYTES) ^ ((first + i) % 2 * 64);
      ldmatrix_x4(low, at);
      ldmatrix_x4(high, at ^ SPAN);
      ldmatrix_x4(own, x + i * 2 * SPAN);
      mma_m16n8k16<T>(one, low, own[0], own[1]);
      mma_m16n8k16<T>(two, high, own[2], own[3]);
    };
    if (columns == PART) {
#pragma unroll
      for (int i = 0; i < PART / SPAN; ++i) span(i, sums.d[i % 2 * 2], sums.d[i % 2 * 2 + 1]);
    } else {
#pragma unroll 1
      for (int i = 0; i < columns / SPAN; ++i) span(i, sums.d[0], sums.d[1]);
    }
  }
};
