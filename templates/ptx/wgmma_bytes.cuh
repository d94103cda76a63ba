// Products of bytes by wgmma (sm_90a): D[64 x N] = A[64 x 32] B[32 x N] (+ D), both operands K-major,
// by the 128 threads of a warpgroup. Descriptors are those of 16-bit elements (ptx/wgmma.cuh): rows of
// 128 bytes with the 128-byte swizzle; the next 32 of k are 32 bytes further on. D is as in
// ptx/wgmma_products.cuh, A in registers as mma's (ptx/mma_8bit.cuh), 16 rows a warp.
//
//   wgmma_bytes(d, a, b, add)               A in shared memory; add 0: D is overwritten
//   wgmma_bytes_registers(d, a, b, add)     A in registers; <true>: B is e5m2
//
//   float d   e4m3; the tensor core adds with fewer bits than fp32 has (some 14 of fraction): add up
//             sums of few k in fp32 where that is not enough
//   int d     s8, exact
//
// Nothing may touch d until wgmma_wait has covered the product.
#pragma once
#include "prelude.cuh"

template <typename Sum, int N, bool E5M2 = false>
struct WgmmaBytes;  // N: 16, 32, 48, multiples of 8 from 64 to 160, 192, 256

template <typename Sum, int N>
__device__ __forceinline__ void wgmma_bytes(Sum (&d)[N][4], u64 a, u64 b, int add) {
  WgmmaBytes<Sum, 8 * N>::multiply(d, a, b, add);
}

template <bool E5M2 = false, int N>
__device__ __forceinline__ void wgmma_bytes_registers(float (&d)[N][4], const u32 (&a)[4], u64 b,
                                                      int add) {
  WgmmaBytes<float, 8 * N, E5M2>::registers(d, a, b, add);
}

// A tile whose rows have ROW_BYTES bytes with the swizzle of as many, as a descriptor (ptx/wgmma.cuh);
// the next 32 of k are 32 bytes further on. PTX ISA: matrix descriptor
template <int ROW_BYTES>
__device__ __forceinline__ u64 wgmma_bytes_tile(u32 address) {
  constexpr u64 SWIZZLE = ROW_BYTES == 128 ? 1 : ROW_BYTES == 64 ? 2 : 3;
  return SWIZZLE << 62 | static_cast<u64>(8 * ROW_BYTES >> 4) << 32 | (address & 0x3FFFF) >> 4;
}

// Integer fragments, before wgmma reads or writes them (ptx/register_fence.cuh has those of float).
template <int N>
__device__ __forceinline__ void register_fence(int (&x)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    asm volatile("" : "+r"(x[i][0]), "+r"(x[i][1]), "+r"(x[i][2]), "+r"(x[i][3])::"memory");
}

// An asm statement names all N / 2 sums of a thread: %0, %1 ... in its text (NAMES_N), d[i][j]
// behind it (SUMS_N), C being "+f" or "+r".
#define NAMES_16 "%0,%1,%2,%3,%4,%5,%6,%7"
#define NAMES_32 NAMES_16 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define NAMES_48 NAMES_32 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define NAMES_64 NAMES_48 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES_72 NAMES_64 ",%32,%33,%34,%35"
#define NAMES_80 NAMES_72 ",%36,%37,%38,%39"
#define NAMES_88 NAMES_80 ",%40,%41,%42,%43"
#define NAMES_96 NAMES_88 ",%44,%45,%46,%47"
#define NAMES_104 NAMES_96 ",%48,%49,%50,%51"
#define NAMES_112 NAMES_104 ",%52,%53,%54,%55"
#define NAMES_120 NAMES_112 ",%56,%57,%58,%59"
#define NAMES_128 NAMES_120 ",%60,%61,%62,%63"
#define NAMES_136 NAMES_128 ",%64,%65,%66,%67"
#define NAMES_144 NAMES_136 ",%68,%69,%70,%71"
#define NAMES_152 NAMES_144 ",%72,%73,%74,%75"
#define NAMES_160 NAMES_152 ",%76,%77,%78,%79"
#define NAMES_192 NAMES_160 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define NAMES_256                                                                          \
  NAMES_192                                                                                \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113" \
  ",%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define FOUR(C, i) C(d[i][0]), C(d[i][1]), C(d[i][2]), C(d[i][3])
