// In which order a tile's rows stand in shared memory. An order permutes bits of a row's number, so
// that row(a + b) = row(a) + row(b) where a and b have no bit in common.
//
// What a lane has of mma's D fragments (see ptx/mma.cuh) lies apart: rows g, g + 8 of every
// sixteen, columns 2t, 2t + 1 of every eight. In these orders it is a run of neighbours, one load
// or store of an array that has keys side by side:
//
//   RowRuns<M>      rows of M 16-row blocks: lane g has 2M of them, from 2M * g on
//   ColumnRuns<N>   columns of N 8-column blocks: lane t has 2N of them, from 2N * t on
#pragma once
#include "prelude.cuh"

struct InOrder {
  __device__ __forceinline__ static constexpr int row(int place) { return place; }
};

//   place = 16m + 8h + g  ->  row 2M * g + 2m + h
template <int M>
struct RowRuns {
  __device__ __forceinline__ static constexpr int row(int place) {
    return place / (16 * M) * (16 * M) + place % 8 * (2 * M) + place / 8 % (2 * M);
  }
};

//   place = 8n + 2t + i  ->  row 2N * t + 2n + i
template <int N>
struct ColumnRuns {
  __device__ __forceinline__ static constexpr int row(int place) {
    return place / (8 * N) * (8 * N) + place % 8 / 2 * (2 * N) + place / 8 % N * 2 + place % 2;
  }
};

template <bool IN_RUNS, typename Runs>
struct OrderIf : Runs {};
template <typename Runs>
struct OrderIf<false, Runs> : InOrder {};
