"""The op behind the gradients of a product: dz and dbias out of dy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fkjit import tuning
from fkjit.ops.gemm import kernels_backward as kernels
from fkjit.ops.gemm.epilogue import kernel_for
from fkjit.ops.op.node import Node
from fkjit.ops.op.op import Launch, Op, Output, Request, arch_of
from fkjit.runtime.device import multiprocessors
from fkjit.runtime.interop import CPU, ITEMSIZE, View


class ActivationOptions(NamedTuple):
    """activation: the kernels' text of it. dz, dbias: whether they are wanted. y: whether the
    product's result is, too, made again: of a gate."""

    activation: str
    gate: bool
    dz: bool
    dbias: bool
    y: bool = False


def _check(views: Mapping[str, View | None], said: ActivationOptions) -> Request:
    """Arrays are our own: dy [m, n] of rows at one distance, pre [m, n or 2 n] contiguous or None;
    `like` has the dtype of dz and dbias."""
    dy, like = views["dy"], views["like"]
    assert dy is not None and like is not None
    (m, n), dtype = dy.shape, like.dtype
    wide = 2 * n if said.gate else n
    problem: dict[str, Any] = {
        "m": m, "n": n, "dtype": dtype, "out_dtype": dy.dtype, "dy_stride": dy.strides[0],
        "activation": said.activation, "gate": said.gate, "pre": views["pre"] is not None,
        "dz": said.dz, "dbias": said.dbias, "y": said.y,
    }  # fmt: skip
    if dy.device != CPU:
        problem["multiprocessors"] = multiprocessors(dy.device)
    params = {
        **{name: problem[name] for name in ("dtype", "out_dtype", "activation", "gate")},
        "vector": _is_vector(dy, views["pre"], dtype), **kernels.layout(n),
    }  # fmt: skip
    spec = kernel_for(kernels.BACKWARD, said.activation)
    params = tuning.tuned(spec, params, problem, arch_of(dy))
    outputs = {
        "dz": Output((m, wide), dtype) if said.dz else None,
        "dbias": Output((wide,), dtype) if said.dbias else None,
        "y": Output((m, n), dtype) if said.y else None,
    }
    scratch = kernels.scratch(params, problem)
    return Request(dict(views), outputs, (Launch(spec, params, problem),), *scratch)


def _is_vector(dy: View, pre: View | None, dtype: str) -> bool:
    """Whether all rows start on 16-byte boundaries and are whole vectors of eight columns."""
    if dy.shape[1] % kernels.SIZE or dy.strides[0] * ITEMSIZE[dy.dtype] % 16:
        return False
    return not (dy.pointer % 16 or (pre is not None and pre.pointer % 16))


def _fake(
    dy: Any, pre: Any, like: Any, activation: str, gate: bool, dz: bool, dbias: bool,
    y: bool = False,
) -> list[Any]:  # fmt: skip
    m, n = dy.shape
    wide = 2 * n if gate else n
    wanted = (((m, wide), dz), ((wide,), dbias), ((m, n), y))
    return [like.new_empty(shape) for shape, made in wanted if made]


ACTIVATION = Op(
    "linear (backward)",
    inputs=("dy", "pre", "like"),
    outputs=("dz", "dbias", "y"),
    check=_check,
    options=ActivationOptions,
    optional=("pre",),
    node=Node(
        _fake, "str activation, bool gate, bool dz, bool dbias, bool y=False", None,
        "linear_backward_activation",
    ),
)  # fmt: skip
