"""`fkjit.distributed.ring_attention`: attention over a sequence that ranks share."""

from __future__ import annotations

import operator
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from fkjit.arguments import one_of
from fkjit.distributed.agree import agree
from fkjit.distributed.forms import FORMS, choose
from fkjit.distributed.gather import Gather, gather
from fkjit.distributed.groups import Group, check_tensors, eager, group_of, is_mesh
from fkjit.distributed.order import LAYOUTS, chunk_length, chunks_of
from fkjit.distributed.pieces import Dense, Packed, Rules
from fkjit.distributed.ring import Ring, carries, ring
from fkjit.distributed.symmetric import available
from fkjit.distributed.ulysses import check_heads, ulysses
from fkjit.errors import ArgumentTypeError, DeviceError, ParameterError
from fkjit.ops.attention.forward import attention

_CALL = "ring_attention"
_UNBOUNDED = (None, -1)
TRANSPORTS = ("nccl", "symmetric")


@eager
def ring_attention(
    q: Any,
    k: Any,
    v: Any,
    group: Any = None,
    *,
    causal: bool = False,
    layout: str = "zigzag",
    form: str = "auto",
    softmax_scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    cu_seqlens: Any = None,
    max_seqlen: int | None = None,
    return_lse: bool = False,
    transport: str = "nccl",
    carry: bool | None = None,
    timeout: float | None = None,
) -> Any:
    """Attention of one sequence whose tokens are shared out over ranks; gradients included.

    Args:
        q: [B, Hq, S, D], k: [B, Hkv, S, D], v: [B, Hkv, S, Dv]: torch tensors, this rank's S
            tokens, as `shard` takes them; fp16, bf16 or fp32; Hq a multiple of Hkv. Any strides,
            as long as the last dimension is contiguous. With cu_seqlens [total, H, D].
        group: a ProcessGroup or DeviceMesh of one dimension; None: all ranks. A DeviceMesh of two
            dimensions is a ring (or gathers) along the first and shares heads along the second.
        causal: a token sees those up to itself.
        layout: "zigzag", which gives ranks the same work under a causal mask, or "contiguous".
        form: "ring" (keys travel while the present ones are multiplied), "gather" (all keys at
            once), "ulysses" (heads are shared out in place of tokens), "auto": which is the
            fastest by an estimate of bytes and flops; "ring" for a window to the left that is
            shorter than a rank's tokens, and for transport="symmetric". On a mesh of two
            dimensions the form of the first.
        softmax_scale: default 1 / sqrt(D).
        window: (left, right) tokens of the whole sequence that one sees; None or -1: all.
        softcap: scores become softcap * tanh(score / softcap).
        sinks: [Hq], the same on every rank: a logit of each row. Its gradient is of this rank's
            rows: add up all ranks', as of any weight that ranks have in common.
        cu_seqlens: int32 [B + 1], of this rank's parts of packed sequences, as `shard_lengths`
            makes them; the last is the number of rows. max_seqlen: at least the longest of them.
        return_lse: also the log-sum-exps, fp32 [B, Hq, S], packed [Hq, total].
        transport: of a ring's keys: "nccl" (the process group's messages) or "symmetric" (GPUs of
            one host: copy engines read them out of their owners' memory).
        carry: True: a ring's steps go on from the o of the step before, in fp32 (16 bits, without
            window, softcap or cu_seqlens, from sm_80 on). False: each leaves a partial result in
            q's dtype, and these are merged at the end, as they are where steps cannot go on. None:
            what was faster on an H200; of many tokens merging, which rounds once more.
        timeout: seconds to wait for another rank. None: the process group's own; on a GPU the
            host then does not wait.

    Returns:
        o as q with Dv columns, or (o, lse): the rows that attention over the whole sequence would
        give, with the same bits at every call with as many ranks.

    Raises:
        ParameterError: shapes, ranks whose shapes differ, lengths that are no whole chunks, heads
            that cannot be shared out, a window of packed sequences, forms without packed ones.
        ArgumentTypeError: not tensors, dtypes. DeviceError: devices, no process group.
        PeerError: a rank has stopped, or did not answer in time.

    Partial results that are merged are rounded to q's dtype, weighed and added in fp32 and rounded
    once more; gradients are added in fp32. torch.compile ends its graph at the call.
    """
    check_tensors(_CALL, q=q, k=k, v=v, sinks=sinks, cu_seqlens=cu_seqlens)
    given = Given(causal, layout, form, softmax_scale, window, softcap, transport, carry)
    packing = None if cu_seqlens is None else (cu_seqlens, max_seqlen)
    outer, heads = _groups(group, timeout)
    _check(q, k, v, sinks, packing, given, outer, heads)
    form = _form(q, k, v, packing, given, outer, heads)
    if form == "ulysses" and heads is None:
        heads, outer = outer, None
    if outer is None or outer.size == 1 < (heads.size if heads else 1):
        inner = partial(_whole, said=given)
    else:
        inner = partial(_shared, form=form, said=given, group=outer, packing=packing)
    if heads is None or heads.size == 1:
        o, lse = inner(q, k, v, sinks)
    else:
        check_heads(heads, q, k)
        order = layout if outer is None else "contiguous"
        o, lse = ulysses(q, k, v, sinks, heads, order, inner, return_lse)
    return (o, lse) if return_lse else o


