"""Thread block clusters: special registers, memory of other blocks, barriers, st.async."""

from __future__ import annotations

from collections.abc import Iterator

from tests.golden.case import Case
from tests.golden.hopper import block_case

_SETUP = """  __shared__ __align__(16) u32 slots[64];
  const u32 rank = cluster_rank(), there = mapa(shared_address(slots), (rank + 1) & 3);
  slots[i] = x[64 * rank + i];
  slots[i + 32] = 0x1000 * rank + i;
  cluster_sync();
"""
_LEAVE = """
  cluster_sync();
  for (u32 j = i; j < 64; j += 32) result[64 * rank + j] = slots[j];"""


def _remote(name: str, body: str) -> Case:
    """Four blocks of 32 threads, each with its own and the next block's 64 words."""
    return block_case(name, _SETUP + body + _LEAVE, 256, 256, grid=4, cluster=4)


def _access() -> Iterator[Case]:
    for vector, count in (("", 1), (".v2", 2), (".v4", 4)):
        names = ", ".join(f"%{n}" for n in range(count))
        values = f"{{{names}}}" if vector else names
        outs = ", ".join(f'"=r"(v[{n}])' for n in range(count))
        load = f"""
  u32 v[{count}], sum = 0;
  asm volatile("ld.shared::cluster{vector}.u32 {values}, [%{count}];" : {outs}
               : "r"(there + {4 * count} * (i % {32 // count})) : "memory");
  for (int n = 0; n < {count}; ++n) sum = sum * 3 + v[n];
  cluster_sync();
  slots[i] = sum;"""
        yield _remote(f"ld.shared::cluster{vector}", load)
        names = ", ".join(f"%{n + 1}" for n in range(count))
        values = f"{{{names}}}" if vector else names
        ins = ", ".join(f'"r"(i * 7 + rank + {n})' for n in range(count))
        store = f"""
  if (i < {32 // count})
    asm volatile("st.shared::cluster{vector}.u32 [%0], {values};"
                 :: "r"(there + {4 * count} * i), {ins} : "memory");"""
        yield _remote(f"st.shared::cluster{vector}", store)
    generic = """
  u64 own = reinterpret_cast<u64>(slots), next;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(next) : "l"(own), "r"((rank + 3) & 3));
  u32* theirs = reinterpret_cast<u32*>(next);
  u32 which;
  asm volatile("getctarank.u64 %0, %1;" : "=r"(which) : "l"(next));
  const u32 seen = theirs[i] + (which << 20);
  cluster_sync();
  theirs[32 + i] = seen;"""
    yield _remote("mapa.generic", generic)
    yield _remote("getctarank", """
  u32 which;
  asm volatile("getctarank.shared::cluster.u32 %0, %1;" : "=r"(which) : "r"(there));
  slots[i] = which;""")  # fmt: skip


def _atomics() -> Iterator[Case]:
    for op in ("add.u32", "min.s32", "max.u32", "and.b32", "or.b32", "xor.b32", "exch.b32"):
        atom = f"""
  u32 old;
  asm volatile("atom.relaxed.cluster.shared::cluster.{op} %0, [%1], %2;"
               : "=r"(old) : "r"(there + 4 * i), "r"(x[i] * 5 + rank) : "memory");
  cluster_sync();
  slots[32 + i] = old;"""
        yield _remote(f"atom.shared::cluster.{op}", atom)
    together = """
  for (u32 to = 0; to < 4; ++to)
    asm volatile("red.relaxed.cluster.shared::cluster.add.u32 [%0], %1;"
                 :: "r"(mapa(shared_address(slots) + 4 * (i % 5), to)), "r"(x[32 * rank + i])
                 : "memory");"""
    yield _remote("red.shared::cluster.together", together)


