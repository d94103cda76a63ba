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
#include "ptx/wgmma_lists.cuh"

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

// P0 .. P5: the numbers of the inputs. SCALES: signs of both operands, which integers have not.
// PTX ISA: wgmma.mma_async.sync.aligned.m64nNk32
#define WGMMA_BYTES(SUM, C, E5M2, TYPES, SCALES, N, P0, P1, P2, P3, P4, P5)                        \
  template <>                                                                                      \
  struct WgmmaBytes<SUM, N, E5M2> {                                                                \
    __device__ __forceinline__ static void multiply(SUM (&d)[N / 8][4], u64 a, u64 b, int add) {   \
      asm volatile(                                                                                \
          "{\n"                                                                                    \
          ".reg .pred add;\n"                                                                      \
          "setp.ne.b32 add, %" #P2                                                                 \
          ", 0;\n"                                                                                 \
          "wgmma.mma_async.sync.aligned.m64n" #N "k32." TYPES " {" WGMMA_NAMES_##N                 \
          "}, %" #P0 ", %" #P1 ", add" SCALES                                                      \
          ";\n"                                                                                    \
          "}"                                                                                      \
          : WGMMA_SUMS_##N(C)                                                                      \
          : "l"(a), "l"(b), "r"(add));                                                             \
    }                                                                                              \
    __device__ __forceinline__ static void registers(SUM (&d)[N / 8][4], const u32 (&a)[4], u64 b, \
                                                     int add) {                                    \
      asm volatile(                                                                                \
          "{\n"                                                                                    \
          ".reg .pred add;\n"                                                                      \
          "setp.ne.b32 add, %" #P5                                                                 \
          ", 0;\n"                                                                                 \
          "wgmma.mma_async.sync.aligned.m64n" #N "k32." TYPES " {" WGMMA_NAMES_##N                 \
          "}, {%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4 ", add" SCALES                      \
          ";\n"                                                                                    \
          "}"                                                                                      \
          : WGMMA_SUMS_##N(C)                                                                      \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                         \
    }                                                                                              \
  };
#define WGMMA(...)                                                        \
  WGMMA_BYTES(float, "+f", false, "f32.e4m3.e4m3", ", 1, 1", __VA_ARGS__) \
  WGMMA_BYTES(float, "+f", true, "f32.e4m3.e5m2", ", 1, 1", __VA_ARGS__)  \
  WGMMA_BYTES(int, "+r", false, "s32.s8.s8", "", __VA_ARGS__)

WGMMA_SIZES(WGMMA)

#undef WGMMA
#undef WGMMA_BYTES
