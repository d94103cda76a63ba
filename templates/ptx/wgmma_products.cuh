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

// An asm statement names all N / 2 sums of a thread: %0, %1 ... in its text (NAMES_N), d[i][j]
// behind it (SUMS_N). Each list is the one before it and some more; inputs come after them.
#define NAMES_16 "%0,%1,%2,%3,%4,%5,%6,%7"
#define NAMES_32 NAMES_16 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define NAMES_48 NAMES_32 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define NAMES_64 NAMES_48 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES_72 NAMES_64 ",%32,%33,%34,%35"
#define NAMES_80 NAMES_64 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define NAMES_88 NAMES_80 ",%40,%41,%42,%43"
#define NAMES_96 NAMES_80 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define NAMES_104 NAMES_96 ",%48,%49,%50,%51"
#define NAMES_112 NAMES_96 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define NAMES_120 NAMES_112 ",%56,%57,%58,%59"
#define NAMES_128 NAMES_112 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define NAMES_136 NAMES_128 ",%64,%65,%66,%67"
#define NAMES_144 NAMES_128 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define NAMES_152 NAMES_144 ",%72,%73,%74,%75"
#define NAMES_160 NAMES_144 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define NAMES_176 NAMES_160 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define NAMES_192 NAMES_176 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define NAMES_208 NAMES_192 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define NAMES_224 NAMES_208 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define NAMES_240 NAMES_224 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define NAMES_256 NAMES_240 ",%120,%121,%122,%123,%124,%125,%126,%127"
#define EIGHT(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define SIXTEEN(i) EIGHT(i), EIGHT(i + 1)
#define SUMS_16 SIXTEEN(0)
#define SUMS_32 SUMS_16, SIXTEEN(2)
#define SUMS_48 SUMS_32, SIXTEEN(4)
#define SUMS_64 SUMS_48, SIXTEEN(6)
#define SUMS_72 SUMS_64, EIGHT(8)
#define SUMS_80 SUMS_64, SIXTEEN(8)
#define SUMS_88 SUMS_80, EIGHT(10)
#define SUMS_96 SUMS_80, SIXTEEN(10)
#define SUMS_104 SUMS_96, EIGHT(12)
#define SUMS_112 SUMS_96, SIXTEEN(12)
#define SUMS_120 SUMS_112, EIGHT(14)
#define SUMS_128 SUMS_112, SIXTEEN(14)
#define SUMS_136 SUMS_128, EIGHT(16)
#define SUMS_144 SUMS_128, SIXTEEN(16)
#define SUMS_152 SUMS_144, EIGHT(18)
#define SUMS_160 SUMS_144, SIXTEEN(18)
#define SUMS_176 SUMS_160, SIXTEEN(20)
#define SUMS_192 SUMS_176, SIXTEEN(22)
#define SUMS_208 SUMS_192, SIXTEEN(24)
#define SUMS_224 SUMS_208, SIXTEEN(26)
#define SUMS_240 SUMS_224, SIXTEEN(28)
#define SUMS_256 SUMS_240, SIXTEEN(30)

// P0 .. P5: the numbers of the inputs.
// PTX ISA: wgmma.mma_async.sync.aligned.m64nNk16
#define WGMMA_OF(T, TYPE, N, P0, P1, P2, P3, P4, P5)                                              \
  template <>                                                                                     \
  struct Wgmma<T, N> {                                                                            \
    template <bool TRANS_A, bool TRANS_B>                                                         \
    __device__ __forceinline__ static void shared(float (&d)[N / 8][4], u64 a, u64 b, int add) {  \
      asm volatile(                                                                               \
          "{\n"                                                                                   \
          ".reg .pred add;\n"                                                                     \
          "setp.ne.b32 add, %" #P2                                                                \
          ", 0;\n"                                                                                \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" NAMES_##N          \
          "}, %" #P0 ", %" #P1 ", add, 1, 1, %" #P3 ", %" #P4                                     \
          ";\n"                                                                                   \
          "}"                                                                                     \
          : SUMS_##N                                                                              \
          : "l"(a), "l"(b), "r"(add), "n"(TRANS_A), "n"(TRANS_B));                                \
    }                                                                                             \
    template <bool TRANS_B>                                                                       \
    __device__ __forceinline__ static void registers(float (&d)[N / 8][4], const u32 (&a)[4],     \
                                                     u64 b) {                                     \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" NAMES_##N \
                   "}, {%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4 ", 1, 1, 1, %" #P5 ";"    \
                   : SUMS_##N                                                                     \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TRANS_B));           \
    }                                                                                             \
  };
#define WGMMA(...) WGMMA_OF(fp16, "f16", __VA_ARGS__) WGMMA_OF(bf16, "bf16", __VA_ARGS__)

WGMMA(16, 8, 9, 10, 11, 12, 13)
WGMMA(32, 16, 17, 18, 19, 20, 21)
WGMMA(48, 24, 25, 26, 27, 28, 29)
WGMMA(64, 32, 33, 34, 35, 36, 37)
WGMMA(72, 36, 37, 38, 39, 40, 41)
WGMMA(80, 40, 41, 42, 43, 44, 45)
WGMMA(88, 44, 45, 46, 47, 48, 49)
WGMMA(96, 48, 49, 50, 51, 52, 53)
WGMMA(104, 52, 53, 54, 55, 56, 57)
WGMMA(112, 56, 57, 58, 59, 60, 61)
WGMMA(120, 60, 61, 62, 63, 64, 65)
WGMMA(128, 64, 65, 66, 67, 68, 69)
WGMMA(136, 68, 69, 70, 71, 72, 73)
WGMMA(144, 72, 73, 74, 75, 76, 77)
WGMMA(152, 76, 77, 78, 79, 80, 81)
WGMMA(160, 80, 81, 82, 83, 84, 85)
WGMMA(176, 88, 89, 90, 91, 92, 93)
WGMMA(192, 96, 97, 98, 99, 100, 101)
WGMMA(208, 104, 105, 106, 107, 108, 109)
WGMMA(224, 112, 113, 114, 115, 116, 117)
WGMMA(240, 120, 121, 122, 123, 124, 125)
WGMMA(256, 128, 129, 130, 131, 132, 133)

#undef WGMMA
#undef WGMMA_OF
#undef EIGHT
#undef SIXTEEN
#undef NAMES_16
#undef NAMES_32
#undef NAMES_48
#undef NAMES_64
#undef NAMES_72
#undef NAMES_80
#undef NAMES_88
#undef NAMES_96
#undef NAMES_104
#undef NAMES_112
#undef NAMES_120
#undef NAMES_128
#undef NAMES_136
#undef NAMES_144
#undef NAMES_152
#undef NAMES_160
#undef NAMES_176
#undef NAMES_192
#undef NAMES_208
#undef NAMES_224
#undef NAMES_240
#undef NAMES_256
#undef SUMS_16
#undef SUMS_32
#undef SUMS_48
#undef SUMS_64
#undef SUMS_72
#undef SUMS_80
#undef SUMS_88
#undef SUMS_96
#undef SUMS_104
#undef SUMS_112
#undef SUMS_120
#undef SUMS_128
#undef SUMS_136
#undef SUMS_144
#undef SUMS_152
#undef SUMS_160
#undef SUMS_176
#undef SUMS_192
#undef SUMS_208
#undef SUMS_224
#undef SUMS_240
#undef SUMS_256
