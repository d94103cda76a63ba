// mma.sync of bytes as mma.sync of 16-bit elements that are pairs of bytes: neighbours in k.
//
// The fragments of m16n8k32 are those of m16n8k16 (ptx/mma.cuh) with two bytes where that has an
// element of 16 bits, so tiles, swizzles and ldmatrix are the same, and k counts pairs:
//
//   A (row)             bytes of k: 4t ... 4t+3   4t+16 ... 4t+19
//     row g               a[0]                      a[2]
//     row g + 8           a[1]                      a[3]
//
//   mma_m16n8k16<e4m3_pair>(d, a, b0, b1)      fp32 sums
//   mma_m16n8k16<e4m3_e5m2>(d, a, b0, b1)      the same, b is e5m2
//   mma_m16n8k16<i8_pair>(d, a, b0, b1)        exact sums: d holds the bits of an int
#pragma once
#include "ptx/mma.cuh"

struct e4m3_pair {
  u16 bits;
};
struct e4m3_e5m2 {
  u16 bits;
};
struct i8_pair {
  u16 bits;
};

// PTX ISA: mma.sync.aligned.m16n8k32 (.e4m3 needs sm_89)
template <>
__device__ __forceinline__ void mma_m16n8k16<e4m3_pair>(float (&d)[4], const u32 (&a)[4], u32 b0,
                                                        u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// PTX ISA: mma.sync.aligned.m16n8k32 (.e5m2 needs sm_89)
template <>
__device__ __forceinline__ void mma_m16n8k16<e4m3_e5m2>(float (&d)[4], const u32 (&a)[4], u32 b0,
                                                        u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e5m2.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 16 bytes of k: a holds rows g and g + 8, bytes 4t ... 4t+3; d the bits of ints.
// PTX ISA: mma.sync.aligned.m16n8k16 (.s8 needs sm_80)
__device__ __forceinline__ void mma_16_bytes_s8(float (&d)[4], const u32 (&a)[2], u32 b) {
  int s[4] = {__float_as_int(d[0]), __float_as_int(d[1]), __float_as_int(d[2]),
              __float_as_int(d[3])};
  asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 "
      "{%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+r"(s[0]), "+r"(s[1]), "+r"(s[2]), "+r"(s[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
#pragma unroll
  for (int i = 0; i < 4; ++i) d[i] = __int_as_float(s[i]);
}

// PTX ISA: mma.sync.aligned.m16n8k32 (.s8 needs sm_80)
template <>
__device__ __forceinline__ void mma_m16n8k16<i8_pair>(float (&d)[4], const u32 (&a)[4], u32 b0,
                                                      u32 b1) {
  int s[4] = {__float_as_int(d[0]), __float_as_int(d[1]), __float_as_int(d[2]),
              __float_as_int(d[3])};
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(s[0]), "+r"(s[1]), "+r"(s[2]), "+r"(s[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#pragma unroll
  for (int i = 0; i < 4; ++i) d[i] = __int_as_float(s[i]);
}
