// Bytes of two words in any order (every architecture).
#pragma once
#include "prelude.cuh"

// Nibble i of the selector names byte i: 0 to 3 of a, 4 to 7 of b; 8 more, and all eight bits are that
// byte's sign (which __byte_perm cannot).                                          PTX ISA: prmt.b32
template <u32 SELECTOR>
__device__ __forceinline__ u32 permute_bytes(u32 a, u32 b) {
  u32 made;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(made) : "r"(a), "r"(b), "n"(SELECTOR));
  return made;
}
