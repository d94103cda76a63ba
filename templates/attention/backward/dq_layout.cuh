// Where a block that makes dQ has its tiles in shared memory, each GUARD bytes from the next:
//
//   Q   dO   then STAGES of:  K  V   and where rows have no registers for them (ACC_INIT):  lse  delta
//
// dQ is staged where Q was.
#pragma once
#include "tile/swizzle.cuh"

template <int BLOCK_Q, int BLOCK_K, int HEAD_DIM, int HEAD_DIM_V, int STAGES, int GUARD>
struct DqLayout {
  using QTile = SwizzledTile<BLOCK_Q, HEAD_DIM>;
  using DoTile = SwizzledTile<BLOCK_Q, HEAD_DIM_V>;
  using KTile = SwizzledTile<BLOCK_K, HEAD_DIM>;
  using VTile = SwizzledTile<BLOCK_K, HEAD_DIM_V>;

  static constexpr int DO = QTile::BYTES + GUARD, RING = DO + DoTile::BYTES + GUARD;
  static constexpr int V = KTile::BYTES + GUARD, STAGE = V + VTile::BYTES + GUARD;  // in a stage
  static constexpr int LSE = RING + STAGES * STAGE, DELTA = LSE + BLOCK_Q * 4 + GUARD;
};