#define SIXTEEN(C, i) FOUR(C, i), FOUR(C, i + 1), FOUR(C, i + 2), FOUR(C, i + 3)
#define SUMS_16(C) FOUR(C, 0), FOUR(C, 1)
#define SUMS_32(C) SUMS_16(C), FOUR(C, 2), FOUR(C, 3)
#define SUMS_48(C) SUMS_32(C), FOUR(C, 4), FOUR(C, 5)
#define SUMS_64(C) SUMS_48(C), FOUR(C, 6), FOUR(C, 7)
#define SUMS_72(C) SUMS_64(C), FOUR(C, 8)
#define SUMS_80(C) SUMS_72(C), FOUR(C, 9)
#define SUMS_88(C) SUMS_80(C), FOUR(C, 10)
#define SUMS_96(C) SUMS_88(C), FOUR(C, 11)
#define SUMS_104(C) SUMS_96(C), FOUR(C, 12)
#define SUMS_112(C) SUMS_104(C), FOUR(C, 13)
#define SUMS_120(C) SUMS_112(C), FOUR(C, 14)
#define SUMS_128(C) SUMS_120(C), FOUR(C, 15)
#define SUMS_136(C) SUMS_128(C), FOUR(C, 16)
#define SUMS_144(C) SUMS_136(C), FOUR(C, 17)
#define SUMS_152(C) SUMS_144(C), FOUR(C, 18)
#define SUMS_160(C) SUMS_152(C), FOUR(C, 19)
#define SUMS_192(C) SUMS_160(C), SIXTEEN(C, 20)
#define SUMS_256(C) SUMS_192(C), SIXTEEN(C, 24), SIXTEEN(C, 28)

// P0 .. P5: the numbers of the inputs. SCALES: signs of both operands, which integers have not.
// PTX ISA: wgmma.mma_async.sync.aligned.m64nNk32
#define WGMMA_BYTES(SUM, C, E5M2, TYPES, SCALES, N, P0, P1, P2, P3, P4, P5)                              \
  template <>                                                                                      \
  struct WgmmaBytes<SUM, N, E5M2> {                                                                      \
    __device__ __forceinline__ static void multiply(SUM (&d)[N / 8][4], u64 a, u64 b, int add) {   \
      asm volatile(                                                                                \
          "{\n"                                                                                    \
          ".reg .pred add;\n"                                                                      \
          "setp.ne.b32 add, %" #P2                                                                 \
          ", 0;\n"                                                                                 \
          "wgmma.mma_async.sync.aligned.m64n" #N "k32." TYPES " {" NAMES_##N "}, %" #P0 ", %" #P1  \
                                                                             ", add" SCALES        \
                                                                             ";\n"                 \
                                                                             "}"                   \
          : SUMS_##N(C)                                                                            \
          : "l"(a), "l"(b), "r"(add));                                                             \
    }                                                                                              \
    __device__ __forceinline__ static void registers(SUM (&d)[N / 8][4], const u32 (&a)[4], u64 b, \
                                                     int add) {                                    \
      asm volatile(                                                                                \
          "{\n"                                                                                    \
          ".reg .pred add;\n"                                                                      \
          "setp.ne.b32 add, %" #P5                                                                 \
          ", 0;\n"                                                                                 \
          "wgmma.mma_async.sync.aligned.m64n" #N "k32." TYPES " {" NAMES_##N                       \
          "}, {%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4 ", add" SCALES                      \
          ";\n"                                                                                    \
          "}"                                                                                      \
          : SUMS_##N(C)                                                                            \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                         \
    }                                                                                              \
  };
#define WGMMA(...)                                                 \
  WGMMA_BYTES(float, "+f", false, "f32.e4m3.e4m3", ", 1, 1", __VA_ARGS__) \
  WGMMA_BYTES(float, "+f", true, "f32.e4m3.e5m2", ", 1, 1", __VA_ARGS__) \
  WGMMA_BYTES(int, "+r", false, "s32.s8.s8", "", __VA_ARGS__)

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
WGMMA(192, 96, 97, 98, 99, 100, 101)
WGMMA(256, 128, 129, 130, 131, 132, 133)

#undef WGMMA
#undef WGMMA_BYTES
#undef FOUR
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
#undef NAMES_192
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
#undef SUMS_192
#undef SUMS_256
