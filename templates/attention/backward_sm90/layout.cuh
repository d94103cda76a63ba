// Where the tiles of attention's backward on sm_90 lie in shared memory, each GUARD bytes from the
// next:
//
//   K      K_STAGES tiles: of this work item and, if there are two, the next
//   V      1 tile
//   Q      Q_STAGES tiles
//   dO     DO_STAGES tiles
//   dS     DS_STAGES tiles, from two warpgroups for the third
//   P      P_STAGES tiles, where two warpgroups share their keys (backward_wide_sm90.cu)
//   dQ     DQ_STAGES parts, 64 rows of 64 columns
//   bias   1 tile of a bias, queries as rows, if there is one
//   rows   lse and delta of a tile's rows, then bits of a mask: as many as tiles of dO, or where
//          there is one of these as tiles of Q
//   the barriers
//
// Names of places are those of the tiles; NAME_STAGE: bytes from one to the next.
#pragma once
#include "tile/swizzle.cuh"

template <int BLOCK_Q_, int HEAD_DIM_, int Q_STAGES_, int DO_STAGES_, int DQ_STAGES_, bool BIAS,
          bool MASK, int GUARD, int BLOCK_K_ = 128, int K_STAGES_ = 2, int DS_STAGES_ = 2,
          int P_STAGES_ = 0, int HEAD_DIM_V_ = HEAD_DIM_, bool SHARED_TILES_ = false>
struct BackwardLayout {
  static constexpr int BLOCK_Q = BLOCK_Q_, BLOCK_K = BLOCK_K_;
  // Two warpgroups have 64 keys each of a tile, or all of them and half of its queries.
  static constexpr bool SHARED_KEYS = BLOCK_K == 64;
  // Tiles of Q and dO come for both thread blocks of a cluster.
  static constexpr bool SHARED_TILES = SHARED_TILES_;
  // Of products; of tiles and of sums of dQ, in whole panels.
  static constexpr int HEAD_DIM = HEAD_DIM_, HEAD_DIM_V = HEAD_DIM_V_;
  static constexpr int SUM_COLUMNS = ceil_div(HEAD_DIM, 64) * 64;
  static constexpr int WIDTH_V = ceil_div(HEAD_DIM_V, 64) * 64;
  using QTile = SwizzledTile<BLOCK_Q, SUM_COLUMNS>;
  using KTile = SwizzledTile<BLOCK_K, SUM_COLUMNS>;
  using DOTile = SwizzledTile<BLOCK_Q, WIDTH_V>;
  using VTile = SwizzledTile<BLOCK_K, WIDTH_V>;
  using DSTile = SwizzledTile<BLOCK_K, BLOCK_Q>;
  static_assert(QTile::PANEL_COLUMNS == 64 && DSTile::PANEL_COLUMNS == 64,
                "TMA's 128-byte swizzle");

  static constexpr int K_STAGES = K_STAGES_, Q_STAGES = Q_STAGES_, DO_STAGES = DO_STAGES_;
  static constexpr int DS_STAGES = DS_STAGES_, P_STAGES = P_STAGES_;
  // What rows bring along is asked for with Q and left with dO, or with Q.
  static constexpr bool ROWS_WITH_Q = DO_STAGES == 1;
  static constexpr int ROWS_STAGES = ROWS_WITH_Q ? Q_STAGES : DO_STAGES, DQ_STAGES = DQ_STAGES_;
  static constexpr int DQ_COLUMNS = 64, DQ_ACROSS = SUM_COLUMNS / DQ_COLUMNS;
  static constexpr int DQ_PARTS = BLOCK_Q / 64 * DQ_ACROSS;  // of a tile

  static constexpr int ROWS_BYTES = 2 * BLOCK_Q * 4;  // lse_log2 of a tile, then delta
  static constexpr int BIAS_BYTES = BIAS ? BLOCK_Q * BLOCK_K * 2 : 0;  // 16 bits each
  static constexpr int MASK_BYTES = MASK ? BLOCK_K * BLOCK_Q / 8 : 0;
  static constexpr int DQ_WARP_BYTES = 16 * DQ_COLUMNS * 4;
  static constexpr int K_STAGE = KTile::BYTES + GUARD, Q_STAGE = QTile::BYTES + GUARD;
  static constexpr int V_STAGE = VTile::BYTES + GUARD, DO_STAGE = DOTile::BYTES + GUARD;
  static constexpr int DS_STAGE = DSTile::BYTES + GUARD, DQ_STAGE = 4 * DQ_WARP_BYTES + GUARD;
  static constexpr int ROWS_STAGE = ROWS_BYTES + MASK_BYTES + GUARD;

  static constexpr int V = K_STAGES * K_STAGE, Q = V + V_STAGE, DO = Q + Q_STAGES * Q_STAGE;
  static constexpr int DS = DO + DO_STAGES * DO_STAGE;
  static constexpr int P = DS + DS_STAGES * DS_STAGE, DQ = P + P_STAGES * DS_STAGE;
  static constexpr int BIAS_TILE = DQ + DQ_STAGES * DQ_STAGE;
  static constexpr int ROWS = BIAS_TILE + (BIAS ? BIAS_BYTES + GUARD : 0);
  static constexpr int BARRIERS = ROWS + ROWS_STAGES * ROWS_STAGE;
};
