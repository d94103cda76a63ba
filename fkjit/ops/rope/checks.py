"""What can be wrong with a call of `fkjit.rope`, and what it asks of the kernels."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.ops.op.checks import check_dtype, check_flag, check_output, check_same_dtype, check_shape
from fkjit.ops.op.op import Launch, Output, Request, arch_of
from fkjit.ops.rope.frequencies import THETA, Llama3Scaling, YarnScaling, check_frequencies
from fkjit.ops.rope.kernels import FUSED, TABLE, VECTOR_BYTES, default, dimensions
from fkjit.runtime.interop import ITEMSIZE, View
from fkjit.spec import Problem
from fkjit.tuning import tuned

_LAST = (1 << 31) - 1  # position, and number of rows
_MAX_HEADS = 65_535
_HEADS = ("q", "k", "out_q", "out_k")  # arrays of them
_SCALINGS = {kind.__name__: kind for kind in (Llama3Scaling, YarnScaling)}
Views = Mapping[str, View | None]


def check(
    views: Views, start: int, theta: Any, named: Any, rotary_dim: Any, interleaved: Any,
    layout: Any, inverse: Any,
) -> Request:  # fmt: skip
    """The request of a call; `named` is the scaling as a tuple that begins with its name."""
    q, table = views["q"], views["table"]
    assert q is not None
    layout = _check_layout(layout, q)
    batch, heads_q, length = dimensions(layout, q.shape)
    heads_k = _check_keys(views["k"], q, layout)
    dtype, outputs = _check_outputs(views)
    columns = check_rotary_dim(rotary_dim, table, q.shape[-1])
    scaling = check_source(table, theta, named, columns)
    _check_start(start, length, table)
    problem = {
        "dtype": dtype,
        "layout": layout,
        "batch": batch,
        "length": length,
        "heads_q": heads_q,
        "heads_k": heads_k,
        "head_dim": q.shape[-1],
        "rotary_dim": columns,
        "interleaved": check_flag("rope", "interleaved", interleaved),
        "inverse": check_flag("rope", "inverse", inverse),
        "positions": _check_positions(views["positions"], layout, batch, length),
        "start": start,
        "theta": THETA if theta is None else theta,
        "scaling": scaling,
    }
    inputs = {"q": q, "k": views["k"], "positions": views["positions"], "table": table}
    return Request(inputs, outputs, _launches(problem, views))


def _check_outputs(views: Views) -> tuple[str, dict[str, Output | None]]:
    """The dtype of q and k, and what is written."""
    dtype = check_same_dtype("rope", {"q": views["q"], "k": views["k"]})
    outputs: dict[str, Output | None] = {}
    for name, given in (("q", views["out_q"]), ("k", views["out_k"])):
        view, out = views[name], f"out_{name}"
        if view is None:
            outputs[out] = None
            if given is not None:
                raise ParameterError(f"rope: {out} without a {name}; leave it out")
            continue
        check_columns(name, view)
        check_output("rope", given, tuple(view.shape), dtype, out)
        if given is not None:
            check_columns(out, given)
        outputs[out] = Output(tuple(view.shape), dtype, given)
    return dtype, outputs


def _launches(problem: Problem, views: Views) -> tuple[Launch, ...]:
    """One, or none where there is nothing to turn."""
    rows = problem["batch"] * problem["length"]
    heads = problem["heads_q"] + problem["heads_k"]
    if not rows * heads:
        return ()
    if rows > _LAST or heads > _MAX_HEADS:
        raise ParameterError(
            f"rope: {rows:,} rows of {heads:,} heads are more than a launch can have ({_LAST:,} of "
            f"{_MAX_HEADS:,}); split the call"
        )
    fixed = {
        "dtype": problem["dtype"],
        "vector": _vectors(problem, views),
        "interleaved": problem["interleaved"],
    }
    spec = FUSED if views["table"] is None else TABLE
    q = views["q"]
    assert q is not None
    return (Launch(spec, tuned(spec, default(fixed, problem), problem, arch_of(q)), problem),)


def _check_layout(layout: Any, q: View) -> str:
    if layout not in ("bhsd", "bshd"):
        raise ParameterError(f"rope: layout={layout!r} is not one of ['bhsd', 'bshd']")
    if len(q.shape) not in (3, 4):
        raise ParameterError(
            f"rope: q has shape {tuple(q.shape)}; allowed: [B, H, S, D], [B, S, H, D] with "
            "layout='bshd', [T, H, D]"
        )
    return "thd" if len(q.shape) == 3 else layout


def _check_keys(k: View | None, q: View, layout: str) -> int:
    """Heads of k; all else is as in q."""
    if k is None:
        return 0
    at = 2 if len(q.shape) == 4 and layout == "bshd" else 1
    heads = k.shape[at] if len(k.shape) == len(q.shape) else 0
    wanted = (*q.shape[:at], heads or "H", *q.shape[at + 1 :])
    if tuple(k.shape) != wanted and 0 not in k.shape[at : at + 1]:
        shown = ", ".join(map(str, (*q.shape[:at], "any", *q.shape[at + 1 :])))
        raise ParameterError(
            f"rope: k has shape {tuple(k.shape)}; allowed: q's, with any number of heads: [{shown}]"
        )
    return heads


def check_columns(name: str, view: View, call: str = "rope") -> None:
    if 0 not in view.shape and view.shape[-1] > 1 and view.strides[-1] != 1:
        raise ParameterError(
            f"{call}: {name} has stride {view.strides[-1]} in its last dimension; it must be "
            f"contiguous: pass a contiguous copy of {name}"
        )


def check_rotary_dim(rotary_dim: Any, table: View | None, head_dim: int, call: str = "rope") -> int:
    """The first columns that turn: by default all, or the table's."""
    if table is not None:
        check_dtype(call, "table", table, ("fp32",))
        if len(table.shape) != 2:
            raise ParameterError(
                f"{call}: table has shape {tuple(table.shape)}; allowed: [positions, rotary_dim], "
                "of fkjit.rope_table"
            )
        check_columns("table", table, call)
        rotary_dim = table.shape[1] if rotary_dim is None else rotary_dim
    try:
        columns = head_dim if rotary_dim is None else operator.index(rotary_dim)
    except TypeError as error:
        raise ArgumentTypeError(f"{call}: rotary_dim={rotary_dim!r} is no integer") from error
    check_frequencies(call, columns, THETA, None)
    if columns > head_dim:
        raise ParameterError(f"{call}: rotary_dim={columns} is above q's head_dim, {head_dim}")
    if table is not None and table.shape[1] != columns:
        raise ParameterError(
            f"{call}: table has {table.shape[1]} columns, but rotary_dim={columns}; they are the "
            "same"
        )
    return columns


