// The products of wgmma (sm_90a): D[64 x N] = A[64 x 16] B[16 x N] (+ D) with fp32 sums, by the 128
// threads of a warpgroup. B comes from shared memory, A from there or from registers; what lies in
// shared memory is named by a descriptor (wgmma.cuh).
//
//   wgmma_shared<T, TRANS_A, TRANS_B>(d, a, b, add)      add 0: D is overwritten
//   wgmma_registers<T, TRANS_B>(d, a, b)                 A as mma's (mma.cuh), 16 rows a warp
//
// TRANS: the operand is MN-major, else K-major. Warp w of the group holds rows 16w .. 16w + 15 of
// D, lane (g, t) with g = lane / 4, t = lane % 4 as in mma's D fragments, d[n] for columns 8n .. 8n
// + 7:
//
//   D (fp32)               n: 2t       2t+1
//     row 16w + g             d[n][0]  d[n][1]
//     row 16w + g + 8         d[n][2]  d[n][3]
//
// Nothing may touch d or a until wgmma_wait has covered the product.
#pragma once
#include "prelude.cuh"
#include "ptx/wgmma_lists.cuh"

template <typename T, int N>
struct Wgmma;  // for fp16 and bf16; N: multiples of 16 up to 256, and of 8 from 64 to 160

template <typename T, bool TRANS_A, bool TRANS_B, int N>
__device__ __forceinline__ void wgmma_shared(float (&d)[N][4], u64 a, u64 b, int add) {
  Wgmma<T, 8 * N>::template shared<TRANS_A, TRANS_B>(d, a, b, add);
}
template <typename T, bool TRANS_B, int N>
__device__ __forceinline__ void wgmma_registers(float (&d)[N][4], const u32 (&a)[4], u64 b) {
  Wgmma<T, 8 * N>::template registers<TRANS_B>(d, a, b);
}

// P0 .. P5: the numbers of the inputs.
// PTX ISA: wgmma.mma_async.sync.aligned.m64nNk16
#define WGMMA_OF(T, TYPE, N, P0, P1, P2, P3, P4, P5)                                             \
  template <>                                                                                    \
  struct Wgmma<T, N> {                                                                           \
    template <bool TRANS_A, bool TRANS_B>                                                        \
    __device__ __forceinline__ static void shared(float (&d)[N / 8][4], u64 a, u64 b, int add) { \
      asm volatile(                                                                              \
          "{\n"                                                                                  \
          ".reg .pred add;\n"                                                                    \
          "setp.ne.b32 add, %" #P2                                                               \
          ", 0;\n"                                                                               \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" WGMMA_NAMES_##N   \
          "}, %" #P0 ", %" #P1 ", add, 1, 1, %" #P3 ", %" #P4                                    \
          ";\n"                                                                                  \
          "}"                                                                                    \
          : WGMMA_SUMS_##N("+f")                                                                 \
          : "l"(a), "l"(b), "r"(add), "n"(TRANS_A), "n"(TRANS_B));                               \
    }                                                                                            \
    template <bool TRANS_B>                                                                      \
    __device__ __forceinline__ static void registers(float (&d)[N / 8][4], const u32 (&a)[4],    \
                                                     u64 b) {                                    \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE               \
                   " {" WGMMA_NAMES_##N "}, {%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4     \
                                        ", 1, 1, 1, %" #P5 ";"                                   \
                   : WGMMA_SUMS_##N("+f")                                                        \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TRANS_B));          \
    }                                                                                            \
  };
#define WGMMA(...) WGMMA_OF(fp16, "f16", __VA_ARGS__) WGMMA_OF(bf16, "bf16", __VA_ARGS__)

WGMMA_SIZES(WGMMA)
WGMMA(176, 88, 89, 90, 91, 92, 93)
WGMMA(208, 104, 105, 106, 107, 108, 109)
WGMMA(224, 112, 113, 114, 115, 116, 117)
WGMMA(240, 120, 121, 122, 123, 124, 125)

#undef WGMMA
#undef WGMMA_OF
