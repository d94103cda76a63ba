// Words of global memory that many blocks write: reductions (red), which give nothing back, atomics
// (atom), which give what was there before, and loads and stores beside them. Of GPU scope, unless
// the name says that engines and other GPUs (system) take part.
//
//   relaxed   the word alone: what is written before or after has no order for others
//   release   what this thread wrote before is seen by whoever acquires the word
//   acquire   what was written before a release of the word is seen by this thread afterwards
//
// `inc` counts modulo `count`: after so many the counter is 0 again, and needs no clearing.
// PTX ISA: memory consistency model
#pragma once
#include "prelude.cuh"

// PTX ISA: red.relaxed.gpu.global.add.u64; `word`: a global address
__device__ __forceinline__ void red_add_relaxed(size_t word, u64 value) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// sum[i] += d[i], on a 16-byte boundary, in any order.
// PTX ISA: red.global.add, .v4.f32 from sm_90
__device__ __forceinline__ void red_add_floats(float* sum, const float (&d)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(sum), "f"(d[0]), "f"(d[1]),
               "f"(d[2]), "f"(d[3])
               : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) atomicAdd(sum + i, d[i]);
#endif
}

// Four neighbours of 16 bits, on an 8-byte boundary: each is rounded when something is added.
// PTX ISA: red.global.add.noftz.v2 of .f16x2 or .bf16x2 (sm_90)
template <typename T>
__device__ __forceinline__ void red_add_halves(T* sum, uint2 x);
template <>
__device__ __forceinline__ void red_add_halves<fp16>(fp16* sum, uint2 x) {
  asm volatile("red.global.add.noftz.v2.f16x2 [%0], {%1,%2};" ::"l"(sum), "r"(x.x), "r"(x.y)
               : "memory");
}
template <>
__device__ __forceinline__ void red_add_halves<bf16>(bf16* sum, uint2 x) {
  asm volatile("red.global.add.noftz.v2.bf16x2 [%0], {%1,%2};" ::"l"(sum), "r"(x.x), "r"(x.y)
               : "memory");
}

// PTX ISA: red.release.gpu.inc
__device__ __forceinline__ void red_inc_release(u32* counter, u32 count) {
  asm volatile("red.release.gpu.global.inc.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(counter)),
               "r"(count - 1)
               : "memory");
}

// PTX ISA: atom.relaxed.gpu.global.inc.u32
__device__ __forceinline__ u32 atom_inc_relaxed(u32* counter, u32 count) {
  u32 before;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(counter)), "r"(count - 1)
               : "memory");
  return before;
}

// PTX ISA: atom.acq_rel.gpu.global.inc.u32
__device__ __forceinline__ u32 atom_inc_acq_rel(u32* counter, u32 count) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(counter)), "r"(count - 1)
               : "memory");
  return before;
}

// PTX ISA: ld.acquire.gpu
__device__ __forceinline__ u32 load_acquire(const u32* counter) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
               : "=r"(value)
               : "l"(__cvta_generic_to_global(counter))
               : "memory");
  return value;
}

// PTX ISA: ld.acquire.sys
__device__ __forceinline__ u32 load_acquire_system(const u32* word) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];"
               : "=r"(value)
               : "l"(__cvta_generic_to_global(word))
               : "memory");
  return value;
}

// PTX ISA: red.release.sys.add
__device__ __forceinline__ void red_add_release_system(u32* word, u32 value) {
  asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(word)),
               "r"(value)
               : "memory");
}

// Two neighbouring words, at a global address on an 8-byte boundary.      PTX ISA: st.relaxed.gpu
__device__ __forceinline__ void store_zeros_relaxed(size_t words) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %1};" ::"l"(words), "r"(0) : "memory");
}

// `seen` becomes the two words if the highest bit of `skip` is 0, else it stays. Under a predicate,
// so that loads need not wait for one another.                            PTX ISA: ld.relaxed.gpu
__device__ __forceinline__ void load_relaxed_unless(uint2& seen, size_t words, u32 skip) {
  asm volatile(
      "{ .reg .pred needed; setp.ge.s32 needed, %3, 0;"
      " @needed ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2]; }"
      : "+r"(seen.x), "+r"(seen.y)
      : "l"(words), "r"(skip));
}

// Four words, each of which is one access.                   PTX ISA: ld.relaxed.gpu.global.v4.u32
__device__ __forceinline__ uint4 load_words(const u32* words) {
  uint4 x;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(__cvta_generic_to_global(words))
               : "memory");
  return x;
}

// One word.                                                     PTX ISA: ld.relaxed.gpu.global
__device__ __forceinline__ u32 load_word(const u32* word) {
  u32 x;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];"
               : "=r"(x)
               : "l"(__cvta_generic_to_global(word))
               : "memory");
  return x;
}
__device__ __forceinline__ u64 load_word(const u64* word) {
  u64 x;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];"
               : "=l"(x)
               : "l"(__cvta_generic_to_global(word))
               : "memory");
  return x;
}

// PTX ISA: st.relaxed.gpu.global
__device__ __forceinline__ void store_word(u32* word, u32 x) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(word)), "r"(x)
               : "memory");
}
__device__ __forceinline__ void store_word(u64* word, u64 x) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(word)), "l"(x)
               : "memory");
}
