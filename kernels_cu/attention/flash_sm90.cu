/* Attention forward on Hopper (sm_90a): TMA brings the tiles, wgmma multiplies them, and one
   warpgroup's exponentials run under the other's products.

   o = softmax(softmax_scale * q k^T + causal mask) v         lse = log(sum(exp(scores)))

   One block an SM works through one tile of 64 * CONSUMERS query rows after another. Its first
   warpgroup is the producer: a thread of it asks TMA for Q and tiles of K, another for tiles of V,
   into rings. The others are consumers of 64 rows each. mbarriers say which stages are full and
   which are free again. Which tile comes next is drawn from a counter: blocks whose tiles are short
   work more of them off.

     consumer, for each tile j, from the last to the first (those that need a mask come first):
        S'  = Q K_j^T              issued   } both run on the tensor cores
        O  += P V_(j+1)            issued   } while the other consumer is at its exponentials
        wait for S';  mask;  m' = max(m, rowmax S')
        wait for O;   S' = exp2(S' * c - m' * c);  P = S' in 16 bits
        O *= exp2((m - m') * c), which almost never runs
     at the end:
        O  += P V_0                issued   } and so is S' of the next queries, which the tensor
        S'  = Q' K'^T              issued   } cores work on while this output is stored
        wait for O;   o = O / rowsum P,  lse = (m * c + log2(rowsum P)) * ln(2)

   with c = softmax_scale * log2(e). P never leaves registers: a wgmma accumulator in 16 bits is the
   A operand of the next product.

   Source: Shah et al., "FlashAttention-3" (2024), for the overlap of softmax and products. */
#include "prelude.cuh"
#include "device/attention_mma.cuh"
#include "device/mbarrier.cuh"
#include "device/named_barrier.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"

using elem_t = ${dtype};
constexpr int BLOCK_K = ${block_k};        // keys of a tile
constexpr int CONSUMERS = ${consumers};    // warpgroups of 64 query rows
constexpr int HEAD_DIM = ${head_dim};      // of q and k, padded with zeros
constexpr int HEAD_DIM_V = ${head_dim_v};  // of v and o, padded
constexpr int STAGES = ${stages};          // tiles of K, and of V, in shared memory
constexpr int Q_STAGES = ${q_stages};      // tiles of Q
constexpr int PRODUCER_REGISTERS = ${producer_registers};
constexpr int CONSUMER_REGISTERS = ${consumer_registers};
constexpr int GUARD = ${guard};  // bytes between tiles: 0 except where memory is checked

constexpr int BLOCK_Q = 64 * CONSUMERS;
// With two tiles of Q, the next one's first scores are under way while this one's output is stored.
constexpr bool AHEAD = Q_STAGES > 1;
constexpr int WARPGROUP = 128;
constexpr int THREADS = WARPGROUP * (1 + CONSUMERS);
// What setmaxnreg gives to consumers it has taken from the producer: more than a block started with
// would be waited for forever.
constexpr int REGISTERS_AT_START = 65536 / THREADS / 8 * 8;
static_assert(PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <=
                  (1 + CONSUMERS) * REGISTERS_AT_START,
              "the warpgroups share the registers that the block was launched with");
constexpr int QK_STEPS = HEAD_DIM / 16, PV_STEPS = BLOCK_K / 16;

constexpr int WIDTH = ceil_div(HEAD_DIM, 64) * 64, WIDTH_V = ceil_div(HEAD_DIM_V, 64) * 64;
using QTile = SwizzledTile<BLOCK_Q, WIDTH>;  // in whole panels, of which products may leave columns
using KTile = SwizzledTile<BLOCK_K, WIDTH>;
using VTile = SwizzledTile<BLOCK_K, WIDTH_V>;
using OTile = SwizzledTile<BLOCK_Q, WIDTH_V>;
static_assert(QTile::PANEL_COLUMNS == 64 && VTile::PANEL_COLUMNS == 64, "TMA's 128-byte swizzle");
static_assert(WIDTH_V <= WIDTH, "the output is staged where its Q was");
static_assert(BLOCK_K % 16 == 0, "the PV product takes keys 16 at a time");

