/* What the gradients of a product start from, out of dy, the gradient of its result:

     dz    = dy * act'(z)                                   with GATE, of z = gate | up:
             dy * up * act'(gate) | dy * act(gate)
     dbias = column sums of dz
     y     = act(gate) * up, the result itself, for who did not keep it: with GATE alone

   A block has the columns of THREADS vectors. Its GROUPS of threads have a row each, and the block
   every gridDim.y-th of so many: a thread keeps its columns in all its rows, so that their sums stay
   in its registers. The groups' sums meet in shared memory, the blocks' as one row of partials each
   in memory; of the blocks of some columns the last one to finish adds them up, by groups again.
   All orders are fixed: dbias has the same bits at every call. Every architecture. */
#include "prelude.cuh"
//% if has_mod
#define EPILOGUE_EXPRESSION (${epilogue_mod})
#define EPILOGUE_DERIVATIVE (${epilogue_mod_grad})
//% endif
#include "ptx/pdl.cuh"
#include "tile/last_block.cuh"
#include "tile/row.cuh"
#include "gemm/activation.cuh"

using elem_t = ${dtype};
using out_t = ${out_dtype};
using activation_t = ${activation};
constexpr bool GATE = ${gate};
constexpr bool PLAIN = ${plain};    // dz is dy: nothing is read of z
constexpr bool VECTOR = ${vector};  // 16-byte accesses
constexpr int THREADS = ${threads}, GROUPS = ${groups};
constexpr int SIZE = 8, PAIRS = SIZE / 2;  // columns of a thread
constexpr int UNDERWAY = 8;                // rows of partials
constexpr bool WORDS = sizeof(elem_t) == 4 || sizeof(out_t) == 4;
constexpr int AT_ONCE = (GATE ? 2 : 4) / (WORDS || !VECTOR ? 2 : 1);  // rows of dy and z
constexpr int RESIDENT = GATE && WORDS && !VECTOR ? 3 : 4;  // groups that share a multiprocessor
static_assert(!(GATE && PLAIN), "a gate's gradients need z");

template <typename T>
using Columns = Row<T, THREADS, 1, SIZE, VECTOR>;

// dz of one number of z; of a gate and what it lets through.
__device__ __forceinline__ float slope(float dy, float z) { return dy * activation_t::slope(z); }
__device__ __forceinline__ float2 slopes(float dy, float gate, float up) {
  return {dy * up * activation_t::slope(gate), dy * activation_t::value(gate)};
}

// dy and z of a row -> dz and, with GATE, d_up and, in place of up, y.
__device__ __forceinline__ void differentiate(Columns<elem_t>& dz, Columns<elem_t>& d_up,
                                              Columns<float>& sums, Columns<float>& up_sums,
                                              Columns<out_t>& dy, Columns<elem_t>& z,
                                              Columns<elem_t>& up) {
#pragma unroll
  for (int pair = 0; pair < PAIRS; ++pair) {
    const float2 g = dy.get(0, pair), at = z.get(0, pair), sum = sums.get(0, pair);
    float2 made = g;
    if (GATE) {
      const float2 u = up.get(0, pair), up_sum = up_sums.get(0, pair);
      const float2 a = slopes(g.x, at.x, u.x), b = slopes(g.y, at.y, u.y);
      made = {a.x, b.x};
      d_up.set(0, pair, a.y, b.y);
      up.set(0, pair, activation_t::value(at.x) * u.x, activation_t::value(at.y) * u.y);
      up_sums.set(0, pair, up_sum.x + a.y, up_sum.y + b.y);
    } else if (!PLAIN) {
      made = {slope(g.x, at.x), slope(g.y, at.y)};
    }
    dz.set(0, pair, made.x, made.y);
    sums.set(0, pair, sum.x + made.x, sum.y + made.y);
  }
}

