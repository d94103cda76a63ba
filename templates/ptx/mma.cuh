// Warp-wide matrix multiply-accumulate on 16-bit inputs, and tf32, with fp32 accumulators.
//
// mma.sync.m16n8k16, D[16x8] += A[16x16] * B[16x8]. With g = lane / 4 and t = lane % 4, a lane
// holds:
//
//   A (row)             k: 2t,2t+1   2t+8,2t+9        B (col)          n: g
//     row g               a[0]         a[2]             k: 2t, 2t+1      b0
//     row g + 8           a[1]         a[3]             k: 2t+8, 2t+9    b1
//
//   D (fp32)            n: 2t    2t+1
//     row g               d[0]    d[1]
//     row g + 8           d[2]    d[3]
//
// Two D fragments side by side (n = 0..7 and 8..15), packed to 16 bits, are an A fragment: the
// probabilities of attention go from one product into the next without leaving the registers.
#pragma once
#include "prelude.cuh"

template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1);

// PTX ISA: mma.sync.aligned.m16n8k16 (.f16 needs sm_80)
template <>
__device__ __forceinline__ void mma_m16n8k16<fp16>(float (&d)[4], const u32 (&a)[4], u32 b0,
                                                   u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// PTX ISA: mma.sync.aligned.m16n8k8 (.f16 from sm_75): half of a k16 step on the same fragments,
// a[0], a[1], b0 for k = 0..7 or a[2], a[3], b1 for k = 8..15.
__device__ __forceinline__ void mma_m16n8k8(float (&d)[4], u32 a0, u32 a1, u32 b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b));
}

// PTX ISA: mma.sync.aligned.m16n8k16 (.bf16 needs sm_80)
template <>
__device__ __forceinline__ void mma_m16n8k16<bf16>(float (&d)[4], const u32 (&a)[4], u32 b0,
                                                   u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// D[16x8] += A[16x8] * B[8x8] of tf32, each in the bits of an fp32. Fragments as above, with one k in
// place of two: a[0], a[1], b0 hold k = t, a[2], a[3], b1 k = t + 4.
// PTX ISA: mma.sync.aligned.m16n8k8 (.tf32 from sm_80)
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// An fp32 (its bits) rounded to the nearest tf32, ties away from zero.
// PTX ISA: cvt.rna.tf32.f32 (sm_80+)
__device__ __forceinline__ u32 nearest_tf32(u32 value) {
  u32 rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(value)));
  return rounded;
}

template <typename A, typename B>
constexpr bool SAME_TYPE = false;
template <typename A>
constexpr bool SAME_TYPE<A, A> = true;

// D[16x16] += A[16x16] * B[16x16]: d0 for n = 0..7 with b[0], b[1], d1 for n = 8..15 with b[2] and
// b[3]. MMA_K is the k of the instruction: 16, or 8 where that is all there is (sm_75). The halves
// of k take turns, so that no product waits for the one just before it.
template <typename T, int MMA_K>
__device__ __forceinline__ void mma_16x16x16(float (&d0)[4], float (&d1)[4], const u32 (&a)[4],
                                             const u32 (&b)[4]) {
  static_assert(MMA_K == 16 || MMA_K == 8, "the k of mma.m16n8k16 and mma.m16n8k8");
  static_assert(MMA_K == 16 || SAME_TYPE<T, fp16>, "sm_75 multiplies fp16 only");
  if constexpr (MMA_K == 16) {
    mma_m16n8k16<T>(d0, a, b[0], b[1]);
    mma_m16n8k16<T>(d1, a, b[2], b[3]);
  } else {
    mma_m16n8k8(d0, a[0], a[1], b[0]);
    mma_m16n8k8(d1, a[0], a[1], b[2]);
    mma_m16n8k8(d0, a[2], a[3], b[1]);
    mma_m16n8k8(d1, a[2], a[3], b[3]);
  }
}