// Shared memory: the rings of Q, K and V, the barriers. O is staged where its Q was.
constexpr int Q_STAGE = QTile::BYTES + GUARD;
constexpr int K_OFFSET = Q_STAGES * Q_STAGE, K_STAGE = KTile::BYTES + GUARD;
constexpr int V_OFFSET = K_OFFSET + STAGES * K_STAGE, V_STAGE = VTile::BYTES + GUARD;
constexpr int BARRIERS_OFFSET = V_OFFSET + STAGES * V_STAGE;
constexpr int SLOTS = 2;  // pieces of work that have been announced

struct Barriers {  // addresses
  u32 base;
  __device__ __forceinline__ u32 q_full(int stage) const { return base + stage * 16; }
  __device__ __forceinline__ u32 q_empty(int stage) const { return base + 8 + stage * 16; }
  __device__ __forceinline__ u32 work_full(int slot) const { return base + 32 + slot * 16; }
  __device__ __forceinline__ u32 work_empty(int slot) const { return base + 40 + slot * 16; }
  __device__ __forceinline__ u32 work(int slot) const {
    return base + 64 + slot * 4;
  }  // its number
  __device__ __forceinline__ u32 k_full(int stage) const { return base + 80 + stage * 32; }
  __device__ __forceinline__ u32 k_empty(int stage) const { return base + 88 + stage * 32; }
  __device__ __forceinline__ u32 v_full(int stage) const { return base + 96 + stage * 32; }
  __device__ __forceinline__ u32 v_empty(int stage) const { return base + 104 + stage * 32; }
};

// Which tile of queries a piece of work is. Heads are taken in sections whose K and V fit into L2;
// within a section come the last tiles of all heads (the longest causal ones), then those before.
struct Work {
  int q0, head, batch;

  __device__ __forceinline__ Work(int number, int blocks_q, int heads_q, int all_heads,
                                  int section_heads) {
    const int section = number / (blocks_q * section_heads), first = section * section_heads;
    const int width = min(section_heads, all_heads - first);
    const int within = number - section * blocks_q * section_heads;
    q0 = (blocks_q - 1 - within / width) * BLOCK_Q;
    head = (first + within % width) % heads_q;
    batch = (first + within % width) / heads_q;
  }
};

// The number of a block's next piece of work, or one at or past `works`. The first is its own index.
// Each block draws until it gets too high a number, so that `works` are drawn in all, and the
// counter is 0 again when the last one has been. Nothing is drawn where each has one piece only.
__device__ __forceinline__ int draw_work(u32* counter, int works) {
  return works <= gridDim.x ? works : gridDim.x + atomicInc(counter, works - 1);
}

// The number that has been announced, to one thread.
__device__ __forceinline__ int next_work(const Barriers& barriers, RingPlace<SLOTS>& slot) {
  mbarrier_wait(barriers.work_full(slot.stage), slot.parity);
  const int number = load_shared_word(barriers.work(slot.stage));
  mbarrier_arrive(barriers.work_empty(slot.stage));
  slot.advance();
  return number;
}

// The keys that a tile of queries sees, in tiles; one tile at least, though it be masked whole.
struct KeyRange {
  int first_hidden;  // query row i of the block sees keys 0 .. min(seqlen_k, first_hidden + i) - 1
  int tiles, unmasked;

  __device__ __forceinline__ KeyRange(int q0, int seqlen_q, int seqlen_k, bool causal) {
    first_hidden = causal ? q0 + seqlen_k - seqlen_q + 1 : seqlen_k;
    const int last_row = min(BLOCK_Q, seqlen_q - q0) - 1;
    const int keys = min(seqlen_k, causal ? first_hidden + last_row : seqlen_k);
    tiles = ceil_div(max(keys, 1), BLOCK_K);
    unmasked = max(min(seqlen_k, first_hidden), 0) / BLOCK_K;
  }
};

// S[64 x BLOCK_K] (+)= Q[64 x 16] K[BLOCK_K x 16]^T.                 PTX ISA: wgmma.mma_async
__device__ __forceinline__ void product_qk(float (&d)[1][BLOCK_K / 8][4], u64 q, u64 k, int add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, ${qk_add}, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n${block_k}k16.f32.${ptx_type}.${ptx_type} "
      "{${qk_registers}}, ${qk_q}, ${qk_k}, add, 1, 1, 0, 0;\n"
      "}"
      : ${qk_operands}
      : "l"(q), "l"(k), "r"(add));
}

