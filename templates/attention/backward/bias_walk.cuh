// Which tiles of dS belong to a block's tile of the gradient of a bias: those of all batches, heads
// and, where the bias has one row for all, query tiles that share it.
//
//   block index = (key tile, row tile, head of the bias, batch of the bias, part), the first one
//                 fastest; `parts` blocks share a walk, each has neighbouring steps of it
//   step        = (query tile, head, batch): heads of one group are neighbours, and share K and V in L2
#pragma once
#include "attention/features.cuh"

// The shape of a bias: 1 where it is broadcast. `rows`, `columns` are those of the longest
// sequence.
struct BiasShape {
  int batch, heads, rows, columns;

  __device__ __forceinline__ i64 size() const {
    return static_cast<i64>(batch) * heads * rows * columns;
  }
};

// A block's tile of the gradient.
template <int BLOCK_Q, int BLOCK_K>
struct BiasTile {
  int k0, row0, head, batch, part;

  __device__ __forceinline__ BiasTile(int index, const BiasShape& bias) {
    const int tiles_k = ceil_div(bias.columns, BLOCK_K), tiles_q = ceil_div(bias.rows, BLOCK_Q);
    k0 = index % tiles_k * BLOCK_K;
    index /= tiles_k;
    row0 = index % tiles_q * BLOCK_Q;
    index /= tiles_q;
    head = index % bias.heads;
    index /= bias.heads;
    batch = index % bias.batch;
    part = index / bias.batch;
  }

  // Elements from the beginning of the gradient to its row row0, column 0.
  __device__ __forceinline__ i64 offset(const BiasShape& bias) const {
    return ((static_cast<i64>(batch) * bias.heads + head) * bias.rows + row0) * bias.columns;
  }
};

// What a walk goes over.
struct BiasProblem {
  int batch, heads_q, seqlen_q, seqlen_k;  // of the longest sequence
  int window_left, window_right, parts;
  const int *cu_seqlens_q, *cu_seqlens_k;
};

template <bool PACKED, int BLOCK_Q, int BLOCK_K>
struct BiasWalk {
  int step, end;  // no more steps: step == end
  int batch, head, q0, seqlen_q, seqlen_k, q_start, k_start;

  // At the first step of this block's that sees a key of its tile.
  __device__ __forceinline__ BiasWalk(const BiasTile<BLOCK_Q, BLOCK_K>& tile, const BiasShape& bias,
                                      const BiasProblem& problem) {
    const i64 steps = static_cast<i64>(problem.batch / bias.batch) *
                      (problem.heads_q / bias.heads) * query_tiles(bias, problem);
    step = steps * tile.part / problem.parts;
    end = steps * (tile.part + 1) / problem.parts;
    find(tile, bias, problem);
  }

  __device__ __forceinline__ void advance(const BiasTile<BLOCK_Q, BLOCK_K>& tile,
                                          const BiasShape& bias, const BiasProblem& problem) {
    ++step;
    find(tile, bias, problem);
  }

 private:
  __device__ __forceinline__ static int query_tiles(const BiasShape& bias,
                                                    const BiasProblem& problem) {
    return bias.rows == 1 ? ceil_div(problem.seqlen_q, BLOCK_Q) : 1;
  }

  __device__ __forceinline__ void find(const BiasTile<BLOCK_Q, BLOCK_K>& tile,
                                       const BiasShape& bias, const BiasProblem& problem) {
    const int tiles_q = query_tiles(bias, problem), heads = problem.heads_q / bias.heads;
    for (; step < end; ++step) {
      q0 = tile.row0 + step % tiles_q * BLOCK_Q;
      head = tile.head + step / tiles_q % heads;
      batch = tile.batch + step / tiles_q / heads;
      const SequenceRows<PACKED> queries(problem.cu_seqlens_q, batch, problem.seqlen_q);
      const SequenceRows<PACKED> held(problem.cu_seqlens_k, batch, problem.seqlen_k);
      seqlen_q = queries.length, seqlen_k = held.length;
      q_start = queries.start, k_start = held.start;
      if (q0 >= seqlen_q || tile.k0 >= seqlen_k) continue;
      const KeyBand band(seqlen_q, seqlen_k, problem.window_left, problem.window_right);
      const int last = min(q0 + BLOCK_Q, seqlen_q) - 1;
      if (band.first(q0) < tile.k0 + BLOCK_K && band.end(last) > tile.k0) return;
    }
  }
};

// Two neighbours of a row of `columns` elements, as far as they are in it; rows follow one another.
template <typename T>
__device__ __forceinline__ void store_neighbours(T* row, int column, int columns, float a,
                                                 float b) {
  struct alignas(2 * sizeof(T)) Pair {
    T x, y;
  };
  if (columns % 2 == 0 && column < columns) {
    *reinterpret_cast<Pair*>(row + column) = {static_cast<T>(a), static_cast<T>(b)};
  } else {
    if (column < columns) row[column] = static_cast<T>(a);
    if (column + 1 < columns) row[column + 1] = static_cast<T>(b);
  }
}
