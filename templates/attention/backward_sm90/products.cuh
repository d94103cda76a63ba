// The products of attention's backward by wgmma, over the steps of a tile; whoever calls has
// fenced, and waits. A step is 16 deep.
#pragma once
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_products.cuh"

// S^T, or dP^T added to d: both operands have DIM columns.
template <typename T, typename Layout, bool ADDED, int DIM = Layout::HEAD_DIM, int N>
__device__ __forceinline__ void issue_keys(float (&d)[1][N][4], u64 keys, u64 queries) {
#pragma unroll
  for (int step = 0; step < DIM / 16; ++step) {
    const int panel = step / 4, within = step % 4 * 2;  // 32 bytes a step, in units of 16
    wgmma_shared<T, false, false>(d[0], keys + (panel * Layout::KTile::PANEL_BYTES >> 4) + within,
                                  queries + (panel * Layout::QTile::PANEL_BYTES >> 4) + within,
                                  ADDED || step > 0);
  }
  wgmma_commit();
}

// dV or dK, A from registers.
template <typename T, int N, int STEPS>
__device__ __forceinline__ void issue_sum(float (&d)[1][N][4], const u32 (&a)[STEPS][4], u64 b) {
#pragma unroll
  for (int step = 0; step < STEPS; ++step)
    wgmma_registers<T, true>(d[0], a[step], b + step * (2048 >> 4));
  wgmma_commit();
}

// Columns of dV or dK, with P^T or dS^T in shared memory; not yet committed.
template <typename T, typename Layout, int N>
__device__ __forceinline__ void issue_columns(float (&d)[1][N][4], u64 a, u64 b) {
#pragma unroll
  for (int step = 0; step < Layout::DSTile::COLUMNS / 16; ++step) {
    const int panel = step / 4, within = step % 4 * 2;  // 32 bytes a step, in units of 16
    wgmma_shared<T, false, true>(d[0], a + (panel * Layout::DSTile::PANEL_BYTES >> 4) + within,
                                 b + step * (2048 >> 4), 1);
  }
}

// dK, with dS^T in shared memory.
template <typename T, typename Layout, int N>
__device__ __forceinline__ void issue_shared_sum(float (&d)[1][N][4], u64 a, u64 b) {
  issue_columns<T, Layout>(d, a, b);
  wgmma_commit();
}
