"""Which tiles Hopper's backward visits where attention has a band, and the order in which blocks of
keys add to a tile of dq."""

from __future__ import annotations

import numpy as np
import pytest

import fkjit

# A thread writes down (batch, head and tile, block of keys, rank, turns) of every piece of work.
WALK = """
#include "attention/backward_sm90/features_schedule.cuh"
using Sizes = FormSizes<${block_q}, 128, true, true>;
extern "C" __global__ void walk(int4* visits, int* count, const int* cu_seqlens_q,
                                const int* cu_seqlens_k, int batch, int heads, int seqlen_q,
                                int seqlen_k, int left, int right) {
  AttentionForm form{};
  form.window_left = left, form.window_right = right;
  const Sizes sizes(cu_seqlens_q, cu_seqlens_k, batch, heads, 1, seqlen_q, seqlen_k, 0, 3,
                    form, nullptr);
  for (int number = 0; number < sizes.pieces(); ++number) {
    const FormWorkItem<Sizes> piece(number, sizes);
    if (!piece.exists()) continue;
    for (int tile = piece.first_tile(right); tile < piece.end_tile(left); ++tile) {
      const FormRank<${block_q}, 128> turn(
          tile, piece.queries.length - tile * ${block_q}, piece.block, piece.backwards,
          piece.keys.length - piece.first_key(), piece.first_row(right), left + right);
      visits[(*count)++] = make_int4((piece.batch * heads + piece.head) * 64 + tile, piece.block,
                                     turn.rank, turn.others);
    }
  }
}
"""

LENGTHS = ((900, 0, 70, 5, 600, 40, 300), (900, 300, 500, 0, 300, 700, 600))
BANDS = ((5000, 0), (5000, 5000), (0, 0), (300, 0), (130, 60), (7, 5000))


def visits(block_q, band):
    """In the order in which pieces of work are drawn."""
    heads, batch = 2, len(LENGTHS[0])
    found, count = np.zeros((20_000, 4), np.int32), np.zeros(1, np.int32)
    ends = [np.cumsum((0, *of)).astype(np.int32) for of in LENGTHS]
    longest = (max(of) for of in LENGTHS)
    fkjit.launch_cpu(
        WALK, 1, 1, [found.view("i4,i4,i4,i4"), count, *ends, batch, heads, *longest, *band],
        params={"block_q": block_q}, race=False,
    )  # fmt: skip
    return found[: count[0]].tolist()


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_each_pair_is_visited_once_by_those_that_were_drawn_before(band):
    block_q, (left, right) = (64, 128)[sum(band) % 2], band
    found = visits(block_q, band)
    needed, own = set(), set()
    for b, (sq, sk) in enumerate(zip(*LENGTHS, strict=True)):
        apart = np.arange(sk) - np.arange(sq)[:, None] - (sk - sq)
        seen = np.argwhere((apart >= -left) & (apart <= right))
        for head in range(2):
            first = (b * 2 + head) * 64
            needed |= {(first + q // block_q, k // 128) for q, k in seen.tolist()}
            own |= {first + tile for tile in range(-(-sq // block_q) if sk else 0)}
    pairs = [(tile, block) for tile, block, _, _ in found]
    assert len(set(pairs)) == len(pairs) and needed <= set(pairs)
    assert {tile for tile, _ in pairs} == own, "each row of dq is written"
    done: dict[int, int] = {}
    for tile, _, rank, _ in found:
        assert done.get(tile, 0) == rank
        done[tile] = rank + 1
    assert all(done[tile] == others for tile, _, _, others in found)
