"""Products with a weight of which each rank has a part, overlapped with messages.

    column   x [M / ranks, K] of each rank, weight [N / ranks, K] -> [M, N / ranks]
             rows of the others arrive while the present ones are multiplied; own ones first
    row      x [M, K / ranks], weight [N, K / ranks] -> [M / ranks, N]
             partial sums of others' rows leave while the next ones are multiplied; own ones last

Each is the other's gradient. Partial sums are in x's dtype and are added in fp32, in order of the
ranks, by `moe_combine` (whose choices are the ranks): the same bits at every call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from fkjit.arguments import one_of, whole
from fkjit.distributed.agree import agree
from fkjit.distributed.exchange import shift
from fkjit.distributed.forms import best_pieces
from fkjit.distributed.groups import Group, check_tensors, eager, group_of
from fkjit.distributed.schedule import Product
from fkjit.distributed.symmetric import arriving, available, filling, pushing, taking
from fkjit.errors import DeviceError, ParameterError
from fkjit.ops.gemm.backward import ACTIVATION
from fkjit.ops.gemm.call import linear
from fkjit.ops.gemm.flagged import (
    MOST_ROWS,
    TELLS,
    WAITS,
    finished_count,
    linear_flagged,
    takes,
)
from fkjit.ops.moe.combine import moe_combine
from fkjit.ops.op.autograd import Differentiable, Tensors, as_tuple

TRANSPORTS = ("nccl", "symmetric", "tiles")
_MOST_PIECES = 64
_CHUNKS = (4, 2, 1)  # of a rank's rows, that a flag is of


class Said(NamedTuple):
    group: Group
    activation: str | None = None
    gate: bool = False
    transport: str = "nccl"
    pieces: int = 1


@eager
def column_parallel_linear(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    group: Any = None,
    activation: str | None = None,
    gate: bool = False,
    transport: str = "nccl",
    pieces: int | None = None,
    timeout: float | None = None,
) -> Any:
    """activation(X weightᵀ + bias) with X the rows of all ranks, one behind the other.

    Args:
        x: [rows, K], this rank's rows, as many on every rank; torch, fp16, bf16 or fp32.
        weight: [N, K], this rank's outputs; bias: [N].
        activation, gate: as in `fkjit.linear`; with a gate this rank's gate and up stand together.
        group: a ProcessGroup, a DeviceMesh of one dimension, or None: all ranks.
        transport: "nccl" (messages of the process group, rank by rank), "symmetric" (GPUs of one
            host: copy engines read rows out of their owners' memory), or "tiles": as that, but in
            one product, of which a tile begins when the flag of its rows is set. On Hopper, in 16
            bits, for rows that are a multiple of 256 and other sizes that are multiples of 8;
            anything else goes as "symmetric".
        pieces: messages that a rank's rows travel in, of NCCL; each is multiplied by itself. None:
            the fastest number by an estimate of bytes and flops.
        timeout: as in `ring_attention`.

    Returns:
        [ranks * rows, N], with gradients of x, weight and bias: x's rows are fetched again for
        weight's, and what an activation is of is computed again.

    Raises:
        ParameterError: shapes, also ranks whose shapes differ. PeerError: a rank has stopped. The
        others as `fkjit.linear`. torch.compile ends its graph at the call.
    """
    call = "column_parallel_linear"
    one = _group(call, x, weight, bias, group, transport, timeout)
    _check(call, one, x, weight, pieces)
    a = Product(x.shape[0] * one.size, weight.shape[0] * one.size, x.shape[1], x.dtype.itemsize)
    pieces = best_pieces(True, a, one.size) if pieces is None else pieces
    said = Said(one, activation, gate, transport, pieces)
    return _COLUMN((x, weight, bias), said)[0]


@eager
def row_parallel_linear(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    group: Any = None,
    transport: str = "nccl",
    pieces: int | None = None,
    timeout: float | None = None,
) -> Any:
    """The sum of all ranks' x weightᵀ, and bias: this rank's share of its rows.

    Args:
        x: [ranks * rows, K], this rank's columns; weight: [N, K], this rank's columns.
        bias: [N], the same on every rank; added once.
        group, transport, pieces, timeout: as in `column_parallel_linear`.

    Returns:
        [rows, N], with gradients of x, weight and bias (that of bias is of all rows).

    Raises:
        ParameterError: also rows that are no multiple of the ranks. The others as
        `column_parallel_linear`.
    """
    call = "row_parallel_linear"
    one = _group(call, x, weight, bias, group, transport, timeout)
    _check(call, one, x, weight, pieces)
    a = Product(x.shape[0], weight.shape[0], x.shape[1] * one.size, x.dtype.itemsize)
    pieces = best_pieces(False, a, one.size) if pieces is None else pieces
    said = Said(one, transport=transport, pieces=pieces)
    if x.shape[0] % said.group.size:
        raise ParameterError(
            f"{call}: x has {x.shape[0]} rows; allowed: a multiple of {said.group.size} ranks"
        )
    return _ROW((x, weight, bias), said)[0]


def _group(
    call: str, x: Any, weight: Any, bias: Any, group: Any, transport: str, timeout: float | None
) -> Group:
    check_tensors(call, x=x, weight=weight, bias=bias)
    one_of(call, "transport", transport, TRANSPORTS)
    if transport != "nccl" and not available(x):
        raise DeviceError(
            f"{call}: transport={transport!r} wants GPUs and a torch with symmetric memory; "
            "allowed: 'nccl'"
        )
    return group_of(call, group, timeout)


def _check(call: str, group: Group, x: Any, weight: Any, pieces: int | None) -> None:
    if pieces is not None:
        whole(call, "pieces", pieces, 1, _MOST_PIECES)
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ParameterError(
            f"{call}: x {tuple(x.shape)}, weight {tuple(weight.shape)}; allowed: [rows, K], [N, K]"
        )
    numbers = (*x.shape, *weight.shape, x.dtype.itemsize, pieces or 0)
    agree(group, "shapes of x and weight, and pieces", numbers, x.device)


# ------------------------------------------------------------------ rows that come and go


def _gathered(said: Said, x: Any) -> Iterator[tuple[Any, Callable[[Any], Any]]]:
    """(rows, where they belong in an array of all ranks' rows), this rank's own first; pieces of
    the others' are under way meanwhile."""
    group, x = said.group, x.contiguous()
    if said.transport != "nccl":
        for rank, rows in arriving(group, x):
            yield rows, partial(_rows, rank=rank, size=group.size)
        return
    pieces = x.tensor_split(min(said.pieces, max(x.shape[0], 1)))
    coming = [[shift(group, piece, by, tag=by) for piece in pieces] for by in range(1, group.size)]
    yield x, partial(_rows, rank=group.rank, size=group.size)
    for by, messages in enumerate(coming, 1):
        rank, begin = (group.rank - by) % group.size, 0
        for message in messages:
            rows = message.wait()
            yield rows, partial(_rows, rank=rank, size=group.size, begin=begin, count=len(rows))
            begin += len(rows)


def _scattered(said: Said, x: Any, weight: Any, layout: str, bias: Any = None) -> Any:
    """The sum over ranks of what each makes of this rank's rows, and bias: added in fp32, in order
    of the ranks, rounded once. Rows of x are all ranks'; own ones are made last."""
    group, each = said.group, x.shape[0] // said.group.size
    columns = weight.shape[layout == "kn"]
    chunks = _chunks(said, x, weight, layout, each)
    if chunks:
        return _added(_taken(said, x, weight, layout, bias, chunks))

    def make(rows: Any, out: Any) -> Any:  # of the sum that stays here, with the bias
        return linear(rows, weight, None if out is None else bias, weight_layout=layout, out=out)

    if said.transport != "nccl":
        parts, wait = pushing(
            group, (each, columns), x, lambda rank: make(_rows(x, rank, group.size), None)
        )
    else:
        parts = x.new_empty(group.size, each, columns)
        wait = _sent(said, x, parts, make)
    make(_rows(x, group.rank, group.size), parts[group.rank])
    wait()
    return _added(parts)


def _taken(said: Said, x: Any, weight: Any, layout: str, bias: Any, chunks: int) -> Any:
    """[ranks, rows, columns]: one product of all rows, whose tiles copy engines take away."""
    group, each = said.group, x.shape[0] // said.group.size
    shape = each, weight.shape[layout == "kn"]
    x, weight = _placed(x), _placed(weight)
    parts, made, flags, take = taking(group, shape, x, chunks)
    first = (group.rank + 1) % group.size * each
    given = {"chunk_rows": each // chunks, "weight_layout": layout}
    full = finished_count(x, weight, made, **given)
    # The bias comes once: with the part of rank 0.
    own = bias if group.rank == 0 else None
    linear_flagged(x, weight, own, flags, made, how=TELLS, from_row=first, **given)
    take(full)
    return parts


def _multiplied(
    said: Said, x: Any, weight: Any, out: Any, chunks: int, bias: Any = None, **options: Any
) -> Any:
    """The product of all ranks' rows, whose tiles wait for them; the rows, until the next call."""
    whole, flags, end = filling(said.group, x, chunks)
    weight = _placed(weight)
    linear_flagged(
        whole, weight, bias, flags, out, how=WAITS, chunk_rows=x.shape[0] // chunks,
        from_row=said.group.rank * x.shape[0], **options,
    )  # fmt: skip
    end()
    return whole


def _placed(x: Any) -> Any:
    """x where TMA reads it: contiguous, on a 16-byte boundary."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def _chunks(said: Said, x: Any, weight: Any, layout: str, rows: int) -> int:
    """How many a rank's rows are for flags; 0: no product in step with them."""
    if said.transport != "tiles" or said.group.size == 1:
        return 0
    columns = weight.shape[layout == "kn"] // (2 if said.gate else 1)
    if not takes(x, weight, columns):
        return 0
    return next((n for n in _CHUNKS if rows and rows % (n * MOST_ROWS) == 0), 0)


def _sent(said: Said, x: Any, parts: Any, make: Callable[..., Any]) -> Callable[[], None]:
    """Makes the other ranks' parts, each sent as soon as it is there; what waits for theirs."""
    group, messages = said.group, []
    for by in range(1, group.size):
        source = (group.rank - by) % group.size
        count = min(said.pieces, max(parts.shape[1], 1))
        rows = _rows(x, (group.rank + by) % group.size, group.size).tensor_split(count)
        for piece, into in zip(rows, parts[source].tensor_split(count), strict=True):
            messages.append(shift(group, make(piece, None), by, by, into))

    def wait() -> None:
        for message in messages:
            message.wait()

    return wait


def _added(parts: Any) -> Any:
    """[rows, columns] of [ranks, rows, columns], in one pass: a token's choices are the ranks."""
    size, rows, columns = parts.shape
    choices = sys.modules["torch"].arange(size * rows, dtype=_int32(), device=parts.device)
    return moe_combine(parts.view(-1, columns), choices.view(size, rows).t().contiguous())


def _int32() -> Any:
    return sys.modules["torch"].int32


def _rows(x: Any, rank: int, size: int, begin: int = 0, count: int | None = None) -> Any:
    """A rank's rows of all ranks', or some of them."""
    each = x.shape[0] // size
    return x.narrow(0, rank * each + begin, each if count is None else count)


# ------------------------------------------------------------------ column-parallel


def _column(inputs: Tensors, said: Said) -> tuple[Tensors, Tensors]:
    x, weight, bias = inputs
    wide = weight.shape[0] // 2 if said.gate else weight.shape[0]
    out = x.new_empty(said.group.size * x.shape[0], wide)
    chunks = _chunks(said, x, weight, "nk", x.shape[0])
    if chunks:
        _multiplied(said, x, weight, out, chunks, bias, activation=said.activation, gate=said.gate)
        return (out,), inputs
    for rows, place in _gathered(said, x):
        linear(rows, weight, bias, activation=said.activation, gate=said.gate, out=place(out))
    return (out,), inputs


def _column_backward(saved: Tensors, gradients: Tensors, needed: Tensors, said: Said) -> Tensors:
    x, weight, bias = saved
    dz, whole = gradients[0].contiguous(), None
    if said.gate or said.activation or needed[1]:
        whole = x.new_empty(said.group.size * x.shape[0], x.shape[1])
        for rows, place in _gathered(said, x):
            place(whole).copy_(rows)
    if said.gate or said.activation:
        pre = linear(whole, weight, bias)
        options = (said.activation or "none", said.gate, True, False)
        dz = as_tuple(ACTIVATION((dz, pre, weight), (), options))[0]
    dx = _scattered(said._replace(gate=False), dz, weight, "kn") if needed[0] else None
    dweight = None if whole is None or not needed[1] else linear(dz.t(), whole.t())
    dbias = dz.float().sum(0).to(weight.dtype) if needed[2] else None
    return dx, dweight, dbias


# ------------------------------------------------------------------ row-parallel


def _row(inputs: Tensors, said: Said) -> tuple[Tensors, Tensors]:
    x, weight, bias = inputs
    return (_scattered(said, x, weight, "nk", bias),), (x, weight)


def _row_backward(saved: Tensors, gradients: Tensors, needed: Tensors, said: Said) -> Tensors:
    (x, weight), dy = saved, gradients[0].contiguous()
    dx = x.new_empty(x.shape) if needed[0] else None
    chunks = _chunks(said, dy, weight, "kn", dy.shape[0]) if dx is not None else 0
    if chunks:
        whole = _multiplied(said, dy, weight, dx, chunks, weight_layout="kn")
    else:
        whole = dy.new_empty(said.group.size * dy.shape[0], dy.shape[1])
        for rows, place in _gathered(said, dy):
            place(whole).copy_(rows)
            if dx is not None:
                linear(rows, weight, weight_layout="kn", out=place(dx))
    dweight = linear(whole.t(), x.t()) if needed[1] else None
    dbias = whole.float().sum(0).to(weight.dtype) if needed[2] else None
    return dx, dweight, dbias


_COLUMN = Differentiable("ColumnParallelLinear", _column, _column_backward)
_ROW = Differentiable("RowParallelLinear", _row, _row_backward)
