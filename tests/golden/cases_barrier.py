"""mbarrier: phases, pending transactions, counts; tokens stay opaque, only phases are compared."""

from __future__ import annotations

from collections.abc import Iterator

from tests.golden.case import Case
from tests.golden.hopper import block_case

_SETUP = """  __shared__ u64 barrier;
  const u32 bar = shared_address(&barrier);
  if (i == 0) { init(bar, %s); publish_init(); }
  __syncthreads();
"""


def _phases() -> Iterator[Case]:
    for count in (1, 2, 31, 64):
        body = (
            (_SETUP % count)
            + f"""
  for (u32 phase = 0; phase < 5; ++phase) {{
    if (i == 0) result[4 * phase] = test_wait(bar, phase & 1);
    if (i == 0) result[4 * phase + 1] = test_wait(bar, (phase & 1) ^ 1);
    __syncthreads();
    if (i < {count}) arrive(bar);
    __syncthreads();
    if (i == 0) result[4 * phase + 2] = test_wait(bar, phase & 1);
    if (i == 0) result[4 * phase + 3] = test_wait(bar, (phase & 1) ^ 1);
    __syncthreads();
  }}"""
        )
        yield block_case(f"mbarrier.phases.{count}", body, 4, 20, block=64)


def _transactions() -> Iterator[Case]:
    start = _SETUP % 2
    body = start + """
  if (i == 0) {
    expect(bar, 100);                       // one arrival, 100 bytes pending
    result[0] = test_wait(bar, 0);
    arrive(bar);
    result[1] = test_wait(bar, 0);          // all have arrived, bytes have not
    complete(bar, 60);
    result[2] = test_wait(bar, 0);
    complete(bar, 40);
    result[3] = test_wait(bar, 0);
    result[4] = test_wait(bar, 1);
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], 8;" :: "r"(bar) : "memory");
    arrive(bar);
    arrive(bar);
    result[5] = test_wait(bar, 1);
    complete(bar, 8);
    result[6] = test_wait(bar, 1);
    result[7] = test_wait(bar, 0);
  }"""  # fmt: skip
    yield block_case("mbarrier.transactions", body, 4, 8)
    body = (
        start
        + """
  if (i == 0) {
    complete(bar, 24);
    expect(bar, 24);                        // what came early counts
    result[0] = test_wait(bar, 0);
    arrive(bar);
    result[1] = test_wait(bar, 0);
  }"""
    )
    yield block_case("mbarrier.complete.first", body, 4, 2)


def _counts() -> Iterator[Case]:
    body = (
        (_SETUP % 10)
        + """
  if (i == 0) {
    u64 token;
    u32 pending;
    for (u32 n = 1; n < 4; ++n) {
      asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1], %2;"
                   : "=l"(token) : "r"(bar), "r"(n) : "memory");
      asm volatile("mbarrier.pending_count.b64 %0, %1;" : "=r"(pending) : "l"(token));
      result[n] = pending;
    }
    result[0] = test_wait(bar, 0);
    asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1], 4;"
                 : "=l"(token) : "r"(bar) : "memory");
    result[4] = test_wait(bar, 0);
    u32 done;
    asm volatile("{ .reg .pred p; mbarrier.test_wait.shared::cta.b64 p, [%1], %2;"
                 " selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(bar), "l"(token) : "memory");
    result[5] = done;
    asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];"
                 : "=l"(token) : "r"(bar) : "memory");
    asm volatile("{ .reg .pred p; mbarrier.test_wait.shared::cta.b64 p, [%1], %2;"
                 " selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(bar), "l"(token) : "memory");
    result[6] = done;
  }"""
    )
    yield block_case("mbarrier.counts", body, 4, 7)
    body = (
        (_SETUP % 4)
        + """
  if (i == 0) {
    u64 token;
    asm volatile("mbarrier.arrive_drop.shared::cta.b64 %0, [%1];"
                 : "=l"(token) : "r"(bar) : "memory");
    arrive(bar); arrive(bar);
    result[0] = test_wait(bar, 0);
    arrive(bar);
    result[1] = test_wait(bar, 0);          // four of four
    arrive(bar); arrive(bar);
    result[2] = test_wait(bar, 1);
    arrive(bar);
    result[3] = test_wait(bar, 1);          // three of three
    asm volatile("mbarrier.arrive.noComplete.release.cta.shared::cta.b64 %0, [%1], 2;"
                 : "=l"(token) : "r"(bar) : "memory");
    result[4] = test_wait(bar, 0);
    arrive(bar);
    result[5] = test_wait(bar, 0);
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" :: "r"(bar) : "memory");
    init(bar, 1);
    result[6] = test_wait(bar, 0);
    arrive(bar);
    result[7] = test_wait(bar, 0);
  }"""
    )
    yield block_case("mbarrier.drop.inval", body, 4, 8)


def _handshake() -> Iterator[Case]:
    """Two halves of a block pass words to each other through full and empty barriers."""
    body = """  __shared__ u64 barriers[2];
  __shared__ u32 slot[64];
  const u32 full = shared_address(barriers), empty = full + 8;
  if (i == 0) { init(full, 64); init(empty, 64); publish_init(); }
  __syncthreads();
  for (u32 n = 0; n < 6; ++n) {
    if (i < 64) {
      wait(empty, (n & 1) ^ 1);
      slot[i] = x[64 * n + i];
      arrive(full);
    } else {
      wait(full, n & 1);
      result[64 * n + i - 64] = slot[127 - i];
      arrive(empty);
    }
  }"""
    yield block_case("mbarrier.handshake", body, 384, 384, block=128)


CASES = [*_phases(), *_transactions(), *_counts(), *_handshake()]
