// Products of a tile with any number of columns by wgmma (sm_90a), which has an instruction for each:
// the loop over k stands here once for each of them.
//
//   part 0, 1   APART     rows of A 64 further on, the same columns     sums [2 x 64 rows][columns]
//               else      the same rows of A, the next columns          sums [64 rows][2 x columns]
//
// Rows of A are contiguous in k (128 bytes of a row in a stage), or with KN in panels of 64 rows, one
// line for each k.
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_bytes.cuh"
#include "ptx/wgmma_products.cuh"
#include "tile/ring.cuh"
#include "gemm/sm90/ragged_tiles.cuh"

constexpr int STEP_BYTES = 128;               // of k, of a row in a stage
constexpr int SLICES = STEP_BYTES / 32;       // of k, that wgmma multiplies at once
constexpr int PANEL_OF_64 = 64 * STEP_BYTES;  // bytes of 64 rows, either way
constexpr int BLOCKS_OF_8 = MOST_COLUMNS / 8;
using RaggedSums = float[2][BLOCKS_OF_8][4];

template <typename T, bool KN, int N>
__device__ __forceinline__ void multiply_slice(float (&sums)[N][4], u64 a, u64 b, int add) {
  if constexpr (sizeof(T) == 1)
    wgmma_bytes(sums, a, b, add);
  else
    wgmma_shared<T, KN, false>(sums, a, b, add);
}

// One tile's products of COLUMNS columns, STEP_BYTES of k after the other. `first_row` of A.
template <typename T, bool APART, bool KN, int COLUMNS, typename Ring, typename Place,
          typename Turns>
__device__ __forceinline__ void multiply_tile(RaggedSums& acc, const Ring& ring, Place& place,
                                              int steps, int first_row, int lane,
                                              const Turns& turns) {
  using Sums = float (&)[COLUMNS / 8][4];
  Sums first = reinterpret_cast<Sums>(acc[0]), second = reinterpret_cast<Sums>(acc[1]);
  // In units of a descriptor: to the second part, and to the next slice of A.
  constexpr int A = APART ? PANEL_OF_64 >> 4 : 0, B = APART ? 0 : COLUMNS * STEP_BYTES >> 4;
  constexpr int SLICE = KN ? 16 * STEP_BYTES >> 4 : 2;
  int last = 0;
  for (int step = 0; step < steps; ++step) {
    mbarrier_wait(ring.full(place.stage), place.parity);
    const u64 a = wgmma_tile(ring.a(place.stage) + first_row * STEP_BYTES, PANEL_OF_64);
    const u64 b = wgmma_tile(ring.b(place.stage), 0);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < SLICES; ++i) {
      multiply_slice<T, KN>(first, a + SLICE * i, b + 2 * i, step > 0 || i > 0);
      multiply_slice<T, KN>(second, a + A + SLICE * i, b + B + 2 * i, step > 0 || i > 0);
    }
    wgmma_commit();
    if (step > 0) {
      wgmma_wait<1>();
      ring.release(last, lane);
    }
    last = place.stage;
    place.advance();
  }
  turns.pass();
  wgmma_wait<0>();
  ring.release(last, lane);
}

// The same of `columns` columns, which is COLUMNS or more.
template <typename T, bool APART, bool KN, int COLUMNS = 16, typename Ring, typename Place,
          typename Turns>
__device__ __forceinline__ void multiply_ragged(RaggedSums& acc, int columns, const Ring& ring,
                                                Place& place, int steps, int first_row, int lane,
                                                const Turns& turns) {
  constexpr int NEXT = COLUMNS + (COLUMNS < 64 ? 16 : 8);
  if constexpr (NEXT <= MOST_COLUMNS) {
    if (columns > COLUMNS)
      return multiply_ragged<T, APART, KN, NEXT>(acc, columns, ring, place, steps, first_row, lane,
                                                 turns);
  }
  multiply_tile<T, APART, KN, COLUMNS>(acc, ring, place, steps, first_row, lane, turns);
}
