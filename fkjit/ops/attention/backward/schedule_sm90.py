"""Which thread blocks of attention's backward on Hopper have which blocks of keys (see
templates/attention/backward_sm90/schedule.cuh and features_schedule.cuh)."""

from __future__ import annotations

from fkjit.ops.attention.backward.tiles import BLOCK_K_SM90, block_q_sm90, is_paired
from fkjit.spec import Dim3, Params, Problem
from fkjit.symbolic import decision

SMS = 132  # of an H100 or H200, where a problem does not say
_FEW = 8  # blocks of keys an SM


def _heads(one: Problem) -> int:
    return one["heads_kv"] * one["batch"]


def _blocks(params: Params, one: Problem) -> int:
    return -(-one["seqlen_k"] // _work_keys(params))


def _work_keys(params: Params) -> int:
    """Keys of a work item, which two thread blocks may have in common."""
    return BLOCK_K_SM90[params["head_dim"]] * (1 + is_paired(params))


def _multiprocessors(params: Params, one: Problem) -> int:
    """Of a GPU, or pairs of them."""
    return one.get("multiprocessors", SMS) // (1 + is_paired(params))


def _teams(blocks: int, heads: int, multiprocessors: int, rounds: int) -> int:
    """How many heads are under way at once where each takes its blocks in so many rounds."""
    return min(multiprocessors // -(-blocks // rounds), heads)


def _team_time(blocks: int, heads: int, workers: int, rounds: int, causal: bool) -> int:
    """Blocks of keys that a team goes through, of a causal head so many halves."""
    each = -(-heads // _teams(blocks, heads, workers, rounds))
    return -(-each // 2) * rounds * (blocks + 1) if causal else each * rounds


def is_several(params: Params, one: Problem) -> bool:
    """Whether there are more blocks of keys than run at a time."""
    return bool(_blocks(params, one) * _heads(one) > _multiprocessors(params, one))


def draws(params: Params, one: Problem) -> bool:
    """Whether blocks of keys are better drawn one by one, as with score features, than dealt out to
    teams: causal ones of heads that share no keys, where there are more than run at a time."""
    if not (one["causal"] and params["deterministic"]) or "head_dim_v" in params:
        return False
    return is_several(params, one) and bool(one["heads_q"] == one["heads_kv"])


def rounds_of(params: Params, one: Problem) -> int:
    """In how many rounds a team of thread blocks goes through a head, where dq has an order."""
    block_q, block_k = block_q_sm90(params), _work_keys(params)
    sizes = _blocks(params, one), _heads(one), _multiprocessors(params, one)
    shared = "head_dim_v" in params and one.get("heads_q", 1) > one["heads_kv"]
    apart = 1 if shared else 2 * block_q // block_k  # query heads of a group keep them apart, too
    return _best_rounds(apart, *sizes, one["causal"])


@decision(1024)
def _best_rounds(apart: int, blocks: int, heads: int, multiprocessors: int, causal: bool) -> int:
    """See attention/backward_sm90/schedule.cuh: few, as heads under way at once share L2, but two
    tiles between two that come to one, `apart` blocks of keys; of those that are nearly the fastest
    by count of blocks."""

    legal = range(-(-blocks // multiprocessors), blocks + 1)
    times = {n: _team_time(blocks, heads, multiprocessors, n, causal) for n in legal}
    best = min(times.values())
    near = [rounds for rounds in legal if 20 * times[rounds] <= 21 * best]
    return next((rounds for rounds in near if rounds >= apart), near[-1])


def _abreast(params: Params, one: Problem) -> int:
    """With score features: heads whose blocks of keys are drawn one after the other, where dq has
    an order (see templates/attention/backward_sm90/features_schedule.cuh): several times as many
    blocks as run at a time, but what L2 has room for; and so that there is an even number of such
    sections."""
    enough = 256 // params["head_dim"] * _multiprocessors(params, one)
    pairs = max(1, round(_heads(one) * _blocks(params, one) / enough / 2))
    return -(-_heads(one) // (2 * pairs))


def order(params: Params, one: Problem) -> int:
    """What schedules take as `rounds`. In any order 2 where there are few causal blocks an SM: the
    longest ones of all heads come first."""
    if "form" in params:
        return _abreast(params, one)
    if params["deterministic"]:
        return rounds_of(params, one)
    few = _blocks(params, one) * _heads(one) <= _FEW * _multiprocessors(params, one)
    return 2 if one["causal"] and few else 1


def grid(params: Params, one: Problem) -> Dim3:
    """One block an SM, or fewer where there is less to do, or no room for another team."""
    blocks, heads, each = _blocks(params, one), _heads(one), 1 + is_paired(params)
    workers = _multiprocessors(params, one)
    if params["deterministic"] and "form" not in params:
        rounds = rounds_of(params, one)
        return (_teams(blocks, heads, workers, rounds) * -(-blocks // rounds) * each, 1, 1)
    return (min(blocks * heads, workers) * each, 1, 1)