// Of all groups, one after the other, to the first one's.
__device__ __forceinline__ void add_groups(Columns<float>& sums, int group, int thread) {
  if (GROUPS == 1) return;
  __shared__ __align__(16) float others[GROUPS - 1 + (GROUPS == 1)][Columns<float>::CAPACITY];
  __syncthreads();  // who reads what was there before?
  if (group > 0) sums.store(others[group - 1], thread, Columns<float>::CAPACITY);
  __syncthreads();
  if (group > 0) return;
#pragma unroll
  for (int other = 0; other < GROUPS - 1; ++other) {
    Columns<float> found;
    found.load(others[other], thread, Columns<float>::CAPACITY);
    sums.add(found);
  }
}

// The sums over all rows of partials, rounded once.
__device__ __forceinline__ void add_up(elem_t* dbias, const float* partials, i64 wide, int columns,
                                       int group, int thread) {
  Columns<float> sums;
  sums.fill(0.f);
#pragma unroll UNDERWAY
  for (int part = group; part < gridDim.y; part += GROUPS) {
    Columns<float> found;
    found.load(partials + part * wide, thread, columns);
    sums.add(found);
  }
  add_groups(sums, group, thread);
  if (group > 0) return;
  Columns<elem_t> made;
#pragma unroll
  for (int pair = 0; pair < PAIRS; ++pair) {
    const float2 sum = sums.get(0, pair);
    made.set(0, pair, sum.x, sum.y);
  }
  made.store(dbias, thread, columns);
}

extern "C" __global__ void __launch_bounds__(THREADS* GROUPS, (RESIDENT + GROUPS - 1) / GROUPS)
    linear_activation_backward(
        const out_t* __restrict__ dy,    // [m, n]
        const elem_t* __restrict__ pre,  // [m, n], or [m, 2 n] with GATE: contiguous; null if PLAIN
        elem_t* __restrict__ dz,         // as pre, or null
        elem_t* __restrict__ dbias,      // [n], or [2 n]; or null
        elem_t* __restrict__ y,          // [m, n], or null
        float* workspace,                // partials [gridDim.y, n or 2 n], where there is a dbias
        u32* counters,                   // [gridDim.x], all 0
        const i64 dy_stride, const int m, const int n) {
  after_previous_kernel();
  const int thread = threadIdx.x % THREADS, group = threadIdx.x / THREADS;
  const int skip = blockIdx.x * Columns<elem_t>::CAPACITY, here = n - skip;
  const int step = gridDim.y * GROUPS;
  const i64 wide = GATE ? 2 * static_cast<i64>(n) : n;
  Columns<float> sums, up_sums;
  sums.fill(0.f), up_sums.fill(0.f);
  for (int first = blockIdx.y * GROUPS + group; first < m; first += AT_ONCE * step) {
    Columns<out_t> given[AT_ONCE];
    Columns<elem_t> z[AT_ONCE], up[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int row = first + i * step, there = row < m ? here : 0;
      const i64 place = row * wide + skip;
      given[i].load(dy + row * dy_stride + skip, thread, there);
      if (!PLAIN) z[i].load(pre + place, thread, there);
      if (GATE) up[i].load(pre + place + n, thread, there);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int row = first + i * step;
      if (row >= m) break;
      Columns<elem_t> made, d_up;
      const i64 place = row * wide + skip;
      differentiate(made, d_up, sums, up_sums, given[i], z[i], up[i]);
      if (GATE && y != nullptr) up[i].store(y + row * static_cast<i64>(n) + skip, thread, here);
      if (dz == nullptr) continue;
      made.store(dz + place, thread, here);
      if (GATE) d_up.store(dz + place + n, thread, here);
    }
  }
  if (dbias == nullptr) return;

  add_groups(sums, group, thread);
  if (GATE) add_groups(up_sums, group, thread);
  float* part = workspace + blockIdx.y * wide + skip;
  if (group == 0) sums.store(part, thread, here);
  if (GATE && group == 0) up_sums.store(part + n, thread, here);
  __syncthreads();
  if (!last_block(counters + blockIdx.x, gridDim.y)) return;
  add_up(dbias + skip, workspace + skip, wide, here, group, thread);
  if (GATE) add_up(dbias + n + skip, workspace + n + skip, wide, here, group, thread);
}
