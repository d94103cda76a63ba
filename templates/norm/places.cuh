// Where the rows of a norm's arrays begin: at one distance, or in up to three dimensions, as those of
// the heads in a packed projection.
#pragma once
#include "prelude.cuh"

// Row r = (b * heads + h) * inner + i is at b, h, i of an array's strides. inner 0: all rows are at
// the distance of the last one.
struct RowPlaces {
  int inner, heads;

  __device__ __forceinline__ i64 of(const Strides& strides, int row) const {
    if (inner == 0) return row * strides.row;
    const int outer = row / inner, last = row - outer * inner;
    const int batch = outer / heads, head = outer - batch * heads;
    return batch * strides.batch + head * strides.head + last * strides.row;
  }
};
