// Sums of a block's keys whose columns two warpgroups share: of the panels of 64 columns each has
// half, whole ones next to one another, and of a last one that is left 32 columns.
//
//   3 panels      | 0: whole | 1: whole | 0: half, 1: half |      of which warpgroup
#pragma once
#include "attention/backward_sm90/products.cuh"
#include "attention/backward_sm90/tile.cuh"

template <int COLUMNS>
struct HalfSums {
  static constexpr int PANELS = ceil_div(COLUMNS, 64), WHOLE = PANELS / 2;
  static constexpr bool ODD = PANELS % 2 == 1;
  static constexpr int REST = WHOLE * 2 * 64;  // the first column of the panel that is left
  float whole[1][WHOLE * 8][4] = {};
  float rest[1][ODD ? 4 : 1][4] = {};

  __device__ __forceinline__ void fence() {
    register_fence(whole[0]);
    if constexpr (ODD) register_fence(rest[0]);
  }

  // += P^T dO or dS^T Q, where a's columns are b's rows; `b` makes an operand of a place in the
  // tile and of what this warpgroup's place is further on.
  template <typename T, typename Layout, typename Operand>
  __device__ __forceinline__ void issue(u64 a, const Operand& b) {
    constexpr int PANEL_BYTES = Layout::QTile::PANEL_BYTES;
    issue_columns<T, Layout>(whole, a, b(0, WHOLE * PANEL_BYTES));
    if constexpr (ODD) issue_columns<T, Layout>(rest, a, b(2 * WHOLE * PANEL_BYTES, 64));
    wgmma_commit();
  }

  // To device memory, of whose rows there are `columns`. See store_key_sums.
  template <bool PACKED, typename Tile, typename T>
  __device__ __forceinline__ void store(T* target, const Strides& strides, int columns, float scale,
                                        int lane, int warp_key, u32 about, int warpgroup) const {
    const auto part = [&](const auto& sum, int first) {
      store_key_sums<PACKED, Tile>(target + first, strides, columns - first, sum, scale, lane,
                                   warp_key, about);
    };
    part(whole, warpgroup * WHOLE * 64);
    if constexpr (ODD) part(rest, REST + warpgroup * 32);
  }
};
