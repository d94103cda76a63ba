// The way out of a product whose results are codes: rows of fragments (D of ptx/mma.cuh), of which
// four lanes have 128 columns, get a scale each, as quantize gives them (quantize/scale.cuh).
//
//   a word      4 codes: columns 2t and 2t + 1 of two blocks of 8
//   a chunk     16 neighbouring codes of a row, of words that the four lanes have traded
#pragma once
#include "tile/quad_transpose.cuh"
#include "gemm/pairs.cuh"
#include "quantize/scale.cuh"

// Two neighbouring pairs of blocks as a word.
__device__ __forceinline__ u32 coded(float2 first, float2 second, const Divisor& scaled) {
  Elements<float, 4> some;
  some[0] = first.x, some[1] = first.y, some[2] = second.x, some[3] = second.y;
  return Quantized<e4m3>::encode<float, 4>(some, scaled).word;
}

// Words of four blocks of 16 columns, traded among four lanes: each has 16 columns.
__device__ __forceinline__ uint4 traded(const u32* words, int lane) {
  const uint4 w = quad_transpose(words, lane);  // columns 0 and 1, 2 and 3, ... of both eights
  return make_uint4(__byte_perm(w.x, w.y, 0x5410), __byte_perm(w.z, w.w, 0x5410),
                    __byte_perm(w.x, w.y, 0x7632), __byte_perm(w.z, w.w, 0x7632));
}

// A warp's rows, `row` being the first, of `rows`; `column` is a multiple of 128, and so is the number
// of columns. With a gate, whose sums are the first half of the blocks. out [rows, n], scales [rows,
// n / 128]; bias may be null. By whole warps.
template <int N, typename Pairs, typename T>
__device__ __forceinline__ void store_coded_rows(const float (&acc)[1][N][4], const Pairs& epilogue,
                                                 const T* __restrict__ bias, u8* __restrict__ out,
                                                 float* __restrict__ scales, int lane, int row,
                                                 int rows, int column) {
  constexpr int BLOCKS = N / 2, WIDTH = BLOCKS * 8;
  static_assert(Pairs::GATE && !Pairs::TOUCHES_ROWS && WIDTH == 128, "a scale is of 128 columns");
  const BiasPairs<T> bias_of(bias, epilogue.n, true);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const i64 r = row + lane / 4 + half * 8;
    float2 y[BLOCKS];
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
      const int at = column + i * 8 + lane % 4 * 2;
      const float *sums = &acc[0][i][half * 2], *up = &acc[0][i + BLOCKS][half * 2];
      y[i] = epilogue.activated({sums[0], sums[1]}, bias_of(at), {up[0], up[1]}, bias_of.up(at), r,
                                at);
      most = max(most,
                 max(__float_as_uint(y[i].x) & 0x7fffffffu, __float_as_uint(y[i].y) & 0x7fffffffu));
    }
    const float scale = scale_of<float, Fp8Codes>(lanes_most<4>(most));
    const Divisor scaled(scale);
#pragma unroll
    for (int i = 0; i < BLOCKS; i += 8) {
      u32 words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) words[j] = coded(y[i + 2 * j], y[i + 2 * j + 1], scaled);
      const uint4 chunk = traded(words, lane);
      if (r < rows)
        store_global_chunk(out + r * epilogue.n + column + i * 8 + lane % 4 * 16, chunk);
    }
    if (lane % 4 == 0 && r < rows) scales[r * (epilogue.n / WIDTH) + column / WIDTH] = scale;
  }
}
