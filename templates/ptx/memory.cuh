// Loads and stores of one thread, in the state space and width that are meant: shared memory by its
// 32-bit address, global memory past what the compiler would make of a pointer.
//
//   word 4 bytes      pair 8 bytes      chunk 16 bytes, on a boundary of as many
//
// Volatile: they stay in the order in which they are written, and each is made where it stands.
#pragma once
#include "prelude.cuh"

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// PTX ISA: ld.shared
__device__ __forceinline__ void load_shared(u16& word, u32 address) {
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(word) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_shared(u32& word, u32 address) {
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_shared(u64& word, u32 address) {
  asm volatile("ld.shared.u64 %0, [%1];" : "=l"(word) : "r"(address) : "memory");
}

// PTX ISA: ld.shared.b32
__device__ __forceinline__ u32 load_shared_word(u32 address) {
  u32 value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

// A number of 16 bits, in fp32.
template <typename T>
__device__ __forceinline__ float load_shared_number(u32 address) {
  u16 bits;
  load_shared(bits, address);
  return static_cast<float>(*reinterpret_cast<const T*>(&bits));
}

// A word that other threads write meanwhile.                      PTX ISA: ld.volatile.shared, st.volatile
__device__ __forceinline__ u32 load_shared_flag(u32 address) {
  u32 value;
  asm volatile("ld.volatile.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ void store_shared_flag(u32 address, u32 value) {
  asm volatile("st.volatile.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// PTX ISA: ld.shared.v2.f32
__device__ __forceinline__ float2 load_shared_pair(u32 address) {
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(pair.x), "=f"(pair.y)
               : "r"(address)
               : "memory");
  return pair;
}

// PTX ISA: ld.shared.v4.b32
__device__ __forceinline__ uint4 load_shared_chunk(u32 address) {
  uint4 value;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

// PTX ISA: ld.shared.v4.f32
__device__ __forceinline__ void load_shared_floats(float (&x)[4], u32 address) {
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "r"(address)
               : "memory");
}

// PTX ISA: st.shared.b32
__device__ __forceinline__ void store_shared_word(u32 address, u32 value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// PTX ISA: st.shared.v2.b32
__device__ __forceinline__ void store_shared_pair(u32 address, u32 x, u32 y) {
  asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(address), "r"(x), "r"(y) : "memory");
}

// PTX ISA: st.shared.v4.f32
__device__ __forceinline__ void store_shared_floats(u32 address, const float (&x)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
}

// PTX ISA: st.shared.v4.b32
__device__ __forceinline__ void store_shared_chunk(u32 address, uint4 value) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w)
               : "memory");
}

// PTX ISA: st.global.v4.b32
__device__ __forceinline__ void store_global_chunk(void* target, uint4 value) {
  asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(target), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w)
               : "memory");
}

// `chunk` becomes the 16 bytes at `source` if `there`, else it stays. A load under a predicate
// never waits: the compiler would branch, and behind branches loads come one after the other. PTX
// ISA: ld.global.v4.u32, predicated execution (@p)
__device__ __forceinline__ void load_chunk_if(uint4& chunk, const void* source, bool there) {
  asm volatile(
      "{ .reg .pred there; setp.ne.s32 there, %5, 0;"
      " @there ld.global.v4.u32 {%0, %1, %2, %3}, [%4]; }"
      : "+r"(chunk.x), "+r"(chunk.y), "+r"(chunk.z), "+r"(chunk.w)
      : "l"(__cvta_generic_to_global(source)), "r"(static_cast<int>(there)));
}

// Two floats, on an 8-byte boundary, if `there`, else zeros.
// PTX ISA: ld.global.v2.f32, predicated execution (@p)
__device__ __forceinline__ float2 load_pair_if(const void* source, bool there) {
  float2 pair = {0.f, 0.f};
  asm volatile(
      "{ .reg .pred there; setp.ne.s32 there, %3, 0; @there ld.global.v2.f32 {%0, %1}, [%2]; }"
      : "+f"(pair.x), "+f"(pair.y)
      : "l"(__cvta_generic_to_global(source)), "r"(static_cast<int>(there))
      : "memory");
  return pair;
}

// The same of what nobody writes while the kernel runs.             PTX ISA: ld.global.nc.v4.u32
__device__ __forceinline__ void load_constant_chunk_if(uint4& chunk, const void* source,
                                                       bool there) {
  asm volatile(
      "{ .reg .pred there; setp.ne.s32 there, %5, 0;"
      " @there ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4]; }"
      : "+r"(chunk.x), "+r"(chunk.y), "+r"(chunk.z), "+r"(chunk.w)
      : "l"(__cvta_generic_to_global(source)), "r"(static_cast<int>(there)));
}

// The 16 bytes at `source` if `there`, else zeros: of what is read once and written by nobody while
// the kernel runs. They take no place in L1, which is left to what comes again.
// PTX ISA: ld.global.nc.L1::no_allocate.v4.u32
__device__ __forceinline__ uint4 load_streamed_chunk_if(const void* source, bool there) {
  uint4 chunk = make_uint4(0, 0, 0, 0);
  asm volatile(
      "{ .reg .pred there; setp.ne.s32 there, %5, 0;"
      " @there ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4]; }"
      : "+r"(chunk.x), "+r"(chunk.y), "+r"(chunk.z), "+r"(chunk.w)
      : "l"(__cvta_generic_to_global(source)), "r"(static_cast<int>(there)));
  return chunk;
}

// 8 bytes, on their boundary, asked for where this stands. PTX ISA: ld.global.v2.b32
__device__ __forceinline__ uint2 load_eight_bytes(const void* source) {
  uint2 bits;
  asm volatile("ld.global.v2.b32 {%0, %1}, [%2];"
               : "=r"(bits.x), "=r"(bits.y)
               : "l"(__cvta_generic_to_global(source)));
  return bits;
}

// Four floats, on 16 bytes, asked for where this stands.                PTX ISA: ld.global.v4.f32
__device__ __forceinline__ float4 load_floats(const float* source) {
  float4 x;
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(__cvta_generic_to_global(source)));
  return x;
}

// The line that `address` is in comes to L2. That is no read: whoever writes there later is seen by
// those who read after him.                                         PTX ISA: prefetch.global.L2
__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(address)));
}
