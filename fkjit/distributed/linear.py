"""Products with a weight of which each rank has a part, overlapped with messages.

    column   x [M / ranks, K] of each rank, weight [N / ranks, K] -> [M, N / ranks]
             rows of the others arrive while the present ones are multiplied; own ones first
    row      x [M, K / ranks], weight [N, K / ranks] -> [M / ranks, N]
             partial sums of others' rows leave while the next ones are multiplied; own ones last

Each is the other's gradient. Partial sums travel in x's dtype and are added in fp32, in order of
the ranks: the same bits at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from fkjit.arguments import one_of
from fkjit.distributed.agree import agree
from fkjit.distributed.exchange import shift
from fkjit.distributed.groups import Group, check_tensors, eager, group_of
from fkjit.distributed.symmetric import arriving, available, pushing
from fkjit.errors import DeviceError, ParameterError
from fkjit.ops.gemm.backward import ACTIVATION
from fkjit.ops.gemm.call import linear
from fkjit.ops.op.autograd import Differentiable, Tensors, as_tuple

TRANSPORTS = ("nccl", "symmetric")


class Said(NamedTuple):
    group: Group
    activation: str | None = None
    gate: bool = False
    transport: str = "nccl"


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
    timeout: float | None = None,
) -> Any:
    """activation(X weightᵀ + bias) with X the rows of all ranks, one behind the other.

    Args:
        x: [rows, K], this rank's rows, as many on every rank; torch, fp16, bf16 or fp32.
        weight: [N, K], this rank's outputs; bias: [N].
        activation, gate: as in `fkjit.linear`; with a gate this rank's gate and up stand together.
        group: a ProcessGroup, a DeviceMesh of one dimension, or None: all ranks.
        transport: "nccl" (messages of the process group, rank by rank) or "symmetric" (GPUs of one
            host: copy engines read rows out of their owners' memory).
        timeout: as in `ring_attention`.

    Returns:
        [ranks * rows, N], with gradients of x, weight and bias: x's rows are fetched again for
        weight's, and what an activation is of is computed again.

    Raises:
        ParameterError: shapes, also ranks whose shapes differ. PeerError: a rank has stopped. The
        others as `fkjit.linear`. torch.compile ends its graph at the call.
    """
    call = "column_parallel_linear"
    said = Said(_group(call, x, weight, bias, group, transport, timeout), activation, gate)
    said = said._replace(transport=transport)
    _check(call, said.group, x, weight)
    return _COLUMN((x, weight, bias), said)[0]


@eager
def row_parallel_linear(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    group: Any = None,
    transport: str = "nccl",
    timeout: float | None = None,
) -> Any:
    """The sum of all ranks' x weightᵀ, and bias: this rank's share of its rows.

    Args:
        x: [ranks * rows, K], this rank's columns; weight: [N, K], this rank's columns.
        bias: [N], the same on every rank; added once.
        group, transport, timeout: as in `column_parallel_linear`.

    Returns:
        [rows, N], with gradients of x, weight and bias (that of bias is of all rows).

    Raises:
        ParameterError: also rows that are no multiple of the ranks. The others as
        `column_parallel_linear`.
    """
    call = "row_parallel_linear"
    said = Said(_group(call, x, weight, bias, group, transport, timeout), transport=transport)
    _check(call, said.group, x, weight)
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
    if transport == "symmetric" and not available(x):
        raise DeviceError(
            f"{call}: transport='symmetric' wants GPUs and a torch with symmetric memory; "
            "allowed: 'nccl'"
        )
    return group_of(call, group, timeout)


def _check(call: str, group: Group, x: Any, weight: Any) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ParameterError(
            f"{call}: x {tuple(x.shape)}, weight {tuple(weight.shape)}; allowed: [rows, K], [N, K]"
        )
    agree(group, "shapes of x and weight", (*x.shape, *weight.shape, x.dtype.itemsize), x.device)


# ------------------------------------------------------------------ rows that come and go


def _gathered(said: Said, x: Any) -> Iterator[tuple[int, Any]]:
    """(rank, its rows), this rank's own first; the others are under way meanwhile."""
    group, x = said.group, x.contiguous()
    if said.transport == "symmetric":
        yield from arriving(group, x)
        return
    coming = [shift(group, x, by, tag=by) for by in range(1, group.size)]
    yield group.rank, x
    for by, message in enumerate(coming, 1):
        yield (group.rank - by) % group.size, message.wait()


def _scattered(
    said: Said, shape: Sequence[int], like: Any, make: Callable[[int, str | None], Any]
) -> Any:
    """fp32 sum over ranks of what each makes of this rank's rows.

    make: (rank, out_dtype) -> the rows that rank is to have; own ones are made last, in fp32.
    """
    group, found = said.group, {}
    if said.transport == "symmetric":
        others = pushing(group, shape, like, lambda rank: make(rank, None))
    else:
        others = {}
        for by in range(1, group.size):
            part = make((group.rank + by) % group.size, None)
            others[(group.rank - by) % group.size] = shift(group, part, by, tag=by)
    found[group.rank] = make(group.rank, "fp32")
    for rank, message in others.items():
        found[rank] = message.wait()
    total = found[0].float()
    for rank in range(1, group.size):
        total = total + found[rank]
    return total


def _rows(x: Any, rank: int, size: int) -> Any:
    each = x.shape[0] // size
    return x[rank * each : (rank + 1) * each]


# ------------------------------------------------------------------ column-parallel


def _column(inputs: Tensors, said: Said) -> tuple[Tensors, Tensors]:
    x, weight, bias = inputs
    size = said.group.size
    wide = weight.shape[0] // 2 if said.gate else weight.shape[0]
    out = x.new_empty(size * x.shape[0], wide)
    for rank, rows in _gathered(said, x):
        linear(
            rows, weight, bias, activation=said.activation, gate=said.gate,
            out=_rows(out, rank, size),
        )  # fmt: skip
    return (out,), inputs


def _column_backward(saved: Tensors, gradients: Tensors, needed: Tensors, said: Said) -> Tensors:
    (x, weight, bias), size = saved, said.group.size
    dz, whole = gradients[0].contiguous(), None
    if said.gate or said.activation or needed[1]:
        whole = x.new_empty(size * x.shape[0], x.shape[1])
        for rank, rows in _gathered(said, x):
            _rows(whole, rank, size).copy_(rows)
    if said.gate or said.activation:
        pre = linear(whole, weight, bias)
        options = (said.activation or "none", said.gate, True, False)
        dz = as_tuple(ACTIVATION((dz, pre, weight), (), options))[0]

    def of_rank(rank: int, out_dtype: str | None) -> Any:
        return linear(_rows(dz, rank, size), weight, weight_layout="kn", out_dtype=out_dtype)

    dx = _scattered(said, x.shape, x, of_rank).to(x.dtype) if needed[0] else None
    dweight = None if whole is None or not needed[1] else linear(dz.t(), whole.t())
    dbias = dz.float().sum(0).to(weight.dtype) if needed[2] else None
    return dx, dweight, dbias


# ------------------------------------------------------------------ row-parallel


def _row(inputs: Tensors, said: Said) -> tuple[Tensors, Tensors]:
    x, weight, bias = inputs
    size = said.group.size

    def of_rank(rank: int, out_dtype: str | None) -> Any:
        return linear(_rows(x, rank, size), weight, out_dtype=out_dtype)

    total = _scattered(said, (x.shape[0] // size, weight.shape[0]), x, of_rank)
    total = total if bias is None else total + bias.float()
    return (total.to(x.dtype),), (x, weight)


def _row_backward(saved: Tensors, gradients: Tensors, needed: Tensors, said: Said) -> Tensors:
    (x, weight), size, dy = saved, said.group.size, gradients[0]
    whole = dy.new_empty(size * dy.shape[0], dy.shape[1])
    dx = x.new_empty(x.shape) if needed[0] else None
    for rank, rows in _gathered(said, dy):
        _rows(whole, rank, size).copy_(rows)
        if dx is not None:
            linear(rows, weight, weight_layout="kn", out=_rows(dx, rank, size))
    dweight = linear(whole.t(), x.t()) if needed[1] else None
    dbias = whole.float().sum(0).to(weight.dtype) if needed[2] else None
    return dx, dweight, dbias


_COLUMN = Differentiable("ColumnParallelLinear", _column, _column_backward)
_ROW = Differentiable("RowParallelLinear", _row, _row_backward)
