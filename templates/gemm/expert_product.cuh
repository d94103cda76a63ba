// A warp's part of a product with up to ROWS rows of one expert, on tensor cores: each weight is
// loaded once (gemm/gemv_mma.cuh), and multiplied with eight rows of x after the other, as many as
// there are.
#pragma once
#include "gemm/expert_walk.cuh"
#include "gemm/gemv_mma.cuh"

// The row of x that a lane has of each eight of a part's, or -1.
template <int EIGHTS>
struct LaneRows {
  int row[EIGHTS];
};

// GATHER: x has the rows of tokens, else those of places.
template <typename T, typename Weight, int ROWS, bool GATHER>
struct ExpertProduct {
  static constexpr int SPAN = Weight::SPAN, EIGHTS = ROWS / 8;
  static_assert(ROWS % 8 == 0, "columns of mma");
  using Rows = LaneRows<EIGHTS>;
  struct Step {
    uint4 w[Weight::CHUNKS], x;  // of the first eight rows
  };
  const T* x;
  i64 stride;
  const int* choices;  // of places: token * top_k + choice
  int top_k, k;
  Weight weight;
  int rows;  // of the part
  Rows own;
  float d[EIGHTS][Weight::PRODUCTS][4];

  // Which rows of x this lane has of a part: a trip to memory, which may be made ahead.
  __device__ __forceinline__ Rows look_up(const ExpertPart& part) const {
    Rows found;
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i) {
      const int row = i * 8 + threadIdx.x % WARP_SIZE / 4;
      found.row[i] = row < part.rows ? row_of(part.place + row) : -1;
    }
    return found;
  }
  // From here on it is this part's.
  __device__ __forceinline__ void begin(const Weight& of_part, const ExpertPart& part,
                                        const Rows& of_lane) {
    weight = of_part, rows = part.rows, own = of_lane;
#pragma unroll
    for (int i = 0; i < EIGHTS * Weight::PRODUCTS * 4; ++i)
      d[i / 4 / Weight::PRODUCTS][i / 4 % Weight::PRODUCTS][i % 4] = 0.f;
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
    load_chunk_if(bits, x + own.row[i] * stride + at, own.row[i] >= 0 && at < k);
    return bits;
  }
};
