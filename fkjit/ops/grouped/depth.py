"""The op behind gradients of grouped weights: products of rows that are sorted by expert."""

from __future__ import annotations

from typing import Any

from fkjit.ops.grouped.options import INPUTS, DepthOptions, GroupedOptions, Views, request
from fkjit.ops.op.node import Node
from fkjit.ops.op.op import Op, Output, Request
from fkjit.runtime.interop import ITEMSIZE


def _check(views: Views, said: DepthOptions) -> Request:
    """Arrays are our own: x [places, m], weight [places, n], contiguous; offsets [experts + 1]."""
    x, weight, offsets = views["x"], views["weight"], views["offsets"]
    assert x is not None and weight is not None and offsets is not None
    (k, m), n, dtype = x.shape, weight.shape[1], x.dtype
    experts, chunk = offsets.shape[0] - 1, 16 // ITEMSIZE[dtype]
    problem: dict[str, Any] = {
        "m": m, "n": n, "k": k, "experts": experts, "dtype": dtype, "out_dtype": dtype,
        "groups": "DEPTH", "block_size": said.block_size, "activation": "none", "gate": False,
        "pre": False, "scale": 1.0, "x_layout": "km", "weight_layout": "kn", "residual": False,
        "bias": False, "gather": False, "x_stride": m, "weight_stride": n, "out_stride": n,
        "residual_stride": n,
        "aligned": m % chunk == 0 and n % chunk == 0, "aligned_out": n % chunk == 0,
    }  # fmt: skip
    outputs = {"out": Output((experts, m, n), dtype), "pre": None}
    whole = GroupedOptions(said.block_size, block=said.block, impl=said.impl)
    return request({name: views[name] for name in INPUTS}, outputs, problem, whole)


DEPTH = Op(
    "grouped_linear (dweight)", inputs=INPUTS, outputs=("out", "pre"),
    check=_check, options=DepthOptions, optional=("bias", "residual"),
    node=Node(
        lambda x, weight, bias, residual, offsets, *rest: [
            x.new_empty(offsets.shape[0] - 1, x.shape[1], weight.shape[1])
        ],
        "int block_size, int[]? block=None, str impl='auto'", 1, "grouped_linear_dweight",
    ),
)  # fmt: skip
