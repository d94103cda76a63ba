"""Which tiles Hopper's backward visits, and in which order blocks of keys add to a tile of dq."""

from __future__ import annotations

import numpy as np
import pytest

import fkjit
from fkjit.ops.attention.backward import schedule_sm90 as hopper
from fkjit.ops.attention.backward.tiles import BLOCK_K_SM90, is_paired

# A thread for each thread block: it writes down (tile of all heads, block of keys, rank, turns).
WALK = """
#include "attention/backward_sm90/schedule.cuh"
extern "C" __global__ void walk(int4* visits, int* counts, int most, int batch, int heads_q,
                                int group_size, int seqlen_q, int seqlen_k, int rows_padded,
                                int rounds, int causal) {
  const BackwardSizes<${block_q}, ${block_k}, true> sizes{
      batch, heads_q, group_size, seqlen_q, seqlen_k, rows_padded, causal, rounds};
  int count = 0, number = BackwardWorkItem::next(-1, nullptr, sizes);
  for (; number < sizes.works(); number = BackwardWorkItem::next(number, nullptr, sizes)) {
    const BackwardWorkItem work(number, sizes);
    BackwardWalk at(work, sizes);
    for (; at.left > 0; at.advance(work, sizes), ++count)
      if (count < most)
        visits[static_cast<i64>(blockIdx.x) * most + count] =
            make_int4(at.index(work, sizes), work.block, work.rank(at.tile, sizes),
                      sizes.turns(at.tile));
  }
  counts[blockIdx.x] = count;
}
"""


def visits(block_q, batch, heads, heads_kv, sq, sk, causal, rounds, sms, block_k=128):
    """What each thread block visits, in its order, and tiles of queries of a head."""
    blocks, padded = -(-sk // block_k), -(-sq // 128) * 128
    members = -(-blocks // rounds)
    teams = min(sms // members, heads_kv * batch)
    most = blocks * -(-sq // block_q) * heads * batch
    found = np.full((teams * members, most, 4), -1, np.int32)
    counts = np.zeros(teams * members, np.int32)
    fkjit.launch_cpu(
        WALK,
        teams * members,
        1,
        [found.view("i4,i4,i4,i4"), counts, most, batch, heads, heads // heads_kv, sq, sk, padded]
        + [rounds, int(causal)],
        params={"block_q": block_q, "block_k": block_k},
        race=False,
    )
    return [rows[:count].tolist() for rows, count in zip(found, counts, strict=True)]


CASES = [  # block_q, batch, heads, heads_kv, sq, sk, causal, rounds, sms, block_k
    (128, 1, 5, 5, 900, 900, True, 1, 16), (128, 2, 2, 1, 900, 900, True, 3, 7),
    (64, 1, 3, 3, 500, 1300, True, 4, 9), (64, 1, 2, 2, 1300, 500, True, 2, 6),
    (128, 1, 4, 2, 300, 1700, False, 2, 20), (64, 2, 3, 3, 900, 900, False, 3, 8),
    (64, 1, 2, 1, 70, 1500, False, 5, 3), (128, 1, 1, 1, 100, 60, True, 1, 4),
    (64, 1, 3, 3, 300, 700, True, 3, 9, 64), (64, 1, 2, 2, 300, 500, False, 2, 5, 64),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_pair_is_visited_once_and_all_turns_come(case):
    block_q, batch, heads, _, sq, sk, causal, _, _, *keys = case
    block_k = keys[0] if keys else 128
    lists = visits(*case)
    tiles, blocks, diagonal = -(-sq // block_q), -(-sk // block_k), sk - sq
    expected = {
        (head * (-(-sq // 128) * 128 // block_q) + tile, block)
        for head in range(heads * batch)
        for tile in range(tiles)
        for block in range(blocks)
        if not causal or block * block_k <= max(0, min((tile + 1) * block_q, sq) - 1 + diagonal)
    }
    every = [(tile, block) for visited in lists for tile, block, _, _ in visited]
    assert len(every) == len(expected) and set(every) == expected
    assert_all_turns_come(lists)


def assert_all_turns_come(lists):
    """Thread blocks wait for their turns, each of them in the order of its visits."""
    done: dict[int, int] = {}
    left = [list(reversed(visited)) for visited in lists]
    while any(left):
        before = sum(map(len, left))
        for visited in left:
            while visited and done.get(visited[-1][0], 0) == visited[-1][2]:
                tile, _, rank, others = visited.pop()
                done[tile] = rank + 1
                assert rank < others
        assert sum(map(len, left)) < before, "all of them wait"
    assert all(done[tile] == others for visited in lists for tile, _, _, others in visited)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("heads", "seqlen", "slower"),
    [(64, 4096, 1.04), (256, 1024, 1.04), (3, 6000, 2), (3, 100_000, 1.5), (1, 20, 999)],
)
def test_rounds_leave_few_multiprocessors_idle(heads, seqlen, slower, dim, causal):
    problem = {"seqlen_k": seqlen, "heads_kv": heads, "batch": 1, "causal": causal}
    params = {"head_dim": dim, "head_dim_v": dim, "deterministic": True}
    each = 1 + is_paired(params)  # thread blocks of a cluster
    rounds, keys = hopper.rounds_of(params, problem), each * BLOCK_K_SM90[dim]
    (used, _, _), blocks = hopper.grid(params, problem), -(-seqlen // keys)
    members = each * -(-blocks // rounds)
    assert 0 < used <= 132 and used % members == 0
    assert rounds * -(-heads // (used // members)) <= slower * heads * blocks * each / 132


@pytest.mark.parametrize(
    ("heads", "seqlen", "drawn"),
    [((16, 16), 3000, True), ((16, 4), 3000, False), ((8, 8), 900, False)],
)
def test_causal_blocks_are_drawn_where_there_are_several_a_multiprocessor(heads, seqlen, drawn):
    problem = {"seqlen_k": seqlen, "heads_q": heads[0], "heads_kv": heads[1], "batch": 1}
    params = {"head_dim": 128, "deterministic": True}
    assert hopper.draws(params, {**problem, "causal": True}) is drawn
    assert not hopper.draws(params, {**problem, "causal": False})
    wide = {**params, "head_dim": 256, "head_dim_v": 256}
    assert not hopper.draws(wide, {**problem, "causal": True})
