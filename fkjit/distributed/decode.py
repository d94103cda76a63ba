"""Decoding over keys that ranks share: partial attention, then one small all-gather."""

from __future__ import annotations

import sys
from math import prod
from typing import Any

from fkjit.distributed.agree import agree
from fkjit.distributed.exchange import all_gather
from fkjit.distributed.groups import check_tensors, eager, group_of
from fkjit.errors import ParameterError
from fkjit.ops.attention.decode import call as decode
from fkjit.ops.attention.merge import call as merge
from fkjit.types import Layout

_CALL = "attention_decode"
_STEP = 16  # bytes: where lse begins behind o


@eager
def attention_decode(
    q: Any,
    k: Any,
    v: Any,
    seq_lens: Any = None,
    group: Any = None,
    *,
    newest: int = -1,
    causal: bool = True,
    sinks: Any = None,
    layout: Layout = "bhsd",
    return_lse: bool = False,
    timeout: float | None = None,
    **options: Any,
) -> Any:
    """Attention of a few new tokens, the same on every rank, over keys of which each has a part.

    Args:
        q: [B, Hq, S, D], or [B, Hq, D] for one token: torch, as `fkjit.attention_decode`.
        k: [B, Hkv, Sk, D], v: [B, Hkv, Sk, Dv]: this rank's keys; ranks may have different numbers
            of them. Which rank has which does not matter, but for `newest`.
        seq_lens: int32 [B]: how many of its keys each sequence has on this rank, 0 too; default Sk.
        group: a ProcessGroup, a DeviceMesh of one dimension, or None: all ranks.
        newest: the rank that has the keys of the new tokens, where there are several (causal: a
            token sees those before it). One token sees every key.
        sinks: as in `fkjit.attention_decode`; counted once.
        options: softmax_scale, softcap, k_scale, v_scale, split_size of it.
        timeout: as in `ring_attention`.

    Returns:
        o as q with Dv columns, or (o, lse), the same bits on every rank: each rank's partial
        result, rounded to q's dtype, weighed and added in fp32 in order of the ranks. No gradient.

    Raises:
        ParameterError: also for options that want keys' places (window, alibi_slopes, bias, mask,
        score_mod). The others as `fkjit.attention_decode`, PeerError as `ring_attention`.
    """
    allowed = ("softmax_scale", "softcap", "k_scale", "v_scale", "split_size")
    wrong = [name for name in options if name not in allowed]
    if wrong:
        raise ParameterError(
            f"{_CALL}: {', '.join(wrong)}; allowed where ranks share keys: {', '.join(allowed)}"
        )
    check_tensors(_CALL, q=q, k=k, v=v, seq_lens=seq_lens, sinks=sinks)
    one = group_of(_CALL, group, timeout)
    tokens = 1 if q.dim() == 3 else q.shape[2 if layout == "bhsd" else 1]
    here = one.rank == newest % one.size
    o, lse = decode.attention_decode(
        q, k, v, seq_lens, causal=bool(causal) and (here or tokens == 1), layout=layout,
        sinks=sinks if one.rank == 0 else None, return_lse=True, **options,
    )  # fmt: skip
    found = merge_states(o, lse, group, layout=layout, timeout=timeout)
    return found if return_lse else found[0]


@eager
def merge_states(
    o: Any, lse: Any, group: Any = None, *, layout: Layout = "bhsd", timeout: float | None = None
) -> tuple[Any, Any]:
    """Partial results of attention, each rank's over its own keys, put together on every rank.

    o, lse: what `fkjit.attention`, `attention_decode` or `paged_attention` returned with
    return_lse=True, of the same shape on every rank; where a rank has no key, lse is -inf. The
    result is `fkjit.merge_states` of all, in order of the ranks. One message.
    """
    call = "merge_states"
    check_tensors(call, o=o, lse=lse)
    one = group_of(call, group, timeout)
    if one.size == 1:
        return o, lse
    agree(one, "shapes of o", (*o.shape, o.dtype.itemsize), o.device)
    torch = sys.modules["torch"]
    ends = prod(o.shape) * o.dtype.itemsize
    start = -(-ends // _STEP) * _STEP
    mine = torch.zeros(start + 4 * prod(lse.shape), dtype=torch.uint8, device=o.device)
    mine[:ends].view(o.dtype).copy_(o.reshape(-1))
    mine[start:].view(torch.float32).copy_(lse.reshape(-1))
    step = -(-mine.numel() // _STEP) * _STEP - mine.numel()
    every = all_gather(one, torch.nn.functional.pad(mine, (0, step))).wait()
    os = every[:, :ends].view(o.dtype).unflatten(1, o.shape)
    sums = every[:, start : start + 4 * lse.numel()].view(torch.float32).unflatten(1, lse.shape)
    return merge.merge_states(os, sums, layout=layout)