class Given(NamedTuple):
    """What a call says besides its arrays and ranks."""

    causal: Any
    layout: Any
    form: Any
    softmax_scale: Any
    window: Any
    softcap: Any
    transport: Any
    carry: bool | None

    def rules(self) -> Rules:
        """ParameterError for a window that is none."""
        left, right = (None, None) if self.window is None else self.window
        sides = [None if side in _UNBOUNDED else operator.index(side) for side in (left, right)]
        if any(side is not None and side < 0 for side in sides):
            raise ParameterError(
                f"{_CALL}: window={self.window!r}: allowed: sides from 0 on, None or -1: no bound"
            )
        if self.causal:
            sides[1] = 0
        return Rules((sides[0], sides[1]), self.softmax_scale, self.softcap or None)


def _whole(q: Any, k: Any, v: Any, sinks: Any, said: Given) -> tuple[Any, Any]:
    """Attention of heads that are all here."""
    given = {
        "causal": bool(said.causal), "window": said.window, "softcap": said.softcap,
        "sinks": sinks, "softmax_scale": said.softmax_scale,
    }  # fmt: skip
    return attention(q, k, v, return_lse=True, **given)


def _shared(
    q: Any, k: Any, v: Any, sinks: Any, form: str, said: Given, group: Group, packing: Any
) -> tuple[Any, Any]:
    """Of tokens that ranks share."""
    rules, own = said.rules(), len(chunks_of(said.layout, 0, group.size))
    how = said.transport, carries(q, said.carry)
    if packing is not None:
        ends, longest = packing
        rows: Dense = Packed(rules, ends, longest, own, q.shape[0])
        return ring(q, k, v, sinks, Ring(group, said.layout, rows, 1, *how))
    length = q.shape[2] // own
    if form == "gather":
        return gather(q, k, v, sinks, Gather(group, said.layout, Dense(rules), length))
    return ring(q, k, v, sinks, Ring(group, said.layout, Dense(rules), length, *how))


# ------------------------------------------------------------------ checks


def _groups(group: Any, timeout: float | None) -> tuple[Group, Group | None]:
    """Who shares tokens, and who shares heads."""
    if is_mesh(group) and group.ndim == 2:
        ring_of, heads = (group_of(_CALL, group.get_group(axis), timeout) for axis in range(2))
        return ring_of, heads
    return group_of(_CALL, group, timeout), None


def _check(
    q: Any, k: Any, v: Any, sinks: Any, packing: Any, said: Given, outer: Group, heads: Any
) -> None:
    one_of(_CALL, "layout", said.layout, LAYOUTS)
    one_of(_CALL, "form", said.form, ("auto", *FORMS))
    one_of(_CALL, "transport", said.transport, TRANSPORTS)
    said.rules()
    _check_shapes(q, k, v, sinks, packing)
    numbers = (*q.shape, *k.shape, v.shape[-1], int(q.dtype.itemsize))
    for group in (outer, heads):
        if group is not None:
            agree(group, "shapes of q, k and v", numbers, q.device)
    if packing is None:
        ranks = heads.size if heads is not None else 1
        chunk_length(_CALL, q.shape[2] * ranks, said.layout, True, outer.size)
    else:
        _check_packing(q, packing, said, heads)
    if said.transport == "symmetric" and not available(q):
        raise DeviceError(
            f"{_CALL}: transport='symmetric' wants GPUs and a torch with symmetric memory; "
            "allowed: 'nccl'"
        )


