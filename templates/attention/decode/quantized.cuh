// Scores and output from keys and values of one byte, e4m3 or int8, which become 16-bit numbers on
// their way from shared memory to the tensor cores. The scales of a head are the caller's: that of
// keys belongs to the scores, that of values to the output.
//
// ldmatrix takes two codes for one 16-bit number. A lane (g, t) that would hold columns 2t, 2t + 1
// of a fragment holds four codes, 4t .. 4t + 3, which are made two registers:
//
//   keys     codes 4t, 4t+1 stand where columns 2t, 2t+1 do, and 4t+2, 4t+3 where 2t+8, 2t+9 do.
//            The sum over columns is the same if the queries are in that order, too
//            (permuted_word).
//   values   .trans brings two neighbouring columns of two keys. Those of even columns become one
//            fragment, those of odd columns another: fragments 2n, 2n + 1 of the output hold
//            columns 16n + 0, 2, 4 … 14 and 16n + 1, 3, 5 … 15, of which lane t has 4t, 4t+2 and
//            4t+1, 4t+3.
#pragma once
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"
#include "attention/mma.cuh"
#include "kv/storage.cuh"

// The 16-bit numbers of codes 0, 1 and of codes 2, 3.
template <typename S>
__device__ __forceinline__ void widen(u32 codes, u32& low, u32& high);

// int8: with 128 added, the low bits of 1024 + 128 + code in fp16.
template <>
__device__ __forceinline__ void widen<i8>(u32 codes, u32& low, u32& high) {
  const u32 raised = codes ^ 0x80808080u;
  const u32 zero = 0x64806480;  // 1152
  low = subtract_pairs<fp16>(__byte_perm(raised, 0x64646464u, 0x4140), zero);
  high = subtract_pairs<fp16>(__byte_perm(raised, 0x64646464u, 0x4342), zero);
}

// As T: every code is a number of fp16, and of bf16.
template <typename T>
__device__ __forceinline__ u32 as_pair(u32 halves) {
  if constexpr (SAME_TYPE<T, fp16>) return halves;
  const float2 pair = unpack2<fp16>(halves);
  return pack2<T>(pair.x, pair.y);
}

// Where word `word` (two columns) of chunk `chunk` of a row of queries goes: {chunk, word}.
__device__ __forceinline__ int2 permuted_word(int chunk, int word) {
  return {chunk / 2 * 2 + word % 2, chunk % 2 * 2 + word / 2};
}

// S = Q K^T of codes. As multiply_qk, but `k_reader` sees two codes as one number.
template <typename T, typename S, bool Q_IN_REGISTERS, int N, int STEPS, typename QReader,
          typename KReader>
__device__ __forceinline__ void multiply_q_codes(float (&s)[1][N][4],
                                                 u32 (&q_fragments)[STEPS][1][4], u32 q_tile,
                                                 const QReader& q_reader, u32 k_tile,
                                                 const KReader& k_reader) {
#pragma unroll
  for (int step = 0; step < STEPS; step += 2) {
    if (!Q_IN_REGISTERS) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        ldmatrix_x4(q_fragments[step + i][0], q_reader.address(q_tile, 0, step + i));
    }
#pragma unroll
    for (int n = 0; n < N / 2; ++n) {
      u32 codes[4], b[4];  // keys 0-7 and columns 0-15, keys 0-7 and columns 16-31, keys 8-15 …
      ldmatrix_x4(codes, k_reader.address(k_tile, n, step / 2));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        widen<S>(codes[i], b[0], b[1]);
        widen<S>(codes[i + 2], b[2], b[3]);
#pragma unroll
        for (int j = 0; j < 4; ++j) b[j] = as_pair<T>(b[j]);
        mma_16x16x16<T, 16>(s[0][2 * n], s[0][2 * n + 1], q_fragments[step + i][0], b);
      }
    }
  }
}

// O += exp2(S * scale_log2 - max) V, sixteen keys at a time, in fp16; adds the row sums on the way.
template <typename S, int N, int COLUMNS, typename VReader>
__device__ __forceinline__ void multiply_p_codes(float (&acc)[1][COLUMNS][4],
                                                 const float (&s)[1][N][4],
                                                 OnlineSoftmax<1>& softmax, float scale_log2,
                                                 u32 v_tile, const VReader& v_reader) {
#pragma unroll
  for (int step = 0; step < N / 2; ++step) {
    u32 p[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = &s[0][2 * step + i / 2][2 * (i % 2)];
      const float offset = softmax.offset(0, i % 2, scale_log2);
      const float low = exp2_fast(fmaf(pair[0], scale_log2, -offset));
      const float high = exp2_fast(fmaf(pair[1], scale_log2, -offset));
      softmax.row_sum[0][i % 2] += low + high;
      p[i] = pack2<fp16>(low, high);
    }
#pragma unroll
    for (int n = 0; n < COLUMNS / 4; ++n) {
      u32 codes[4], b[4];  // keys 0-7 and 8-15 of columns 0-15, then of columns 16-31
      ldmatrix_x4_trans(codes, v_reader.address(v_tile, step, n));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        widen<S>(__byte_perm(codes[2 * i], 0, 0x3120), b[0], b[2]);
        widen<S>(__byte_perm(codes[2 * i + 1], 0, 0x3120), b[1], b[3]);
        mma_16x16x16<fp16, 16>(acc[0][4 * n + 2 * i], acc[0][4 * n + 2 * i + 1], p, b);
      }
    }
  }
}

// S = Q K^T and O += P V for one tile of keys, as they are kept: numbers or codes.
template <typename T, typename S, bool Q_IN_REGISTERS, int N, int STEPS, typename QReader,
          typename KReader>
__device__ __forceinline__ void multiply_keys(float (&s)[1][N][4], u32 (&q_fragments)[STEPS][1][4],
                                              u32 q_tile, const QReader& q_reader, u32 k_tile,
                                              const KReader& k_reader) {
  if constexpr (sizeof(S) == 1) {
    multiply_q_codes<T, S, Q_IN_REGISTERS>(s, q_fragments, q_tile, q_reader, k_tile, k_reader);
  } else {
    multiply_qk<T, 16, Q_IN_REGISTERS>(s, q_fragments, q_tile, q_reader, k_tile, k_reader);
  }
}

template <typename T, typename S, int N, int COLUMNS, typename VReader>
__device__ __forceinline__ void multiply_values(float (&acc)[1][COLUMNS][4],
                                                const float (&s)[1][N][4],
                                                OnlineSoftmax<1>& softmax, float scale_log2,
                                                u32 v_tile, const VReader& v_reader) {
  if constexpr (sizeof(S) == 1) {
    multiply_p_codes<S>(acc, s, softmax, scale_log2, v_tile, v_reader);
  } else {
    multiply_pv<T, 16>(acc, s, softmax, scale_log2, v_tile, v_reader);
  }
}