def check_source(
    table: View | None, theta: Any, named: Any, columns: int, call: str = "rope"
) -> Llama3Scaling | None:
    """The scaling, where there is no table that has it."""
    scaling = named
    if isinstance(named, tuple) and named[0] in _SCALINGS:
        scaling = _SCALINGS[named[0]](*named[1:])
    if table is not None and not (theta is None and scaling is None):
        raise ParameterError(
            f"{call}: theta and scaling beside a table, which has frequencies of its own; give "
            "them to fkjit.rope_table"
        )
    check_frequencies(call, columns, THETA if theta is None else theta, scaling)
    if isinstance(scaling, YarnScaling):
        raise ParameterError(
            f"{call}: scaling={scaling} is for tables: pass table=fkjit.rope_table(length, "
            f"{columns}, scaling=...) in its place"
        )
    return scaling


def _check_start(start: int, length: int, table: View | None) -> None:
    """A start that is an integer can be looked at."""
    rows = _LAST + 1 if table is None else table.shape[0]
    if start < 0 or start + length > rows:
        where = "2^31 - 1" if table is None else f"{rows - 1}, the table's last"
        raise ParameterError(
            f"rope: positions={start} puts {length} rows at {start} to {start + length - 1}; "
            f"allowed: 0 to {where}"
        )


def _check_positions(ids: View | None, layout: str, batch: int, length: int) -> str:
    """ "none", "starts" or "ids"."""
    if ids is None:
        return "none"
    check_dtype("rope", "positions", ids, ("int32", "int64"))
    shape = tuple(ids.shape)
    if layout == "thd":
        check_shape("rope", "positions", ids, (length,), "a position for each row of flat q,")
        return "ids"
    if shape == (batch,):
        return "starts"
    if shape not in ((batch, length), (1, length), (length,)):
        raise ParameterError(
            f"rope: positions has shape {shape}; allowed: ({batch},) starts of the batches, or "
            f"({batch}, {length}), (1, {length}) or ({length},) positions of the rows"
        )
    return "ids"


def _vectors(problem: Problem, views: Views) -> bool:
    """Whether every access can be of 16 bytes."""
    size = ITEMSIZE[problem["dtype"]]
    heads = [view for name in _HEADS if (view := views[name]) is not None]
    columns = (problem["head_dim"], problem["rotary_dim"] // 2)
    if any([n * size % VECTOR_BYTES for n in columns]):  # new arrays are contiguous
        return False
    if not all([_on_boundaries(view, size) for view in heads]):
        return False
    table = views["table"]
    return table is None or _on_boundaries(table, ITEMSIZE["fp32"])


def _on_boundaries(view: View, size: int) -> bool:
    if 0 in view.shape:
        return True
    if view.pointer % VECTOR_BYTES:
        return False
    steps = zip(view.shape[:-1], view.strides[:-1], strict=True)
    return not any([step * size % VECTOR_BYTES for n, step in steps if n != 1])
