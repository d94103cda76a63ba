// A warp's part of a product with up to ROWS rows of one expert, on tensor cores: each weight is
// loaded once (gemm/gemv_mma.cuh), and multiplied with eight rows of x after the other, as many as
// there are.
#pragma once
#include "gemm/expert_walk.cuh"
#include "gemm/gemv_mma.cuh"

// GATHER: x has the rows of tokens, else those of places.
template <typename T, typename Weight, int ROWS, bool GATHER>
struct ExpertProduct {
  static constexpr int SPAN = Weight::SPAN, EIGHTS = ROWS / 8;
  static_assert(ROWS % 8 == 0, "columns of mma");
  struct Step {
    uint4 w[Weight::CHUNKS], x;  // of the first eight rows
  };
  const T* x;
  i64 stride;
  const int* choices;  // of places: token * top_k + choice
  int top_k, k;
  Weight weight;
  int rows, own[EIGHTS];  // of the part; which of x this lane has of each eight, or -1
  float d[EIGHTS][Weight::PRODUCTS][4];

  // From here on it is this part's.
  __device__ __forceinline__ void begin(const Weight& of_part, const ExpertPart& part) {
    weight = of_part, rows = part.rows;
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i) {
      const int row = i * 8 + threadIdx.x % WARP_SIZE / 4;
      own[i] = row < rows ? row_of(part.place + row) : -1;
#pragma unroll
      for (int j = 0; j < Weight::PRODUCTS * 4; ++j) d[i][j / 4][j % 4] = 0.f;
    }
  }
  __device__ __forceinline__ void load_weight(Step& step, int span) const {
    weight.load(step.w, span);
  }
  __device__ __forceinline__ void load_x(Step& step, int span) const { step.x = chunk(0, span); }
  __device__ __forceinline__ void multiply(const Step& step, int span) {
    Weight::multiply(d[0], step.w, step.x);
#pragma unroll
    for (int i = 1; i < EIGHTS; ++i)
      if (i * 8 < rows) Weight::multiply(d[i], step.w, chunk(i, span));
  }
  // To [ROWS][TILE], as far as there are rows.
  template <int TILE>
  __device__ __forceinline__ void store(float* sums) const {
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i)
      if (i * 8 < rows) Weight::store(d[i], sums + i * 8 * TILE);
  }

 private:
  __device__ __forceinline__ int row_of(int place) const {
    return GATHER ? choices[place] / top_k : place;
  }
  // Eight k of this lane's row of the eight `i`.
  __device__ __forceinline__ uint4 chunk(int i, int span) const {
    uint4 bits = make_uint4(0, 0, 0, 0);
    const int at = span * SPAN + static_cast<int>(threadIdx.x % 4) * 8;
    load_chunk_if(bits, x + own[i] * stride + at, own[i] >= 0 && at < k);
    return bits;
  }
};
