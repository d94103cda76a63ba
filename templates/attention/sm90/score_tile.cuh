// A bias or a mask that TMA brings tile by tile with the keys, and the rule that reads it from
// shared memory.
//
// Rows of a tile are cut into panels of 128 bytes (32, 64 or 128 keys), which hold their rows one
// under another; 16-byte chunk c of row r lies at position c ^ (r % 8), or in a tile of bytes of 64
// keys at c ^ (r / 2 % 4), as in tile/swizzle.cuh. A warp that reads the two keys of each of its
// lanes' fragments (see ptx/mma.cuh) meets each bank once.
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "attention/score.cuh"

template <typename T, int ROWS_, int KEYS>
struct ScoreTile {
  static constexpr int ROWS = ROWS_, ROW_BYTES = KEYS * sizeof(T) == 64 ? 64 : 128;
  static constexpr int PANEL_COLUMNS = ROW_BYTES / sizeof(T), PANELS = KEYS / PANEL_COLUMNS;
  static constexpr int PANEL_BYTES = ROWS * ROW_BYTES, BYTES = PANELS * PANEL_BYTES;
  static_assert(KEYS % PANEL_COLUMNS == 0, "whole panels");

  // What is turned over in the byte within a row, which TMA swizzles as widely as the row is.
  __device__ static __forceinline__ int turn(int row) {
    return (ROW_BYTES == 128 ? row % 8 : row / 2 % 4) << 4;
  }
};

// The tile from row `row`, key `key` on, of one batch and head. By one thread.
template <typename Tile>
__device__ __forceinline__ void tma_load_scores(u32 shared, const TensorMap& map, u32 barrier,
                                                int key, int row, int head, int batch) {
  mbarrier_expect(barrier, Tile::BYTES);
#pragma unroll
  for (int panel = 0; panel < Tile::PANELS; ++panel)
    tma_load(shared + panel * Tile::PANEL_BYTES, map, barrier, key + panel * Tile::PANEL_COLUMNS,
             row, head, batch);
}

// Which tile of scores is being worked on: where its arrays are, its first row and key.
struct ScorePlace {
  u32 address;
  int q0, k0;

  __device__ __forceinline__ void begin(u32 arrays, int key) { address = arrays, k0 = key; }
};

// Bias or Where of a tile, OFFSET bytes behind the place's address.
template <typename Array, typename Tile, int OFFSET>
struct Staged : ScoreRule {
  using T = typename Array::Element;
  const ScorePlace& place;

  __device__ __forceinline__ explicit Staged(const ScorePlace& here) : place(here) {}

  // `offset` is a multiple of eight keys, k_idx less than eight keys into the tile.
  __device__ __forceinline__ void apply(float (&x)[2], int q_idx, int k_idx, int offset = 0) const {
    const int row = q_idx - place.q0, from = (k_idx - place.k0) * static_cast<int>(sizeof(T));
    const int byte = offset * static_cast<int>(sizeof(T));
    const u32 lane = row * Tile::ROW_BYTES + (from ^ Tile::turn(row));
    typename Array::Word word;
    load_shared(word, place.address + OFFSET + byte / Tile::ROW_BYTES * Tile::PANEL_BYTES +
                          (lane ^ byte % Tile::ROW_BYTES));
    x[0] = Array::changed(x[0], reinterpret_cast<const T*>(&word)[0]);
    x[1] = Array::changed(x[1], reinterpret_cast<const T*>(&word)[1]);
  }
};

// The tiles of a bias and of a mask, where there are such: the mask's behind the bias's.
template <typename T, bool BIAS, bool MASK, int ROWS, int KEYS>
struct ScoreTiles {
  using BiasTile = ScoreTile<T, ROWS, BIAS ? KEYS : 128>;
  using MaskTile = ScoreTile<u8, ROWS, MASK ? KEYS : 128>;
  static constexpr int BIAS_BYTES = BIAS ? BiasTile::BYTES : 0;
  static constexpr int BYTES = BIAS_BYTES + (MASK ? MaskTile::BYTES : 0);
  using AddBias = Staged<Bias<T, true>, BiasTile, 0>;
  using Hide = Staged<Where<u8, true>, MaskTile, BIAS_BYTES>;

  // Asks for those from row `row`, key `key` on; maps of what is not there are null. By one thread.
  static __device__ __forceinline__ void load(u32 to, u32 full, const TensorMap* bias,
                                              const TensorMap* mask, int key, int row, int head,
                                              int batch) {
    if constexpr (BIAS) tma_load_scores<BiasTile>(to, *bias, full, key, row, head, batch);
    if constexpr (MASK)
      tma_load_scores<MaskTile>(to + BIAS_BYTES, *mask, full, key, row, head, batch);
  }
};
