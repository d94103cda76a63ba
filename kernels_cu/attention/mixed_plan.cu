/* Which sequences of a mixed batch have more than one new token: what the prefill of it works on.
   Those of one are decoding's.

     long_sequences = how many, then their numbers, rising

   Lengths are read on the device, so that a captured graph follows other batches. One block; a
   thread a sequence, THREADS at a time. Every architecture. */
#include "prelude.cuh"

constexpr int THREADS = ${threads};
constexpr int WARPS = THREADS / WARP_SIZE;

static_assert(THREADS % WARP_SIZE == 0 && WARPS <= WARP_SIZE, "a lane adds up a warp's");

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_mixed_plan(const int* __restrict__ cu_seqlens_q,  // [batch + 1]
                         int* __restrict__ long_sequences,      // [1 + batch]
                         const int batch) {
  __shared__ int counts[2][WARPS];
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  int before = 0;  // found in earlier rounds
  for (int first = 0, round = 0; first < batch; first += THREADS, ++round) {
    const int number = first + threadIdx.x;
    const bool is_long = number < batch && cu_seqlens_q[number + 1] - cu_seqlens_q[number] > 1;
    const u32 found = __ballot_sync(FULL_MASK, is_long);
    if (lane == 0) counts[round % 2][warp] = __popc(found);
    __syncthreads();
    int place = before;
    for (int other = 0; other < WARPS; ++other) {
      const int count = counts[round % 2][other];
      place += other < warp ? count : 0, before += count;
    }
    if (is_long) long_sequences[1 + place + __popc(found & ((1u << lane) - 1))] = number;
  }
  if (threadIdx.x == 0) long_sequences[0] = before;
}
