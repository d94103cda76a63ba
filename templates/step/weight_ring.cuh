// Weights on their way through a block's shared memory, product after product, in one order that both
// ends know: a producer warp asks for them as soon as there is room, also past the barriers at which
// the others wait for what the next product is to be multiplied with.
//
// A stage is multiplied by two warps of those that compute, each of which has half of its columns, the
// next one by the next two, so that what they wait for the others have no part in.
//
// A product [n, k] has its outputs shared out over the blocks, and a block takes its own by tiles of
// 16 rows of the weight (halves: 8 of the gate and the same 8 of up), COLUMNS at a time:
//
//   stage   [16 rows][COLUMNS + a gap of 16 bytes]: 16 bytes of eight rows meet all banks (ldmatrix)
//   order   tile 0: columns 0 ... COLUMNS - 1, then the next ones up to k; tile 1; ...; next product
//
// Rows that a tile has not are not copied; the last one stands for them, and sums go nowhere. A row's
// piece is one bulk copy, and a warp starts one after the other, so FETCHERS warps share the rows. No more than FLIGHT stages
// are asked for and not there yet: what is asked for beyond what memory needs to be busy stands in
// its queues, and what the others read and write waits behind it.
#pragma once
#include "ptx/bulk.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "step/layers.cuh"
#include "tile/ring.cuh"

template <typename T, int COLUMNS, int STAGES, int FLIGHT, int WARPS, int FETCHERS>
struct WeightRing {
  static constexpr int ROWS = 16, SPAN = 32, SIZE = STAGES, COLUMNS_OF_STAGE = COLUMNS, HALF = COLUMNS / 2;
  static constexpr int PITCH = COLUMNS * sizeof(T) + 16, STAGE = ROWS * PITCH;  // bytes
  static constexpr int AHEAD = 14;  // stages that may come to L2 before they have room in the ring
  static constexpr int PAUSES = 2, PAUSE = 256;  // between two of these; nanoseconds
  static_assert(HALF % SPAN == 0, "whole spans; eight rows meet all banks");
  static_assert(FLIGHT <= STAGES && ROWS % FETCHERS == 0, "stages under way; equal shares of rows");
  const u32 stages;                  // shared memory
  const u32 full, empty;             // mbarriers, 8 bytes each
  RingPlace<STAGES> place, landing;  // the next stage; the first one that may be under way
  int asked = 0;

  __device__ __forceinline__ WeightRing(u32 stages, u32 barriers)
      : stages(stages), full(barriers), empty(barriers + 8 * STAGES) {}

