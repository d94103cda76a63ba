"""`fkjit.grouped_linear`: a product with a weight for each expert, on `moe_regroup`'s layout."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.ops.gemm.epilogue import ACTIVATIONS
from fkjit.ops.grouped import select
from fkjit.ops.grouped.kernels import LEAST_BLOCK
from fkjit.ops.grouped.options import CALL, INPUTS, GroupedOptions, Views, request
from fkjit.ops.moe.checks import check_dense
from fkjit.ops.moe.combine import moe_combine
from fkjit.ops.moe.groups import MoeGroups
from fkjit.ops.moe.permute import moe_permute
from fkjit.ops.op.autograd import autograd_of
from fkjit.ops.op.checks import check_dtype, check_flag, check_same_dtype, check_shape
from fkjit.ops.op.node import Node
from fkjit.ops.op.op import Op, Output, Request
from fkjit.ops.op.shapes import rows_of
from fkjit.runtime import interop
from fkjit.runtime.interop import ITEMSIZE, View

WEIGHT_LAYOUTS = ("nk", "kn")


def grouped_linear(
    x: Any,
    weight: Any,
    groups: MoeGroups,
    bias: Any = None,
    *,
    activation: str | None = None,
    gate: bool = False,
    gather: bool = False,
    weights: Any = None,
    block: tuple[int, ...] | None = None,
    impl: str = "auto",
    weight_layout: str = "nk",
    save_pre_activation: bool = True,
) -> Any:
    """activation(x weight[e]ᵀ + bias[e]) for the rows of every expert e, in one kernel.

    Args:
        x: fp16, bf16 or fp32 [places, K]: a row for each place of `groups`, as `moe_permute` makes
            them; with gather=True [tokens, K]. torch, CuPy, NumPy or any DLPack array.
        weight: [experts, N, K], or [experts, K, N] with weight_layout="kn"; of x's dtype,
            contiguous.
        groups: what `moe_regroup` or `moe_route_and_regroup` made, with a block_size that is a
            multiple of 64: rows of a tile have one expert. How many rows experts have is read when
            the kernel runs: the host does not wait, any counts serve one CUDA graph.
        bias: [experts, N], contiguous, of x's dtype.
        activation: "gelu" (exact), "gelu_tanh", "silu", "relu", or None.
        gate: weight and bias hold gate and, behind it, up, N each; the result is
            activation(gate) * up, as in SwiGLU (activation="silu").
        gather: x has a row for each token; `moe_permute` brings them to their places first.
        weights: fp32 [tokens, top_k]: `moe_combine` puts the results of each token together.
        block: the tile; default: the fastest by estimate.
        impl: "auto", or a kernel: "wgmma" (Hopper), "mma" (tensor cores), "fma" (exact fp32).
        weight_layout: "nk" or "kn".
        save_pre_activation: keep for gradients what the activation is of; False: compute it again.

    Returns:
        [places, N] in x's dtype and framework; with `weights` [tokens, N]. Rows behind the last
        expert's tiles (from groups.num_tokens_post_padded on) are not written. With torch it has
        gradients of x, weight, bias and weights, the same bits at every call. Products of places
        that no token has count towards the gradient of weight: rows of zeros, as `moe_permute`
        makes them, add nothing.

    Raises:
        ParameterError: shapes, strides, options. ArgumentTypeError: not arrays, other or mixed
        dtypes, no MoeGroups. DeviceError: mixed devices. CaptureError: first call of a geometry
        under CUDA graph capture; see `fkjit.prepare`.

    fp32 accumulation, rounded once. Source of the layout: vLLM's fused_moe.

    Example:
        >>> ids = np.array([[0], [1], [0]], np.int32)  # an expert for each of three tokens
        >>> groups = fkjit.moe_regroup(ids, num_experts=2, block_size=64)
        >>> x, weight = np.ones((3, 16), np.float32), np.ones((2, 8, 16), np.float32)
        >>> fkjit.grouped_linear(x, weight, groups, gather=True).shape[1]
        8
    """
    groups = _groups(groups)
    said = (activation, gate, block, impl, weight_layout, save_pre_activation)
    if check_flag(CALL, "gather", gather):
        x = moe_permute(x, groups)
    y = _GROUPED((x, weight, bias, None, groups.offsets), (), (_block_size(groups), *said))
    return y if weights is None else moe_combine(y, groups, weights)


def _groups(groups: Any) -> MoeGroups:
    if not isinstance(groups, MoeGroups):
        raise ArgumentTypeError(
            f"{CALL}: groups is a {type(groups).__qualname__}; allowed: the MoeGroups of "
            "moe_regroup or moe_route_and_regroup"
        )
    return groups


def _block_size(groups: MoeGroups) -> int:
    """What experts' places are a multiple of; 0 where there are none."""
    tiles = groups.expert_ids.shape[0]
    return int(groups.sorted_token_ids.shape[0] // tiles) if tiles else 0


# ------------------------------------------------------------------ checks


def _check(views: Views, said: GroupedOptions, *, pre: bool = False) -> Request:
    x, weight = views["x"], views["weight"]
    assert x is not None and weight is not None
    _check_options(said)
    dtype = check_same_dtype(CALL, {"x": x, "weight": weight, "bias": views["bias"]})
    sizes = _sizes(x, weight, said)
    m, n, wide = sizes["m"], sizes["n"], sizes["n"] * (2 if said.gate else 1)
    _check_bias(views["bias"], sizes["experts"], wide)
    _check_groups(views["offsets"], m, sizes["experts"], said.block_size)
    by_k = said.weight_layout == "nk"
    problem: dict[str, Any] = {
        **sizes, "dtype": dtype, "out_dtype": dtype, "groups": "ROWS",
        "block_size": said.block_size,
        "activation": said.activation or "none", "gate": said.gate, "pre": pre, "scale": 1.0,
        "x_layout": "mk", "weight_layout": said.weight_layout, "residual": False,
        "bias": views["bias"] is not None, "x_stride": rows_of(CALL, "x", x)[2],
        "weight_stride": sizes["k"] if by_k else wide, "out_stride": n, "residual_stride": n,
    }  # fmt: skip
    chunk = 16 // ITEMSIZE[dtype]
    halves = by_k or n % chunk == 0
    problem["aligned"] = halves and not (
        problem["x_stride"] % chunk or sizes["k"] % chunk or problem["weight_stride"] % chunk
        or x.pointer % 16 or weight.pointer % 16
    )  # fmt: skip
    problem["aligned_out"] = n % chunk == 0
    outputs = {
        "out": Output((m, n), dtype), "pre": Output((m, wide), dtype) if pre else None,
    }  # fmt: skip
    return request({name: views[name] for name in INPUTS}, outputs, problem, said)


def _check_options(said: GroupedOptions) -> None:
    if said.activation is not None and said.activation not in ACTIVATIONS:
        raise ParameterError(
            f"{CALL}: activation={said.activation!r} is not None or one of {', '.join(ACTIVATIONS)}"
        )
    check_flag(CALL, "gate", said.gate)
    check_flag(CALL, "save_pre_activation", said.save_pre_activation)
    for name, allowed in (("impl", select.IMPLEMENTATIONS), ("weight_layout", WEIGHT_LAYOUTS)):
        if (given := getattr(said, name)) not in allowed:
            raise ParameterError(f"{CALL}: {name}={given!r} is not one of {', '.join(allowed)}")


def _sizes(x: View, weight: View, said: GroupedOptions) -> dict[str, int]:
    named = "[experts, N, K]" if said.weight_layout == "nk" else "[experts, K, N]"
    if len(x.shape) != 2 or len(weight.shape) != 3 or 0 in weight.shape:
        raise ParameterError(
            f"{CALL}: x has shape {tuple(x.shape)}, weight {tuple(weight.shape)}; allowed: x "
            f"[places, K], weight {named}"
        )
    experts, wide, k = weight.shape
    wide, k = (wide, k) if said.weight_layout == "nk" else (k, wide)
    if x.shape[1] != k:
        raise ParameterError(
            f"{CALL}: x has {x.shape[1]} columns, weight {tuple(weight.shape)} is of {k}; allowed: "
            f"weight {named} (weight_layout={said.weight_layout!r})"
        )
    if said.gate and wide % 2:
        raise ParameterError(
            f"{CALL}: gate=True, but weight {tuple(weight.shape)} has {wide} outputs; allowed: an "
            "even number, gate first, then up"
        )
    _, rows, columns = weight.shape
    if tuple(weight.strides) != (rows * columns, columns, 1):
        raise ParameterError(
            f"{CALL}: weight has strides {tuple(weight.strides)}; pass a contiguous weight"
        )
    n = wide // 2 if said.gate else wide
    return {"m": x.shape[0], "n": n, "k": k, "experts": experts}


def _check_bias(bias: View | None, experts: int, wide: int) -> None:
    if bias is not None:
        check_shape(CALL, "bias", bias, (experts, wide), "[experts, N], here")
        check_dense(CALL, "bias", bias)


def _check_groups(offsets: View | None, places: int, experts: int, block: int) -> None:
    assert offsets is not None
    check_dtype(CALL, "groups.offsets", offsets, ("int32",))
    if offsets.shape[0] != experts + 1:
        raise ParameterError(
            f"{CALL}: groups are of {offsets.shape[0] - 1} experts, weight is of {experts}"
        )
    if block % LEAST_BLOCK or (block and places % block):
        raise ParameterError(
            f"{CALL}: x has {places} rows, groups a block_size of {block}; allowed: a row for each "
            f"place, and groups made with a block_size that is a multiple of {LEAST_BLOCK}"
        )


# ------------------------------------------------------------------ the op

_OPTIONS = (
    "int block_size, str? activation, bool gate, int[]? block, str impl, str weight_layout, "
    "bool save_pre_activation"
)


def _fake(x: Any, weight: Any, *rest: Any) -> list[Any]:
    said = GroupedOptions(*rest[3:])
    wide = weight.shape[1 if said.weight_layout == "nk" else 2]
    return [x.new_empty(x.shape[0], wide // 2 if said.gate else wide)]


def _fake_with_pre(x: Any, weight: Any, *rest: Any) -> list[Any]:
    wide = weight.shape[1 if GroupedOptions(*rest[3:]).weight_layout == "nk" else 2]
    return [*_fake(x, weight, *rest), x.new_empty(x.shape[0], wide)]


def _packed(*options: Any) -> tuple[Any, ...]:
    """Options as the operator's schema has them: a tile is a list."""
    said = GroupedOptions(*options)
    return tuple(said._replace(block=None if said.block is None else list(said.block)))


def _unpacked(*options: Any) -> tuple[Any, ...]:
    said = GroupedOptions(*options)
    return tuple(said._replace(block=None if said.block is None else tuple(said.block)))


def _op(pre: bool, node: Node, autograd: Callable[..., Any] | None = None) -> Op:
    return Op(
        CALL, inputs=INPUTS, outputs=("out", "pre"), check=partial(_check, pre=pre),
        options=GroupedOptions, optional=("bias", "residual"), autocast=3, node=node,
        autograd=autograd,
    )  # fmt: skip


def _with_gradients(inputs: Any, outputs: Any, options: Any) -> Any:
    return _differentiable()(inputs, outputs, options)


@lru_cache(maxsize=1)
def _differentiable() -> Callable[..., Any]:
    return autograd_of(CALL, import_module(_AUTOGRAD).differentiable(_GROUPED, _WITH_PRE))


_AUTOGRAD = "fkjit.ops.grouped.autograd"  # imported where a gradient is wanted
_GROUPED = _op(False, Node(_fake, _OPTIONS, 1, None, _packed, _unpacked), _with_gradients)
_WITH_PRE = _op(True, Node(_fake_with_pre, _OPTIONS, 2, f"{CALL}_with_pre", _packed, _unpacked))

_SIGNATURE = inspect.signature(grouped_linear)


def _prepare(*args: Any, **named: Any) -> None:
    """Compile and load what the call with the same arguments needs, without running it."""
    bound = _SIGNATURE.bind(*args, **named)
    bound.apply_defaults()
    given = bound.arguments
    groups, x = _groups(given["groups"]), given["x"]
    said = (given[name] for name in GroupedOptions._fields[1:])
    options = (_block_size(groups), *said)
    if given["gather"]:
        moe_permute.prepare(x, groups)  # type: ignore[attr-defined]
        x = _like(x, groups.sorted_token_ids.shape[0], x.shape[1])
    arrays = (x, given["weight"], given["bias"], None, groups.offsets)
    _GROUPED.prepare((*arrays, None, None), options)
    if given["weights"] is not None:
        wide = given["weight"].shape[1 if given["weight_layout"] == "nk" else 2]
        y = _like(x, x.shape[0], wide // 2 if given["gate"] else wide)
        moe_combine.prepare(y, groups, given["weights"])  # type: ignore[attr-defined]


def _like(x: Any, *shape: int) -> Any:
    """An array of the same framework."""
    seen = interop.view(x, CALL, "x")
    return interop.empty(seen, shape, seen.dtype)


grouped_linear.prepare = _prepare  # type: ignore[attr-defined]
