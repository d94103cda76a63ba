"""`fkjit.rope`: rotary position embedding of queries and keys."""

from __future__ import annotations

from typing import Any

import numpy as np

from fkjit.arguments import whole
from fkjit.errors import ParameterError
from fkjit.ops.op.autograd import Differentiable, Tensors, as_tuple
from fkjit.ops.op.casts import casting
from fkjit.ops.op.checks import check_flag
from fkjit.ops.op.node import Node, like
from fkjit.ops.op.op import Op
from fkjit.ops.rope.checks import check, check_columns
from fkjit.ops.rope.frequencies import Scaling
from fkjit.runtime.interop import view


def rope(
    q: Any, k: Any = None, positions: Any = 0, *,
    theta: float | None = None, scaling: Scaling | None = None, table: Any = None,
    rotary_dim: int | None = None, interleaved: bool = False, layout: str = "bhsd",
    inplace: bool = False, out_q: Any = None, out_k: Any = None, inverse: bool = False,
    head_dim: int | None = None,
) -> Any:  # fmt: skip
    """Turn pairs of columns of q and k by angles that grow with the position, in one kernel.

    Args:
        q: fp16, bf16 or fp32; [B, Hq, S, D], or [B, S, Hq, D] with layout="bshd", or flat
            [T, Hq, D]. torch, CuPy, NumPy or any DLPack arrays, of any strides but 1 in the last
            dimension.
        k: the same with any number of heads, or None.
        positions: of the rows. An integer from 0: row s of each batch is at positions + s. An int32
            or int64 array [B]: at positions[b] + s. An array [B, S], [1, S], [S] where S is not
            B, or [T] for flat q: the positions themselves. A position below 0, above 2^31 - 1 or
            behind the table's end in such an array makes its row's turned columns NaN.
        theta: base of the frequencies, theta^(-2i / rotary_dim) radians a token for pair i; 10,000.
        scaling: a `fkjit.Llama3Scaling`, or None. `fkjit.YarnScaling` goes into a table.
        table: of `fkjit.rope_table`, [positions, rotary_dim] fp32 (16 bits are cast), in place of
            theta and scaling. Without one, sines and cosines are computed in the kernel, at any
            position to 1e-7 (fp16 and bf16: to 1e-6).
        rotary_dim: the first columns that turn, even, up to 512; default: all, or the table's.
            The others are copied.
        interleaved: pairs are columns 2i and 2i + 1 (GPT-J), not i and i + rotary_dim / 2
            (GPT-NeoX, Llama).
        inplace: write into q and k, and return them.
        out_q, out_k: where the results are written; default: new contiguous arrays. They may be q
            and k; any other overlap is refused.
        inverse: turn back.
        head_dim: q and k, and out_q and out_k, are [T, heads * head_dim], as a projection leaves
            them, and so are the results.

    Returns:
        q turned, or (q, k) where there is a k; computed in fp32 and rounded once. With torch it has
        gradients with respect to q and k (not in place).

    Raises:
        ParameterError: shapes, strides, positions, options or overlaps that are not as above.
        ArgumentTypeError: not arrays, other or mixed dtypes. DeviceError: mixed devices.
        CaptureError: first call of a geometry under CUDA graph capture; see `fkjit.prepare`.

    An integer among `positions` is part of what is prepared, so that a loop over steps, or a CUDA
    graph that is replayed with other positions, is better served by an array.

    Example:
        >>> q = np.ones((1, 1, 3, 4), np.float32)
        >>> fkjit.rope(q, positions=0)[0, 0, :, 0].round(3)  # cos(s) - sin(s)
        array([ 1.   , -0.301, -1.325], dtype=float32)
    """
    found = _OP(
        *_arranged(
            q, k, positions, theta=theta, scaling=scaling, table=table, rotary_dim=rotary_dim,
            interleaved=interleaved, layout=layout, inplace=inplace, out_q=out_q, out_k=out_k,
            inverse=inverse, head_dim=head_dim,
        )
    )  # fmt: skip
    if head_dim is None:
        return found
    given = (q, k) if inplace else (out_q, out_k)
    joined = [
        x.reshape(x.shape[0], x.shape[1] * x.shape[2]) if to is None else to
        for x, to in zip(as_tuple(found), given, strict=False)
    ]
    return joined[0] if k is None else tuple(joined)