// O[64 x HEAD_DIM_V] += P[64 x 16] V[16 x HEAD_DIM_V], P from registers.
__device__ __forceinline__ void product_pv(float (&d)[1][HEAD_DIM_V / 8][4], const u32 (&p)[4],
                                           u64 v) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n${head_dim_v}k16.f32.${ptx_type}.${ptx_type} "
      "{${pv_registers}}, {${pv_p}}, ${pv_v}, 1, 1, 1, 1;"
      : ${pv_operands}
      : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(v));
}

__device__ __forceinline__ void issue_qk(float (&s)[1][BLOCK_K / 8][4], u64 q, u64 k) {
#pragma unroll
  for (int step = 0; step < QK_STEPS; ++step) {
    const int panel = step / 4, within = step % 4 * 2;  // 32 bytes a step, in units of 16
    product_qk(s, q + (panel * QTile::PANEL_BYTES >> 4) + within,
               k + (panel * KTile::PANEL_BYTES >> 4) + within, step > 0);
  }
  wgmma_commit();
}

__device__ __forceinline__ void issue_pv(float (&acc)[1][HEAD_DIM_V / 8][4],
                                         const u32 (&p)[PV_STEPS][4], u64 v) {
#pragma unroll
  for (int step = 0; step < PV_STEPS; ++step) product_pv(acc, p[step], v + step * (2048 >> 4));
  wgmma_commit();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_flash_sm90(
    const __grid_constant__ TensorMap q_map,  // q [batch, heads_q, seqlen_q, head_dim], boxes of
    const __grid_constant__ TensorMap k_map,  // BLOCK_Q rows; k [batch, heads_kv, seqlen_k,
    const __grid_constant__ TensorMap v_map,  // head_dim] and v of BLOCK_K; each 64 columns wide
    const __grid_constant__ TensorMap o_map,  // o [batch, heads_q, seqlen_q, head_dim_v], 16 rows
    float* __restrict__ lse,                  // [batch, heads_q, seqlen_q] contiguous, or null
    u32* __restrict__ counters,               // [1], 0 before and after
    const int batch, const int heads_q, const int group_size, const int seqlen_q,
    const int seqlen_k,
    const int section_heads,         // heads whose K and V fit into L2 together
    const float softmax_scale_log2,  // softmax_scale * log2(e), above 0
    const int causal) {              // query i sees keys up to i + seqlen_k - seqlen_q
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 q_tile = shared_address(shared_memory);
  const Barriers barriers{q_tile + BARRIERS_OFFSET};
  const int warpgroup = __shfl_sync(FULL_MASK, threadIdx.x / WARPGROUP, 0);
  const int blocks_q = ceil_div(seqlen_q, BLOCK_Q), works = blocks_q * heads_q * batch;

  if (threadIdx.x == 0) {
#pragma unroll
    for (int stage = 0; stage < Q_STAGES; ++stage) {
      mbarrier_init(barriers.q_full(stage), 1);
      mbarrier_init(barriers.q_empty(stage), CONSUMERS * 4);
    }
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
      mbarrier_init(barriers.work_full(slot), 1);
      mbarrier_init(barriers.work_empty(slot), CONSUMERS * 4 + 1);
    }
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(barriers.k_full(stage), 1);
      mbarrier_init(barriers.v_full(stage), 1);
      mbarrier_init(barriers.k_empty(stage), CONSUMERS * 4);
      mbarrier_init(barriers.v_empty(stage), CONSUMERS * 4);
    }
    mbarrier_init_fence();
  }
  __syncthreads();

  if (warpgroup == 0) {
    // ---- producer
    fewer_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) {
      // One thread says what comes next and asks for its Q and K, ...
      tma_prefetch(q_map), tma_prefetch(k_map);
      RingPlace<STAGES> k_place;
      RingPlace<SLOTS> slot;
      RingPlace<Q_STAGES> q_place;
      for (int number = blockIdx.x;; number = draw_work(counters, works)) {
        mbarrier_wait(barriers.work_empty(slot.stage), slot.parity ^ 1);
        store_shared_word(barriers.work(slot.stage), number);
        mbarrier_arrive(barriers.work_full(slot.stage));
        slot.advance();
        // Consumers begin with the next tile before they know whether there is one: so the last is
        // followed by one outside the tensors, which comes as zeros.
        const bool last = number >= works;
        Work place(last ? 0 : number, blocks_q, heads_q, heads_q * batch, section_heads);
        if (last) place.batch = batch;
        const KeyRange range(place.q0, seqlen_q, seqlen_k, causal);
        const auto load_k = [&](int tile) {
          mbarrier_wait(barriers.k_empty(k_place.stage), k_place.parity ^ 1);
          tma_load_tile<KTile>(q_tile + K_OFFSET + k_place.stage * K_STAGE, k_map,
                               barriers.k_full(k_place.stage), tile * BLOCK_K,
                               place.head / group_size, place.batch);
          k_place.advance();
        };
        const auto load_q = [&] {
          mbarrier_wait(barriers.q_empty(q_place.stage), q_place.parity ^ 1);
          tma_load_tile<QTile>(q_tile + q_place.stage * Q_STAGE, q_map,
                               barriers.q_full(q_place.stage), place.q0, place.head, place.batch);
          q_place.advance();
        };
        load_k(range.tiles - 1);
        load_q();
        if (last) break;
        for (int tile = range.tiles - 2; tile >= 0; --tile) load_k(tile);
      }
    } else if (threadIdx.x == WARP_SIZE) {
      // ... another one, in a warp of its own, for its V.
      tma_prefetch(v_map);
      RingPlace<STAGES> v_place;
      RingPlace<SLOTS> slot;
      while (true) {
        const int number = next_work(barriers, slot);
        if (number >= works) break;
        const Work place(number, blocks_q, heads_q, heads_q * batch, section_heads);
        const KeyRange range(place.q0, seqlen_q, seqlen_k, causal);
        for (int tile = range.tiles - 1; tile >= 0; --tile) {
          mbarrier_wait(barriers.v_empty(v_place.stage), v_place.parity ^ 1);
          tma_load_tile<VTile>(q_tile + V_OFFSET + v_place.stage * V_STAGE, v_map,
                               barriers.v_full(v_place.stage), tile * BLOCK_K,
                               place.head / group_size, place.batch);
          v_place.advance();
        }
      }
    }
  } else {
    // ---- consumers
    more_registers<CONSUMER_REGISTERS>();
    const int consumer = warpgroup - 1, lane = threadIdx.x % WARP_SIZE;
    const int warp_row = consumer * 64 + threadIdx.x % WARPGROUP / WARP_SIZE * 16;
    const u64 q_operand = wgmma_tile(q_tile + consumer * 64 * QTile::ROW_BYTES, 0);
    const u64 k_operand = wgmma_tile(q_tile + K_OFFSET, 0);
    const u64 v_operand = wgmma_tile(q_tile + V_OFFSET, VTile::PANEL_BYTES);
    const bool signals = lane == 0;
    RingPlace<STAGES> k_place, v_place;
    RingPlace<Q_STAGES> q_place;
    RingPlace<SLOTS> slot;
    float s[1][BLOCK_K / 8][4];
    const auto take_work = [&] {
      int number = 0;
      if (signals) number = next_work(barriers, slot);
      return __shfl_sync(FULL_MASK, number, 0);
    };
    // Scores of the next tile of keys, of the queries in a stage.
    const auto issue_scores = [&](int q_stage) {
      mbarrier_wait(barriers.k_full(k_place.stage), k_place.parity);
      wgmma_fence();
      issue_qk(s, q_operand + q_stage * (Q_STAGE >> 4), k_operand + k_place.stage * (K_STAGE >> 4));
    };
    const auto release_k = [&] {
      if (signals) mbarrier_arrive(barriers.k_empty(k_place.stage));
      k_place.advance();
    };
    const auto release_v = [&] {
      if (signals) mbarrier_arrive(barriers.v_empty(v_place.stage));
      v_place.advance();
    };
    const auto first_scores = [&] {
      mbarrier_wait(barriers.q_full(q_place.stage), q_place.parity);
      issue_scores(q_place.stage);
    };

    // Consumers fall into step by themselves in the long run, and draw less power than if they were
    // made to. Where each has one tile only, it is done sooner if they take turns at the tensor cores.
    const bool in_turns = CONSUMERS > 1 && works <= gridDim.x;
    const auto my_turn = [&] {
      if (in_turns) named_barrier_wait<2 * WARPGROUP>(1 + consumer);
    };
    const auto next_turn = [&] {
      if (in_turns) named_barrier_arrive<2 * WARPGROUP>(1 + (consumer + 1) % CONSUMERS);
    };
    if (consumer == CONSUMERS - 1) next_turn();

    // The tile of Q, where the output has been staged, may be written again.
    const auto release_q = [&](int stage) {
      if (!signals) return;
      tma_store_wait();
      mbarrier_arrive(barriers.q_empty(stage));
    };

    bool stored = false;
    int number = take_work();
    first_scores();
    while (true) {
      wgmma_wait<0>();
      if (number >= works) break;
      const Work place(number, blocks_q, heads_q, heads_q * batch, section_heads);
      const KeyRange range(place.q0, seqlen_q, seqlen_k, causal);
      const int q_stage = q_place.stage;
      q_place.advance();
      float acc[1][HEAD_DIM_V / 8][4] = {};
      u32 p[PV_STEPS][4];
      float correction[1][2];
      OnlineSoftmax<1> softmax;
      int tile = range.tiles - 1;
      const auto mask = [&] {
        if (tile >= range.unmasked)
          mask_scores(s, lane, [&](int row) {
            return min(seqlen_k, causal ? range.first_hidden + warp_row + row : seqlen_k) -
                   tile * BLOCK_K;
          });
      };
      release_k();
      mask();
      softmax.raise_max(s, softmax_scale_log2, correction);
      exponentials(s, softmax, softmax_scale_log2);
      round_to<elem_t>(p, s);
      if (AHEAD && stored) release_q(q_stage ^ 1);
      stored = true;

      for (--tile; tile >= 0; --tile) {
        settle(p);
        settle(acc[0]);
        my_turn();
        issue_scores(q_stage);
        mbarrier_wait(barriers.v_full(v_place.stage), v_place.parity);
        wgmma_fence();
        issue_pv(acc, p, v_operand + v_place.stage * (V_STAGE >> 4));
        next_turn();
        wgmma_wait<1>();
        release_k();
        mask();
        const bool rescale = softmax.raise_max(s, softmax_scale_log2, correction);
        wgmma_wait<0>();  // so that the other consumer's products run under the exponentials
        release_v();
        exponentials(s, softmax, softmax_scale_log2);
        if (rescale) scale_rows(acc, correction);
        round_to<elem_t>(p, s);
      }
      // The last product, and behind it the first scores of what comes next.
      mbarrier_wait(barriers.v_full(v_place.stage), v_place.parity);
      settle(p);
      settle(acc[0]);
      wgmma_fence();
      issue_pv(acc, p, v_operand + v_place.stage * (V_STAGE >> 4));
      if (AHEAD) first_scores();
      number = take_work();
      wgmma_wait<AHEAD ? 1 : 0>();
      release_v();

      // Normalise; the output is staged in this warp's own rows, then TMA stores what is inside o.
      const int row0 = place.q0 + warp_row, rows_left = min(16, seqlen_q - row0);
      const i64 head_index = static_cast<i64>(place.batch) * heads_q + place.head;
      const u32 warp_o_tile = q_tile + q_stage * Q_STAGE + warp_row * OTile::ROW_BYTES;
      finish_rows<elem_t, OTile>(acc, softmax, softmax_scale_log2, lane, warp_o_tile,
                                 lse == nullptr ? nullptr : lse + head_index * seqlen_q + row0,
                                 rows_left);
      proxy_fence();
      __syncwarp();
      if (signals) tma_store_tile<OTile>(o_map, warp_o_tile, row0, place.head, place.batch);
      if (!AHEAD) {
        release_q(q_stage);
        first_scores();
      }
    }
    if (consumer == 0) my_turn();  // what the last one has arrived at is not left over
    if (signals) tma_store_wait();
  }
}