  __device__ __forceinline__ void make_barriers() const {  // by one thread
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(full + 8 * i, FETCHERS);
      mbarrier_init(empty + 8 * i, 2);
    }
    mbarrier_init_fence();
  }

  // Rows begin to end - 1 of a weight [n, k], or with `halves` of both parts of one of [2 n, k].
  // inverse: of the stages of a tile. By the warps that fetch.
  __device__ __forceinline__ void fetch(const T* weight, int begin, int end, int n, int k,
                                        bool halves, u32 inverse) {
    const int lane = threadIdx.x % WARP_SIZE, log2 = halves ? 3 : 4;
    const int parts = ceil_div(k, COLUMNS), all = ((end - begin + (1 << log2) - 1) >> log2) * parts;
    int ahead = 0;  // stages that were asked to come to L2
#pragma unroll 1
    for (int i = 0; i < all; ++i) {
      const Piece piece(weight, begin, end, n, k, log2, i, inverse, parts);
      ahead = max(ahead, i);
      const auto ask = [&](int stage) {
        const Piece next(weight, begin, end, n, k, log2, stage, inverse, parts);
        if (next.has) bulk_prefetch(next.source, next.bytes);
      };
      wait_for_place(empty + 8 * place.stage, place.parity ^ 1, ahead, min(i + AHEAD, all), ask);
      if (FLIGHT < STAGES && asked++ >= FLIGHT) {
        mbarrier_wait(full + 8 * landing.stage, landing.parity);
        landing.advance();
      }
      const u32 barrier = full + 8 * place.stage;
      const int rows = __popc(__ballot_sync(FULL_MASK, piece.has));
      if (lane == 0) mbarrier_expect(barrier, piece.bytes * rows);
      __syncwarp();
      const u32 target = stages + place.stage * STAGE + piece.own * PITCH;
      if (piece.has) bulk_load(target, piece.source, piece.bytes, barrier);
      place.advance();
    }
  }

  // By one thread, for a warp that is done with the stage.
  __device__ __forceinline__ void release(int stage) const { mbarrier_arrive(empty + 8 * stage); }

  // Where a lane's addresses of A begin in a stage's tile of so many outputs (ptx/mma.cuh): rows that it
  // has not are the last one's.
  static __device__ __forceinline__ u32 lane_place(int outputs, bool halves) {
    const int lane = threadIdx.x % WARP_SIZE, row = lane % ROWS, last = outputs - 1;
    const int own = halves ? min(row % 8, last) + row / 8 * 8 : min(row, last);
    return own * PITCH + lane / ROWS * 16;
  }

  // d += a tile of `columns` of a stage, times up to eight rows of x. By one warp. weights, x: the lane's
  // addresses for ldmatrix, the latter of 32 columns of eight rows.
  static __device__ __forceinline__ void multiply(float (&d)[4], u32 weights, u32 x, int columns) {
    float sums[3][4] = {};  // of four, none of which waits for another
    const auto span = [&](int i, float (&first)[4], float (&second)[4]) {
      u32 low[4], high[4], own[4];
      ldmatrix_x4(low, weights + i * 2 * SPAN);
      ldmatrix_x4(high, weights + i * 2 * SPAN + SPAN);
      ldmatrix_x4(own, x + i * 2 * SPAN);
      mma_m16n8k16<T>(first, low, own[0], own[1]);
      mma_m16n8k16<T>(second, high, own[2], own[3]);
    };
    if (columns == HALF) {
#pragma unroll
      for (int i = 0; i < HALF / SPAN; i += 2) {
        span(i, d, sums[0]);
        if (i + 1 < HALF / SPAN) span(i + 1, sums[1], sums[2]);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < columns / SPAN; ++i) span(i, d, sums[0]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] += sums[0][i] + (sums[1][i] + sums[2][i]);
  }

 private:
  // What this lane copies of a product's i-th stage.
  struct Piece {
    int own;  // row of a tile
    bool has;
    int bytes;
    const T* source;
    __device__ __forceinline__ Piece(const T* weight, int begin, int end, int n, int k, int log2,
                                     int i, u32 inverse, int parts) {
      const int lane = threadIdx.x % WARP_SIZE, fetcher = threadIdx.x / WARP_SIZE - WARPS;
      const int tile = Quotient::of(i, inverse), at = (i - tile * parts) * COLUMNS;
      own = lane * FETCHERS + fetcher;
      const int output = begin + (tile << log2) + (own & ((1 << log2) - 1));
      has = own < ROWS && output < end, bytes = min(COLUMNS, k - at) * static_cast<int>(sizeof(T));
      const int row = output + (own >> log2 ? n : 0);
      source = weight + static_cast<i64>(has ? row : 0) * k + at;
    }
  };

  // While there is no room in the ring memory has nothing to do, since the others wait for one another's
  // numbers: what comes behind is asked to come to L2, from stage `ahead` on, slowly, so that what the
  // others read and write does not stand behind it.
  template <typename Ask>
  static __device__ __forceinline__ void wait_for_place(u32 barrier, int parity, int& ahead,
                                                        int end, const Ask& ask) {
    if (__all_sync(FULL_MASK, mbarrier_test(barrier, parity))) return;
#pragma unroll 1
    while (ahead < end) {
      ask(ahead++);
#pragma unroll 1
      for (int i = 0; i < PAUSES; ++i) {
        if (__all_sync(FULL_MASK, mbarrier_test(barrier, parity))) return;
        __nanosleep(PAUSE);
      }
    }
    mbarrier_wait(barrier, parity);
  }
};
