// Weights on their way through a block's shared memory, product after product, in one order that both
// ends know: a producer warp asks for them as soon as there is room, also past the barriers at which
// the others wait for what the next product is to be multiplied with.
//
// A stage is multiplied by one warp of those that compute, the next one by the next warp, so that what
// one waits for the others have no part in.
//
// A product [n, k] has its outputs shared out over the blocks, and a block takes its own by tiles of
// 16 rows of the weight (halves: 8 of the gate and the same 8 of up), COLUMNS at a time:
//
//   stage   [16 rows][COLUMNS + a gap of 64 bytes]: rows 0 to 7 at eight lanes' 16 bytes meet all banks
//   order   tile 0: columns 0 ... COLUMNS - 1, then the next ones up to k; tile 1; ...; next product
//
// Rows that a tile has not are not copied; the last one stands for them, and sums go nowhere. A row's
// piece is one bulk copy, and a warp starts one after the other, so FETCHERS warps share the rows. No more than FLIGHT stages
// are asked for and not there yet: what is asked for beyond what memory needs to be busy stands in
// its queues, and what the others read and write waits behind it.
#pragma once
#include "gemm/gemv_mma.cuh"
#include "ptx/bulk.cuh"
#include "step/layers.cuh"
#include "step/normed_rows.cuh"
#include "tile/ring.cuh"

template <typename T, int COLUMNS, int STAGES, int FLIGHT, int WARPS, int FETCHERS>
struct WeightRing {
  static constexpr int ROWS = 16, SPAN = 32, SIZE = STAGES, COLUMNS_OF_STAGE = COLUMNS;
  static constexpr int PITCH = COLUMNS * sizeof(T) + 64, STAGE = ROWS * PITCH;  // bytes
  using Chunk = uint4;
  static_assert(COLUMNS % (2 * SPAN) == 0, "rows 64 bytes apart, modulo all banks");
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
      mbarrier_init(empty + 8 * i, 1);
    }
    mbarrier_init_fence();
  }

  // Rows begin to end - 1 of a weight [n, k], or with `halves` of both parts of one of [2 n, k]. By
  // the warps that fetch.
  __device__ __forceinline__ void fetch(const T* weight, int begin, int end, int n, int k,
                                        bool halves) {
    const int outputs = halves ? ROWS / 2 : ROWS;
    const int lane = threadIdx.x % WARP_SIZE, fetcher = threadIdx.x / WARP_SIZE - WARPS;
    const int own = lane * FETCHERS + fetcher;  // row of a tile
#pragma unroll 1
    for (int first = begin; first < end; first += outputs) {
      const int output = first + (own & (outputs - 1)), row = output + (own >= outputs ? n : 0);
      const bool has = own < ROWS && output < end;
      const T* const source = weight + static_cast<i64>(has ? row : 0) * k;
      const int rows = __popc(__ballot_sync(FULL_MASK, has));
#pragma unroll 1
      for (int at = 0; at < k; at += COLUMNS) {
        const int bytes = min(COLUMNS, k - at) * static_cast<int>(sizeof(T));
        const u32 barrier = full + 8 * place.stage;
        mbarrier_wait(empty + 8 * place.stage, place.parity ^ 1);
        if (FLIGHT < STAGES && asked++ >= FLIGHT) {
          mbarrier_wait(full + 8 * landing.stage, landing.parity);
          landing.advance();
        }
        if (lane == 0) mbarrier_expect(barrier, bytes * rows);
        __syncwarp();
        if (has) bulk_load(stages + place.stage * STAGE + own * PITCH, source + at, bytes, barrier);
        place.advance();
      }
    }
  }

  // By one thread, for a warp that is done with the stage.
  __device__ __forceinline__ void release(int stage) const { mbarrier_arrive(empty + 8 * stage); }

  // d += a stage's tile, of so many outputs and columns, times up to eight rows of x. By one warp. x:
  // the stage's first column of the lane's row (lane / 4), null where there is no such row.
  __device__ __forceinline__ static void multiply(float (&d)[4], const unsigned char* stage,
                                                  const T* x, int outputs, int columns,
                                                  bool halves) {
    const int lane = threadIdx.x % WARP_SIZE, row = min(lane / 4, outputs - 1);
    const int high = halves ? row + 8 : min(lane / 4 + 8, outputs - 1);
    const Chunk* const low_row = reinterpret_cast<const Chunk*>(stage + row * PITCH) + lane % 4;
    const Chunk* const high_row = reinterpret_cast<const Chunk*>(stage + high * PITCH) + lane % 4;
    const Chunk* const x_row = reinterpret_cast<const Chunk*>(x) + lane % 4;
    float sums[3][4] = {};  // of four, none of which waits for another
    const auto span = [&](int i, float (&first)[4], float (&second)[4]) {
      const uint4 low = low_row[i * 4], high = high_row[i * 4];
      const uint4 own = x == nullptr ? make_uint4(0, 0, 0, 0) : x_row[i * 4];
      mma_m16n8k16<T>(first, {low.x, high.x, low.y, high.y}, own.x, own.y);
      mma_m16n8k16<T>(second, {low.z, high.z, low.w, high.w}, own.z, own.w);
    };
    const auto pair = [&](int i) { span(i, d, sums[0]), span(i + 1, sums[1], sums[2]); };
    int i = 0;
#pragma unroll 4
    for (; i + 1 < columns / SPAN; i += 2) pair(i);
    if (i < columns / SPAN) span(i, d, sums[0]);
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] += sums[0][i] + (sums[1][i] + sums[2][i]);
  }
};
