// Where the tiles of attention on sm_90 lie in shared memory: rings of Q, K and V, of bias and mask
// where a form has them, or of codes that become K and V, then the barriers. O is staged where its Q
// was.
#pragma once
#include "tile/swizzle.cuh"

// In panels of 64 columns, of which products may leave some. GUARD: bytes behind each tile.
template <int BLOCK_Q_, int BLOCK_K_, int HEAD_DIM, int HEAD_DIM_V, int Q_STAGES_, int K_STAGES_,
          int V_STAGES_, int GUARD, int SCORE_STAGES_ = 0, int SCORE_BYTES = 0,
          int CODE_STAGES_ = 0>
struct AttentionRings {
  static constexpr int BLOCK_Q = BLOCK_Q_, BLOCK_K = BLOCK_K_;
  static constexpr int Q_STAGES = Q_STAGES_, K_STAGES = K_STAGES_, V_STAGES = V_STAGES_;
  static constexpr int SCORE_STAGES = SCORE_STAGES_;
  static constexpr int STAGES = K_STAGES > V_STAGES ? K_STAGES : V_STAGES;  // that have barriers
  static constexpr int WIDTH = ceil_div(HEAD_DIM, 64) * 64, WIDTH_V = ceil_div(HEAD_DIM_V, 64) * 64;
  using QTile = SwizzledTile<BLOCK_Q, WIDTH>;
  using KTile = SwizzledTile<BLOCK_K, WIDTH>;
  using VTile = SwizzledTile<BLOCK_K, WIDTH_V>;
  using OTile = SwizzledTile<BLOCK_Q, WIDTH_V>;
  static_assert(QTile::PANEL_COLUMNS == 64 && VTile::PANEL_COLUMNS == 64, "TMA's 128-byte swizzle");
  static_assert(BLOCK_K % 16 == 0, "the PV product takes keys 16 at a time");
  static_assert(WIDTH_V <= WIDTH, "the output is staged where its Q was");

  // Bytes from tile to tile of a ring, and from the first Q to the others.
  static constexpr int Q_STAGE = QTile::BYTES + GUARD, K_STAGE = KTile::BYTES + GUARD;
  static constexpr int V_STAGE = VTile::BYTES + GUARD;
  static constexpr int SCORE_STAGE = SCORE_BYTES > 0 ? SCORE_BYTES + GUARD : 0;
  static constexpr int K = Q_STAGES * Q_STAGE, V = K + K_STAGES * K_STAGE;
  static constexpr int SCORES = V + V_STAGES * V_STAGE;
  static constexpr int CODE_STAGES = CODE_STAGES_, CODES = SCORES + SCORE_STAGES * SCORE_STAGE;
  static constexpr int CODE_STAGE = BLOCK_K * WIDTH + GUARD;  // a byte a number
  static constexpr int BARRIERS = CODES + CODE_STAGES * CODE_STAGE;
};