def _check_shapes(q: Any, k: Any, v: Any, sinks: Any, packing: Any) -> None:
    rank, rows = (4, 2) if packing is None else (3, 0)
    named = "[B, H, S, D]" if packing is None else "[total, H, D]"
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if any(x.dim() != rank for x in (q, k, v)) or k.shape[:-1] != v.shape[:-1]:
        raise ParameterError(f"{_CALL}: {shapes}; allowed: {named} each, k and v alike but for D")
    if q.shape[rows] != k.shape[rows] or (rank == 4 and q.shape[0] != k.shape[0]):
        raise ParameterError(f"{_CALL}: {shapes}; allowed: as many tokens of each")
    if q.shape[1] % max(k.shape[1], 1) or not k.shape[1] or q.shape[-1] != k.shape[-1]:
        raise ParameterError(
            f"{_CALL}: {shapes}; allowed: Hq a multiple of Hkv, q and k of one head_dim"
        )
    if sinks is not None and tuple(sinks.shape) != (q.shape[1],):
        raise ParameterError(f"{_CALL}: sinks has shape {tuple(sinks.shape)}; allowed: [Hq]")
    if not (q.dtype == k.dtype == v.dtype):
        raise ArgumentTypeError(f"{_CALL}: q is {q.dtype}, k {k.dtype}, v {v.dtype}; allowed: one")


def _check_packing(q: Any, packing: Any, said: Given, heads: Group | None) -> None:
    ends, longest = packing
    if heads is not None and heads.size > 1:
        raise ParameterError(f"{_CALL}: cu_seqlens on a mesh of two dimensions; allowed: of one")
    if said.form not in ("auto", "ring"):
        raise ParameterError(f"{_CALL}: cu_seqlens with form={said.form!r}; allowed: 'ring'")
    if said.window is not None and tuple(said.window) not in ((None, None), (-1, -1)):
        raise ParameterError(
            f"{_CALL}: window={said.window!r} with cu_seqlens: chunks of sequences of different "
            "lengths would need a window each; allowed: None"
        )
    if type(longest) is not int or longest < 1:
        raise ParameterError(f"{_CALL}: max_seqlen={longest!r}; allowed: at least the longest's")
    if ends.is_cuda:  # reading them would stop the host
        return
    found = ends.tolist()
    lengths = [b - a for a, b in pairwise(found)]
    chunks = len(chunks_of(said.layout, 0, 2))
    if found[-1] != q.shape[0] or any(n % chunks for n in lengths) or max(lengths) > longest:
        raise ParameterError(
            f"{_CALL}: cu_seqlens={found} beside {q.shape[0]} rows and max_seqlen={longest}; "
            f"allowed: lengths that are multiples of {chunks} and up to max_seqlen, all rows"
        )


def _form(
    q: Any, k: Any, v: Any, packing: Any, said: Given, outer: Group, heads: Group | None
) -> str:
    if packing is not None:
        return "ring"
    if said.form != "auto":
        if said.form == "ulysses" and heads is not None:
            raise ParameterError(
                f"{_CALL}: form='ulysses' on a mesh of two dimensions, whose second shares heads; "
                "allowed: 'ring', 'gather' or 'auto' for the first"
            )
        return said.form
    left, many = said.rules().window[0], heads.size if heads is not None else 1
    short = left is not None and left < q.shape[2] * many
    if short or said.transport == "symmetric":  # a ring ends when nobody sees what would come
        return "ring"
    return choose(
        q.shape, k.shape, v.shape[-1], q.dtype.itemsize, bool(said.causal), outer.size,
        said.layout, may_share_heads=heads is None, heads_over=many,
    )  # fmt: skip
