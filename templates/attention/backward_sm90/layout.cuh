// Where the tiles of attention's backward on sm_90 lie in shared memory, each GUARD bytes from the
// next:
//
//   K      2 tiles, of this work item and the next
//   V      1 tile
//   Q      Q_STAGES tiles
//   dO     DO_STAGES tiles
//   dS     2 tiles, from two warpgroups for the third
//   dQ     DQ_STAGES parts, 64 rows of 64 columns
//   bias   1 tile of a bias, queries as rows, if there is one
//   rows   lse and delta of a tile's rows, then bits of a mask: as many as tiles of dO
//   the barriers
//
// Names of places are those of the tiles; NAME_STAGE: bytes from one to the next.
#pragma once
#include "tile/swizzle.cuh"

template <int BLOCK_Q_, int HEAD_DIM_, int Q_STAGES_, int DO_STAGES_, int DQ_STAGES_, bool BIAS,
          bool MASK, int GUARD>
struct BackwardLayout {
  static constexpr int BLOCK_Q = BLOCK_Q_, BLOCK_K = 128;
  // Of products, and of tiles and sums, in whole panels.
  static constexpr int HEAD_DIM = HEAD_DIM_, WIDTH = ceil_div(HEAD_DIM, 64) * 64;
  using QTile = SwizzledTile<BLOCK_Q, WIDTH>;  // of Q and dO
  using KTile = SwizzledTile<BLOCK_K, WIDTH>;  // of K and V
  using DSTile = SwizzledTile<BLOCK_K, BLOCK_Q>;
  static_assert(QTile::PANEL_COLUMNS == 64 && DSTile::PANEL_COLUMNS == 64,
                "TMA's 128-byte swizzle");

  static constexpr int Q_STAGES = Q_STAGES_, DO_STAGES = DO_STAGES_, DS_STAGES = 2;
  static constexpr int ROWS_STAGES = DO_STAGES, DQ_STAGES = DQ_STAGES_;
  static constexpr int DQ_COLUMNS = 64, DQ_ACROSS = WIDTH / DQ_COLUMNS;
  static constexpr int DQ_PARTS = BLOCK_Q / 64 * DQ_ACROSS;  // of a tile

  static constexpr int ROWS_BYTES = 2 * BLOCK_Q * 4;  // lse_log2 of a tile, then delta
  static constexpr int BIAS_BYTES = BIAS ? BLOCK_Q * BLOCK_K * 2 : 0;  // 16 bits each
  static constexpr int MASK_BYTES = MASK ? BLOCK_K * BLOCK_Q / 8 : 0;
  static constexpr int DQ_WARP_BYTES = 16 * DQ_COLUMNS * 4;
  static constexpr int K_STAGE = KTile::BYTES + GUARD, Q_STAGE = QTile::BYTES + GUARD;
  static constexpr int DS_STAGE = DSTile::BYTES + GUARD, DQ_STAGE = 4 * DQ_WARP_BYTES + GUARD;
  static constexpr int ROWS_STAGE = ROWS_BYTES + MASK_BYTES + GUARD;

  static constexpr int V = 2 * K_STAGE, Q = V + K_STAGE, DO = Q + Q_STAGES * Q_STAGE;
  static constexpr int DS = DO + DO_STAGES * Q_STAGE, DQ = DS + DS_STAGES * DS_STAGE;
  static constexpr int BIAS_TILE = DQ + DQ_STAGES * DQ_STAGE;
  static constexpr int ROWS = BIAS_TILE + (BIAS ? BIAS_BYTES + GUARD : 0);
  static constexpr int BARRIERS = ROWS + ROWS_STAGES * ROWS_STAGE;
};