def _heads_apart(name: str, x: Any, head_dim: Any) -> Any:
    """[T, heads * head_dim] as [T, heads, head_dim]: the same memory, as columns are contiguous."""
    if x is None or head_dim is None:
        return x
    head_dim = whole("rope", "head_dim", head_dim, 1, _LAST)
    shape = tuple(getattr(x, "shape", ()))
    if len(shape) != 2 or shape[1] % head_dim:
        raise ParameterError(
            f"rope: {name} has shape {shape}; allowed with head_dim={head_dim}: "
            "[T, heads * head_dim]"
        )
    check_columns(name, view(x, "rope", name))  # else it would be a copy
    return x.reshape(shape[0], shape[1] // head_dim, head_dim)


def _arranged(
    q: Any, k: Any = None, positions: Any = 0, *,
    theta: Any = None, scaling: Any = None, table: Any = None, rotary_dim: Any = None,
    interleaved: Any = False, layout: Any = "bhsd", inplace: Any = False, out_q: Any = None,
    out_k: Any = None, inverse: Any = False, head_dim: Any = None,
) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:  # fmt: skip
    """The call's (inputs, outputs, options)."""
    if check_flag("rope", "inplace", inplace):
        if out_q is not None or out_k is not None:
            raise ParameterError("rope: inplace=True and out_q or out_k; pass one of them")
        out_q, out_k = q, k
    q, k, out_q, out_k = (
        _heads_apart(name, x, head_dim)
        for name, x in (("q", q), ("k", k), ("out_q", out_q), ("out_k", out_k))
    )
    is_start = isinstance(positions, int | np.integer) and not isinstance(positions, bool)
    start, ids = (int(positions), None) if is_start else (0, positions)
    options = (start, theta, as_option(scaling), rotary_dim, interleaved, layout, inverse)
    return (q, k, ids, table), (out_q, out_k), options


def _prepare(*args: Any, **options: Any) -> None:
    """Compile and load what the call with the same arguments needs, without running it."""
    inputs, outputs, chosen = _arranged(*args, **options)
    _OP.prepare([*inputs, *outputs], chosen)


def _with_gradients(
    inputs: tuple[Any, ...], outputs: tuple[Any, ...], options: tuple[Any, ...]
) -> Any:
    if any(given is not None for given in outputs):
        raise ParameterError(
            "rope: q or k requires grad, and the result is written into a given array; call it "
            "under torch.no_grad(), or without inplace, out_q and out_k"
        )
    if getattr(inputs[3], "requires_grad", False):
        raise ParameterError("rope: table requires grad, but has no gradient; pass it detached")
    results = _DIFFERENTIABLE(inputs, options)
    return results[0] if len(results) == 1 else results


def _forward(inputs: Tensors, options: tuple[Any, ...]) -> tuple[Tensors, Tensors]:
    return as_tuple(_OP(inputs, (), options)), inputs[2:]


def _backward(
    saved: Tensors, gradients: Tensors, needed: Tensors, options: tuple[Any, ...]
) -> Tensors:
    """Turning by an angle is a rotation, and its gradient turns back."""
    given = [wanted and dx is not None for dx, wanted in zip(gradients, needed, strict=False)]
    rows = [dx for dx, there in zip(gradients, given, strict=True) if there]
    if not rows:
        return (None,) * len(needed)
    rows = [dx if dx.stride(-1) == 1 else dx.contiguous() for dx in rows]
    back = (*options[:-1], not options[-1])
    turned = iter(as_tuple(_OP((*rows, *[None] * (2 - len(rows)), *saved), (), back)))
    found = [next(turned) if there else None for there in given]
    return (*found, *[None] * (len(needed) - len(found)))


_LAST = (1 << 31) - 1
_DIFFERENTIABLE = Differentiable("Rope", _forward, _backward, once=False)


def as_option(scaling: Any) -> Any:
    """A scaling as an option: its numbers behind the name of its type."""
    return (type(scaling).__name__, *scaling) if isinstance(scaling, tuple) else scaling


def pack_scaling(option: Any) -> str | None:
    """A scaling as the schema of an operator has it: "Llama3Scaling 8.0 1.0 4.0 8192"."""
    return None if option is None else " ".join([str(part) for part in option])


def unpack_scaling(text: str | None) -> Any:
    """What `pack_scaling` was given."""
    if text is None:
        return None
    name, *numbers = text.split()
    return (name, *(float(n) if set(n) & set(".en") else int(n) for n in numbers))


def _pack(start: int, theta: Any, scaling: Any, *rest: Any) -> tuple[Any, ...]:
    return (start, theta, pack_scaling(scaling), *rest)


def _unpack(start: int, theta: Any, text: Any, *rest: Any) -> tuple[Any, ...]:
    return (start, theta, unpack_scaling(text), *rest)


OPTIONS = "float? theta, str? scaling, int? rotary_dim, bool interleaved"
_OP = Op(
    "rope",
    inputs=("q", "k", "positions", "table"),
    outputs=("out_q", "out_k"),
    check=casting(lambda: _OP, check, {"table": "fp32"}),
    optional=("k", "positions", "table"),
    in_place=(("out_q", "q"), ("out_k", "k")),
    autograd=_with_gradients,
    lengths=1,
    node=Node(
        lambda q, k, *rest: [like(q)] if k is None else [like(q), like(k)],
        f"int start, {OPTIONS}, str layout, bool inverse", None, pack=_pack, unpack=_unpack,
    ),
)  # fmt: skip
rope.prepare = _prepare  # type: ignore[attr-defined]
