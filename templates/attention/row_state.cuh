// Attention that goes on where it stopped, with other keys: of a row are kept o, in fp32, and lse.
//
//   before    o, lse                     exp(lse) is the sum of all exponentials so far
//   found     acc, max, sum              of the keys of this call
//   after     lse' = log(exp(lse) + sum exp(max)),   o' = exp(lse - lse') o + exp(max - lse') acc
//
// What was before is asked for when a tile begins, so that it lies in L2, and read when the tile
// ends: nothing waits for it in between. A row with an lse of -inf has seen no key, and what its o
// holds is not looked at. Rows that are done have their o rounded, in another array; those that are
// not keep it where it was.
#pragma once
#include "ptx/memory.cuh"
#include "attention/online_softmax.cuh"
#include "attention/store_sums.cuh"

// Rows of a warp, from its first one on.
template <typename T>
struct RowState {
  float* sums;  // o so far
  i64 sums_stride;
  T* o;  // of rows done_first .. done_end - 1
  i64 o_stride;
  float* lse;         // so far
  int columns, rows;  // that there are; of columns a multiple of eight
  int done_first, done_end;

  // lse: [batch, heads, lse_length].
  __device__ __forceinline__ RowState(float* sums, const Strides& sums_strides, T* o,
                                      const Strides& o_strides, float* lse, int heads,
                                      int lse_length, int columns, int batch, int head, int row,
                                      int all_rows, int done_first, int done_end)
      : sums(sums + batch * sums_strides.batch + head * sums_strides.head + row * sums_strides.row),
        sums_stride(sums_strides.row),
        o(o + batch * o_strides.batch + head * o_strides.head + row * o_strides.row),
        o_stride(o_strides.row),
        lse(lse + static_cast<i64>(batch * heads + head) * lse_length + row),
        columns(columns),
        rows(all_rows - row),
        done_first(done_first - row),
        done_end(min(done_end, all_rows) - row) {}

  // ROWS rows are wanted soon. By whole warps.
  template <int ROWS>
  __device__ __forceinline__ void prefetch(int lane) const {
    constexpr int LINE = 128 / sizeof(float), LANES_A_ROW = 4;
#pragma unroll
    for (int i = 0; i < ROWS; i += WARP_SIZE / LANES_A_ROW) {
      const int row = i + lane / LANES_A_ROW;
      if (row >= rows) continue;
      for (int n = lane % LANES_A_ROW * LINE; n < columns; n += LANES_A_ROW * LINE)
        prefetch_l2(sums + row * sums_stride + n);
    }
  }

  // After the last tile: 16-row block m, with what was before, to where each row belongs.
  template <int COLUMNS, typename Softmax>
  __device__ __forceinline__ void finish(float (&acc)[COLUMNS][4], const Softmax& softmax, int m,
                                         float scale_log2, int lane) const {
    static_assert(Softmax::RAISED == 0, "sums are those of exponentials below the maximum");
    const int row0 = m * 16;
    float own[2], old[2];  // weights of acc, and of what was before: at first its sum
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row0 + lane / 4 + half * 8;
      old[half] = i < rows ? lse[i] * LOG2E : NEG_INFINITY;
    }
    __syncwarp();  // lanes of a quad have read the lse that one of them writes
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row0 + lane / 4 + half * 8;
      const float sum = softmax.total(m, half), top = softmax.top(m, half, scale_log2);
      const float before = old[half];
      const float frame = sum == 0.f ? before : fmaxf(before, top);  // NEG_INFINITY: nothing at all
      const bool nothing = frame == NEG_INFINITY;
      own[half] = sum == 0.f ? 0.f : exp2_fast(top - frame);
      old[half] = nothing ? 0.f : exp2_fast(before - frame);
      const float total = fmaf(own[half], sum, old[half]);
      const float inverse = nothing ? 0.f : 1.f / total;
      own[half] *= inverse, old[half] *= inverse;
      if (lane % 4 == 0 && i < rows) lse[i] = nothing ? NEG_INFINITY : (frame + log2f(total)) * LN2;
    }
    const auto is_done = [&](int i) { return row0 + i >= done_first && row0 + i < done_end; };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row0 + lane / 4 + half * 8;
      const bool seen = i < rows && old[half] != 0.f, kept = i < rows && !is_done(i - row0);
      float* const at = sums + i * sums_stride + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < COLUMNS; n += AT_ONCE) {
        float2 was[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j)
          was[j] = load_pair_if(at + (n + j) * 8, seen && (n + j) * 8 < columns);
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
          float* const pair = &acc[n + j][2 * half];
          pair[0] = fmaf(was[j].x, old[half], pair[0] * own[half]);
          pair[1] = fmaf(was[j].y, old[half], pair[1] * own[half]);
          if (kept && (n + j) * 8 < columns)
            *reinterpret_cast<float2*>(at + (n + j) * 8) = make_float2(pair[0], pair[1]);
        }
      }
    }
    const float one[2] = {1.f, 1.f};
    if (done_first < row0 + 16 && done_end > row0)
      store_block(o + row0 * o_stride, o_stride, acc, one, lane, columns, is_done);
  }

 private:
  static constexpr int AT_ONCE = 4;  // pairs of columns, of all registers that there are
};