def _asynchronous() -> Iterator[Case]:
    """Words sent with their arrival counted in bytes by the receiver's barrier."""
    start = """  __shared__ __align__(16) u32 slots[64];
  __shared__ u64 barrier;
  const u32 bar = shared_address(&barrier), rank = cluster_rank(), next = (rank + 1) & 3;
  slots[i] = slots[i + 32] = 100 * rank + i;
  if (i == 0) { init(bar, 1); publish_init(); expect(bar, %d); }
  __syncthreads();
  cluster_sync();
"""
    finish = """
  wait(bar, 0);
  for (u32 j = i; j < 64; j += 32) result[64 * rank + j] = slots[j];
  cluster_sync();"""
    for form, values, threads, size in (
        (".u32", '"r"(x[i + rank])', 32, 4),
        (".v2.u32", '"r"(x[i + rank]), "r"(x[i])', 16, 8),
        (".v4.u32", '"r"(x[i + rank]), "r"(x[i]), "r"(i), "r"(rank)', 16, 16),
        (".u64", '"l"((u64)x[i] << 32 | rank)', 24, 8),
        (".v2.s64", '"l"((u64)x[i] << 32 | rank), "l"((u64)i)', 8, 16),
    ):
        count = {".u32": 1, ".u64": 1, ".v4.u32": 4}.get(form, 2)
        names = ", ".join(f"%{n + 2}" for n in range(count))
        operand = f"{{{names}}}" if count > 1 else names
        body = f"""
  if (i < {threads})
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes{form}"
                 " [%0], {operand}, [%1];"
                 :: "r"(mapa(shared_address(slots) + {size} * i, next)), "r"(mapa(bar, next)),
                    {values} : "memory");"""
        yield block_case(f"st.async{form}", start % (threads * size) + body + finish, 256, 256,
                         grid=4, cluster=4)  # fmt: skip
    operations = "add.u32 add.s32 min.u32 max.s32 inc.u32 dec.u32 and.b32 or.b32 xor.b32 add.u64"
    for op in operations.split():
        wide = op.endswith("64")
        size, letter = (8, "l") if wide else (4, "r")
        value = "(u64)x[i] * 3" if wide else "x[i] + rank"
        body = f"""
  asm volatile("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{op}"
               " [%0], %2, [%1];"
               :: "r"(mapa(shared_address(slots) + {size} * i, next)), "r"(mapa(bar, next)),
                  "{letter}"({value}) : "memory");"""
        yield block_case(f"red.async.{op}", start % (32 * size) + body + finish, 256, 256, grid=4,
                         cluster=4)  # fmt: skip


def _barriers() -> Iterator[Case]:
    remote = """  __shared__ u64 barrier;
  __shared__ u32 inbox[32];
  const u32 bar = shared_address(&barrier), rank = cluster_rank();
  if (i == 0) { init(bar, 4); publish_init(); }
  __syncthreads();
  cluster_sync();
  for (u32 phase = 0; phase < 3; ++phase) {
    if (i < 8)
      asm volatile("st.shared::cluster.u32 [%0], %1;"
                   :: "r"(mapa(shared_address(inbox) + 4 * (8 * rank + i), (rank + phase) & 3)),
                      "r"(x[32 * rank + i] + phase) : "memory");
    __syncthreads();
    if (i < 4)
      asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];"
                   :: "r"(mapa(bar, i)) : "memory");
    u32 done = 0;
    while (!done)
      asm volatile("{ .reg .pred p;"
                   " mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;"
                   " selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(bar), "r"(phase & 1) : "memory");
    result[96 * rank + 32 * phase + i] = i / 8 == ((rank - phase) & 3) ? inbox[i] : 0;
    cluster_sync();
  }"""
    yield block_case("mbarrier.arrive.remote", remote, 128, 384, grid=4, cluster=4)
    split = """  __shared__ u32 slot[32];
  const u32 rank = cluster_rank();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  slot[i] = x[32 * rank + i];
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  u32 own = 0;
  for (u32 j = 0; j < 32; ++j) own += slot[i] * j;
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  u32 seen;
  asm volatile("ld.shared::cluster.u32 %0, [%1];"
               : "=r"(seen) : "r"(mapa(shared_address(slot) + 4 * i, rank ^ 1)) : "memory");
  result[32 * rank + i] = seen + own;
  cluster_sync();"""
    yield block_case("barrier.cluster.split", split, 64, 64, grid=2, cluster=2)
    names = ("cluster_ctaid.x", "cluster_nctaid.x", "clusterid.x", "nclusterid.x",
             "cluster_ctarank", "cluster_nctarank", "ctaid.x", "nctaid.x")  # fmt: skip
    lines = [f'  asm volatile("mov.u32 %0, %%{name};" : "=r"(v));\n'
             f"  if (i == 0) result[{len(names)} * blockIdx.x + {n}] = v + x[0] * 0;"
             for n, name in enumerate(names)]  # fmt: skip
    yield block_case("cluster.registers", "\n".join(["  u32 v;", *lines]), 4, 64, grid=8, cluster=4)


CASES = [*_access(), *_atomics(), *_asynchronous(), *_barriers()]
