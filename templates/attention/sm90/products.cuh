// Attention's two products by wgmma, over the steps of a tile; whoever calls has fenced, and waits.
#pragma once
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_products.cuh"

// S = Q K^T, from tiles in panels of 64 columns, 16 columns of both a step.
template <typename T, typename Rings, int STEPS, int N>
__device__ __forceinline__ void issue_qk(float (&s)[1][N][4], u64 q, u64 k) {
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const int panel = step / 4, within = step % 4 * 2;  // 32 bytes a step, in units of 16
    wgmma_shared<T, false, false>(s[0], q + (panel * Rings::QTile::PANEL_BYTES >> 4) + within,
                                  k + (panel * Rings::KTile::PANEL_BYTES >> 4) + within, step > 0);
  }
  wgmma_commit();
}

// O += P V, 16 keys a step, P from registers.
template <typename T, int COLUMNS, int STEPS>
__device__ __forceinline__ void issue_pv(float (&acc)[1][COLUMNS][4], const u32 (&p)[STEPS][4],
                                         u64 v) {
#pragma unroll
  for (int step = 0; step < STEPS; ++step)
    wgmma_registers<T, true>(acc[0], p[step], v + step * (2048 >> 4));
  wgmma_commit();
}
