"""The gradients of a gated activation in the way out of the product that they start with.

y = act(gate) * up goes through a product, y weight^T; of its gradient x

    dy = x weight        d_gate = dy * up * act'(gate)        d_up = dy * act(gate)

so dy is not written and read again. The product for Hopper, with another epilogue
(templates/gemm/slopes.cuh). A problem is a product's; arrays are x, weight, pre (gate | up,
[m, 2 n]) -> out (y, [m, n]), dz (d_gate | d_up).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from fkjit.arch import Arch
from fkjit.ops.gemm.cost import SMS, Shape
from fkjit.ops.gemm.kernels_sm90 import MAX_SHARED, WGMMA_ALL
from fkjit.ops.gemm.select import estimate
from fkjit.ops.op.checks import check_dtype, check_output
from fkjit.ops.op.op import Launch, Op, Output, Request, arch_of
from fkjit.runtime.device import multiprocessors
from fkjit.runtime.interop import CPU, View, view
from fkjit.spec import KernelSpec, Params, Problem, register

_CALL = "gated_slopes"
TILES = ((128, 128), 1), ((128, 128), 2)  # tile, cluster
_FIXED = {
    "x_layout": "mk", "gate": False, "residual": False, "pre": True, "tma_store": True,
    "schedule": "pingpong", "split": 1, "shares": False,
}  # fmt: skip
_CHUNK = 8  # elements of 16 bytes


def _whole(params: Params) -> dict[str, Any]:
    """The parameters that a product has."""
    return {**params, **_FIXED, "out_dtype": params["dtype"]}


def _derive(params: Params) -> dict[str, Any]:
    shown = ("gate", "residual", "pre", "tma_store", "schedule", "split", "shares")
    return {
        **WGMMA_ALL.derive(_whole(params)), "slopes": True, "out_dtype": params["dtype"],
        **{name: _FIXED[name] for name in shown}, "flags": ", elem_t* dz",
    }  # fmt: skip


def _illegal(params: Params) -> str | None:
    if (params["block"], params["cluster"]) not in TILES:
        return "is never the fastest"
    if params["activation"] == "none":
        return "is for a gate"
    return WGMMA_ALL.illegal(_whole(params))


def _arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {**WGMMA_ALL.arguments(_whole(params), problem, arrays), "dz": arrays["dz"]}


_OWN = {
    "block": tuple(dict.fromkeys(tile for tile, _ in TILES)),
    "activation": ("silu", "gelu", "gelu_tanh", "relu"),
}
_PARAMS = tuple(
    replace(p, values=_OWN.get(p.name, p.values))
    for p in WGMMA_ALL.params
    if p.name not in (*_FIXED, "out_dtype")
)
_SHOWN = tuple(
    {"dtype": "bf16", "weight_layout": layout, "activation": "silu", "block": tile,
     "cluster": cluster}
    for (tile, cluster), layout in zip(TILES, ("kn", "nk"), strict=True)
)  # fmt: skip


def _spec(ahead: tuple[Any, ...] = ()) -> KernelSpec:
    return replace(
        WGMMA_ALL,
        op=_CALL,
        doc="products for Hopper behind which a gated activation's gradients are made",
        params=_PARAMS,
        derive=_derive,
        illegal=_illegal,
        ahead=ahead,
        shared_layout=lambda params: (WGMMA_ALL.shared_layout or (lambda p: []))(_whole(params)),
        shared_bytes=lambda params: WGMMA_ALL.shared_bytes(_whole(params)),
        block=lambda params: WGMMA_ALL.block(_whole(params)),
        grid=lambda params, problem: WGMMA_ALL.grid(_whole(params), problem),
        arguments=_arguments,
        verification="fkjit.ops.gemm.cases_slopes:SLOPES",
    )


SLOPES_ALL = _spec()
SLOPES = register(_spec(_SHOWN))


class SlopesOptions(NamedTuple):
    """What a call says besides its arrays."""

    activation: str
    weight_layout: str = "kn"


def takes(x: Any, weight: Any, pre: Any) -> bool:
    """Whether there is a kernel for these tensors: 16 bits, contiguous, rows of whole 16 bytes; on
    Hopper."""
    for one in (x, weight, pre):
        if one.element_size() != 2 or not one.is_contiguous() or one.data_ptr() % 16:
            return False
        if one.dtype is not x.dtype or any(n % _CHUNK for n in one.shape[-1:]):
            return False
    arch = arch_of(view(x, _CALL, "x"))
    return arch.features >= WGMMA_ALL.features({}) and arch.shared_per_block >= MAX_SHARED


def gated_slopes(x: Any, weight: Any, pre: Any, activation: str, dz: Any = None) -> tuple[Any, Any]:
    """(y, d_gate | d_up) of a gate's gradient x weight, without gradients of their own.

    Args:
        x: [m, k], weight: [k, n], pre: [m, 2 n], gate | up: as `takes` has them.
        dz: where d_gate | d_up is written; it may be pre.
    """
    return _OP((x, weight, None, None, pre), (None, dz), tuple(SlopesOptions(activation)))


def _check(views: Mapping[str, View | None], said: SlopesOptions) -> Request:
    """Arrays are our own."""
    x, weight, pre, dz = (views[name] for name in ("x", "weight", "pre", "dz"))
    assert x is not None and weight is not None and pre is not None
    (m, k), n = x.shape, weight.shape[1]
    for name, one in (("weight", weight), ("pre", pre)):
        check_dtype(_CALL, name, one, (x.dtype,))
    check_output(_CALL, dz, pre.shape, x.dtype, "dz")
    problem = {
        "m": m, "n": n, "k": k, "dtype": x.dtype, "out_dtype": x.dtype, "x_layout": "mk",
        "weight_layout": said.weight_layout, "activation": said.activation, "gate": False,
        "scale": 1.0, "residual": False, "pre": True, "aligned": True, "aligned_out": True,
        "bias": False, "precision": "ieee", "x_stride": k, "weight_stride": n, "out_stride": n,
        "residual_stride": n,
    }  # fmt: skip
    if x.device != CPU:
        problem["multiprocessors"] = multiprocessors(x.device)
    outputs = {"out": Output((m, n), x.dtype), "dz": Output(tuple(pre.shape), x.dtype, dz)}
    params = _chosen(problem, arch_of(x))
    return Request(
        {name: views[name] for name in _INPUTS},
        outputs,
        (Launch(SLOPES_ALL, params, problem),) if m else (),
    )


def _chosen(problem: Problem, arch: Arch) -> dict[str, Any]:
    """The tile of the least estimated cost."""
    given = {**Shape._field_defaults, **problem, "sms": problem.get("multiprocessors", SMS)}
    shape = Shape(**{name: given[name] for name in Shape._fields})
    fixed = {name: problem[name] for name in ("dtype", "weight_layout", "activation")}
    tiles = [{**fixed, "block": tile, "cluster": cluster} for tile, cluster in TILES]
    return min(tiles, key=lambda params: estimate("wgmma", shape, _whole(params), arch))


_INPUTS = ("x", "weight", "bias", "residual", "pre")  # a product's, of which two are never given
_OP = Op(
    _CALL, inputs=_INPUTS, outputs=("out", "dz"), check=_check, options=SlopesOptions,
    optional=("bias", "residual"), in_place=(("dz", "pre"),),
)  # fmt: skip
